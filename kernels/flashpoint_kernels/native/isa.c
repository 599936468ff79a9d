/* Which instruction set of forward.c this processor has: the number of the x86-64 level, or 0 for none. */

#include <stdint.h>

int flashpoint_isa(void) {
#ifdef __x86_64__
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
    const int wide = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                     __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    return wide ? 4 : 3;
#else
    return 1;
#endif
}

/* The checksum of the sources that this library was compiled from. */
uint32_t flashpoint_sources(void) { return SOURCES; }
