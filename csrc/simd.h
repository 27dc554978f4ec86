// Vectors in the vector extension of GCC and Clang: compiler flags turn the same source into AVX-512, AVX2, SSE2 or
// NEON code.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <type_traits>
#include <utility>
#if defined(__AVX__)
#include <immintrin.h>
#endif

namespace muonssm {
namespace MUONSSM_ISA {

#define INLINE inline __attribute__((always_inline))

constexpr int VECTOR_BYTES = MUONSSM_VECTOR_BYTES;
template <class T> constexpr int LANES = VECTOR_BYTES / int(sizeof(T));

template <class T> struct VectorOf {
    typedef T type __attribute__((vector_size(VECTOR_BYTES)));
};
template <class T> struct UnalignedOf {
    typedef T type __attribute__((vector_size(VECTOR_BYTES), aligned(alignof(T)), may_alias));
};
template <class T> using Vec = typename VectorOf<T>::type;

template <class T> INLINE Vec<T> load(const T* p) { return *reinterpret_cast<const typename UnalignedOf<T>::type*>(p); }
template <class T> INLINE void store(T* p, Vec<T> v) { *reinterpret_cast<typename UnalignedOf<T>::type*>(p) = v; }
template <class T> INLINE Vec<T> splat(T x) { return Vec<T>{} + x; }
template <class T> INLINE Vec<T> broadcast(const T* p) {
#if defined(__AVX__) && !defined(__AVX512F__)  // compilers would load a scalar and shuffle it
    if constexpr (sizeof(T) == 4) return _mm256_broadcast_ss(p);
    else return _mm256_broadcast_sd(p);
#else
    return splat<T>(*p);
#endif
}
template <class T> INLINE Vec<T> zero() { return Vec<T>{}; }

// ---- sums over lanes ----

template <class T> using Integer = std::conditional_t<sizeof(T) == 4, int32_t, int64_t>;

// `sums` is a tree. Two vectors with the partial sums of g columns each become one vector with those of 2 g columns, by
// adding two selections of lanes. While 2 g columns fit into 128 bits, lanes move within 128 bits, which is cheap;
// after that, whole blocks of 128 bits move.
constexpr int source_lane(int lane, int lanes, int unit, int g, bool second) {  // unit: lanes in 128 bits
    if (2 * g <= unit) {
        const int base = lane / unit * unit, place = lane % unit, row = place / (2 * g), within = place % (2 * g);
        return base + row * g + within % g + (second ? unit / 2 : 0) + (within >= g ? lanes : 0);
    }
    const int group = lanes / g * unit, half = group / 2, index = lane / half, groups = lanes / group;
    return (index % groups) * group + lane % half + (second ? half : 0) + (index >= groups ? lanes : 0);
}

template <class T, int G, bool SECOND, std::size_t... I>
INLINE Vec<T> pick(Vec<T> a, Vec<T> b, std::index_sequence<I...>) {
    constexpr int unit = 16 / int(sizeof(T));
#if defined(__clang__)
    return __builtin_shufflevector(a, b, source_lane(int(I), LANES<T>, unit, G, SECOND)...);
#else
    return __builtin_shuffle(a, b, Vec<Integer<T>>{Integer<T>(source_lane(int(I), LANES<T>, unit, G, SECOND))...});
#endif
}

template <class T, int COUNT> INLINE Vec<T> sums_of(const Vec<T>* v) {
    if constexpr (COUNT == 1) {
        return *v;
    } else {
        constexpr auto lanes = std::make_index_sequence<std::size_t(LANES<T>)>{};
        const Vec<T> a = sums_of<T, COUNT / 2>(v), b = sums_of<T, COUNT / 2>(v + COUNT / 2);
        return pick<T, COUNT / 2, false>(a, b, lanes) + pick<T, COUNT / 2, true>(a, b, lanes);
    }
}

// Lane i of the result is the sum over the lanes of v[i], for LANES vectors v.
template <class T> INLINE Vec<T> sums(const Vec<T>* v) { return sums_of<T, LANES<T>>(v); }

// The sum over all lanes, by adding halves.
template <class T, int HALF, std::size_t... I> INLINE Vec<T> folded(Vec<T> v, std::index_sequence<I...>) {
#if defined(__clang__)
    return v + __builtin_shufflevector(v, v, (int(I) ^ HALF)...);
#else
    return v + __builtin_shuffle(v, Vec<Integer<T>>{Integer<T>(int(I) ^ HALF)...});
#endif
}

template <class T, int HALF = LANES<T> / 2> INLINE T sum(Vec<T> v) {
    if constexpr (HALF == 0) return v[0];
    else return sum<T, HALF / 2>(folded<T, HALF>(v, std::make_index_sequence<std::size_t(LANES<T>)>{}));
}

// ---- exp, accurate to about 2 units in the last place; 0 where the result would be subnormal ----

template <class T> INLINE Vec<T> exponential(Vec<T> x) {
    using I = Integer<T>;
    constexpr bool single = sizeof(T) == 4;
    const T low = single ? T(-87.3365447) : T(-708.3964185);
    const T high = single ? T(88.3762589) : T(709.0895657);
    const Vec<Integer<T>> tiny = x < low;
    Vec<T> y = tiny ? splat<T>(low) : x;
    y = (y > high) ? splat<T>(high) : y;
    const T magic = single ? T(12582912.0) : T(6755399441055744.0);  // 1.5 * 2^23, 1.5 * 2^52: rounds to integers
    const Vec<T> shifted = y * T(1.44269504088896340736) + magic;
    const Vec<T> n = shifted - magic;
    const T ln2_high = single ? T(0.693359375) : T(6.93145751953125e-1);
    const T ln2_low = single ? T(-2.12194440e-4) : T(1.42860682030941723212e-6);
    const Vec<T> r = (y - n * ln2_high) - n * ln2_low;
    Vec<T> p;
    if constexpr (single) {
        p = splat<T>(T(1.9875691500e-4));
        p = p * r + T(1.3981999507e-3);
        p = p * r + T(8.3334519073e-3);
        p = p * r + T(4.1665795894e-2);
        p = p * r + T(1.6666665459e-1);
        p = p * r + T(5.0000001201e-1);
        p = p * (r * r) + r + T(1);
    } else {
        p = splat<T>(T(1.0 / 6227020800.0));  // Taylor to r^13: |r| <= 0.35
        const double inverse[] = {
            1.0 / 479001600, 1.0 / 39916800, 1.0 / 3628800, 1.0 / 362880, 1.0 / 40320, 1.0 / 5040, 1.0 / 720,
            1.0 / 120,       1.0 / 24,       1.0 / 6,       0.5,          1.0,         1.0};
        for (double coefficient : inverse) p = p * r + T(coefficient);
    }
    Vec<I> bits;
    static_assert(sizeof(bits) == sizeof(shifted), "");
    std::memcpy(&bits, &shifted, sizeof bits);  // the low bits hold n
    constexpr int mantissa = single ? 23 : 52;
    Vec<I> power;
    std::memcpy(&power, &p, sizeof power);
    power += bits << mantissa;
    Vec<T> result;
    std::memcpy(&result, &power, sizeof result);
    return tiny ? zero<T>() : result;
}

// ---- 16-bit inputs ----

struct bfloat16 {
    uint16_t bits;
};
struct float16 {
    uint16_t bits;
};

INLINE float from_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}
INLINE uint32_t to_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

INLINE float widen(float x) { return x; }
INLINE double widen(double x) { return x; }
INLINE float widen(bfloat16 x) { return from_bits(uint32_t(x.bits) << 16); }
INLINE float widen(float16 x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = x.bits & 0x7fff;
    if (rest >= 0x7c00) return from_bits(sign | 0x7f800000 | (rest & 0x3ff) << 13);  // infinity, NaN
    if (rest >= 0x0400) return from_bits(sign | ((rest << 13) + (112u << 23)));
    return from_bits(sign | to_bits(float(rest) * 0x1p-24f));  // subnormal
}

INLINE void narrow(float x, float& out) { out = x; }
INLINE void narrow(double x, double& out) { out = x; }
INLINE void narrow(float x, bfloat16& out) {
    const uint32_t bits = to_bits(x);
    const bool nan = (bits & 0x7fffffff) > 0x7f800000;
    out.bits = nan ? 0x7fc0 : uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}
INLINE void narrow(float x, float16& out) {
    const uint32_t bits = to_bits(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
    if (rest > 0x7f800000) {
        out.bits = uint16_t(sign | 0x7e00);
        return;
    }
    if (rest >= 0x477ff000) {  // 65520 and above round to infinity
        out.bits = uint16_t(sign | 0x7c00);
        return;
    }
    if (rest < 0x38800000) {  // subnormal: the addition rounds
        out.bits = uint16_t(sign | (to_bits(from_bits(rest) + 0.5f) - to_bits(0.5f)));
        return;
    }
    out.bits = uint16_t(sign | (rest + 0xfff + ((rest >> 13) & 1) - (112u << 23)) >> 13);
}

// Gradients of float16 saturate: as infinity, a zero mask earlier in the network would turn them into NaN.
template <class T, class I> INLINE void narrow_gradient(T x, I& out) {
    if constexpr (std::is_same<I, float16>::value) x = x > 65504 ? T(65504) : x < -65504 ? T(-65504) : x;
    narrow(x, out);
}

// ---- vectors of rows in memory: conversion of 16-bit numbers, and rows that end within a vector ----

struct NarrowVector {  // 16 bits for each lane of a vector of float
    typedef uint16_t type __attribute__((vector_size(VECTOR_BYTES / 2)));
};

// Load LANES<T> numbers of type I.
template <class T, class I> INLINE Vec<T> load_as(const I* p) {
    if constexpr (std::is_same<T, I>::value) return load(p);
    else if constexpr (std::is_same<I, bfloat16>::value) {
        NarrowVector::type bits;
        std::memcpy(&bits, p, sizeof bits);
        const Vec<uint32_t> wide = __builtin_convertvector(bits, Vec<uint32_t>) << 16;
        Vec<T> result;
        std::memcpy(&result, &wide, sizeof result);
        return result;
    } else {
        Vec<T> result;
        for (int c = 0; c < LANES<T>; ++c) result[c] = T(widen(p[c]));
        return result;
    }
}

// Store LANES<T> numbers as type I; gradients of float16 saturate.
template <class I, bool GRADIENT, class T, class V = Vec<T>> INLINE void store_as(I* p, V v) {
    if constexpr (std::is_same<T, I>::value) store(p, v);
    else if constexpr (std::is_same<I, bfloat16>::value) {
        Vec<uint32_t> bits;
        std::memcpy(&bits, &v, sizeof bits);
        const Vec<uint32_t> rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
        const Vec<uint32_t> result = (bits & 0x7fffffff) > 0x7f800000 ? Vec<uint32_t>{} + 0x7fc0 : rounded;
        const NarrowVector::type out = __builtin_convertvector(result, NarrowVector::type);
        std::memcpy(p, &out, sizeof out);
    } else {
        for (int c = 0; c < LANES<T>; ++c)
            if constexpr (GRADIENT) narrow_gradient(v[c], p[c]);
            else narrow(v[c], p[c]);
    }
}

// The same for the first `left` numbers; the others of a loaded vector are `fill`, and are not stored.
template <class T, class I> INLINE Vec<T> load_row(const I* p, int64_t left, T fill = T(0)) {
    if (left >= LANES<T>) return load_as<T>(p);
#if defined(__AVX512F__)
    if constexpr (std::is_same<I, float>::value)
        return _mm512_mask_loadu_ps(_mm512_set1_ps(fill), __mmask16((1u << left) - 1), p);
#endif
    Vec<T> v = splat<T>(fill);
    for (int64_t c = 0; c < left; ++c) v[c] = T(widen(p[c]));
    return v;
}

template <class I, bool GRADIENT, class T, class V = Vec<T>> INLINE void store_row(I* p, V v, int64_t left) {
    if (left >= LANES<T>) return store_as<I, GRADIENT, T>(p, v);
#if defined(__AVX512F__)
    if constexpr (std::is_same<I, float>::value) return _mm512_mask_storeu_ps(p, __mmask16((1u << left) - 1), v);
#endif
    for (int64_t c = 0; c < left; ++c)
        if constexpr (GRADIENT) narrow_gradient(v[c], p[c]);
        else narrow(v[c], p[c]);
}

// ---- scratch memory, aligned to 64 bytes and zeroed ----

template <class T> class Buffer {
public:
    explicit Buffer(int64_t size) {
        const std::size_t bytes = (std::size_t(size < 1 ? 1 : size) * sizeof(T) + 63) / 64 * 64;
        data_ = static_cast<T*>(std::aligned_alloc(64, bytes));
        std::memset(static_cast<void*>(data_), 0, bytes);
    }
    ~Buffer() { std::free(data_); }
    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    operator T*() { return data_; }
    T* get() { return data_; }

private:
    T* data_;
};

template <class T> constexpr int64_t padded(int64_t size) { return (size + LANES<T> - 1) / LANES<T> * LANES<T>; }

}  // namespace MUONSSM_ISA
}  // namespace muonssm
