// The C interface that Python calls, and the choice of instruction set at run time.
#include <cstddef>
#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "arguments.h"

namespace muonssm {
namespace portable { const Kernels& kernels(); }
#if defined(__x86_64__)
namespace avx2 { const Kernels& kernels(); }
namespace avx512 { const Kernels& kernels(); }
#endif

// The best set the machine has; MUONSSM_ISA=portable|avx2|avx512 asks for one, and is obeyed if the machine has it.
static const Kernels& best() {
    const char* wish = std::getenv("MUONSSM_ISA");
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool has_avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool has_avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") && has_avx2;
    const auto wanted = [wish](const char* name) { return !wish || !*wish || !std::strcmp(wish, name); };
    if (has_avx512 && wanted("avx512")) return avx512::kernels();
    if (has_avx2 && wanted("avx2")) return avx2::kernels();
#endif
    (void)wish;
    return portable::kernels();
}

// New memory of this size comes in pages of 4 KiB, and the first touch of each costs as much as computing on it: ask for
// large pages instead. A hint; where it is not understood nothing happens.
static void expect_large(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    constexpr uintptr_t page = uintptr_t(2) << 20;
    const uintptr_t begin = (reinterpret_cast<uintptr_t>(data) + page - 1) / page * page, end = (reinterpret_cast<uintptr_t>(data) + uintptr_t(bytes)) / page * page;
    if (data && end > begin) madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
    (void)data, (void)bytes;
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
                                  {"MambaArguments", sizeof(MambaArguments)}};
    return find(sizes, name);
}

static int64_t constant(const char* name) {
    static const Named constants[] = {
        {"SEGMENT", SEGMENT}, {"CHANNEL_GROUP", CHANNEL_GROUP}, {"LONGEST_FILTER", LONGEST_FILTER}};
    return find(constants, name);
}

static const Kernels& chosen() {
    static const Kernels& kernels = best();
    return kernels;
}
}  // namespace muonssm

#define EXPORT extern "C" __attribute__((visibility("default")))

EXPORT void muonssm_expect_large(void* data, int64_t bytes) { muonssm::expect_large(data, bytes); }
EXPORT int64_t muonssm_abi() { return 4; }
EXPORT int64_t muonssm_struct_size(const char* name) { return muonssm::struct_size(name); }
EXPORT int64_t muonssm_constant(const char* name) { return muonssm::constant(name); }
EXPORT const char* muonssm_isa() { return muonssm::chosen().name; }
EXPORT int64_t muonssm_vector_bytes() { return muonssm::chosen().vector_bytes(); }
EXPORT void muonssm_memory_forward(const muonssm::MemoryArguments* a) { muonssm::chosen().memory_forward(*a); }
EXPORT void muonssm_memory_backward(const muonssm::MemoryArguments* a) { muonssm::chosen().memory_backward(*a); }
EXPORT int64_t muonssm_memory_step(const muonssm::MemoryArguments* a) { return muonssm::chosen().memory_step(*a); }
EXPORT void muonssm_selective_forward(const muonssm::SelectiveArguments* a) { muonssm::chosen().selective_forward(*a); }
EXPORT void muonssm_selective_backward(const muonssm::SelectiveArguments* a) { muonssm::chosen().selective_backward(*a); }
EXPORT int64_t muonssm_selective_step(const muonssm::SelectiveArguments* a) { return muonssm::chosen().selective_step(*a); }
EXPORT void muonssm_convolution_forward(const muonssm::ConvolutionArguments* a) { muonssm::chosen().convolution_forward(*a); }
EXPORT void muonssm_convolution_backward(const muonssm::ConvolutionArguments* a) { muonssm::chosen().convolution_backward(*a); }
EXPORT void muonssm_mamba_step(const muonssm::MambaArguments* a) { muonssm::chosen().mamba_step(*a); }
