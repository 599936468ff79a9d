/* The forward pass with float32 products, for inputs of all types: keys and values are converted block by block.

   For each block of keys, each STRIP of rows computes its scores, the online softmax and the weighted sum of values
   before the next strip, so that its probabilities stay in the L1 cache. */

#ifndef BLOCK
#define BLOCK 128 /* keys of a block, a multiple of PANEL */
#endif
#ifndef STRIP
#define STRIP 24 /* a multiple of TALL */
#endif

struct scratch {
    struct keys keys[2];
    float *q;                 /* (rows, dim); dimensions are `padded` */
    float *o;                 /* (rows, value_dim), of this chunk */
    float *of_block;          /* (TALL, value_dim): the block's part of o, if values are read in place */
    float *most, *sum;        /* (rows): the largest score and the sum of this chunk; sum is valid after `end_chunk` */
    floats *sums;             /* (rows, SUMS): partial sums, which `end_chunk` adds up */
    float *alpha;             /* (rows): the factor of o in this block */
    float *s;                 /* (STRIP, BLOCK): scores, then probabilities */
    float *panels, *values;   /* the block's keys, see `panel_columns`, and its values (BLOCK, value_dim) */
    float *infinite;          /* (BLOCK, value_dim): values before the removal of infinities and NaN */
    float *rows;              /* (GROUP, dim + 16): keys, before `panel_columns` */
    struct sight *sights;
    uint32_t *room; /* memory for the random words of dropout */
    float q_peak;   /* the largest absolute value in q; infinity if q has an infinity or a NaN */
};

INLINE void place(struct scratch *own, struct memory *memory, const struct call *call, int64_t rows) {
    const int64_t dim = padded(call->dim), value_dim = padded(call->value_dim), number = sizeof(float);
    const int64_t tall = (rows + STRIP - 1) / STRIP * STRIP + 16; /* vectors over rows may end beyond the last row */
    own->q = take(memory, number * tall * dim);
    own->o = take(memory, number * tall * value_dim);
    own->of_block = take(memory, number * TALL * value_dim);
    own->most = take(memory, number * tall);
    own->sum = take(memory, number * tall);
    own->sums = take(memory, number * tall * 16);
    own->alpha = take(memory, number * tall);
    own->s = take(memory, number * STRIP * BLOCK);
    own->panels = take(memory, number * BLOCK * dim);
    own->values = take(memory, number * BLOCK * value_dim);
    own->infinite = take(memory, number * BLOCK * value_dim);
    own->rows = take(memory, number * GROUP * (dim + 16));
    own->sights = take(memory, sizeof *own->sights * tall);
    own->room = take(memory, sizeof *own->room * ROOM(BLOCK));
    for (int n = 0; n < 2; n++) own->keys[n].copies = take(memory, copy_size(call, BLOCK));
}

INLINE void begin(struct scratch *own) { (void)own; }
INLINE void end(struct scratch *own) { (void)own; }

INLINE float peak_of(ints bits) {
    const floats x = (floats)bits;
    float most = 0;
    for (int i = 0; i < LANES; i++)
        if (!(x[i] <= most)) most = x[i] == x[i] ? x[i] : __builtin_inff();
    return most;
}

INLINE ints peak_of_row(ints peak, const float *row, int64_t width) {
    for (int64_t d = 0; d < width; d += LANES) peak = larger_bits(peak, load_floats(row + d));
    return peak;
}

INLINE void load_queries(const struct call *call, const struct task *task, struct scratch *own, int64_t head) {
    const int64_t width = padded(call->dim);
    ints peak = {0};
    struct cursor cursor = first_row(task);
    for (int64_t r = 0; r < call->group * task->own.queries; r++) {
        read_row(own->q + r * width, next_query(call, &cursor, head), (enum type)call->q_type, call->dim);
        peak = peak_of_row(peak, own->q + r * width, width);
    }
    own->q_peak = peak_of(peak);
}

INLINE void locate(struct keys *keys, const struct call *call, const struct task *task, int64_t head, int64_t position) {
    locate_block(keys, call, task, head, position, BLOCK);
}

/* ---- keys and values ---- */

/* Prefetch `bytes` of each row into the L2 cache. */
INLINE void prefetch_rows(const char *rows, int64_t step, int64_t count, int64_t bytes) {
    for (int64_t j = 0; j < count; j++)
        for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(rows + j * step + at, 0, 2);
}

/* Write the block's keys as panels, and prefetch the keys of `next`, unless it is null. Return the largest magnitude in
   each lane, as bits. The columns of keys that do not exist are undefined. */
INLINE ints pack_keys_of(struct scratch *own, const struct keys *keys, const struct keys *next, int64_t dim,
                         const enum type type) {
    const int64_t width = padded(dim), step = width + 16;
    ints peak = {0};
    for (int64_t first = keys->from / PANEL * PANEL; first < keys->to; first += GROUP) {
        const struct group *group = keys->groups + first / GROUP;
        for (int64_t i = 0; i < GROUP; i++) {
            float *row = own->rows + i * step;
            if (first + i < keys->from || first + i >= keys->to) continue; /* no row uses this key's scores */
            if (next && next->from <= first + i && first + i < next->to) {
                const struct group *soon = next->groups + first / GROUP;
                prefetch_rows(soon->k + i * soon->k_step, 0, 1, dim * size_of(type));
            }
            read_row_of(row, group->k + i * group->k_step, type, dim);
            peak = peak_of_row(peak, row, width);
        }
        panel_columns(own->panels, own->rows, step, first, dim);
    }
    return peak;
}

NOINLINE float pack_keys(struct scratch *own, const struct keys *keys, const struct keys *next, int64_t dim,
                         enum type type) {
    switch (type) {
    case FLOAT32: return peak_of(pack_keys_of(own, keys, next, dim, FLOAT32));
    case FLOAT16: return peak_of(pack_keys_of(own, keys, next, dim, FLOAT16));
    case BFLOAT16: return peak_of(pack_keys_of(own, keys, next, dim, BFLOAT16));
    case INT8: return peak_of(pack_keys_of(own, keys, next, dim, INT8));
    case FLOAT8_E4M3FN: return peak_of(pack_keys_of(own, keys, next, dim, FLOAT8_E4M3FN));
    case BOOL: break;
    }
    return 0;
}

INLINE void copy_values_of(struct scratch *own, const struct keys *keys, const struct keys *next, int64_t dim,
                           const enum type type) {
    for (int64_t j = keys->from; j < keys->to; j++) {
        const struct group *group = keys->groups + j / GROUP;
        if (next && next->from <= j && j < next->to) {
            const struct group *soon = next->groups + j / GROUP;
            prefetch_rows(soon->v + j % GROUP * soon->v_step, 0, 1, dim * size_of(type));
        }
        read_row_of(own->values + j * padded(dim), group->v + j % GROUP * group->v_step, type, dim);
    }
}

NOINLINE void copy_values(struct scratch *own, const struct keys *keys, const struct keys *next, int64_t dim,
                          enum type type) {
    switch (type) {
    case FLOAT32: copy_values_of(own, keys, next, dim, FLOAT32); break;
    case FLOAT16: copy_values_of(own, keys, next, dim, FLOAT16); break;
    case BFLOAT16: copy_values_of(own, keys, next, dim, BFLOAT16); break;
    case INT8: copy_values_of(own, keys, next, dim, INT8); break;
    case FLOAT8_E4M3FN: copy_values_of(own, keys, next, dim, FLOAT8_E4M3FN); break;
    case BOOL: break;
    }
}

/* Replace infinities and NaN in the block's values by 0: for a row that does not see them, a probability of 0 times
   infinity would be NaN. Return whether there were any. */
INLINE int take_out_infinite(struct scratch *own, const struct keys *keys, int64_t width) {
    ints peak = {0};
    for (int64_t j = keys->from; j < keys->to; j++) peak = peak_of_row(peak, own->values + j * width, width);
    if (peak_of(peak) <= MOST) return 0;
    memcpy(own->infinite, own->values, sizeof(float) * BLOCK * width);
    for (int64_t at = keys->from * width; at < keys->to * width; at += LANES) {
        const floats x = load_floats(own->values + at);
        store_floats(own->values + at, only(is_number(x), x));
    }
    return 1;
}

/* ---- matrix products ---- */

/* The smallest range of keys [low, high) that contains all keys that a tile of TALL rows sees. */
struct hull {
    int32_t low, high;
};

/* Write the products of up to TALL rows of q and the keys of a hull. */
NOINLINE void multiply_keys(const struct scratch *own, const float *q, float *s, int64_t dim, struct hull hull,
                            int64_t rows) {
    for (int64_t at = hull.low / LANES * LANES, end; at < hull.high; at = end) {
        const int64_t panel = at / PANEL * PANEL;
        end = lesser(panel + PANEL, hull.high);
        tile_of_any(s + at, BLOCK, q, padded(dim), 1, own->panels + panel * padded(dim) + at % PANEL, PANEL, dim, 0, WRITE,
                    rows, (end - at + LANES - 1) / LANES);
    }
}

/* Add the sum of values weighted by p to rows of o, up to WIDE vectors wide: see `tile`. */
NOINLINE void add_values(float *o, int64_t width, const float *p, const float *values, int64_t step, int64_t count,
                         const float *alpha, enum start start, int64_t rows, int64_t vectors) {
    if (start == RESCALE)
        tile_of_any(o, width, p, BLOCK, 1, values, step, count, alpha, RESCALE, rows, vectors);
    else if (start == WRITE)
        tile_of_any(o, width, p, BLOCK, 1, values, step, count, alpha, WRITE, rows, vectors);
    else
        tile_of_any(o, width, p, BLOCK, 1, values, step, count, alpha, CONTINUE, rows, vectors);
}

INLINE int64_t vectors_at(int64_t at, int64_t width) { return lesser(width - at, PANEL) / LANES; }

/* Multiply up to TALL rows of o by `alpha`, and add the sum of values weighted by p, as `add_values` with RESCALE does,
   but read the values at their place in the caller's tensor. Prefetch the values of `next`, unless it is null. */
INLINE void add_values_in_place(struct scratch *own, const struct keys *keys, const struct keys *next, int64_t width,
                                int64_t rows) {
    for (int64_t first = keys->from / GROUP * GROUP; first < keys->to; first += GROUP) {
        const struct group *group = keys->groups + first / GROUP;
        const int64_t from = greater(first, keys->from), to = lesser(first + GROUP, keys->to);
        if (next) {
            const int64_t low = greater(first, next->from), high = lesser(first + GROUP, next->to);
            const struct group *soon = next->groups + first / GROUP;
            if (low < high) prefetch_rows(soon->v + (low - first) * soon->v_step, soon->v_step, high - low, 4 * width);
        }
        for (int64_t at = 0; at < width; at += PANEL)
            add_values(own->of_block + at, width, own->s + from,
                       (const float *)(group->v + (from - first) * group->v_step) + at, group->v_step / 4, to - from,
                       own->alpha, first <= keys->from ? WRITE : CONTINUE, rows, vectors_at(at, width));
    }
    for (int64_t r = 0; r < rows; r++)
        for (int64_t at = r * width; at < (r + 1) * width; at += LANES)
            store_floats(own->o + at,
                         multiply_add(load_floats(own->o + at), splat(own->alpha[r]), load_floats(own->of_block + at)));
}

/* Correct a row's products that overflowed: they are infinite or NaN although the query and the key are finite. */
NOINLINE void put_right(const struct scratch *own, const struct call *call, float *s, int64_t row, int64_t from,
                        int64_t to) {
    const float *q = own->q + row * padded(call->dim);
    for (int64_t j = from; j < to; j++) {
        if (is_finite(s[j])) continue;
        const float *k = own->panels + j / PANEL * PANEL * padded(call->dim) + j % PANEL;
        double sum = 0;
        for (int64_t d = 0; d < call->dim; d++) {
            sum += (double)q[d] * (double)k[d * PANEL];
            if (!(sum - sum == 0)) break;
        }
        s[j] = sum - sum == 0 ? product_of(sum) : s[j];
    }
}

/* Add to a row of o the values that `take_out_infinite` removed, weighted by p, for the keys that the row sees. */
NOINLINE void add_infinite(const struct call *call, const struct task *task, const struct scratch *own,
                           const struct keys *keys, int64_t head, int64_t row, const float *p) {
    const int64_t width = padded(call->value_dim);
    float *o = own->o + row * width;
    for (int64_t j = own->sights[row].low; j < own->sights[row].high; j++) {
        if (!sees(call, task, keys, own->sights[row], row % task->own.queries, head * call->group + row / task->own.queries, j))
            continue;
        for (int64_t d = 0; d < call->value_dim; d++)
            if (!is_finite(own->infinite[j * width + d])) o[d] += p[j] * own->infinite[j * width + d];
    }
}

/* ---- the softmax ---- */

INLINE ints seen_lanes(struct sight sight, int64_t at) {
    const ints j = each_lane() + (int32_t)at;
    const int32_t in_group = -(int32_t)(sight.groups >> at / GROUP & 1);
    return (j >= sight.low) & (j < sight.high) & in_group;
}

INLINE float largest_seen(const float *s, struct sight sight) {
    const floats least = splat(-__builtin_inff());
    floats a = least, b = least;
    if (sight.low == 0 && sight.high == BLOCK && sight.groups == ~0u) {
#pragma GCC unroll 4
        for (int64_t at = 0; at < BLOCK; at += 2 * LANES) {
            a = largest(load_floats(s + at), a);
            b = largest(load_floats(s + at + LANES), b);
        }
    } else {
        for (int64_t at = sight.low / LANES * LANES; at < sight.high; at += LANES)
            a = largest(choose(seen_lanes(sight, at), load_floats(s + at), least), a);
    }
    return lane_max(largest(a, b));
}

/* Compute probabilities from one row's scores of the keys [from, to), 0 for keys that it does not see, and add them to
   its sums. Dropout and the scales of values change the stored probabilities, but not the sums. */
INLINE void exponentials(const struct call *call, float *s, struct sight sight, int64_t from, int64_t to, float base,
                         float factor, float alpha, floats *sums, const uint32_t *drawn, const float *v_scale) {
    floats sum[SUMS];
    for (int i = 0; i < SUMS; i++) sum[i] = sums[i] * alpha;
    if (from == 0 && to == BLOCK && sight.low == 0 && sight.high == BLOCK && sight.groups == ~0u && !drawn && !v_scale) {
#pragma GCC unroll 4
        for (int64_t at = 0; at < BLOCK; at += LANES) {
            const floats x = exponential2((load_floats(s + at) - base) * factor);
            sum[at / LANES % SUMS] = sum[at / LANES % SUMS] + x;
            store_floats(s + at, x);
        }
    } else {
        for (int64_t at = from / LANES * LANES; at < to; at += LANES) {
            floats x = splat(0);
            if (at + LANES > sight.low && at < sight.high)
                x = only(seen_lanes(sight, at), exponential2((load_floats(s + at) - base) * factor));
            for (int i = 0; i < SUMS; i++) /* a constant index keeps the sums in registers */
                if (at / LANES % SUMS == i) sum[i] = sum[i] + x;
            if (drawn) x = kept(&call->dropout, drawn + at, x);
            if (v_scale) x = x * load_floats(v_scale + at);
            store_floats(s + at, x);
        }
    }
    for (int i = 0; i < SUMS; i++) sums[i] = sum[i];
}

/* Add a block's scores to the online softmax of some rows: first find the largest scores of all rows, then the factors
   of their earlier sums, then the exponentials. */
NOINLINE void soften(const struct call *call, const struct task *task, const struct units *units, struct scratch *own,
                     const struct keys *keys, int64_t head, int64_t first, int64_t rows, const struct hull *hulls) {
    float base[STRIP + LANES];
    for (int64_t r = 0; r < rows; r++) base[r] = largest_seen(own->s + r * BLOCK, own->sights[first + r]);
    for (int64_t r = 0; r < rows; r += LANES) { /* lanes beyond the last row are ignored */
        const floats old = load_floats(own->most + first + r), most = largest(load_floats(base + r), old);
        const floats zero = choose(most == -__builtin_inff(), splat(0), most);
        const floats alpha = exponential2((old - zero) * units->factor);
        store_floats(base + r, zero);
        const int64_t count = lesser(rows - r, LANES) * (int64_t)sizeof(float);
        const floats exact = choose(old == most, splat(1), alpha);
        memcpy(own->most + first + r, &most, count);
        memcpy(own->alpha + first + r, &exact, count);
    }
    for (int64_t r = 0; r < rows; r++) {
        const int64_t query = (first + r) % task->own.queries, own_head = head * call->group + (first + r) / task->own.queries;
        const uint32_t *drawn = 0;
        if (call->dropout.on)
            drawn = draw(&call->dropout, own->room, task->sequence, task->query_head + own_head,
                         task->first_query + query, keys->position, keys->to);
        exponentials(call, own->s + r * BLOCK, own->sights[first + r], hulls[r / TALL].low, hulls[r / TALL].high, base[r],
                     units->factor, own->alpha[first + r], own->sums + (first + r) * SUMS, drawn,
                     call->k_type >= INT8 ? keys->v_scale : 0);
    }
}

INLINE void begin_chunk(const struct call *call, struct scratch *own, int64_t rows) {
    for (int64_t r = 0; r < rows; r++) own->most[r] = -__builtin_inff();
    memset(own->sums, 0, sizeof(float) * 16 * rows);
    memset(own->o, 0, sizeof(float) * rows * padded(call->value_dim));
}

INLINE void end_chunk(const struct call *call, struct scratch *own, int64_t rows) {
    (void)call;
    for (int64_t r = 0; r < rows; r++) own->sum[r] = sum_of_16(own->sums + r * SUMS);
}

/* Find the range of keys that each tile of TALL rows sees. Return whether any row sees a key. */
INLINE int hulls_of(const struct scratch *own, int64_t first, int64_t rows, struct hull *hulls) {
    int some = 0;
    for (int64_t r = 0; r < rows; r += TALL) {
        struct hull hull = {BLOCK, 0};
        for (int64_t i = first + r; i < first + lesser(r + TALL, rows); i++) {
            const struct sight sight = own->sights[i];
            if (sight.low >= sight.high) continue;
            if (sight.low < hull.low) hull.low = sight.low;
            if (sight.high > hull.high) hull.high = sight.high;
        }
        if (hull.high == 0) hull.low = 0;
        some |= hull.high > 0;
        hulls[r / TALL] = hull;
    }
    return some;
}

/* Prefetch part number `share` of the next block's keys and values, divided into `shares` parts, into the L2 cache. */
INLINE void prefetch_share(const struct call *call, const struct keys *next, int64_t share, int64_t shares) {
    const int64_t size = size_of((enum type)call->k_type), count = next->to - next->from;
    for (int64_t j = next->from + count * share / shares; j < next->from + count * (share + 1) / shares; j++) {
        const struct group *group = next->groups + j / GROUP;
        prefetch_rows(group->k + j % GROUP * group->k_step, 0, 1, call->dim * size);
        prefetch_rows(group->v + j % GROUP * group->v_step, 0, 1, call->value_dim * size);
    }
}

/* Add one block of keys to the softmax of all rows of a head. */
INLINE void take_block(const struct call *call, const struct task *task, const struct units *units, struct scratch *own,
                       const struct keys *keys, const struct keys *next, int64_t head, int64_t rows) {
    const int64_t width = padded(call->value_dim);
    const enum type type = (enum type)call->k_type;
    const int alike = all_seen(task, keys), whole = alike && !task->mask, few = rows <= STRIP;
    if (!look(call, task, keys, head, rows, own->sights)) return;
    const double k_peak = pack_keys(own, keys, few ? next : 0, call->dim, type);
    const int in_range = own->q_peak * k_peak * call->dim < 1e38;
    const int in_place = whole && rows <= TALL && type == FLOAT32 && call->value_dim == width;
    int infinite = 0;
    if (!in_place) {
        copy_values(own, keys, few ? next : 0, call->value_dim, type);
        infinite = !whole && take_out_infinite(own, keys, width);
    }
    const int64_t shares = (rows + TALL - 1) / TALL;
    for (int64_t first = 0; first < rows; first += STRIP) {
        struct hull hulls[STRIP / TALL];
        const int64_t count = lesser(rows - first, STRIP);
        if (!hulls_of(own, first, count, hulls)) continue;
        for (int64_t r = 0; r < count; r += TALL) {
            if (!few) prefetch_share(call, next, (first + r) / TALL, shares);
            multiply_keys(own, own->q + (first + r) * padded(call->dim), own->s + r * BLOCK, call->dim, hulls[r / TALL],
                          lesser(count - r, TALL));
        }
        for (int64_t r = 0; r < count && !in_range; r++)
            put_right(own, call, own->s + r * BLOCK, first + r, hulls[r / TALL].low, hulls[r / TALL].high);
        for (int64_t r = 0; r < count && units->adjusts; r++)
            adjust(call, task, keys, own->s + r * BLOCK, (first + r) % task->own.queries,
                   head * call->group + (first + r) / task->own.queries, hulls[r / TALL].low, hulls[r / TALL].high);
        soften(call, task, units, own, keys, head, first, count, hulls);
        if (in_place) {
            add_values_in_place(own, keys, few ? next : 0, width, rows);
            continue;
        }
        for (int64_t at = 0; at < width; at += PANEL)
            for (int64_t r = 0; r < count; r += TALL) {
                const struct hull hull = hulls[r / TALL];
                if (hull.low < hull.high)
                    add_values(own->o + (first + r) * width + at, width, own->s + r * BLOCK + hull.low,
                               own->values + hull.low * width + at, width, hull.high - hull.low, own->alpha + first + r,
                               RESCALE, lesser(count - r, TALL), vectors_at(at, width));
            }
        for (int64_t r = 0; r < count && infinite; r++)
            add_infinite(call, task, own, keys, head, first + r, own->s + r * BLOCK);
    }
}
