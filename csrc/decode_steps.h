// Arguments of decode.h: a program is an array of DecodeStep, built once from a model by
// muonssm/models/language/decoding and mirrored field by field in muonssm/ops/decode_program.py.
//
// All numbers are float32. Pointers to activations are the first row of a buffer; a `_step` is the distance of two rows.
#pragma once
#include <cstdint>

#include "arguments.h"

namespace muonssm {

constexpr int MOST_ROWS = 16;  // tokens of a call: sequences x tokens per sequence
constexpr int TILE = 16;       // rows of a tile of a bfloat16 or int8 matrix
constexpr int BLOCK = 32;      // columns that share a scale in an int8 matrix; columns are padded to whole blocks

enum StepKind : int64_t { EMBED, PROJECT, CONVOLVE, REMEMBER, SCAN, ATTEND };
enum Format : int64_t { FLOAT32_ROWS, BFLOAT16_TILES, INT8_TILES };
enum Activation : int64_t { NO_ACTIVATION, SOFTPLUS };
enum Gamma : int64_t { FIXED_GAMMA, HEAD_GAMMA, STEP_GAMMA };
enum Rule : int64_t { DELTA, GATED_DELTA, MAMBA2, LONGHORN, MOMENTUM_DELTA };

// A matrix [rows, columns]. Tiles: [rows / 16][columns / 2][16][2] for bfloat16, [rows / 16][columns / 4][16][4] for
// int8 with bfloat16 scales [rows / 16][columns / 32][16].
struct Matrix {
    int64_t format, rows;
    const void *data, *scales;
    const float* bias;  // [rows], or null
};

struct EmbedStep {
    int64_t columns, angles, out_step,
        rotary_step;  // angles: pairs of numbers that rotary embeddings turn; 0 without attention
    double scaling;
    Matrix table;
    const float* frequencies;  // [angles]
    float *out, *rotary;       // rotary: [rows][2, angles], cosines and sines
};

// The outputs of the matrices follow each other in `out`. With `swiglu` there are two, and out = silu(first) * second.
struct ProjectStep {
    int64_t columns, count, swiglu, add, activation, last;  // last: only the last tokens, and into the call's logits
    int64_t group, x_step, gate_step, out_step;             // group: numbers that a norm is taken over
    double eps;
    const float *x, *norm, *gate;
    float* out;
    Matrix matrices[4];
};

struct ConvolveStep {
    int64_t channels, K, x_step, out_step;
    int64_t tail_sequence, tail_step, tail_channel;  // strides of the tail
    const float *x, *weight, *bias;                  // weight: [K, channels]
    float *out, *tail;
};

struct MemoryStep {
    int64_t heads, key_heads, d, m, rule, unit, residual, gamma_kind, skip_per_head;
    int64_t q_step, k_step, v_step, z_step, p_step, logits_step, y_step, S_step,
        M_step;                                                    // S_step, M_step: between sequences
    int64_t a_column, b_column, m_column, e_column, gamma_column;  // of the gates in a row of p
    double eta, gamma, q_scale, e_scale, least, most;              // least, most: of dt, or of log gamma
    Write write;
    const float *q, *k, *v, *z, *p, *logits;  // logits: of LongHorn's write gates
    const float *gate_bias, *dt_bias, *A_log, *gamma_bias, *skip, *D_log, *log_factor, *Mu_log, *mu_bias;
    float *S, *M, *y;
};

struct ScanStep {
    int64_t D, N, gamma_kind, gamma_column;
    int64_t x_step, dt_step, B_step, z_step, p_step, y_step, S_step, M_step;
    double gamma;
    Write write;
    const float *x, *dt, *B, *C, *z, *p;
    const float *A, *gamma_bias, *skip;  // A: [D, N], or null for LongHorn's gate, where dt holds logits
    float *S, *M, *y;
};

// p has q, k and v of all heads. Keys and values are [sequences, key_heads, ., size], with `past` tokens so far.
struct AttendStep {
    int64_t heads, key_heads, size, window, past, p_step, rotary_step, y_step, cache_sequence, cache_head, mask_step;
    double scale;
    const float *p, *rotary;
    float *keys, *values, *y;
    const uint8_t* mask;  // [sequences, past + length], 0 at padding; or null
};

struct DecodeStep {
    int64_t kind;
    const void* arguments;
};

struct DecodeArguments {
    int64_t threads, sequences, length, keep, vocabulary, count, scratch_step;
    const DecodeStep* steps;
    const int64_t *tokens, *positions;  // [sequences, length]
    const uint8_t* live;                // [sequences, length], 0 at padding, which writes nothing; or null
    float *logits, *scratch;            // [sequences, keep, vocabulary]; [threads, scratch_step]
};

struct ReadArguments {
    int64_t threads, count;  // numbers, a multiple of 64
    const float* data;
};

}  // namespace muonssm
