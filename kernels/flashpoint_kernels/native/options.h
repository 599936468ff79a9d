/* Apply the caller's mask and ALiBi to the scores of one query, and dropout to its exponentials. */

#ifndef FLASHPOINT_OPTIONS
#define FLASHPOINT_OPTIONS

#include "vectors.h"

#define MOST 3.40282346638528859812e+38f /* the largest float32 */

INLINE ints is_number(floats x) { return (ints)((as_words(x) & 0x7f800000u) != 0x7f800000u); }

/* Return x limited to float32's range: an infinity becomes the largest finite number of its sign. NaN stays. */
INLINE floats within_range(floats x) { return choose(x > MOST, splat(MOST), choose(x < -MOST, splat(-MOST), x)); }

/* Return the mask's summands for the scores of the keys [key, key + LANES); read only keys below `stop`. `row` is the
   address of the query's mask element for key 0. `step`, the stride between keys, is an element's size or 0. */
INLINE floats masked(const char *row, enum type type, int64_t step, int64_t key, int64_t stop) {
    const int64_t size = type == BOOL ? 1 : size_of(type);
    char copy[4 * LANES] = {0};
    if (!step || key + LANES > stop) {
        for (int64_t i = 0; i < LANES && (!step || key + i < stop); i++)
            memcpy(copy + i * size, row + (key + i) * step, size);
        row = copy;
        key = 0;
    }
    if (type == BOOL) return choose((ints)(from_bytes(row + key) != 0), splat(0), splat(-__builtin_inff()));
    return type == FLOAT32 ? load(row, FLOAT32, key) : type == FLOAT16 ? load(row, FLOAT16, key) : load(row, BFLOAT16, key);
}

/* Return scores of a query minus ALiBi's slope·|query - key|. */
INLINE floats less_alibi(floats x, float slope, ints keys, int32_t query) {
    ints distance = keys - query;
    distance = (distance ^ (distance >> 31)) - (distance >> 31); /* absolute value */
    return multiply_add(splat(-slope), __builtin_convertvector(distance, floats), x);
}

/* Dropout as flashpoint_contract defines it: key j of query i is kept if word j mod 4 of Philox4x32-10 (Salmon et al.
   2011) is above `last`. The key of Philox is the seed, and its counter is (j div 4, i, head, sequence). */
struct dropout {
    uint32_t seed[2], last, on;
};

typedef uint64_t longs __attribute__((vector_size(4 * LANES)));

#define ROOM(keys) ((keys) + 4 + 2 * LANES) /* 32-bit words of memory that `draw` needs for `keys` keys */

/* Return b times the low 32 bits of each element of `a`, as 64 bits. */
INLINE longs product32(longs a, uint32_t b) {
#if defined(__AVX512F__)
    return (longs)_mm512_mul_epu32((__m512i)a, _mm512_set1_epi64(b));
#elif LANES == 8
    return (longs)_mm256_mul_epu32((__m256i)a, _mm256_set1_epi64x(b));
#else
    return (a & 0xffffffffu) * b;
#endif
}

/* Write random words for the keys [key, key + count) of one query to `room`, and return the address of the first
   word. */
INLINE const uint32_t *draw(const struct dropout *dropout, uint32_t *room, int64_t sequence, int64_t head,
                            int64_t query, int64_t key, int64_t count) {
    const int64_t first = key / 4, end = (key + count + 3) / 4;
    longs lanes;
    for (int i = 0; i < LANES / 2; i++) lanes[i] = i;
    uint32_t *to = room;
    for (int64_t at = first; at < end; at += LANES / 2, to += 2 * LANES) {
        /* Only the low 32 bits of each element matter: `product32` ignores the high 32 bits. */
        longs a = lanes + (uint64_t)at, b = lanes * 0 + (uint64_t)query, c = lanes * 0 + (uint64_t)head;
        longs d = lanes * 0 + (uint64_t)sequence;
        uint32_t k0 = dropout->seed[0], k1 = dropout->seed[1];
#pragma GCC unroll 10
        for (int round = 0; round < 10; round++) {
            const longs p = product32(a, 0xD2511F53u), q = product32(c, 0xCD9E8D57u);
            a = (q >> 32) ^ b ^ k0;
            c = (p >> 32) ^ d ^ k1;
            b = q;
            d = p;
            k0 += 0x9E3779B9u;
            k1 += 0xBB67AE85u;
        }
        const words x = (words)((a & 0xffffffffu) | (b << 32)), y = (words)((c & 0xffffffffu) | (d << 32));
#if LANES == 16
        const words low = PICK(x, y, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
        const words high = PICK(x, y, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
#elif LANES == 8
        const words low = PICK(x, y, 0, 1, 8, 9, 2, 3, 10, 11), high = PICK(x, y, 4, 5, 12, 13, 6, 7, 14, 15);
#else
        const words low = PICK(x, y, 0, 1, 4, 5), high = PICK(x, y, 2, 3, 6, 7);
#endif
        memcpy(to, &low, sizeof low);
        memcpy(to + LANES, &high, sizeof high);
    }
    return room + key % 4;
}

/* Return x for keys that dropout keeps, and 0 for other keys. `drawn` has the random words of these keys. */
INLINE floats kept(const struct dropout *dropout, const uint32_t *drawn, floats x) {
    words w;
    memcpy(&w, drawn, sizeof w);
    return choose((ints)(w > dropout->last), x, splat(0));
}

#endif
