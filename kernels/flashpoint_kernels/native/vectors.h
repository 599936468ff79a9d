/* Vectors of floats of the processor's width, for forward.c and backward.c: conversions, functions, sums over lanes.

   All arithmetic is float32 with fused multiply-add. */

#ifndef FLASHPOINT_VECTORS
#define FLASHPOINT_VECTORS

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX2__
#include <immintrin.h>
#endif

/* Floats of a register. */
#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX2__)
#define LANES 8
#else
#define LANES 4
#endif

#define INLINE static inline __attribute__((always_inline))
#define NOINLINE static __attribute__((noinline))
#define PASTE_(a, b) a##b
#define PASTE(a, b) PASTE_(a, b)

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));

enum type { FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8_E4M3FN, BOOL };

/* ---- vectors ---- */

INLINE floats splat(float x) { return x - (floats){0}; }

INLINE floats load_floats(const void *p) {
    floats x;
    memcpy(&x, p, sizeof x);
    return x;
}

INLINE floats as_floats(words x) {
    floats y;
    memcpy(&y, &x, sizeof y);
    return y;
}

INLINE words as_words(floats x) {
    words y;
    memcpy(&y, &x, sizeof y);
    return y;
}

INLINE floats choose(ints which, floats a, floats b) {
    return as_floats(((words)which & as_words(a)) | (~(words)which & as_words(b)));
}

/* Compilers widen such vectors in halves, which takes three times as long as these instructions. */
#if LANES == 16
INLINE words from_shorts(const char *p) { return (words)_mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)p)); }
INLINE words from_bytes(const char *p) { return (words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const void *)p)); }
INLINE floats from_int8(const char *p) {
    return (floats)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const void *)p)));
}
INLINE floats from_float16(const char *p) { return (floats)_mm512_cvtph_ps(_mm256_loadu_si256((const void *)p)); }
#elif LANES == 8
INLINE words from_shorts(const char *p) { return (words)_mm256_cvtepu16_epi32(_mm_loadu_si128((const void *)p)); }
INLINE words from_bytes(const char *p) { return (words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const void *)p)); }
INLINE floats from_int8(const char *p) {
    return (floats)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const void *)p)));
}
INLINE floats from_float16(const char *p) { return (floats)_mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
#else
typedef uint16_t shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef int8_t signed_bytes __attribute__((vector_size(LANES)));
INLINE words from_shorts(const char *p) {
    shorts x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, words);
}
INLINE words from_bytes(const char *p) {
    bytes x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, words);
}
INLINE floats from_int8(const char *p) {
    signed_bytes x;
    memcpy(&x, p, sizeof x);
    return __builtin_convertvector(x, floats);
}
/* Move exponent and mantissa to float32's places. A product corrects the exponent, also of subnormal numbers. Infinity
   and NaN get the largest exponent. */
INLINE floats from_float16(const char *p) {
    words x = from_shorts(p), magnitude = (x & 0x7fff) << 13;
    floats y = as_floats(magnitude) * splat(0x1p112f);
    y = choose((ints)(magnitude >= 0xf800000u), as_floats(magnitude | 0x7f800000u), y);
    return as_floats(as_words(y) | ((x & 0x8000) << 16));
}
#endif

/* As float16 above, but without infinities: the largest magnitude is NaN. */
INLINE floats from_float8(const char *p) {
    words x = from_bytes(p), magnitude = (x & 0x7f) << 20;
    floats y = as_floats(magnitude) * splat(0x1p120f);
    y = choose((ints)(magnitude == 0x7f00000u), as_floats(magnitude | 0x7fc00000u), y);
    return as_floats(as_words(y) | ((x & 0x80) << 24));
}

/* Load LANES numbers as float32; `type` is a constant. */
INLINE floats load(const char *p, enum type type, int64_t place) {
    switch (type) {
    case FLOAT32: return load_floats(p + 4 * place);
    case FLOAT16: return from_float16(p + 2 * place);
    case BFLOAT16: return as_floats(from_shorts(p + 2 * place) << 16);
    case INT8: return from_int8(p + place);
    case FLOAT8_E4M3FN: return from_float8(p + place);
    case BOOL: break;
    }
    return splat(0);
}

INLINE int64_t size_of(enum type type) { return type == FLOAT32 ? 4 : type == FLOAT16 || type == BFLOAT16 ? 2 : 1; }

/* Load the last `count` < LANES of a row's `dim` numbers as float32, in the last lanes, or for short rows in the first;
   other lanes are 0. `type` is a constant. */
INLINE floats load_end(const char *p, enum type type, int64_t dim, int64_t count, ints lanes) {
    char row[4 * LANES] = {0};
    if (dim >= LANES) return choose(lanes >= (int32_t)(LANES - count), load(p, type, dim - LANES), splat(0));
    memcpy(row, p, dim * size_of(type));
    return load(row, type, 0);
}

INLINE ints each_lane(void) {
    ints lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes;
}

/* Floats of a row in memory of our own: whole vectors, whatever the instruction set. */
INLINE int64_t padded(int64_t dim) { return (dim + 15) / 16 * 16; }

INLINE void read_row_of(float *to, const char *from, enum type type, int64_t dim) {
    char end[4 * LANES] = {0};
    const int64_t whole = dim / LANES * LANES;
    for (int64_t d = 0; d < padded(dim); d += LANES) {
        if (d == whole) memcpy(end, from + whole * size_of(type), (dim - whole) * size_of(type));
        floats x = d < whole ? load(from, type, d) : d == whole ? load(end, type, 0) : splat(0);
        memcpy(to + d, &x, sizeof x);
    }
}

/* Write a row of float32, float16 or bfloat16 as float32, with zeros up to `padded`. */
INLINE void read_row(float *to, const char *from, enum type type, int64_t dim) {
    if (type == FLOAT32)
        read_row_of(to, from, FLOAT32, dim);
    else if (type == FLOAT16)
        read_row_of(to, from, FLOAT16, dim);
    else
        read_row_of(to, from, BFLOAT16, dim);
}

/* Round to nearest even. */
INLINE uint16_t to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

INLINE uint16_t to_float16(float x) {
    uint32_t bits, sign;
    memcpy(&bits, &x, sizeof bits);
    sign = bits >> 16 & 0x8000;
    bits &= 0x7fffffff;
    if (bits > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (bits >= 0x477ff000) return (uint16_t)(sign | 0x7c00); /* rounds to 65536 or more */
    if (bits < 0x38800000) { /* subnormal: adding 0.5 leaves units of 2^-24 in the lowest bits, rounded */
        float y;
        memcpy(&y, &bits, sizeof y);
        y += 0.5f;
        memcpy(&bits, &y, sizeof bits);
        return (uint16_t)(sign | (bits - 0x3f000000));
    }
    return (uint16_t)(sign | ((bits + 0xfff + (bits >> 13 & 1) - 0x38000000) >> 13));
}

INLINE void store(char *p, enum type type, int64_t place, float x) {
    uint16_t h;
    if (type == FLOAT32) {
        memcpy(p + 4 * place, &x, sizeof x);
    } else {
        h = type == FLOAT16 ? to_float16(x) : to_bfloat16(x);
        memcpy(p + 2 * place, &h, sizeof h);
    }
}

/* Return e^x for x <= 0, within 2 units in the last place; 0 below float32's normal numbers (Cephes, expf). */
INLINE floats exponential(floats x) {
    const floats magic = splat(0x1.8p23f); /* adding it rounds to an integer */
    floats shifted = x * 0x1.715476p+0f + magic;
    floats n = shifted - magic;
    floats r = n * -0x1.62e400p-1f + x;
    r = n * -0x1.7f7d1cp-20f + r;
    floats p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
    p = as_floats(as_words(p) + (as_words(shifted) << 23)); /* times 2^n: n is in the lowest bits */
    p = choose(x < -87.0f, splat(0), p);
    return choose(x != x, x, p);
}

INLINE float exponential1(float x) { return exponential(splat(x))[0]; }

/* Return the natural logarithm of x >= 1 (Cephes, logf). */
INLINE float logarithm(float x) {
    uint32_t bits;
    float n, m, z, y;
    if (!(x < __builtin_inff())) return x;
    memcpy(&bits, &x, sizeof bits);
    n = (float)((int32_t)(bits >> 23) - 126);
    bits = (bits & 0x7fffff) | 0x3f000000;
    memcpy(&m, &bits, sizeof m);
    if (m < 0.707106781186547524f) {
        n -= 1;
        m += m;
    }
    m -= 1;
    z = m * m;
    y = 7.0376836292e-2f;
    y = y * m - 1.1514610310e-1f;
    y = y * m + 1.1676998740e-1f;
    y = y * m - 1.2420140846e-1f;
    y = y * m + 1.4249322787e-1f;
    y = y * m - 1.6668057665e-1f;
    y = y * m + 2.0000714765e-1f;
    y = y * m - 2.4999993993e-1f;
    y = y * m + 3.3333331174e-1f;
    y = y * m * z;
    y += n * -2.12194440e-4f - 0.5f * z;
    return m + y + n * 0.693359375f;
}

/* Return softcap·tanh(x / softcap): tanh(y) = (1 - e) / (1 + e) with e = exp(-2·|y|), or its series (Cephes, tanhf)
   where that cancels. */
INLINE floats capped(floats x, float softcap) {
    floats y = x / softcap, z = y * y, magnitude = as_floats(as_words(y) & 0x7fffffffu);
    floats e = exponential(magnitude * -2.0f), t = (1.0f - e) / (1.0f + e);
    floats p = z * -5.70498872745e-3f + 2.06390887954e-2f;
    p = p * z - 5.37397155531e-2f;
    p = p * z + 1.33314422036e-1f;
    p = p * z - 3.33332819422e-1f;
    p = p * z * magnitude + magnitude;
    t = choose(magnitude < 0.625f, p, t);
    t = as_floats(as_words(t) | (as_words(y) & 0x80000000u));
    return choose(x != x, x, t * softcap);
}

/* ---- sums over lanes, always in the order (l, l+8), (l, l+4), (l, l+2), (l, l+1) ---- */

#ifdef __clang__
#define PICK(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define PICK(a, b, ...) __builtin_shuffle(a, b, (ints){__VA_ARGS__})
#endif

/* Return the sums of LANES vectors. The levels below leave the sums in another order, so they begin with that. */
INLINE floats lane_sums(const floats *a) {
#if LANES == 16
    static const int order[16] = {0, 2, 1, 3, 8, 10, 9, 11, 4, 6, 5, 7, 12, 14, 13, 15};
    floats x[8], y[4], z[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        floats p = a[order[i]], q = a[order[i + 8]];
        x[i] = PICK(p, q, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
               PICK(p, q, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        floats p = x[i], q = x[i + 4];
        y[i] = PICK(p, q, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               PICK(p, q, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        floats p = y[i], q = y[i + 2];
        z[i] = PICK(p, q, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29) +
               PICK(p, q, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31);
    }
    return PICK(z[0], z[1], 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30) +
           PICK(z[0], z[1], 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31);
#elif LANES == 8
    static const int order[8] = {0, 2, 1, 3, 4, 6, 5, 7};
    floats y[4], z[2];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        floats p = a[order[i]], q = a[order[i + 4]];
        y[i] = PICK(p, q, 0, 1, 2, 3, 8, 9, 10, 11) + PICK(p, q, 4, 5, 6, 7, 12, 13, 14, 15);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        floats p = y[i], q = y[i + 2];
        z[i] = PICK(p, q, 0, 1, 8, 9, 4, 5, 12, 13) + PICK(p, q, 2, 3, 10, 11, 6, 7, 14, 15);
    }
    return PICK(z[0], z[1], 0, 2, 8, 10, 4, 6, 12, 14) + PICK(z[0], z[1], 1, 3, 9, 11, 5, 7, 13, 15);
#else
    floats z[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        z[i] = PICK(a[i], a[i + 2], 0, 1, 4, 5) + PICK(a[i], a[i + 2], 2, 3, 6, 7);
    return PICK(z[0], z[1], 0, 4, 2, 6) + PICK(z[0], z[1], 1, 5, 3, 7);
#endif
}

/* Return the vector with its halves, quarters … of `width` lanes exchanged. */
INLINE floats exchange(floats a, int width) {
#if LANES == 16
    if (width == 8) return PICK(a, a, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    if (width == 4) return PICK(a, a, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    if (width == 2) return PICK(a, a, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return PICK(a, a, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
#elif LANES == 8
    if (width == 4) return PICK(a, a, 4, 5, 6, 7, 0, 1, 2, 3);
    if (width == 2) return PICK(a, a, 2, 3, 0, 1, 6, 7, 4, 5);
    return PICK(a, a, 1, 0, 3, 2, 5, 4, 7, 6);
#else
    if (width == 2) return PICK(a, a, 2, 3, 0, 1);
    return PICK(a, a, 1, 0, 3, 2);
#endif
}

INLINE float lane_sum(floats a) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) a = a + exchange(a, width);
    return a[0];
}

INLINE float lane_max(floats a) {
#pragma GCC unroll 4
    for (int width = LANES / 2; width; width /= 2) {
        floats b = exchange(a, width);
        a = choose(b > a, b, a);
    }
    return a[0];
}

#endif
