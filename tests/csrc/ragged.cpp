// Runs every kernel on ragged shapes, with arrays of exactly the size they need. AddressSanitizer ends the program at the
// first access outside an array. The checksum keeps the compiler from removing work.
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <vector>

#include "arguments.h"

namespace muonssm {
namespace MUONSSM_ISA {
const Kernels& kernels();
}
}  // namespace muonssm
using namespace muonssm;

static double checksum = 0;
static unsigned state = 1;
static double uniform() {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) / double(1 << 24);
}

struct Array {  // an allocation of exactly `size` numbers
    std::unique_ptr<char[]> data;
    int64_t size, type;
    Array(int64_t size, int64_t type, double low, double high)
        : data(new char[size * width(type) + (size == 0)]), size(size), type(type) {
        for (int64_t i = 0; i < size; ++i) {
            const double x = low + (high - low) * uniform();
            if (type == FLOAT64) reinterpret_cast<double*>(data.get())[i] = x;
            else if (type == FLOAT32) reinterpret_cast<float*>(data.get())[i] = float(x);
            else reinterpret_cast<uint16_t*>(data.get())[i] = type == BFLOAT16 ? 0x3e80 : 0x3400;  // 0.25
        }
    }
    static int64_t width(int64_t type) { return type == FLOAT64 ? 8 : type == FLOAT32 ? 4 : 2; }
    ~Array() {
        for (int64_t i = 0; i < size * width(type); ++i) checksum += data[i];
    }
    void* get() { return data.get(); }
};

static int64_t padded(int64_t size, int64_t real, int64_t bytes) {
    const int64_t lanes = bytes / Array::width(real);
    return (size + lanes - 1) / lanes * lanes;
}

static void memory(const Kernels& kernels, int64_t input, const std::vector<int64_t>& offsets, int64_t H, int64_t d,
                   int64_t m, double eta, bool momentum, bool residual, int64_t steps) {
    const int64_t real = input == FLOAT64 ? FLOAT64 : FLOAT32, L = offsets.back(), N = int64_t(offsets.size()) - 1,
                  bytes = kernels.vector_bytes();
    Array q(L * H * m, input, -1, 1), k(L * H * m, input, -.3, .3), v(L * H * d, input, -1, 1),
        log_alpha(L * H, real, -1, 0), beta(L * H, real, 0, 1);
    Array gamma(L * H, real, 0, 1), inject(L * H, real, 0, 1), S0(N * H * d * m, real, -1, 1),
        M0(N * H * d * m, real, -1, 1), y(L * H * d, input, 0, 0), S(N * H * d * m, real, 0, 0),
        M(N * H * d * m, real, 0, 0);
    int64_t segments = 0;
    for (int64_t i = 0; i < N; ++i) segments += (offsets[i + 1] - offsets[i] + 63) / 64;
    const int64_t saved = segments * H * padded(d, real, bytes) * padded(m, real, bytes);
    Array S_saved(saved, real, 0, 0), M_saved(saved, real, 0, 0), dy(L * H * d, input, -1, 1),
        dS(N * H * d * m, real, -1, 1), dM(N * H * d * m, real, -1, 1);
    Array dq(L * H * m, input, 0, 0), dk(L * H * m, input, 0, 0), dv(L * H * d, input, 0, 0),
        dlog_alpha(L * H, real, 0, 0), dbeta(L * H, real, 0, 0), dgamma(L * H, real, 0, 0), dinject(L * H, real, 0, 0);
    Array dS0(N * H * d * m, real, 0, 0), dM0(N * H * d * m, real, 0, 0);
    MemoryArguments a{};
    a.input = input;
    a.threads = 2;
    a.sequences = N;
    a.heads = H;
    a.d = d;
    a.m = m;
    a.momentum = momentum;
    a.residual = residual;
    a.gamma_step = H;
    a.gamma_head = 1;
    a.eta = eta;
    a.write = {steps, residual, 0.6, 1.0, 1e-6};
    a.offsets = offsets.data();
    a.q = q.get();
    a.k = k.get();
    a.v = v.get();
    a.log_alpha = log_alpha.get();
    a.beta = beta.get();
    a.gamma = gamma.get();
    a.inject = residual ? inject.get() : nullptr;
    a.S0 = S0.get();
    a.M0 = M0.get();
    a.y = y.get();
    a.S = S.get();
    a.M = M.get();
    a.S_saved = S_saved.get();
    a.M_saved = momentum ? M_saved.get() : nullptr;
    kernels.memory_forward(a);
    a.dy = dy.get();
    a.dS = dS.get();
    a.dM = dM.get();
    a.dq = dq.get();
    a.dk = dk.get();
    a.dv = dv.get();
    a.dlog_alpha = dlog_alpha.get();
    a.dbeta = dbeta.get();
    a.dgamma = momentum ? dgamma.get() : nullptr;
    a.dinject = residual ? dinject.get() : nullptr;
    a.dS0 = dS0.get();
    a.dM0 = dM0.get();
    kernels.memory_backward(a);
    if (L == N) kernels.memory_step(a);
}

static void selective(const Kernels& kernels, int64_t input, const std::vector<int64_t>& offsets, int64_t D, int64_t n,
                      bool longhorn, bool momentum, int64_t steps) {
    const int64_t real = input == FLOAT64 ? FLOAT64 : FLOAT32, L = offsets.back(), N = int64_t(offsets.size()) - 1,
                  bytes = kernels.vector_bytes();
    Array x(L * D, input, -1, 1), dt(L * D, input, 0, .3), B(L * n, input, -.5, .5), C(L * n, input, -1, 1),
        A(D * n, real, -1, 0), gamma(L, real, 0, 1);
    Array S0(N * D * n, real, -1, 1), M0(N * D * n, real, -1, 1), y(L * D, input, 0, 0), S(N * D * n, real, 0, 0),
        M(N * D * n, real, 0, 0);
    int64_t segments = 0;
    for (int64_t i = 0; i < N; ++i) segments += (offsets[i + 1] - offsets[i] + 63) / 64;
    const int64_t saved = segments * ((D + 63) / 64 * 64) * padded(n, real, bytes);
    Array S_saved(saved, real, 0, 0), M_saved(saved, real, 0, 0), dy(L * D, input, -1, 1), dS(N * D * n, real, -1, 1),
        dM(N * D * n, real, -1, 1);
    Array dx(L * D, real, 0, 0), ddt(L * D, real, 0, 0), dA(D * n, real, 0, 0), dB(L * n, real, 0, 0),
        dC(L * n, real, 0, 0), dgamma(L, real, 0, 0);
    Array dS0(N * D * n, real, 0, 0), dM0(N * D * n, real, 0, 0);
    SelectiveArguments a{};
    a.input = input;
    a.threads = 2;
    a.sequences = N;
    a.D = D;
    a.N = n;
    a.momentum = momentum;
    a.gamma_step = 1;
    a.write = {steps, 0, 0.6, 1.0, 1e-6};
    a.offsets = offsets.data();
    a.x = x.get();
    a.dt = dt.get();
    a.B = B.get();
    a.C = C.get();
    a.A = longhorn ? nullptr : A.get();
    a.gamma = gamma.get();
    a.S0 = S0.get();
    a.M0 = M0.get();
    a.y = y.get();
    a.S = S.get();
    a.M = M.get();
    a.S_saved = S_saved.get();
    a.M_saved = momentum ? M_saved.get() : nullptr;
    kernels.selective_forward(a);
    a.dy = dy.get();
    a.dS = dS.get();
    a.dM = dM.get();
    a.dx = dx.get();
    a.ddt = ddt.get();
    a.dA = dA.get();
    a.dB = dB.get();
    a.dC = dC.get();
    a.dgamma = momentum ? dgamma.get() : nullptr;
    a.dS0 = dS0.get();
    a.dM0 = dM0.get();
    kernels.selective_backward(a);
    if (L == N) kernels.selective_step(a);
}

static void convolution(const Kernels& kernels, int64_t input, const std::vector<int64_t>& offsets, int64_t C,
                        int64_t K, bool tailed, bool silu) {
    const int64_t real = input == FLOAT64 ? FLOAT64 : FLOAT32, L = offsets.back(), N = int64_t(offsets.size()) - 1,
                  gap = 3;
    Array x(L ? (L - 1) * (C + gap) + C : 0, input, -1, 1), tail(N * (K - 1) * C, input, -1, 1),
        weight(C * K, real, -1, 1), bias(C, real, -1, 1);
    Array y(L * C, input, 0, 0), dy(L * C, input, -1, 1), dx(L * C, input, 0, 0), dtail(N * (K - 1) * C, input, 0, 0),
        dweight(C * K, real, 0, 0), dbias(C, real, 0, 0);
    ConvolutionArguments a{};
    a.input = input;
    a.threads = 2;
    a.sequences = N;
    a.channels = C;
    a.K = K;
    a.x_step = C + gap;
    a.silu = silu;
    a.offsets = offsets.data();
    a.x = x.get();
    a.tail = tailed ? tail.get() : nullptr;
    a.weight = weight.get();
    a.bias = bias.get();
    a.y = y.get();
    kernels.convolution_forward(a);
    a.dy = dy.get();
    a.dx = dx.get();
    a.dtail = tailed ? dtail.get() : nullptr;
    a.dweight = dweight.get();
    a.dbias = dbias.get();
    kernels.convolution_backward(a);
}

static void mamba(const Kernels& kernels, int64_t n, int64_t d, int64_t D, int64_t N, int64_t R, int64_t K, bool normed,
                  int64_t steps) {
    const int64_t type = FLOAT32;
    Array x(n * d, type, -1, 1), norm(d, type, -1, 1), in_proj(2 * D * d, type, -1, 1), conv_weight(D * K, type, -1, 1),
        conv_bias(D, type, -1, 1), x_proj((R + 2 * N) * D, type, -1, 1);
    Array dt_proj(D * R, type, -1, 1), dt_bias(D, type, -5, 30), A_log(D * N, type, 0, 3), skip(D, type, -1, 1),
        out_proj(d * D, type, -1, 1);
    Array tail(n * (K - 1) * D, type, -1, 1), S0(n * D * N, type, -1, 1), M0(n * D * N, type, -1, 1);
    Array y(n * d, type, 0, 0), tail_out(n * (K - 1) * D, type, 0, 0), S(n * D * N, type, 0, 0),
        M(n * D * N, type, 0, 0);
    MambaArguments a{2,
                     n,
                     d,
                     D,
                     N,
                     R,
                     K,
                     0.5,
                     1e-5,
                     {steps, 0, 0.6, 1.0, 1e-6},
                     x.get(),
                     normed ? norm.get() : nullptr,
                     in_proj.get(),
                     conv_weight.get(),
                     conv_bias.get(),
                     x_proj.get(),
                     dt_proj.get(),
                     dt_bias.get(),
                     A_log.get(),
                     skip.get(),
                     out_proj.get(),
                     tail.get(),
                     S0.get(),
                     M0.get(),
                     y.get(),
                     tail_out.get(),
                     S.get(),
                     M.get()};
    kernels.mamba_step(a);
}

// Rows of norms and unit vectors lie `gap` apart in x and in the gate; `gating` is 0 without a gate, 1 or 2 with one.
static void norm(const Kernels& kernels, int64_t input, int64_t output, int64_t rows, int64_t heads, int64_t size,
                 int64_t gating, bool unit) {
    const int64_t real = input == FLOAT64 ? FLOAT64 : FLOAT32, gap = 3, step = heads * size + gap,
                  strided = rows ? (rows - 1) * step + heads * size : 0, count = rows * heads * size;
    Array x(strided, input, -1, 1), gate(strided, input, -1, 1), weight(size, real, -1, 1), y(count, output, 0, 0),
        dy(count, output, -1, 1), dx(count, input, 0, 0), dgate(count, input, 0, 0), dweight(size, real, 0, 0);
    NormArguments a{};
    a.input = input;
    a.output = output;
    a.threads = 2;
    a.rows = rows;
    a.heads = heads;
    a.size = size;
    a.x_step = step;
    a.gate_step = step;
    a.unit = unit;
    a.gate_first = gating == 1;
    a.eps = 1e-6;
    a.scale = 0.7;
    a.x = x.get();
    a.gate = gating ? gate.get() : nullptr;
    a.weight = unit ? nullptr : weight.get();
    a.y = y.get();
    kernels.norm_forward(a);
    a.dy = dy.get();
    a.dx = dx.get();
    a.dgate = gating ? dgate.get() : nullptr;
    a.dweight = unit ? nullptr : dweight.get();
    kernels.norm_backward(a);
}

static void swiglu(const Kernels& kernels, int64_t input, int64_t count, bool again) {
    Array g(count, input, -1, 1), u(count, input, -1, 1), y(count, input, 0, 0), dy(count, input, -1, 1),
        dg(count, input, 0, 0), du(count, input, 0, 0);
    SwigluArguments a{};
    a.input = input;
    a.threads = 2;
    a.count = count;
    a.g = g.get();
    a.u = u.get();
    a.y = y.get();
    kernels.swiglu_forward(a);
    if (!again) a.y = nullptr;
    a.dy = dy.get();
    a.dg = dg.get();
    a.du = du.get();
    kernels.swiglu_backward(a);
}

static void cross_entropy(const Kernels& kernels, int64_t input, int64_t rows, int64_t columns, bool gradient) {
    Array logits(rows * columns, input, -1, 1), losses(rows, input == FLOAT64 ? FLOAT64 : FLOAT32, 0, 0);
    std::vector<int64_t> labels(rows);  // the first, the last, and labels outside of the vocabulary on either side
    for (int64_t i = 0; i < rows; ++i)
        labels[i] = i % 4 == 0 ? 0 : i % 4 == 1 ? columns - 1 : i % 4 == 2 ? columns : -100;
    CrossEntropyArguments a{input, 2, rows, columns, gradient, 0.5, logits.get(), labels.data(), losses.get()};
    kernels.cross_entropy(a);
}

static int rows(const Kernels& kernels, int64_t input, int64_t variant, int64_t size) {
    const int64_t count = size * 3 - 2, narrow = input == FLOAT32 && variant % 2 ? int64_t(BFLOAT16) : input;
    norm(kernels, input, narrow, count, 1 + variant % 3, size, variant % 3, variant / 2);
    swiglu(kernels, input, count * size, variant % 2);
    cross_entropy(kernels, input, count, 1 + size * 5 % 19, variant % 2);
    return 3;
}

int main() {
    const Kernels& kernels = MUONSSM_ISA::kernels();
    const std::vector<std::vector<int64_t>> packings{{0, 0},  {0, 1},          {0, 1, 2, 3},
                                                     {0, 64}, {0, 65, 65, 68}, {0, 130, 131}};
    int runs = 0;
    for (int64_t input : {FLOAT32, FLOAT64, BFLOAT16, FLOAT16})
        for (const auto& offsets : packings)
            for (int variant = 0; variant < 4; ++variant)
                for (int64_t size : {1, 3, 8, 17, 33}) {
                    memory(kernels, input, offsets, 1 + variant % 2, size, 1 + size * 5 % 19, variant % 2, variant / 2,
                           false, variant - 1);
                    if (variant / 2)
                        memory(kernels, input, offsets, 1 + variant % 2, size, 1 + size * 5 % 19, variant % 2, true,
                               true, variant - 1);
                    selective(kernels, input, offsets, size * 4 - 3, 1 + size * 5 % 19, variant % 2, variant / 2,
                              variant - 1);
                    convolution(kernels, input, offsets, size * 4 - 3, 1 + size % 5, variant % 2, variant / 2);
                    mamba(kernels, int64_t(offsets.size()) - 1, size, size * 4 - 3, 1 + size * 5 % 19, 1 + size % 4,
                          1 + size % 5, variant % 2, variant - 1);
                    runs += 4 + variant / 2;
                }
    for (int64_t input : {FLOAT32, FLOAT64, BFLOAT16, FLOAT16})
        for (int variant = 0; variant < 6; ++variant)
            for (int64_t size : {1, 3, 8, 17, 33}) runs += rows(kernels, input, variant, size);
    mamba(kernels, 2, 200, 350, 16, 7, 4, true, 1);  // large enough for threads
    norm(kernels, FLOAT32, FLOAT32, 300, 3, 35, 2, false);
    swiglu(kernels, FLOAT32, 20001, true);
    cross_entropy(kernels, FLOAT32, 33, 1001, true);
    std::printf("%d runs, checksum %.0f\n", runs, checksum);
    return 0;
}
