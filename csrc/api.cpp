// The C interface that Python calls, and the choice of the instruction set at run time.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "decode_steps.h"

namespace muonssm {
namespace portable {
const Kernels& kernels();
}
#if defined(__x86_64__)
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}
#endif

// The widest instruction set of this machine. The environment variable MUONSSM_ISA=portable|avx2|avx512 selects another
// one, if the machine has it.
static const Kernels& best() {
    const char* requested = std::getenv("MUONSSM_ISA");
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && has_avx2;
    const auto allowed = [requested](const char* name) {
        return !requested || !*requested || !std::strcmp(requested, name);
    };
    if (has_avx512 && allowed("avx512")) return avx512::kernels();
    if (has_avx2 && allowed("avx2")) return avx2::kernels();
#endif
    (void)requested;
    return portable::kernels();
}

// Ask for large pages. New memory comes in pages of 4 KiB, and the first access to each costs as much as computing on
// it. With `now`, memory that is in use moves to large pages at once (Linux 6.1), which copies it: it is then read
// faster. Both are hints: systems that do not know them ignore them.
static void expect_large(void* data, int64_t bytes, bool now) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = uintptr_t(2) << 20;
    constexpr int collapse = 25;  // MADV_COLLAPSE, which older headers do not have
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page,
                    end = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) / page * page;
    if (!data || end <= begin) return;
    madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
    if (now) madvise(reinterpret_cast<void*>(begin), end - begin, collapse);
#else
    (void)data, (void)bytes, (void)now;
#endif
}

// Sizes and constants that Python compares with its own before the first call; -1 for an unknown name.
struct Named {
    const char* name;
    int64_t value;
};

template <std::size_t COUNT> static int64_t find(const Named (&all)[COUNT], const char* name) {
    for (const Named& one : all)
        if (!std::strcmp(one.name, name)) return one.value;
    return -1;
}

static int64_t struct_size(const char* name) {
    static const Named sizes[] = {{"Write", sizeof(Write)},
                                  {"MemoryArguments", sizeof(MemoryArguments)},
                                  {"SelectiveArguments", sizeof(SelectiveArguments)},
                                  {"ConvolutionArguments", sizeof(ConvolutionArguments)},
                                  {"MambaArguments", sizeof(MambaArguments)},
                                  {"NormArguments", sizeof(NormArguments)},
                                  {"SwigluArguments", sizeof(SwigluArguments)},
                                  {"CrossEntropyArguments", sizeof(CrossEntropyArguments)},
                                  {"Matrix", sizeof(Matrix)},
                                  {"EmbedStep", sizeof(EmbedStep)},
                                  {"ProjectStep", sizeof(ProjectStep)},
                                  {"ConvolveStep", sizeof(ConvolveStep)},
                                  {"MemoryStep", sizeof(MemoryStep)},
                                  {"ScanStep", sizeof(ScanStep)},
                                  {"AttendStep", sizeof(AttendStep)},
                                  {"DecodeStep", sizeof(DecodeStep)},
                                  {"DecodeArguments", sizeof(DecodeArguments)},
                                  {"ReadArguments", sizeof(ReadArguments)}};
    return find(sizes, name);
}

static int64_t constant(const char* name) {
    static const Named constants[] = {{"SEGMENT", SEGMENT},
                                      {"CHANNEL_GROUP", CHANNEL_GROUP},
                                      {"LONGEST_FILTER", LONGEST_FILTER},
                                      {"MOST_ROWS", MOST_ROWS},
                                      {"TILE", TILE},
                                      {"BLOCK", BLOCK}};
    return find(constants, name);
}

static const Kernels& chosen() {
    static const Kernels& kernels = best();
    return kernels;
}
}  // namespace muonssm

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void muonssm_expect_large(void* data, int64_t bytes, int64_t now) {
    muonssm::expect_large(data, bytes, now != 0);
}
EXPORT int64_t muonssm_abi() { return 7; }
EXPORT int64_t muonssm_struct_size(const char* name) { return muonssm::struct_size(name); }
EXPORT int64_t muonssm_constant(const char* name) { return muonssm::constant(name); }
EXPORT const char* muonssm_isa() { return muonssm::chosen().name; }
EXPORT int64_t muonssm_vector_bytes() { return muonssm::chosen().vector_bytes(); }
EXPORT void muonssm_memory_forward(const muonssm::MemoryArguments* a) { muonssm::chosen().memory_forward(*a); }
EXPORT void muonssm_memory_backward(const muonssm::MemoryArguments* a) { muonssm::chosen().memory_backward(*a); }
EXPORT int64_t muonssm_memory_step(const muonssm::MemoryArguments* a) { return muonssm::chosen().memory_step(*a); }
EXPORT void muonssm_selective_forward(const muonssm::SelectiveArguments* a) { muonssm::chosen().selective_forward(*a); }
EXPORT void muonssm_selective_backward(const muonssm::SelectiveArguments* a) {
    muonssm::chosen().selective_backward(*a);
}
EXPORT int64_t muonssm_selective_step(const muonssm::SelectiveArguments* a) {
    return muonssm::chosen().selective_step(*a);
}
EXPORT void muonssm_convolution_forward(const muonssm::ConvolutionArguments* a) {
    muonssm::chosen().convolution_forward(*a);
}
EXPORT void muonssm_convolution_backward(const muonssm::ConvolutionArguments* a) {
    muonssm::chosen().convolution_backward(*a);
}
EXPORT void muonssm_mamba_step(const muonssm::MambaArguments* a) { muonssm::chosen().mamba_step(*a); }
EXPORT void muonssm_norm_forward(const muonssm::NormArguments* a) { muonssm::chosen().norm_forward(*a); }
EXPORT void muonssm_norm_backward(const muonssm::NormArguments* a) { muonssm::chosen().norm_backward(*a); }
EXPORT void muonssm_swiglu_forward(const muonssm::SwigluArguments* a) { muonssm::chosen().swiglu_forward(*a); }
EXPORT void muonssm_swiglu_backward(const muonssm::SwigluArguments* a) { muonssm::chosen().swiglu_backward(*a); }
EXPORT void muonssm_cross_entropy(const muonssm::CrossEntropyArguments* a) { muonssm::chosen().cross_entropy(*a); }
EXPORT int64_t muonssm_decode(const muonssm::DecodeArguments* a) { return muonssm::chosen().decode(*a); }
EXPORT double muonssm_read_memory(const muonssm::ReadArguments* a) { return muonssm::chosen().read_memory(*a); }
