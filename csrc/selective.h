// muon_selective_scan on a CPU: channels in the lanes of a vector, one pass over the states per time step.
//
//     a_t = exp(dt_t A), or 1 - dt_t B_t^2         one gate per channel and state
//     M_t = gamma_t M_{t-1} + u_t B_t^T            u_t = c_t dt_t x_t, c_t over all channels of the step
//     S_t = a_t * S_{t-1} + M_t
//     y_t = S_t C_t
//
// A task is a group of 64 channels of one sequence, processed in segments of 64 steps.
//
// Layout (pictures in LAYOUT.md), with W lanes, and N padded to Np, a multiple of W:
//     S, M, A      [tile][Np][W]   a tile is W channels
//     B, C         [65][Np]        row 64 is zero
//     x, dt, u, y  [64][64]        steps x channels
#pragma once
#include "memory.h"

namespace muonssm {
namespace MUONSSM_ISA {

template <class T> struct SelectiveScratch {
    int64_t N, Np;
    Buffer<T> S, M, A, x, dt, u, y, B, C, gamma, c;
    explicit SelectiveScratch(int64_t N)
        : N(N), Np(padded<T>(N)), S(Np * CHANNEL_GROUP), M(Np * CHANNEL_GROUP), A(Np * CHANNEL_GROUP),
          x(SEGMENT * CHANNEL_GROUP), dt(SEGMENT * CHANNEL_GROUP), u(SEGMENT * CHANNEL_GROUP),
          y(SEGMENT * CHANNEL_GROUP), B((SEGMENT + 1) * Np), C((SEGMENT + 1) * Np), gamma(SEGMENT), c(SEGMENT) {}
};

// The scale of every step's write; its norm is taken over all channels.
template <class T, class I>
void write_scales(const SelectiveArguments& a, int64_t steps, T* scale, double* v2, double* B2) {
    const int64_t Dp = padded<T>(a.D), Np = padded<T>(a.N);
#pragma omp parallel num_threads(int(std::max<int64_t>(1, a.threads)))
    {
        Buffer<T> v(Dp), B(Np);
#pragma omp for schedule(static)
        for (int64_t t = 0; t < steps; ++t) {
            if (a.write.steps >= 0) {
                const I *x = at<I>(a.x, t * a.D), *dt = at<I>(a.dt, t * a.D);
                for (int64_t i = 0; i < a.D; ++i) v[i] = T(widen(x[i])) * T(widen(dt[i]));
                gather<I>(at<I>(a.B, t * a.N), 0, 1, a.N, B.get(), Np);
                v2[t] = square_norm<T>(v, Dp);
                B2[t] = square_norm<T>(B, Np);
            }
            scale[t] = T(write_scale(a.write, 1.0, v2[t], B2[t]));
        }
    }
}

template <class T, class I>
void load_segment(const SelectiveArguments& a, SelectiveScratch<T>& s, const T* scale, int64_t first, int64_t steps,
                  int64_t channel, int64_t size) {
    gather<I>(at<I>(a.x, first * a.D + channel), a.D, steps, size, s.x.get(), CHANNEL_GROUP);
    gather<I>(at<I>(a.dt, first * a.D + channel), a.D, steps, size, s.dt.get(), CHANNEL_GROUP);
    gather<I>(at<I>(a.B, first * a.N), a.N, steps, a.N, s.B.get(), s.Np);
    gather<I>(at<I>(a.C, first * a.N), a.N, steps, a.N, s.C.get(), s.Np);
    for (int64_t t = 0; t < steps; ++t) {
        s.gamma[t] = *at<T>(a.gamma, (first + t) * a.gamma_step);
        s.c[t] = scale[first + t];
        for (int64_t i = 0; i < CHANNEL_GROUP; i += LANES<T>)
            store(s.u + t * CHANNEL_GROUP + i,
                  s.c[t] * load(s.dt + t * CHANNEL_GROUP + i) * load(s.x + t * CHANNEL_GROUP + i));
    }
}

template <class T, bool LONGHORN> INLINE Vec<T> gate(Vec<T> dt, const T* A, Vec<T> B) {
    if constexpr (LONGHORN) return T(1) - dt * B * B;
    else return exponential<T>(dt * load(A));
}

template <class T, int NV, bool LONGHORN, bool MOMENTUM>
void forward_channels(SelectiveScratch<T>& s, int64_t row, int64_t steps) {
    using V = Vec<T>;
    constexpr int W = LANES<T>;
    const int64_t N = s.N, tile = s.Np * W;
    T *S = s.S + row * s.Np, *M = s.M + row * s.Np;
    const T* A = s.A + row * s.Np;
    for (int64_t t = 0; t < steps; ++t) {
        const T *B = s.B + t * s.Np, *C = s.C + t * s.Np, gamma = s.gamma[t];
        V dt[NV], u[NV], y[NV];
        for (int v = 0; v < NV; ++v) {
            dt[v] = load(s.dt + t * CHANNEL_GROUP + row + v * W);
            u[v] = load(s.u + t * CHANNEL_GROUP + row + v * W);
            y[v] = zero<T>();
        }
        for (int64_t j = 0; j < N; ++j) {
            const V Bj = broadcast(B + j), Cj = broadcast(C + j);
            for (int v = 0; v < NV; ++v) {
                const int64_t place = v * tile + j * W;
                V momentum = u[v] * Bj;
                if (MOMENTUM) {
                    momentum += gamma * load(M + place);
                    store(M + place, momentum);
                }
                const V x = gate<T, LONGHORN>(dt[v], A + place, Bj) * load(S + place) + momentum;
                store(S + place, x);
                y[v] += x * Cj;
            }
        }
        for (int v = 0; v < NV; ++v) store(s.y + t * CHANNEL_GROUP + row + v * W, y[v]);
    }
}

template <class T, bool LONGHORN, bool MOMENTUM>
void forward_group(SelectiveScratch<T>& s, int64_t size, int64_t steps) {
    over_rows<T>(0, padded<T>(size),
                 [&](auto nv, int64_t row) { forward_channels<T, nv.value, LONGHORN, MOMENTUM>(s, row, steps); });
}

// Load the states [D, N] of `size` channels, from `channel` on, of sequence `index`.
template <class T>
void load_channels(const void* base, int64_t index, int64_t D, int64_t channel, int64_t size, int64_t N, T* state) {
    if (base) load_state<T>(at<T>(base, (index * D + channel) * N), 0, size, N, state);
    else std::memset(state, 0, std::size_t(padded<T>(N) * padded<T>(size)) * sizeof(T));
}

template <class T>
void store_channels(void* base, int64_t index, int64_t D, int64_t channel, int64_t size, int64_t N, const T* state) {
    store_state<T>(at<T>(base, (index * D + channel) * N), 0, size, N, state);
}

// The channels of a task: a group, or one block of rows of it if there are too few groups to keep the threads busy.
template <class T> INLINE int64_t channels_per_task(int64_t tasks, int64_t threads) {
    return row_parts<T>(CHANNEL_GROUP, tasks, threads) == 1 ? CHANNEL_GROUP : ROW_BLOCK * LANES<T>;
}

inline int64_t channel_groups(int64_t D, int64_t width) { return (D + width - 1) / width; }

template <class T, class I> void selective_forward_typed(const SelectiveArguments& a) {
    const bool momentum = a.momentum != 0, longhorn = a.A == nullptr;
    const auto group = longhorn ? (momentum ? forward_group<T, true, true> : forward_group<T, true, false>)
                                : (momentum ? forward_group<T, false, true> : forward_group<T, false, false>);
    const std::vector<int64_t> segments = segment_offsets(a.offsets, a.sequences);
    const int64_t total = a.offsets[a.sequences], saved_groups = channel_groups(a.D, CHANNEL_GROUP),
                  width = channels_per_task<T>(a.sequences * saved_groups, a.threads),
                  groups = channel_groups(a.D, width), tasks = a.sequences * groups;
    Buffer<T> scale(total);
    Buffer<double> v2(total), B2(total);
    write_scales<T, I>(a, total, scale, v2, B2);
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min(a.threads, tasks))))
    {
        SelectiveScratch<T> s(a.N);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t sequence = task / groups, channel = task % groups * width,
                          size = std::min<int64_t>(width, a.D - channel);
            const int64_t begin = a.offsets[sequence], end = a.offsets[sequence + 1];
            const std::size_t state_bytes = std::size_t(s.Np * padded<T>(size)) * sizeof(T);
            load_channels<T>(a.S0, sequence, a.D, channel, size, a.N, s.S);
            load_channels<T>(a.M0, sequence, a.D, channel, size, a.N, s.M);
            load_channels<T>(a.A, 0, a.D, channel, size, a.N, s.A);
            int64_t saved = segments[std::size_t(sequence)];
            for (int64_t t = begin; t < end; t += SEGMENT, ++saved) {
                const int64_t steps = std::min<int64_t>(SEGMENT, end - t),
                              place = (saved * saved_groups * CHANNEL_GROUP + channel) * s.Np;
                if (a.S_saved) std::memcpy(at<T>(a.S_saved, place), s.S, state_bytes);
                if (a.M_saved) std::memcpy(at<T>(a.M_saved, place), s.M, state_bytes);
                load_segment<T, I>(a, s, scale, t, steps, channel, size);
                group(s, size, steps);
                scatter<I, false>(s.y.get(), CHANNEL_GROUP, steps, size, at<I>(a.y, t * a.D + channel), a.D);
                if (!momentum && t + steps == end)
                    for (int64_t i = 0; i < size; i += LANES<T>)
                        for (int64_t j = 0; j < a.N; ++j)
                            store(s.M + tiled<T>(i, j, s.Np),
                                  load(s.u + (steps - 1) * CHANNEL_GROUP + i) * s.B[(steps - 1) * s.Np + j]);
            }
            store_channels<T>(a.S, sequence, a.D, channel, size, a.N, s.S);
            store_channels<T>(a.M, sequence, a.D, channel, size, a.N, s.M);
        }
    }
}

// ---- one step (decoding): lanes are the N states of a channel, in the caller's row-major layout ----

template <class T> struct ChannelStates {
    const T *S0, *M0;
    T *S, *M;
};  // [N] each; S0 and M0 are null for zero states

// Load `count` numbers at p and fill up with zeros; memory beyond them is not read.
template <class T> INLINE Vec<T> load_some(const T* p, int64_t count) {
    if (count >= LANES<T>) return load(p);
    Vec<T> v = zero<T>();
    std::memcpy(&v, p, std::size_t(count) * sizeof(T));
    return v;
}

template <class T> INLINE void store_some(T* p, Vec<T> v, int64_t count) {
    if (count >= LANES<T>) store(p, v);
    else std::memcpy(p, &v, std::size_t(count) * sizeof(T));
}

enum GateKind { A_GATE, LOG_GATE, LONGHORN_GATE };  // what A points to: A, log(-A), nothing

// Run one channel through one step; returns its output. B and C are padded with zeros.
template <class T, GateKind GATE>
INLINE T step_channel(const ChannelStates<T>& s, const T* A, const T* B, const T* C, T dt, T u, T gamma, int64_t N) {
    using V = Vec<T>;
    V y = zero<T>();
    for (int64_t j = 0; j < N; j += LANES<T>) {
        const int64_t left = N - j;
        const V Bj = load(B + j);
        V momentum = u * Bj, retained;
        if (s.M0) momentum += gamma * load_some(s.M0 + j, left);
        if constexpr (GATE == LONGHORN_GATE) retained = T(1) - dt * Bj * Bj;
        else if constexpr (GATE == LOG_GATE) retained = exponential<T>(-dt * exponential<T>(load_some(A + j, left)));
        else retained = exponential<T>(dt * load_some(A + j, left));
        const V x = s.S0 ? retained * load_some(s.S0 + j, left) + momentum : momentum;
        store_some(s.M + j, momentum, left);
        store_some(s.S + j, x, left);
        y += x * load(C + j);
    }
    return sum<T>(y);
}

// One step of every sequence.
template <class T, class I> int64_t selective_step_typed(const SelectiveArguments& a) {
    const int64_t D = a.D, N = a.N, Np = padded<T>(N), tasks = a.sequences * D;
    const int64_t threads = tasks * N < 8192 ? 1 : a.threads;
    Buffer<T> scale(a.sequences);
    Buffer<double> v2(a.sequences), B2(a.sequences);
    SelectiveArguments few = a;
    few.threads = threads;
    write_scales<T, I>(few, a.sequences, scale, v2, B2);
#pragma omp parallel num_threads(int(std::max<int64_t>(1, threads))) if (threads > 1)
    {
        Buffer<T> B(Np), C(Np);
        int64_t loaded = -1;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t sequence = task / D, channel = task % D, place = task * N;
            if (loaded != sequence) {
                gather<I>(at<I>(a.B, sequence * N), 0, 1, N, B.get(), Np);
                gather<I>(at<I>(a.C, sequence * N), 0, 1, N, C.get(), Np);
                loaded = sequence;
            }
            const T dt = T(widen(*at<I>(a.dt, task))), gamma = *at<T>(a.gamma, sequence * a.gamma_step);
            const T u = scale[sequence] * dt * T(widen(*at<I>(a.x, task)));
            const ChannelStates<T> states{a.S0 ? at<T>(a.S0, place) : nullptr, a.M0 ? at<T>(a.M0, place) : nullptr,
                                          at<T>(a.S, place), at<T>(a.M, place)};
            const T y = a.A ? step_channel<T, A_GATE>(states, at<T>(a.A, channel * N), B, C, dt, u, gamma, N)
                            : step_channel<T, LONGHORN_GATE>(states, nullptr, B, C, dt, u, gamma, N);
            narrow(y, *at<I>(a.y, task));
        }
    }
    return 0;
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
