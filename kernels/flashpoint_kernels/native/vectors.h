/* Vectors of floats with the processor's width, for forward.c and backward.c: conversions, functions, sums over lanes.

   All arithmetic is float32. Only `multiply_add` fuses a product with a sum: the compiler fuses nothing itself, so that
   results have the same bits with every instruction set. */

#ifndef FLASHPOINT_VECTORS
#define FLASHPOINT_VECTORS

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

/* LANES: the number of floats in a vector. With LANES_16 the compiler makes 16 lanes of narrower registers: tests run the
   code for AVX-512, and with TILES_IN_C that for AMX, on any processor. */
#if defined(__AVX512F__) || defined(LANES_16)
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

/* Return x where `which` is set, else 0. */
INLINE floats only(ints which, floats x) { return as_floats((words)which & as_words(x)); }

/* Return whether all lanes of a comparison are true. */
INLINE int in_all_lanes(ints x) {
#if defined(__AVX512F__)
    return _mm512_test_epi32_mask((__m512i)x, (__m512i)x) == 0xffff;
#else
    int all = 1;
    for (int i = 0; i < LANES; i++) all &= x[i] != 0;
    return all;
#endif
}

INLINE floats absolute(floats x) { return as_floats(as_words(x) & 0x7fffffffu); }

INLINE void store_floats(void *p, floats x) { memcpy(p, &x, sizeof x); }

/* Return a·b + c, rounded once. */
INLINE floats multiply_add(floats a, floats b, floats c) {
#if defined(__AVX512F__)
    return (floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif LANES == 8
    return (floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (floats)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    for (int i = 0; i < LANES; i++) c[i] = __builtin_fmaf(a[i], b[i], c[i]);
    return c;
#endif
}

/* Return the larger of x and y, or y if one of them is NaN. */
INLINE floats largest(floats x, floats y) {
#if defined(__AVX512F__)
    return (floats)_mm512_max_ps((__m512)x, (__m512)y);
#elif LANES == 8
    return (floats)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return choose(x > y, x, y);
#endif
}

/* Return the smaller of x and y, or y if one of them is NaN. */
INLINE floats smallest(floats x, floats y) {
#if defined(__AVX512F__)
    return (floats)_mm512_min_ps((__m512)x, (__m512)y);
#elif LANES == 8
    return (floats)_mm256_min_ps((__m256)x, (__m256)y);
#else
    return choose(x < y, x, y);
#endif
}

/* Return in each lane the larger of `a`, the bits of an absolute value, and the bits of |x|. As bits, infinity and NaN
   are larger than all finite numbers. */
INLINE ints larger_bits(ints a, floats x) {
    const ints b = (ints)(as_words(x) & 0x7fffffffu);
#if defined(__AVX512F__)
    return (ints)_mm512_max_epi32((__m512i)a, (__m512i)b);
#elif LANES == 8
    return (ints)_mm256_max_epi32((__m256i)a, (__m256i)b);
#else
    return (ints)choose(a > b, (floats)a, (floats)b);
#endif
}

/* These conversions use intrinsics: compilers split a conversion into halves, which takes three times as long. */
#if defined(__AVX512F__)
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
/* Convert float16: move the exponent and the mantissa to their places in float32. A multiplication corrects the
   exponent, also for subnormal numbers. Infinity and NaN get the largest exponent. */
INLINE floats from_float16(const char *p) {
    words x = from_shorts(p), magnitude = (x & 0x7fff) << 13;
    floats y = as_floats(magnitude) * splat(0x1p112f);
    y = choose((ints)(magnitude >= 0xf800000u), as_floats(magnitude | 0x7f800000u), y);
    return as_floats(as_words(y) | ((x & 0x8000) << 16));
}
#endif

/* Convert float8_e4m3fn by the same method as float16. It has no infinities: the largest magnitude is NaN. */
INLINE floats from_float8(const char *p) {
    words x = from_bytes(p), magnitude = (x & 0x7f) << 20;
    floats y = as_floats(magnitude) * splat(0x1p120f);
    y = choose((ints)(magnitude == 0x7f00000u), as_floats(magnitude | 0x7fc00000u), y);
    return as_floats(as_words(y) | ((x & 0x80) << 24));
}

/* Load LANES numbers of a row as float32, from element `place` on; `type` is a compile-time constant. */
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

INLINE ints each_lane(void) {
    ints lanes;
    for (int i = 0; i < LANES; i++) lanes[i] = i;
    return lanes;
}

/* Return the number of floats that a row occupies in temporary memory: `dim` rounded up to a multiple of 16, the
   largest number of lanes. */
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

/* Convert a row of `dim` numbers to float32, with zeros up to `padded(dim)`. */
INLINE void read_row(float *to, const char *from, enum type type, int64_t dim) {
    switch (type) {
    case FLOAT32: read_row_of(to, from, FLOAT32, dim); break;
    case FLOAT16: read_row_of(to, from, FLOAT16, dim); break;
    case BFLOAT16: read_row_of(to, from, BFLOAT16, dim); break;
    case INT8: read_row_of(to, from, INT8, dim); break;
    case FLOAT8_E4M3FN: read_row_of(to, from, FLOAT8_E4M3FN, dim); break;
    case BOOL: break;
    }
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

/* Write LANES numbers in 16 bits each, rounded to nearest even. */
INLINE void store_shorts(char *p, enum type type, floats x) {
#if defined(__AVX512F__)
    if (type == FLOAT16) {
        _mm256_storeu_si256((void *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#elif LANES == 8
    if (type == FLOAT16) {
        _mm_storeu_si128((void *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
        return;
    }
#endif
    uint16_t numbers[LANES];
    if (type == FLOAT16) {
        for (int i = 0; i < LANES; i++) numbers[i] = to_float16(x[i]);
    } else {
        const words bits = as_words(x), up = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
        const words rounded = (words)choose(x == x, as_floats(up), as_floats(bits >> 16 | 0x40));
#if defined(__AVX512F__)
        _mm256_storeu_si256((void *)numbers, _mm512_cvtepi32_epi16((__m512i)rounded));
#else
        for (int i = 0; i < LANES; i++) numbers[i] = (uint16_t)rounded[i];
#endif
    }
    memcpy(p, numbers, sizeof numbers);
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

/* Write `dim` numbers of a row of float32, float16 or bfloat16. */
INLINE void write_row(char *to, enum type type, const float *from, int64_t dim) {
    if (type == FLOAT32) {
        memcpy(to, from, sizeof(float) * dim);
        return;
    }
    int64_t d = 0;
    for (; d + LANES <= dim; d += LANES) store_shorts(to + 2 * d, type, load_floats(from + d));
    for (; d < dim; d++) store(to, type, d, from[d]);
}

/* Return the nearest whole number. */
INLINE floats nearest(floats x) {
#if defined(__AVX512F__)
    return (floats)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif LANES == 8
    return (floats)_mm256_round_ps((__m256)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
    return (floats)vrndnq_f32((float32x4_t)x);
#else
    const floats shift = splat(0x1.8p23f); /* for numbers below 2^22 */
    return x + shift - shift;
#endif
}

/* Return 2^x within 2 units in the last place, or 0 if that is below float32's normal numbers. With x = n + r and
   |r| <= 1/2, it is 2^n times a polynomial in r, which is 1 for r = 0. */
INLINE floats exponential2(floats x) {
    const ints lost = x < -126.0f;
#if !defined(__AVX512F__)
    x = choose(x < -252.0f, splat(-252.0f), choose(x > 252.0f, splat(252.0f), x));
#endif
    const floats n = nearest(x), r = x - n;
    floats p = splat(1.326472731e-3f);
    p = multiply_add(p, r, splat(9.671512991e-3f));
    p = multiply_add(p, r, splat(5.550733581e-2f));
    p = multiply_add(p, r, splat(2.402224243e-1f));
    p = multiply_add(p, r, splat(6.931470037e-1f));
    p = multiply_add(p, r, splat(1));
#if defined(__AVX512F__)
    (void)lost;
    return (floats)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-126), _CMP_NLT_UQ), (__m512)p,
                                          (__m512)n);
#else
    const words whole = (words)__builtin_convertvector(n, ints), half = (words)((ints)whole >> 1);
    p = p * as_floats((half + 127) << 23) * as_floats((whole - half + 127) << 23);
    return only(~lost, p);
#endif
}

#define LOG2_E 1.4426950408889634f

/* Return e^x. */
INLINE floats exponential(floats x) { return exponential2(x * LOG2_E); }

INLINE float exponential2_1(float x) { return exponential2(splat(x))[0]; }
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
    y = __builtin_fmaf(y, m, -1.1514610310e-1f);
    y = __builtin_fmaf(y, m, 1.1676998740e-1f);
    y = __builtin_fmaf(y, m, -1.2420140846e-1f);
    y = __builtin_fmaf(y, m, 1.4249322787e-1f);
    y = __builtin_fmaf(y, m, -1.6668057665e-1f);
    y = __builtin_fmaf(y, m, 2.0000714765e-1f);
    y = __builtin_fmaf(y, m, -2.4999993993e-1f);
    y = __builtin_fmaf(y, m, 3.3333331174e-1f);
    y = y * m * z;
    y += __builtin_fmaf(n, -2.12194440e-4f, -0.5f * z);
    return __builtin_fmaf(n, 0.693359375f, m + y);
}

/* Return softcap·tanh(x / softcap): tanh(y) = (1 - e) / (1 + e) with e = exp(-2·|y|), or its series (Cephes, tanhf)
   where the difference would cancel. */
INLINE floats capped(floats x, float softcap) {
    floats y = x / softcap, z = y * y, magnitude = absolute(y);
    floats e = exponential2(magnitude * (-2 * LOG2_E)), t = (1.0f - e) / (1.0f + e);
    floats p = multiply_add(z, splat(-5.70498872745e-3f), splat(2.06390887954e-2f));
    p = multiply_add(p, z, splat(-5.37397155531e-2f));
    p = multiply_add(p, z, splat(1.33314422036e-1f));
    p = multiply_add(p, z, splat(-3.33332819422e-1f));
    p = multiply_add(p * z, magnitude, magnitude);
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

/* Return the vector with neighbouring groups of `width` lanes exchanged: halves, quarters, … */
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

/* A row's sum has 16 partial sums with every instruction set, so that the order of additions does not depend on LANES.
   SUMS: the number of vectors for these partial sums. */
#define SUMS (16 / LANES)

INLINE float sum_of_16(const floats *a) {
#if LANES == 16
    return lane_sum(a[0]);
#elif LANES == 8
    return lane_sum(a[0] + a[1]);
#else
    return lane_sum((a[0] + a[2]) + (a[1] + a[3]));
#endif
}

/* ---- rows and columns ---- */

/* Transpose LANES vectors. Each round rotates the binary index (row, column) of all elements by one bit: the highest
   bit becomes the lowest. */
INLINE void transpose(floats *a) {
    for (int width = 1; width < LANES; width *= 2) {
        floats b[LANES];
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            const floats x = a[i], y = a[i + LANES / 2];
#if LANES == 16
            b[2 * i] = PICK(x, y, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            b[2 * i + 1] = PICK(x, y, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif LANES == 8
            b[2 * i] = PICK(x, y, 0, 8, 1, 9, 2, 10, 3, 11);
            b[2 * i + 1] = PICK(x, y, 4, 12, 5, 13, 6, 14, 7, 15);
#else
            b[2 * i] = PICK(x, y, 0, 4, 1, 5);
            b[2 * i + 1] = PICK(x, y, 2, 6, 3, 7);
#endif
        }
        memcpy(a, b, sizeof b);
    }
}

/* Transpose LANES rows of LANES 32-bit numbers. Strides are in bytes. */
INLINE void transpose_rows(char *to, int64_t to_step, const char *from, int64_t step) {
#if defined(__AVX512F__)
    /* Process four columns at a time: a load of four floats into a quarter of a vector needs no shuffle. */
#pragma GCC unroll 4
    for (int d = 0; d < 16; d += 4) {
        __m512 rows[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            const char *row = from + i * step + 4 * d;
            __m512 x = _mm512_castps128_ps512(_mm_loadu_ps((const float *)row));
            x = _mm512_insertf32x4(x, _mm_loadu_ps((const float *)(row + 4 * step)), 1);
            x = _mm512_insertf32x4(x, _mm_loadu_ps((const float *)(row + 8 * step)), 2);
            rows[i] = _mm512_insertf32x4(x, _mm_loadu_ps((const float *)(row + 12 * step)), 3);
        }
        const __m512d a = (__m512d)_mm512_unpacklo_ps(rows[0], rows[1]), b = (__m512d)_mm512_unpackhi_ps(rows[0], rows[1]);
        const __m512d c = (__m512d)_mm512_unpacklo_ps(rows[2], rows[3]), e = (__m512d)_mm512_unpackhi_ps(rows[2], rows[3]);
        _mm512_storeu_pd(to + d * to_step, _mm512_unpacklo_pd(a, c));
        _mm512_storeu_pd(to + (d + 1) * to_step, _mm512_unpackhi_pd(a, c));
        _mm512_storeu_pd(to + (d + 2) * to_step, _mm512_unpacklo_pd(b, e));
        _mm512_storeu_pd(to + (d + 3) * to_step, _mm512_unpackhi_pd(b, e));
    }
#else
    floats block[LANES];
    for (int i = 0; i < LANES; i++) block[i] = load_floats(from + i * step);
    transpose(block);
    for (int i = 0; i < LANES; i++) store_floats(to + i * to_step, block[i]);
#endif
}

#endif
