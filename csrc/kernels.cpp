// All kernels for one instruction set. setup.py compiles this file once per instruction set: MUONSSM_ISA is its name,
// MUONSSM_VECTOR_BYTES the width of its registers.
#include "mamba.h"
#include "memory_backward.h"
#include "rows.h"
#include "selective_backward.h"

namespace muonssm {
namespace MUONSSM_ISA {

int64_t decode_tokens(const DecodeArguments&);  // decode.cpp
double read_memory(const ReadArguments&);

// Call F<type of computation, type of the inputs>.
#define DISPATCH(F, a)                               \
    switch (a.input) {                               \
        case FLOAT32: return F<float, float>(a);     \
        case FLOAT64: return F<double, double>(a);   \
        case BFLOAT16: return F<float, bfloat16>(a); \
        case FLOAT16: return F<float, float16>(a);   \
    }

static int64_t vector_bytes() { return VECTOR_BYTES; }
static void memory_forward(const MemoryArguments& a) { DISPATCH(memory_forward_typed, a) }
static void memory_backward(const MemoryArguments& a) { DISPATCH(memory_backward_typed, a) }
static int64_t memory_step(const MemoryArguments& a) { DISPATCH(memory_step_typed, a) return 0; }
static void selective_forward(const SelectiveArguments& a) { DISPATCH(selective_forward_typed, a) }
static void selective_backward(const SelectiveArguments& a) { DISPATCH(selective_backward_typed, a) }
static int64_t selective_step(const SelectiveArguments& a) { DISPATCH(selective_step_typed, a) return 0; }
static void convolution_forward(const ConvolutionArguments& a) { DISPATCH(convolution_forward_typed, a) }
static void convolution_backward(const ConvolutionArguments& a) { DISPATCH(convolution_backward_typed, a) }
static void mamba_step(const MambaArguments& a) { mamba_step_typed<float>(a); }

// Call F<type of computation, type of the inputs, type of the outputs>.
#define DISPATCH_NORM(F, a)                                                \
    switch (a.input) {                                                     \
        case FLOAT32:                                                      \
            if (a.output == BFLOAT16) return F<float, float, bfloat16>(a); \
            return F<float, float, float>(a);                              \
        case FLOAT64: return F<double, double, double>(a);                 \
        case BFLOAT16: return F<float, bfloat16, bfloat16>(a);             \
        case FLOAT16: return F<float, float16, float16>(a);                \
    }

static void norm_forward(const NormArguments& a) { DISPATCH_NORM(norm_forward_typed, a) }
static void norm_backward(const NormArguments& a) { DISPATCH_NORM(norm_backward_typed, a) }
template <class T, class I> void swiglu_forward_typed(const SwigluArguments& a) { swiglu_typed<T, I, false>(a); }
template <class T, class I> void swiglu_backward_typed(const SwigluArguments& a) { swiglu_typed<T, I, true>(a); }
static void swiglu_forward(const SwigluArguments& a) { DISPATCH(swiglu_forward_typed, a) }
static void swiglu_backward(const SwigluArguments& a) { DISPATCH(swiglu_backward_typed, a) }
static void cross_entropy(const CrossEntropyArguments& a){DISPATCH(cross_entropy_typed, a)}
#define NAME_OF(x) #x
#define NAME(x) NAME_OF(x)

const Kernels& kernels() {
    static const Kernels all{
        NAME(MUONSSM_ISA),  vector_bytes,   memory_forward,      memory_backward,      memory_step,   selective_forward,
        selective_backward, selective_step, convolution_forward, convolution_backward, mamba_step,    norm_forward,
        norm_backward,      swiglu_forward, swiglu_backward,     cross_entropy,        decode_tokens, read_memory};
    return all;
}

}  // namespace MUONSSM_ISA
}  // namespace muonssm
