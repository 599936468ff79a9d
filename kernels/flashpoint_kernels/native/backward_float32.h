/* The matrix products of attention's backward pass in float32, for inputs of all types: queries and keys are converted
   to float32 block by block. */

#define UNIT 16    /* zeros fill dimensions up to a multiple of this */
#ifndef QUERIES
#define QUERIES 64 /* queries of a block: S and dP stay in the L1 cache */
#endif
#define PITCH (KEYS + 16) /* stride of rows of S in floats; not a power of two, so that rows use different cache sets */

struct scratch {
    struct sums sums;
    float *q, *dout, *dq;    /* (rows, dim), (rows, value_dim), (rows, dim): the heads' queries one after another */
    float *k, *k_columns;    /* (KEYS, dim), (dim, PITCH) */
    float *v, *v_columns;    /* (KEYS, value_dim), (value_dim, PITCH) */
    float *dk, *dv;          /* (KEYS, dim), (KEYS, value_dim) */
    float *p, *ds;           /* (QUERIES, PITCH): S and dP, then P and dS */
    uint8_t *seen;           /* (QUERIES, PITCH), for infinity and NaN */
    int64_t dim, value_dim;  /* padded */
};

INLINE int64_t rows_of(int64_t count) { return count; }

INLINE void place(struct scratch *own, struct memory *memory, int64_t rows) {
    const int64_t dim = own->dim, value_dim = own->value_dim, number = sizeof(float);
    own->q = take(memory, number * rows * dim);
    own->dout = take(memory, number * rows * value_dim);
    own->dq = take(memory, number * rows * dim);
    own->k = take(memory, number * KEYS * dim);
    own->k_columns = take(memory, number * dim * PITCH);
    own->v = take(memory, number * KEYS * value_dim);
    own->v_columns = take(memory, number * value_dim * PITCH);
    own->dk = take(memory, number * KEYS * dim);
    own->dv = take(memory, number * KEYS * value_dim);
    own->p = take(memory, number * QUERIES * PITCH);
    own->ds = take(memory, number * QUERIES * PITCH);
    own->seen = take(memory, QUERIES * PITCH);
}

INLINE void begin(struct scratch *own) { (void)own; }
INLINE void end(struct scratch *own) { (void)own; }

/* ---- copies of queries and keys ---- */

/* Copy `count` rows of `dim` numbers as float32, and write zeros up to `rows` rows. */
INLINE void copy_rows(float *to, const char *from, int64_t step, enum type type, int64_t dim, int64_t count,
                      int64_t rows) {
    const int64_t width = padded(dim);
    for (int64_t i = 0; i < count; i++) read_row(to + i * width, from + i * step, type, dim);
    memset(to + count * width, 0, sizeof(float) * (rows - count) * width);
}

/* Copy rows (rows, width) as columns (width, PITCH). */
INLINE void copy_columns(float *to, const float *rows, int64_t width, int64_t count) {
    for (int64_t j = 0; j < count; j += LANES)
        for (int64_t d = 0; d < width; d += LANES)
            transpose_rows((char *)(to + d * PITCH + j), PITCH * sizeof(float), (const char *)(rows + j * width + d),
                           width * sizeof(float));
}

/* Copy `count` queries of one head, and their rows of dO, as float32 to the scratch memory's rows from `row` on. Set
   their rows of dQ to 0. */
INLINE void copy_queries(const struct call *call, struct scratch *own, const char *q, int64_t q_row, const char *dout,
                         int64_t dout_row, int64_t count, int64_t row) {
    copy_rows(own->q + row * own->dim, q, q_row, (enum type)call->type, call->dim, count, count);
    copy_rows(own->dout + row * own->value_dim, dout, dout_row, (enum type)call->type, call->value_dim, count, count);
    memset(own->dq + row * own->dim, 0, sizeof(float) * count * own->dim);
}

/* Copy the keys of a block and its values, unless v is null, as float32, by rows and by columns. Set their gradients
   to 0. */
INLINE void copy_keys(const struct call *call, struct scratch *own, const char *k, int64_t k_row, const char *v,
                      int64_t v_row, int64_t keys) {
    const int64_t whole = rounded(keys, 16);
    copy_rows(own->k, k, k_row, (enum type)call->type, call->dim, keys, whole);
    copy_columns(own->k_columns, own->k, own->dim, whole);
    if (v) {
        copy_rows(own->v, v, v_row, (enum type)call->type, call->value_dim, keys, whole);
        copy_columns(own->v_columns, own->v, own->value_dim, whole);
    }
    memset(own->dk, 0, sizeof(float) * whole * own->dim);
    memset(own->dv, 0, sizeof(float) * whole * own->value_dim);
}

/* Do nothing: float32 kernels already store the gradients of a block's keys as rows. */
INLINE void finish_keys(struct scratch *own) { (void)own; }

INLINE const float *dq_row(struct scratch *own, int64_t row) { return own->dq + row * own->dim; }

/* ---- one block of queries and one block of keys ---- */

/* Compute c = a b, or c += a b if `start` is ADD, with c (rows, columns), a (rows, depth) and b (depth, columns).
   Strides are in floats: c_row, a_row and b_row between rows, a_step between columns of a. `columns` is a multiple of
   LANES. */
INLINE void multiply(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_row,
                     int64_t rows, int64_t columns, int64_t depth, const enum start start) {
    for (int64_t at = 0; at < columns; at += PANEL)
        for (int64_t r = 0; r < rows; r += TALL)
            tile_of_any(c + r * c_row + at, c_row, a + r * a_row, a_row, a_step, b + at, b_row, depth, 0, start,
                        lesser(rows - r, TALL), lesser(columns - at, PANEL) / LANES);
}

NOINLINE void write_product(float *c, const float *a, int64_t a_row, const float *b, int64_t rows, int64_t columns,
                            int64_t depth) {
    multiply(c, PITCH, a, a_row, 1, b, PITCH, rows, columns, depth, WRITE);
}

NOINLINE void add_product(float *c, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t width,
                          int64_t rows, int64_t depth) {
    multiply(c, width, a, a_row, a_step, b, width, rows, width, depth, ADD);
}

/* Do what `add_product` does for dV with one column, in the same order of additions: keys are the lanes of vectors. */
NOINLINE void add_column(float *dv, const float *p, const float *dout, int64_t width, int64_t keys, int64_t depth) {
    float column[KEYS];
    multiply(column, KEYS, dout, 0, width, p, PITCH, 1, keys, depth, WRITE);
    for (int64_t j = 0; j < keys; j++) dv[j * width] += column[j];
}

/* Add the sum of the rows of b, weighted by the elements of a, to the row c. Skip rows of b where `seen` is 0, which
   may contain infinity or NaN. The order of additions is that of `tile`. */
NOINLINE void add_seen(float *c, const float *a, const uint8_t *seen, int64_t step, const float *b, int64_t width,
                       int64_t depth) {
    for (int64_t d = 0; d < width; d += LANES) {
        floats sum = splat(0);
        for (int64_t n = 0; n < depth; n++)
            if (seen[n * step]) sum = multiply_add(splat(a[n * step]), load_floats(b + n * width + d), sum);
        store_floats(c + d, sum + load_floats(c + d));
    }
}

/* Limit `count` numbers to float32's range, so that no later sum is NaN. */
NOINLINE void limit(float *numbers, int64_t count) {
    for (int64_t n = 0; n < count; n += LANES) store_floats(numbers + n, within_range(load_floats(numbers + n)));
}

/* Compute the elements of c = a b^T that are infinite or NaN again with float64 sums, limited to float32's range. a is
   (rows, depth), b is (columns, depth). */
NOINLINE void put_right(float *c, const float *a, const float *b, int64_t rows, int64_t columns, int64_t depth) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++) {
            double sum = 0;
            if (c[i * PITCH + j] - c[i * PITCH + j] == 0) continue;
            for (int64_t d = 0; d < depth; d++) sum += (double)a[i * depth + d] * b[j * depth + d];
            c[i * PITCH + j] = (float)(sum > MOST ? MOST : sum < -MOST ? -MOST : sum);
        }
}

/* Add to dQ, dK and dV what one block of queries of a head contributes together with one block of keys. The copies of
   the queries start at row `row` of the scratch memory. */
NOINLINE void step(const struct call *call, const struct part *part, struct scratch *own, enum range range, int64_t row,
                   int64_t head, int64_t first, int64_t count, const struct block *block) {
    const int64_t dim = own->dim, value_dim = own->value_dim, from = block->from, keys = block->to - block->from;
    const float *q = own->q + row * dim, *dout = own->dout + row * value_dim;
    const float *p = own->p + from, *ds = own->ds + from;
    float *dk = own->dk + from * dim, *dv = own->dv + from * value_dim, *dq = own->dq + row * dim;
    const int apart = range == NONFINITE && !(block->all && !part->mask.at);
    const int with_scores = of_scores(part);
    clear_mask(call, part, head, first, count, block);
    write_product(own->p + from, q, dim, own->k_columns + from, count, keys, dim);
    if (with_scores) write_product(own->ds + from, dout, value_dim, own->v_columns + from, count, keys, value_dim);
    if (range == LARGE) {
        put_right(own->p + from, q, own->k + from * dim, count, keys, dim);
        if (with_scores) put_right(own->ds + from, dout, own->v + from * value_dim, count, keys, value_dim);
    }
    for (int64_t i = 0; i < count; i++) {
        const struct row numbers = {own->p + i * PITCH, own->ds + i * PITCH, 16, apart ? own->seen + i * PITCH : 0};
        differentiate_row(call, part, &own->sums, numbers, row + i, head, first + i, block, range);
    }
    if (apart) {
        const uint8_t *seen = own->seen + from;
        for (int64_t j = 0; j < keys; j++) {
            if (part->dv.at) add_seen(dv + j * value_dim, p + j, seen + j, PITCH, dout, value_dim, count);
            if (part->dk.at) add_seen(dk + j * dim, ds + j, seen + j, PITCH, q, dim, count);
        }
        for (int64_t i = 0; part->dq.at && i < count; i++)
            add_seen(dq + i * dim, ds + i * PITCH, seen + i * PITCH, 1, own->k + from * dim, dim, keys);
        return;
    }
    if (part->dv.at && call->value_dim == 1)
        add_column(dv, p, dout, value_dim, keys, count);
    else if (part->dv.at)
        add_product(dv, p, 1, PITCH, dout, value_dim, keys, count);
    if (part->dk.at) add_product(dk, ds, 1, PITCH, q, dim, keys, count);
    if (part->dq.at) add_product(dq, ds, PITCH, 1, own->k + from * dim, dim, count, keys);
    if (range == LARGE) {
        limit(dv, keys * value_dim);
        limit(dk, keys * dim);
        limit(dq, count * dim);
    }
}
