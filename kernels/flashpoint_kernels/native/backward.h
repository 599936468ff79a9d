/* The structures of a gradient call, and the common part of backward_float32.h and backward_amx.h: find the keys that a
   query sees, and compute gradients from products of queries and keys. */

#ifndef FLASHPOINT_BACKWARD
#define FLASHPOINT_BACKWARD

#include "memory.h"
#include "options.h"

#ifndef KEYS
#define KEYS 128 /* keys of a block */
#endif

/* `count` queries from `first` on, of one sequence and `heads` key/value heads. Addresses are those of the sequence's
   first row and the part's first head. Query i sees the keys [i + low, i + high) of the sequence's `keys` keys. Outputs
   without an address are not computed. */
struct part {
    int64_t heads;
    struct rows q, o, dout, lse, dlse, dq; /* dout: the gradient of o; lse and dlse are float32; an absent dlse is 0 */
    struct rows k, v, dk, dv;
    float *sums; /* null: write dk and dv. Else float32 (keys, dk and dv as far as they are computed) of one head, to
                    write or to add to */
    int64_t add; /* 1: add to `sums`; 0: write them */
    const float *slopes, *sinks;
    double *dsinks; /* one for each query head; the part adds to them */
    int64_t first, count, keys, low, high;
    int64_t offset; /* ALiBi's distance of query i and key j is |i + offset - j| */
    struct rows mask, dmask;
    struct rows blocks;     /* bool, one row for each `block_queries` queries; queries do not see a false block */
    int64_t sequence, head; /* sequence and head number in dropout's counter */
};

struct call {
    int64_t type, dim, value_dim, group;
    double scale, softcap; /* softcap: 0 is off */
    int64_t mask_type, mask_step; /* stride from key to key in bytes, 0 for one number for all keys */
    double keep;                  /* 1 - dropout_p */
    struct dropout dropout;
    int64_t dmask_step, dmask_adds; /* dmask_adds 1: parts add to a float32 dmask; 0: write it in the mask's type */
    int64_t block_queries, block_keys; /* multiples of 16 */
    int64_t count;
    const struct part *parts;
};

/* The class of the largest magnitude among the elements of a part's tensors. */
enum range {
    USUAL, /* no product overflows */
    LARGE, /* finite, but products may overflow: they then become the largest float32 */
    NONFINITE, /* infinity or NaN, which must not change the results of queries that do not see them */
};

/* The keys of one step: `keys` from `position` on. Its queries see only keys in [from, to), which lies in the block:
   0 <= from <= to <= KEYS. An empty range is [0, 0). */
struct block {
    int64_t position, keys, from, to;
    int all; /* each query sees each key of [from, to) */
};

/* The values lse and delta (see `read_sums`) of each query of a part, head after head, and temporary memory. An lse of
   +inf marks a query that sees no key: its probabilities are 0. */
struct sums {
    float *lse, *delta;
    float *row;      /* memory for two rows of values */
    uint32_t *drawn; /* memory for the random words of a row, for dropout */
};

/* One query's row of S and dP, and later of P and dS. `step` is the stride in floats from 16 keys to the next 16.
   `seen`: null, or memory for one flag per key: whether the query sees the key. */
struct row {
    float *p, *ds;
    int64_t step;
    uint8_t *seen;
};

/* Return whether the part needs the gradients of scores, thus v: dv alone does not. */
INLINE int of_scores(const struct part *part) { return part->dq.at || part->dk.at || part->dmask.at; }

/* ---- the magnitude of elements ---- */

INLINE float number_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Return the largest magnitude in some rows, as the bits of a float32: infinity and NaN are above all numbers. */
INLINE uint32_t largest_bits_of(const char *rows, int64_t step, const enum type type, int64_t count, int64_t dim) {
    ints most = (ints){0};
    for (int64_t i = 0; i < count; i++, rows += step) {
        int64_t d = 0;
        for (; d + LANES <= dim; d += LANES) most = larger_bits(most, load(rows, type, d));
        if (d == dim) continue;
        char end[4 * LANES] = {0};
        memcpy(end, rows + d * size_of(type), (dim - d) * size_of(type));
        most = larger_bits(most, load(end, type, 0));
    }
    int32_t magnitude = 0;
    for (int i = 0; i < LANES; i++)
        if (most[i] > magnitude) magnitude = most[i];
    return (uint32_t)magnitude;
}

NOINLINE uint32_t largest_bits(const char *rows, int64_t step, enum type type, int64_t count, int64_t dim) {
    if (type == FLOAT32) return largest_bits_of(rows, step, FLOAT32, count, dim);
    if (type == FLOAT16) return largest_bits_of(rows, step, FLOAT16, count, dim);
    return largest_bits_of(rows, step, BFLOAT16, count, dim);
}

/* Return the range of the elements of a part's queries, and of the blocks of keys that they see. */
INLINE enum range range_of(const struct call *call, const struct part *part) {
    const enum type type = (enum type)call->type;
    const int64_t low = part->first + part->low, high = part->first + part->count - 1 + part->high;
    const int64_t from = low > 0 ? low / KEYS * KEYS : 0, to = high < part->keys ? rounded(high, KEYS) : part->keys;
    const int64_t keys = (to < part->keys ? to : part->keys) - from; /* count whole blocks */
    uint32_t q = 0, dout = 0, k = 0, v = 0;
    for (int64_t g = 0; g < call->group; g++) {
        const uint32_t x = largest_bits(part->q.at + g * part->q.head + part->first * part->q.row, part->q.row, type,
                                   part->count, call->dim);
        const uint32_t y = largest_bits(part->dout.at + g * part->dout.head + part->first * part->dout.row, part->dout.row,
                                   type, part->count, call->value_dim);
        q = x > q ? x : q;
        dout = y > dout ? y : dout;
    }
    if (keys > 0) {
        k = largest_bits(part->k.at + from * part->k.row, part->k.row, type, keys, call->dim);
        if (of_scores(part)) v = largest_bits(part->v.at + from * part->v.row, part->v.row, type, keys, call->value_dim);
    }
    if (q >= 0x7f800000u || dout >= 0x7f800000u || k >= 0x7f800000u || v >= 0x7f800000u) return NONFINITE;
    const double scale = call->scale > 1 ? call->scale : call->scale < -1 ? -call->scale : 1, most = 0x1p100;
    const double x = number_of(q), y = number_of(k), dp = (double)call->value_dim * number_of(dout) * number_of(v) / call->keep;
    if ((double)call->dim * x * y * scale > most || dp > most) return LARGE;
    const double widest = (x > y ? x : y) * scale, many = (double)(part->count > keys ? part->count : keys);
    return many * call->group * dp * widest > most || many * number_of(dout) / call->keep > most ? LARGE : USUAL;
}

/* ---- queries ---- */

/* Return the product of two rows of `width` numbers, a multiple of 16, with 16 partial sums in float64. */
INLINE double dot(const float *a, const float *b, int64_t width) {
    double sum[16] = {0};
    for (int64_t d = 0; d < width; d += 16)
        for (int l = 0; l < 16; l++) sum[l] += (double)a[d + l] * b[d + l];
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) sum[l] += sum[l + half];
    return sum[0];
}

/* Write lse and delta = o·dO - dlse of a head's queries. An lse of +inf marks a query that sees no key: its
   probabilities are 0. */
INLINE void read_sums(const struct call *call, const struct part *part, struct sums *own, enum range range,
                      int64_t head, int64_t row) {
    const enum type type = (enum type)call->type;
    const float inf = __builtin_inff();
    double dsink = 0;
    for (int64_t i = 0; i < part->count; i++) {
        const int64_t query = part->first + i, width = padded(call->value_dim);
        float *o = own->row, *dout = o + width, lse, dlse = 0;
        read_row(o, part->o.at + head * part->o.head + query * part->o.row, type, call->value_dim);
        read_row(dout, part->dout.at + head * part->dout.head + query * part->dout.row, type, call->value_dim);
        memcpy(&lse, part->lse.at + head * part->lse.head + query * part->lse.row, sizeof lse);
        if (part->dlse.at) memcpy(&dlse, part->dlse.at + head * part->dlse.head + query * part->dlse.row, sizeof dlse);
        double delta = dot(o, dout, width);
        if (range == LARGE) {
            delta = delta > MOST ? MOST : delta < -MOST ? -MOST : delta;
            lse = lse == -inf ? lse : within_range(splat(lse))[0];
        }
        if (lse == -inf)
            lse = inf;
        else
            delta -= dlse;
        if (part->dsinks) dsink -= __builtin_exp((double)part->sinks[head] - lse) * delta;
        own->lse[row + i] = lse;
        own->delta[row + i] = (float)delta;
    }
    if (part->dsinks) part->dsinks[head] += dsink;
}

/* ---- one block of queries and keys ---- */

/* Return whether block `place` is true in any of `rows` rows of a block mask. */
INLINE int any_block(const char *column, int64_t row, int64_t rows, int64_t place) {
    for (int64_t i = 0; i < rows; i++)
        if (column[i * row + place]) return 1;
    return 0;
}

/* Find the range of keys in a block that any of these queries sees. The edges are multiples of `unit`. */
INLINE void see(const struct call *call, const struct part *part, int64_t head, int64_t first, int64_t count,
                int64_t unit, struct block *block) {
    int64_t from = first + part->low - block->position, to = first + count - 1 + part->high - block->position;
    from = from < 0 ? 0 : from / unit * unit;
    to = to > block->keys ? block->keys : to;
    if (part->blocks.at && from < to) {
        const char *rows = part->blocks.at + head * part->blocks.head;
        const int64_t top = first / call->block_queries, bottom = (first + count - 1) / call->block_queries;
#define SEEN(key) any_block(rows + top * part->blocks.row, part->blocks.row, bottom - top + 1, (key) / call->block_keys)
        while (from < to && !SEEN(block->position + from)) from += 16;
        while (from < to && !SEEN(block->position + to - 1)) to = rounded(to, 16) - 16;
#undef SEEN
        from = from / unit * unit;
    }
    to = rounded(to, unit);
    if (from >= to) from = to = 0;
    block->from = from;
    block->to = to;
    block->all = !part->blocks.at && to <= block->keys && first + count - 1 + part->low <= block->position + from &&
                 block->position + to <= first + part->high;
}

/* Write one element for each of the keys [key, key + LANES) below `stop`. */
INLINE void store_keys(char *row, enum type type, int64_t key, int64_t stop, floats x) {
    if (type == FLOAT32 && key + LANES <= stop)
        memcpy(row + 4 * key, &x, sizeof x);
    else
        for (int i = 0; i < LANES && key + i < stop; i++) store(row, type, key + i, x[i]);
}

/* Add one element of x for each of the keys [key, key + LANES) below `stop`; if `step` is 0, add their sum to one
   element. */
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

/* Write zeros to the mask's gradient, for some queries and for the block's keys outside [from, to). Do nothing if parts
   add to the gradient. */
INLINE void clear_mask(const struct call *call, const struct part *part, int64_t head, int64_t first, int64_t count,
                       const struct block *block) {
    const int64_t size = size_of((enum type)call->mask_type), keys = block->keys;
    if (!part->dmask.at || call->dmask_adds) return;
    const int64_t to = block->to < keys ? block->to : keys, from = block->from < to ? block->from : to;
    for (int64_t i = first; i < first + count; i++) {
        char *row = part->dmask.at + head * part->dmask.head + i * part->dmask.row + block->position * size;
        memset(row, 0, from * size);
        memset(row + to * size, 0, (keys - to) * size);
    }
}

/* Compute P from S, and dS from dP, for one query and the block's keys [from, to). `plain` and `range` are compile-time
   constants; `plain`: the scale is the only option, and the range is USUAL. */
INLINE void differentiate(const struct call *call, const struct part *part, const struct sums *sums, struct row row,
                          int64_t place, int64_t head, int64_t query, const struct block *block, const enum range range,
                          const int plain) {
    const float softcap = (float)call->softcap, scale = (float)call->scale, factor = (float)(1 / call->keep);
    const int64_t position = block->position;
    const floats lse = splat(sums->lse[place]), delta = splat(sums->delta[place]);
    const floats rounding = absolute(lse) * 0x1p-20f; /* score - lse is larger only if lse is of other tensors */
    const char *mask = part->mask.at ? part->mask.at + head * part->mask.head + query * part->mask.row : 0;
    char *dmask = part->dmask.at ? part->dmask.at + head * part->dmask.head + query * part->dmask.row : 0;
    const char *blocks = 0;
    const uint32_t *drawn = 0;
    if (!plain && part->blocks.at)
        blocks = part->blocks.at + head * part->blocks.head + query / call->block_queries * part->blocks.row;
    if (!plain && call->dropout.on)
        drawn = draw(&call->dropout, sums->drawn, part->sequence, part->head + head, query, position + block->from,
                     block->to - block->from);
    const int direct = plain || (softcap == 0 && !part->slopes && !mask); /* a score is a product times the scale */
    const ints lanes = each_lane();
    const int64_t low = greater(query + part->low - position, 0);
    const int64_t high = lesser(query + part->high - position, block->keys);
    for (int64_t c = block->from; c < block->to; c += LANES) {
        float *p = row.p + c / 16 * row.step + c % 16, *ds = row.ds + c / 16 * row.step + c % 16;
        const ints j = lanes + (int32_t)c;
        floats x = load_floats(p), dx = load_floats(ds), slope = splat(scale);
        ints visible = lanes >= 0;
        if (range == LARGE) x = within_range(x), dx = within_range(dx);
        if (blocks && c < block->keys && !blocks[(position + c) / call->block_keys]) visible = lanes < 0;
        if (direct) {
            x = multiply_add(x, splat(scale), -lse);
        } else {
            x = x * scale;
            if (range == LARGE) x = within_range(x);
            if (softcap != 0) {
                x = capped(x, softcap);
                const floats t = x / softcap;
                slope = slope * (1.0f - t * t);
            }
            if (part->slopes) x = less_alibi(x, part->slopes[head], j, (int32_t)(query + part->offset - position));
            if (mask) {
                const floats bias = masked(mask, (enum type)call->mask_type, call->mask_step, position + c, part->keys);
                visible &= bias != -__builtin_inff();
                x = x + bias;
            }
            if (range == LARGE) x = within_range(x);
            x = x - lse;
        }
        if (!block->all) visible &= (j >= (int32_t)low) & (j < (int32_t)high);
        if (range == LARGE)
            x = smallest(splat(0), x);
        else
            x = choose(x > rounding, x, smallest(splat(0), x));
        x = exponential(x);
        if (!plain || !block->all) x = only(visible, x);
        floats weight = x;
        if (drawn) weight = kept(&call->dropout, drawn + (c - block->from), x) * factor;
        dx = multiply_add(weight, dx, -(x * delta));
        if (!plain || !block->all) dx = only(visible, dx);
        if (range == LARGE) dx = within_range(dx);
        store_floats(p, weight);
        if (!plain && dmask && call->dmask_adds)
            add_keys(dmask, call->dmask_step, position + c, part->keys, dx);
        else if (!plain && dmask)
            store_keys(dmask, (enum type)call->mask_type, position + c, part->keys, dx);
        dx = dx * slope;
        if (range == LARGE) dx = within_range(dx);
        if (row.seen)
            for (int i = 0; i < LANES; i++) row.seen[c + i] = visible[i] != 0;
        store_floats(ds, dx);
    }
}

NOINLINE void differentiate_plain(const struct call *call, const struct part *part, const struct sums *sums,
                                  struct row row, int64_t place, int64_t head, int64_t query,
                                  const struct block *block) {
    differentiate(call, part, sums, row, place, head, query, block, USUAL, 1);
}

NOINLINE void differentiate_options(const struct call *call, const struct part *part, const struct sums *sums,
                                    struct row row, int64_t place, int64_t head, int64_t query,
                                    const struct block *block) {
    differentiate(call, part, sums, row, place, head, query, block, USUAL, 0);
}

NOINLINE void differentiate_large(const struct call *call, const struct part *part, const struct sums *sums,
                                  struct row row, int64_t place, int64_t head, int64_t query,
                                  const struct block *block) {
    differentiate(call, part, sums, row, place, head, query, block, LARGE, 0);
}

/* Call the version of `differentiate` for the call's options, for one query whose lse and delta are at index `place` of
   `sums`. */
INLINE void differentiate_row(const struct call *call, const struct part *part, const struct sums *sums, struct row row,
                              int64_t place, int64_t head, int64_t query, const struct block *block, enum range range) {
    const int plain = call->softcap == 0 && !part->slopes && !part->mask.at && !part->dmask.at && !part->blocks.at &&
                      !call->dropout.on && range == USUAL;
    if (plain)
        differentiate_plain(call, part, sums, row, place, head, query, block);
    else if (range == LARGE)
        differentiate_large(call, part, sums, row, place, head, query, block);
    else
        differentiate_options(call, part, sums, row, place, head, query, block);
}

#endif
