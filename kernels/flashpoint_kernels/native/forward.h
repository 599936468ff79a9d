/* The structures of a forward call, and the common part of forward_float32.h and forward_amx.h: find the addresses of
   keys, find the keys that a row sees, and compute scores from products of queries and keys. */

#ifndef FLASHPOINT_FORWARD
#define FLASHPOINT_FORWARD

#include "memory.h"
#include "options.h"
#include "products.h"

/* The macros of block sizes in `#ifndef` are smaller in the guarded build of the tests (tests/support/sweep/guards.py). */
#ifndef CHUNK
#define CHUNK 1024 /* keys of one softmax; also in native/rows.py */
#endif
#define MOST_GROUPS 16 /* largest number of groups in a block */

/* The addresses of `task.tokens` consecutive keys and values, of all heads. Addresses are for head 0; strides between
   heads are in bytes. */
struct span {
    const char *k, *v;
    int64_t k_head, v_head;
    const char *k_scale, *v_scale; /* float32 scales, one per key; null if the type has no scales */
    int64_t k_scale_head, v_scale_head;
};

/* Queries of one sequence. `state` is null, or the state of their softmax over earlier keys: see `state_size`. */
struct reader {
    const char *q;
    int64_t q_head, q_row; /* strides in bytes */
    int64_t queries;
    float *state;
    int64_t state_head; /* stride from head to head in floats */
};

/* Some heads of one sequence. Query i sees the keys [i + low, i + high), among [start, stop). Strides are in bytes.

   A task with `readers` has queries of several sequences that see all of its keys (a common prefix). It writes the
   state of each reader, but not o and lse; `own.queries` is then the sum of the readers' queries. */
struct task {
    struct reader own;
    char *o;
    int64_t o_head, o_row;
    char *lse; /* null if lse is not requested */
    int64_t lse_head, lse_row;
    const float *slopes, *sinks; /* one slope for each query head; null without ALiBi */
    const char *mask;            /* the mask's address for query 0 and key 0; null without a mask */
    int64_t mask_head, mask_row;
    const char *blocks; /* the block mask's address for query 0 and key 0 of the sequence; null without a block mask */
    int64_t blocks_head, blocks_row;
    int64_t heads, first_head; /* the task's heads of k and v are [first_head, first_head + heads) of the spans */
    int64_t start, stop, low, high;
    int64_t offset; /* ALiBi's distance of query i and key j is |i + offset - j| */
    const struct span *spans;
    int64_t first, tokens; /* position of the first span's first key; number of keys in a span */
    float *parts;          /* null: write o and lse. Else write each chunk's state here, see `state_size` */
    int64_t sequence, query_head, first_query; /* position of the task's first query, for dropout and the block mask */
    const struct reader *readers; /* null: the task has only the queries in `own` */
    int64_t reader_count;
};

struct call {
    int64_t k_type, q_type; /* `enum type` of k and v, and of q and o */
    int64_t dim, value_dim, group;
    int64_t k_row, v_row; /* strides from key to key in bytes */
    double scale, softcap; /* softcap: 0 is off */
    int64_t mask_type, mask_step; /* stride from key to key in bytes, 0 for one number for all keys */
    double keep;                  /* 1 - dropout_p */
    struct dropout dropout;
    int64_t block_queries, block_keys; /* size of a block of the block mask, multiples of GROUP */
    int64_t count;
    const struct task *tasks;
};

/* ---- queries ---- */

/* An iterator over the rows of a task, one for each query head and query. Rows are in the order of readers, then of
   query heads, then of queries. */
struct cursor {
    const struct reader *reader;
    int64_t row;
};

INLINE struct cursor first_row(const struct task *task) {
    return (struct cursor){task->readers ? task->readers : &task->own, 0};
}

/* Return the address of the next row's query, for key/value head `head` of the task, and advance the cursor. */
INLINE const char *next_query(const struct call *call, struct cursor *cursor, int64_t head) {
    while (cursor->row == call->group * cursor->reader->queries) *cursor = (struct cursor){cursor->reader + 1, 0};
    const struct reader *reader = cursor->reader;
    const int64_t row = cursor->row++;
    return reader->q + (head * call->group + row / reader->queries) * reader->q_head + row % reader->queries * reader->q_row;
}

/* ---- addresses of keys ---- */

/* The addresses of GROUP keys and values, which have constant strides in bytes. At the edges of a sequence some of the
   keys do not exist. */
struct group {
    const char *k, *v;
    int64_t k_step, v_step;
};

/* A block of keys. `position` is the position in the sequence of its first key. Only its keys [from, to), counted from
   `position`, exist. `copies` is memory for copies of groups whose keys are in several spans. */
struct keys {
    int64_t position, from, to;
    struct group groups[MOST_GROUPS];
    float k_scale[MOST_GROUPS * GROUP], v_scale[MOST_GROUPS * GROUP];
    char *copies;
};

INLINE int64_t copy_size(const struct call *call, int64_t block) {
    return block * (call->dim + call->value_dim) * size_of((enum type)call->k_type);
}

/* Find the addresses and scales of the keys [from, to) of the block, all in the group whose first key is `first`. Copy
   the group to `copies` if its keys are in several spans. */
INLINE void locate_group(struct keys *keys, const struct call *call, const struct task *task, int64_t head, int64_t first,
                         int64_t from, int64_t to, char *copies) {
    const int64_t size = size_of((enum type)call->k_type), k_bytes = call->dim * size, v_bytes = call->value_dim * size;
    const int64_t token = keys->position + from - task->first;
    const struct span *span = task->spans + token / task->tokens;
    int64_t inside = token % task->tokens;
    struct group *group = keys->groups + first / GROUP;
    const int apart = inside + to - from > task->tokens;
    if (apart) *group = (struct group){copies, copies + GROUP * k_bytes, k_bytes, v_bytes};
    while (from < to) {
        const int64_t here = lesser(to - from, task->tokens - inside), at = from - first;
        const char *k = span->k + head * span->k_head + inside * call->k_row;
        const char *v = span->v + head * span->v_head + inside * call->v_row;
        if (!apart) *group = (struct group){k - at * call->k_row, v - at * call->v_row, call->k_row, call->v_row};
        for (int64_t i = 0; apart && i < here; i++) {
            memcpy(copies + (at + i) * k_bytes, k + i * call->k_row, k_bytes);
            memcpy(copies + GROUP * k_bytes + (at + i) * v_bytes, v + i * call->v_row, v_bytes);
        }
        if (call->k_type >= INT8) {
            memcpy(keys->k_scale + from, span->k_scale + head * span->k_scale_head + 4 * inside, sizeof(float) * here);
            memcpy(keys->v_scale + from, span->v_scale + head * span->v_scale_head + 4 * inside, sizeof(float) * here);
        }
        from += here;
        inside = 0;
        span++;
    }
}

/* Find the addresses of one head's keys in the block of `block` keys that contains `position`; only keys of the task's
   range [start, stop) exist. */
INLINE void locate_block(struct keys *keys, const struct call *call, const struct task *task, int64_t head,
                         int64_t position, const int64_t block) {
    keys->position = position / block * block;
    keys->from = greater(task->start - keys->position, 0);
    keys->to = lesser(task->stop - keys->position, block);
    head += task->first_head;
    if (call->k_type >= INT8) { /* keys that do not exist have scale 0: tiles multiply it by probabilities of 0 */
        memset(keys->k_scale, 0, sizeof keys->k_scale);
        memset(keys->v_scale, 0, sizeof keys->v_scale);
    }
    char *copies = keys->copies;
    for (int64_t first = keys->from / GROUP * GROUP; first < keys->to; first += GROUP) {
        locate_group(keys, call, task, head, first, greater(first, keys->from), lesser(first + GROUP, keys->to), copies);
        copies += copy_size(call, GROUP);
    }
}

/* ---- visibility of keys ---- */

/* The keys of a block that a row sees: keys in [low, high) whose group has its bit set in `groups`. */
struct sight {
    int32_t low, high;
    uint32_t groups;
};

/* Return whether any query of the task sees keys of the block, ignoring masks. */
INLINE int some_seen(const struct task *task, const struct keys *keys) {
    return task->own.queries - 1 + task->high > keys->position + keys->from && task->low < keys->position + keys->to;
}

/* Return whether all queries see all keys of the block, ignoring the caller's mask. */
INLINE int all_seen(const struct task *task, const struct keys *keys) {
    return !task->blocks && task->own.queries - 1 + task->low <= keys->position + keys->from &&
           task->high >= keys->position + keys->to;
}

/* Return one bit for each group of the block of keys: whether `row`, the query's row of the block mask, is true for the
   group. */
INLINE uint32_t groups_of(const struct call *call, const struct keys *keys, const char *row) {
    uint32_t groups = 0;
    for (int64_t at = keys->from / GROUP * GROUP; at < keys->to; at += GROUP)
        groups |= (uint32_t)(row[(keys->position + at) / call->block_keys] != 0) << at / GROUP;
    return groups;
}

/* Find the keys of a block that each row sees. Return whether any row sees a key. */
INLINE int look(const struct call *call, const struct task *task, const struct keys *keys, int64_t head, int64_t rows,
                struct sight *sights) {
    uint32_t groups = ~0u;
    int some = 0;
    const char *known = 0;
    int64_t query = 0, own_head = head * call->group;
    for (int64_t r = 0; r < rows; r++) {
        const int64_t at = query - keys->position;
        int64_t low = greater(keys->from, at + task->low), high = lesser(keys->to, at + task->high);
        if (task->blocks) {
            const char *row = task->blocks + own_head * task->blocks_head +
                              (task->first_query + query) / call->block_queries * task->blocks_row;
            if (row != known) groups = groups_of(call, keys, row);
            known = row;
            while (low < high && !(groups >> low / GROUP & 1)) low = (low / GROUP + 1) * GROUP;
            while (low < high && !(groups >> (high - 1) / GROUP & 1)) high = (high - 1) / GROUP * GROUP;
        }
        sights[r] = low < high ? (struct sight){(int32_t)low, (int32_t)high, groups} : (struct sight){0, 0, 0};
        some |= low < high;
        if (++query == task->own.queries) query = 0, own_head++;
    }
    return some;
}

/* ---- scores from products ---- */

/* How to compute scores from the softmax's inputs. If the scale is the only option, the inputs are unscaled products of
   queries and keys, which minimises rounding. Otherwise `adjust` first computes scores, and these are the inputs. */
struct units {
    int adjusts;
    float unit, factor; /* score = unit · input, and e^score = 2^(factor·input) */
};

INLINE float in_float32(double x) { return (float)(x > MOST ? MOST : x < -MOST ? -MOST : x); }

INLINE struct units units_of(const struct call *call, const struct task *task) {
    const int adjusts = call->softcap != 0 || task->slopes || task->mask || call->k_type >= INT8 || !(in_float32(call->scale) > 0);
    const double factor = adjusts ? 1.4426950408889634 : call->scale * 1.4426950408889634;
    return (struct units){adjusts, adjusts ? 1 : in_float32(call->scale), in_float32(factor)};
}

/* Return the address of the caller's mask for one query. */
INLINE const char *mask_row(const struct task *task, int64_t query, int64_t head) {
    return task->mask ? task->mask + head * task->mask_head + query * task->mask_row : 0;
}

/* Compute scores from one row's products with the keys [from, to) of a block. `head` is the query head. Results beyond
   float32's range become the largest float32 of their sign, unless an operand is infinite. */
INLINE void adjust(const struct call *call, const struct task *task, const struct keys *keys, float *s, int64_t query,
                   int64_t head, int64_t from, int64_t to) {
    const char *mask = mask_row(task, query, head);
    const ints lanes = each_lane();
    const float scale = in_float32(call->scale);
    for (int64_t at = from / LANES * LANES; at < to; at += LANES) {
        const floats product = load_floats(s + at);
        floats x = product * scale;
        if (call->k_type >= INT8) x = x * load_floats(keys->k_scale + at);
        x = choose(is_number(product), within_range(x), x);
        if (call->softcap != 0) x = capped(x, (float)call->softcap);
        if (task->slopes) {
            const ints known = is_number(x);
            const floats y = less_alibi(x, task->slopes[head], lanes + (int32_t)at,
                                        (int32_t)(query + task->offset - keys->position));
            x = choose(known, within_range(y), y);
        }
        if (mask) {
            const floats bias = masked(mask, (enum type)call->mask_type, call->mask_step, keys->position + at,
                                       keys->position + to);
            const floats y = x + bias;
            x = choose(bias == -__builtin_inff(), bias, choose(is_number(x) & is_number(bias), within_range(y), y));
        }
        store_floats(s + at, x);
    }
}

/* Return whether a row sees a certain key of a block. */
INLINE int sees(const struct call *call, const struct task *task, const struct keys *keys, struct sight sight,
                int64_t query, int64_t head, int64_t key) {
    if (key < sight.low || key >= sight.high || !(sight.groups >> key / GROUP & 1)) return 0;
    const char *mask = mask_row(task, query, head);
    const int64_t at = keys->position + key;
    return !mask || masked(mask, (enum type)call->mask_type, call->mask_step, at, at + 1)[0] != -__builtin_inff();
}

INLINE int is_finite(float x) { return is_number(splat(x))[0]; }

/* Convert the float64 sum of a product of q and k to float32; a finite sum is limited to float32's range. */
INLINE float product_of(double sum) {
    return sum - sum == 0 ? in_float32(sum) : (float)sum;
}

#endif
