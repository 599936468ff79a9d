/* The gradient of attention on the CPU (FlashAttention-2, Dao 2023, Algorithm 2), from the forward's o and lse.

   A part of the work is some queries of all query heads that share a key/value head, and all their keys. For each block
   of KEYS keys and of QUERIES queries there are five products, all of rows by columns in tiles that stay in registers:
   S = q k^T, dP = do v^T, dV += P^T do, dK += dS^T q, dQ += dS k.

   The order of all sums is fixed by positions: the bits of a gradient depend neither on other sequences, nor on how
   parts are distributed over threads. All arithmetic is float32 with fused multiply-add.

   build.py compiles this file once for each instruction set, with ISA as the suffix of its functions. */

#include "options.h"

#define QUERIES 64 /* also in native/backward.py */
#define KEYS 128
#define PITCH (KEYS + 16) /* floats from row to row of a block: no multiple of many cache lines */
#define TALL 4            /* rows of a tile */
#define WIDE (LANES == 8 ? 3 : 4) /* vectors of a tile's row */

/* `count` queries from `first` on, of one sequence and some key/value heads. Steps are in bytes; numbers of a row are
   adjacent. Addresses are those of the sequence's first row and of the part's first head. Query i sees the keys
   [i + low, i + high) among the sequence's `keys`. Outputs that are null are not wanted. */
struct part {
    int64_t heads;
    const char *q;
    int64_t q_head, q_row;
    const char *o;
    int64_t o_head, o_row;
    const char *dout; /* the gradient of o */
    int64_t dout_head, dout_row;
    const char *lse; /* float32 */
    int64_t lse_head, lse_row;
    const char *dlse; /* float32; null is 0 */
    int64_t dlse_head, dlse_row;
    char *dq;
    int64_t dq_head, dq_row;
    const char *k;
    int64_t k_head, k_row;
    const char *v;
    int64_t v_head, v_row;
    char *dk;
    int64_t dk_head, dk_row;
    char *dv;
    int64_t dv_head, dv_row;
    float *sums; /* null: write dk and dv. Else (keys, dim + value_dim) in float32, of one head */
    int64_t add; /* to `sums`; else write them */
    const float *slopes, *sinks;
    double *dsinks; /* of each query head; the part adds to them */
    int64_t first, count, keys, low, high;
    int64_t offset; /* ALiBi's distance of query i and key j is |i + offset - j| */
    const char *mask;
    int64_t mask_head, mask_row;
    char *dmask;
    int64_t dmask_head, dmask_row;
    int64_t sequence, head; /* dropout's */
};

struct call {
    int64_t type, dim, value_dim, group;
    double scale, softcap; /* softcap: 0 is off */
    int64_t mask_type, mask_step; /* step from key to key in bytes, 0 for one number for all keys */
    double keep;                  /* 1 - dropout_p */
    struct dropout dropout;
    int64_t dmask_step, dmask_adds; /* dmask is float32, and parts add to it; else it has the mask's type and all pairs */
    int64_t count;
    const struct part *parts;
};

/* ---- products ---- */

/* Write TALL rows of LANES·columns numbers of the product of a (rows, depth) and b (depth, columns), or add them.
   `columns` is a constant. The numbers of a have any steps. */
INLINE void tile(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const float *b, int64_t b_row,
                 int64_t depth, const int columns, const int add) {
    floats sum[TALL * WIDE];
#pragma GCC unroll 16
    for (int i = 0; i < TALL * columns; i++) sum[i] = splat(0);
#pragma GCC unroll 1
    for (int64_t n = 0; n < depth; n++, a += a_step, b += b_row) {
        floats y[WIDE];
#pragma GCC unroll 4
        for (int w = 0; w < columns; w++) y[w] = load_floats(b + w * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < TALL; r++) {
            const floats x = splat(a[r * a_row]);
#pragma GCC unroll 4
            for (int w = 0; w < columns; w++) sum[r * columns + w] = x * y[w] + sum[r * columns + w];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < TALL; r++)
#pragma GCC unroll 4
        for (int w = 0; w < columns; w++) {
            floats x = sum[r * columns + w];
            if (add) x = x + load_floats(c + r * c_row + w * LANES);
            memcpy(c + r * c_row + w * LANES, &x, sizeof x);
        }
}

/* Write the product of a (rows, depth) and b (depth, columns) to c, or add it. `rows` is a multiple of TALL, `columns`
   of LANES. */
INLINE void multiply(float *c, int64_t c_row, const float *a, int64_t a_row, int64_t a_step, const float *b,
                     int64_t b_row, int64_t rows, int64_t columns, int64_t depth, const int add) {
    int64_t at = 0;
#define COVER(width)                                                                                                 \
    if (width <= WIDE)                                                                                               \
        for (; at + (width) * LANES <= columns; at += (width) * LANES)                                               \
            for (int64_t r = 0; r < rows; r += TALL)                                                                 \
                tile(c + r * c_row + at, c_row, a + r * a_row, a_row, a_step, b + at, b_row, depth, width, add);
    COVER(4) COVER(3) COVER(2) COVER(1)
#undef COVER
}

NOINLINE void scores(float *c, const float *a, int64_t a_row, const float *b, int64_t rows, int64_t columns,
                     int64_t depth) {
    multiply(c, PITCH, a, a_row, 1, b, PITCH, rows, columns, depth, 0);
}

NOINLINE void add_to_keys(float *c, const float *scores, const float *b, int64_t width, int64_t keys, int64_t queries) {
    multiply(c, width, scores, 1, PITCH, b, width, keys, width, queries, 1);
}

NOINLINE void add_to_queries(float *c, const float *scores, const float *b, int64_t width, int64_t queries,
                             int64_t keys) {
    multiply(c, width, scores, PITCH, 1, b, width, queries, width, keys, 1);
}

/* ---- rows ---- */

INLINE int64_t in_lanes(int64_t keys) { return (keys + LANES - 1) / LANES * LANES; }
INLINE int64_t in_tiles(int64_t rows) { return (rows + TALL - 1) / TALL * TALL; }

INLINE void write_row(char *to, enum type type, const float *from, int64_t dim) {
    if (type == FLOAT32)
        memcpy(to, from, sizeof(float) * dim);
    else
        for (int64_t d = 0; d < dim; d++) store(to, type, d, from[d]);
}

/* Exchange rows and columns of LANES vectors. A round moves the highest bit of (row, column) to the lowest place. */
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

/* Copy `count` rows of k or v, with zeros up to whole vectors: as rows, and with rows and columns exchanged. */
INLINE void read_keys(float *rows, float *columns, const char *from, int64_t step, enum type type, int64_t dim,
                      int64_t count) {
    const int64_t width = padded(dim), whole = in_lanes(count);
    for (int64_t j = 0; j < count; j++) read_row(rows + j * width, from + j * step, type, dim);
    memset(rows + count * width, 0, sizeof(float) * (whole - count) * width);
    for (int64_t j = 0; j < whole; j += LANES)
        for (int64_t d = 0; d < width; d += LANES) {
            floats block[LANES];
            for (int i = 0; i < LANES; i++) block[i] = load_floats(rows + (j + i) * width + d);
            transpose(block);
            for (int i = 0; i < LANES; i++) memcpy(columns + (d + i) * PITCH + j, block + i, sizeof *block);
        }
}

struct scratch {
    float *q, *dout, *dq;      /* (rows, dim), (rows, value_dim), (rows, dim): the heads' queries one after another */
    float *lse, *delta;        /* (rows) */
    float *k, *k_columns;      /* (KEYS, dim), (dim, PITCH) */
    float *v, *v_columns;      /* (KEYS, value_dim), (value_dim, PITCH) */
    float *dk, *dv;            /* (KEYS, dim), (KEYS, value_dim) */
    float *p, *ds;             /* (QUERIES, PITCH) */
    uint32_t *room;
};

/* Copy the part's queries, with lse = +inf for a query that sees no key, so that its probabilities are 0. Rows that fill
   the last tile of a head are such queries. */
INLINE void read_queries(const struct call *call, const struct part *part, struct scratch *own) {
    const enum type type = (enum type)call->type;
    const int64_t dim = padded(call->dim), value_dim = padded(call->value_dim), rows = in_tiles(part->count);
    const float inf = __builtin_inff(), keep = (float)call->keep;
    float *o = own->dv; /* as memory, which has no use yet */
    memset(own->dq, 0, sizeof(float) * call->group * rows * dim);
    for (int64_t g = 0; g < call->group; g++) {
        double dsink = 0;
        for (int64_t i = 0; i < rows; i++) {
            const int64_t row = g * rows + i, query = part->first + i;
            float *q = own->q + row * dim, *dout = own->dout + row * value_dim;
            if (i >= part->count) {
                memset(q, 0, sizeof(float) * dim);
                memset(dout, 0, sizeof(float) * value_dim);
                own->lse[row] = inf;
                own->delta[row] = 0;
                continue;
            }
            read_row(q, part->q + g * part->q_head + query * part->q_row, type, call->dim);
            read_row(dout, part->dout + g * part->dout_head + query * part->dout_row, type, call->value_dim);
            read_row(o, part->o + g * part->o_head + query * part->o_row, type, call->value_dim);
            floats sum = splat(0);
            for (int64_t d = 0; d < value_dim; d += LANES) {
                floats x = load_floats(dout + d);
                sum = load_floats(o + d) * x + sum;
                if (keep != 1) {
                    x = x / keep;
                    memcpy(dout + d, &x, sizeof x);
                }
            }
            float lse, dlse = 0, delta = lane_sum(sum);
            memcpy(&lse, part->lse + g * part->lse_head + query * part->lse_row, sizeof lse);
            if (part->dlse) memcpy(&dlse, part->dlse + g * part->dlse_head + query * part->dlse_row, sizeof dlse);
            if (lse == -inf)
                lse = inf;
            else
                delta -= dlse;
            if (part->dsinks) dsink -= (double)exponential1(part->sinks[g] - lse) * delta;
            own->lse[row] = lse;
            own->delta[row] = delta;
        }
        if (part->dsinks) part->dsinks[g] += dsink;
    }
}

/* ---- one block of queries and keys ---- */

/* Write a number for each of the keys [key, key + LANES) that is below `stop`. */
INLINE void store_keys(char *row, enum type type, int64_t key, int64_t stop, floats x) {
    if (type == FLOAT32 && key + LANES <= stop)
        memcpy(row + 4 * key, &x, sizeof x);
    else
        for (int i = 0; i < LANES && key + i < stop; i++) store(row, type, key + i, x[i]);
}

/* Add a number for each of the keys [key, key + LANES) that is below `stop`, or with a step of 0 their sum. */
INLINE void add_keys(char *row, int64_t step, int64_t key, int64_t stop, floats x) {
    float sum;
    if (!step) {
        memcpy(&sum, row, sizeof sum);
        sum += lane_sum(x);
        memcpy(row, &sum, sizeof sum);
        return;
    }
    if (key + LANES <= stop)
        x = x + load_floats(row + 4 * key);
    else
        for (int i = 0; i < LANES && key + i < stop; i++) {
            memcpy(&sum, row + 4 * (key + i), sizeof sum);
            x[i] += sum;
        }
    store_keys(row, FLOAT32, key, stop, x);
}

/* Write zeros as the mask's gradient of some queries and the keys [from, to), unless it is a sum. */
INLINE void clear_mask(const struct call *call, const struct part *part, int64_t head, int64_t first, int64_t count,
                       int64_t from, int64_t to) {
    const int64_t size = size_of((enum type)call->mask_type);
    if (part->dmask && !call->dmask_adds && from < to)
        for (int64_t i = first; i < first + count; i++)
            memset(part->dmask + head * part->dmask_head + i * part->dmask_row + from * size, 0, (to - from) * size);
}

/* Make probabilities of the scores in `p`, and the gradients of scores of those of probabilities in `ds`, for one
   query and the block's keys [from, to). `seen`: the query sees all of them. */
INLINE void differentiate(const struct call *call, const struct part *part, struct scratch *own, float *p, float *ds,
                          int64_t row, int64_t head, int64_t query, int64_t position, int64_t from, int64_t to,
                          int seen) {
    const float softcap = (float)call->softcap, scale = (float)call->scale;
    const floats lse = splat(own->lse[row]), delta = splat(own->delta[row]);
    const char *mask = part->mask ? part->mask + head * part->mask_head + query * part->mask_row : 0;
    char *dmask = part->dmask ? part->dmask + head * part->dmask_head + query * part->dmask_row : 0;
    const uint32_t *drawn = 0;
    if (call->dropout.on)
        drawn = draw(&call->dropout, own->room, part->sequence, part->head + head, query, position + from, to - from);
    const ints lanes = each_lane();
    int64_t low = query + part->low - position, high = query + part->high - position;
    if (high > part->keys - position) high = part->keys - position;
    if (low < 0) low = 0;
    if (high > KEYS) high = KEYS;
    for (int64_t c = from; c < to; c += LANES) {
        floats x = load_floats(p + c) * scale, dx = load_floats(ds + c), slope = splat(scale);
        if (softcap != 0) {
            x = capped(x, softcap);
            const floats t = x / softcap;
            slope = slope * (1.0f - t * t);
        }
        const ints j = lanes + (int32_t)c;
        if (part->slopes) x = less_alibi(x, part->slopes[head], j, (int32_t)(query + part->offset - position));
        if (mask) x = x + masked(mask, (enum type)call->mask_type, call->mask_step, position + c, part->keys);
        x = x - lse;
        x = choose(x > 88.0f, splat(__builtin_inff()), exponential(x)); /* above 0 with an lse of other numbers */
        floats weight = x;
        if (drawn) weight = kept(&call->dropout, drawn + (c - from), x);
        dx = weight * dx - x * delta;
        if (!seen) {
            const ints visible = (j >= (int32_t)low) & (j < (int32_t)high);
            weight = choose(visible, weight, splat(0));
            dx = choose(visible, dx, splat(0));
        }
        memcpy(p + c, &weight, sizeof weight);
        if (dmask && call->dmask_adds)
            add_keys(dmask, call->dmask_step, position + c, part->keys, dx);
        else if (dmask)
            store_keys(dmask, (enum type)call->mask_type, position + c, part->keys, dx);
        dx = dx * slope;
        memcpy(ds + c, &dx, sizeof dx);
    }
}

/* Add the products of one block of queries of a head, which begins with `row` of the scratch, and of the block of keys
   from `position` on. */
INLINE void step(const struct call *call, const struct part *part, struct scratch *own, int64_t row, int64_t head,
                 int64_t first, int64_t count, int64_t position, int64_t keys) {
    const int64_t dim = padded(call->dim), value_dim = padded(call->value_dim), rows = in_tiles(count);
    int64_t from = first + part->low - position, to = first + count - 1 + part->high - position;
    from = from < 0 ? 0 : from / LANES * LANES;
    to = to > keys ? keys : to;
    if (from >= to) {
        clear_mask(call, part, head, first, count, position, position + keys);
        return;
    }
    clear_mask(call, part, head, first, count, position, position + from);
    clear_mask(call, part, head, first, count, position + to, position + keys);
    const int seen = first + count - 1 + part->low <= position + from && position + to <= first + part->high &&
                     to % LANES == 0;
    to = in_lanes(to);
    float *q = own->q + row * dim, *dout = own->dout + row * value_dim;
    scores(own->p + from, q, dim, own->k_columns + from, rows, to - from, dim);
    scores(own->ds + from, dout, value_dim, own->v_columns + from, rows, to - from, value_dim);
    for (int64_t i = 0; i < count; i++)
        differentiate(call, part, own, own->p + i * PITCH, own->ds + i * PITCH, row + i, head, first + i, position,
                      from, to, seen);
    for (int64_t i = count; i < rows; i++) {
        memset(own->p + i * PITCH, 0, sizeof(float) * PITCH);
        memset(own->ds + i * PITCH, 0, sizeof(float) * PITCH);
    }
    if (part->dv) add_to_keys(own->dv + from * value_dim, own->p + from, dout, value_dim, to - from, rows);
    if (part->dk) add_to_keys(own->dk + from * dim, own->ds + from, q, dim, to - from, rows);
    if (part->dq) add_to_queries(own->dq + row * dim, own->ds + from, own->k + from * dim, dim, rows, to - from);
}

/* Write the gradients of a block of keys, or add them to the sequence's sums. */
INLINE void write_keys(const struct call *call, const struct part *part, const struct scratch *own, int64_t position,
                       int64_t keys) {
    const int64_t dim = padded(call->dim), value_dim = padded(call->value_dim);
    for (int64_t j = 0; j < keys; j++) {
        const float *dk = own->dk + j * dim, *dv = own->dv + j * value_dim;
        if (!part->sums) {
            if (part->dk) write_row(part->dk + (position + j) * part->dk_row, (enum type)call->type, dk, call->dim);
            if (part->dv) write_row(part->dv + (position + j) * part->dv_row, (enum type)call->type, dv, call->value_dim);
            continue;
        }
        float *sums = part->sums + (position + j) * (call->dim + call->value_dim);
        for (int64_t d = 0; d < call->dim; d++) sums[d] = part->add ? sums[d] + dk[d] : dk[d];
        sums += call->dim;
        for (int64_t d = 0; d < call->value_dim; d++) sums[d] = part->add ? sums[d] + dv[d] : dv[d];
    }
}

/* Return the part for its key/value head number `head` alone. */
INLINE struct part of_head(const struct call *call, struct part part, int64_t head) {
    const int64_t query = head * call->group;
#define MOVE(name, heads)                                                                                            \
    if (part.name) part.name += (heads) * part.name##_head
    MOVE(q, query);
    MOVE(o, query);
    MOVE(dout, query);
    MOVE(lse, query);
    MOVE(dlse, query);
    MOVE(dq, query);
    MOVE(mask, query);
    MOVE(dmask, query);
    MOVE(k, head);
    MOVE(v, head);
    MOVE(dk, head);
    MOVE(dv, head);
#undef MOVE
    if (part.slopes) part.slopes += query;
    if (part.sinks) part.sinks += query;
    if (part.dsinks) part.dsinks += query;
    part.head += query;
    return part;
}

INLINE void compute(const struct call *call, const struct part *part, struct scratch *own) {
    const enum type type = (enum type)call->type;
    const int64_t dim = padded(call->dim), value_dim = padded(call->value_dim), rows = in_tiles(part->count);
    read_queries(call, part, own);
    if (part->dq || part->dk || part->dv || part->dmask)
        for (int64_t position = 0; position < part->keys; position += KEYS) {
            const int64_t keys = part->keys - position < KEYS ? part->keys - position : KEYS;
            memset(own->dk, 0, sizeof(float) * in_lanes(keys) * dim);
            memset(own->dv, 0, sizeof(float) * in_lanes(keys) * value_dim);
            const int seen = part->first + part->low < position + keys &&
                             position < part->first + part->count - 1 + part->high;
            if (seen) {
                read_keys(own->k, own->k_columns, part->k + position * part->k_row, part->k_row, type, call->dim, keys);
                read_keys(own->v, own->v_columns, part->v + position * part->v_row, part->v_row, type, call->value_dim,
                          keys);
            }
            for (int64_t g = 0; g < call->group; g++)
                for (int64_t i = 0; i < part->count; i += QUERIES)
                    step(call, part, own, g * rows + i, g, part->first + i,
                         part->count - i < QUERIES ? part->count - i : QUERIES, position, keys);
            write_keys(call, part, own, position, keys);
        }
    if (part->dq)
        for (int64_t g = 0; g < call->group; g++)
            for (int64_t i = 0; i < part->count; i++)
                write_row(part->dq + g * part->dq_head + (part->first + i) * part->dq_row, type,
                          own->dq + (g * rows + i) * dim, call->dim);
}

/* Return the memory of a thread, each array from a cache line on. */
static struct scratch *scratch_for(const struct call *call) {
    const int64_t dim = padded(call->dim), value_dim = padded(call->value_dim);
    int64_t rows = 0;
    for (int64_t n = 0; n < call->count; n++) {
        int64_t own = call->group * in_tiles(call->parts[n].count);
        if (own > rows) rows = own;
    }
    rows = (rows + 15) / 16 * 16;
    const int64_t total = 16 * ((int64_t)sizeof(struct scratch) / 64 + 1) + rows * (2 * dim + value_dim + 2) +
                          2 * (KEYS + PITCH / 2) * (dim + value_dim) + 2 * QUERIES * PITCH + (ROOM(KEYS) + 15) / 16 * 16;
    struct scratch *own = aligned_alloc(64, sizeof(float) * total);
    if (!own) return 0;
    float *at = (float *)own + 16 * (sizeof *own / 64 + 1);
#define TAKE(name, numbers) own->name = at, at += numbers
    TAKE(q, rows * dim);
    TAKE(dout, rows * value_dim);
    TAKE(dq, rows * dim);
    TAKE(lse, rows);
    TAKE(delta, rows);
    TAKE(k, KEYS * dim);
    TAKE(k_columns, PITCH * dim);
    TAKE(dk, KEYS * dim);
    TAKE(v, KEYS * value_dim);
    TAKE(v_columns, PITCH * value_dim);
    TAKE(dv, KEYS * value_dim);
    TAKE(p, QUERIES * PITCH);
    TAKE(ds, QUERIES * PITCH);
#undef TAKE
    own->room = (uint32_t *)at;
    return own;
}

/* Compute all parts of a call. Return 0, or 1 if memory is missing. */
int PASTE(flashpoint_backward_, ISA)(const struct call *call) {
    struct scratch *own = scratch_for(call);
    if (!own) return 1;
    for (int64_t n = 0; n < call->count; n++)
        for (int64_t head = 0; head < call->parts[n].heads; head++) {
            const struct part part = of_head(call, call->parts[n], head);
            compute(call, &part, own);
        }
    free(own);
    return 0;
}
