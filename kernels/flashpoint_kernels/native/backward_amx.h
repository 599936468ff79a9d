/* The products of the gradient by AMX, for bfloat16: P and dS are rounded to bfloat16, and sums are float32.

   The columns of S, P and dS are keys. A tile product adds a b to c, see tiles.h. dV and dK are computed as transposes,
   dV^T = dO^T P and dK^T = Q^T dS, with pairs of rows of P and dS as tiles of b. For dQ = dS K, rows of dS are tiles of
   a. Rows that fill up the last tile are zeros.

   backward_float32.h computes parts with infinity, NaN, or numbers whose products may overflow: a tile product adds
   the sums of even and of odd elements, which could be infinities of opposite signs. */

#include "tiles.h"

#define UNIT STEP
#ifndef QUERIES
#define QUERIES 128                       /* queries of a block */
#endif
#define STRIP 32                          /* queries of a strip, two tiles: their S and dP are computed together */
#define TILE (TILE_BYTES / 4)             /* numbers of a tile of float32 */
#define KEY_TILES (KEYS / 16)
#define STRIP_BYTES (KEY_TILES * TILE_BYTES) /* size of a strip's P or dS as tiles of b */

#if LANES != 16
#error "a row of a tile is one vector of 16 floats"
#endif

struct scratch {
    struct sums sums;
    char *q_rows, *dout_rows;          /* (rows, dim), (rows, value_dim): the heads' queries one after another */
    char *q_columns, *dout_columns;    /* for each STRIP and each 16 numbers a tile of a: 16 numbers of 32 queries */
    char *k_rows, *v_rows;             /* (KEYS, dim), (KEYS, value_dim) */
    char *k_columns, *v_columns;       /* for each 16 keys and each STEP of dim a tile of b */
    char *k_pairs;                     /* for each STEP of keys and each 16 numbers a tile of b */
    float *dq;                         /* tiles (rows / 16, dim / 16) */
    float *dk_tiles, *dv_tiles;        /* dK^T, dV^T: tiles (dim / 16, KEYS / 16) */
    float *dk, *dv;                    /* (KEYS, dim), (KEYS, value_dim) */
    float *p, *ds;                     /* a strip's tiles (KEYS / 16, 2), of 16 queries by 16 keys */
    char *p_pairs, *ds_pairs;          /* for each STRIP and each 16 keys a tile of b */
    char *ds_rows;                     /* (QUERIES, KEYS) */
    float *row;                        /* one row of dq */
    int64_t dim, value_dim;            /* multiples of STEP */
    struct tile_shapes before;
};

INLINE int64_t rows_of(int64_t count) { return rounded(count, STRIP); }

INLINE void place(struct scratch *own, struct memory *memory, int64_t rows) {
    const int64_t dim = own->dim, value_dim = own->value_dim;
    own->q_rows = take(memory, 2 * rows * dim);
    own->q_columns = take(memory, 2 * rows * dim);
    own->dout_rows = take(memory, 2 * rows * value_dim);
    own->dout_columns = take(memory, 2 * rows * value_dim);
    own->k_rows = take(memory, 2 * KEYS * dim);
    own->k_columns = take(memory, 2 * KEYS * dim);
    own->k_pairs = take(memory, 2 * KEYS * dim);
    own->v_rows = take(memory, 2 * KEYS * value_dim);
    own->v_columns = take(memory, 2 * KEYS * value_dim);
    own->dq = take(memory, 4 * rows * dim);
    own->dk_tiles = take(memory, 4 * KEYS * dim);
    own->dk = take(memory, 4 * KEYS * dim);
    own->dv_tiles = take(memory, 4 * KEYS * value_dim);
    own->dv = take(memory, 4 * KEYS * value_dim);
    own->p = take(memory, 4 * STRIP * KEYS);
    own->ds = take(memory, 4 * STRIP * KEYS);
    own->p_pairs = take(memory, 2 * QUERIES * KEYS);
    own->ds_pairs = take(memory, 2 * QUERIES * KEYS);
    own->ds_rows = take(memory, 2 * QUERIES * KEYS);
    own->row = take(memory, 4 * dim);
}

INLINE void begin(struct scratch *own) { tile_configure(&own->before); }
INLINE void end(struct scratch *own) { tile_restore(&own->before); }

/* ---- copies of queries and keys ---- */

/* Copy `count` rows of `dim` numbers, and write zeros up to (rows, width). */
INLINE void copy_rows(char *to, const char *from, int64_t step, int64_t dim, int64_t count, int64_t width, int64_t rows) {
    for (int64_t i = 0; i < count; i++, to += 2 * width) {
        memcpy(to, from + i * step, 2 * dim);
        memset(to + 2 * dim, 0, 2 * (width - dim));
    }
    memset(to, 0, 2 * (rows - count) * width);
}

/* Transpose the matrix `rows`, (count, width), into tiles for the left operand of a product of tiles: one tile for each
   STRIP of rows and each 16 columns. */
NOINLINE void tiles_of_columns(char *to, const char *rows, int64_t width, int64_t count) {
    char pairs[TILE_BYTES];
    for (int64_t i = 0; i < count; i += STRIP)
        for (int64_t d = 0; d < width; d += 16, to += TILE_BYTES) {
            pairs_of_rows(pairs, rows + 2 * (i * width + d), 2 * width, 16);
            pairs_of_rows(pairs + 512, rows + 2 * ((i + 16) * width + d), 2 * width, 16);
            exchange_tiles(to, pairs, 1);
        }
}

INLINE void copy_queries(const struct call *call, struct scratch *own, const char *q, int64_t q_row, const char *dout,
                         int64_t dout_row, int64_t count, int64_t row) {
    const int64_t dim = own->dim, value_dim = own->value_dim, rows = rows_of(count);
    copy_rows(own->q_rows + 2 * row * dim, q, q_row, call->dim, count, dim, rows);
    copy_rows(own->dout_rows + 2 * row * value_dim, dout, dout_row, call->value_dim, count, value_dim, rows);
    tiles_of_columns(own->q_columns + 2 * row * dim, own->q_rows + 2 * row * dim, dim, rows);
    tiles_of_columns(own->dout_columns + 2 * row * value_dim, own->dout_rows + 2 * row * value_dim, value_dim, rows);
    memset(own->dq + row * dim, 0, sizeof(float) * rows * dim);
}

INLINE void copy_keys(const struct call *call, struct scratch *own, const char *k, int64_t k_row, const char *v,
                      int64_t v_row, int64_t keys) {
    const int64_t dim = own->dim, value_dim = own->value_dim, whole = rounded(keys, STEP);
    copy_rows(own->k_rows, k, k_row, call->dim, keys, dim, whole);
    if (v) copy_rows(own->v_rows, v, v_row, call->value_dim, keys, value_dim, whole);
    for (int64_t j = 0; j < whole; j += 16) {
        columns_of_rows(own->k_columns + 2 * j * dim, own->k_rows + 2 * j * dim, 2 * dim, dim);
        if (v) columns_of_rows(own->v_columns + 2 * j * value_dim, own->v_rows + 2 * j * value_dim, 2 * value_dim, value_dim);
        pairs_of_rows(own->k_pairs + j / STEP * 2 * STEP * dim + j % STEP / 16 * 512, own->k_rows + 2 * j * dim, 2 * dim,
                      dim);
    }
    memset(own->dk_tiles, 0, sizeof(float) * KEYS * dim);
    memset(own->dv_tiles, 0, sizeof(float) * KEYS * value_dim);
}

INLINE void rows_of_tiles(float *to, const float *tiles, int64_t width) {
    for (int64_t d = 0; d < width; d += 16)
        for (int64_t j = 0; j < KEYS; j += 16, tiles += TILE)
            transpose_rows((char *)(to + j * width + d), width * sizeof(float), (const char *)tiles, 64);
}

/* Convert the gradients of a block's keys from transposed tiles to rows. */
INLINE void finish_keys(struct scratch *own) {
    rows_of_tiles(own->dk, own->dk_tiles, own->dim);
    rows_of_tiles(own->dv, own->dv_tiles, own->value_dim);
}

INLINE const float *dq_row(struct scratch *own, int64_t row) {
    for (int64_t d = 0; d < own->dim; d += 16)
        memcpy(own->row + d, own->dq + row / 16 * 16 * own->dim + d / 16 * TILE + row % 16 * 16, 64);
    return own->row;
}

/* ---- one block of queries and one block of keys ---- */

/* Round P and dS of a strip to bfloat16 tiles for products over the keys [from, to). `first` is the strip's first query
   in the block. */
NOINLINE void round_strip(struct scratch *own, int64_t first, int64_t from, int64_t to) {
    char *p_pairs = own->p_pairs + first / STRIP * STRIP_BYTES, *ds_pairs = own->ds_pairs + first / STRIP * STRIP_BYTES;
    for (int64_t i = 0; i < STRIP; i += 2)
        for (int64_t c = from; c < to; c += STEP) {
            char *rows = own->ds_rows + 2 * ((first + i) * KEYS + c);
            floats ds[2][2];
            for (int n = 0; n < 2; n++) {
                const int64_t at = (c / 16 + n) * 2 * TILE + i * 16, pair = (c / 16 + n) * TILE_BYTES + i / 2 * 64;
                const words x = pairs_of(load_floats(own->p + at), load_floats(own->p + at + 16));
                ds[0][n] = load_floats(own->ds + at);
                ds[1][n] = load_floats(own->ds + at + 16);
                const words y = pairs_of(ds[0][n], ds[1][n]);
                memcpy(p_pairs + pair, &x, sizeof x);
                memcpy(ds_pairs + pair, &y, sizeof y);
            }
            store_bfloat16(rows, ds[0][0], ds[0][1]);
            store_bfloat16(rows + 2 * KEYS, ds[1][0], ds[1][1]);
        }
}

/* Write zeros to P and dS of a strip's queries [first, last) in the keys [from, to). */
INLINE void clear(struct scratch *own, int64_t first, int64_t last, int64_t from, int64_t to) {
    for (int64_t c = from; c < to && first < last; c += 16) {
        memset(own->p + c / 16 * 2 * TILE + first * 16, 0, (last - first) * 64);
        memset(own->ds + c / 16 * 2 * TILE + first * 16, 0, (last - first) * 64);
    }
}

/* Add the contributions of one block of queries of a head and one block of keys to dQ, dK and dV. The queries start at
   row `row` of the scratch memory. */
NOINLINE void step(const struct call *call, const struct part *part, struct scratch *own, enum range range, int64_t row,
                   int64_t head, int64_t first, int64_t count, const struct block *block) {
    const int64_t dim = own->dim, value_dim = own->value_dim, from = block->from, to = block->to, rows = rows_of(count);
    for (int64_t i = 0; i < rows; i += STRIP) {
        const int64_t some = lesser(count - i, STRIP);
        const struct left q = {own->q_rows + 2 * (row + i) * dim, 32 * dim, 2 * dim, 64};
        const struct left dout = {own->dout_rows + 2 * (row + i) * value_dim, 32 * value_dim, 2 * value_dim, 64};
        struct block strip = *block;
        see(call, part, head, first + i, some, UNIT, &strip);
        clear_mask(call, part, head, first + i, some, &strip);
        for (int64_t j = strip.from; j < strip.to; j += 32) {
            const struct right k = {own->k_columns + 2 * j * dim, 32 * dim, TILE_BYTES};
            const struct right v = {own->v_columns + 2 * j * value_dim, 32 * value_dim, TILE_BYTES};
            multiply_tiles(own->p + j / 16 * 2 * TILE, TILE, 2 * TILE, q, k, dim / STEP, 2, 2, 0, 16);
            multiply_tiles(own->ds + j / 16 * 2 * TILE, TILE, 2 * TILE, dout, v, value_dim / STEP, 2, 2, 0, 16);
        }
        for (int64_t r = 0; r < some; r++) {
            const struct row numbers = {own->p + r * 16, own->ds + r * 16, 2 * TILE, 0};
            differentiate_row(call, part, &own->sums, numbers, row + i + r, head, first + i + r, &strip, range);
        }
        clear(own, some, STRIP, strip.from, strip.to);
        clear(own, 0, STRIP, from, strip.from);
        clear(own, 0, STRIP, greater(strip.to, from), to);
        round_strip(own, i, from, to);
    }
    for (int64_t j = from; j < to; j += 32) {
        const struct right p = {own->p_pairs + j / 16 * TILE_BYTES, TILE_BYTES, STRIP_BYTES};
        const struct right ds = {own->ds_pairs + j / 16 * TILE_BYTES, TILE_BYTES, STRIP_BYTES};
        for (int64_t d = 0; part->dv.at && d < value_dim; d += 32) {
            const struct left dout = {own->dout_columns + 2 * row * value_dim + d * 64, TILE_BYTES, 64, 64 * value_dim};
            multiply_tiles(own->dv_tiles + (d * KEY_TILES + j) * 16, KEY_TILES * TILE, TILE, dout, p, rows / STRIP, 2, 2, 1, 16);
        }
        for (int64_t d = 0; part->dk.at && d < dim; d += 32) {
            const struct left q = {own->q_columns + 2 * row * dim + d * 64, TILE_BYTES, 64, 64 * dim};
            multiply_tiles(own->dk_tiles + (d * KEY_TILES + j) * 16, KEY_TILES * TILE, TILE, q, ds, rows / STRIP, 2, 2, 1, 16);
        }
    }
    for (int64_t i = 0; part->dq.at && i < rows; i += 32)
        for (int64_t d = 0; d < dim; d += 32) {
            const struct left ds = {own->ds_rows + 2 * (i * KEYS + from), 32 * KEYS, 2 * KEYS, 64};
            const struct right k = {own->k_pairs + 2 * from * dim + d * 64, TILE_BYTES, 64 * dim};
            multiply_tiles(own->dq + (row + i) * dim + d * 16, 16 * dim, TILE, ds, k, (to - from) / STEP, 2, 2, 1, 16);
        }
}
