// Arguments of the kernels: plain structs, mirrored field by field in muonssm/ops/cpu_library.py, which compares their
// sizes and the constants below with its own. Increase the ABI number in both places when a struct changes.
//
// Sequence i has the steps offsets[i] to offsets[i + 1] of every per-step array; a batch [B, L, ...] is B sequences.
// All arrays are contiguous. q, k, v, x, dt, B, C, y, dy, dq, dk and dv have the type of the inputs. All other arrays
// have the type of computation: double for double inputs, float otherwise. Optional arrays can be null.
#pragma once
#include <cstdint>

namespace muonssm {

constexpr int SEGMENT = 64;         // time steps between two saved states
constexpr int CHANNEL_GROUP = 64;   // channels of one task of the selective scan
constexpr int LONGEST_FILTER = 64;  // taps of the convolution: its K - 1 earlier rows must fit into one segment

enum Input : int64_t { FLOAT32 = 0, FLOAT64 = 1, BFLOAT16 = 2, FLOAT16 = 3 };

// Normalization of a write, see write.h: `steps` Newton-Schulz steps, 0 for the Frobenius norm only, < 0 for none.
struct Write {
    int64_t steps, beta_outside;
    double tau_inside, tau_outside, delta;
};

struct MemoryArguments {
    int64_t input, threads, sequences, heads, d, m, momentum;
    int64_t residual;                // the correction goes into M instead of S; needs momentum, as inject does
    int64_t gamma_step, gamma_head;  // strides of gamma, in elements
    double eta;
    Write write;
    const int64_t* offsets;
    const void *q, *k, *v;                 // [steps, heads, m]; v: [steps, heads, d]
    const void *log_alpha, *beta, *gamma;  // [steps, heads]; gamma has its own strides
    const void* inject;                    // [steps, heads], or null for 1
    const void *S0, *M0;                   // [sequences, heads, d, m]
    void *y, *S, *M;                       // outputs of the forward pass
    void *S_saved, *M_saved;               // states before every segment, [segments, heads] x the layout of LAYOUT.md
    const void *dy, *dS, *dM;              // gradients of the outputs
    void *dq, *dk, *dv, *dlog_alpha, *dbeta, *dgamma, *dinject, *dS0, *dM0;  // gradients of the inputs
};

struct SelectiveArguments {
    int64_t input, threads, sequences, D, N, momentum, gamma_step;
    Write write;
    const int64_t* offsets;
    const void *x, *dt, *B, *C;  // [steps, D]; B, C: [steps, N]
    const void *A, *gamma;       // A: [D, N], or null for LongHorn's gate
    const void *S0, *M0;         // [sequences, D, N]
    void *y, *S, *M;
    void *S_saved, *M_saved;  // [segments] x the layout of LAYOUT.md
    const void *dy, *dS, *dM;
    void *dx, *ddt, *dA, *dB, *dC, *dgamma, *dS0, *dM0;
};

struct ConvolutionArguments {
    int64_t input, threads, sequences, channels, K, x_step, silu;  // x_step: stride of the rows of x, in elements
    const int64_t* offsets;
    const void *x, *tail;       // [steps, channels], [sequences, K - 1, channels]; type of the inputs
    const void *weight, *bias;  // [channels, K], [channels]
    void* y;                    // [steps, channels]; type of the inputs, like dy, dx and dtail
    const void* dy;
    void *dx, *dtail, *dweight, *dbias;
};

// One decoding step of a whole Mamba mixer, in float32. Matrices are [out, in], as in torch.
struct MambaArguments {
    int64_t threads, sequences, d_model, D, N, R, K;  // R: rank of the projection of dt
    double gamma, norm_eps;
    Write write;
    const void *x, *norm;  // norm: weight of an RMS norm, for y = x + mixer(norm(x)); or null
    const void *in_proj, *conv_weight, *conv_bias, *x_proj, *dt_proj, *dt_bias, *A_log, *skip, *out_proj;
    const void *tail, *S0, *M0;  // [sequences, K - 1, D], [sequences, D, N]
    void *y, *tail_out, *S, *M;
};

// A norm of every row, or unit vectors, see rows.h. Heads of a row follow each other. y, dy have the type `output`, x, gate,
// dx and dgate the type `input`; float32 inputs can have bfloat16 outputs.
struct NormArguments {
    int64_t input, output, threads, rows, heads, size, x_step, gate_step, unit, gate_first;  // steps: strides of rows
    double eps, scale;
    const void *x, *gate, *weight;  // [rows, heads, size]; gate and weight [size] can be null
    void* y;
    const void* dy;
    void *dx, *dgate, *dweight;
};

struct SwigluArguments {
    int64_t input, threads, count;
    const void *g, *u;  // [count], like all arrays
    void* y;            // can be null in the backward pass, which computes it again
    const void* dy;
    void *dg, *du;
};

// Rows whose label is not in [0, columns) have no loss and no gradient.
struct CrossEntropyArguments {
    int64_t input, threads, rows, columns, gradient;
    double scale;
    void* logits;        // [rows, columns]; becomes the gradient
    const void* labels;  // [rows], int64
    void* losses;        // [rows]
};
struct DecodeArguments;  // decode_steps.h
struct ReadArguments;

// The kernels of one instruction set; api.cpp selects the set.
struct Kernels {
    const char* name;
    int64_t (*vector_bytes)();
    void (*memory_forward)(const MemoryArguments&);
    void (*memory_backward)(const MemoryArguments&);
    int64_t (*memory_step)(const MemoryArguments&);  // 1, and does nothing, if a log_alpha is above 0; otherwise 0
    void (*selective_forward)(const SelectiveArguments&);
    void (*selective_backward)(const SelectiveArguments&);
    int64_t (*selective_step)(const SelectiveArguments&);  // always 0
    void (*convolution_forward)(const ConvolutionArguments&);
    void (*convolution_backward)(const ConvolutionArguments&);
    void (*mamba_step)(const MambaArguments&);
    void (*norm_forward)(const NormArguments&);
    void (*norm_backward)(const NormArguments&);
    void (*swiglu_forward)(const SwigluArguments&);
    void (*swiglu_backward)(const SwigluArguments&);
    void (*cross_entropy)(const CrossEntropyArguments&);
    int64_t (*decode)(const DecodeArguments&);  // 1, and does nothing, if a token is outside of the vocabulary
    double (*read_memory)(const ReadArguments&);
};

}  // namespace muonssm
