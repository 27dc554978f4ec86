// What a training step does to every row of activations besides matmuls, memory and convolution, in one pass each:
//
//     norm       y = x / sqrt(mean(x^2) + eps) w, times silu(g) if there is a gate; with gate_first, x is x silu(g)
//     unit       y = scale x / sqrt(x.x + eps)
//     SwiGLU     y = silu(g) u
//     softmax    loss = log(sum(exp(x))) - x[label], and its gradient scale (softmax(x) - onehot(label)) in place of x
//
// Rows are divided into chunks by their number alone, and sums over rows are added chunk by chunk: results do not depend
// on the number of threads.
#pragma once
#include <limits>

#include "convolution.h"

namespace muonssm {
namespace MUONSSM_ISA {

constexpr int64_t LEAST_CHUNK = 16, MOST_CHUNKS = 64, SPAN = 8192;  // rows, chunks, elements of a chunk of SwiGLU

inline int64_t chunk_rows(int64_t rows) { return std::max(LEAST_CHUNK, (rows + MOST_CHUNKS - 1) / MOST_CHUNKS); }

inline int64_t threads_for(int64_t threads, int64_t tasks, int64_t elements) {
    return elements < 16384 ? 1 : std::max<int64_t>(1, std::min(threads, tasks));
}

template <class T> INLINE Vec<T> silu_of(Vec<T> g) { return g * sigmoid<T>(g); }
template <class T> INLINE Vec<T> silu_slope(Vec<T> g, Vec<T> p) { return p * (T(1) + g * (T(1) - p)); }

template <class T> struct NormScratch {
    int64_t size, width;
    Buffer<T> x, w, d, dw;
    explicit NormScratch(int64_t size) : size(size), width(padded<T>(size)), x(width), w(width), d(width), dw(width) {}
};

// 1 / sqrt(mean(x^2) + eps), or scale / sqrt(x.x + eps) of a unit vector.
template <class T> INLINE T norm_factor(const NormArguments& a, T square) {
    return a.unit ? T(a.scale) / std::sqrt(square + T(a.eps)) : T(1) / std::sqrt(square / T(a.size) + T(a.eps));
}

// Load a row; with gate_first x becomes x silu(g). Returns x.x.
template <class T, class I, bool GATE_FIRST> INLINE T load_norm(NormScratch<T>& s, const I* x, const I* g) {
    Vec<T> square = zero<T>();
    for (int64_t i = 0; i < s.size; i += LANES<T>) {
        Vec<T> v = load_row<T>(x + i, s.size - i);
        if (GATE_FIRST) v *= silu_of<T>(load_row<T>(g + i, s.size - i));
        store(s.x + i, v);
        square += v * v;
    }
    return sum<T>(square);
}

template <class T> void load_weight(const NormArguments& a, NormScratch<T>& s) {
    for (int64_t i = 0; i < s.size; ++i) s.w[i] = a.weight ? *at<T>(a.weight, i) : T(1);
}

enum Gating { NO_GATE, GATE_FIRST, GATE_LAST };

inline Gating gating(const NormArguments& a) { return !a.gate ? NO_GATE : a.gate_first ? GATE_FIRST : GATE_LAST; }

template <class T, class I, class O, Gating GATING>
void norm_forward_rows(const NormArguments& a, NormScratch<T>& s, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
        for (int64_t head = 0; head < a.heads; ++head) {
            const I *x = at<I>(a.x, row * a.x_step + head * a.size),
                    *g = GATING == NO_GATE ? nullptr : at<I>(a.gate, row * a.gate_step + head * a.size);
            O* y = at<O>(a.y, (row * a.heads + head) * a.size);
            const T r = norm_factor<T>(a, load_norm<T, I, GATING == GATE_FIRST>(s, x, g));
            for (int64_t i = 0; i < s.size; i += LANES<T>) {
                Vec<T> v = load(s.x + i) * r * load(s.w + i);
                if (GATING == GATE_LAST) v *= silu_of<T>(load_row<T>(g + i, s.size - i));
                store_row<O, false, T>(y + i, v, s.size - i);
            }
        }
}

template <class T, class I, class O> void norm_forward_typed(const NormArguments& a) {
    const int64_t each = chunk_rows(a.rows), chunks = (a.rows + each - 1) / each;
    const auto rows = gating(a) == NO_GATE      ? norm_forward_rows<T, I, O, NO_GATE>
                      : gating(a) == GATE_FIRST ? norm_forward_rows<T, I, O, GATE_FIRST>
                                                : norm_forward_rows<T, I, O, GATE_LAST>;
#pragma omp parallel num_threads(int(threads_for(a.threads, chunks, a.rows * a.heads * a.size)))
    {
        NormScratch<T> s(a.size);
        load_weight<T>(a, s);
#pragma omp for schedule(dynamic)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) rows(a, s, chunk * each, std::min(a.rows, (chunk + 1) * each));
    }
}

// With n = r x: dx = r (w dn - n mean(w dn n)), and r (dy - n (dy.n) / scale^2) of a unit vector; dw = sum dn n.
template <class T, class I, class O, Gating GATING>
void norm_backward_rows(const NormArguments& a, NormScratch<T>& s, int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row)
        for (int64_t head = 0; head < a.heads; ++head) {
            const int64_t place = (row * a.heads + head) * a.size;
            const I *x = at<I>(a.x, row * a.x_step + head * a.size),
                    *g = GATING == NO_GATE ? nullptr : at<I>(a.gate, row * a.gate_step + head * a.size);
            const O* dy = at<O>(a.dy, place);
            I *dx = at<I>(a.dx, place), *dg = GATING == NO_GATE ? nullptr : at<I>(a.dgate, place);
            const T r = norm_factor<T>(a, load_norm<T, I, GATING == GATE_FIRST>(s, x, g));
            Vec<T> along = zero<T>();
            for (int64_t i = 0; i < s.size; i += LANES<T>) {
                const int64_t left = s.size - i;
                const Vec<T> n = r * load(s.x + i), w = load(s.w + i);
                Vec<T> d = load_row<T>(dy + i, left);
                if (GATING == GATE_LAST) {
                    const Vec<T> gate = load_row<T>(g + i, left), p = sigmoid<T>(gate);
                    store_row<I, true, T>(dg + i, d * n * w * silu_slope<T>(gate, p), left);
                    d *= gate * p;
                }
                store(s.dw + i, load(s.dw + i) + d * n);
                d *= w;
                store(s.d + i, d);
                along += d * n;
            }
            const T shared = sum<T>(along) / (a.unit ? T(a.scale * a.scale) : T(a.size));
            for (int64_t i = 0; i < s.size; i += LANES<T>) {
                const int64_t left = s.size - i;
                Vec<T> d = r * (load(s.d + i) - r * load(s.x + i) * shared);
                if (GATING == GATE_FIRST) {
                    const Vec<T> gate = load_row<T>(g + i, left), p = sigmoid<T>(gate);
                    store_row<I, true, T>(dg + i, d * load_row<T>(x + i, left) * silu_slope<T>(gate, p), left);
                    d *= gate * p;
                }
                store_row<I, true, T>(dx + i, d, left);
            }
        }
}

template <class T, class I, class O> void norm_backward_typed(const NormArguments& a) {
    const int64_t each = chunk_rows(a.rows), chunks = (a.rows + each - 1) / each, width = padded<T>(a.size);
    const auto rows = gating(a) == NO_GATE      ? norm_backward_rows<T, I, O, NO_GATE>
                      : gating(a) == GATE_FIRST ? norm_backward_rows<T, I, O, GATE_FIRST>
                                                : norm_backward_rows<T, I, O, GATE_LAST>;
    Buffer<T> dw(a.dweight ? chunks * width : 0);
#pragma omp parallel num_threads(int(threads_for(a.threads, chunks, a.rows * a.heads * a.size)))
    {
        NormScratch<T> s(a.size);
        load_weight<T>(a, s);
#pragma omp for schedule(dynamic)
        for (int64_t chunk = 0; chunk < chunks; ++chunk) {
            std::memset(s.dw.get(), 0, std::size_t(width) * sizeof(T));
            rows(a, s, chunk * each, std::min(a.rows, (chunk + 1) * each));
            if (a.dweight) std::memcpy(dw + chunk * width, s.dw.get(), std::size_t(width) * sizeof(T));
        }
    }
    for (int64_t i = 0; a.dweight && i < a.size; ++i) {
        T total = 0;
        for (int64_t chunk = 0; chunk < chunks; ++chunk) total += dw[chunk * width + i];
        *at<T>(a.dweight, i) = total;
    }
}

// ---- SwiGLU ----

template <class T, class I, bool BACKWARD>
INLINE void swiglu_vector(const SwigluArguments& a, int64_t i, int64_t left) {
    const Vec<T> g = load_row<T>(at<I>(a.g, i), left), u = load_row<T>(at<I>(a.u, i), left), p = sigmoid<T>(g),
                 s = g * p;
    if (a.y) store_row<I, false, T>(at<I>(a.y, i), s * u, left);
    if (!BACKWARD) return;
    const Vec<T> d = load_row<T>(at<I>(a.dy, i), left);
    store_row<I, true, T>(at<I>(a.dg, i), d * u * silu_slope<T>(g, p), left);
    store_row<I, true, T>(at<I>(a.du, i), d * s, left);
}

template <class T, class I, bool BACKWARD> void swiglu_typed(const SwigluArguments& a) {
    const int64_t chunks = (a.count + SPAN - 1) / SPAN;
#pragma omp parallel for schedule(dynamic) num_threads(int(threads_for(a.threads, chunks, a.count)))
    for (int64_t chunk = 0; chunk < chunks; ++chunk) {
        const int64_t last = std::min(a.count, (chunk + 1) * SPAN);
        int64_t i = chunk * SPAN;
        for (; i + LANES<T> <= last; i += LANES<T>) swiglu_vector<T, I, BACKWARD>(a, i, LANES<T>);
        if (i < last) swiglu_vector<T, I, BACKWARD>(a, i, last - i);
    }
}

// ---- softmax cross-entropy ----

// The loss of one row; with `gradient`, x becomes scale (softmax(x) - onehot(label)).
template <class T, class I> T cross_entropy_row(I* x, int64_t columns, int64_t label, T scale, bool gradient) {
    constexpr int64_t W = LANES<T>;
    constexpr T lowest = -std::numeric_limits<T>::infinity();  // fills up a row: its exponential is 0
    const int64_t whole = columns / W * W;
    Vec<T> highest = load_row<T>(x + whole, columns - whole, lowest), total = zero<T>();
    for (int64_t j = 0; j < whole; j += W) {
        const Vec<T> v = load_as<T>(x + j);
        highest = v > highest ? v : highest;
    }
    T top = highest[0];
    for (int c = 1; c < W; ++c) top = std::max(top, T(highest[c]));
    for (int64_t j = 0; j < whole; j += W) total += exponential<T>(load_as<T>(x + j) - top);
    if (whole < columns) total += exponential<T>(load_row<T>(x + whole, columns - whole, lowest) - top);
    const T all = sum<T>(total), of_label = T(widen(x[label])) - top, factor = scale / all;
    if (gradient) {
        for (int64_t j = 0; j < whole; j += W)
            store_as<I, true, T>(x + j, factor * exponential<T>(load_as<T>(x + j) - top));
        if (whole < columns) {
            const Vec<T> rest = load_row<T>(x + whole, columns - whole, lowest);
            store_row<I, true, T>(x + whole, factor * exponential<T>(rest - top), columns - whole);
        }
        narrow_gradient(factor * std::exp(of_label) - scale, x[label]);
    }
    return std::log(all) - of_label;
}

template <class T, class I> void cross_entropy_typed(const CrossEntropyArguments& a) {
    constexpr int64_t EACH = 8;  // rows per task
    const int64_t tasks = (a.rows + EACH - 1) / EACH;
#pragma omp parallel for schedule(dynamic) num_threads(int(threads_for(a.threads, tasks, a.rows * a.columns)))
    for (int64_t task = 0; task < tasks; ++task)
        for (int64_t row = task * EACH; row < std::min(a.rows, (task + 1) * EACH); ++row) {
            I* x = at<I>(a.logits, row * a.columns);
            const int64_t label = *at<int64_t>(a.labels, row);
            if (label >= 0 && label < a.columns) {
                *at<T>(a.losses, row) = cross_entropy_row<T, I>(x, a.columns, label, T(a.scale), a.gradient);
                continue;
            }
            *at<T>(a.losses, row) = T(0);
            if (a.gradient) std::memset(static_cast<void*>(x), 0, std::size_t(a.columns) * sizeof(I));
        }
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
