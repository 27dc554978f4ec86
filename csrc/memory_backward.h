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
// in one pass per step: r_{t-1} is summed while dS of step t - 1 is in registers. Sums over rows are sums over lanes,
// computed for W columns at a time. A task is one head of one sequence, so every sum has a fixed order.
#pragma once
#include "memory.h"

namespace muonssm {
namespace MUONSSM_ISA {

template <class T> struct MemoryGradients {
    MemoryScratch<T>& s;
    Buffer<T> dS, dM, dy, du, dq, dk, p, S_before, M_before, dalpha, dgamma, pr;
    static constexpr int BLOCK = 2;  // vectors of rows that are processed together
    explicit MemoryGradients(MemoryScratch<T>& s, bool gamma)
        : s(s), dS(s.mp * s.dp), dM(s.mp * s.dp), dy(SEGMENT * s.dp), du(SEGMENT * s.dp), dq(SEGMENT * s.mp),
          dk(SEGMENT * s.mp), p(SEGMENT * s.dp), S_before((SEGMENT + 1) * s.mp * BLOCK * LANES<T>),
          M_before(gamma ? SEGMENT * s.mp * BLOCK * LANES<T> : 0), dalpha(SEGMENT), dgamma(SEGMENT), pr(SEGMENT) {}
};

// Recompute a segment for NV vectors of rows: store S_{t-1}, M_{t-1} and p_t of every step, and add to dq.
template <class T, int NV, bool ERASE, bool MOMENTUM, bool DGAMMA>
void recompute_rows(MemoryGradients<T>& g, int64_t row, int64_t steps) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    MemoryScratch<T>& s = g.s;
    const int64_t mp = s.mp, dp = s.dp, tile = mp * W;
    T* M = s.M + row * mp;
    V p[NV];
    for (int v = 0; v < NV; ++v) p[v] = zero<T>();
    std::memcpy(g.S_before.get(), s.S + row * mp, std::size_t(NV * tile) * sizeof(T));
    if (ERASE)
        for (int64_t j = 0; j < mp; ++j)
            for (int v = 0; v < NV; ++v) p[v] += load(g.S_before + v * tile + j * W) * broadcast(s.k + j);
    for (int64_t t = 0; t < steps; ++t) {
        if (row == 0) s.prefetcher.fetch(t);
        const T *k = s.k + t * mp, *k_next = k + mp;
        const T alpha = s.alpha[t], gamma = s.gamma[t], forget = -alpha * s.e[t];
        T *S = g.S_before + t * NV * tile, *S_after = S + NV * tile,
          *M_kept = g.M_before + (DGAMMA ? t * NV * tile : 0);
        V u[NV], w[NV], dy[NV];
        for (int v = 0; v < NV; ++v) {
            u[v] = load(s.u + t * dp + row + v * W);
            dy[v] = load(g.dy + t * dp + row + v * W);
            w[v] = ERASE ? forget * p[v] : zero<T>();
            if (!MOMENTUM) w[v] += u[v];
            if (ERASE) store(g.p + t * dp + row + v * W, p[v]);
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
                        if (DGAMMA) store(M_kept + v * tile + j * W, momentum);
                        momentum = gamma * momentum + u[v] * kj;
                        store(Mj, momentum);
                        x += momentum;
                    }
                    if (ERASE || !MOMENTUM) x += w[v] * kj;
                    store(S_after + v * tile + j * W, x);
                    dq[c] = v == 0 ? x * dy[v] : dq[c] + x * dy[v];
                    if (ERASE) p[v] += x * kn;
                }
            }
            T* out = g.dq + t * mp + group;
            store(out, load(out) + sums<T>(dq));
        }
    }
}

template <class T, int NV, bool ERASE, bool MOMENTUM, bool DGAMMA>
void backward_rows(MemoryGradients<T>& g, int64_t row, int64_t steps) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    MemoryScratch<T>& s = g.s;
    const int64_t mp = s.mp, dp = s.dp, tile = mp * W;
    T *dS = g.dS + row * mp, *dM = g.dM + row * mp;
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
        }
    for (int64_t t = steps - 1; t >= 0; --t) {
        const int64_t before =
            t > 0 ? t - 1 : SEGMENT;  // row SEGMENT of q and k is zero: the step before the segment is not part of it
        const T *k = s.k + t * mp, *k_before = s.k + before * mp, *q_before = s.q + before * mp;
        const T alpha = s.alpha[t], gamma = s.gamma[t], forget = -alpha * s.e[t];
        const T *S_kept = g.S_before + t * NV * tile, *M_kept = g.M_before + (DGAMMA ? t * NV * tile : 0);
        V u[NV], wr[NV], wp[NV], du[NV], dalpha = zero<T>(), dgamma = zero<T>(), pr = zero<T>();
        for (int v = 0; v < NV; ++v) {
            u[v] = load(s.u + t * dp + row + v * W);
            du[v] = zero<T>();
            if (ERASE) {
                const V p = load(g.p + t * dp + row + v * W);
                pr += p * r[v];
                wr[v] = forget * r[v];
                wp[v] = forget * p;
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
                    V dMj = G;
                    if (MOMENTUM) {
                        T* place = dM + v * tile + j * W;
                        dMj += load(place);
                        store(place, gamma * dMj);
                        if (DGAMMA) dgamma += dMj * load(M_kept + v * tile + j * W);
                    }
                    du[v] += dMj * kj;
                    V x = dMj * u[v];
                    if (ERASE) x += S_j * wr[v] + G * wp[v];
                    dk[c] = v == 0 ? x : dk[c] + x;
                    dalpha += G * S_j;
                    V next = alpha * G + dy[v] * qb;
                    if (ERASE) {
                        next += wr[v] * kj;
                        r[v] += next * kb;
                    }
                    store(dSj, next);
                }
            }
            T* out = g.dk + t * mp + group;
            store(out, load(out) + sums<T>(dk));
        }
        for (int v = 0; v < NV; ++v) store(g.du + t * dp + row + v * W, du[v]);
        g.dalpha[t] += sum<T>(dalpha);
        if (DGAMMA) g.dgamma[t] += sum<T>(dgamma);
        if (ERASE) g.pr[t] += sum<T>(pr);
    }
}

template <class T, bool ERASE, bool MOMENTUM, bool DGAMMA> void backward_segment(MemoryGradients<T>& g, int64_t steps) {
    over_rows<T, MemoryGradients<T>::BLOCK>(g.s.dp, [&](auto nv, int64_t row) {
        recompute_rows<T, nv.value, ERASE, MOMENTUM, DGAMMA>(g, row, steps);
        backward_rows<T, nv.value, ERASE, MOMENTUM, DGAMMA>(g, row, steps);
    });
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
    }
    scatter<I, true>(g.dq.get(), s.mp, steps, s.m, at<I>(a.dq, row * s.m), H * s.m);
    scatter<I, true>(g.dk.get(), s.mp, steps, s.m, at<I>(a.dk, row * s.m), H * s.m);
    scatter<I, true>(g.du.get(), s.dp, steps, s.d, at<I>(a.dv, row * s.d), H * s.d);
}

template <class T, class I> void memory_backward_typed(const MemoryArguments& a) {
    const std::vector<int64_t> segments = segment_offsets(a.offsets, a.sequences);
    const bool erase = a.eta != 0, momentum = a.momentum != 0, dgamma = a.dgamma != nullptr;
    using Segment = void (*)(MemoryGradients<T>&, int64_t);
    const Segment with_momentum =
        dgamma ? (erase ? backward_segment<T, true, true, true> : backward_segment<T, false, true, true>)
               : (erase ? backward_segment<T, true, true, false> : backward_segment<T, false, true, false>);
    const Segment without = erase ? backward_segment<T, true, false, false> : backward_segment<T, false, false, false>;
    const int64_t H = a.heads, tasks = a.sequences * H;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min(a.threads, tasks))))
    {
        MemoryScratch<T> s(a.d, a.m);
        MemoryGradients<T> g(s, dgamma);
        const std::size_t state_bytes = std::size_t(s.mp * s.dp) * sizeof(T);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t sequence = task / H, h = task % H, begin = a.offsets[sequence], end = a.offsets[sequence + 1];
            load_state<T>(a.dS, task, s.d, s.m, g.dS.get());
            load_state<T>(a.dM, task, s.d, s.m, g.dM.get());
            const int64_t saved = segments[std::size_t(sequence)];
            for (int64_t n = segments[std::size_t(sequence) + 1] - saved - 1; n >= 0; --n) {
                const int64_t t = begin + n * SEGMENT, steps = std::min<int64_t>(SEGMENT, end - t);
                const int64_t place = ((saved + n) * H + h) * s.mp * s.dp;
                std::memcpy(s.S, at<T>(a.S_saved, place), state_bytes);
                if (a.M_saved) std::memcpy(s.M, at<T>(a.M_saved, place), state_bytes);
                else std::memset(s.M, 0, state_bytes);
                load_segment<T, I>(a, s, t, steps, h);
                std::memset(s.q + SEGMENT * s.mp, 0, std::size_t(s.mp) * sizeof(T));
                std::memset(s.k + SEGMENT * s.mp, 0, std::size_t(s.mp) * sizeof(T));
                gather<I>(at<I>(a.dy, (t * H + h) * s.d), H * s.d, steps, s.d, g.dy.get(), s.dp);
                for (Buffer<T>* zeroed : {&g.dq, &g.dk})
                    std::memset(zeroed->get(), 0, std::size_t(SEGMENT * s.mp) * sizeof(T));
                for (Buffer<T>* zeroed : {&g.dalpha, &g.dgamma, &g.pr})
                    std::memset(zeroed->get(), 0, SEGMENT * sizeof(T));
                s.prefetcher.clear();
                if (n > 0) {
                    prefetch_inputs<I>(a, s.prefetcher, t - SEGMENT, SEGMENT, h);
                    s.prefetcher.add(sizeof(I), at<I>(a.dy, ((t - SEGMENT) * H + h) * s.d), H * s.d, SEGMENT, s.d);
                }
                s.prefetcher.add(sizeof(I), at<I>(a.dq, (t * H + h) * s.m), H * s.m, steps, s.m);
                s.prefetcher.add(sizeof(I), at<I>(a.dk, (t * H + h) * s.m), H * s.m, steps, s.m);
                s.prefetcher.add(sizeof(I), at<I>(a.dv, (t * H + h) * s.d), H * s.d, steps, s.d);
                const bool last = t + steps == end;  // without momentum M is the last write, which has a gradient
                (momentum || last ? with_momentum : without)(g, steps);
                store_gradients<T, I>(a, g, t, steps, h);
            }
            const bool passed = begin == end;  // the states of an empty sequence pass through
            store_state<T>(a.dS0, task, s.d, s.m, g.dS.get());
            if (!momentum && !passed) std::memset(g.dM.get(), 0, state_bytes);
            store_state<T>(a.dM0, task, s.d, s.m, g.dM.get());
        }
    }
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
