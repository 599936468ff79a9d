/* The forward of attention on the CPU: keys are read in place, at memory speed.

   The query heads that share a key/value head are rows of one block (grouped-query attention, Ainslie et al. 2023).
   Keys come in blocks of BLOCK at fixed positions of the sequence. Each block goes through the online softmax of
   FlashAttention (Dao et al. 2022, Algorithm 1). Each CHUNK of keys starts a new softmax, and the chunks are merged in
   their order, so that threads may share a sequence.

   The order of all sums is fixed by positions: the bits of a row depend neither on other rows, nor on the place of keys
   in memory, nor on how chunks are distributed over threads. All arithmetic is float32 with fused multiply-add.

   build.py compiles this file once for each instruction set, with ISA as the suffix of its functions. */

#include "options.h"

#define BLOCK 128  /* keys of one step of the online softmax */
#define GROUP 16   /* keys whose products are summed together */
#define CHUNK 1024 /* keys of one softmax; also in native/forward.py */
#define MOST (LANES == 8 ? 8 : 16) /* vectors of q, or sums of values, that a loop has in registers */

/* `tokens` keys and values of all heads. Addresses of head 0; steps from head to head in bytes. */
struct span {
    const char *k, *v;
    int64_t k_head, v_head;
    const char *k_scale, *v_scale; /* float32, one for each key; null if the type has none */
    int64_t k_scale_head, v_scale_head;
};

/* Some heads of one sequence. Query i sees the keys [i + low, i + high), among [start, stop). Steps are in bytes. */
struct task {
    const char *q;
    int64_t q_head, q_row;
    char *o;
    int64_t o_head, o_row;
    char *lse; /* null if not wanted */
    int64_t lse_head, lse_row;
    const float *slopes, *sinks; /* of its query heads; null for none */
    const char *mask;            /* of query 0 and key 0; null for none */
    int64_t mask_head, mask_row;
    int64_t queries, heads, first_head; /* of k and v: heads [first_head, first_head + heads) of the spans */
    int64_t start, stop, low, high;
    int64_t offset; /* ALiBi's distance of query i and key j is |i + offset - j| */
    const struct span *spans;
    int64_t first, tokens; /* position of the first span's first key; keys of a span */
    float *parts;          /* null: write o and lse. Else write the state of each chunk, see `state_size` */
    int64_t sequence, query_head, first_query; /* of the task's first query, for dropout */
};

struct call {
    int64_t k_type, q_type; /* enum type; v has k's, o has q's */
    int64_t dim, value_dim, group;
    int64_t k_row, v_row; /* steps from key to key in bytes */
    double scale, softcap; /* softcap: 0 is off */
    int64_t mask_type, mask_step; /* step from key to key in bytes, 0 for one number for all keys */
    double keep;                  /* 1 - dropout_p */
    struct dropout dropout;
    int64_t count;
    const struct task *tasks;
};

/* ---- one block of keys ---- */

/* GROUP keys, or fewer at the end, with equal steps in memory. */
struct group {
    const char *k, *v;
    int64_t k_step, v_step; /* bytes */
};

/* Load the cache line where a vector begins that is the `n`-th of a row's part, unless the one before it has. */
INLINE void prefetch(const char *p, enum type type, int64_t at, int n) {
    if (n * LANES * size_of(type) % 64 == 0) __builtin_prefetch(p + at * size_of(type), 0, 3);
}

/* Add to `sums` (rows, GROUP) the products of LANES·given numbers of q and of `count` keys, from `at` on; of the row's
   end if `given` is 0. `rows` and `given` are constants. A load has the same step from key to key: the processor
   then loads ahead. */
INLINE void multiply(floats *sums, const float *q, int64_t dim, const struct group *keys, const struct group *next,
                     int64_t count, enum type type, int64_t at, const int rows, const int given) {
    const int columns = given ? given : 1;
    const int64_t width = padded(dim);
    const ints lanes = each_lane();
    floats x[16];
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++)
            x[r * columns + c] = given ? load_floats(q + r * width + at + c * LANES)
                                       : load_end((const char *)(q + r * width), FLOAT32, dim, dim - at, lanes);
    const char *k = keys->k, *soon = next ? next->k : 0;
#pragma GCC unroll 1
    for (int64_t j = 0; j < count; j++) {
        floats sum[4];
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sum[r] = at ? sums[r * GROUP + j] : splat(0);
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            if (next) prefetch(soon, type, at + c * LANES, c);
            floats y = given ? load(k, type, at + c * LANES) : load_end(k, type, dim, dim - at, lanes);
#pragma GCC unroll 4
            for (int r = 0; r < rows; r++) sum[r] = x[r * columns + c] * y + sum[r];
        }
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) sums[r * GROUP + j] = sum[r];
        k += keys->k_step;
        if (next) soon += next->k_step;
    }
}

/* Write q·k of `rows` rows and a group of keys; `rows` is a constant. Keys of `next`, if not null, come soon. */
INLINE void dot(const float *q, int64_t dim, const struct group *keys, const struct group *next, int64_t count,
                enum type type, float *scores, const int rows) {
    floats sums[4 * GROUP];
    if (count < GROUP) memset(sums, 0, sizeof sums);
    int64_t at = 0;
#define COVER(width)                                                                                                 \
    if (width * rows <= MOST)                                                                                        \
        for (; at + (width) * LANES <= dim; at += (width) * LANES)                                                   \
            multiply(sums, q, dim, keys, next, count, type, at, rows, width);
    COVER(8) COVER(4) COVER(2) COVER(1)
#undef COVER
    if (at < dim) multiply(sums, q, dim, keys, next, count, type, at, rows, 0);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int j = 0; j < GROUP; j += LANES) {
            floats found = lane_sums(sums + r * GROUP + j);
            memcpy(scores + r * BLOCK + j, &found, sizeof found);
        }
}

/* Add to o (rows, value_dim), times `alpha`, the products of p (rows, BLOCK) and `count` values: LANES·given numbers
   of each, from `at` on; the row's end if `given` is 0. `rows` and `given` are constants. */
INLINE void weigh(float *o, int64_t value_dim, const float *p, const float *alpha, const struct group *values,
                  const struct group *next, int64_t count, enum type type, int64_t at, const int rows,
                  const int given) {
    const int columns = given ? given : 1;
    const int64_t width = padded(value_dim);
    const ints lanes = each_lane();
    floats sums[16];
#pragma GCC unroll 16
    for (int i = 0; i < rows * columns; i++) sums[i] = splat(0);
    for (int64_t first = 0; first < count; first += GROUP, values++) {
        const int64_t here = count - first < GROUP ? count - first : GROUP;
        const char *v = values->v, *soon = next ? next->v : 0;
        for (int64_t j = first; j < first + here; j++) {
#pragma GCC unroll 8
            for (int c = 0; c < columns; c++) {
                floats y = given ? load(v, type, at + c * LANES) : load_end(v, type, value_dim, value_dim - at, lanes);
                if (next) prefetch(soon, type, at + c * LANES, c);
#pragma GCC unroll 4
                for (int r = 0; r < rows; r++) sums[r * columns + c] = p[r * BLOCK + j] * y + sums[r * columns + c];
            }
            v += values->v_step;
            if (next) soon += next->v_step;
        }
        if (next) next++;
    }
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 8
        for (int c = 0; c < columns; c++) {
            const int end = !given && value_dim > LANES; /* the row's last lanes, beside lanes that are ready */
            float *own = o + r * width + (end ? value_dim - LANES : at + c * LANES);
            floats old = load_floats(own), x = old * alpha[r] + sums[r * columns + c];
            if (end) x = choose(lanes >= (int32_t)(LANES - (value_dim - at)), x, old);
            memcpy(own, &x, sizeof x);
        }
}

INLINE void weigh_rows(float *o, int64_t value_dim, const float *p, const float *alpha, const struct group *values,
                       const struct group *next, int64_t count, enum type type, const int rows) {
    int64_t at = 0;
#define COVER(width)                                                                                                 \
    if (width * rows <= MOST)                                                                                        \
        for (; at + (width) * LANES <= value_dim; at += (width) * LANES)                                             \
            weigh(o, value_dim, p, alpha, values, next, count, type, at, rows, width);
    COVER(8) COVER(4) COVER(2) COVER(1)
#undef COVER
    if (at < value_dim) weigh(o, value_dim, p, alpha, values, next, count, type, at, rows, 0);
}

/* `dot` and `weigh_rows` of each type and number of rows. As functions of their own they keep their registers. */
typedef void dot_function(const float *q, int64_t dim, const struct group *keys, const struct group *next,
                          int64_t count, float *scores);
typedef void weigh_function(float *o, int64_t value_dim, const float *p, const float *alpha,
                            const struct group *values, const struct group *next, int64_t count);

#define DEFINE(type, rows)                                                                                           \
    NOINLINE void dot_##type##_##rows(const float *q, int64_t dim, const struct group *keys,                         \
                                      const struct group *next, int64_t count, float *scores) {                      \
        if (next)                                                                                                    \
            dot(q, dim, keys, next, count, type, scores, rows);                                                      \
        else                                                                                                         \
            dot(q, dim, keys, 0, count, type, scores, rows);                                                         \
    }                                                                                                                \
    NOINLINE void weigh_##type##_##rows(float *o, int64_t value_dim, const float *p, const float *alpha,             \
                                        const struct group *values, const struct group *next, int64_t count) {       \
        if (next)                                                                                                    \
            weigh_rows(o, value_dim, p, alpha, values, next, count, type, rows);                                     \
        else                                                                                                         \
            weigh_rows(o, value_dim, p, alpha, values, 0, count, type, rows);                                        \
    }
#define DEFINE_ALL(type) DEFINE(type, 1) DEFINE(type, 2) DEFINE(type, 4)
DEFINE_ALL(FLOAT32) DEFINE_ALL(FLOAT16) DEFINE_ALL(BFLOAT16) DEFINE_ALL(INT8) DEFINE_ALL(FLOAT8_E4M3FN)

#define LIST(name, type) {name##_##type##_1, name##_##type##_2, name##_##type##_4}
#define LIST_ALL(name)                                                                                               \
    {LIST(name, FLOAT32), LIST(name, FLOAT16), LIST(name, BFLOAT16), LIST(name, INT8), LIST(name, FLOAT8_E4M3FN)}
static dot_function *const dots[5][3] = LIST_ALL(dot);
static weigh_function *const weighs[5][3] = LIST_ALL(weigh);

/* The softmax of one row over the keys of one chunk so far. */
struct row {
    float most, sum;
};

/* The keys of one block. `copies` has room for the rows of groups whose keys have no equal steps. */
struct keys {
    struct group groups[BLOCK / GROUP];
    float k_scale[BLOCK], v_scale[BLOCK];
    char *copies;
};

struct scratch {
    float *q, *o, *p, *alpha; /* (rows, dim), (rows, value_dim), (rows, BLOCK), (rows); dimensions are `padded` */
    float *total;             /* the merged o */
    struct row *row, *merged;
    struct keys keys[2];
    uint32_t room[ROOM(BLOCK)];
};

/* Find `count` keys from `position` on, for one head. */
INLINE void locate(struct keys *keys, const struct call *call, const struct task *task, int64_t head, int64_t position,
                   int64_t count) {
    const int64_t size = size_of((enum type)call->k_type), k_bytes = call->dim * size, v_bytes = call->value_dim * size;
    char *copies = keys->copies;
    head += task->first_head;
    int64_t place = (position - task->first) / task->tokens, inside = (position - task->first) % task->tokens;
    const struct span *span = task->spans + place;
    for (int64_t j = 0; j < count; j += GROUP) {
        struct group *group = keys->groups + j / GROUP;
        const int64_t wanted = count - j < GROUP ? count - j : GROUP;
        const int apart = task->tokens - inside < wanted; /* the group is in several spans */
        if (apart) {
            *group = (struct group){copies, copies + GROUP * k_bytes, k_bytes, v_bytes};
            copies += GROUP * (k_bytes + v_bytes);
        }
        for (int64_t done = 0; done < wanted;) {
            const char *k = span->k + head * span->k_head + inside * call->k_row;
            const char *v = span->v + head * span->v_head + inside * call->v_row;
            int64_t here = task->tokens - inside;
            if (here > wanted - done) here = wanted - done;
            if (!apart) *group = (struct group){k, v, call->k_row, call->v_row};
            for (int64_t i = 0; apart && i < here; i++) {
                memcpy((char *)group->k + (done + i) * k_bytes, k + i * call->k_row, k_bytes);
                memcpy((char *)group->v + (done + i) * v_bytes, v + i * call->v_row, v_bytes);
            }
            if (call->k_type >= INT8) {
                const char *k_scale = span->k_scale + head * span->k_scale_head + 4 * inside;
                const char *v_scale = span->v_scale + head * span->v_scale_head + 4 * inside;
                memcpy(keys->k_scale + j + done, k_scale, sizeof(float) * here);
                memcpy(keys->v_scale + j + done, v_scale, sizeof(float) * here);
            }
            done += here;
            inside += here;
            if (inside == task->tokens) {
                inside = 0;
                span++;
            }
        }
    }
}

/* Make probabilities of one row's scores, and update its softmax. */
INLINE void soften(const struct call *call, const struct task *task, float *s, struct row *row, float *alpha,
                   const struct keys *keys, uint32_t *room, int64_t query, int64_t head, int64_t position,
                   int64_t count) {
    const float least = -__builtin_inff();
    const char *mask = task->mask ? task->mask + head * task->mask_head + query * task->mask_row : 0;
    const uint32_t *drawn = 0;
    if (call->dropout.on)
        drawn = draw(&call->dropout, room, task->sequence, task->query_head + head, task->first_query + query, position,
                     count);
    const ints lanes = each_lane();
    int64_t low = query + task->low - position, high = query + task->high - position;
    if (low < 0) low = 0;
    if (high > count) high = count;
    floats most = splat(least), sum = splat(0);
    const int64_t groups = (count + LANES - 1) / LANES;
    for (int64_t g = 0; g < groups; g++) {
        floats x = load_floats(s + g * LANES) * (float)call->scale;
        if (call->k_type >= INT8) x = x * load_floats(keys->k_scale + g * LANES);
        if (call->softcap != 0) x = capped(x, (float)call->softcap);
        ints j = lanes + (int32_t)(g * LANES);
        if (task->slopes) x = less_alibi(x, task->slopes[head], j, (int32_t)(query + task->offset - position));
        if (mask) x = x + masked(mask, (enum type)call->mask_type, call->mask_step, position + g * LANES, position + count);
        if (low > g * LANES || high < (g + 1) * LANES)
            x = choose((j >= (int32_t)low) & (j < (int32_t)high), x, splat(least));
        most = choose(x > most, x, most);
        memcpy(s + g * LANES, &x, sizeof x);
    }
    float found = lane_max(most);
    found = found > row->most ? found : row->most;
    const float base = found > least ? found : 0;
    for (int64_t g = 0; g < groups; g++) {
        floats x = exponential(load_floats(s + g * LANES) - base);
        sum = sum + x;
        if (drawn) x = kept(&call->dropout, drawn + g * LANES, x);
        if (call->k_type >= INT8) x = x * load_floats(keys->v_scale + g * LANES);
        memcpy(s + g * LANES, &x, sizeof x);
    }
    *alpha = exponential1(row->most - base);
    row->sum = row->sum * *alpha + lane_sum(sum);
    row->most = found;
}

/* Take one block into the softmax of all rows of a head. The first rows load keys into the cache that come soon: float32
   the next group, which is read at the speed of memory; other types the same group of the `next` block. */
INLINE void step(const struct call *call, const struct task *task, struct scratch *own, const struct keys *keys,
                 const struct keys *next, int64_t head, int64_t position, int64_t count) {
    const int64_t rows = call->group * task->queries, groups = (count + GROUP - 1) / GROUP;
    const int64_t ahead = call->k_type == FLOAT32 ? 1 : groups;
    struct group soon[BLOCK / GROUP];
    int together;
    for (int64_t g = 0; g < groups; g++)
        soon[g] = g + ahead < groups ? keys->groups[g + ahead] : next->groups[g + ahead - groups];
    for (int64_t r = 0; r < rows; r += 1 << together) {
        together = rows - r >= 4 ? 2 : rows - r >= 2;
        dot_function *const dot = dots[call->k_type][together];
        for (int64_t j = 0; j < count; j += GROUP)
            dot(own->q + r * padded(call->dim), call->dim, keys->groups + j / GROUP, r ? 0 : soon + j / GROUP,
                count - j < GROUP ? count - j : GROUP, own->p + r * BLOCK + j);
    }
    for (int64_t r = 0; r < rows; r++)
        soften(call, task, own->p + r * BLOCK, own->row + r, own->alpha + r, keys, own->room, r % task->queries,
               head * call->group + r / task->queries, position, count);
    for (int64_t r = 0; r < rows; r += 1 << together) {
        together = rows - r >= 4 ? 2 : rows - r >= 2;
        weighs[call->k_type][together](own->o + r * padded(call->value_dim), call->value_dim, own->p + r * BLOCK,
                                       own->alpha + r, keys->groups, r ? 0 : soon, count);
    }
}

/* ---- chunks ---- */

/* Merge the softmax of a later chunk into `total`: both have a largest score, a sum, and o that is not normalised. */
INLINE void merge(struct row *total, float *total_o, const struct row *row, const float *o, int64_t value_dim) {
    const float found = row->most > total->most ? row->most : total->most;
    const float base = found > -__builtin_inff() ? found : 0;
    const float a = exponential1(total->most - base), b = exponential1(row->most - base);
    for (int64_t d = 0; d < value_dim; d += LANES) {
        floats x = load_floats(total_o + d) * a + load_floats(o + d) * b;
        memcpy(total_o + d, &x, sizeof x);
    }
    total->sum = total->sum * a + row->sum * b;
    total->most = found;
}

/* Write o and lse of one row. */
INLINE void finish(const struct call *call, const struct task *task, struct row row, float *o, int64_t query,
                   int64_t head) {
    if (task->sinks) {
        const float sink = task->sinks[head], found = row.most > sink ? row.most : sink;
        const float base = found > -__builtin_inff() ? found : 0;
        const float a = exponential1(row.most - base);
        for (int64_t d = 0; d < call->value_dim; d++) o[d] *= a;
        row.sum = row.sum * a + exponential1(sink - base);
        row.most = found;
    }
    const int dead = row.sum == 0;
    const float divisor = row.sum * (float)call->keep;
    char *to = task->o + head * task->o_head + query * task->o_row;
    for (int64_t d = 0; d < call->value_dim; d++)
        store(to, (enum type)call->q_type, d, dead ? 0 : o[d] / divisor);
    if (task->lse) {
        const float lse = dead ? -__builtin_inff() : row.most + logarithm(row.sum);
        memcpy(task->lse + head * task->lse_head + query * task->lse_row, &lse, sizeof lse);
    }
}

/* Numbers of the state of one chunk of one head: for each row the largest score, the sum, and o. */
INLINE int64_t state_size(const struct call *call, const struct task *task) {
    return call->group * task->queries * (2 + padded(call->value_dim));
}

INLINE void load_queries(const struct call *call, const struct task *task, float *q, int64_t head) {
    for (int64_t r = 0; r < call->group * task->queries; r++) {
        const char *from =
            task->q + (head * call->group + r / task->queries) * task->q_head + r % task->queries * task->q_row;
        read_row(q + r * padded(call->dim), from, (enum type)call->q_type, call->dim);
    }
}

INLINE void attend(const struct call *call, const struct task *task, struct scratch *own, int64_t head) {
    const int64_t rows = call->group * task->queries, value_dim = padded(call->value_dim);
    const struct row empty = {-__builtin_inff(), 0};
    float *part = task->parts;
    if (part) part += head * ((task->stop + CHUNK - 1) / CHUNK - task->start / CHUNK) * state_size(call, task);
    load_queries(call, task, own->q, head);
    for (int64_t r = 0; r < rows; r++) own->merged[r] = empty;
    memset(own->total, 0, sizeof(float) * rows * value_dim);
    int64_t position = task->start, count = BLOCK - position % BLOCK;
    if (count > task->stop - position) count = task->stop - position;
    struct keys *keys = own->keys, *next = own->keys + 1;
    if (count > 0) locate(keys, call, task, head, position, count);
    while (position < task->stop) {
        int64_t end = (position / CHUNK + 1) * CHUNK;
        if (end > task->stop) end = task->stop;
        for (int64_t r = 0; r < rows; r++) own->row[r] = empty;
        memset(own->o, 0, sizeof(float) * rows * value_dim);
        while (position < end) {
            int64_t ahead = task->stop - position - count;
            if (ahead > BLOCK) ahead = BLOCK;
            if (ahead > 0) locate(next, call, task, head, position + count, ahead);
            step(call, task, own, keys, ahead > 0 ? next : keys, head, position, count);
            position += count;
            count = ahead;
            struct keys *spare = keys;
            keys = next;
            next = spare;
        }
        for (int64_t r = 0; r < rows; r++) {
            const float *o = own->o + r * value_dim;
            if (part) {
                memcpy(part, own->row + r, sizeof *own->row);
                memcpy(part + 2, o, sizeof(float) * value_dim);
                part += 2 + value_dim;
            } else {
                merge(own->merged + r, own->total + r * value_dim, own->row + r, o, value_dim);
            }
        }
    }
    if (!part)
        for (int64_t r = 0; r < rows; r++)
            finish(call, task, own->merged[r], own->total + r * value_dim, r % task->queries,
                   head * call->group + r / task->queries);
}

static struct scratch *scratch_for(const struct call *call) {
    int64_t rows = 0;
    for (int64_t n = 0; n < call->count; n++) {
        int64_t own = call->group * call->tasks[n].queries;
        if (own > rows) rows = own;
    }
    const int64_t dim = padded(call->dim), value_dim = padded(call->value_dim);
    const size_t numbers = (size_t)rows * (dim + 2 * value_dim + BLOCK + 5);
    const size_t copies = BLOCK * (size_t)(call->dim + call->value_dim) * size_of((enum type)call->k_type);
    struct scratch *own = calloc(1, sizeof *own + sizeof(float) * numbers + 2 * copies);
    if (!own) return 0;
    own->keys[0].copies = (char *)(own + 1);
    own->keys[1].copies = own->keys[0].copies + copies;
    float *at = (float *)(own->keys[1].copies + copies);
    own->q = at, at += rows * dim;
    own->o = at, at += rows * value_dim;
    own->total = at, at += rows * value_dim;
    own->p = at, at += rows * BLOCK;
    own->alpha = at, at += rows;
    own->row = (struct row *)at, at += 2 * rows;
    own->merged = (struct row *)at;
    return own;
}

/* Compute all tasks of a call. Return 0, or 1 if memory is missing. */
int PASTE(flashpoint_forward_, ISA)(const struct call *call) {
    struct scratch *own = scratch_for(call);
    if (!own) return 1;
    for (int64_t n = 0; n < call->count; n++) {
        const struct task *task = call->tasks + n;
        for (int64_t head = 0; head < task->heads; head++) attend(call, task, own, head);
    }
    free(own);
    return 0;
}

/* Merge the states of all chunks, which calls with `parts` have written, in order; write o and lse. Return as above. */
int PASTE(flashpoint_merge_, ISA)(const struct call *call) {
    struct scratch *own = scratch_for(call);
    if (!own) return 1;
    const int64_t value_dim = padded(call->value_dim);
    for (int64_t n = 0; n < call->count; n++) {
        const struct task *task = call->tasks + n;
        const int64_t rows = call->group * task->queries, size = 2 + value_dim;
        const int64_t chunks = (task->stop + CHUNK - 1) / CHUNK - task->start / CHUNK;
        for (int64_t head = 0; head < task->heads; head++)
            for (int64_t r = 0; r < rows; r++) {
                struct row total = {-__builtin_inff(), 0}, row;
                memset(own->total, 0, sizeof(float) * value_dim);
                for (int64_t c = 0; c < chunks; c++) {
                    const float *part = task->parts + ((head * chunks + c) * rows + r) * size;
                    memcpy(&row, part, sizeof row);
                    merge(&total, own->total, &row, part + 2, value_dim);
                }
                finish(call, task, total, own->total, r % task->queries, head * call->group + r / task->queries);
            }
    }
    free(own);
    return 0;
}
