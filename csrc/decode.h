// One token (or a few) of a whole language model in one call: a list of steps that all threads run together, with a
// barrier after each. docs/design/decoding.md describes the steps; decode_steps.h has their arguments.
//
//     embed      h = E[token], and the angles of rotary embeddings
//     project    out = W f(x), out += W f(x) or silu(W f(x)) * (V f(x)), f a norm, a norm per head with a gate, or nothing
//     convolve   c = silu(conv(x)), and the last K - 1 inputs
//     remember   one memory per head (see memory.h): gates, S, M and y from the projections
//     scan       one memory per channel (see selective.h)
//     attend     attention over a window of keys and values
//
// Rows of all buffers are the tokens of the call: row s T + t is token t of sequence s, with T tokens per sequence.
// Threads divide the rows of a matrix as they come, and the rows of the memories and channels evenly. Each number is computed by one thread in
// an order that does not depend on the division, so results have the same bits for any number of threads.
#pragma once
#include <algorithm>
#include <atomic>
#include <cmath>
#include <vector>
#if defined(__linux__)
#include <sched.h>
#endif
#if defined(_OPENMP)
#include <omp.h>
#endif

#include "decode_steps.h"
#include "write.h"

namespace muonssm {
namespace MUONSSM_ISA {

using F = Vec<float>;
constexpr int W = LANES<float>;

// ---- threads ----

INLINE void pause_thread() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}
inline void give_way() {
#if defined(__linux__)
    sched_yield();
#endif
}

// A barrier that spins for some microseconds and then lets other processes run: with fewer free cores than threads,
// spinning alone would wait for whole time slices.
class Barrier {
public:
    void wait(int threads) {
        if (threads == 1) return;
        const int phase = phase_.load(std::memory_order_relaxed);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) == threads - 1) {
            arrived_.store(0, std::memory_order_relaxed);
            phase_.store(phase + 1, std::memory_order_release);
            return;
        }
        for (int spins = 0; phase_.load(std::memory_order_acquire) == phase; ++spins)
            if (spins < 4096) pause_thread();
            else give_way();
    }

private:
    alignas(64) std::atomic<int> arrived_{0};
    alignas(64) std::atomic<int> phase_{0};
};

struct Range {
    int64_t first, last;
};

// What thread `id` takes of `count` units.
INLINE Range share(int64_t count, int id, int threads) { return {count * id / threads, count * (id + 1) / threads}; }

// How many units of a step are taken; one per step, on a cache line of its own.
struct alignas(64) Counter {
    std::atomic<int64_t> taken{0};
};

struct Team {
    const DecodeArguments& call;
    int id, threads;
    float* scratch;    // of this thread alone
    Counter* counter;  // of the current step

    int64_t rows() const { return call.sequences * call.length; }
    bool live(int64_t row) const { return !call.live || call.live[row]; }
    Range share(int64_t count) const { return MUONSSM_ISA::share(count, id, threads); }

    // Call `run` for ranges of `count` units until all are taken: large ranges first, small ones at the end, so that
    // threads finish together although the memory serves them at different speeds.
    template <class RUN> void take(int64_t count, RUN&& run) {
        if (threads == 1) return run(Range{0, count});
        int64_t begin = counter->taken.load(std::memory_order_relaxed);
        while (begin < count) {
            const int64_t size = std::max<int64_t>(1, (count - begin) / (2 * threads));
            if (!counter->taken.compare_exchange_weak(begin, begin + size, std::memory_order_relaxed)) continue;
            run(Range{begin, begin + size});
            begin = counter->taken.load(std::memory_order_relaxed);
        }
    }
};

// ---- vectors with a rest ----

// The first `count` numbers at p, then zeros; memory beyond them is not read.
INLINE F load_part(const float* p, int64_t count) {
    if (count >= W) return load(p);
#if defined(__AVX512F__)
    return F(_mm512_maskz_loadu_ps(__mmask16((1u << count) - 1), p));
#else
    F v = zero<float>();
    for (int64_t i = 0; i < count; ++i) v[i] = p[i];
    return v;
#endif
}
INLINE void store_part(float* p, F v, int64_t count) {
    if (count >= W) return store(p, v);
#if defined(__AVX512F__)
    _mm512_mask_storeu_ps(p, __mmask16((1u << count) - 1), __m512(v));
#else
    for (int64_t i = 0; i < count; ++i) p[i] = v[i];
#endif
}

INLINE F sigmoid_of(F x) { return 1.0f / (1.0f + exponential<float>(-x)); }
INLINE F silu_of(F x) { return x * sigmoid_of(x); }

// log(1 + exp(x)) = max(x, 0) + log1p(e), e = exp(-|x|), and log1p(e) = 2 atanh(e / (2 + e)) as a series.
INLINE F softplus_of(F x) {
    const F e = exponential<float>(x > 0.0f ? -x : x), s = e / (2.0f + e), q = s * s;
    F p = splat<float>(1.0f / 17);
    for (float divisor : {15.0f, 13.0f, 11.0f, 9.0f, 7.0f, 5.0f, 3.0f, 1.0f}) p = p * q + 1.0f / divisor;
    return (x > 0.0f ? x : zero<float>()) + 2.0f * s * p;
}

// The same for one number, by the same code: a head's gates do not depend on where they stand.
INLINE float sigmoid_of(float x) { return sigmoid_of(splat<float>(x))[0]; }
INLINE float softplus_of(float x) { return softplus_of(splat<float>(x))[0]; }
INLINE float exponential_of(float x) { return exponential<float>(splat<float>(x))[0]; }

INLINE float square_sum(const float* x, int64_t count) {
    F total = zero<float>();
    for (int64_t i = 0; i < count; i += W) {
        const F v = load_part(x + i, count - i);
        total += v * v;
    }
    return sum<float>(total);
}

INLINE int64_t whole_blocks(int64_t columns) { return (columns + BLOCK - 1) / BLOCK * BLOCK; }

// ---- rows of a matrix times the inputs: out[s * TILE + i] for up to TILE rows i and NS inputs s ----

constexpr int FLOAT_ROWS = 4;  // rows of a float32 matrix that are multiplied together

template <int NR, int NS>
INLINE void float_rows(const float* w, int64_t columns, const float* x, int64_t x_step, float* out) {
    F total[NR][NS];
    for (int r = 0; r < NR; ++r)
        for (int s = 0; s < NS; ++s) total[r][s] = zero<float>();
    const int64_t whole = columns / W * W;
    const float* next = w + NR * columns;
    for (int64_t j = 0; j < whole; j += W) {
        F input[NS];
        for (int s = 0; s < NS; ++s) input[s] = load(x + s * x_step + j);
        for (int r = 0; r < NR; ++r) {
            __builtin_prefetch(next + r * columns + j, 0, 2);
            const F weight = load(w + r * columns + j);
            for (int s = 0; s < NS; ++s) total[r][s] += weight * input[s];
        }
    }
    if (whole < columns)
        for (int r = 0; r < NR; ++r) {
            const F weight = load_part(w + r * columns + whole, columns - whole);
            for (int s = 0; s < NS; ++s) total[r][s] += weight * load_part(x + s * x_step + whole, columns - whole);
        }
    for (int r = 0; r < NR; ++r)
        for (int s = 0; s < NS; ++s) out[s * TILE + r] = sum<float>(total[r][s]);
}

template <int NS>
INLINE void float_unit(const Matrix& a, int64_t unit, int64_t columns, const float* x, int64_t x_step, float* out) {
    const int64_t first = unit * FLOAT_ROWS, count = std::min<int64_t>(FLOAT_ROWS, a.rows - first);
    const float* w = static_cast<const float*>(a.data) + first * columns;
    if (count == FLOAT_ROWS) return float_rows<FLOAT_ROWS, NS>(w, columns, x, x_step, out);
    for (int64_t r = 0; r < count; ++r) float_rows<1, NS>(w + r * columns, columns, x, x_step, out + r);
}

// bfloat16 and int8 matrices come in tiles of 16 rows, with rows in the lanes of a vector. A 32-bit lane holds two or
// four neighboring columns of its row; the input of a column is the same for all lanes.
using U = typename VectorOf<uint32_t>::type;
using Q = typename VectorOf<int32_t>::type;

template <class V, class T> INLINE V load_bits(const T* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
INLINE F as_float(U bits) {
    F v;
    std::memcpy(&v, &bits, sizeof v);
    return v;
}

template <int NS>
INLINE void bfloat16_unit(const Matrix& a, int64_t unit, int64_t columns, const float* x, int64_t x_step, float* out) {
    const int64_t wide = whole_blocks(columns);
    const uint16_t* tile = static_cast<const uint16_t*>(a.data) + unit * TILE * wide;
    for (int part = 0; part < TILE; part += W) {
        F total[NS][4];
        for (int s = 0; s < NS; ++s)
            for (int i = 0; i < 4; ++i) total[s][i] = zero<float>();
        for (int64_t j = 0; j < wide; j += 4) {
            const uint16_t* w = tile + j * TILE + 2 * part;
            __builtin_prefetch(w + 4096, 0, 2);
            const U a0 = load_bits<U>(w), a1 = load_bits<U>(w + 2 * TILE);
            const F w0 = as_float(a0 << 16), w1 = as_float(a0 & 0xffff0000u), w2 = as_float(a1 << 16),
                    w3 = as_float(a1 & 0xffff0000u);
            for (int s = 0; s < NS; ++s) {
                const float* y = x + s * x_step + j;
                total[s][0] += w0 * broadcast(y);
                total[s][1] += w1 * broadcast(y + 1);
                total[s][2] += w2 * broadcast(y + 2);
                total[s][3] += w3 * broadcast(y + 3);
            }
        }
        for (int s = 0; s < NS; ++s)
            store(out + s * TILE + part, (total[s][0] + total[s][1]) + (total[s][2] + total[s][3]));
    }
}

INLINE F scales_at(const uint16_t* p) {
    typedef uint16_t Half __attribute__((vector_size(VECTOR_BYTES / 2)));
    return as_float(__builtin_convertvector(load_bits<Half>(p), U) << 16);
}

template <int NS>
INLINE void int8_unit(const Matrix& a, int64_t unit, int64_t columns, const float* x, int64_t x_step, float* out) {
    const int64_t wide = whole_blocks(columns);
    const int8_t* tile = static_cast<const int8_t*>(a.data) + unit * TILE * wide;
    const uint16_t* scales = static_cast<const uint16_t*>(a.scales) + unit * TILE * (wide / BLOCK);
    for (int part = 0; part < TILE; part += W) {
        F total[NS];
        for (int s = 0; s < NS; ++s) total[s] = zero<float>();
        for (int64_t block = 0; block < wide; block += BLOCK) {
            F inner[NS][4];
            for (int s = 0; s < NS; ++s)
                for (int i = 0; i < 4; ++i) inner[s][i] = zero<float>();
            for (int64_t j = block; j < block + BLOCK; j += 4) {
                const int8_t* w = tile + j * TILE + 4 * part;
                __builtin_prefetch(w + 8192, 0, 2);
                const Q a0 = load_bits<Q>(w);
                const F w0 = __builtin_convertvector(a0 << 24 >> 24, F),
                        w1 = __builtin_convertvector(a0 << 16 >> 24, F), w2 = __builtin_convertvector(a0 << 8 >> 24, F),
                        w3 = __builtin_convertvector(a0 >> 24, F);
                for (int s = 0; s < NS; ++s) {
                    const float* y = x + s * x_step + j;
                    inner[s][0] += w0 * broadcast(y);
                    inner[s][1] += w1 * broadcast(y + 1);
                    inner[s][2] += w2 * broadcast(y + 2);
                    inner[s][3] += w3 * broadcast(y + 3);
                }
            }
            const F scale = scales_at(scales + block / BLOCK * TILE + part);
            for (int s = 0; s < NS; ++s)
                total[s] += scale * ((inner[s][0] + inner[s][1]) + (inner[s][2] + inner[s][3]));
        }
        for (int s = 0; s < NS; ++s) store(out + s * TILE + part, total[s]);
    }
}

// ---- int8 weights times inputs in fixed point ----
//
// AVX512-VNNI multiplies 64 bytes at a time, so that a block of 32 inputs is written as 24-bit integers n with a scale
// of its own, a power of two, and n as three signed digits: n = 65536 d0 + 256 d1 + d2. The largest input of a block
// keeps 22 to 23 bits after its sign, as many as a float32 has. Sums of a block are exact in int32.

constexpr int DIGITS = 3;

// 32 inputs. One operand of the instruction is unsigned: it gets the weight q + 128, and `start` takes 128 d off again.
struct DigitBlock {
    int32_t digits[DIGITS][BLOCK / 4];  // bytes of four neighboring columns
    int32_t start[DIGITS];              // -128 times the sum of the digits
    float scale;
};
static_assert(sizeof(DigitBlock) <= BLOCK * sizeof(float), "digits take the place of the inputs they stand for");

#if defined(__AVX512F__) && !defined(MUONSSM_NO_VNNI)  // defined by a test alone
#define WITH_VNNI __attribute__((target("avx512vnni")))

INLINE bool has_digits() {
    static const bool has = __builtin_cpu_supports("avx512vnni");
    return has;
}

// Replace 32 inputs by their digits.
inline void write_digits(float* x) {
    const F v[2] = {load(x), load(x + W)};
    const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
    const __m512i largest =
        _mm512_max_epi32(_mm512_and_epi32(__m512i(v[0]), magnitude), _mm512_and_epi32(__m512i(v[1]), magnitude));
    const uint32_t bits = uint32_t(_mm512_reduce_max_epi32(largest));
    const bool finite = bits < 0x7f800000u;
    // 1 + 1/64 times the largest input is below 2^(exponent + 1), so that n stays below 127 * 65536
    const uint32_t exponent = finite ? std::max(to_bits(from_bits(bits) * (1 + 1.0f / 64)) >> 23, 30u) : 30u;
    const float to_integer = from_bits((276 - exponent) << 23);  // 2^(22 - exponent)
    DigitBlock block;
    block.scale = finite ? from_bits((exponent - 22) << 23) : NAN;
    __m512i total[DIGITS] = {};
    for (int half = 0; half < 2; ++half) {
        __m512i n = _mm512_cvtps_epi32(__m512(v[half] * to_integer));
        for (int i = DIGITS - 1; i >= 0; --i) {
            const __m512i digit = _mm512_srai_epi32(_mm512_slli_epi32(n, 24), 24);
            n = _mm512_srai_epi32(_mm512_sub_epi32(n, digit), 8);
            total[i] = _mm512_add_epi32(total[i], digit);
            const __m128i bytes = _mm512_cvtepi32_epi8(digit);
            std::memcpy(block.digits[i] + half * 4, &bytes, sizeof bytes);
        }
    }
    for (int i = 0; i < DIGITS; ++i) block.start[i] = -128 * _mm512_reduce_add_epi32(total[i]);
    std::memcpy(x, &block, sizeof block);
}

template <int NS>
WITH_VNNI inline void int8_unit_by_digits(const Matrix& a, int64_t unit, int64_t columns, const float* x,
                                          int64_t x_step, float* out) {
    const int64_t wide = whole_blocks(columns);
    const int8_t* w = static_cast<const int8_t*>(a.data) + unit * TILE * wide;
    const uint16_t* scales = static_cast<const uint16_t*>(a.scales) + unit * TILE * (wide / BLOCK);
    const __m512i sign = _mm512_set1_epi8(-128);
    F total[NS];
    for (int s = 0; s < NS; ++s) total[s] = zero<float>();
    for (int64_t first = 0; first < wide; first += BLOCK, w += BLOCK * TILE, scales += TILE) {
        __m512i sum[NS][DIGITS];
        const DigitBlock* input[NS];
        for (int s = 0; s < NS; ++s) {
            input[s] = reinterpret_cast<const DigitBlock*>(x + s * x_step + first);
            for (int i = 0; i < DIGITS; ++i) sum[s][i] = _mm512_set1_epi32(input[s]->start[i]);
        }
        for (int j = 0; j < BLOCK / 4; ++j) {
            __builtin_prefetch(w + j * 4 * TILE + 8192, 0, 2);
            const __m512i weight = _mm512_xor_si512(_mm512_loadu_si512(w + j * 4 * TILE), sign);  // q + 128
            for (int s = 0; s < NS; ++s)
                for (int i = 0; i < DIGITS; ++i)
                    sum[s][i] = _mm512_dpbusd_epi32(sum[s][i], weight, _mm512_set1_epi32(input[s]->digits[i][j]));
        }
        const F scale = scales_at(scales);
        for (int s = 0; s < NS; ++s) {
            const __m512i high = _mm512_add_epi32(_mm512_slli_epi32(sum[s][0], 8), sum[s][1]);
            total[s] +=
                (scale * input[s]->scale) * (F(_mm512_cvtepi32_ps(high)) * 256.0f + F(_mm512_cvtepi32_ps(sum[s][2])));
        }
    }
    for (int s = 0; s < NS; ++s) store(out + s * TILE, total[s]);
}
#else
INLINE bool has_digits() { return false; }
INLINE void write_digits(float*) {}
template <int NS> INLINE void int8_unit_by_digits(const Matrix&, int64_t, int64_t, const float*, int64_t, float*) {}
#endif

template <int NS>
INLINE void unit_rows(const Matrix& a, int64_t unit, int64_t columns, const float* x, int64_t x_step, float* out) {
    switch (a.format) {
        case FLOAT32_ROWS: return float_unit<NS>(a, unit, columns, x, x_step, out);
        case BFLOAT16_TILES: return bfloat16_unit<NS>(a, unit, columns, x, x_step, out);
        case INT8_TILES:
            if (has_digits()) return int8_unit_by_digits<NS>(a, unit, columns, x, x_step, out);
            return int8_unit<NS>(a, unit, columns, x, x_step, out);
    }
}

INLINE int64_t unit_size(const Matrix& a) { return a.format == FLOAT32_ROWS ? FLOAT_ROWS : TILE; }
INLINE int64_t units_of(const Matrix& a) { return (a.rows + unit_size(a) - 1) / unit_size(a); }

// One unit of rows for all inputs; a unit stays in the cache while the inputs go by in groups of four.
inline void multiply(const Matrix& a, int64_t unit, int64_t columns, const float* x, int64_t x_step, int64_t inputs,
                     float* out) {
    int64_t s = 0;
    for (; s + 4 <= inputs; s += 4) unit_rows<4>(a, unit, columns, x + s * x_step, x_step, out + s * TILE);
    for (; s < inputs; ++s) unit_rows<1>(a, unit, columns, x + s * x_step, x_step, out + s * TILE);
}

// ---- project ----

// f(x) of one row: a norm over groups of numbers, with a gate or without.
inline void prepare_row(const ProjectStep& a, const float* x, const float* gate, float* out) {
    const int64_t size = a.norm ? a.group : a.columns;
    for (int64_t first = 0; first < a.columns; first += size) {
        const float scale = a.norm ? 1.0f / std::sqrt(square_sum(x + first, size) / float(size) + float(a.eps)) : 1.0f;
        for (int64_t i = 0; i < size; i += W) {
            const int64_t left = size - i;
            F v = load_part(x + first + i, left);
            if (a.norm) v = v * scale * load_part(a.norm + i, left);
            if (gate) v *= silu_of(load_part(gate + first + i, left));
            store_part(out + first + i, v, left);
        }
    }
    for (int64_t i = a.columns; i < whole_blocks(a.columns); ++i) out[i] = 0;
}

inline void finish_unit(const ProjectStep& a, const Matrix& matrix, int64_t unit, int64_t column, const float* value,
                        float* out) {
    const int64_t first = unit * unit_size(matrix), count = std::min(unit_size(matrix), matrix.rows - first);
    float* target = out + column + first;
    for (int64_t i = 0; i < count; i += W) {
        const int64_t left = count - i;
        F v = load_part(value + i, left);
        if (matrix.bias) v += load_part(matrix.bias + first + i, left);
        if (a.activation == SOFTPLUS) v = softplus_of(v);
        if (a.add) v += load_part(target + i, left);
        store_part(target + i, v, left);
    }
}

inline void project(const ProjectStep& a, Team& team) {
    const int64_t T = team.call.length, keep = a.last ? team.call.keep : T, inputs = team.call.sequences * keep;
    const auto row_of = [&](int64_t s) { return s / keep * T + T - keep + s % keep; };
    const int64_t format = a.matrices[0].format;
    const bool digits = format == INT8_TILES && has_digits();
    const bool whole = format == FLOAT32_ROWS || (a.columns % BLOCK == 0 && !digits);  // x can be read as it is
    const bool direct = whole && !a.norm && !a.gate && keep == T;
    const float* x = a.x;
    int64_t x_step = a.x_step;
    if (!direct) {
        x_step = whole_blocks(a.columns);
        for (int64_t s = 0; s < inputs; ++s)
            prepare_row(a, a.x + row_of(s) * a.x_step, a.gate ? a.gate + row_of(s) * a.gate_step : nullptr,
                        team.scratch + s * x_step);
        if (digits)
            for (int64_t i = 0; i < inputs * x_step; i += BLOCK) write_digits(team.scratch + i);
        x = team.scratch;
    }
    float* out = a.last ? static_cast<float*>(team.call.logits) : a.out;
    alignas(64) float value[MOST_ROWS * TILE], second[MOST_ROWS * TILE];
    if (a.swiglu) {
        const Matrix &gate = a.matrices[0], &up = a.matrices[1];
        return team.take(units_of(gate), [&](Range range) {
            for (int64_t unit = range.first; unit < range.last; ++unit) {
                multiply(gate, unit, a.columns, x, x_step, inputs, value);
                multiply(up, unit, a.columns, x, x_step, inputs, second);
                const int64_t first = unit * unit_size(gate), count = std::min(unit_size(gate), gate.rows - first);
                for (int64_t s = 0; s < inputs; ++s)
                    for (int64_t i = 0; i < count; i += W) {
                        const int64_t left = count - i, at = s * TILE + i;
                        const F v = silu_of(load_part(value + at, left)) * load_part(second + at, left);
                        store_part(out + s * a.out_step + first + i, v, left);
                    }
            }
        });
    }
    int64_t total = 0;
    for (int64_t i = 0; i < a.count; ++i) total += units_of(a.matrices[i]);
    team.take(total, [&](Range range) {
        int64_t begin = 0, column = 0;
        for (int64_t i = 0; i < a.count; ++i) {
            const Matrix& matrix = a.matrices[i];
            const int64_t units = units_of(matrix), last = std::min(range.last - begin, units);
            for (int64_t unit = std::max<int64_t>(0, range.first - begin); unit < last; ++unit) {
                multiply(matrix, unit, a.columns, x, x_step, inputs, value);
                for (int64_t s = 0; s < inputs; ++s)
                    finish_unit(a, matrix, unit, column, value + s * TILE, out + s * a.out_step);
            }
            begin += units;
            column += matrix.rows;
        }
    });
}

// ---- embed ----

// Numbers `range` of row `row` of a matrix in any format.
inline void read_row(const Matrix& a, int64_t columns, int64_t row, Range range, float* out) {
    const int64_t wide = whole_blocks(columns), tile = row / TILE * TILE * wide, lane = row % TILE;
    for (int64_t j = range.first; j < range.last; ++j) {
        if (a.format == FLOAT32_ROWS) out[j] = static_cast<const float*>(a.data)[row * columns + j];
        else if (a.format == BFLOAT16_TILES)
            out[j] = from_bits(
                uint32_t(static_cast<const uint16_t*>(a.data)[tile + j / 2 * 2 * TILE + lane * 2 + j % 2]) << 16);
        else {
            const uint16_t* scales = static_cast<const uint16_t*>(a.scales) + row / TILE * TILE * (wide / BLOCK);
            out[j] = from_bits(uint32_t(scales[j / BLOCK * TILE + lane]) << 16) *
                     float(static_cast<const int8_t*>(a.data)[tile + j / 4 * 4 * TILE + lane * 4 + j % 4]);
        }
    }
}

inline void embed(const EmbedStep& a, Team& team) {
    const Range range = team.share(a.columns);
    for (int64_t row = 0; row < team.rows(); ++row)
        read_row(a.table, a.columns, team.call.tokens[row], range, a.out + row * a.out_step);
    const int64_t half = a.angles;
    if (!half) return;
    for (int64_t i = 0; i < team.rows() * half; ++i) {
        if (i % team.threads != team.id) continue;
        const float angle = float(team.call.positions[i / half]) * a.frequencies[i % half];
        float* target = a.rotary + i / half * a.rotary_step + i % half;
        target[0] = std::cos(angle) * float(a.scaling);
        target[half] = std::sin(angle) * float(a.scaling);
    }
}

// ---- convolve ----

inline void convolve(const ConvolveStep& a, Team& team) {
    const int64_t T = team.call.length, before = a.K - 1, vectors = (a.channels + W - 1) / W;
    const Range range = team.share(team.call.sequences * vectors);
    F inputs[LONGEST_FILTER + MOST_ROWS];
    for (int64_t unit = range.first; unit < range.last; ++unit) {
        const int64_t s = unit / vectors, channel = unit % vectors * W,
                      count = std::min<int64_t>(W, a.channels - channel);
        float* tail = a.tail + s * a.tail_sequence + channel * a.tail_channel;
        for (int64_t j = 0; j < before; ++j)
            if (a.tail_channel == 1) inputs[j] = load_part(tail + j * a.tail_step, count);
            else {
                inputs[j] = zero<float>();
                for (int64_t i = 0; i < count; ++i) inputs[j][i] = tail[j * a.tail_step + i * a.tail_channel];
            }
        int64_t seen = 0;
        for (int64_t t = 0; t < T; ++t) {
            if (!team.live(s * T + t)) continue;
            inputs[before + seen] = load_part(a.x + (s * T + t) * a.x_step + channel, count);
            F h = a.bias ? load_part(a.bias + channel, count) : zero<float>();
            for (int64_t j = 0; j < a.K; ++j)
                h += load_part(a.weight + j * a.channels + channel, count) * inputs[seen + j];
            store_part(a.out + (s * T + t) * a.out_step + channel, silu_of(h), count);
            ++seen;
        }
        for (int64_t j = 0; j < before; ++j)
            if (a.tail_channel == 1) store_part(tail + j * a.tail_step, inputs[seen + j], count);
            else
                for (int64_t i = 0; i < count; ++i) tail[j * a.tail_step + i * a.tail_channel] = inputs[seen + j][i];
    }
}

// ---- gates of a memory ----

struct Gates {
    float alpha, forget, gamma, mu, scale;  // forget = -alpha eta beta; scale: of the write
};

INLINE float momentum_decay(const float* logits, int64_t kind, const float* bias, double fixed, int64_t h) {
    if (kind == FIXED_GAMMA) return float(fixed);
    return sigmoid_of(kind == STEP_GAMMA ? logits[h] + bias[h] : bias[h]);
}

// The gates of one head at one token.
inline Gates head_gates(const MemoryStep& a, int64_t row, int64_t h, float k2, double v2) {
    const float* p = a.p + row * a.p_step;
    Gates g{1, 0, momentum_decay(p + a.gamma_column, a.gamma_kind, a.gamma_bias, a.gamma, h), 1, 0};
    float beta = 0;
    const int64_t key_head = h / (a.heads / a.key_heads);
    switch (a.rule) {
        case DELTA: beta = sigmoid_of(p[a.b_column + h]); break;
        case GATED_DELTA: {
            float gate = p[a.a_column + h], write = p[a.b_column + h];
            if (a.gate_bias) gate += a.gate_bias[h], write += a.gate_bias[a.heads + h];
            g.alpha = exponential_of(-exponential_of(a.A_log[h]) * softplus_of(gate + a.dt_bias[h]));
            beta = sigmoid_of(write);
            break;
        }
        case MAMBA2: {
            beta = softplus_of(p[a.a_column + h] + a.dt_bias[h]);
            beta = std::min(std::max(beta, float(a.least)), float(a.most));
            g.alpha = exponential_of(-exponential_of(a.A_log[h]) * beta);
            break;
        }
        case LONGHORN: {
            const float s = sigmoid_of(a.logits[row * a.logits_step + h]);
            beta = s / (1 + s * k2);
            break;
        }
        case MOMENTUM_DELTA: {
            beta = 1 + std::tanh(p[a.e_column + h] * float(a.e_scale));
            const float r = beta * exponential_of(a.log_factor[key_head]), square = r * r;
            g.mu = sigmoid_of(p[a.b_column + h]) * square / (1 + square);
            const float decay = -exponential_of(a.A_log[key_head]) * softplus_of(p[a.a_column + h] + a.dt_bias[h]);
            g.alpha = exponential_of(decay - std::log1p(square));
            const float log_gamma = -exponential_of(a.Mu_log[key_head]) * softplus_of(p[a.m_column + h] + a.mu_bias[h]);
            g.gamma = exponential_of(std::max(log_gamma, float(a.least)));
            break;
        }
    }
    g.forget = -g.alpha * float(a.eta) * beta;
    g.scale = float(write_scale(a.write, beta, v2, k2));
    return g;
}

// ---- remember ----

// One step of NR rows of S and M, `size` numbers each; lanes are columns.
template <int NR>
INLINE void remember_rows(float* S, float* M, const float* k, const float* q, const float* v, const Gates& g,
                          bool residual, int64_t size, float* y) {
    F p[NR], out[NR];
    const int64_t whole = size / W * W, rest = size - whole;
    for (int r = 0; r < NR; ++r) p[r] = out[r] = zero<float>();
    if (g.forget != 0) {
        for (int64_t j = 0; j < whole; j += W)
            for (int r = 0; r < NR; ++r) p[r] += load(S + r * size + j) * load(k + j);
        if (rest)
            for (int r = 0; r < NR; ++r) p[r] += load_part(S + r * size + whole, rest) * load(k + whole);
    }
    float erase[NR], write[NR];
    for (int r = 0; r < NR; ++r) {
        const float correction = g.forget * sum<float>(p[r]), u = g.scale * v[r];
        erase[r] = residual ? 0.0f : correction;
        write[r] = residual ? u + correction : u;
    }
    const auto update = [&](int64_t j, int64_t count, auto part) {
        const F kj = load(k + j), qj = load(q + j);
        for (int r = 0; r < NR; ++r) {
            float *Sr = S + r * size + j, *Mr = M + r * size + j;
            const F momentum = g.gamma * (part.value ? load_part(Mr, count) : load(Mr)) + write[r] * kj;
            const F x = g.alpha * (part.value ? load_part(Sr, count) : load(Sr)) + erase[r] * kj + g.mu * momentum;
            if (part.value) store_part(Mr, momentum, count), store_part(Sr, x, count);
            else store(Mr, momentum), store(Sr, x);
            out[r] += x * qj;
        }
    };
    for (int64_t j = 0; j < whole; j += W) update(j, W, std::false_type{});
    if (rest) update(whole, rest, std::true_type{});
    for (int r = 0; r < NR; ++r) y[r] = sum<float>(out[r]);
}

// q and k of one head at one token, padded with zeros: as they are, or as unit vectors. Returns |k|^2.
inline float load_keys(const MemoryStep& a, int64_t row, int64_t key_head, float* q, float* k) {
    const float *q_in = a.q + row * a.q_step + key_head * a.m, *k_in = a.k + row * a.k_step + key_head * a.m;
    const float mixed = a.D_log ? exponential_of(a.D_log[key_head]) : 0.0f;
    for (int64_t j = 0; j < a.m; j += W) {
        const F kj = load_part(k_in + j, a.m - j);
        store(k + j, kj);
        store(q + j, load_part(q_in + j, a.m - j) - (a.D_log ? mixed * kj : zero<float>()));
    }
    if (a.unit) {
        const float q_scale = float(a.q_scale) / std::sqrt(square_sum(q, a.m) + 1e-6f);
        const float k_scale = 1.0f / std::sqrt(square_sum(k, a.m) + 1e-6f);
        for (int64_t j = 0; j < a.m; j += W) {
            store(q + j, q_scale * load(q + j));
            store(k + j, k_scale * load(k + j));
        }
    }
    return square_sum(k, a.m);
}

// Rows `first` to `last` of the memory of head h of sequence s, through all tokens of the call.
inline void remember_head(const MemoryStep& a, Team& team, int64_t s, int64_t h, int64_t first, int64_t last) {
    const int64_t T = team.call.length, d = a.d, m = a.m, mp = padded<float>(m), key_head = h / (a.heads / a.key_heads);
    float *q = team.scratch, *k = q + T * mp;
    Gates gates[MOST_ROWS];
    for (int64_t t = 0; t < T; ++t) {
        const int64_t row = s * T + t;
        if (!team.live(row)) continue;
        const float k2 = load_keys(a, row, key_head, q + t * mp, k + t * mp);
        const double v2 = a.write.steps < 0 ? 0 : square_sum(a.v + row * a.v_step + h * d, d);
        gates[t] = head_gates(a, row, h, k2, v2);
    }
    float *S = a.S + s * a.S_step + h * d * m, *M = a.M + s * a.M_step + h * d * m;
    const auto rows = [&](auto count, int64_t i) {
        for (int64_t t = 0; t < T; ++t) {
            const int64_t row = s * T + t;
            float* y = a.y + row * a.y_step + h * d + i;
            if (team.live(row))
                remember_rows<count.value>(S + i * m, M + i * m, k + t * mp, q + t * mp,
                                           a.v + row * a.v_step + h * d + i, gates[t], a.residual, m, y);
            else std::fill_n(y, count.value, 0.0f);
        }
    };
    int64_t i = first;
    for (; i + 4 <= last; i += 4) rows(std::integral_constant<int, 4>{}, i);
    for (; i < last; ++i) rows(std::integral_constant<int, 1>{}, i);
    if (!a.z) return;
    for (int64_t t = 0; t < T; ++t) {  // y = (y + D v) silu(z)
        const int64_t row = s * T + t;
        if (!team.live(row)) continue;
        for (int64_t j = first; j < last; j += W) {
            const int64_t left = last - j, column = h * d + j;
            const F skip = a.skip_per_head ? splat<float>(a.skip[h]) : load_part(a.skip + column, left);
            const F y =
                load_part(a.y + row * a.y_step + column, left) + skip * load_part(a.v + row * a.v_step + column, left);
            store_part(a.y + row * a.y_step + column, y * silu_of(load_part(a.z + row * a.z_step + column, left)),
                       left);
        }
    }
}

inline void remember(const MemoryStep& a, Team& team) {
    constexpr int64_t ROWS = 4;
    const int64_t blocks = (a.d + ROWS - 1) / ROWS;  // of one head
    const Range range = team.share(team.call.sequences * a.heads * blocks);
    for (int64_t unit = range.first; unit < range.last;) {
        const int64_t head = unit / blocks, last = std::min(range.last, (head + 1) * blocks);
        remember_head(a, team, head / a.heads, head % a.heads, unit % blocks * ROWS,
                      std::min(a.d, (last - head * blocks) * ROWS));
        unit = last;
    }
}

// ---- scan ----

// u = c dt x of all channels at one token, in `u`; dt of LongHorn's form in `dt`. Each thread computes them for itself.
inline void scan_writes(const ScanStep& a, int64_t row, float* dt, float* u) {
    const float *x = a.x + row * a.x_step, *given = a.dt + row * a.dt_step, *B = a.B + row * a.B_step;
    const bool longhorn = a.A == nullptr;
    const float B2 = square_sum(B, a.N);
    for (int64_t i = 0; i < a.D; i += W) {
        const int64_t left = a.D - i;
        F step = load_part(given + i, left);
        if (longhorn) {
            step = sigmoid_of(step);
            step = step / (1.0f + step * B2);
        }
        store_part(dt + i, step, left);
        store_part(u + i, step * load_part(x + i, left), left);
    }
    const float c = float(write_scale(a.write, 1.0, a.write.steps < 0 ? 0 : square_sum(u, a.D), B2));
    for (int64_t i = 0; i < a.D; i += W) store_part(u + i, c * load_part(u + i, a.D - i), a.D - i);
}

inline void scan_channels(const ScanStep& a, Team& team, int64_t s, int64_t first, int64_t last, const float* dt,
                          const float* u, int64_t width) {
    const int64_t T = team.call.length, N = a.N;
    for (int64_t t = 0; t < T; ++t) {
        const int64_t row = s * T + t;
        if (!team.live(row)) {
            std::fill(a.y + row * a.y_step + first, a.y + row * a.y_step + last, 0.0f);
            continue;
        }
        const float *B = a.B + row * a.B_step, *C = a.C + row * a.B_step;
        const float gamma =
            momentum_decay(a.p + row * a.p_step + a.gamma_column, a.gamma_kind, a.gamma_bias, a.gamma, 0);
        for (int64_t begin = first; begin < last; begin += W) {
            const int64_t count = std::min<int64_t>(W, last - begin);
            F y[W];
            for (int64_t i = 0; i < W; ++i) y[i] = zero<float>();
            for (int64_t i = 0; i < count; ++i) {
                const int64_t channel = begin + i;
                float *S = a.S + s * a.S_step + channel * N, *M = a.M + s * a.M_step + channel * N;
                const float step = dt[t * width + channel], write = u[t * width + channel];
                for (int64_t j = 0; j < N; j += W) {
                    const int64_t left = N - j;
                    const F Bj = load_part(B + j, left);
                    const F retained =
                        a.A ? exponential<float>(step * load_part(a.A + channel * N + j, left)) : 1.0f - step * Bj * Bj;
                    const F momentum = gamma * load_part(M + j, left) + write * Bj;
                    const F x = retained * load_part(S + j, left) + momentum;
                    store_part(M + j, momentum, left);
                    store_part(S + j, x, left);
                    y[i] += x * load_part(C + j, left);
                }
            }
            F out = sums<float>(y) + load_part(a.skip + begin, count) * load_part(a.x + row * a.x_step + begin, count);
            out *= silu_of(load_part(a.z + row * a.z_step + begin, count));
            store_part(a.y + row * a.y_step + begin, out, count);
        }
    }
}

inline void scan(const ScanStep& a, Team& team) {
    const int64_t T = team.call.length, vectors = (a.D + W - 1) / W, width = vectors * W;
    const Range range = team.share(team.call.sequences * vectors);
    float *dt = team.scratch, *u = dt + T * width;
    for (int64_t unit = range.first; unit < range.last;) {
        const int64_t s = unit / vectors, last = std::min(range.last, (s + 1) * vectors);
        for (int64_t t = 0; t < T; ++t)
            if (team.live(s * T + t)) scan_writes(a, s * T + t, dt + t * width, u + t * width);
        scan_channels(a, team, s, unit % vectors * W, std::min(a.D, (last - s * vectors) * W), dt, u, width);
        unit = last;
    }
}

// ---- attend ----

INLINE void rotate(const float* x, const float* angles, int64_t size, float* out) {
    const int64_t half = size / 2;
    for (int64_t i = 0; i < half; ++i) {
        const float c = angles[i], s = angles[half + i], a = x[i], b = x[half + i];
        out[i] = a * c - b * s;
        out[half + i] = b * c + a * s;
    }
}

inline float inner_product(const float* a, const float* b, int64_t size) {
    F total = zero<float>();
    for (int64_t j = 0; j < size; j += W) total += load_part(a + j, size - j) * load_part(b + j, size - j);
    return sum<float>(total);
}

// All heads that share the keys and values of `head`, of sequence s. The keys of the call are appended first.
inline void attend_head(const AttendStep& a, Team& team, int64_t s, int64_t head) {
    const int64_t T = team.call.length, size = a.size, group = a.heads / a.key_heads;
    float* keys = a.keys + s * a.cache_sequence + head * a.cache_head;
    float* values = a.values + s * a.cache_sequence + head * a.cache_head;
    float *q = team.scratch, *scores = q + padded<float>(size);
    for (int64_t t = 0; t < T; ++t) {
        const float *p = a.p + (s * T + t) * a.p_step, *angles = a.rotary + (s * T + t) * a.rotary_step;
        rotate(p + (a.heads + head) * size, angles, size, keys + (a.past + t) * size);
        std::copy_n(p + (a.heads + a.key_heads + head) * size, size, values + (a.past + t) * size);
    }
    for (int64_t t = 0; t < T; ++t)
        for (int64_t h = head * group; h < (head + 1) * group; ++h) {
            const int64_t row = s * T + t, last = a.past + t + 1, first = std::max<int64_t>(0, last - a.window);
            rotate(a.p + row * a.p_step + h * size, a.rotary + row * a.rotary_step, size, q);
            float most = -INFINITY;
            for (int64_t j = first; j < last; ++j) {
                const bool seen = !a.mask || a.mask[s * a.mask_step + j];
                scores[j - first] = seen ? float(a.scale) * inner_product(q, keys + j * size, size) : -INFINITY;
                most = std::max(most, scores[j - first]);
            }
            float* y = a.y + row * a.y_step + h * size;
            if (most == -INFINITY) {  // padding sees nothing
                std::fill_n(y, size, 0.0f);
                continue;
            }
            F total = zero<float>();
            for (int64_t j = 0; j < last - first; j += W) {
                const int64_t left = last - first - j;
                const F weight = exponential<float>(load_part(scores + j, left) - most);
                store_part(scores + j, weight, left);
                total += load_part(scores + j, left);
            }
            const float scale = 1.0f / sum<float>(total);
            for (int64_t i = 0; i < size; i += W) {
                const int64_t left = size - i;
                F out = zero<float>();
                for (int64_t j = first; j < last; ++j)
                    out += scores[j - first] * load_part(values + j * size + i, left);
                store_part(y + i, scale * out, left);
            }
        }
}

inline void attend(const AttendStep& a, Team& team) {
    const Range range = team.share(team.call.sequences * a.key_heads);
    for (int64_t task = range.first; task < range.last; ++task)
        attend_head(a, team, task / a.key_heads, task % a.key_heads);
}

// ---- the program ----

inline void run_step(const DecodeStep& step, Team& team) {
    switch (step.kind) {
        case EMBED: return embed(*static_cast<const EmbedStep*>(step.arguments), team);
        case PROJECT: return project(*static_cast<const ProjectStep*>(step.arguments), team);
        case CONVOLVE: return convolve(*static_cast<const ConvolveStep*>(step.arguments), team);
        case REMEMBER: return remember(*static_cast<const MemoryStep*>(step.arguments), team);
        case SCAN: return scan(*static_cast<const ScanStep*>(step.arguments), team);
        case ATTEND: return attend(*static_cast<const AttendStep*>(step.arguments), team);
    }
}

int64_t decode_tokens(const DecodeArguments& a) {
    for (int64_t i = 0; i < a.sequences * a.length; ++i)
        if (a.tokens[i] < 0 || a.tokens[i] >= a.vocabulary) return 1;
    Barrier barrier;
    std::vector<Counter> counters(std::size_t(a.count));
    const int threads = int(std::max<int64_t>(1, a.threads));
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#if defined(_OPENMP)  // the runtime can give fewer threads than were asked for
        const int id = omp_get_thread_num(), present = omp_get_num_threads();
#else
        const int id = 0, present = 1;
#endif
        Team team{a, id, present, a.scratch + id * a.scratch_step, nullptr};
        for (int64_t i = 0; i < a.count; ++i) {
            team.counter = &counters[std::size_t(i)];
            run_step(a.steps[i], team);
            if (i + 1 < a.count) barrier.wait(present);
        }
    }
    return 0;
}

// Read `bytes` with all threads, for measuring the bandwidth of the memory. Returns a number so that nothing is skipped.
double read_memory(const ReadArguments& a) {
    const int threads = int(std::max<int64_t>(1, a.threads));
    double result = 0;
#pragma omp parallel for schedule(static) num_threads(threads) reduction(+ : result)
    for (int id = 0; id < threads; ++id) {
        const Range range = share(a.count / 64, id, threads);
        F total[4] = {zero<float>(), zero<float>(), zero<float>(), zero<float>()};
        for (int64_t j = range.first * 64; j < range.last * 64; j += 4 * W)
            for (int i = 0; i < 4; ++i) {
                __builtin_prefetch(a.data + j + i * W + 1024, 0, 2);
                total[i] += load(a.data + j + i * W);
            }
        result += double(sum<float>(total[0] + total[1] + total[2] + total[3]));
    }
    return result;
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
