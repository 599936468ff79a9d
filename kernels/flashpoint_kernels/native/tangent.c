/* The tangent of attention on the CPU, in float32: the derivatives of o and lse along a direction of q, k and v, from the
   forward's o and lse (Lu & Song 2024, arXiv 2410.11081, appendix E). With a dot for a tangent and
   P = exp(scale·q·k^T − lse):

       ṡ = scale·(q̇·k^T + q·k̇^T);   l̇se = Σ P∘ṡ;   ȯ = (P∘ṡ)·v + P·v̇ − l̇se·o

   A row of `pairs` is (q̇, q), a column of `panels` is (k, k̇): so ṡ is one product, and the second half of the row with
   the first half of the column is s. lse is known, so blocks of keys are independent summands.

   A part is some queries of one sequence, of all query heads that share a key/value head. Positions determine the order
   of all sums: the bits of a row depend only on the row and the keys that it sees.

   build.py compiles this file once for each instruction set, with ISA as the suffix of its function. */

#include "memory.h"
#include "products.h"

/* The macros of block sizes in `#ifndef` are smaller in the guarded build of the tests (tests/support/sweep/guards.py). */
#ifndef BLOCK
#define BLOCK 128 /* keys of a block, a multiple of PANEL */
#endif
#ifndef STRIP
#define STRIP 24 /* rows whose scores stay in the L1 cache, a multiple of TALL */
#endif

#define LARGEST 0x1p100 /* products of larger numbers might overflow */

/* `count` queries from `first` on, of one sequence and `heads` key/value heads. Addresses are those of the sequence's
   first row and the part's first head. Query i sees the keys [i + low, i + high) of the sequence's `keys` keys. */
struct part {
    int64_t heads;
    struct rows q, q_dot, o, lse, o_dot, lse_dot;
    struct rows k, k_dot, v, v_dot;
    int64_t first, count, keys, low, high;
};

/* `q_dots`, `k_dots`, `v_dots`: whether the direction has a tangent of q, k, v; without, it is 0. `unusual` is set to 1
   if numbers are infinite, NaN or so large that products may overflow; the results are then not valid. */
struct call {
    int64_t dim, value_dim, group;
    double scale;
    int64_t q_dots, k_dots, v_dots;
    int64_t *unusual;
    int64_t count;
    const struct part *parts;
};

/* The largest magnitudes of some tensors, in each lane, as bits. */
struct peaks {
    ints q, q_dot, k, k_dot, v, v_dot;
};

struct scratch {
    float *pairs;  /* (rows, 2·dim): q̇ and q; dimensions are `padded` */
    float *o_dot;  /* (rows, value_dim): ȯ without its last term */
    float *lse;    /* (rows): +inf for a row that sees no key */
    floats *sums;  /* (rows, SUMS): 16 partial sums of l̇se */
    float *panels; /* the block's keys as columns, see `panel_columns` */
    float *values, *values_dot; /* (BLOCK, value_dim) */
    float *p, *weights;         /* (STRIP, BLOCK): s and ṡ, then P and P∘ṡ */
    float *rows;                /* (GROUP, 2·dim + 16): keys, before `panel_columns` */
    float *o;                   /* (value_dim) */
    struct peaks peaks;
};

/* The keys [from, to) of a block exist. `position` is the position in the sequence of its first key. */
struct block {
    int64_t position, from, to;
};

/* Some keys of a block. */
struct range {
    int64_t low, high;
};

/* ---- magnitudes ---- */

INLINE void read_numbers(float *to, const char *from, int64_t dim, ints *peak) {
    read_row(to, from, FLOAT32, dim);
    for (int64_t d = 0; d < padded(dim); d += LANES) *peak = larger_bits(*peak, load_floats(to + d));
}

/* Return the largest magnitude; NaN or infinity if there is one. */
INLINE double peak_of(ints bits) {
    int32_t most = 0;
    float x;
    for (int i = 0; i < LANES; i++) most = bits[i] > most ? bits[i] : most;
    memcpy(&x, &most, sizeof x);
    return x;
}

/* Return whether no product or sum of these numbers overflows. NaN makes each comparison false. */
INLINE int is_usual(const struct call *call, const struct peaks *peaks, int64_t keys) {
    const double scale = call->scale < 0 ? -call->scale : call->scale, of_scores = (double)call->dim * (scale > 1 ? scale : 1);
    const double q = peak_of(peaks->q), k = peak_of(peaks->k), v = peak_of(peaks->v);
    const double s_dot = of_scores * (peak_of(peaks->q_dot) * k + q * peak_of(peaks->k_dot));
    return scale < LARGEST && of_scores * q * k < LARGEST && (double)keys * s_dot * (v > 1 ? v : 1) < LARGEST &&
           v < LARGEST && (double)keys * peak_of(peaks->v_dot) < LARGEST;
}

/* ---- queries and keys ---- */

INLINE const char *row_at(const struct rows *rows, int64_t head, int64_t row) {
    return rows->at + head * rows->head + row * rows->row;
}

INLINE void load_queries(const struct call *call, const struct part *part, struct scratch *own) {
    const int64_t dim = padded(call->dim), rows = call->group * part->count;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t head = r / part->count, query = part->first + r % part->count;
        float *pair = own->pairs + r * 2 * dim;
        if (call->q_dots) read_numbers(pair, row_at(&part->q_dot, head, query), call->dim, &own->peaks.q_dot);
        read_numbers(pair + dim, row_at(&part->q, head, query), call->dim, &own->peaks.q);
        memcpy(own->lse + r, row_at(&part->lse, head, query), sizeof(float));
        if (own->lse[r] == -__builtin_inff()) own->lse[r] = __builtin_inff();
    }
    memset(own->o_dot, 0, sizeof(float) * rows * padded(call->value_dim));
    memset(own->sums, 0, sizeof(float) * rows * 16);
}

/* Return the number of rows of a panel. */
INLINE int64_t depth_of(const struct call *call) { return padded(call->dim) * (call->k_dots ? 2 : 1); }

/* Write the block's keys as panels and its values as rows. Both begin at a multiple of GROUP, with zeros for values of
   keys that do not exist; the columns of such keys are undefined. */
NOINLINE void load_keys(const struct call *call, const struct part *part, struct scratch *own, const struct block *block) {
    const int64_t dim = padded(call->dim), width = padded(call->value_dim), depth = depth_of(call), step = depth + 16;
    for (int64_t first = block->from / GROUP * GROUP; first < block->to; first += GROUP) {
        for (int64_t i = 0; i < GROUP; i++) {
            const int64_t key = block->position + first + i;
            float *k = own->rows + i * step, *v = own->values + (first + i) * width;
            float *v_dot = own->values_dot + (first + i) * width;
            if (first + i < block->from || first + i >= block->to) {
                memset(v, 0, sizeof(float) * width);
                memset(v_dot, 0, sizeof(float) * width);
                continue;
            }
            read_numbers(k, row_at(&part->k, 0, key), call->dim, &own->peaks.k);
            if (call->k_dots) read_numbers(k + dim, row_at(&part->k_dot, 0, key), call->dim, &own->peaks.k_dot);
            read_numbers(v, row_at(&part->v, 0, key), call->value_dim, &own->peaks.v);
            if (call->v_dots) read_numbers(v_dot, row_at(&part->v_dot, 0, key), call->value_dim, &own->peaks.v_dot);
        }
        panel_columns(own->panels, own->rows, step, first, depth);
    }
}

/* Return the keys of the block that a row sees. */
INLINE struct range seen_by(const struct part *part, const struct block *block, int64_t row) {
    const int64_t at = part->first + row % part->count - block->position;
    const int64_t low = greater(block->from, at + part->low), high = lesser(block->to, at + part->high);
    return low < high ? (struct range){low, high} : (struct range){0, 0};
}

/* Return the smallest range between multiples of GROUP that contains all keys that some rows see. */
INLINE struct range hull_of(const struct part *part, const struct block *block, int64_t first, int64_t rows) {
    struct range hull = {BLOCK, 0};
    for (int64_t r = first; r < first + rows; r++) {
        const struct range seen = seen_by(part, block, r);
        if (seen.low == seen.high) continue;
        hull.low = lesser(hull.low, seen.low / GROUP * GROUP);
        hull.high = greater(hull.high, rounded(seen.high, GROUP));
    }
    return hull.high ? hull : (struct range){0, 0};
}

/* ---- one block of keys ---- */

/* Write s and ṡ, not yet multiplied by the scale, of up to TALL rows and the keys of a hull. */
NOINLINE void multiply_keys(const struct call *call, const struct scratch *own, int64_t row, float *s, float *s_dot,
                            struct range hull, int64_t rows) {
    const int64_t dim = padded(call->dim), deep = depth_of(call);
    const float *pair = own->pairs + row * 2 * dim, *left = pair + (call->q_dots ? 0 : dim);
    const int64_t top = call->q_dots ? 0 : dim, depth = (call->q_dots && call->k_dots ? dim : 0) + call->dim;
    for (int64_t at = hull.low, end; at < hull.high; at = end) {
        const int64_t panel = at / PANEL * PANEL;
        const float *columns = own->panels + panel * deep + at % PANEL;
        end = lesser(panel + PANEL, hull.high);
        tile_of_any(s + at, BLOCK, pair + dim, 2 * dim, 1, columns, PANEL, call->dim, 0, WRITE, rows, (end - at) / LANES);
        if (call->q_dots || call->k_dots)
            tile_of_any(s_dot + at, BLOCK, left, 2 * dim, 1, columns + top * PANEL, PANEL, depth, 0, WRITE, rows,
                        (end - at) / LANES);
    }
}

/* Compute P and P∘ṡ of one row and the keys of a hull, 0 for keys that the row does not see, and add P∘ṡ to its sums. */
INLINE void weigh_row(const struct call *call, float *p, float *weights, float lse, floats *sums, struct range hull,
                      struct range seen, const int all, const int dots) {
    const float scale = (float)call->scale;
    floats sum[SUMS];
    for (int i = 0; i < SUMS; i++) sum[i] = sums[i];
    for (int64_t at = hull.low; at < hull.high; at += 16)
#pragma GCC unroll 4
        for (int i = 0; i < SUMS; i++) {
            const int64_t key = at + i * LANES;
            floats x = exponential(multiply_add(load_floats(p + key), splat(scale), splat(-lse)));
            floats y = dots ? x * (load_floats(weights + key) * scale) : splat(0);
            if (!all) {
                const ints j = each_lane() + (int32_t)key, visible = (j >= (int32_t)seen.low) & (j < (int32_t)seen.high);
                x = only(visible, x);
                y = only(visible, y);
            }
            sum[i] = sum[i] + y;
            store_floats(p + key, x);
            if (dots) store_floats(weights + key, y);
        }
    for (int i = 0; i < SUMS; i++) sums[i] = sum[i];
}

NOINLINE void weigh(const struct call *call, float *p, float *weights, float lse, floats *sums, struct range hull,
                    struct range seen) {
    const int dots = call->q_dots || call->k_dots;
    if (dots && seen.low == hull.low && seen.high == hull.high)
        weigh_row(call, p, weights, lse, sums, hull, seen, 1, 1);
    else if (dots)
        weigh_row(call, p, weights, lse, sums, hull, seen, 0, 1);
    else
        weigh_row(call, p, weights, lse, sums, hull, seen, 0, 0);
}

/* Add the sum of rows of values weighted by p to rows of o_dot, up to WIDE vectors wide. */
NOINLINE void add_values(float *o_dot, int64_t width, const float *p, const float *values, int64_t count, int64_t rows,
                         int64_t vectors) {
    tile_of_any(o_dot, width, p, BLOCK, 1, values, width, count, 0, ADD, rows, vectors);
}

/* Add what one block of keys contributes to all rows of a head. */
INLINE void take_block(const struct call *call, const struct part *part, struct scratch *own, const struct block *block) {
    const int64_t all = call->group * part->count, width = padded(call->value_dim);
    for (int64_t first = 0; first < all; first += STRIP) {
        const int64_t count = lesser(STRIP, all - first);
        struct range hulls[STRIP / TALL];
        for (int64_t r = 0; r < count; r += TALL) {
            const int64_t rows = lesser(TALL, count - r);
            const struct range hull = hulls[r / TALL] = hull_of(part, block, first + r, rows);
            if (hull.low == hull.high) continue;
            multiply_keys(call, own, first + r, own->p + r * BLOCK, own->weights + r * BLOCK, hull, rows);
            for (int64_t i = r; i < r + rows; i++)
                weigh(call, own->p + i * BLOCK, own->weights + i * BLOCK, own->lse[first + i],
                      own->sums + (first + i) * SUMS, hull, seen_by(part, block, first + i));
        }
        for (int64_t at = 0; at < width; at += PANEL)
            for (int64_t r = 0; r < count; r += TALL) {
                const struct range hull = hulls[r / TALL];
                const int64_t rows = lesser(TALL, count - r), vectors = lesser(width - at, PANEL) / LANES;
                float *o_dot = own->o_dot + (first + r) * width + at;
                if (hull.low == hull.high) continue;
                if (call->q_dots || call->k_dots)
                    add_values(o_dot, width, own->weights + r * BLOCK + hull.low, own->values + hull.low * width + at,
                               hull.high - hull.low, rows, vectors);
                if (call->v_dots)
                    add_values(o_dot, width, own->p + r * BLOCK + hull.low, own->values_dot + hull.low * width + at,
                               hull.high - hull.low, rows, vectors);
            }
    }
}

/* ---- parts ---- */

/* Write ȯ and l̇se of all rows of a head. */
INLINE void finish(const struct call *call, const struct part *part, struct scratch *own) {
    const int64_t width = padded(call->value_dim);
    for (int64_t r = 0; r < call->group * part->count; r++) {
        const int64_t head = r / part->count, query = part->first + r % part->count;
        const float lse_dot = sum_of_16(own->sums + r * SUMS);
        float *o_dot = own->o_dot + r * width;
        read_row(own->o, row_at(&part->o, head, query), FLOAT32, call->value_dim);
        for (int64_t d = 0; d < width; d += LANES)
            store_floats(o_dot + d, multiply_add(splat(-lse_dot), load_floats(own->o + d), load_floats(o_dot + d)));
        write_row((char *)row_at(&part->o_dot, head, query), FLOAT32, o_dot, call->value_dim);
        memcpy((char *)row_at(&part->lse_dot, head, query), &lse_dot, sizeof lse_dot);
    }
}

/* Return the part with only its key/value head number `head`. */
INLINE struct part of_head(const struct call *call, struct part part, int64_t head) {
    struct rows *of_queries[] = {&part.q, &part.q_dot, &part.o, &part.lse, &part.o_dot, &part.lse_dot};
    struct rows *of_keys[] = {&part.k, &part.k_dot, &part.v, &part.v_dot};
    for (int n = 0; n < 6; n++)
        if (of_queries[n]->at) of_queries[n]->at += head * call->group * of_queries[n]->head;
    for (int n = 0; n < 4; n++)
        if (of_keys[n]->at) of_keys[n]->at += head * of_keys[n]->head;
    return part;
}

/* Compute a part that has only one key/value head. Return whether its numbers are usual. */
INLINE int compute(const struct call *call, const struct part *part, struct scratch *own) {
    const int64_t start = greater(0, part->first + part->low);
    const int64_t stop = lesser(part->keys, part->first + part->count - 1 + part->high);
    own->peaks = (struct peaks){{0}, {0}, {0}, {0}, {0}, {0}};
    load_queries(call, part, own);
    for (int64_t position = start / BLOCK * BLOCK; position < stop; position += BLOCK) {
        const struct block block = {position, greater(start - position, 0), lesser(stop - position, BLOCK)};
        load_keys(call, part, own, &block);
        take_block(call, part, own, &block);
    }
    finish(call, part, own);
    return is_usual(call, &own->peaks, part->keys);
}

/* Return whether each tensor that the parts of a call read or write has an address. */
INLINE int has_addresses(const struct call *call) {
    int found = 1;
    for (int64_t n = 0; n < call->count; n++) {
        const struct part *part = call->parts + n;
        if (!part->count || !part->heads) continue;
        found &= part->q.at && part->o.at && part->lse.at && part->o_dot.at && part->lse_dot.at;
        found &= !call->q_dots || part->q_dot.at;
        if (!part->keys) continue;
        found &= part->k.at && part->v.at && (!call->k_dots || part->k_dot.at) && (!call->v_dots || part->v_dot.at);
    }
    return found;
}

/* Compute all parts of a call. Return 0, NO_MEMORY or NO_ADDRESS. */
int PASTE(flashpoint_tangent_, ISA)(const struct call *call) {
    const int64_t dim = padded(call->dim), width = padded(call->value_dim), number = sizeof(float);
    struct scratch own;
    struct memory memory = {0, 0};
    int64_t rows = 0;
    if (!has_addresses(call)) return NO_ADDRESS;
    for (int64_t n = 0; n < call->count; n++) rows = greater(rows, call->group * call->parts[n].count);
    for (int pass = 0; pass < 2; pass++) { /* the first pass counts bytes */
        own.pairs = take(&memory, number * rows * 2 * dim);
        own.o_dot = take(&memory, number * rows * width);
        own.lse = take(&memory, number * rows);
        own.sums = take(&memory, number * rows * 16);
        own.panels = take(&memory, number * BLOCK * depth_of(call));
        own.values = take(&memory, number * BLOCK * width);
        own.values_dot = take(&memory, number * BLOCK * width);
        own.p = take(&memory, number * STRIP * BLOCK);
        own.weights = take(&memory, number * STRIP * BLOCK);
        own.rows = take(&memory, number * GROUP * (depth_of(call) + 16));
        own.o = take(&memory, number * width);
        if (!pass && !reserve(&memory)) return NO_MEMORY;
    }
    for (int64_t n = 0; n < call->count && !*call->unusual; n++)
        for (int64_t head = 0; head < call->parts[n].heads; head++) {
            const struct part part = of_head(call, call->parts[n], head);
            if (!compute(call, &part, &own)) *call->unusual = 1;
        }
    free(memory.start);
    return 0;
}
