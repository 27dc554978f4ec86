// muon_memory on a CPU: one pass over S and M per time step, with rows of S in the lanes of a vector.
//
//     M_t = gamma_t M_{t-1} + u_t k_t^T               u_t = c_t v_t
//     S_t = alpha_t S_{t-1} + w_t k_t^T + mu_t M_t    w_t = -alpha_t e_t p_t,  p_t = S_{t-1} k_t
//     y_t = S_t q_t
//
// In the residual rule the correction goes into the momentum: u_t = c_t v_t - alpha_t e_t p_t and w_t = 0.
//
// Rows of S never interact. A block of rows goes through all steps of a segment with its slice of S and M in the L1
// cache. While S_t is in registers, p_{t+1} = S_t k_{t+1} is summed together with y_t, so each step needs one pass.
// A segment is 64 steps; its inputs are first converted into small contiguous buffers.
//
// Layout (pictures in LAYOUT.md), with W lanes, and d and m padded to dp and mp, multiples of W:
//     S, M   [tile][mp][W]   a tile is W rows
//     q, k   [65][mp]        row 64 is zero
//     u, y   [64][dp]
#pragma once
#include <algorithm>
#include <vector>

#include "write.h"

namespace muonssm {
namespace MUONSSM_ISA {

// Prefetches the inputs of the next segment. Their rows are too far apart for hardware prefetchers. `fetch(t)` requests
// one row per step of the current segment, because requesting all rows at once would stall.
class Prefetcher {
public:
    void clear() { count_ = 0; }
    void add(std::size_t width, const void* base, int64_t stride, int64_t steps, int64_t size) {
        streams_[count_++] = {static_cast<const char*>(base), stride * int64_t(width), steps, size * int64_t(width)};
    }
    INLINE void fetch(int64_t t) const {
        for (int i = 0; i < count_; ++i)
            if (t < streams_[i].steps)
                for (int64_t b = 0; b < streams_[i].bytes; b += 64)
                    __builtin_prefetch(streams_[i].base + t * streams_[i].stride + b, 0, 2);
    }

private:
    struct Stream {
        const char* base;
        int64_t stride, steps, bytes;
    };
    Stream streams_[8];
    int count_ = 0;
};

// Where the recall correction goes: nowhere (eta is 0), into S, or into M (the residual rule).
enum Correction { NO_CORRECTION, IN_MEMORY, IN_MOMENTUM };

template <class T> struct MemoryScratch {
    int64_t d, m, dp, mp;
    int64_t first = 0, last = dp;  // the rows of the current task
    Buffer<T> S, M, q, k, v, u, y, alpha, e, gamma, mu, beta, c;
    Buffer<double> v2, k2;
    Prefetcher prefetcher;
    MemoryScratch(int64_t d, int64_t m)
        : d(d), m(m), dp(padded<T>(d)), mp(padded<T>(m)), S(mp * dp), M(mp * dp), q((SEGMENT + 1) * mp),
          k((SEGMENT + 1) * mp), v(SEGMENT * dp), u(SEGMENT * dp), y(SEGMENT * dp), alpha(SEGMENT), e(SEGMENT),
          gamma(SEGMENT), mu(SEGMENT), beta(SEGMENT), c(SEGMENT), v2(SEGMENT), k2(SEGMENT) {}
};

// Convert rows of `size` numbers into rows of `width` numbers, filled with zeros up to whole vectors.
template <class I, class T>
void gather(const void* source, int64_t stride, int64_t steps, int64_t size, T* target, int64_t width) {
    const I* in = static_cast<const I*>(source);
    for (int64_t t = 0; t < steps; ++t) {
        for (int64_t i = 0; i < size; ++i) target[t * width + i] = widen(in[t * stride + i]);
        for (int64_t i = size; i < padded<T>(size); ++i) target[t * width + i] = T(0);
    }
}

template <class I> INLINE const I* at(const void* base, int64_t index) { return static_cast<const I*>(base) + index; }
template <class I> INLINE I* at(void* base, int64_t index) { return static_cast<I*>(base) + index; }

// Load the inputs of head h from step `first` on, and compute their gates, scales c and writes u.
template <class T, class I>
void load_segment(const MemoryArguments& a, MemoryScratch<T>& s, int64_t first, int64_t steps, int64_t h) {
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
        s.mu[t] = a.inject ? *at<T>(a.inject, row + t * H) : T(1);
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

template <class I>
void prefetch_inputs(const MemoryArguments& a, Prefetcher& prefetcher, int64_t first, int64_t steps, int64_t h) {
    const int64_t H = a.heads, row = first * H + h;
    prefetcher.add(sizeof(I), at<I>(a.q, row * a.m), H * a.m, steps, a.m);
    prefetcher.add(sizeof(I), at<I>(a.k, row * a.m), H * a.m, steps, a.m);
    prefetcher.add(sizeof(I), at<I>(a.v, row * a.d), H * a.d, steps, a.d);
}

template <class T> INLINE int64_t tiled(int64_t i, int64_t j, int64_t mp) {
    return (i / LANES<T> * mp + j) * LANES<T> + i % LANES<T>;
}

// Load and store the rows `first` to `last` of a state; by default all of them.
template <class T>
void load_state(const void* base, int64_t index, int64_t d, int64_t m, T* state, int64_t first = 0, int64_t last = -1) {
    const int64_t mp = padded<T>(m);
    if (last < 0) last = padded<T>(d);
    std::memset(state + first * mp, 0, std::size_t(mp * (last - first)) * sizeof(T));
    if (!base) return;
    const T* in = at<T>(base, index * d * m);
    for (int64_t i = first; i < std::min(d, last); ++i)
        for (int64_t j = 0; j < m; ++j) state[tiled<T>(i, j, mp)] = in[i * m + j];
}

template <class T>
void store_state(void* base, int64_t index, int64_t d, int64_t m, const T* state, int64_t first = 0,
                 int64_t last = -1) {
    const int64_t mp = padded<T>(m);
    if (last < 0) last = d;
    T* out = at<T>(base, index * d * m);
    for (int64_t i = first; i < std::min(d, last); ++i)
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

// Run NV vectors of rows, from `row` on, through one segment. Without INJECT mu is 1.
template <class T, int NV, Correction CORRECTION, bool MOMENTUM, bool INJECT>
void forward_rows(MemoryScratch<T>& s, int64_t row, int64_t steps) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    constexpr bool ERASE = CORRECTION == IN_MEMORY, RECALL = CORRECTION != NO_CORRECTION;
    const int64_t m = s.m, mp = s.mp, dp = s.dp;
    const int64_t tile = mp * W;
    T *S = s.S + row * mp, *M = s.M + row * mp;
    V p[NV];
    for (int v = 0; v < NV; ++v) p[v] = zero<T>();
    if (RECALL)
        for (int64_t j = 0; j < m; ++j)
            for (int v = 0; v < NV; ++v) p[v] += load(S + v * tile + j * W) * broadcast(s.k + j);
    for (int64_t t = 0; t < steps; ++t) {
        if (row == s.first) s.prefetcher.fetch(t);
        const T *k = s.k + t * mp, *q = s.q + t * mp, *k_next = k + mp;
        const T alpha = s.alpha[t], gamma = s.gamma[t], mu = s.mu[t], forget = -alpha * s.e[t];
        V u[NV], w[NV], y[NV];
        for (int v = 0; v < NV; ++v) {
            u[v] = load(s.u + t * dp + row + v * W);
            if (CORRECTION == IN_MOMENTUM) u[v] += forget * p[v];
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
                    x += INJECT ? mu * momentum : momentum;
                }
                if (ERASE || !MOMENTUM) x += w[v] * kj;
                store(Sj, x);
                y[v] += x * qj;
                if (RECALL) p[v] += x * kn;
            }
        }
        for (int v = 0; v < NV; ++v) store(s.y + t * dp + row + v * W, y[v]);
    }
}

constexpr int ROW_BLOCK = 2;  // vectors of rows that are processed together

// Call `block` for the rows `first` to `last`: in blocks of ROW_BLOCK vectors, then the rest one vector at a time.
template <class T, class F> INLINE void over_rows(int64_t first, int64_t last, F&& block) {
    constexpr int64_t rows = ROW_BLOCK * LANES<T>;
    int64_t row = first;
    for (; row + rows <= last; row += rows) block(std::integral_constant<int, ROW_BLOCK>{}, row);
    for (; row < last; row += LANES<T>) block(std::integral_constant<int, 1>{}, row);
}

// Into how many parts the rows of a task are divided: one, or one per block of rows if there are too few tasks to keep
// the threads busy. Every block is computed alike in both cases, and sums over blocks have the same order.
template <class T> INLINE int64_t row_parts(int64_t dp, int64_t tasks, int64_t threads) {
    const int64_t blocks = (dp + ROW_BLOCK * LANES<T> - 1) / (ROW_BLOCK * LANES<T>);
    const bool uneven = tasks < 2 * threads && tasks % threads != 0;
    return threads > 1 && uneven ? blocks : 1;
}

// Select part `part` of `parts` of the rows.
template <class T> INLINE void select_rows(MemoryScratch<T>& s, int64_t part, int64_t parts) {
    s.first = parts == 1 ? 0 : part * ROW_BLOCK * LANES<T>;
    s.last = parts == 1 ? s.dp : std::min(s.dp, s.first + ROW_BLOCK * LANES<T>);
}

template <class T, Correction CORRECTION, bool MOMENTUM, bool INJECT>
void forward_segment(MemoryScratch<T>& s, int64_t steps) {
    over_rows<T>(s.first, s.last,
                 [&](auto nv, int64_t row) { forward_rows<T, nv.value, CORRECTION, MOMENTUM, INJECT>(s, row, steps); });
}

inline Correction correction(const MemoryArguments& a) {
    return a.eta == 0 ? NO_CORRECTION : a.residual ? IN_MOMENTUM : IN_MEMORY;
}

// The residual rule always multiplies by mu, which costs it nothing.
template <class T> auto choose_forward(const MemoryArguments& a) {
    using Segment = void (*)(MemoryScratch<T>&, int64_t);
    const bool erase = correction(a) == IN_MEMORY;
    if (correction(a) == IN_MOMENTUM) return Segment(forward_segment<T, IN_MOMENTUM, true, true>);
    if (a.inject)
        return erase ? Segment(forward_segment<T, IN_MEMORY, true, true>)
                     : Segment(forward_segment<T, NO_CORRECTION, true, true>);
    if (a.momentum)
        return erase ? Segment(forward_segment<T, IN_MEMORY, true, false>)
                     : Segment(forward_segment<T, NO_CORRECTION, true, false>);
    return erase ? Segment(forward_segment<T, IN_MEMORY, false, false>)
                 : Segment(forward_segment<T, NO_CORRECTION, false, false>);
}

// Without momentum, M is not computed at every step. At the end it is the last write.
template <class T> void last_write(MemoryScratch<T>& s, int64_t t) {
    for (int64_t i = s.first; i < s.last; i += LANES<T>)
        for (int64_t j = 0; j < s.m; ++j)
            store(s.M + tiled<T>(i, j, s.mp), load(s.u + t * s.dp + i) * s.k[t * s.mp + j]);
}

// The index of the first saved state of each sequence; there is one saved state per started segment.
inline std::vector<int64_t> segment_offsets(const int64_t* offsets, int64_t sequences) {
    std::vector<int64_t> result(std::size_t(sequences) + 1, 0);
    for (std::size_t i = 0; i < std::size_t(sequences); ++i)
        result[i + 1] = result[i] + (offsets[i + 1] - offsets[i] + SEGMENT - 1) / SEGMENT;
    return result;
}

template <class T, class I> void memory_forward_typed(const MemoryArguments& a) {
    const std::vector<int64_t> segments = segment_offsets(a.offsets, a.sequences);
    const bool momentum = a.momentum != 0;
    const auto segment = choose_forward<T>(a);
    const int64_t H = a.heads, tasks = a.sequences * H, parts = row_parts<T>(padded<T>(a.d), tasks, a.threads);
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min(a.threads, tasks * parts))))
    {
        MemoryScratch<T> s(a.d, a.m);
#pragma omp for schedule(dynamic)
        for (int64_t index = 0; index < tasks * parts; ++index) {
            const int64_t task = index / parts, sequence = task / H, h = task % H, begin = a.offsets[sequence],
                          end = a.offsets[sequence + 1];
            select_rows(s, index % parts, parts);
            const int64_t slice = s.first * s.mp, size = std::min(s.d, s.last) - s.first;
            const std::size_t state_bytes = std::size_t((s.last - s.first) * s.mp) * sizeof(T);
            load_state<T>(a.S0, task, s.d, s.m, s.S.get(), s.first, s.last);
            load_state<T>(a.M0, task, s.d, s.m, s.M.get(), s.first, s.last);
            int64_t saved = segments[std::size_t(sequence)];
            for (int64_t t = begin; t < end; t += SEGMENT, ++saved) {
                const int64_t steps = std::min<int64_t>(SEGMENT, end - t),
                              place = (saved * H + h) * s.mp * s.dp + slice;
                if (a.S_saved) std::memcpy(at<T>(a.S_saved, place), s.S + slice, state_bytes);
                if (a.M_saved) std::memcpy(at<T>(a.M_saved, place), s.M + slice, state_bytes);
                load_segment<T, I>(a, s, t, steps, h);
                s.prefetcher.clear();
                prefetch_inputs<I>(a, s.prefetcher, t + steps, std::min<int64_t>(SEGMENT, end - t - steps), h);
                I* y = at<I>(a.y, (t * H + h) * s.d + s.first);
                s.prefetcher.add(sizeof(I), y, H * s.d, steps, size);
                segment(s, steps);
                scatter<I, false>(s.y + s.first, s.dp, steps, size, y, H * s.d);
                if (!momentum && t + steps == end) last_write(s, steps - 1);
            }
            store_state<T>(a.S, task, s.d, s.m, s.S.get(), s.first, s.last);
            store_state<T>(a.M, task, s.d, s.m, s.M.get(), s.first, s.last);
        }
    }
}

// Run NR rows of one head through one step. Lanes are columns here: rows of S and M stay in the caller's row-major
// layout, with a stride of mp.
template <class T, int NR>
INLINE void step_rows(const T* S, const T* M, T* S_out, T* M_out, const T* k, const T* q, const T* u, T alpha, T gamma,
                      T mu, T forget, bool residual, int64_t mp, T* y) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    V p[NR], out[NR];
    for (int r = 0; r < NR; ++r) p[r] = out[r] = zero<T>();
    for (int64_t j = 0; j < mp; j += W)
        for (int r = 0; r < NR; ++r) p[r] += load(S + r * mp + j) * load(k + j);
    T w[NR], write[NR];
    for (int r = 0; r < NR; ++r) {
        const T correction = forget * sum<T>(p[r]);
        w[r] = residual ? T(0) : correction;
        write[r] = residual ? u[r] + correction : u[r];
    }
    for (int64_t j = 0; j < mp; j += W) {
        const V kj = load(k + j), qj = load(q + j);
        for (int r = 0; r < NR; ++r) {
            const V momentum = gamma * load(M + r * mp + j) + write[r] * kj;
            const V x = alpha * load(S + r * mp + j) + w[r] * kj + mu * momentum;
            store(M_out + r * mp + j, momentum);
            store(S_out + r * mp + j, x);
            out[r] += x * qj;
        }
    }
    for (int r = 0; r < NR; ++r) y[r] = sum<T>(out[r]);
}

// One step of every sequence (decoding). Returns 1 without doing anything if a log_alpha is above 0.
template <class T, class I> int64_t memory_step_typed(const MemoryArguments& a) {
    const int64_t H = a.heads, d = a.d, m = a.m, mp = padded<T>(m), dp = padded<T>(d), tasks = a.sequences * H;
    const int64_t threads = tasks * d * m < 32768 ? 1 : std::min(a.threads, tasks);
    for (int64_t i = 0; i < tasks; ++i)
        if (*at<T>(a.log_alpha, i) > 0) return 1;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, threads))) if (threads > 1)
    {
        const bool whole = m == mp && a.S0 && a.M0;  // otherwise states are copied to padded buffers
        Buffer<T> q(mp), k(mp), v(dp), y(dp), S_copy(whole ? 0 : d * mp), M_copy(whole ? 0 : d * mp);
#pragma omp for schedule(static) nowait
        for (int64_t task = 0; task < tasks; ++task) {
            gather<I>(at<I>(a.q, task * m), 0, 1, m, q.get(), mp);
            gather<I>(at<I>(a.k, task * m), 0, 1, m, k.get(), mp);
            gather<I>(at<I>(a.v, task * d), 0, 1, d, v.get(), dp);
            const T alpha = std::exp(*at<T>(a.log_alpha, task)), beta = *at<T>(a.beta, task),
                    forget = -alpha * T(a.eta) * beta;
            const T gamma = *at<T>(a.gamma, task / H * a.gamma_step + task % H * a.gamma_head);
            const T mu = a.inject ? *at<T>(a.inject, task) : T(1);
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
                step_rows<T, 4>(S + i * mp, M + i * mp, S_out + i * mp, M_out + i * mp, k, q, v + i, alpha, gamma, mu,
                                forget, a.residual, mp, y + i);
            for (; i < d; ++i)
                step_rows<T, 1>(S + i * mp, M + i * mp, S_out + i * mp, M_out + i * mp, k, q, v + i, alpha, gamma, mu,
                                forget, a.residual, mp, y + i);
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
