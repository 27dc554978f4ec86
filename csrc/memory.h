// muon_memory on a CPU: one pass over S and M per step, with rows of S in the lanes of a vector.
//
//     M_t = gamma_t M_{t-1} + u_t k_t^T          u_t = c_t v_t
//     S_t = alpha_t S_{t-1} + w_t k_t^T + M_t    w_t = -alpha_t e_t p_t,  p_t = S_{t-1} k_t
//     y_t = S_t q_t
//
// Rows never interact, so a block of rows walks along t with its slice of S and M in the L1 cache. While S_t is in
// registers, p_{t+1} = S_t k_{t+1} is summed up beside y_t, so that every step needs one pass only. Work goes in
// segments of 64 steps: their inputs are widened and gathered into small contiguous buffers first.
//
// Layout inside: S, M [tile][mp][W], a tile being the W rows of one vector, so that a tile is one stream through the
// cache; q, k [65][mp] (row 64 is zero), u, y [64][dp], with d and m padded to whole vectors.
#pragma once
#include <algorithm>
#include <vector>

#include "write.h"

namespace muonssm {
namespace MUONSSM_ISA {

// Rows lie far apart, where no hardware prefetcher finds them. What comes next is asked for a row at a time, while the
// first block of rows walks along the segment at hand: all at once would stall.
class Ahead {
public:
    void clear() { count_ = 0; }
    void add(std::size_t width, const void* base, int64_t stride, int64_t steps, int64_t size) {
        streams_[count_++] = {static_cast<const char*>(base), stride * int64_t(width), steps, size * int64_t(width)};
    }
    INLINE void fetch(int64_t t) const {
        for (int i = 0; i < count_; ++i)
            if (t < streams_[i].steps)
                for (int64_t b = 0; b < streams_[i].bytes; b += 64) __builtin_prefetch(streams_[i].base + t * streams_[i].stride + b, 0, 2);
    }

private:
    struct Stream { const char* base; int64_t stride, steps, bytes; };
    Stream streams_[8];
    int count_ = 0;
};

template <class T> struct MemoryScratch {
    int64_t d, m, dp, mp;
    Buffer<T> S, M, q, k, v, u, y, alpha, e, gamma, beta, c;
    Buffer<double> v2, k2;
    Ahead ahead;
    MemoryScratch(int64_t d, int64_t m)
        : d(d), m(m), dp(padded<T>(d)), mp(padded<T>(m)), S(mp * dp), M(mp * dp), q((SEGMENT + 1) * mp), k((SEGMENT + 1) * mp),
          v(SEGMENT * dp), u(SEGMENT * dp), y(SEGMENT * dp), alpha(SEGMENT), e(SEGMENT), gamma(SEGMENT), beta(SEGMENT), c(SEGMENT),
          v2(SEGMENT), k2(SEGMENT) {}
};

// Rows of `size` numbers, widened, into rows of `width`; zeros up to whole vectors.
template <class I, class T> void gather(const void* source, int64_t stride, int64_t steps, int64_t size, T* target, int64_t width) {
    const I* in = static_cast<const I*>(source);
    for (int64_t t = 0; t < steps; ++t) {
        for (int64_t i = 0; i < size; ++i) target[t * width + i] = widen(in[t * stride + i]);
        for (int64_t i = size; i < padded<T>(size); ++i) target[t * width + i] = T(0);
    }
}

template <class I> INLINE const I* at(const void* base, int64_t index) { return static_cast<const I*>(base) + index; }
template <class I> INLINE I* at(void* base, int64_t index) { return static_cast<I*>(base) + index; }

// Inputs of steps first .. first + steps of head h, and the gates and scales that follow from them.
template <class T, class I> void load_segment(const MemoryArguments& a, MemoryScratch<T>& s, int64_t first, int64_t steps, int64_t h) {
    const int64_t H = a.heads, row = first * H + h;
    gather<I>(at<I>(a.q, row * s.m), H * s.m, steps, s.m, s.q.get(), s.mp);
    gather<I>(at<I>(a.k, row * s.m), H * s.m, steps, s.m, s.k.get(), s.mp);
    gather<I>(at<I>(a.v, row * s.d), H * s.d, steps, s.d, s.v.get(), s.dp);
    std::memset(s.q + steps * s.mp, 0, std::size_t(s.mp) * sizeof(T));
    std::memset(s.k + steps * s.mp, 0, std::size_t(s.mp) * sizeof(T));
    for (int64_t t = 0; t < steps; ++t) {
        s.alpha[t] = *at<T>(a.log_alpha, row + t * H);
        s.beta[t] = *at<T>(a.beta, row + t * H);
        s.e[t] = T(a.eta) * s.beta[t];
        s.gamma[t] = *at<T>(a.gamma, (first + t) * a.gamma_step + h * a.gamma_head);
        if (a.write.steps >= 0) {
            s.v2[t] = square_norm<T>(s.v + t * s.dp, s.dp);
            s.k2[t] = square_norm<T>(s.k + t * s.mp, s.mp);
        }
    }
    for (int64_t t = 0; t < steps; t += LANES<T>) store(s.alpha + t, exponential<T>(load(s.alpha + t)));
    write_scales(a.write, steps, s.beta.get(), s.v2.get(), s.k2.get(), s.c.get());
    for (int64_t t = 0; t < steps; ++t)
        for (int64_t i = 0; i < s.dp; i += LANES<T>) store(s.u + t * s.dp + i, s.c[t] * load(s.v + t * s.dp + i));
}

template <class I> void add_inputs(const MemoryArguments& a, Ahead& ahead, int64_t first, int64_t steps, int64_t h) {
    const int64_t H = a.heads, row = first * H + h;
    ahead.add(sizeof(I), at<I>(a.q, row * a.m), H * a.m, steps, a.m);
    ahead.add(sizeof(I), at<I>(a.k, row * a.m), H * a.m, steps, a.m);
    ahead.add(sizeof(I), at<I>(a.v, row * a.d), H * a.d, steps, a.d);
}

template <class T> INLINE int64_t tiled(int64_t i, int64_t j, int64_t mp) { return (i / LANES<T> * mp + j) * LANES<T> + i % LANES<T>; }

template <class T> void load_state(const void* base, int64_t index, int64_t d, int64_t m, T* state) {
    const int64_t mp = padded<T>(m);
    std::memset(state, 0, std::size_t(mp * padded<T>(d)) * sizeof(T));
    if (!base) return;
    const T* in = at<T>(base, index * d * m);
    for (int64_t i = 0; i < d; ++i)
        for (int64_t j = 0; j < m; ++j) state[tiled<T>(i, j, mp)] = in[i * m + j];
}

template <class T> void store_state(void* base, int64_t index, int64_t d, int64_t m, const T* state) {
    const int64_t mp = padded<T>(m);
    T* out = at<T>(base, index * d * m);
    for (int64_t i = 0; i < d; ++i)
        for (int64_t j = 0; j < m; ++j) out[i * m + j] = state[tiled<T>(i, j, mp)];
}

template <class I, bool GRADIENT, class T>
void scatter(const T* source, int64_t width, int64_t steps, int64_t size, void* target, int64_t stride) {
    I* out = static_cast<I*>(target);
    for (int64_t t = 0; t < steps; ++t)
        for (int64_t i = 0; i < size; ++i)
            if constexpr (GRADIENT) narrow_gradient(source[t * width + i], out[t * stride + i]);
            else narrow(source[t * width + i], out[t * stride + i]);
}

// NV vectors of rows, starting at `row`, through one segment.
template <class T, int NV, bool ERASE, bool MOMENTUM> void forward_rows(MemoryScratch<T>& s, int64_t row, int64_t steps) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    const int64_t m = s.m, mp = s.mp, dp = s.dp;
    const int64_t tile = mp * W;
    T *S = s.S + row * mp, *M = s.M + row * mp;
    V p[NV];
    for (int v = 0; v < NV; ++v) p[v] = zero<T>();
    if (ERASE)
        for (int64_t j = 0; j < m; ++j)
            for (int v = 0; v < NV; ++v) p[v] += load(S + v * tile + j * W) * broadcast(s.k + j);
    for (int64_t t = 0; t < steps; ++t) {
        if (row == 0) s.ahead.fetch(t);
        const T *k = s.k + t * mp, *q = s.q + t * mp, *k_next = k + mp;
        const T alpha = s.alpha[t], gamma = s.gamma[t], forget = -alpha * s.e[t];
        V u[NV], w[NV], y[NV];
        for (int v = 0; v < NV; ++v) {
            u[v] = load(s.u + t * dp + row + v * W);
            w[v] = ERASE ? forget * p[v] : zero<T>();
            if (!MOMENTUM) w[v] += u[v];
            y[v] = zero<T>();
            p[v] = zero<T>();
        }
        for (int64_t j = 0; j < m; ++j) {
            const V kj = broadcast(k + j), qj = broadcast(q + j), kn = broadcast(k_next + j);
            for (int v = 0; v < NV; ++v) {
                T* Sj = S + v * tile + j * W;
                V x = alpha * load(Sj);
                if (MOMENTUM) {
                    T* Mj = M + v * tile + j * W;
                    const V momentum = gamma * load(Mj) + u[v] * kj;
                    store(Mj, momentum);
                    x += momentum;
                }
                if (ERASE || !MOMENTUM) x += w[v] * kj;
                store(Sj, x);
                y[v] += x * qj;
                if (ERASE) p[v] += x * kn;
            }
        }
        for (int v = 0; v < NV; ++v) store(s.y + t * dp + row + v * W, y[v]);
    }
}

// All rows of `Rows::run<NV>` in blocks of BLOCK vectors, then the rest one by one.
template <class T, int BLOCK, class F> INLINE void over_rows(int64_t dp, F&& block) {
    int64_t row = 0;
    for (; row + BLOCK * LANES<T> <= dp; row += BLOCK * LANES<T>) block(std::integral_constant<int, BLOCK>{}, row);
    for (; row < dp; row += LANES<T>) block(std::integral_constant<int, 1>{}, row);
}

template <class T, bool ERASE, bool MOMENTUM> void forward_segment(MemoryScratch<T>& s, int64_t steps) {
    over_rows<T, 2>(s.dp, [&](auto nv, int64_t row) { forward_rows<T, nv.value, ERASE, MOMENTUM>(s, row, steps); });
}

// Without momentum M is not carried along: it is the last write.
template <class T> void last_write(MemoryScratch<T>& s, int64_t t) {
    for (int64_t i = 0; i < s.dp; i += LANES<T>)
        for (int64_t j = 0; j < s.m; ++j) store(s.M + tiled<T>(i, j, s.mp), load(s.u + t * s.dp + i) * s.k[t * s.mp + j]);
}

// Where each sequence's saved states begin: one for every started segment.
inline std::vector<int64_t> segment_offsets(const int64_t* offsets, int64_t sequences) {
    std::vector<int64_t> result(std::size_t(sequences) + 1, 0);
    for (std::size_t i = 0; i < std::size_t(sequences); ++i)
        result[i + 1] = result[i] + (offsets[i + 1] - offsets[i] + SEGMENT - 1) / SEGMENT;
    return result;
}

template <class T, class I> void memory_forward_typed(const MemoryArguments& a) {
    const std::vector<int64_t> segments = segment_offsets(a.offsets, a.sequences);
    const bool erase = a.eta != 0, momentum = a.momentum != 0;
    const auto segment = erase ? (momentum ? forward_segment<T, true, true> : forward_segment<T, true, false>)
                               : (momentum ? forward_segment<T, false, true> : forward_segment<T, false, false>);
    const int64_t H = a.heads, tasks = a.sequences * H;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min(a.threads, tasks))))
    {
        MemoryScratch<T> s(a.d, a.m);
        const std::size_t state_bytes = std::size_t(s.mp * s.dp) * sizeof(T);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t sequence = task / H, h = task % H, begin = a.offsets[sequence], end = a.offsets[sequence + 1];
            load_state<T>(a.S0, task, s.d, s.m, s.S.get());
            load_state<T>(a.M0, task, s.d, s.m, s.M.get());
            int64_t saved = segments[std::size_t(sequence)];
            for (int64_t t = begin; t < end; t += SEGMENT, ++saved) {
                const int64_t steps = std::min<int64_t>(SEGMENT, end - t), place = (saved * H + h) * s.mp * s.dp;
                if (a.S_saved) std::memcpy(at<T>(a.S_saved, place), s.S, state_bytes);
                if (a.M_saved) std::memcpy(at<T>(a.M_saved, place), s.M, state_bytes);
                load_segment<T, I>(a, s, t, steps, h);
                s.ahead.clear();
                add_inputs<I>(a, s.ahead, t + steps, std::min<int64_t>(SEGMENT, end - t - steps), h);
                s.ahead.add(sizeof(I), at<I>(a.y, (t * H + h) * s.d), H * s.d, steps, s.d);
                segment(s, steps);
                scatter<I, false>(s.y.get(), s.dp, steps, s.d, at<I>(a.y, (t * H + h) * s.d), H * s.d);
                if (!momentum && t + steps == end) last_write(s, steps - 1);
            }
            store_state<T>(a.S, task, s.d, s.m, s.S.get());
            store_state<T>(a.M, task, s.d, s.m, s.M.get());
        }
    }
}

// NR rows of one head through one step, columns in the lanes: rows of S and M are read and written as they lie, mp apart.
template <class T, int NR>
INLINE void step_rows(const T* S, const T* M, T* S_out, T* M_out, const T* k, const T* q, const T* u, T alpha, T gamma, T forget, int64_t mp, T* y) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    V p[NR], out[NR];
    for (int r = 0; r < NR; ++r) p[r] = out[r] = zero<T>();
    for (int64_t j = 0; j < mp; j += W)
        for (int r = 0; r < NR; ++r) p[r] += load(S + r * mp + j) * load(k + j);
    T w[NR];
    for (int r = 0; r < NR; ++r) w[r] = forget * sum<T>(p[r]);
    for (int64_t j = 0; j < mp; j += W) {
        const V kj = load(k + j), qj = load(q + j);
        for (int r = 0; r < NR; ++r) {
            const V momentum = gamma * load(M + r * mp + j) + u[r] * kj;
            const V x = alpha * load(S + r * mp + j) + w[r] * kj + momentum;
            store(M_out + r * mp + j, momentum);
            store(S_out + r * mp + j, x);
            out[r] += x * qj;
        }
    }
    for (int r = 0; r < NR; ++r) y[r] = sum<T>(out[r]);
}

// One step of every sequence (decoding). Returns 1, having done nothing, if some log_alpha is above 0.
template <class T, class I> int64_t memory_step_typed(const MemoryArguments& a) {
    const int64_t H = a.heads, d = a.d, m = a.m, mp = padded<T>(m), dp = padded<T>(d), tasks = a.sequences * H;
    const int64_t threads = tasks * d * m < 32768 ? 1 : std::min(a.threads, tasks);
    for (int64_t i = 0; i < tasks; ++i)
        if (*at<T>(a.log_alpha, i) > 0) return 1;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, threads))) if (threads > 1)
    {
        const bool whole = m == mp && a.S0 && a.M0;  // otherwise the states go through padded copies
        Buffer<T> q(mp), k(mp), v(dp), y(dp), S_copy(whole ? 0 : d * mp), M_copy(whole ? 0 : d * mp);
#pragma omp for schedule(static) nowait
        for (int64_t task = 0; task < tasks; ++task) {
            gather<I>(at<I>(a.q, task * m), 0, 1, m, q.get(), mp);
            gather<I>(at<I>(a.k, task * m), 0, 1, m, k.get(), mp);
            gather<I>(at<I>(a.v, task * d), 0, 1, d, v.get(), dp);
            const T alpha = std::exp(*at<T>(a.log_alpha, task)), beta = *at<T>(a.beta, task), forget = -alpha * T(a.eta) * beta;
            const T gamma = *at<T>(a.gamma, task / H * a.gamma_step + task % H * a.gamma_head);
            const T c = T(write_scale(a.write, beta, square_norm<T>(v, dp), square_norm<T>(k, mp)));
            for (int64_t i = 0; i < d; ++i) v[i] *= c;
            const int64_t place = task * d * m;
            const T *S = whole ? at<T>(a.S0, place) : S_copy.get(), *M = whole ? at<T>(a.M0, place) : M_copy.get();
            T *S_out = whole ? at<T>(a.S, place) : S_copy.get(), *M_out = whole ? at<T>(a.M, place) : M_copy.get();
            if (!whole) {
                if (a.S0) gather<T>(at<T>(a.S0, place), m, d, m, S_copy.get(), mp);
                else std::memset(S_copy.get(), 0, std::size_t(d * mp) * sizeof(T));
                if (a.M0) gather<T>(at<T>(a.M0, place), m, d, m, M_copy.get(), mp);
                else std::memset(M_copy.get(), 0, std::size_t(d * mp) * sizeof(T));
            }
            int64_t i = 0;
            for (; i + 4 <= d; i += 4)
                step_rows<T, 4>(S + i * mp, M + i * mp, S_out + i * mp, M_out + i * mp, k, q, v + i, alpha, gamma, forget, mp, y + i);
            for (; i < d; ++i)
                step_rows<T, 1>(S + i * mp, M + i * mp, S_out + i * mp, M_out + i * mp, k, q, v + i, alpha, gamma, forget, mp, y + i);
            if (!whole) {
                scatter<T, false>(S_out, mp, d, m, at<T>(a.S, place), m);
                scatter<T, false>(M_out, mp, d, m, at<T>(a.M, place), m);
            }
            scatter<I, false>(y.get(), dp, 1, d, at<I>(a.y, task * d), d);
        }
    }
    return 0;
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
