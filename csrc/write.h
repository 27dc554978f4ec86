// The scale c of a normalized rank-one write, N(tau beta v k^T) = c v k^T, and its derivative. docs/design/operator.md
// derives the formula:
//
//     sigma = tau_inside |beta| |v| |k|,   s = sigma / max(sigma, delta)
//     c     = tau_outside tau_inside beta gain(s) / max(sigma, delta),   gain(s) = rho^steps(s) / s
//
// With beta outside of the normalization, sigma = tau_inside |v| |k|.
#pragma once
#include "arguments.h"
#include "simd.h"

namespace muonssm {
namespace MUONSSM_ISA {

// |x|^2 of a zero-padded row; in double if the squares leave the range of T.
template <class T> INLINE double square_norm(const T* x, int64_t padded_size) {
    Vec<T> total = zero<T>();
    for (int64_t i = 0; i < padded_size; i += LANES<T>) {
        const Vec<T> v = load(x + i);
        total += v * v;
    }
    const double fast = double(sum<T>(total));
    if (fast > 1e-30 && fast < 1e35) return fast;
    double exact = 0;
    for (int64_t i = 0; i < padded_size; ++i) exact += double(x[i]) * double(x[i]);
    return exact;
}

struct Gain {
    double value, slope;
};  // gain as a function of s^2, and its derivative with respect to s^2

inline Gain gain(double square, int64_t steps) {
    constexpr double a = 3.4445, b = -4.7750, c = 2.0315;
    Gain g{1.0, 0.0};
    for (int64_t i = 0; i < steps; ++i) {
        const double x = g.value * g.value * square, dx = 2 * g.value * g.slope * square + g.value * g.value;
        const double p = a + x * (b + x * c), dp = (b + 2 * c * x) * dx;
        g = {g.value * p, g.slope * p + g.value * dp};
    }
    return g;
}

// What of beta is inside of the normalization, and what of it scales the normalized write.
inline double beta_within(const Write& w, double beta) { return w.beta_outside ? 1.0 : std::fabs(beta); }
inline double beta_above(const Write& w, double beta) { return w.beta_outside ? beta : std::copysign(1.0, beta); }

inline double write_scale(const Write& w, double beta, double v2, double k2) {
    const double tau = w.tau_inside * w.tau_outside;
    if (w.steps < 0) return tau * beta;
    const double product = v2 * k2, root = product < 1e300 ? std::sqrt(product) : std::sqrt(v2) * std::sqrt(k2);
    const double sigma = w.tau_inside * beta_within(w, beta) * root;
    if (sigma > w.delta) return w.tau_outside * gain(1.0, w.steps).value * beta_above(w, beta) / root;
    return tau * beta * gain(sigma / w.delta * (sigma / w.delta), w.steps).value / w.delta;
}

// `write_scale` of many steps. If all norms are above delta, each needs one square root and one division.
template <class T>
void write_scales(const Write& w, int64_t steps, const T* beta, const double* v2, const double* k2, T* c) {
    if (w.steps < 0) {
        for (int64_t t = 0; t < steps; ++t) c[t] = T(w.tau_inside * w.tau_outside * beta[t]);
        return;
    }
    const double above = w.tau_outside * gain(1.0, w.steps).value;
    bool usual = true;
    for (int64_t t = 0; t < steps; ++t) {
        const double root = std::sqrt(v2[t] * k2[t]), sigma = w.tau_inside * beta_within(w, double(beta[t])) * root;
        usual = usual & (sigma > w.delta) & (root < 1e150);
        c[t] = T(above * beta_above(w, double(beta[t])) / root);
    }
    if (usual) return;
    for (int64_t t = 0; t < steps; ++t) c[t] = T(write_scale(w, beta[t], v2[t], k2[t]));
}

// From dc: the gradient of beta, and the factors v and k with which dv += v * (the value), dk += k * (the key).
struct WriteGradient {
    double beta, v, k;
};

inline WriteGradient write_gradient(const Write& w, double beta, double v2, double k2, double c, double dc) {
    const double tau = w.tau_inside * w.tau_outside;
    if (w.steps < 0) return {tau * dc, 0, 0};
    const double root = std::sqrt(v2) * std::sqrt(k2), sigma = w.tau_inside * beta_within(w, beta) * root;
    if (sigma > w.delta) {  // c is a constant divided by |v| |k|; inside, beta cancels
        const double by_beta = w.beta_outside ? w.tau_outside * gain(1.0, w.steps).value / root * dc : 0;
        return {by_beta, -c * dc / v2, -c * dc / k2};
    }
    // c = tau beta gain(sigma^2 / delta^2) / delta, with sigma^2 = (tau_inside beta)^2 v2 k2; outside without beta
    const double tb = w.tau_inside * beta_within(w, beta) / w.delta, square = tb * tb * v2 * k2;
    const Gain g = gain(square, w.steps);
    const double by_square = tau * beta / w.delta * g.slope * dc;
    const double direct = tau / w.delta * g.value * dc;
    const double by_sigma = tau / w.delta * g.slope * dc * 2 * square;  // beta d(square)/dbeta = 2 square
    const double dbeta = w.beta_outside ? direct : direct + by_sigma;
    return {dbeta, by_square * 2 * tb * tb * k2, by_square * 2 * tb * tb * v2};
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
