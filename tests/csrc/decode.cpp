// Runs every step of csrc/decode.h on ragged sizes, in arrays of exactly the documented size, so that sanitizers notice
// any access outside of them. Also compares the results of one, two and three threads bit by bit.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "decode_steps.h"

namespace muonssm {
namespace MUONSSM_ISA {
int64_t decode_tokens(const DecodeArguments&);
}
}  // namespace muonssm
using namespace muonssm;

static std::mt19937 generator(0);
static std::vector<std::unique_ptr<float[]>> arrays;
static std::vector<std::unique_ptr<uint16_t[]>> halves;

static int64_t rounded(int64_t x, int64_t unit) { return (x + unit - 1) / unit * unit; }

static float* numbers(int64_t count, double low = -1, double high = 1) {
    arrays.emplace_back(new float[std::size_t(count)]);
    std::uniform_real_distribution<double> uniform(low, high);
    for (int64_t i = 0; i < count; ++i) arrays.back()[std::size_t(i)] = float(uniform(generator));
    return arrays.back().get();
}

// A matrix in one of the formats; tiles have any bits that are finite numbers.
static Matrix matrix(int64_t format, int64_t rows, int64_t columns, bool bias = false) {
    Matrix a{format, rows, nullptr, nullptr, bias ? numbers(rows) : nullptr};
    if (format == FLOAT32_ROWS) {
        a.data = numbers(rows * columns, -.3, .3);
        return a;
    }
    const int64_t size = rounded(rows, TILE) * rounded(columns, BLOCK);
    const int64_t stored = format == BFLOAT16_TILES ? size : size / 2;
    halves.emplace_back(new uint16_t[std::size_t(stored)]);
    for (int64_t i = 0; i < stored; ++i)
        halves.back()[std::size_t(i)] = format == BFLOAT16_TILES
                                            ? uint16_t(0x3d00 + generator() % 0x80 + (generator() % 2 << 15))
                                            : uint16_t(generator());
    a.data = halves.back().get();
    if (format == INT8_TILES) {
        halves.emplace_back(new uint16_t[std::size_t(size / BLOCK)]);
        for (int64_t i = 0; i < size / BLOCK; ++i) halves.back()[std::size_t(i)] = 0x3a80;
        a.scales = halves.back().get();
    }
    return a;
}

struct Sizes {
    int64_t width, vocabulary, heads, d, m, N, K, mlp, format, batch, length;
};

struct Model {
    std::vector<DecodeStep> steps;
    std::vector<std::shared_ptr<void>> kept;
    template <class T> void add(int64_t kind, const T& step) {
        kept.push_back(std::make_shared<T>(step));
        steps.push_back({kind, kept.back().get()});
    }
};

// Buffers of activations have rows of whole cache lines.
struct Rows {
    float* data;
    int64_t step;
};
static Rows rows(int64_t count, int64_t width) {
    const int64_t step = rounded(width, 16);
    return {numbers(count * step), step};
}

static ProjectStep projection(Rows in, int64_t columns, const std::vector<Matrix>& matrices, Rows out,
                              const float* norm, int64_t group) {
    ProjectStep p{};
    p.columns = columns, p.count = int64_t(matrices.size()), p.group = group, p.eps = 1e-5;
    p.x = in.data, p.x_step = in.step, p.norm = norm, p.out = out.data, p.out_step = out.step;
    for (std::size_t i = 0; i < matrices.size(); ++i) p.matrices[i] = matrices[i];
    return p;
}

static ConvolveStep convolution(const Sizes& z, Rows in, int64_t channels, Rows out, bool by_channel) {
    ConvolveStep c{};
    c.channels = channels, c.K = z.K, c.x_step = in.step, c.out_step = out.step, c.x = in.data, c.out = out.data;
    c.weight = numbers(z.K * channels), c.bias = numbers(channels),
    c.tail = numbers(z.batch * (z.K - 1) * channels + 1);
    c.tail_sequence = (z.K - 1) * channels;
    c.tail_step = by_channel ? 1 : channels, c.tail_channel = by_channel ? z.K - 1 : 1;
    return c;
}

// One layer of each kind: every rule of the matrix memory, both scans, attention, an MLP; then the head.
static Model build(const Sizes& z) {
    Model model;
    const int64_t n = z.batch * z.length, D = z.width, H = z.heads, values = H * z.d, keys = H * z.m;
    const Rows h = rows(n, D), angles = rows(n, 8);
    const float* norm = numbers(D);
    EmbedStep embed{};
    embed.columns = D, embed.angles = 4, embed.scaling = 1, embed.table = matrix(z.format, z.vocabulary, D);
    embed.frequencies = numbers(4), embed.out = h.data, embed.out_step = h.step;
    embed.rotary = angles.data, embed.rotary_step = angles.step;
    model.add(EMBED, embed);
    for (int64_t rule = DELTA; rule <= MOMENTUM_DELTA; ++rule) {
        const int64_t channels = 2 * keys + values, width = channels + values + 6 * H;
        const Rows p = rows(n, width), c = rows(n, channels), y = rows(n, values);
        model.add(PROJECT, projection(h, D, {matrix(z.format, width, D, true)}, p, norm, D));
        const ConvolveStep conv = convolution(z, p, channels, c, rule % 2);
        model.add(CONVOLVE, conv);
        MemoryStep a{};
        a.heads = H, a.key_heads = H, a.d = z.d, a.m = z.m, a.rule = rule, a.unit = rule != MAMBA2,
        a.residual = rule == 4;
        a.gamma_kind = rule % 3, a.gamma = .9, a.eta = rule == MAMBA2 ? 0 : 1, a.q_scale = .5, a.e_scale = .2;
        a.least = rule == MOMENTUM_DELTA ? -2 : 0, a.most = 10, a.write = {rule % 2 ? 1 : -1, 0, .6, 1, 1e-6};
        a.q_step = a.k_step = a.v_step = c.step, a.z_step = a.p_step = a.logits_step = p.step, a.y_step = y.step;
        a.S_step = a.M_step = H * z.d * z.m;
        const int64_t gates = channels + values;
        a.a_column = gates, a.b_column = gates + H, a.m_column = gates + 2 * H, a.e_column = gates + 3 * H;
        a.gamma_column = gates + 4 * H;
        a.q = c.data, a.k = c.data + keys, a.v = c.data + 2 * keys, a.p = p.data, a.logits = p.data + gates + 5 * H;
        a.gate_bias = numbers(2 * H), a.dt_bias = numbers(H), a.A_log = numbers(H), a.gamma_bias = numbers(H);
        a.D_log = rule == MOMENTUM_DELTA ? numbers(H) : nullptr;
        a.log_factor = numbers(H), a.Mu_log = numbers(H), a.mu_bias = numbers(H);
        if (rule == MAMBA2 || rule == LONGHORN) {
            a.z = p.data + channels, a.skip_per_head = rule == MAMBA2, a.skip = numbers(rule == MAMBA2 ? H : values);
        }
        a.S = numbers(z.batch * a.S_step), a.M = numbers(z.batch * a.M_step), a.y = y.data;
        model.add(REMEMBER, a);
        ProjectStep out = projection(y, values, {matrix(z.format, D, values)}, h, a.z ? nullptr : numbers(z.d), z.d);
        out.add = 1;
        if (!a.z) out.gate = p.data + channels, out.gate_step = p.step;
        model.add(PROJECT, out);
    }
    for (bool longhorn : {false, true}) {
        const Rows p = rows(n, 2 * values + 1), c = rows(n, values), small = rows(n, 3 + 2 * z.N), dt = rows(n, values),
                   y = rows(n, values);
        model.add(PROJECT, projection(h, D, {matrix(z.format, 2 * values, D), matrix(z.format, 1, D)}, p, norm, D));
        model.add(CONVOLVE, convolution(z, p, values, c, longhorn));
        model.add(PROJECT, projection(c, values, {matrix(z.format, 3 + 2 * z.N, values)}, small, nullptr, 0));
        ProjectStep step = projection(small, 3, {matrix(z.format, values, 3, true)}, dt, nullptr, 0);
        step.activation = longhorn ? NO_ACTIVATION : SOFTPLUS;
        model.add(PROJECT, step);
        ScanStep a{};
        a.D = values, a.N = z.N, a.gamma_kind = longhorn ? STEP_GAMMA : FIXED_GAMMA, a.gamma_column = 2 * values;
        a.x_step = c.step, a.dt_step = dt.step, a.B_step = small.step, a.z_step = a.p_step = p.step, a.y_step = y.step;
        a.S_step = a.M_step = values * z.N, a.gamma = .9, a.write = {1, 0, .6, 1, 1e-6};
        a.x = c.data, a.dt = dt.data, a.B = small.data + 3, a.C = small.data + 3 + z.N, a.z = p.data + values,
        a.p = p.data;
        a.A = longhorn ? nullptr : numbers(values * z.N, -2, -.1), a.gamma_bias = numbers(1), a.skip = numbers(values);
        a.S = numbers(z.batch * a.S_step), a.M = numbers(z.batch * a.M_step), a.y = y.data;
        model.add(SCAN, a);
        ProjectStep out = projection(y, values, {matrix(z.format, D, values)}, h, nullptr, 0);
        out.add = 1;
        model.add(PROJECT, out);
    }
    const Rows p = rows(n, (2 * H + 2 * H) * 8), y = rows(n, 2 * H * 8), u = rows(n, z.mlp);
    model.add(PROJECT,
              projection(h, D, {matrix(z.format, 2 * H * 8, D), matrix(z.format, H * 8, D), matrix(z.format, H * 8, D)},
                         p, norm, D));
    AttendStep a{};
    a.heads = 2 * H, a.key_heads = H, a.size = 8, a.window = 4, a.past = 5, a.p_step = p.step,
    a.rotary_step = angles.step;
    a.y_step = y.step, a.cache_head = (5 + z.length) * 8, a.cache_sequence = H * a.cache_head, a.scale = .3;
    a.p = p.data, a.rotary = angles.data, a.y = y.data;
    a.keys = numbers(z.batch * a.cache_sequence), a.values = numbers(z.batch * a.cache_sequence);
    model.add(ATTEND, a);
    ProjectStep out = projection(y, 2 * H * 8, {matrix(z.format, D, 2 * H * 8)}, h, nullptr, 0);
    out.add = 1;
    model.add(PROJECT, out);
    ProjectStep pair = projection(h, D, {matrix(z.format, z.mlp, D), matrix(z.format, z.mlp, D)}, u, norm, D);
    pair.swiglu = 1;
    model.add(PROJECT, pair);
    ProjectStep down = projection(u, z.mlp, {matrix(z.format, D, z.mlp)}, h, nullptr, 0);
    down.add = 1;
    model.add(PROJECT, down);
    ProjectStep head = projection(h, D, {matrix(z.format, z.vocabulary, D)}, {nullptr, z.vocabulary}, norm, D);
    head.last = 1;
    model.add(PROJECT, head);
    return model;
}

// Build the same model, run it twice in a row, and return the last logits.
static std::vector<float> run(const Sizes& z, int64_t threads, int64_t keep) {
    generator.seed(1);
    arrays.clear();
    halves.clear();
    const Model model = build(z);
    const int64_t n = z.batch * z.length, widest = std::max(z.width, std::max(z.mlp, z.heads * std::max(z.d, z.m) * 2));
    const int64_t scratch = n * (2 * rounded(widest, 64) + 64) + 64;
    const std::size_t count = std::size_t(n);
    std::vector<int64_t> tokens(count), positions(count, 3);
    std::vector<uint8_t> live(count, 1);
    for (auto& token : tokens) token = int64_t(generator() % uint64_t(z.vocabulary));
    if (z.length > 2) live[1] = 0;
    std::vector<float> logits(std::size_t(z.batch * keep * z.vocabulary));
    DecodeArguments a{};
    a.threads = threads, a.sequences = z.batch, a.length = z.length, a.keep = keep, a.vocabulary = z.vocabulary;
    a.count = int64_t(model.steps.size()), a.scratch_step = scratch, a.steps = model.steps.data();
    a.tokens = tokens.data(), a.positions = positions.data(), a.live = live.data(), a.logits = logits.data();
    a.scratch = numbers(threads * scratch);
    for (int i = 0; i < 2; ++i)
        if (MUONSSM_ISA::decode_tokens(a)) std::abort();
    tokens[0] = z.vocabulary;
    if (!MUONSSM_ISA::decode_tokens(a)) std::abort();
    for (float x : logits)
        if (!(x > -1e6f && x < 1e6f)) std::abort();
    return logits;
}

int main() {
    int count = 0;
    for (int64_t format : {FLOAT32_ROWS, BFLOAT16_TILES, INT8_TILES})
        for (const Sizes& given :
             {Sizes{1, 2, 1, 1, 1, 1, 1, 1, 0, 1, 1}, Sizes{33, 35, 2, 5, 7, 3, 4, 21, 0, 1, 1},
              Sizes{40, 19, 3, 17, 18, 17, 2, 70, 0, 2, 3}, Sizes{64, 48, 2, 16, 32, 16, 4, 96, 0, 16, 1},
              Sizes{31, 50, 1, 9, 33, 5, 3, 15, 0, 1, 16}, Sizes{48, 17, 2, 8, 8, 9, 4, 33, 0, 5, 2}}) {
            Sizes z = given;
            z.format = format;
            for (int64_t keep : {int64_t(1), z.length}) {
                const std::vector<float> one = run(z, 1, keep);
                for (int64_t threads : {2, 3}) {
                    const std::vector<float> other = run(z, threads, keep);
                    if (std::memcmp(one.data(), other.data(), one.size() * sizeof(float))) {
                        std::printf("%lld threads give other bits than one\n", static_cast<long long>(threads));
                        return 1;
                    }
                }
                count += 3;
            }
        }
    std::printf("%d runs\n", count);
    return 0;
}
