/* The memory of a call: its tensors, and its temporary memory in one thread. Functions for sizes. */

#ifndef FLASHPOINT_MEMORY
#define FLASHPOINT_MEMORY

#include "vectors.h"
#ifdef GUARDS /* tests: AddressSanitizer reports each access behind an array */
#include <sanitizer/asan_interface.h>
#define GAP 4096
#else
#define GAP 0
#define ASAN_POISON_MEMORY_REGION(from, bytes) (void)0
#endif

/* Why a call failed: memory is missing, or a tensor that has elements has no address. Results of calls are 0 or these. */
#define NO_MEMORY 1
#define NO_ADDRESS 2

INLINE int64_t lesser(int64_t a, int64_t b) { return a < b ? a : b; }
INLINE int64_t greater(int64_t a, int64_t b) { return a > b ? a : b; }
INLINE int64_t rounded(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

/* The rows of a tensor. Strides are in bytes; the elements of a row are adjacent. An address of 0 means that the tensor
   is absent. */
struct rows {
    char *at;
    int64_t head, row;
};

/* Memory for a call. The caller makes the same calls of `take` twice: the first time they count bytes; after `reserve`,
   the second time they return addresses. Each address is at the start of a cache line. */
struct memory {
    char *start;
    int64_t used;
};

INLINE void *take(struct memory *memory, int64_t bytes) {
    char *found = memory->start + (memory->start ? memory->used : 0);
    if (memory->start) ASAN_POISON_MEMORY_REGION(found + bytes, rounded(bytes, 64) + GAP - bytes);
    memory->used += rounded(bytes, 64) + GAP;
    return found;
}

INLINE int reserve(struct memory *memory) {
    memory->start = aligned_alloc(64, memory->used + 64);
    memory->used = 0;
    return memory->start != 0;
}

#endif
