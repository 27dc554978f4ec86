// One decoding step of a whole Mamba mixer, for every sequence: a step is too little work for one kernel call per part.
//
//     x = w x / sqrt(mean(x^2) + eps)        only with a norm, which also adds x to y at the end
//     h, z = W_in x;   c = silu(conv(h));   r, B, C = W_x c;   dt = softplus(W_dt r + b)
//     S, M, o = one step of the selective scan (see selective.h) on c, dt, -exp(A_log), B, C
//     y = W_out ((o + D c) silu(z))
//
// All sequences share one pass over the weights. Threads divide the rows of each part, with a barrier after it.
#pragma once
#include "convolution.h"
#include "selective.h"

namespace muonssm {
namespace MUONSSM_ISA {

template <class T> INLINE T dot(const T* a, const T* b, int64_t size) {
    Vec<T> total = zero<T>();
    int64_t j = 0;
    for (; j + LANES<T> <= size; j += LANES<T>) total += load(a + j) * load(b + j);
    T result = sum<T>(total);
    for (; j < size; ++j) result += a[j] * b[j];
    return result;
}

// out[s][row] = W[row] . x[s] for all rows, divided between the threads of the enclosing parallel region.
template <class T>
void multiply_rows(const T* W, int64_t rows, int64_t columns, const T* x, int64_t x_step, int64_t sequences, T* out,
                   int64_t out_step) {
    constexpr int L = LANES<T>;
    const int64_t blocks = (rows + L - 1) / L, whole = columns / L * L;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; ++block) {
        const int64_t first = block * L, count = std::min<int64_t>(L, rows - first);
        for (int64_t s = 0; s < sequences; ++s) {
            const T *a = W + first * columns, *b = x + s * x_step;
            T* target = out + s * out_step + first;
            if (count < L) {
                for (int64_t i = 0; i < count; ++i) target[i] = dot<T>(a + i * columns, b, columns);
                continue;
            }
            Vec<T> total[L];
            for (int i = 0; i < L; ++i) total[i] = zero<T>();
            for (int64_t j = 0; j < whole; j += L) {
                const Vec<T> value = load(b + j);
                for (int i = 0; i < L; ++i) total[i] += load(a + i * columns + j) * value;
            }
            Vec<T> result = sums<T>(total);
            for (int64_t j = whole; j < columns; ++j)
                for (int i = 0; i < L; ++i) result[i] += a[i * columns + j] * b[j];
            store(target, result);
        }
    }
}

template <class T> INLINE T silu(T x) { return x / (T(1) + std::exp(-x)); }
template <class T> INLINE T softplus(T x) { return x > T(20) ? x : std::log1p(std::exp(x)); }  // torch's threshold

// The inputs, or after the norm, in `normed`.
template <class T> const T* normalized(const MambaArguments& a, T* normed) {
    const int64_t d = a.d_model;
    const T* x = at<T>(a.x, 0);
    if (!a.norm) return x;
    for (int64_t s = 0; s < a.sequences; ++s) {
        const T scale = T(1) / std::sqrt(dot<T>(x + s * d, x + s * d, d) / T(d) + T(a.norm_eps));
        for (int64_t i = 0; i < d; ++i) normed[s * d + i] = x[s * d + i] * scale * at<T>(a.norm, 0)[i];
    }
    return normed;
}

template <class T> void mamba_step_typed(const MambaArguments& a) {
    const int64_t n = a.sequences, D = a.D, N = a.N, R = a.R, before = a.K - 1, Np = padded<T>(N), Dp = padded<T>(D);
    const int64_t threads = a.d_model * D < (1 << 16) ? 1 : std::max<int64_t>(1, a.threads);
    const int64_t P = R + 2 * N;
    Buffer<T> h(n * 2 * D), c(n * D), p(n * P), dt(n * D), v(n * Dp), g(n * D), normed(a.norm ? n * a.d_model : 0);
    const T* x = normalized<T>(a, normed);
#pragma omp parallel num_threads(int(threads)) if (threads > 1)
    {
        multiply_rows<T>(at<T>(a.in_proj, 0), 2 * D, a.d_model, x, a.d_model, n, h, 2 * D);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < n * D; ++task) {
            const int64_t s = task / D, i = task % D;
            const T *w = at<T>(a.conv_weight, i * a.K), now = h[s * 2 * D + i];
            T sum = *at<T>(a.conv_bias, i) + w[before] * now;
            for (int64_t j = 0; j < before; ++j) {
                const T past = *at<T>(a.tail, (s * before + j) * D + i);
                sum += w[j] * past;
                if (j > 0) *at<T>(a.tail_out, (s * before + j - 1) * D + i) = past;
            }
            if (before > 0) *at<T>(a.tail_out, (s * before + before - 1) * D + i) = now;
            c[task] = silu<T>(sum);
        }
        multiply_rows<T>(at<T>(a.x_proj, 0), P, D, c, D, n, p, P);
        multiply_rows<T>(at<T>(a.dt_proj, 0), D, R, p, P, n, dt, D);
#pragma omp for schedule(static)
        for (int64_t task = 0; task < n * D; ++task) {
            const int64_t s = task / D, i = task % D;
            dt[task] = softplus<T>(dt[task] + *at<T>(a.dt_bias, i));
            v[s * Dp + i] = dt[task] * c[task];
        }
        Buffer<T> B(Np), C(Np);
        int64_t loaded = -1;
        T scale = 0;
#pragma omp for schedule(static)
        for (int64_t task = 0; task < n * D; ++task) {
            const int64_t s = task / D, i = task % D;
            if (loaded != s) {
                const T* from = p + s * P + R;
                std::copy(from, from + N, B.get());
                std::copy(from + N, from + 2 * N, C.get());
                const bool normed = a.write.steps >= 0;
                scale = T(write_scale(a.write, 1.0, normed ? square_norm<T>(v + s * Dp, Dp) : 0,
                                      normed ? square_norm<T>(B, Np) : 0));
                loaded = s;
            }
            const ChannelStates<T> states{at<T>(a.S0, task * N), at<T>(a.M0, task * N), at<T>(a.S, task * N),
                                          at<T>(a.M, task * N)};
            const T o = step_channel<T, LOG_GATE>(states, at<T>(a.A_log, i * N), B, C, dt[task], scale * v[s * Dp + i],
                                                  T(a.gamma), N);
            g[task] = (o + *at<T>(a.skip, i) * c[task]) * silu<T>(h[s * 2 * D + D + i]);
        }
        multiply_rows<T>(at<T>(a.out_proj, 0), a.d_model, D, g, D, n, at<T>(a.y, 0), a.d_model);
    }
    if (a.norm)
        for (int64_t i = 0; i < n * a.d_model; ++i) *at<T>(a.y, i) += *at<T>(a.x, i);
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
