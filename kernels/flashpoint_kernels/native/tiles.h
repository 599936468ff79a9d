/* Products of bfloat16 matrices by AMX or AVX512-BF16, in tiles of 16 rows of 64 bytes.

   A tile product adds the product of a (16, 32) and b (32, 16) to c (16, 16) in float32. Tiles of b hold pairs: row n
   of a tile has, for each column, the elements 2n and 2n + 1 of that column of b. The instruction sums the products of
   even and of odd elements separately, and treats subnormal numbers as 0. With TILES_IN_C, C code replaces the AMX
   instructions and computes the same bits, for tests on processors without AMX. Without AMX, `multiply_tiles` computes the
   same products by AVX512-BF16, whose sums have another order, with rows of c in registers; with PAIRS_IN_C, C code
   replaces its instructions, too. */

#ifndef FLASHPOINT_TILES
#define FLASHPOINT_TILES

#include "vectors.h"

#define TILE_BYTES 1024
#define STEP 32 /* columns of a, and rows of b, in one tile product */

/* The layout of the processor's tile configuration: 8 tiles of 16 rows of 64 bytes. */
struct tile_shapes {
    uint8_t palette, start, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
};

#ifdef TILES_IN_C

static _Thread_local float in_c[8][16][16];

INLINE void tile_configure(struct tile_shapes *before) { (void)before; }
INLINE void tile_restore(const struct tile_shapes *before) { (void)before; }

#define TILE_ZERO(t) memset(in_c[t], 0, TILE_BYTES)
#define TILE_LOAD(t, from, step)                                                                                     \
    do                                                                                                               \
        for (int row = 0; row < 16; row++) memcpy(in_c[t][row], (const char *)(from) + row * (step), 64);            \
    while (0)
#define TILE_STORE(t, to, step)                                                                                      \
    do                                                                                                               \
        for (int row = 0; row < 16; row++) memcpy((char *)(to) + row * (step), in_c[t][row], 64);                    \
    while (0)
#define TILE_MULTIPLY(c, a, b) multiply_in_c(in_c[c], in_c[a], in_c[b])

#elif defined(__AMX_BF16__)

/* Configure the tiles of this thread, and save the previous configuration, which may be another library's. */
INLINE void tile_configure(struct tile_shapes *before) {
    struct tile_shapes own = {.palette = 1};
    for (int t = 0; t < 8; t++) own.row_bytes[t] = 64, own.rows[t] = 16;
    _tile_storeconfig(before);
    _tile_loadconfig(&own);
}

INLINE void tile_restore(const struct tile_shapes *before) {
    _tile_release();
    if (before->palette) _tile_loadconfig(before);
}

#define TILE_ZERO(t) _tile_zero(t)
#define TILE_LOAD(t, from, step) _tile_loadd(t, from, step)
#define TILE_STORE(t, to, step) _tile_stored(t, to, step)
#define TILE_MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)

#else

INLINE void tile_configure(struct tile_shapes *before) { (void)before; }
INLINE void tile_restore(const struct tile_shapes *before) { (void)before; }

#endif

#if defined(TILES_IN_C) || defined(PAIRS_IN_C)

INLINE floats without_subnormal(floats x) {
    const words bits = as_words(x);
    return as_floats(bits & ~((words)((bits & 0x7f800000) == 0) & 0x7fffffff));
}

/* Return the even or the odd element of each pair. */
INLINE floats half_of(words pairs, int odd) {
    return without_subnormal(as_floats(odd ? pairs & 0xffff0000 : pairs << 16));
}

#endif

#ifdef TILES_IN_C

NOINLINE void multiply_in_c(float c[16][16], float a[16][16], float b[16][16]) {
    floats halves[16][2];
    for (int k = 0; k < 16; k++)
        for (int odd = 0; odd < 2; odd++) halves[k][odd] = half_of(as_words(load_floats(b[k])), odd);
    for (int m = 0; m < 16; m++) {
        floats sums[2] = {{0}, {0}};
        for (int k = 0; k < 16; k++)
            for (int odd = 0; odd < 2; odd++) {
                uint32_t pair; /* not splat(a[m][k]): as a float, a pair may be a signalling NaN */
                memcpy(&pair, &a[m][k], sizeof pair);
                const floats one = half_of((words){0} + pair, odd);
                sums[odd] = without_subnormal(multiply_add(one, halves[k][odd], sums[odd]));
            }
        const floats sum = without_subnormal(sums[0] + sums[1]);
        store_floats(c[m], without_subnormal(without_subnormal(load_floats(c[m])) + sum));
    }
}

#endif

/* Two tiles of a, one above the other. Strides in bytes: `down` from tile to tile, `row` from row to row, `next` to the
   next STEP columns of a. */
struct left {
    const char *at;
    int64_t down, row, next;
};

/* Two tiles of b, side by side. Strides in bytes: `right` from tile to tile, `next` to the next STEP rows of b. */
struct right {
    const char *at;
    int64_t right, next;
};

/* Write the sums of `steps` tile products to `rows`·`columns` tiles of c or, with `add`, add them to c. Each tile of c
   is (16, 16) without gaps; the strides c_down and c_right are in floats. `rows`, `columns` (1 or 2) and `add` are
   compile-time constants. With one row or one column of tiles, only its first `used` rows or columns are needed; what is
   in the others is not defined, but they do not change the needed ones. */
#if defined(__AMX_BF16__) || defined(TILES_IN_C)

INLINE void multiply_tiles(float *c, int64_t c_down, int64_t c_right, struct left a, struct right b, int64_t steps,
                           const int rows, const int columns, const int add, int64_t used) {
    (void)used;
    if (add) {
        TILE_LOAD(0, c, 64);
        if (rows == 2) TILE_LOAD(1, c + c_down, 64);
        if (columns == 2) TILE_LOAD(2, c + c_right, 64);
        if (rows == 2 && columns == 2) TILE_LOAD(3, c + c_right + c_down, 64);
    } else {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
    }
    for (int64_t n = 0; n < steps; n++) {
        TILE_LOAD(4, a.at, a.row);
        TILE_LOAD(6, b.at, 64);
        TILE_MULTIPLY(0, 4, 6);
        if (rows == 2) {
            TILE_LOAD(5, a.at + a.down, a.row);
            TILE_MULTIPLY(1, 5, 6);
        }
        if (columns == 2) {
            TILE_LOAD(7, b.at + b.right, 64);
            TILE_MULTIPLY(2, 4, 7);
            if (rows == 2) TILE_MULTIPLY(3, 5, 7);
        }
        a.at += a.next;
        b.at += b.next;
    }
    TILE_STORE(0, c, 64);
    if (rows == 2) TILE_STORE(1, c + c_down, 64);
    if (columns == 2) TILE_STORE(2, c + c_right, 64);
    if (rows == 2 && columns == 2) TILE_STORE(3, c + c_right + c_down, 64);
}

#else

/* Return sums plus the products of a pair of a and the pairs of the first row of a tile of b: those of the odd elements
   first. `narrow_dot_of_pairs` computes only the first 8 columns; the others are not defined. */
#ifdef PAIRS_IN_C

INLINE floats dot_of_pairs(floats sums, uint32_t pair, const char *b) {
    const words x = (words){0} + pair, y = as_words(load_floats((const float *)b));
    for (int odd = 1; odd >= 0; odd--)
        sums = without_subnormal(multiply_add(half_of(x, odd), half_of(y, odd), without_subnormal(sums)));
    return sums;
}

INLINE floats narrow_dot_of_pairs(floats sums, uint32_t pair, const char *b) { return dot_of_pairs(sums, pair, b); }

#else

INLINE floats dot_of_pairs(floats sums, uint32_t pair, const char *b) {
    return (floats)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_epi32((int32_t)pair), (__m512bh)_mm512_loadu_ps(b));
}

INLINE floats narrow_dot_of_pairs(floats sums, uint32_t pair, const char *b) {
    const __m256 low = _mm512_castps512_ps256((__m512)sums);
    const __m256bh y = (__m256bh)_mm256_loadu_ps((const float *)b);
    return (floats)_mm512_zextps256_ps512(_mm256_dpbf16_ps(low, (__m256bh)_mm256_set1_epi32((int32_t)pair), y));
}

#endif

/* Compute `height` rows of c from rows of a. The sums of each row are one chain, which begins with 0, so that long sums
   over calls round like those of AMX. With `narrow` only the first 8 columns are computed. `height`, `columns`, `add` and
   `narrow` are compile-time constants. */
INLINE void multiply_rows(float *c, int64_t c_right, const char *a, int64_t a_row, int64_t a_next, struct right b,
                          int64_t steps, const int height, const int columns, const int add, const int narrow) {
    floats sums[8][2];
#pragma GCC unroll 8
    for (int r = 0; r < height; r++) sums[r][0] = sums[r][1] = splat(0);
    for (int64_t n = 0; n < steps; n++, a += a_next, b.at += b.next)
#pragma GCC unroll 2
        for (int k = 0; k < 16; k++)
#pragma GCC unroll 8
            for (int r = 0; r < height; r++) {
                const char *row = b.at + k * 64;
                uint32_t pair;
                memcpy(&pair, a + r * a_row + 4 * k, sizeof pair);
                sums[r][0] = narrow ? narrow_dot_of_pairs(sums[r][0], pair, row) : dot_of_pairs(sums[r][0], pair, row);
                if (columns == 2) sums[r][1] = dot_of_pairs(sums[r][1], pair, row + b.right);
            }
#pragma GCC unroll 8
    for (int r = 0; r < height; r++, c += 16)
        for (int n = 0; n < columns; n++) {
            float *to = c + n * c_right;
            store_floats(to, add ? load_floats(to) + sums[r][n] : sums[r][n]);
        }
}

INLINE void multiply_tiles(float *c, int64_t c_down, int64_t c_right, struct left a, struct right b, int64_t steps,
                           const int rows, const int columns, const int add, int64_t used) {
    for (int m = 0; m < 16 * rows && (rows == 2 || m < used); m += 8) {
        float *to = c + m / 16 * c_down + m % 16 * 16;
        const char *from = a.at + m / 16 * a.down + m % 16 * a.row;
        if (rows == 1 && used <= 4)
            multiply_rows(to, c_right, from, a.row, a.next, b, steps, 4, columns, add, 0);
        else if (columns == 1 && used <= 8)
            multiply_rows(to, c_right, from, a.row, a.next, b, steps, 8, columns, add, 1);
        else
            multiply_rows(to, c_right, from, a.row, a.next, b, steps, 8, columns, add, 0);
    }
}

#endif

/* ---- the layouts of tiles; elements are bfloat16 ---- */

/* Return pairs of the elements of a and b, rounded to nearest even; a's element is the first of its pair. */
INLINE words pairs_of(floats a, floats b) {
#if LANES == 16 && defined(__AVX512BF16__)
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                           5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (words)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
    words x = as_words(a), y = as_words(b);
    x = (words)choose(a == a, as_floats((x + 0x7fff + (x >> 16 & 1)) >> 16), as_floats(x >> 16 | 0x40));
    y = (words)choose(b == b, as_floats(y + 0x7fff + (y >> 16 & 1)), as_floats(y | 0x400000));
    return (x & 0xffff) | (y & 0xffff0000);
#endif
}

/* Write two vectors one after the other as bfloat16, rounded to nearest even. */
INLINE void store_bfloat16(char *to, floats a, floats b) {
#if LANES == 16 && defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
#else
    store_shorts(to, BFLOAT16, a);
    store_shorts(to + 2 * LANES, BFLOAT16, b);
#endif
}

/* Write 16 rows of `width` numbers, a multiple of STEP, as tiles of b whose columns are these rows, for products with
   rows of a. `step` is the stride of the rows in bytes. */
INLINE void columns_of_rows(char *to, const char *rows, int64_t step, int64_t width) {
    for (int64_t d = 0; d < width; d += STEP)
        for (int i = 0; i < 16; i += LANES)
            for (int p = 0; p < 16; p += LANES)
                transpose_rows(to + d / STEP * TILE_BYTES + p * 64 + 4 * i, 64, rows + i * step + 2 * d + 4 * p, step);
}

/* Write 16 rows of `width` numbers, a multiple of STEP, as 16 of the 32 rows of tiles of b: half a tile for each 16
   columns, with the two rows of a pair interleaved. The tiles of consecutive columns follow each other. `step` is the
   stride of the rows in bytes. */
INLINE void pairs_of_rows(char *to, const char *rows, int64_t step, int64_t width) {
    for (int64_t i = 0; i < 16; i += 2)
        for (int64_t d = 0; d < width; d += LANES) {
            const words a = from_shorts(rows + i * step + 2 * d), b = from_shorts(rows + (i + 1) * step + 2 * d);
            const words pair = a | b << 16;
            memcpy(to + d / 16 * TILE_BYTES + i / 2 * 64 + d % 16 * 4, &pair, sizeof pair);
        }
}

/* Transpose tiles (16, 16) of 32-bit numbers or of pairs. */
INLINE void exchange_tiles(char *to, const char *from, int64_t tiles) {
    for (int64_t t = 0; t < tiles; t++, to += TILE_BYTES, from += TILE_BYTES)
        for (int i = 0; i < 16; i += LANES)
            for (int p = 0; p < 16; p += LANES)
                transpose_rows(to + p * 64 + 4 * i, 64, from + i * 64 + 4 * p, 64);
}

#endif
