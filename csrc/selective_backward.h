// Backward pass of muon_selective_scan: the adjoint recurrence from the last step to the first, in segments of 64 steps
// whose states are recomputed. With dS, dM the gradients of S_t, M_t:
//
//     dC_t = S_t^T dy_t                    dM += dS
//     du_t = dM B_t                        dB_t = dM^T u_t (LongHorn: - 2 B_t (dS * S_{t-1})^T dt_t)
//     dgamma_t = <dM, M_{t-1}>             da_t = dS * S_{t-1}
//     dS <- a_t * dS + dy_{t-1} C_{t-1}^T,   dM <- gamma_t dM
//
// Sums over channels (dB, dC, dgamma, and dc of the scale) are stored per group of 64 channels and added at the end; dA
// is stored per fixed share of the sequences. So every sum has the same order for any number of threads.
#pragma once
#include "selective.h"

namespace muonssm {
namespace MUONSSM_ISA {

constexpr int64_t SHARES = 8;  // the sequences are divided into this many shares, each with its own dA

template <class T> struct SelectiveGradients {
    SelectiveScratch<T>& s;
    Buffer<T> dS, dM, dA, dy, du, ddt, S_before, a_kept, M_before;
    SelectiveGradients(SelectiveScratch<T>& s, bool gamma)
        : s(s), dS(s.Np * CHANNEL_GROUP), dM(s.Np * CHANNEL_GROUP), dA(s.Np * CHANNEL_GROUP),
          dy(SEGMENT * CHANNEL_GROUP), du(SEGMENT * CHANNEL_GROUP), ddt(SEGMENT * CHANNEL_GROUP),
          S_before(SEGMENT * s.Np * ROW_BLOCK * LANES<T>), a_kept(SEGMENT * s.Np * ROW_BLOCK * LANES<T>),
          M_before(gamma ? SEGMENT * s.Np * ROW_BLOCK * LANES<T> : 0) {}
};

template <class T> struct SelectiveSums {  // sums of one group: dB, dC [steps][Np]; dgamma, dc [steps]
    T *dB, *dC, *dgamma, *dc;
};

template <class T, int NV, bool LONGHORN, bool MOMENTUM, bool DGAMMA>
void recompute_channels(SelectiveGradients<T>& g, SelectiveSums<T> sums_, int64_t row, int64_t steps) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    SelectiveScratch<T>& s = g.s;
    const int64_t Np = s.Np, tile = Np * W;
    T *S = s.S + row * Np, *M = s.M + row * Np;
    const T* A = s.A + row * Np;
    for (int64_t t = 0; t < steps; ++t) {
        const T *B = s.B + t * Np, gamma = s.gamma[t];
        T *S_kept = g.S_before + t * NV * tile, *a_kept = g.a_kept + t * NV * tile,
          *M_kept = g.M_before + (DGAMMA ? t * NV * tile : 0);
        V dt[NV], u[NV], dy[NV];
        for (int v = 0; v < NV; ++v) {
            dt[v] = load(s.dt + t * CHANNEL_GROUP + row + v * W);
            u[v] = load(s.u + t * CHANNEL_GROUP + row + v * W);
            dy[v] = load(g.dy + t * CHANNEL_GROUP + row + v * W);
        }
        for (int64_t group = 0; group < Np; group += W) {
            V dC[W];
            for (int c = 0; c < W; ++c) {
                const int64_t j = group + c;
                const V Bj = broadcast(B + j);
                for (int v = 0; v < NV; ++v) {
                    const int64_t place = v * tile + j * W;
                    V momentum = u[v] * Bj;
                    if (MOMENTUM) {
                        const V before = load(M + place);
                        if (DGAMMA) store(M_kept + place, before);
                        momentum += gamma * before;
                        store(M + place, momentum);
                    }
                    const V before = load(S + place), retained = gate<T, LONGHORN>(dt[v], A + place, Bj);
                    store(S_kept + place, before);
                    store(a_kept + place, retained);
                    const V x = retained * before + momentum;
                    store(S + place, x);
                    dC[c] = v == 0 ? x * dy[v] : dC[c] + x * dy[v];
                }
            }
            T* out = sums_.dC + t * Np + group;
            store(out, load(out) + sums<T>(dC));
        }
    }
}

template <class T, int NV, bool LONGHORN, bool MOMENTUM, bool DGAMMA>
void backward_channels(SelectiveGradients<T>& g, SelectiveSums<T> sums_, int64_t row, int64_t steps) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    SelectiveScratch<T>& s = g.s;
    const int64_t Np = s.Np, tile = Np * W;
    T *dS = g.dS + row * Np, *dM = g.dM + row * Np, *dA = g.dA + row * Np;
    const T* A = s.A + row * Np;
    for (int64_t j = 0; j < Np; ++j)
        for (int v = 0; v < NV; ++v) {
            T* place = dS + v * tile + j * W;
            store(place, load(place) + load(g.dy + (steps - 1) * CHANNEL_GROUP + row + v * W) *
                                           broadcast(s.C + (steps - 1) * Np + j));
        }
    for (int64_t t = steps - 1; t >= 0; --t) {
        const T *B = s.B + t * Np, *C_before = s.C + (t > 0 ? t - 1 : SEGMENT) * Np, gamma = s.gamma[t];
        const T *S_kept = g.S_before + t * NV * tile, *a_kept = g.a_kept + t * NV * tile,
                *M_kept = g.M_before + (DGAMMA ? t * NV * tile : 0);
        V dt[NV], u[NV], dy[NV], du[NV], ddt[NV], dgamma = zero<T>();
        for (int v = 0; v < NV; ++v) {
            dt[v] = load(s.dt + t * CHANNEL_GROUP + row + v * W);
            u[v] = load(s.u + t * CHANNEL_GROUP + row + v * W);
            dy[v] = t > 0 ? load(g.dy + (t - 1) * CHANNEL_GROUP + row + v * W) : zero<T>();
            du[v] = ddt[v] = zero<T>();
        }
        for (int64_t group = 0; group < Np; group += W) {
            V dB[W];
            for (int c = 0; c < W; ++c) {
                const int64_t j = group + c;
                const V Bj = broadcast(B + j), Cb = broadcast(C_before + j);
                for (int v = 0; v < NV; ++v) {
                    const int64_t place = v * tile + j * W;
                    const V G = load(dS + place), retained = load(a_kept + place), da = G * load(S_kept + place);
                    V dMj = G;
                    if (MOMENTUM) {
                        dMj += load(dM + place);
                        store(dM + place, gamma * dMj);
                        if (DGAMMA) dgamma += dMj * load(M_kept + place);
                    }
                    du[v] += dMj * Bj;
                    V x = dMj * u[v];
                    if (LONGHORN) {
                        ddt[v] -= da * Bj * Bj;
                        x -= T(2) * Bj * dt[v] * da;
                    } else {
                        const V dlog = da * retained;
                        ddt[v] += dlog * load(A + place);
                        store(dA + place, load(dA + place) + dlog * dt[v]);
                    }
                    dB[c] = v == 0 ? x : dB[c] + x;
                    store(dS + place, retained * G + dy[v] * Cb);
                }
            }
            T* out = sums_.dB + t * Np + group;
            store(out, load(out) + sums<T>(dB));
        }
        V dc = zero<T>();
        for (int v = 0; v < NV; ++v) {
            const int64_t place = t * CHANNEL_GROUP + row + v * W;
            store(g.du + place, du[v]);
            store(g.ddt + place, ddt[v]);
            dc += du[v] * load(s.x + place) * dt[v];
        }
        sums_.dc[t] += sum<T>(dc);
        if (DGAMMA) sums_.dgamma[t] += sum<T>(dgamma);
    }
}

template <class T, bool LONGHORN, bool MOMENTUM, bool DGAMMA>
void backward_group(SelectiveGradients<T>& g, SelectiveSums<T> sums_, int64_t size, int64_t steps) {
    over_rows<T>(0, padded<T>(size), [&](auto nv, int64_t row) {
        recompute_channels<T, nv.value, LONGHORN, MOMENTUM, DGAMMA>(g, sums_, row, steps);
        backward_channels<T, nv.value, LONGHORN, MOMENTUM, DGAMMA>(g, sums_, row, steps);
    });
}

template <class T> using GroupBackward = void (*)(SelectiveGradients<T>&, SelectiveSums<T>, int64_t, int64_t);

template <class T, bool LONGHORN> GroupBackward<T> group_backward(bool momentum, bool dgamma) {
    if (!momentum) return backward_group<T, LONGHORN, false, false>;
    return dgamma ? backward_group<T, LONGHORN, true, true> : backward_group<T, LONGHORN, true, false>;
}

// dx and ddt by u = c dt x; `finish_step` adds the derivative of the scale c.
template <class T, class I>
void store_channel_gradients(const SelectiveArguments& a, SelectiveGradients<T>& g, int64_t first, int64_t steps,
                             int64_t channel, int64_t size) {
    SelectiveScratch<T>& s = g.s;
    for (int64_t t = 0; t < steps; ++t) {
        T *dx = at<T>(a.dx, (first + t) * a.D + channel), *ddt = at<T>(a.ddt, (first + t) * a.D + channel);
        for (int64_t i = 0; i < size; ++i) {
            const int64_t place = t * CHANNEL_GROUP + i;
            dx[i] = s.c[t] * s.dt[place] * g.du[place];
            ddt[i] = g.ddt[place] + s.c[t] * s.x[place] * g.du[place];
        }
    }
}

// Process one group of channels of one sequence, from the last segment to the first.
template <class T, class I>
void backward_sequence(const SelectiveArguments& a, SelectiveGradients<T>& g, SelectiveSums<T> total, const T* scale,
                       int64_t sequence, int64_t saved, int64_t channel, int64_t size) {
    SelectiveScratch<T>& s = g.s;
    const bool momentum = a.momentum != 0, dgamma = a.dgamma != nullptr;
    const auto choose = a.A ? group_backward<T, false> : group_backward<T, true>;
    const GroupBackward<T> with_momentum = choose(true, dgamma), without = choose(false, false);
    const int64_t begin = a.offsets[sequence], end = a.offsets[sequence + 1],
                  groups = channel_groups(a.D, CHANNEL_GROUP);
    const std::size_t state_bytes = std::size_t(s.Np * padded<T>(size)) * sizeof(T);
    load_channels<T>(a.dS, sequence, a.D, channel, size, a.N, g.dS);
    load_channels<T>(a.dM, sequence, a.D, channel, size, a.N, g.dM);
    for (int64_t n = (end - begin + SEGMENT - 1) / SEGMENT - 1; n >= 0; --n) {
        const int64_t t = begin + n * SEGMENT, steps = std::min<int64_t>(SEGMENT, end - t);
        const int64_t place = ((saved + n) * groups * CHANNEL_GROUP + channel) * s.Np;
        std::memcpy(s.S, at<T>(a.S_saved, place), state_bytes);
        if (a.M_saved) std::memcpy(s.M, at<T>(a.M_saved, place), state_bytes);
        else std::memset(s.M, 0, state_bytes);
        load_segment<T, I>(a, s, scale, t, steps, channel, size);
        gather<I>(at<I>(a.dy, t * a.D + channel), a.D, steps, size, g.dy.get(), CHANNEL_GROUP);
        const SelectiveSums<T> here{total.dB + t * s.Np, total.dC + t * s.Np, total.dgamma + t, total.dc + t};
        const bool last = t + steps == end;  // without momentum M is the last write, which has a gradient
        (momentum || last ? with_momentum : without)(g, here, size, steps);
        store_channel_gradients<T, I>(a, g, t, steps, channel, size);
    }
    store_channels<T>(a.dS0, sequence, a.D, channel, size, a.N, g.dS);
    if (!momentum && begin != end) std::memset(g.dM.get(), 0, state_bytes);
    store_channels<T>(a.dM0, sequence, a.D, channel, size, a.N, g.dM);
}

// The sum of values[place of part] over the parts of a group of 64 channels and then over the groups: the order in which
// one thread adds that processes whole groups.
template <class T> INLINE T sum_of_parts(const T* values, int64_t step, int64_t count, int64_t parts, T total) {
    for (int64_t part = 0; part < count; part += parts) {
        T of_group = values[part * step];
        for (int64_t next = part + 1; next < std::min(count, part + parts); ++next) of_group += values[next * step];
        total += of_group;
    }
    return total;
}

// Add the sums of all groups for one step, and the derivative of the scale to dx, ddt and dB.
template <class T, class I>
void finish_step(const SelectiveArguments& a, const SelectiveSums<T>& all, int64_t width, int64_t t, int64_t steps, T c,
                 double v2, double B2) {
    const int64_t count = channel_groups(a.D, width), parts = CHANNEL_GROUP / width, Np = padded<T>(a.N);
    const T dc = sum_of_parts<T>(all.dc + t, steps, count, parts, T(0)),
            dgamma = sum_of_parts<T>(all.dgamma + t, steps, count, parts, T(0));
    const WriteGradient w = write_gradient(a.write, 1.0, v2, B2, c, double(dc));
    const I *B = at<I>(a.B, t * a.N), *x = at<I>(a.x, t * a.D), *dt = at<I>(a.dt, t * a.D);
    for (int64_t j = 0; j < a.N; ++j) {
        const T by_scale = T(w.k) * T(widen(B[j]));
        *at<T>(a.dB, t * a.N + j) = sum_of_parts<T>(all.dB + t * Np + j, steps * Np, count, parts, by_scale);
        *at<T>(a.dC, t * a.N + j) = sum_of_parts<T>(all.dC + t * Np + j, steps * Np, count, parts, T(0));
    }
    if (a.dgamma) *at<T>(a.dgamma, t) = dgamma;
    if (a.write.steps < 0) return;
    T *dx = at<T>(a.dx, t * a.D), *ddt = at<T>(a.ddt, t * a.D);
    for (int64_t i = 0; i < a.D; ++i) {
        const T by_v = T(w.v) * T(widen(dt[i])) * T(widen(x[i]));
        dx[i] += by_v * T(widen(dt[i]));
        ddt[i] += by_v * T(widen(x[i]));
    }
}

template <class T, class I> void selective_backward_typed(const SelectiveArguments& a) {
    const std::vector<int64_t> segments = segment_offsets(a.offsets, a.sequences);
    const int64_t steps = a.offsets[a.sequences], shares = std::min(SHARES, a.sequences),
                  width = channels_per_task<T>(shares * channel_groups(a.D, CHANNEL_GROUP), a.threads),
                  groups = channel_groups(a.D, width), Np = padded<T>(a.N), tasks = shares * groups,
                  threads = std::max<int64_t>(1, a.threads);
    Buffer<T> scale(steps), dB(groups * steps * Np), dC(groups * steps * Np), dgamma(groups * steps),
        dc(groups * steps);
    Buffer<T> dA(a.A ? shares * a.D * a.N : 0);
    Buffer<double> v2(steps), B2(steps);
    write_scales<T, I>(a, steps, scale, v2, B2);
#pragma omp parallel num_threads(int(std::min(threads, std::max<int64_t>(1, tasks))))
    {
        SelectiveScratch<T> s(a.N);
        SelectiveGradients<T> g(s, a.dgamma != nullptr);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t share = task / groups, group = task % groups, channel = group * width,
                          size = std::min<int64_t>(width, a.D - channel);
            const SelectiveSums<T> total{dB + group * steps * Np, dC + group * steps * Np, dgamma + group * steps,
                                         dc + group * steps};
            load_channels<T>(a.A, 0, a.D, channel, size, a.N, s.A);
            std::memset(g.dA.get(), 0, std::size_t(Np * CHANNEL_GROUP) * sizeof(T));
            for (int64_t sequence = share * a.sequences / shares; sequence < (share + 1) * a.sequences / shares;
                 ++sequence)
                backward_sequence<T, I>(a, g, total, scale, sequence, segments[std::size_t(sequence)], channel, size);
            if (a.A) store_channels<T>(dA.get(), share, a.D, channel, size, a.N, g.dA);
        }
    }
#pragma omp parallel for schedule(static) num_threads(int(threads))
    for (int64_t t = 0; t < steps; ++t)
        finish_step<T, I>(a, {dB, dC, dgamma, dc}, width, t, steps, scale[t], v2[t], B2[t]);
    for (int64_t i = 0; a.A && i < a.D * a.N; ++i) {
        T sum_of_shares = 0;
        for (int64_t share = 0; share < shares; ++share) sum_of_shares += dA[share * a.D * a.N + i];
        *at<T>(a.dA, i) = sum_of_shares;
    }
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
