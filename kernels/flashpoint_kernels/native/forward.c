/* The forward pass of attention on the CPU (FlashAttention, Dao et al. 2022, Algorithm 1).

   A task is some queries of one sequence, or of several sequences with a common prefix of keys. The queries of all
   heads that share a key/value head are rows of one matrix (grouped-query attention, Ainslie et al. 2023). Keys are
   processed in blocks at fixed positions of the sequence. Each CHUNK of keys starts a new softmax, and the chunks are
   merged in order, so that threads may share a sequence.

   Positions determine the order of all sums: the bits of a row do not depend on other rows or their number, on the
   place of keys in memory, or on the distribution of chunks over threads. A key that a row does not see adds nothing or
   a zero. Both give the same bits, because the sign of a zero is lost at the end.

   Two files compute the matrix products: forward_float32.h, and forward_amx.h in tiles of bfloat16. build.py
   compiles this file once for each instruction set, with ISA as the suffix of its functions. */

#include "forward.h"

#if defined(__AVX512BF16__) || defined(TILES_IN_C) || defined(PAIRS_IN_C)
#define TILES
#include "forward_amx.h"
#else
#include "forward_float32.h"
#endif

/* ---- chunks of keys, and the merge of their softmaxes ---- */

/* The softmax of a row over the keys so far: the largest score, and the sum of the exponentials. The row of o, not yet
   divided by the sum, is stored elsewhere. */
struct row {
    float most, sum;
};

/* Merge the softmax of a later chunk, `row` and `o`, into `total` and `total_o`. */
INLINE void merge(struct row *total, float *total_o, struct row row, const float *o, int64_t value_dim, float factor) {
    const float found = row.most > total->most ? row.most : total->most;
    const float base = found > -__builtin_inff() ? found : 0;
    const floats a = exponential2(splat((total->most - base) * factor)), b = exponential2(splat((row.most - base) * factor));
    for (int64_t d = 0; d < value_dim; d += LANES)
        store_floats(total_o + d, multiply_add(load_floats(total_o + d), a, load_floats(o + d) * b));
    total->sum = __builtin_fmaf(total->sum, a[0], row.sum * b[0]);
    total->most = found;
}

/* Write o and lse of one row. */
INLINE void finish(const struct call *call, const struct task *task, const struct units *units, struct row row, float *o,
                   int64_t query, int64_t head) {
    const int64_t width = padded(call->value_dim);
    float most = row.most * units->unit, a = 1;
    if (is_finite(row.most)) most = within_range(splat(most))[0];
    if (task->sinks) {
        const float sink = task->sinks[head], found = most > sink ? most : sink;
        const float base = found > -__builtin_inff() ? found : 0;
        a = exponential1(most - base);
        row.sum = __builtin_fmaf(row.sum, a, exponential1(sink - base));
        most = found;
    }
    const int dead = row.sum == 0;
    const float divisor = row.sum * (float)call->keep;
    for (int64_t d = 0; d < width; d += LANES)
        store_floats(o + d, dead ? splat(0) : load_floats(o + d) * a / divisor + 0.0f);
    write_row(task->o + head * task->o_head + query * task->o_row, (enum type)call->q_type, o, call->value_dim);
    if (task->lse) {
        const float lse = dead ? -__builtin_inff() : most + logarithm(row.sum);
        memcpy(task->lse + head * task->lse_head + query * task->lse_row, &lse, sizeof lse);
    }
}

/* Return the number of floats in the state of one row: the largest score, the sum, and o. */
INLINE int64_t state_size(const struct call *call) { return 2 + padded(call->value_dim); }

INLINE void load_state(struct row *row, float *o, const float *state, int64_t width) {
    memcpy(row, state, sizeof *row);
    memcpy(o, state + 2, sizeof(float) * width);
}

INLINE void store_state(float *state, struct row row, const float *o, int64_t width) {
    memcpy(state, &row, sizeof row);
    memcpy(state + 2, o, sizeof(float) * width);
}

/* Load the initial states of all rows; rows without a state start empty. */
INLINE void load_states(const struct call *call, const struct task *task, struct row *merged, float *total, int64_t head) {
    const int64_t rows = call->group * task->own.queries, width = padded(call->value_dim);
    const struct row empty = {-__builtin_inff(), 0};
    memset(total, 0, sizeof(float) * rows * width);
    for (int64_t r = 0; r < rows; r++) merged[r] = empty;
    const struct reader *reader = first_row(task).reader;
    for (int64_t r = 0; r < rows; reader++) {
        const float *state = reader->state;
        for (int64_t i = 0; i < call->group * reader->queries; i++, r++)
            if (state)
                load_state(merged + r, total + r * width, state + head * reader->state_head + i * state_size(call), width);
    }
}

INLINE void store_states(const struct call *call, const struct task *task, const struct row *merged, const float *total,
                         int64_t head) {
    const int64_t width = padded(call->value_dim);
    for (int64_t n = 0; n < task->reader_count; n++) {
        float *state = task->readers[n].state + head * task->readers[n].state_head;
        for (int64_t i = 0; i < call->group * task->readers[n].queries; i++, merged++, total += width)
            store_state(state + i * state_size(call), *merged, total, width);
    }
}

INLINE int64_t chunks_of(const struct task *task) {
    return (task->stop + CHUNK - 1) / CHUNK - task->start / CHUNK;
}

INLINE void attend(const struct call *call, const struct task *task, struct scratch *own, struct row *merged, float *total,
                   int64_t head) {
    const int64_t rows = call->group * task->own.queries, width = padded(call->value_dim);
    const struct units units = units_of(call, task);
    float *part = task->parts;
    if (part) part += head * chunks_of(task) * rows * state_size(call);
    load_queries(call, task, own, head);
    load_states(call, task, merged, total, head);
    struct keys *keys = own->keys, *next = own->keys + 1;
    locate(keys, call, task, head, task->start);
    while (keys->from < keys->to) {
        const int64_t chunk = keys->position / CHUNK;
        begin_chunk(call, own, rows);
        while (keys->from < keys->to && keys->position / CHUNK == chunk) {
            locate(next, call, task, head, keys->position + BLOCK);
            if (some_seen(task, keys)) take_block(call, task, &units, own, keys, next, head, rows);
            struct keys *spare = keys;
            keys = next;
            next = spare;
        }
        end_chunk(call, own, rows);
        for (int64_t r = 0; r < rows; r++) {
            const struct row row = {own->most[r], own->sum[r]};
            const float *o = own->o + r * width;
            if (part) {
                store_state(part, row, o, width);
                part += state_size(call);
            } else {
                merge(merged + r, total + r * width, row, o, width, units.factor);
            }
        }
    }
    if (task->readers)
        store_states(call, task, merged, total, head);
    else if (!part)
        for (int64_t r = 0; r < rows; r++)
            finish(call, task, &units, merged[r], total + r * width, r % task->own.queries,
                   head * call->group + r / task->own.queries);
}

INLINE int64_t most_rows(const struct call *call) {
    int64_t rows = 0;
    for (int64_t n = 0; n < call->count; n++) {
        const int64_t own = call->group * call->tasks[n].own.queries;
        if (own > rows) rows = own;
    }
    return rows;
}

/* Return whether each tensor that the tasks of a call read or write has an address. */
INLINE int has_addresses(const struct call *call) {
    int found = 1;
    for (int64_t n = 0; n < call->count; n++) {
        const struct task *task = call->tasks + n;
        if (!task->own.queries || !task->heads) continue;
        for (int64_t r = 0; r < task->reader_count; r++) found &= !task->readers[r].queries || task->readers[r].q;
        if (!task->readers) found &= task->own.q && (task->o || task->parts);
        if (task->start >= task->stop) continue;
        const int64_t first = (task->start - task->first) / task->tokens, last = (task->stop - 1 - task->first) / task->tokens;
        for (int64_t span = first; span <= last; span++) found &= task->spans[span].k && task->spans[span].v;
    }
    return found;
}

/* Compute all tasks of a call. Return 0, NO_MEMORY or NO_ADDRESS. */
int PASTE(flashpoint_forward_, ISA)(const struct call *call) {
    const int64_t rows = most_rows(call), width = padded(call->value_dim);
    struct scratch own;
    struct memory memory = {0, 0};
    struct row *merged;
    float *total;
    if (!has_addresses(call)) return NO_ADDRESS;
    for (int pass = 0; pass < 2; pass++) { /* the first pass counts bytes */
        merged = take(&memory, sizeof *merged * rows);
        total = take(&memory, sizeof *total * rows * width);
        place(&own, &memory, call, rows);
        if (!pass && !reserve(&memory)) return NO_MEMORY;
    }
    begin(&own);
    for (int64_t n = 0; n < call->count; n++)
        for (int64_t head = 0; head < call->tasks[n].heads; head++) attend(call, call->tasks + n, &own, merged, total, head);
    end(&own);
    free(memory.start);
    return 0;
}

/* Merge the states of all chunks in order, and write o and lse. The states are in `task.parts`, where earlier calls of
   flashpoint_forward wrote them. Return 0, NO_MEMORY or NO_ADDRESS. */
int PASTE(flashpoint_merge_, ISA)(const struct call *call) {
    const int64_t width = padded(call->value_dim), size = state_size(call);
    float *total = aligned_alloc(64, sizeof(float) * width);
    if (!total) return NO_MEMORY;
    for (int64_t n = 0; n < call->count; n++) {
        const struct task *task = call->tasks + n;
        const struct units units = units_of(call, task);
        const int64_t rows = call->group * task->own.queries, chunks = chunks_of(task);
        for (int64_t head = 0; head < task->heads; head++)
            for (int64_t r = 0; r < rows; r++) {
                struct row merged = {-__builtin_inff(), 0}, row;
                memset(total, 0, sizeof(float) * width);
                for (int64_t c = 0; c < chunks; c++) {
                    const float *part = task->parts + ((head * chunks + c) * rows + r) * size;
                    memcpy(&row, part, sizeof row);
                    merge(&merged, total, row, part + 2, width, units.factor);
                }
                finish(call, task, &units, merged, total, r % task->own.queries, head * call->group + r / task->own.queries);
            }
    }
    free(total);
    return 0;
}
