// Backward pass of muon_memory: the adjoint recurrence from the last step to the first.
//
// Segments of 64 steps are processed from the last to the first. The states inside a segment are recomputed from the
// saved one; S_{t-1} of every step is kept for one block of rows. Then, with dS, dM the gradients of S_t, M_t, and
// r_t = dS k_t, p_t = S_{t-1} k_t,
//
//     dq_t = S_t^T dy_t                    dM += dS
//     du_t = dM k_t                        dk_t = dM^T u_t - alpha_t e_t (S_{t-1}^T r_t + dS^T p_t)
//     dgamma_t = <dM, M_{t-1}>             dalpha_t = <dS, S_{t-1}> - e_t p_t.r_t,   de_t = -alpha_t p_t.r_t
//     dS <- alpha_t (dS - e_t r_t k_t^T) + dy_{t-1} q_{t-1}^T,   dM <- gamma_t dM
//
// in one pass per step: r_{t-1} is summed while dS of step t - 1 is in registers. With a gate mu_t on M_t, dM += mu_t dS
// and dmu_t = <dS, M_t>.
//
// In the residual rule, where u_t contains -alpha_t e_t p_t, r_t = du_t = dM k_t takes the place of dS k_t:
//
//     dk_t = dM^T u_t - alpha_t e_t S_{t-1}^T r_t,    dS <- alpha_t (dS - e_t r_t k_t^T) + dy_{t-1} q_{t-1}^T
//
// with the same dalpha and de. r_{t-1} is summed while dM of step t - 1, which contains mu_{t-1} dS, is in registers.
//
// Sums over rows are sums over lanes, computed for W columns at a time. A task is one head of one sequence, so every sum
// has a fixed order.
#pragma once
#include "memory.h"

namespace muonssm {
namespace MUONSSM_ISA {

template <class T> struct MemoryGradients {
    MemoryScratch<T>& s;
    Buffer<T> dS, dM, dy, du, own_dq, own_dk, p, S_before, M_before, dalpha, dgamma, dmu, pr;
    T *dq = own_dq.get(), *dk = own_dk.get();  // where sums of the current rows go
    explicit MemoryGradients(MemoryScratch<T>& s, bool keep_M)
        : s(s), dS(s.mp * s.dp), dM(s.mp * s.dp), dy(SEGMENT * s.dp), du(SEGMENT * s.dp), own_dq(SEGMENT * s.mp),
          own_dk(SEGMENT * s.mp), p(SEGMENT * s.dp), S_before((SEGMENT + 1) * s.mp * ROW_BLOCK * LANES<T>),
          M_before(keep_M ? (SEGMENT + 1) * s.mp * ROW_BLOCK * LANES<T> : 0), dalpha(SEGMENT), dgamma(SEGMENT),
          dmu(SEGMENT), pr(SEGMENT) {}
};

// Recompute a segment for NV vectors of rows: store S_{t-1}, p_t and, with KEEP_M, M_{t-1} of every step, and add to dq.
template <class T, int NV, Correction CORRECTION, bool MOMENTUM, bool INJECT, bool KEEP_M>
void recompute_rows(MemoryGradients<T>& g, int64_t row, int64_t steps) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    constexpr bool ERASE = CORRECTION == IN_MEMORY, RECALL = CORRECTION != NO_CORRECTION;
    MemoryScratch<T>& s = g.s;
    const int64_t mp = s.mp, dp = s.dp, tile = mp * W;
    T* M = s.M + row * mp;
    V p[NV];
    for (int v = 0; v < NV; ++v) p[v] = zero<T>();
    std::memcpy(g.S_before.get(), s.S + row * mp, std::size_t(NV * tile) * sizeof(T));
    if (RECALL)
        for (int64_t j = 0; j < mp; ++j)
            for (int v = 0; v < NV; ++v) p[v] += load(g.S_before + v * tile + j * W) * broadcast(s.k + j);
    for (int64_t t = 0; t < steps; ++t) {
        if (row == s.first) s.prefetcher.fetch(t);
        const T *k = s.k + t * mp, *k_next = k + mp;
        const T alpha = s.alpha[t], gamma = s.gamma[t], mu = s.mu[t], forget = -alpha * s.e[t];
        T *S = g.S_before + t * NV * tile, *S_after = S + NV * tile,
          *M_kept = g.M_before + (KEEP_M ? t * NV * tile : 0);
        V u[NV], w[NV], dy[NV];
        for (int v = 0; v < NV; ++v) {
            u[v] = load(s.u + t * dp + row + v * W);
            if (CORRECTION == IN_MOMENTUM) u[v] += forget * p[v];
            dy[v] = load(g.dy + t * dp + row + v * W);
            w[v] = ERASE ? forget * p[v] : zero<T>();
            if (!MOMENTUM) w[v] += u[v];
            if (RECALL) store(g.p + t * dp + row + v * W, p[v]);
            p[v] = zero<T>();
        }
        for (int64_t group = 0; group < mp; group += W) {
            V dq[W];
            for (int c = 0; c < W; ++c) {
                const int64_t j = group + c;
                const V kj = broadcast(k + j), kn = broadcast(k_next + j);
                for (int v = 0; v < NV; ++v) {
                    V x = alpha * load(S + v * tile + j * W);
                    if (MOMENTUM) {
                        T* Mj = M + v * tile + j * W;
                        V momentum = load(Mj);
                        if (KEEP_M) store(M_kept + v * tile + j * W, momentum);
                        momentum = gamma * momentum + u[v] * kj;
                        store(Mj, momentum);
                        x += INJECT ? mu * momentum : momentum;
                    }
                    if (ERASE || !MOMENTUM) x += w[v] * kj;
                    store(S_after + v * tile + j * W, x);
                    dq[c] = v == 0 ? x * dy[v] : dq[c] + x * dy[v];
                    if (RECALL) p[v] += x * kn;
                }
            }
            T* out = g.dq + t * mp + group;
            store(out, load(out) + sums<T>(dq));
        }
    }
    if (KEEP_M) std::memcpy(g.M_before + steps * NV * tile, M, std::size_t(NV * tile) * sizeof(T));
}

template <class T, int NV, Correction CORRECTION, bool MOMENTUM, bool INJECT, bool KEEP_M>
void backward_rows(MemoryGradients<T>& g, int64_t row, int64_t steps) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    constexpr bool ERASE = CORRECTION == IN_MEMORY, RESIDUAL = CORRECTION == IN_MOMENTUM;
    MemoryScratch<T>& s = g.s;
    const int64_t mp = s.mp, dp = s.dp, tile = mp * W;
    T *dS = g.dS + row * mp, *dM = g.dM + row * mp;
    const T mu_last = s.mu[steps - 1];
    V r[NV], dy[NV];
    for (int v = 0; v < NV; ++v) {
        r[v] = zero<T>();
        dy[v] = load(g.dy + (steps - 1) * dp + row + v * W);
    }
    for (int64_t j = 0; j < mp; ++j)
        for (int v = 0; v < NV; ++v) {
            T* dSj = dS + v * tile + j * W;
            const V x = load(dSj) + dy[v] * broadcast(s.q + (steps - 1) * mp + j);
            store(dSj, x);
            if (ERASE) r[v] += x * broadcast(s.k + (steps - 1) * mp + j);
            if (RESIDUAL) {  // dM of a step contains mu dS before the step is reached
                T* dMj = dM + v * tile + j * W;
                const V z = load(dMj) + mu_last * x;
                store(dMj, z);
                r[v] += z * broadcast(s.k + (steps - 1) * mp + j);
            }
        }
    for (int64_t t = steps - 1; t >= 0; --t) {
        const int64_t before =
            t > 0 ? t - 1 : SEGMENT;  // row SEGMENT of q and k is zero: the step before the segment is not part of it
        const T *k = s.k + t * mp, *k_before = s.k + before * mp, *q_before = s.q + before * mp;
        const T alpha = s.alpha[t], gamma = s.gamma[t], mu = s.mu[t], forget = -alpha * s.e[t],
                mu_before = t > 0 ? s.mu[t - 1] : T(0);
        const T *S_kept = g.S_before + t * NV * tile, *M_kept = g.M_before + (KEEP_M ? t * NV * tile : 0);
        V u[NV], wr[NV], wp[NV], du[NV], dalpha = zero<T>(), dgamma = zero<T>(), dmu = zero<T>(), pr = zero<T>();
        for (int v = 0; v < NV; ++v) {
            u[v] = load(s.u + t * dp + row + v * W);
            du[v] = RESIDUAL ? r[v] : zero<T>();
            if (CORRECTION != NO_CORRECTION) {
                const V p = load(g.p + t * dp + row + v * W);
                pr += p * r[v];
                wr[v] = forget * r[v];
                wp[v] = forget * p;
                if (RESIDUAL) u[v] += wp[v];
            }
            dy[v] = t > 0 ? load(g.dy + before * dp + row + v * W) : zero<T>();
            r[v] = zero<T>();
        }
        for (int64_t group = 0; group < mp; group += W) {
            V dk[W];
            for (int c = 0; c < W; ++c) {
                const int64_t j = group + c;
                const V kj = broadcast(k + j), kb = broadcast(k_before + j), qb = broadcast(q_before + j);
                for (int v = 0; v < NV; ++v) {
                    T* dSj = dS + v * tile + j * W;
                    const V G = load(dSj), S_j = load(S_kept + v * tile + j * W);
                    T* place = dM + v * tile + j * W;
                    V dMj = RESIDUAL ? load(place) : INJECT ? mu * G : G;
                    if (MOMENTUM && !RESIDUAL) {
                        dMj += load(place);
                        store(place, gamma * dMj);
                    }
                    if (KEEP_M) dgamma += dMj * load(M_kept + v * tile + j * W);
                    if (KEEP_M && INJECT) dmu += G * load(M_kept + (NV + v) * tile + j * W);
                    if (!RESIDUAL) du[v] += dMj * kj;
                    V x = dMj * u[v];
                    if (ERASE) x += S_j * wr[v] + G * wp[v];
                    if (RESIDUAL) x += S_j * wr[v];
                    dk[c] = v == 0 ? x : dk[c] + x;
                    dalpha += G * S_j;
                    V next = alpha * G + dy[v] * qb;
                    if (CORRECTION != NO_CORRECTION) next += wr[v] * kj;
                    if (ERASE) r[v] += next * kb;
                    if (RESIDUAL) {
                        const V z = gamma * dMj + mu_before * next;
                        store(place, z);
                        r[v] += z * kb;
                    }
                    store(dSj, next);
                }
            }
            T* out = g.dk + t * mp + group;
            store(out, load(out) + sums<T>(dk));
        }
        for (int v = 0; v < NV; ++v) store(g.du + t * dp + row + v * W, du[v]);
        g.dalpha[t] += sum<T>(dalpha);
        if (KEEP_M) g.dgamma[t] += sum<T>(dgamma);
        if (KEEP_M && INJECT) g.dmu[t] += sum<T>(dmu);
        if (CORRECTION != NO_CORRECTION) g.pr[t] += sum<T>(pr);
    }
}

template <class T, Correction CORRECTION, bool MOMENTUM, bool INJECT, bool KEEP_M>
void backward_segment(MemoryGradients<T>& g, int64_t steps) {
    over_rows<T>(g.s.first, g.s.last, [&](auto nv, int64_t row) {
        recompute_rows<T, nv.value, CORRECTION, MOMENTUM, INJECT, KEEP_M>(g, row, steps);
        backward_rows<T, nv.value, CORRECTION, MOMENTUM, INJECT, KEEP_M>(g, row, steps);
    });
}

template <class T> using BackwardSegment = void (*)(MemoryGradients<T>&, int64_t);

template <class T, bool KEEP_M> BackwardSegment<T> choose_backward(const MemoryArguments& a) {
    const bool erase = correction(a) == IN_MEMORY;
    if (correction(a) == IN_MOMENTUM) return backward_segment<T, IN_MOMENTUM, true, true, KEEP_M>;
    if (a.inject)
        return erase ? BackwardSegment<T>(backward_segment<T, IN_MEMORY, true, true, KEEP_M>)
                     : BackwardSegment<T>(backward_segment<T, NO_CORRECTION, true, true, KEEP_M>);
    return erase ? BackwardSegment<T>(backward_segment<T, IN_MEMORY, true, false, KEEP_M>)
                 : BackwardSegment<T>(backward_segment<T, NO_CORRECTION, true, false, KEEP_M>);
}

// Turn du, dk, dalpha, ... of the recurrence into gradients of the inputs, by the derivative of the write's scale.
template <class T, class I>
void store_gradients(const MemoryArguments& a, MemoryGradients<T>& g, int64_t first, int64_t steps, int64_t h) {
    MemoryScratch<T>& s = g.s;
    const int64_t H = a.heads, row = first * H + h;
    for (int64_t t = 0; t < steps; ++t) {
        T *du = g.du + t * s.dp, *dk = g.dk + t * s.mp;
        const T *v = s.v + t * s.dp, *k = s.k + t * s.mp;
        Vec<T> product = zero<T>();
        for (int64_t i = 0; i < s.dp; i += LANES<T>) product += load(v + i) * load(du + i);
        const WriteGradient w = write_gradient(a.write, s.beta[t], s.v2[t], s.k2[t], s.c[t], double(sum<T>(product)));
        for (int64_t i = 0; i < s.dp; i += LANES<T>) store(du + i, s.c[t] * load(du + i) + T(w.v) * load(v + i));
        for (int64_t j = 0; j < s.mp; j += LANES<T>) store(dk + j, load(dk + j) + T(w.k) * load(k + j));
        *at<T>(a.dlog_alpha, row + t * H) = s.alpha[t] * (g.dalpha[t] - s.e[t] * g.pr[t]);
        *at<T>(a.dbeta, row + t * H) = T(w.beta) - T(a.eta) * s.alpha[t] * g.pr[t];
        if (a.dgamma) *at<T>(a.dgamma, row + t * H) = g.dgamma[t];
        if (a.dinject) *at<T>(a.dinject, row + t * H) = g.dmu[t];
    }
    scatter<I, true>(g.dq, s.mp, steps, s.m, at<I>(a.dq, row * s.m), H * s.m);
    scatter<I, true>(g.dk, s.mp, steps, s.m, at<I>(a.dk, row * s.m), H * s.m);
    scatter<I, true>(g.du.get(), s.dp, steps, s.d, at<I>(a.dv, row * s.d), H * s.d);
}

template <class T> struct BackwardSegments {  // without momentum M is the last write alone, which has a gradient
    BackwardSegment<T> with_momentum, without;
};

// Load the inputs of a segment, and what is to be prefetched while it is processed.
template <class T, class I>
void load_backward(const MemoryArguments& a, MemoryGradients<T>& g, int64_t t, int64_t steps, int64_t n, int64_t h) {
    MemoryScratch<T>& s = g.s;
    const int64_t H = a.heads;
    load_segment<T, I>(a, s, t, steps, h);
    std::memset(s.q + SEGMENT * s.mp, 0, std::size_t(s.mp) * sizeof(T));
    std::memset(s.k + SEGMENT * s.mp, 0, std::size_t(s.mp) * sizeof(T));
    gather<I>(at<I>(a.dy, (t * H + h) * s.d), H * s.d, steps, s.d, g.dy.get(), s.dp);
    s.prefetcher.clear();
    if (n == 0) return;
    prefetch_inputs<I>(a, s.prefetcher, t - SEGMENT, SEGMENT, h);
    s.prefetcher.add(sizeof(I), at<I>(a.dy, ((t - SEGMENT) * H + h) * s.d), H * s.d, SEGMENT, s.d);
}

// Process the current rows of a segment: dS and dM go from its end to its beginning; du, dq, dk, dalpha, ... are set.
template <class T>
void backward_rows_of(const MemoryArguments& a, MemoryGradients<T>& g, const BackwardSegments<T>& segments,
                      int64_t state, int64_t steps, bool last) {
    MemoryScratch<T>& s = g.s;
    const int64_t slice = s.first * s.mp, place = state * s.mp * s.dp + slice;
    const std::size_t state_bytes = std::size_t((s.last - s.first) * s.mp) * sizeof(T);
    std::memcpy(s.S + slice, at<T>(a.S_saved, place), state_bytes);
    if (a.M_saved) std::memcpy(s.M + slice, at<T>(a.M_saved, place), state_bytes);
    else std::memset(s.M + slice, 0, state_bytes);
    for (T* zeroed : {g.dq, g.dk}) std::memset(zeroed, 0, std::size_t(SEGMENT * s.mp) * sizeof(T));
    for (Buffer<T>* zeroed : {&g.dalpha, &g.dgamma, &g.dmu, &g.pr}) std::memset(zeroed->get(), 0, SEGMENT * sizeof(T));
    (a.momentum || last ? segments.with_momentum : segments.without)(g, steps);
}

// Store the gradients of the initial states; those of an empty sequence pass through.
template <class T> void store_state_gradients(const MemoryArguments& a, MemoryGradients<T>& g, int64_t task) {
    MemoryScratch<T>& s = g.s;
    const int64_t sequence = task / a.heads;
    store_state<T>(a.dS0, task, s.d, s.m, g.dS.get(), s.first, s.last);
    if (!a.momentum && a.offsets[sequence] != a.offsets[sequence + 1])
        std::memset(g.dM + s.first * s.mp, 0, std::size_t((s.last - s.first) * s.mp) * sizeof(T));
    store_state<T>(a.dM0, task, s.d, s.m, g.dM.get(), s.first, s.last);
}

// Every thread takes whole tasks.
template <class T, class I> void backward_by_tasks(const MemoryArguments& a, const BackwardSegments<T>& segments) {
    const std::vector<int64_t> saved = segment_offsets(a.offsets, a.sequences);
    const int64_t H = a.heads, tasks = a.sequences * H;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min(a.threads, tasks))))
    {
        MemoryScratch<T> s(a.d, a.m);
        MemoryGradients<T> g(s, a.dgamma || a.dinject);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t sequence = task / H, h = task % H, begin = a.offsets[sequence], end = a.offsets[sequence + 1];
            load_state<T>(a.dS, task, s.d, s.m, g.dS.get());
            load_state<T>(a.dM, task, s.d, s.m, g.dM.get());
            const int64_t base = saved[std::size_t(sequence)];
            for (int64_t n = saved[std::size_t(sequence) + 1] - base - 1; n >= 0; --n) {
                const int64_t t = begin + n * SEGMENT, steps = std::min<int64_t>(SEGMENT, end - t);
                load_backward<T, I>(a, g, t, steps, n, h);
                s.prefetcher.add(sizeof(I), at<I>(a.dq, (t * H + h) * s.m), H * s.m, steps, s.m);
                s.prefetcher.add(sizeof(I), at<I>(a.dk, (t * H + h) * s.m), H * s.m, steps, s.m);
                s.prefetcher.add(sizeof(I), at<I>(a.dv, (t * H + h) * s.d), H * s.d, steps, s.d);
                backward_rows_of(a, g, segments, (base + n) * H + h, steps, t + steps == end);
                store_gradients<T, I>(a, g, t, steps, h);
            }
            store_state_gradients(a, g, task);
        }
    }
}

constexpr int64_t WINDOW = 8;  // segments between two meetings of the threads that share a task

// What the blocks of rows of a task compute for the segments of a window, until it is added up.
template <class T> struct Partial {
    int64_t parts, mp, dp;
    Buffer<T> dq, dk, gates, du;  // [tasks][WINDOW][parts][64][mp], gates [...][4][64], du [tasks][WINDOW][64][dp]
    Partial(int64_t tasks, int64_t parts, int64_t mp, int64_t dp)
        : parts(parts), mp(mp), dp(dp), dq(tasks * WINDOW * parts * SEGMENT * mp),
          dk(tasks * WINDOW * parts * SEGMENT * mp), gates(tasks * WINDOW * parts * 4 * SEGMENT),
          du(tasks * WINDOW * SEGMENT * dp) {}

    // Let the next block of rows write its dq and dk here.
    void take(MemoryGradients<T>& g, int64_t place, int64_t part) {
        g.dq = dq + (place * parts + part) * SEGMENT * mp;
        g.dk = dk + (place * parts + part) * SEGMENT * mp;
    }

    // Keep the other results of a block of rows.
    void keep(MemoryGradients<T>& g, int64_t place, int64_t part) {
        const int64_t at = place * parts + part, first = g.s.first, count = g.s.last - first;
        T* gate = gates + at * 4 * SEGMENT;
        for (Buffer<T>* each : {&g.dalpha, &g.dgamma, &g.dmu, &g.pr}) {
            std::memcpy(gate, each->get(), SEGMENT * sizeof(T));
            gate += SEGMENT;
        }
        for (int64_t t = 0; t < SEGMENT; ++t)
            std::memcpy(du + (place * SEGMENT + t) * dp + first, g.du + t * dp + first, std::size_t(count) * sizeof(T));
    }

    // Add up the blocks in their order, as one thread does that goes through all rows.
    void sum(MemoryGradients<T>& g, int64_t place) {
        std::memcpy(g.du.get(), du + place * SEGMENT * dp, std::size_t(SEGMENT * dp) * sizeof(T));
        for (int64_t part = 0; part < parts; ++part) {
            const int64_t at = place * parts + part;
            add(dq + at * SEGMENT * mp, g.dq, SEGMENT * mp, part == 0);
            add(dk + at * SEGMENT * mp, g.dk, SEGMENT * mp, part == 0);
            T* gate = gates + at * 4 * SEGMENT;
            for (Buffer<T>* each : {&g.dalpha, &g.dgamma, &g.dmu, &g.pr}) {
                add(gate, each->get(), SEGMENT, part == 0);
                gate += SEGMENT;
            }
        }
    }

    static void add(const T* from, T* to, int64_t count, bool first) {
        for (int64_t i = 0; i < count; ++i) to[i] = first ? from[i] : to[i] + from[i];
    }
};

// Several threads share a task: each takes blocks of rows through a window of segments; then the blocks are added up.
template <class T, class I>
void backward_by_rows(const MemoryArguments& a, const BackwardSegments<T>& segments, int64_t parts) {
    const std::vector<int64_t> saved = segment_offsets(a.offsets, a.sequences);
    const int64_t H = a.heads, tasks = a.sequences * H, mp = padded<T>(a.m), dp = padded<T>(a.d);
    int64_t longest = 0;
    for (std::size_t i = 0; i < std::size_t(a.sequences); ++i) longest = std::max(longest, saved[i + 1] - saved[i]);
    // Each thread takes neighboring blocks of rows, so that it loads the inputs of a segment once for all of them.
    const int64_t shares = std::min(parts, std::max<int64_t>(1, (a.threads + tasks - 1) / tasks));
    Partial<T> partial(tasks, parts, mp, dp);
    Buffer<T> dS(tasks * mp * dp), dM(tasks * mp * dp);
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min(a.threads, tasks * shares))))
    {
        MemoryScratch<T> s(a.d, a.m);
        MemoryGradients<T> g(s, a.dgamma || a.dinject);
        for (int64_t done = 0; done == 0 || done < longest; done += WINDOW) {
#pragma omp for schedule(dynamic)
            for (int64_t index = 0; index < tasks * shares; ++index) {
                const int64_t task = index / shares, share = index % shares, sequence = task / H, h = task % H,
                              base = saved[std::size_t(sequence)], count = saved[std::size_t(sequence) + 1] - base,
                              end = a.offsets[sequence + 1], low = share * parts / shares,
                              high = (share + 1) * parts / shares;
                select_rows(s, low, parts);
                const int64_t first = s.first;
                select_rows(s, high - 1, parts);
                s.first = first;
                const int64_t slice = first * mp, place = task * mp * dp + slice;
                const std::size_t state_bytes = std::size_t((s.last - first) * mp) * sizeof(T);
                if (done == 0) {
                    load_state<T>(a.dS, task, s.d, s.m, g.dS.get(), s.first, s.last);
                    load_state<T>(a.dM, task, s.d, s.m, g.dM.get(), s.first, s.last);
                } else {
                    std::memcpy(g.dS + slice, dS + place, state_bytes);
                    std::memcpy(g.dM + slice, dM + place, state_bytes);
                }
                for (int64_t n = count - 1 - done; n >= std::max<int64_t>(0, count - done - WINDOW); --n) {
                    const int64_t t = a.offsets[sequence] + n * SEGMENT, steps = std::min<int64_t>(SEGMENT, end - t),
                                  kept = task * WINDOW + (count - 1 - done - n);
                    load_backward<T, I>(a, g, t, steps, n, h);
                    for (int64_t part = low; part < high; ++part) {
                        select_rows(s, part, parts);
                        partial.take(g, kept, part);
                        backward_rows_of(a, g, segments, (base + n) * H + h, steps, t + steps == end);
                        partial.keep(g, kept, part);
                    }
                }
                select_rows(s, high - 1, parts);
                s.first = first;
                std::memcpy(dS + place, g.dS + slice, state_bytes);
                std::memcpy(dM + place, g.dM + slice, state_bytes);
                if (done + WINDOW >= longest) store_state_gradients(a, g, task);
            }
            g.dq = g.own_dq;
            g.dk = g.own_dk;
#pragma omp for schedule(dynamic)
            for (int64_t index = 0; index < tasks * WINDOW; ++index) {
                const int64_t task = index / WINDOW, sequence = task / H, h = task % H,
                              count = saved[std::size_t(sequence) + 1] - saved[std::size_t(sequence)],
                              n = count - 1 - done - index % WINDOW;
                if (n < 0) continue;
                const int64_t t = a.offsets[sequence] + n * SEGMENT,
                              steps = std::min<int64_t>(SEGMENT, a.offsets[sequence + 1] - t);
                load_segment<T, I>(a, s, t, steps, h);
                partial.sum(g, index);
                store_gradients<T, I>(a, g, t, steps, h);
            }
        }
    }
}

template <class T, class I> void memory_backward_typed(const MemoryArguments& a) {
    const bool keep_M = a.dgamma != nullptr || a.dinject != nullptr;
    const BackwardSegments<T> segments{keep_M ? choose_backward<T, true>(a) : choose_backward<T, false>(a),
                                       correction(a) == IN_MEMORY
                                           ? backward_segment<T, IN_MEMORY, false, false, false>
                                           : backward_segment<T, NO_CORRECTION, false, false, false>};
    const int64_t parts = row_parts<T>(padded<T>(a.d), a.sequences * a.heads, a.threads);
    if (parts == 1) backward_by_tasks<T, I>(a, segments);
    else backward_by_rows<T, I>(a, segments, parts);
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
