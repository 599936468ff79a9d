/* The forward pass with AMX, for bfloat16 queries, and keys of bfloat16 or of 8 bits, which are exact in bfloat16.

   Scores are computed as S^T = K Q^T: tiles are loaded from rows of keys in memory, and the lanes of a vector are 16
   queries, so that their softmax needs no sums over lanes. With many rows, o is computed as o^T = V^T P^T. With at most
   16 rows it is computed as o = P V, which does not transpose the values. Both sum over keys in the same order, so the
   bits are the same. Rows of zeros fill up the last tile. */

#include "tiles.h"

#ifndef BLOCK
#define BLOCK 256
#endif
#define STEPS (BLOCK / STEP)
#define QUERIES 16     /* queries of a tile */
#define STRIP 32       /* rows of a strip, two tiles: a block is computed strip by strip */
#define SCORES (BLOCK * QUERIES)
#define PAIRS (STEPS * TILE_BYTES) /* bytes of a tile of queries in p */
#define FEW 2          /* with at most this number of tiles of rows, the next block is prefetched key by key */

#if LANES != 16
#error "queries are the 16 lanes of a vector"
#endif

/* Magnitudes of STEP numbers in bfloat16, as bits. */
typedef uint16_t magnitudes __attribute__((vector_size(2 * STEP)));

/* Two groups of keys or values, loaded as rows of tiles. `step` is the stride from row to row in bytes. */
struct rows_of_keys {
    const char *at[2];
    int64_t step;
};

struct scratch {
    struct keys keys[2];
    char *q;                      /* for each tile of queries and each STEP of dim, a tile of b */
    float *o;                     /* (rows, value_dim) of this chunk; valid after `end_chunk` */
    float *tiles;                 /* o in tiles: (queries / 16, value_dim, 16), or with one tile (value_dim / 16, 16, 16) */
    float *most, *sum;            /* (rows): largest scores and sums of this chunk */
    float *s[2];                  /* a strip's scores (BLOCK / 16, tiles of queries, 16 keys, 16 queries) */
    char *p;                      /* a strip's probabilities as tiles of b */
    char *turned;                 /* p as tiles of a, for one tile of queries */
    char *values;                 /* the block's values, as tiles of a, or as tiles of b for one tile of queries */
    char *k_rows, *v_rows;        /* (BLOCK, dim), (BLOCK, value_dim): copies of rows that tiles cannot load in place */
    char *infinite;               /* (BLOCK, value_dim): values before the removal of infinities and NaN */
    char *pairs;                  /* a tile of b for each 16 columns */
    float *row;                   /* a row in float32 */
    float *by_query;              /* (16, BLOCK): scores of 16 queries, for options */
    uint32_t *drawn, *room;       /* for dropout: words of a strip, (BLOCK, 16) for each tile, and of 16 queries */
    struct sight *sights;
    struct rows_of_keys k[STEPS], v[STEPS];
    int64_t tiles_of_queries, used; /* used: rows of a tile of queries, if there is only one */
    int64_t dim, value_dim;         /* multiples of STEP */
    float q_peak; /* the largest absolute value in q; infinity if q has an infinity or a NaN */
    struct tile_shapes before; /* the thread's tile configuration before the call */
};

INLINE int64_t in_steps(int64_t dim) { return (dim + STEP - 1) / STEP * STEP; }

/* Return the number of tiles of queries: 1, or an even number. */
INLINE int64_t tiles_of(int64_t rows) { return rows <= QUERIES ? 1 : (rows + STRIP - 1) / STRIP * 2; }

INLINE void place(struct scratch *own, struct memory *memory, const struct call *call, int64_t rows) {
    const int64_t dim = in_steps(call->dim), value_dim = in_steps(call->value_dim), all = tiles_of(rows) * QUERIES;
    own->dim = dim;
    own->value_dim = value_dim;
    own->q = take(memory, all * dim * 2);
    own->o = take(memory, all * padded(call->value_dim) * 4);
    own->tiles = take(memory, all * value_dim * 4);
    own->most = take(memory, all * 4);
    own->sum = take(memory, all * 4);
    for (int n = 0; n < 2; n++) own->s[n] = take(memory, 2 * SCORES * 4);
    own->p = take(memory, 2 * PAIRS);
    own->turned = take(memory, PAIRS);
    own->values = take(memory, BLOCK * value_dim * 2);
    own->k_rows = take(memory, BLOCK * dim * 2);
    own->v_rows = take(memory, BLOCK * value_dim * 2);
    own->infinite = take(memory, BLOCK * value_dim * 2);
    own->pairs = take(memory, value_dim / 16 * TILE_BYTES);
    own->row = take(memory, greater(dim, value_dim) * 4);
    own->by_query = take(memory, QUERIES * BLOCK * 4);
    own->drawn = take(memory, 2 * SCORES * 4);
    own->room = take(memory, sizeof *own->room * (ROOM(BLOCK) + BLOCK * QUERIES));
    own->sights = take(memory, sizeof *own->sights * all);
    for (int n = 0; n < 2; n++) own->keys[n].copies = take(memory, copy_size(call, BLOCK));
}

INLINE void begin(struct scratch *own) { tile_configure(&own->before); }
INLINE void end(struct scratch *own) { tile_restore(&own->before); }

INLINE void locate(struct keys *keys, const struct call *call, const struct task *task, int64_t head, int64_t position) {
    locate_block(keys, call, task, head, position, BLOCK);
}

/* ---- keys and values ---- */

/* Copy a row to bfloat16, with zeros up to `width`. */
INLINE void copy_row(char *to, const char *from, enum type type, int64_t dim, int64_t width, float *row) {
    if (type == BFLOAT16) {
        memcpy(to, from, dim * 2);
        memset(to + dim * 2, 0, (width - dim) * 2);
        return;
    }
    read_row(row, from, type, dim);
    for (int64_t d = padded(dim); d < width; d++) row[d] = 0;
    for (int64_t d = 0; d < width; d += LANES) store_shorts(to + 2 * d, BFLOAT16, load_floats(row + d));
}

INLINE int64_t step_of(const struct group *group, const int value) { return value ? group->v_step : group->k_step; }
INLINE const char *row_of(const struct group *group, const int value) { return value ? group->v : group->k; }

/* Return the rows of two groups, of values if `value`, else of keys. Use rows in place if `copied` is 0 and all of them
   exist, are bfloat16, fill whole tiles and have one stride; otherwise copy them. */
INLINE struct rows_of_keys find_rows(const struct call *call, struct scratch *own, const struct keys *keys, int64_t first,
                                     const int value, int copied) {
    const struct group *group = keys->groups + first / GROUP;
    const enum type type = (enum type)call->k_type;
    const int64_t dim = value ? call->value_dim : call->dim, width = value ? own->value_dim : own->dim;
    if (!copied && type == BFLOAT16 && dim == width && keys->from <= first && first + STEP <= keys->to &&
        step_of(group, value) == step_of(group + 1, value))
        return (struct rows_of_keys){{row_of(group, value), row_of(group + 1, value)}, step_of(group, value)};
    char *to = (value ? own->v_rows : own->k_rows) + first * width * 2;
    for (int64_t i = 0; i < STEP; i++) {
        const struct group *its = group + i / GROUP;
        if (first + i < keys->from || first + i >= keys->to)
            memset(to + i * width * 2, 0, width * 2);
        else
            copy_row(to + i * width * 2, row_of(its, value) + i % GROUP * step_of(its, value), type, dim, width, own->row);
    }
    return (struct rows_of_keys){{to, to + GROUP * width * 2}, width * 2};
}

INLINE const char *key_row(const struct rows_of_keys *rows, int64_t key) {
    return rows[key / STEP].at[key % STEP / GROUP] + key % GROUP * rows[key / STEP].step;
}

INLINE magnitudes largest_shorts(magnitudes x, magnitudes y) {
#if defined(__AVX512F__)
    return (magnitudes)_mm512_max_epu16((__m512i)x, (__m512i)y);
#else
    const magnitudes larger = (magnitudes)(x > y);
    return (x & larger) | (y & ~larger);
#endif
}

/* Read a bfloat16 row in steps of STEP elements. Return in each of STEP lanes the largest of `peak` and the lane's
   magnitudes, as bits. As bits, infinity and NaN are larger than all finite numbers. */
INLINE magnitudes peak_of_row(magnitudes peak, const char *row, int64_t width) {
    for (int64_t d = 0; d < width; d += STEP) {
        magnitudes x;
        memcpy(&x, row + 2 * d, sizeof x);
        x &= 0x7fff;
        peak = largest_shorts(peak, x);
    }
    return peak;
}

INLINE float peak_of(magnitudes bits) {
    uint16_t numbers[32], most = 0;
    memcpy(numbers, &bits, sizeof bits);
    for (int i = 0; i < 32; i++)
        if (numbers[i] > most) most = numbers[i];
    const uint32_t wide = (uint32_t)most << 16;
    float found;
    memcpy(&found, &wide, sizeof found);
    return found <= MOST ? found : __builtin_inff();
}

INLINE void load_queries(const struct call *call, const struct task *task, struct scratch *own, int64_t head) {
    const int64_t rows = call->group * task->own.queries, bytes = own->dim * 2;
    magnitudes peak = {0};
    struct cursor cursor = first_row(task);
    own->tiles_of_queries = tiles_of(rows);
    own->used = rows;
    for (int64_t first = 0; first < own->tiles_of_queries * QUERIES; first += QUERIES) {
        memset(own->k_rows, 0, QUERIES * bytes); /* use it as temporary memory: it is not needed yet */
        for (int64_t r = first; r < lesser(first + QUERIES, rows); r++)
            memcpy(own->k_rows + (r - first) * bytes, next_query(call, &cursor, head), call->dim * 2);
        for (int64_t r = 0; r < QUERIES; r++) peak = peak_of_row(peak, own->k_rows + r * bytes, own->dim);
        columns_of_rows(own->q + first * bytes, own->k_rows, bytes, own->dim);
    }
    own->q_peak = peak_of(peak);
}

INLINE float peak_of_keys(const struct rows_of_keys *rows, const struct keys *keys, int64_t width) {
    magnitudes peak = {0};
    for (int64_t j = keys->from; j < keys->to; j++) peak = peak_of_row(peak, key_row(rows, j), width);
    return peak_of(peak);
}

/* Replace infinities and NaN in the block's values by 0: for a row that does not see them, a probability of 0 times
   infinity would be NaN. Return whether there were any. */
INLINE int take_out_infinite(struct scratch *own, const struct keys *keys) {
    const int64_t bytes = own->value_dim * 2;
    if (peak_of_keys(own->v, keys, own->value_dim) <= MOST) return 0;
    for (int64_t j = keys->from; j < keys->to; j++)
        memcpy(own->infinite + j * bytes, key_row(own->v, j), bytes);
    for (int64_t j = keys->from / STEP; j * STEP < keys->to; j++) {
        char *to = own->v_rows + j * STEP * bytes;
        for (int64_t i = 0; i < STEP; i++) {
            char *row = to + i * bytes;
            memmove(row, key_row(own->v, j * STEP + i), bytes); /* the row may already be there: see `find_rows` */
            for (int64_t d = 0; d < own->value_dim; d++) {
                uint16_t bits;
                memcpy(&bits, row + 2 * d, sizeof bits);
                if ((bits & 0x7f80) == 0x7f80) memset(row + 2 * d, 0, sizeof bits);
            }
        }
        own->v[j] = (struct rows_of_keys){{to, to + GROUP * bytes}, bytes};
    }
    return 1;
}

/* Prefetch STEP rows of the next block, from row `first` on. */
INLINE void prefetch_step(const struct keys *next, int64_t first, const int value, int64_t bytes) {
    for (int64_t j = greater(first, next->from); j < lesser(first + STEP, next->to); j++) {
        const struct group *group = next->groups + j / GROUP;
        const char *row = row_of(group, value) + j % GROUP * step_of(group, value);
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(row + at, 0, 2);
    }
}

/* Write the block's values as tiles. */
INLINE void pack_values(struct scratch *own, const struct keys *keys, const int few) {
    const int64_t tiles = own->value_dim / 16;
    for (int64_t j = keys->from / STEP; j * STEP < keys->to; j++) {
        const struct rows_of_keys rows = own->v[j];
        char *to = own->values + j * tiles * TILE_BYTES, *pairs = few ? to : own->pairs;
        pairs_of_rows(pairs, rows.at[0], rows.step, own->value_dim);
        pairs_of_rows(pairs + TILE_BYTES / 2, rows.at[1], rows.step, own->value_dim);
        if (!few) exchange_tiles(to, pairs, tiles);
    }
}

/* ---- matrix products ---- */

/* The smallest range of steps [low, high), of STEP keys each, that contains all keys that the rows of a strip see. */
struct hull {
    int64_t low, high;
};

INLINE struct hull hull_of(const struct scratch *own, int64_t first, int64_t rows) {
    int64_t low = BLOCK, high = 0;
    for (int64_t r = first; r < first + rows; r++) {
        const struct sight sight = own->sights[r];
        if (sight.low >= sight.high) continue;
        low = lesser(low, sight.low);
        high = greater(high, sight.high);
    }
    return high ? (struct hull){low / STEP, (high + STEP - 1) / STEP} : (struct hull){0, 0};
}

/* Write the products of STEP keys and a strip's queries, which start at tile `tile`. */
INLINE void multiply_keys(const struct scratch *own, float *s, int64_t tile, int64_t step, const int tiles) {
    const struct rows_of_keys k = own->k[step];
    const int64_t steps = own->dim / STEP;
    multiply_tiles(s + step * 2 * tiles * 256, tiles * 256, 256, (struct left){k.at[0], k.at[1] - k.at[0], k.step, 64},
                   (struct right){own->q + tile * steps * TILE_BYTES, steps * TILE_BYTES, TILE_BYTES}, steps, 2, tiles, 0,
                   own->used);
}

/* Add to o the product of a strip's probabilities p and the values of the steps in `hull`. */
INLINE void add_values(const struct scratch *own, int64_t tile, struct hull hull, const int tiles) {
    const int64_t columns = own->value_dim / 16, steps = hull.high - hull.low;
    const char *values = own->values + hull.low * columns * TILE_BYTES;
    if (tiles == 1) {
        exchange_tiles(own->turned, own->p + hull.low * TILE_BYTES, steps);
        for (int64_t c = 0; c < columns; c += 2)
            multiply_tiles(own->tiles + c * 256, 0, 256, (struct left){own->turned, 0, 64, TILE_BYTES},
                           (struct right){values + c * TILE_BYTES, TILE_BYTES, columns * TILE_BYTES}, steps, 1, 2, 1,
                           own->used);
        return;
    }
    for (int64_t c = 0; c < columns; c += 2)
        multiply_tiles(own->tiles + (tile * columns + c) * 256, 256, columns * 256,
                       (struct left){values + c * TILE_BYTES, TILE_BYTES, 64, columns * TILE_BYTES},
                       (struct right){own->p + hull.low * TILE_BYTES, PAIRS, TILE_BYTES}, steps, 2, 2, 1, 16);
}

INLINE float bfloat16_at(const char *p) {
    uint16_t bits;
    memcpy(&bits, p, sizeof bits);
    const uint32_t wide = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &wide, sizeof x);
    return x;
}

/* Correct the products of a tile of queries and one key that overflowed: they are infinite or NaN although the query
   and the key are finite. */
NOINLINE void put_right(const struct scratch *own, float *s, int64_t tile, int64_t key) {
    const char *k = key_row(own->k, key), *q = own->q + tile * own->dim / STEP * TILE_BYTES;
    for (int64_t i = 0; i < QUERIES; i++) {
        double sum = 0;
        for (int64_t d = 0; d < own->dim && sum - sum == 0 && !is_finite(s[i]); d++)
            sum += (double)bfloat16_at(q + d / STEP * TILE_BYTES + d % STEP / 2 * 64 + i * 4 + d % 2 * 2) *
                   (double)bfloat16_at(k + 2 * d);
        if (!is_finite(s[i]) && sum - sum == 0) s[i] = product_of(sum);
    }
}

INLINE void put_right_all(const struct scratch *own, float *s, int64_t tile, struct hull hull, const int tiles) {
    ints peak = {0};
    for (const float *at = s + hull.low * 2 * tiles * 256; at < s + hull.high * 2 * tiles * 256; at += LANES)
        peak = larger_bits(peak, load_floats(at));
    if (in_all_lanes(is_number((floats)peak))) return;
    for (int64_t j = hull.low * STEP; j < hull.high * STEP; j++)
        for (int64_t n = 0; n < tiles; n++) {
            float *at = s + (j / 16 * tiles + n) * 256 + j % 16 * 16;
            if (!in_all_lanes(is_number(load_floats(at))))
                put_right(own, at, tile + n, j);
        }
}

/* Add to a row of o the values that `take_out_infinite` removed, weighted by p, for the keys that the row sees. */
NOINLINE void add_infinite(const struct call *call, const struct task *task, struct scratch *own, const struct keys *keys,
                           int64_t head, int64_t row, const char *p, const int tiles) {
    const int64_t tile = row / QUERIES, lane = row % QUERIES;
    for (int64_t j = own->sights[row].low; j < own->sights[row].high; j++) {
        if (!sees(call, task, keys, own->sights[row], row % task->own.queries, head * call->group + row / task->own.queries, j))
            continue;
        const float weight = bfloat16_at(p + j / STEP * TILE_BYTES + j % STEP / 2 * 64 + lane * 4 + j % 2 * 2);
        for (int64_t d = 0; d < call->value_dim; d++) {
            const float v = bfloat16_at(own->infinite + (j * own->value_dim + d) * 2);
            float *o = tiles == 1 ? own->tiles + d / 16 * 256 + lane * 16 + d % 16
                                  : own->tiles + (tile * own->value_dim + d) * 16 + lane;
            if (!is_finite(v)) *o += weight * v;
        }
    }
}

/* ---- the softmax of 16 queries ---- */

struct lanes {
    floats base, even, odd; /* `base` is subtracted from scores; `even` and `odd` are sums over even and odd keys */
};

/* Replace a tile of queries' products with keys by scores, query by query. `s` starts at the tile's first key. */
NOINLINE void adjust_tile(const struct call *call, const struct task *task, struct scratch *own, const struct keys *keys,
                          int64_t head, float *s, int64_t tile, struct hull hull, const int tiles) {
    const int64_t rows = call->group * task->own.queries;
    for (int64_t t = hull.low * 2; t < hull.high * 2; t++)
        transpose_rows((char *)(own->by_query + t * 16), BLOCK * 4, (const char *)(s + t * tiles * 256), 64);
    for (int64_t r = tile * QUERIES; r < lesser((tile + 1) * QUERIES, rows); r++)
        adjust(call, task, keys, own->by_query + r % QUERIES * BLOCK, r % task->own.queries,
               head * call->group + r / task->own.queries, greater(hull.low * STEP, keys->from),
               lesser(hull.high * STEP, keys->to));
    for (int64_t t = hull.low * 2; t < hull.high * 2; t++)
        transpose_rows((char *)(s + t * tiles * 256), 64, (const char *)(own->by_query + t * 16), BLOCK * 4);
}

/* Write dropout's random words (BLOCK, 16) for a tile of queries. */
NOINLINE void draw_tile(const struct call *call, const struct task *task, struct scratch *own, const struct keys *keys,
                        int64_t head, int64_t tile, uint32_t *to) {
    const int64_t rows = call->group * task->own.queries;
    for (int64_t r = tile * QUERIES; r < lesser((tile + 1) * QUERIES, rows); r++)
        draw(&call->dropout, own->room + r % QUERIES * BLOCK, task->sequence,
             task->query_head + head * call->group + r / task->own.queries, task->first_query + r % task->own.queries,
             keys->position, keys->to);
    for (int64_t t = 0; t * 16 < keys->to; t++)
        transpose_rows((char *)(to + t * 256), 64, (const char *)(own->room + t * 16), BLOCK * 4);
}

/* Set the scores of keys that queries do not see to -inf. */
INLINE void remove_unseen(const struct sight *sights, float *s, struct hull hull, const int tiles) {
    ints low;
    words count, groups;
    for (int i = 0; i < QUERIES; i++) {
        low[i] = sights[i].low;
        count[i] = (uint32_t)(sights[i].high - sights[i].low);
        groups[i] = sights[i].groups;
    }
    for (int64_t j = hull.low * STEP; j < hull.high * STEP; j++) {
        float *at = s + j / 16 * tiles * 256 + j % 16 * 16;
        const words after = (words)((int32_t)j - low);
        const ints seen = (after < count) & ((groups & 1u << j / GROUP) != 0);
        store_floats(at, choose(seen, load_floats(at), splat(-__builtin_inff())));
    }
}

INLINE floats largest_of(const float *s, struct hull hull, const int tiles) {
    const floats least = splat(-__builtin_inff());
    floats most[4] = {least, least, least, least};
    for (int64_t t = hull.low * 2; t < hull.high * 2; t++)
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) most[i % 4] = largest(load_floats(s + t * tiles * 256 + i * 16), most[i % 4]);
    return largest(largest(most[0], most[1]), largest(most[2], most[3]));
}

/* Multiply o of a tile of queries by the factors `alpha`. A factor of 1 does not change a row's bits. */
INLINE void rescale(struct scratch *own, int64_t tile, floats alpha, const int tiles) {
    if (in_all_lanes(alpha == 1)) return;
    float *o = own->tiles + tile * own->value_dim * 16;
    for (int64_t d = 0; d < own->value_dim; d++)
        store_floats(o + d * 16, load_floats(o + d * 16) * (tiles == 1 ? splat(alpha[d % 16]) : alpha));
}

/* Find the largest score of each query in a tile, and multiply its earlier sums and o by the resulting factor. */
INLINE struct lanes begin_softmax(struct scratch *own, const float *s, int64_t tile, struct hull hull, float factor,
                                  const int tiles) {
    float *most = own->most + tile * QUERIES;
    const floats old = load_floats(most), found = largest(largest_of(s, hull, tiles), old);
    const floats base = choose(found == -__builtin_inff(), splat(0), found);
    const floats alpha = choose(old == found, splat(1), exponential2((old - base) * factor));
    store_floats(most, found);
    rescale(own, tile, alpha, tiles);
    return (struct lanes){base, load_floats(own->sum + tile * QUERIES) * alpha, splat(0)};
}

/* Compute probabilities from the scores of STEP keys, and store those of two consecutive keys as pairs. `drawn` is null
   without dropout, `v_scale` is null without scales. */
INLINE void exponentials(const struct call *call, const float *s, char *p, struct lanes *lanes, int64_t step, float factor,
                         const uint32_t *drawn, const float *v_scale, const int tiles) {
    const floats base = lanes->base;
    floats even = lanes->even, odd = lanes->odd;
    for (int64_t t = 2 * step; t < 2 * step + 2; t++) {
        const float *at = s + t * tiles * 256;
#pragma GCC unroll 4
        for (int i = 0; i < 16; i += 2) {
            floats a = exponential2((load_floats(at + i * 16) - base) * factor);
            floats b = exponential2((load_floats(at + i * 16 + 16) - base) * factor);
            even = even + a;
            odd = odd + b;
            if (drawn) {
                a = kept(&call->dropout, drawn + (t * 16 + i) * 16, a);
                b = kept(&call->dropout, drawn + (t * 16 + i + 1) * 16, b);
            }
            if (v_scale) {
                a = a * v_scale[t * 16 + i];
                b = b * v_scale[t * 16 + i + 1];
            }
            const words pairs = pairs_of(a, b);
            memcpy(p + t * TILE_BYTES / 2 + i * 32, &pairs, sizeof pairs);
        }
    }
    lanes->even = even;
    lanes->odd = odd;
}

INLINE void begin_chunk(const struct call *call, struct scratch *own, int64_t rows) {
    (void)call, (void)rows;
    const int64_t all = own->tiles_of_queries * QUERIES;
    for (int64_t r = 0; r < all; r++) own->most[r] = -__builtin_inff(), own->sum[r] = 0;
    memset(own->tiles, 0, sizeof(float) * all * own->value_dim);
}

/* Convert o from tiles to rows. */
INLINE void end_chunk(const struct call *call, struct scratch *own, int64_t rows) {
    const int64_t width = padded(call->value_dim);
    for (int64_t first = 0; first < rows; first += QUERIES)
        for (int64_t d = 0; d < width; d += 16) {
            const float *from = own->tiles + first * own->value_dim + d * 16;
            if (own->tiles_of_queries > 1)
                transpose_rows((char *)(own->o + first * width + d), width * 4, (const char *)from, 64);
            else
                for (int i = 0; i < 16; i++) memcpy(own->o + i * width + d, from + i * 16, 64);
        }
}

/* ---- one block of keys ---- */

/* The data that all strips of a block share. */
struct block {
    const struct keys *keys, *next; /* next: the block to prefetch */
    int64_t head, rows;
    /* whole: all rows see all keys; in_range: products cannot exceed float32's range; infinite: `take_out_infinite`
       replaced values */
    int whole, in_range, infinite;
};

INLINE void multiply_step(const struct call *call, struct scratch *own, const struct block *block, float *s, int64_t tile,
                          int64_t step, const int tiles) {
    if (tile == 0) prefetch_step(block->next, step * STEP, 0, call->dim * size_of((enum type)call->k_type));
    multiply_keys(own, s, tile, step, tiles);
}

/* Return whether a tile of queries sees all keys of the hull. */
INLINE int sees_all(const struct sight *sights, struct hull hull) {
    int all = 1;
    for (int i = 0; i < QUERIES; i++)
        all &= (sights[i].low <= hull.low * STEP) & (sights[i].high >= hull.high * STEP) & (sights[i].groups == ~0u);
    return all;
}

/* Compute scores from a strip's products, and begin the softmax. */
INLINE void begin_strip(const struct call *call, const struct task *task, const struct units *units, struct scratch *own,
                        const struct block *block, float *s, int64_t tile, struct hull hull, struct lanes *lanes,
                        const int tiles) {
    if (!block->in_range) put_right_all(own, s, tile, hull, tiles);
    for (int n = 0; n < tiles; n++) {
        const struct sight *sights = own->sights + (tile + n) * QUERIES;
        if (units->adjusts)
            adjust_tile(call, task, own, block->keys, block->head, s + n * 256, tile + n, hull, tiles);
        if (!sees_all(sights, hull)) remove_unseen(sights, s + n * 256, hull, tiles);
        lanes[n] = begin_softmax(own, s + n * 256, tile + n, hull, units->factor, tiles);
        if (call->dropout.on)
            draw_tile(call, task, own, block->keys, block->head, tile + n, own->drawn + n * SCORES);
    }
}

/* Add a block to the softmax of all rows, strip by strip. The next strip's products are computed between the
   exponentials of this one, so that the processor's tile unit and vector unit work at the same time. */
INLINE void take_strips(const struct call *call, const struct task *task, const struct units *units, struct scratch *own,
                        const struct block *block, const int tiles) {
    const int64_t strip = tiles * QUERIES, all = own->tiles_of_queries;
    float *now = own->s[0], *later = own->s[1];
    const float *v_scale = call->k_type >= INT8 ? block->keys->v_scale : 0;
    struct hull hull = hull_of(own, 0, strip);
    for (int64_t j = hull.low; j < hull.high; j++) multiply_step(call, own, block, now, 0, j, tiles);
    for (int64_t tile = 0; tile < all; tile += tiles) {
        const int64_t after = tile + tiles;
        struct hull soon = after < all ? hull_of(own, after * QUERIES, strip) : (struct hull){0, 0};
        int64_t done = soon.low;
        struct lanes lanes[2] = {0};
        if (hull.high) begin_strip(call, task, units, own, block, now, tile, hull, lanes, tiles);
        for (int64_t j = hull.low; j < hull.high; j++) {
            if (done < soon.high) multiply_step(call, own, block, later, after, done++, tiles);
            if (tile == 0) prefetch_step(block->next, j * STEP, 1, call->value_dim * size_of((enum type)call->k_type));
#pragma GCC unroll 2
            for (int n = 0; n < tiles; n++) {
                if (call->dropout.on || v_scale)
                    exponentials(call, now + n * 256, own->p + n * PAIRS, lanes + n, j, units->factor,
                                 call->dropout.on ? own->drawn + n * SCORES : 0, v_scale, tiles);
                else
                    exponentials(call, now + n * 256, own->p + n * PAIRS, lanes + n, j, units->factor, 0, 0, tiles);
            }
        }
        while (done < soon.high) multiply_step(call, own, block, later, after, done++, tiles);
        if (hull.high) {
            for (int n = 0; n < tiles; n++)
                store_floats(own->sum + (tile + n) * QUERIES, lanes[n].even + lanes[n].odd);
            add_values(own, tile, hull, tiles);
            for (int64_t r = tile * QUERIES; block->infinite && r < lesser(after * QUERIES, block->rows); r++)
                add_infinite(call, task, own, block->keys, block->head, r,
                             own->p + (r / QUERIES - tile) * PAIRS, tiles);
        }
        float *spare = now;
        now = later;
        later = spare;
        hull = soon;
    }
}

NOINLINE void take_one_tile(const struct call *call, const struct task *task, const struct units *units,
                            struct scratch *own, const struct block *block) {
    take_strips(call, task, units, own, block, 1);
}

NOINLINE void take_all_tiles(const struct call *call, const struct task *task, const struct units *units,
                             struct scratch *own, const struct block *block) {
    take_strips(call, task, units, own, block, 2);
}

/* Add one block of keys to the softmax of all rows of a head. */
INLINE void take_block(const struct call *call, const struct task *task, const struct units *units, struct scratch *own,
                       const struct keys *keys, const struct keys *next, int64_t head, int64_t rows) {
    const int64_t all = own->tiles_of_queries, size = size_of((enum type)call->k_type);
    const int few = all <= FEW, copied = !few && call->k_row != own->dim * size;
    struct block block = {keys, next, head, rows, all_seen(task, keys) && !task->mask, 0, 0};
    if (!look(call, task, keys, head, rows, own->sights)) return;
    for (int64_t r = rows; r < all * QUERIES; r++) own->sights[r] = own->sights[rows - 1];
    for (int64_t first = keys->from / STEP * STEP; first < keys->to; first += STEP) {
        own->k[first / STEP] = find_rows(call, own, keys, first, 0, copied);
        own->v[first / STEP] = find_rows(call, own, keys, first, 1, 0);
    }
    block.infinite = !block.whole && take_out_infinite(own, keys);
    block.in_range = !few && (double)own->q_peak * peak_of_keys(own->k, keys, own->dim) * own->dim < 1e38;
    pack_values(own, keys, all == 1);
    if (all == 1)
        take_one_tile(call, task, units, own, &block);
    else
        take_all_tiles(call, task, units, own, &block);
}
