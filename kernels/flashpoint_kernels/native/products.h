/* Products of float32 matrices, in tiles that stay in registers, and the layout of the keys for these products.

   Each element of a product is one chain of fused multiply-adds in a fixed order. So its bits do not depend on its
   tile, on the number of rows, or on the instruction set. */

#ifndef FLASHPOINT_PRODUCTS
#define FLASHPOINT_PRODUCTS

#include "vectors.h"

#define TALL 6                     /* rows of a tile */
#define WIDE (LANES == 8 ? 2 : 4)  /* vectors of a tile's row: AVX2 has 16 registers, the others have 32 */
#define PANEL (WIDE * LANES)       /* keys of a panel: row d of a panel has element d of each of its keys */
#define GROUP 16                   /* keys whose addresses are found together */

/* How a product changes c: it replaces c, is added to c, is added to c times a factor, or is the rest of a product whose
   first terms c has. Only with CONTINUE does the chain of additions begin with c: long chains round more. */
enum start { WRITE, ADD, RESCALE, CONTINUE };

/* Compute one tile: c (rows, vectors·LANES) = a b, a b + c, a b + factor c, or c + a b. a[r, n] is at a + r·a_row +
   n·a_step; the strides of rows of b (depth, columns) and c are b_row and c_row floats. `start`, `rows` and `vectors` are
   compile-time constants. */
INLINE void tile(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_row,
                 int64_t depth, const float *factor, const enum start start, const int rows, const int vectors) {
    floats sum[TALL * WIDE];
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int w = 0; w < vectors; w++) {
            sum[r * vectors + w] = start == CONTINUE ? load_floats(c + r * c_row + w * LANES) : splat(0);
        }
#pragma GCC unroll 2
    for (int64_t n = 0; n < depth; n++) {
        floats y[WIDE];
#pragma GCC unroll 4
        for (int w = 0; w < vectors; w++) y[w] = load_floats(b + n * b_row + w * LANES);
#pragma GCC unroll 6
        for (int r = 0; r < rows; r++) {
            const floats x = splat(a[r * a_row + n * a_step]);
#pragma GCC unroll 4
            for (int w = 0; w < vectors; w++) sum[r * vectors + w] = multiply_add(x, y[w], sum[r * vectors + w]);
        }
    }
#pragma GCC unroll 6
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int w = 0; w < vectors; w++) {
            float *to = c + r * c_row + w * LANES;
            floats x = sum[r * vectors + w];
            if (start == ADD) x = x + load_floats(to);
            if (start == RESCALE) x = multiply_add(load_floats(to), splat(factor[r]), x);
            store_floats(to, x);
        }
}

/* Compute `tile` for any number of rows up to TALL. */
INLINE void tile_of_rows(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const float *b,
                         int64_t b_row, int64_t depth, const float *factor, const enum start start, int64_t rows,
                         const int vectors) {
    switch (rows) {
    case 1: tile(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, 1, vectors); break;
    case 2: tile(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, 2, vectors); break;
    case 3: tile(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, 3, vectors); break;
    case 4: tile(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, 4, vectors); break;
    case 5: tile(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, 5, vectors); break;
    default: tile(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, TALL, vectors);
    }
}

/* Compute `tile` for any number of rows up to TALL and of vectors up to WIDE. */
INLINE void tile_of_any(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const float *b,
                        int64_t b_row, int64_t depth, const float *factor, const enum start start, int64_t rows,
                        int64_t vectors) {
    if (vectors == WIDE)
        tile_of_rows(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, rows, WIDE);
    else if (vectors == 1)
        tile_of_rows(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, rows, 1);
    else if (vectors == 2)
        tile_of_rows(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, rows, 2 < WIDE ? 2 : 1);
    else
        tile_of_rows(c, c_row, a, a_row, a_step, b, b_row, depth, factor, start, rows, 3 < WIDE ? 3 : 1);
}

/* ---- panels of keys ---- */

/* Write GROUP keys, from number `key` on, as columns of panels. `rows` has the keys as rows, whose stride is `row`
   floats. A panel has padded(dim) rows of PANEL elements. */
INLINE void panel_columns(float *panels, const float *rows, int64_t row, int64_t key, int64_t dim) {
    for (int64_t j = 0; j < GROUP; j += LANES) {
        float *to = panels + (key + j) / PANEL * PANEL * padded(dim) + (key + j) % PANEL;
        for (int64_t d = 0; d < dim; d += LANES)
            transpose_rows((char *)(to + d * PANEL), PANEL * sizeof(float), (const char *)(rows + j * row + d),
                           row * sizeof(float));
    }
}

#endif
