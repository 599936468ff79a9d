/* The gradient of attention on the CPU (FlashAttention-2, Dao 2023, Algorithm 2), from the forward's o and lse.

   A part of the work is some queries, of all query heads that share a key/value head, with all keys of their sequence.
   For each block of KEYS keys and each block of QUERIES queries there are five products: S = Q K^T, dP = dO V^T, dV +=
   P^T dO, dK += dS^T Q, dQ += dS K. After the first two, `differentiate` computes P and dS from S and dP in float32,
   with all options.

   Positions determine the order of all sums: the bits of a row of dQ depend only on the row, the keys that it sees and
   the options, and those of dK and dV only on their sequence. The distribution of parts over threads changes no bits.

   Two files compute the products: backward_float32.h, and backward_amx.h in tiles of bfloat16. build.py
   compiles this file once for each instruction set, with ISA as the suffix of its functions. */

#include "backward.h"
#include "products.h"

#if defined(__AVX512BF16__) || defined(TILES_IN_C) || defined(PAIRS_IN_C)
#define TILES
#include "backward_amx.h"
#else
#include "backward_float32.h"
#endif

/* Write the gradients of a block of keys to dk and dv or, if the part has `sums`, write or add them there. `seen`:
   whether any query sees any of the keys. */
INLINE void write_keys(const struct call *call, const struct part *part, const struct scratch *own,
                       const struct block *block, int seen) {
    const enum type type = (enum type)call->type;
    const int64_t dim = own->dim, value_dim = own->value_dim;
    if (!seen) {
        memset(own->dk, 0, sizeof(float) * KEYS * dim);
        memset(own->dv, 0, sizeof(float) * KEYS * value_dim);
    }
    for (int64_t j = 0, key = block->position; j < block->keys; j++, key++) {
        const float *dk = own->dk + j * dim, *dv = own->dv + j * value_dim;
        if (!part->sums) {
            if (part->dk.at) write_row(part->dk.at + key * part->dk.row, type, dk, call->dim);
            if (part->dv.at) write_row(part->dv.at + key * part->dv.row, type, dv, call->value_dim);
            continue;
        }
        const int64_t k_width = part->dk.at ? call->dim : 0, v_width = part->dv.at ? call->value_dim : 0;
        float *sums = part->sums + key * (k_width + v_width);
        for (int64_t d = 0; d < k_width; d++) sums[d] = part->add ? sums[d] + dk[d] : dk[d];
        sums += k_width;
        for (int64_t d = 0; d < v_width; d++) sums[d] = part->add ? sums[d] + dv[d] : dv[d];
    }
}

/* Return the part with only its key/value head number `head`. */
INLINE struct part of_head(const struct call *call, struct part part, int64_t head) {
    struct rows *of_queries[] = {&part.q, &part.o, &part.dout, &part.lse, &part.dlse, &part.dq, &part.mask, &part.dmask,
                                 &part.blocks};
    struct rows *of_keys[] = {&part.k, &part.v, &part.dk, &part.dv};
    const int64_t query = head * call->group;
    for (int n = 0; n < 9; n++)
        if (of_queries[n]->at) of_queries[n]->at += query * of_queries[n]->head;
    for (int n = 0; n < 4; n++)
        if (of_keys[n]->at) of_keys[n]->at += head * of_keys[n]->head;
    if (part.slopes) part.slopes += query;
    if (part.sinks) part.sinks += query;
    if (part.dsinks) part.dsinks += query;
    part.head += query;
    return part;
}

/* Compute a part that has only one key/value head. */
INLINE void compute(const struct call *call, const struct part *part, struct scratch *own, enum range range) {
    const int64_t rows = rows_of(part->count); /* rows of a head */
    for (int64_t g = 0; g < call->group; g++) {
        read_sums(call, part, &own->sums, range, g, g * rows);
        copy_queries(call, own, part->q.at + g * part->q.head + part->first * part->q.row, part->q.row,
                     part->dout.at + g * part->dout.head + part->first * part->dout.row, part->dout.row, part->count,
                     g * rows);
    }
    const int wanted = part->dq.at || part->dk.at || part->dv.at || part->dmask.at;
    for (int64_t position = 0; wanted && position < part->keys; position += KEYS) {
        struct block block = {.position = position, .keys = lesser(part->keys - position, KEYS)};
        int seen = 0;
        for (int64_t g = 0; g < call->group; g++)
            for (int64_t i = 0; i < part->count; i += QUERIES) {
                const int64_t first = part->first + i, count = lesser(part->count - i, QUERIES);
                see(call, part, g, first, count, UNIT, &block);
                if (block.from == block.to) {
                    clear_mask(call, part, g, first, count, &block);
                    continue;
                }
                if (!seen++)
                    copy_keys(call, own, part->k.at + position * part->k.row, part->k.row,
                              of_scores(part) ? part->v.at + position * part->v.row : 0, part->v.row, block.keys);
                step(call, part, own, range, g * rows + i, g, first, count, &block);
            }
        if (seen) finish_keys(own);
        write_keys(call, part, own, &block, seen);
    }
    for (int64_t g = 0; part->dq.at && g < call->group; g++)
        for (int64_t i = 0; i < part->count; i++)
            write_row(part->dq.at + g * part->dq.head + (part->first + i) * part->dq.row, (enum type)call->type,
                      dq_row(own, g * rows + i), call->dim);
}

#ifdef TILES
int flashpoint_backward_avx512(const struct call *call);

/* Compute a part by float32 products. Return 0, NO_MEMORY or NO_ADDRESS. */
static int compute_in_float32(const struct call *call, const struct part *part) {
    struct call one = *call;
    struct part own = *part;
    own.heads = 1;
    one.count = 1;
    one.parts = &own;
    return flashpoint_backward_avx512(&one);
}
#endif

/* Return whether each tensor that the parts of a call read has an address. An output without one is not computed. */
INLINE int has_addresses(const struct call *call) {
    int found = 1;
    for (int64_t n = 0; n < call->count; n++) {
        const struct part *part = call->parts + n;
        if (!part->count || !part->heads) continue;
        found &= part->q.at && part->o.at && part->dout.at && part->lse.at && (!part->keys || (part->k.at && part->v.at));
    }
    return found;
}

/* Compute all parts of a call. Return 0, NO_MEMORY or NO_ADDRESS. */
int PASTE(flashpoint_backward_, ISA)(const struct call *call) {
    struct scratch own = {.dim = rounded(call->dim, UNIT), .value_dim = rounded(call->value_dim, UNIT)};
    struct memory memory = {0, 0};
    int64_t rows = 0;
    int failed = 0;
    if (!has_addresses(call)) return NO_ADDRESS;
    for (int64_t n = 0; n < call->count; n++) rows = greater(rows, call->group * rows_of(call->parts[n].count));
    for (int pass = 0; pass < 2; pass++) { /* the first pass counts bytes */
        own.sums.lse = take(&memory, sizeof(float) * rows);
        own.sums.delta = take(&memory, sizeof(float) * rows);
        own.sums.row = take(&memory, sizeof(float) * 2 * own.value_dim);
        own.sums.drawn = take(&memory, sizeof(uint32_t) * ROOM(KEYS));
        place(&own, &memory, rows);
        if (!pass && !reserve(&memory)) return NO_MEMORY;
    }
    begin(&own);
    for (int64_t n = 0; n < call->count; n++)
        for (int64_t head = 0; head < call->parts[n].heads; head++) {
            const struct part part = of_head(call, call->parts[n], head);
            const enum range range = range_of(call, &part);
#ifdef TILES
            if (range != USUAL) {
                failed |= compute_in_float32(call, &part);
                continue;
            }
#endif
            compute(call, &part, &own, range);
        }
    end(&own);
    free(memory.start);
    return failed;
}
