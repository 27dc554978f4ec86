// The short causal convolution of a mixer, with its activation: one filter per channel.
//
//     h_t = bias + sum_j w_j x_{t-K+1+j}         j = 0 .. K-1; the K-1 rows before a sequence are its tail, or zeros
//     y_t = h_t sigmoid(h_t), or h_t
//
// A task is a group of 64 channels, processed in segments of 64 steps, with channels in the lanes of a vector.
//
// Layout:
//     x   [K-1 + 64][64]   the K-1 rows before the segment first
//     y   [64][64]
//     w   [K][64]
#pragma once
#include "memory.h"

namespace muonssm {
namespace MUONSSM_ISA {

constexpr int LANE_GROUP = 64;  // channels of a task

template <class T> struct ConvolutionScratch {
    int64_t K;
    Buffer<T> w, bias, x, y, dh, dx, dw, dbias;
    explicit ConvolutionScratch(int64_t K)
        : K(K), w(K * LANE_GROUP), bias(LANE_GROUP), x((SEGMENT + K - 1) * LANE_GROUP), y(SEGMENT * LANE_GROUP),
          dh((SEGMENT + K - 1) * LANE_GROUP), dx(SEGMENT * LANE_GROUP), dw(K * LANE_GROUP), dbias(LANE_GROUP) {}
};

template <class T>
void load_filters(const ConvolutionArguments& a, ConvolutionScratch<T>& s, int64_t channel, int64_t size) {
    for (int64_t j = 0; j < s.K; ++j)
        for (int64_t i = 0; i < LANE_GROUP; ++i)
            s.w[j * LANE_GROUP + i] = i < size ? at<T>(a.weight, (channel + i) * s.K)[j] : T(0);
    for (int64_t i = 0; i < LANE_GROUP; ++i) s.bias[i] = a.bias && i < size ? *at<T>(a.bias, channel + i) : T(0);
}

// Load `steps` steps from `first` on, of a sequence that starts at `begin`, and the K-1 rows before them.
template <class T, class I>
void load_inputs(const ConvolutionArguments& a, ConvolutionScratch<T>& s, int64_t sequence, int64_t begin,
                 int64_t first, int64_t steps, int64_t channel, int64_t size) {
    const int64_t before = s.K - 1;
    for (int64_t row = 0; row < before; ++row) {
        T* target = s.x + row * LANE_GROUP;
        const int64_t t = first - before + row;
        if (t >= begin) gather<I>(at<I>(a.x, t * a.x_step + channel), 0, 1, size, target, LANE_GROUP);
        else if (a.tail)
            gather<I>(at<I>(a.tail, (sequence * before + t - begin + before) * a.channels + channel), 0, 1, size,
                      target, LANE_GROUP);
        else std::memset(target, 0, LANE_GROUP * sizeof(T));
    }
    gather<I>(at<I>(a.x, first * a.x_step + channel), a.x_step, steps, size, s.x + before * LANE_GROUP, LANE_GROUP);
}

template <class T> INLINE Vec<T> filtered(ConvolutionScratch<T>& s, const T* x, const T* w, Vec<T> h) {
    for (int64_t j = 0; j < s.K; ++j) h += load(w + j * LANE_GROUP) * load(x + j * LANE_GROUP);
    return h;
}

template <class T> INLINE Vec<T> sigmoid(Vec<T> h) { return T(1) / (T(1) + exponential<T>(-h)); }

template <class T, class I> void convolution_forward_typed(const ConvolutionArguments& a) {
    const int64_t groups = (a.channels + LANE_GROUP - 1) / LANE_GROUP, tasks = a.sequences * groups;
    const int64_t threads = a.offsets[a.sequences] * a.channels < 16384 ? 1 : a.threads;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min(threads, tasks)))) if (threads > 1)
    {
        ConvolutionScratch<T> s(a.K);
#pragma omp for schedule(dynamic)
        for (int64_t task = 0; task < tasks; ++task) {
            const int64_t sequence = task / groups, channel = task % groups * LANE_GROUP,
                          size = std::min<int64_t>(LANE_GROUP, a.channels - channel);
            const int64_t begin = a.offsets[sequence], end = a.offsets[sequence + 1];
            load_filters<T>(a, s, channel, size);
            for (int64_t first = begin; first < end; first += SEGMENT) {
                const int64_t steps = std::min<int64_t>(SEGMENT, end - first);
                load_inputs<T, I>(a, s, sequence, begin, first, steps, channel, size);
                for (int64_t t = 0; t < steps; ++t)
                    for (int64_t i = 0; i < padded<T>(size); i += LANES<T>) {
                        const Vec<T> h = filtered<T>(s, s.x + t * LANE_GROUP + i, s.w + i, load(s.bias + i));
                        store(s.y + t * LANE_GROUP + i, a.silu ? h * sigmoid<T>(h) : h);
                    }
                scatter<I, false>(s.y.get(), LANE_GROUP, steps, size, at<I>(a.y, first * a.channels + channel),
                                  a.channels);
            }
        }
    }
}

// Compute dh of a segment from dy, and add to the gradients of the filters and biases.
template <class T>
void filter_gradients(const ConvolutionArguments& a, ConvolutionScratch<T>& s, int64_t steps, int64_t size) {
    for (int64_t i = 0; i < padded<T>(size); i += LANES<T>) {
        Vec<T> total = zero<T>();
        for (int64_t t = 0; t < steps; ++t) {
            Vec<T> dh = load(s.y + t * LANE_GROUP + i);
            if (a.silu) {
                const Vec<T> h = filtered<T>(s, s.x + t * LANE_GROUP + i, s.w + i, load(s.bias + i)), p = sigmoid<T>(h);
                dh *= p * (T(1) + h * (T(1) - p));
            }
            store(s.dh + t * LANE_GROUP + i, dh);
            total += dh;
        }
        store(s.dbias + i, load(s.dbias + i) + total);
        for (int64_t j = 0; j < s.K; ++j) {
            Vec<T> sum = zero<T>();
            for (int64_t t = 0; t < steps; ++t)
                sum += load(s.dh + t * LANE_GROUP + i) * load(s.x + (t + j) * LANE_GROUP + i);
            store(s.dw + j * LANE_GROUP + i, load(s.dw + j * LANE_GROUP + i) + sum);
        }
    }
}

// dx_t = sum_j w_j dh_{t+K-1-j}; the `rows` rows of dh include up to K-1 rows after the segment.
template <class T> INLINE Vec<T> input_gradient(ConvolutionScratch<T>& s, int64_t t, int64_t rows, int64_t i) {
    Vec<T> dx = zero<T>();
    for (int64_t j = 0; j < s.K; ++j) {
        const int64_t later = t + s.K - 1 - j;
        if (later >= 0 && later < rows) dx += load(s.w + j * LANE_GROUP + i) * load(s.dh + later * LANE_GROUP + i);
    }
    return dx;
}

// A task has its channels of all sequences, so the sums of the filters' gradients have the same order for any number of
// threads.
template <class T, class I> void convolution_backward_typed(const ConvolutionArguments& a) {
    const int64_t groups = (a.channels + LANE_GROUP - 1) / LANE_GROUP, before = a.K - 1;
#pragma omp parallel num_threads(int(std::max<int64_t>(1, std::min(a.threads, groups))))
    {
        ConvolutionScratch<T> s(a.K);
#pragma omp for schedule(dynamic)
        for (int64_t group = 0; group < groups; ++group) {
            const int64_t channel = group * LANE_GROUP, size = std::min<int64_t>(LANE_GROUP, a.channels - channel);
            load_filters<T>(a, s, channel, size);
            std::memset(s.dw.get(), 0, std::size_t(s.K * LANE_GROUP) * sizeof(T));
            std::memset(s.dbias.get(), 0, LANE_GROUP * sizeof(T));
            for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
                const int64_t begin = a.offsets[sequence], end = a.offsets[sequence + 1];
                int64_t after = 0, steps = 0;  // rows of dh that exist after the segment
                for (int64_t first = begin + (std::max<int64_t>(end - begin, 1) - 1) / SEGMENT * SEGMENT;
                     first >= begin && end > begin; first -= SEGMENT) {
                    std::memmove(s.dh + SEGMENT * LANE_GROUP, s.dh.get(), std::size_t(before * LANE_GROUP) * sizeof(T));
                    after = std::min(before, end - std::min(first + SEGMENT, end));
                    steps = std::min<int64_t>(SEGMENT, end - first);
                    load_inputs<T, I>(a, s, sequence, begin, first, steps, channel, size);
                    gather<I>(at<I>(a.dy, first * a.channels + channel), a.channels, steps, size, s.y.get(),
                              LANE_GROUP);
                    filter_gradients<T>(a, s, steps, size);
                    for (int64_t t = 0; t < steps; ++t)
                        for (int64_t i = 0; i < padded<T>(size); i += LANES<T>)
                            store(s.dx + t * LANE_GROUP + i, input_gradient<T>(s, t, steps + after, i));
                    scatter<I, true>(s.dx.get(), LANE_GROUP, steps, size, at<I>(a.dx, first * a.channels + channel),
                                     a.channels);
                }
                for (int64_t row = 0; row < before && a.dtail; ++row) {
                    for (int64_t i = 0; i < padded<T>(size); i += LANES<T>)
                        store(s.dx + i, input_gradient<T>(s, row - before, steps + after, i));
                    scatter<I, true>(s.dx.get(), LANE_GROUP, 1, size,
                                     at<I>(a.dtail, (sequence * before + row) * a.channels + channel), a.channels);
                }
            }
            for (int64_t i = 0; i < size; ++i) {
                for (int64_t j = 0; j < s.K; ++j) at<T>(a.dweight, (channel + i) * s.K)[j] = s.dw[j * LANE_GROUP + i];
                *at<T>(a.dbias, channel + i) = s.dbias[i];
            }
        }
    }
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
