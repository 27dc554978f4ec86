// What Python hands over: plain structs, mirrored field by field in muonssm/ops/cpu_library.py.
//
// Sequences are packed rows: sequence i has the steps offsets[i] to offsets[i + 1] of every per-step array. A batch
// [B, L, ...] is B such sequences. All arrays are contiguous. q, k, v, x, dt, B, C, y, dy, dq, dk and dv have the type of the
// inputs; all else has the type of computation, double for double and float otherwise. A null pointer means: not there.
#pragma once
#include <cstdint>

namespace muonssm {

constexpr int SEGMENT = 64;         // time steps between two saved states
constexpr int CHANNEL_GROUP = 64;   // channels of one task of the selective scan
constexpr int LONGEST_FILTER = 64;  // taps of the convolution: its K - 1 earlier rows must fit into one segment

enum Input : int64_t { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

// The normalised write c v k^T, see docs/operator.md: steps < 0 is no normalisation, 0 is Frobenius.
struct Write {
    int64_t steps;
    double tau_inside, tau_outside, delta;
};

struct MemoryArguments {
    int64_t input, threads, sequences, heads, d, m, momentum, gamma_step, gamma_head;  // gamma's strides, in elements
    double eta;
    Write write;
    const int64_t* offsets;
    const void *q, *k, *v;                  // [steps, heads, m or d]
    const void *log_alpha, *beta, *gamma;   // [steps, heads]; gamma by its strides
    const void *S0, *M0;                    // [sequences, heads, d, m]
    void *y, *S, *M;                        // outputs of the forward pass
    void *S_saved, *M_saved;                // states before every segment of 64 steps, [segments, heads, m, padded d]
    const void *dy, *dS, *dM;               // gradients that come in
    void *dq, *dk, *dv, *dlog_alpha, *dbeta, *dgamma, *dS0, *dM0;  // and go out
};

struct SelectiveArguments {
    int64_t input, threads, sequences, D, N, momentum, gamma_step;
    Write write;
    const int64_t* offsets;
    const void *x, *dt, *B, *C;             // [steps, D or N]
    const void *A, *gamma;                  // A [D, N] or null for LongHorn's gate
    const void *S0, *M0;                    // [sequences, D, N]
    void *y, *S, *M;
    void *S_saved, *M_saved;                // [segments, N, padded D]
    const void *dy, *dS, *dM;
    void *dx, *ddt, *dA, *dB, *dC, *dgamma, *dS0, *dM0;
};

struct ConvolutionArguments {
    int64_t input, threads, sequences, channels, K, x_step, silu;  // x_step: elements from a row of x to the next
    const int64_t* offsets;
    const void *x, *tail;                   // [steps, channels] by its stride, [sequences, K - 1, channels]; type of the inputs
    const void *weight, *bias;              // [channels, K], [channels]
    void* y;                                // [steps, channels], type of the inputs, as are dy, dx and dtail
    const void* dy;
    void *dx, *dtail, *dweight, *dbias;
};

// One step of a whole Mamba mixer, all in float32. Matrices are [out, in], as torch keeps them.
struct MambaArguments {
    int64_t threads, sequences, d_model, D, N, R, K;  // R: rank of the step size's projection
    double gamma, norm_eps;
    Write write;
    const void *x, *norm;                   // norm: weights of an RMS norm before the mixer, and y becomes x + y; or null
    const void *in_proj, *conv_weight, *conv_bias, *x_proj, *dt_proj, *dt_bias, *A_log, *skip, *out_proj;
    const void *tail, *S0, *M0;             // [sequences, K - 1, D], [sequences, D, N]
    void *y, *tail_out, *S, *M;
};

// One set of functions per instruction set; api.cpp picks the best the machine has.
struct Kernels {
    const char* name;
    int64_t (*vector_bytes)();
    void (*memory_forward)(const MemoryArguments&);
    void (*memory_backward)(const MemoryArguments&);
    int64_t (*memory_step)(const MemoryArguments&);  // 1 if some log_alpha is above 0, otherwise 0
    void (*selective_forward)(const SelectiveArguments&);
    void (*selective_backward)(const SelectiveArguments&);
    int64_t (*selective_step)(const SelectiveArguments&);  // 0
    void (*convolution_forward)(const ConvolutionArguments&);
    void (*convolution_backward)(const ConvolutionArguments&);
    void (*mamba_step)(const MambaArguments&);
};

}  // namespace muonssm
