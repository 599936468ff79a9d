/* Find the compiled kernels that this processor can run. */

#define _GNU_SOURCE
#include <stdint.h>
#ifdef __x86_64__
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#ifdef __x86_64__

#define XTILEDATA 18 /* index of the tile registers in the processor's extended state (XSAVE) */
#define ARCH_REQ_XCOMP_PERM 0x1023

/* Return whether the processor has AVX512-BF16. */
static int has_bf16(void) {
    unsigned a, b, c, d;
    return __get_cpuid_count(7, 1, &a, &b, &c, &d) && a & 1u << 5;
}

/* Return whether the processor has AMX for bfloat16, and the system lets this process use it. */
static int has_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(d & 1u << 22) || !(d & 1u << 24)) return 0; /* AMX-BF16, AMX-TILE */
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

static const char *find_level(void) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return "none";
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
        return "avx2";
    if (!has_bf16()) return "avx512";
    return has_amx() ? "amx" : "avx512bf16";
}

#else

static const char *find_level(void) { return "generic"; }

#endif

static const char *level;

/* Request permission for AMX once, when the library is loaded, so that a process always uses the same kernels. */
__attribute__((constructor)) static void find(void) { level = find_level(); }

/* Return the highest instruction set of this processor, or "none". */
const char *flashpoint_level(void) { return level; }

/* Return the checksum of the sources from which this library was compiled. */
uint32_t flashpoint_sources(void) { return SOURCES; }
