/* Read a replay (see threads.c) and its tensors from standard input, run it, and write the tensors to standard output.

   The input starts with int64 numbers: 0 for the forward or 1 for the gradient, then the members `size`, `count`,
   `length`, `integers` and `bases` of `struct replay`, the number of tensors, and the size of each tensor in bytes. The
   contents of all tensors follow. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

typedef int function(const void *call);
int flashpoint_forward_generic(const void *call);
int flashpoint_backward_generic(const void *call);

struct replay {
    function *compute;
    int64_t size, count, length;
    const int64_t *integers;
    const unsigned char *bases;
};
int flashpoint_replay(const struct replay *replay, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g,
                      int64_t h, int64_t i);

static void *input(int64_t bytes) {
    void *found = malloc(bytes);
    if (!found || fread(found, 1, bytes, stdin) != (size_t)bytes) exit(1);
    return found;
}

static int64_t number(void) { return *(int64_t *)input(8); }

int main(void) {
    char *tensors[9] = {0};
    int64_t at[9] = {0};
    struct replay replay = {.compute = number() ? flashpoint_backward_generic : flashpoint_forward_generic};
    replay.size = number();
    replay.count = number();
    replay.length = number();
    replay.integers = input(8 * replay.length);
    unsigned char *bases = malloc(replay.length);
    for (int64_t n = 0; n < replay.length; n++) bases[n] = (unsigned char)number();
    replay.bases = bases;
    const int64_t count = number();
    const int64_t *bytes = input(8 * count);
    for (int64_t n = 0; n < count; n++) at[n] = (int64_t)(intptr_t)(tensors[n] = input(bytes[n]));
    if (flashpoint_replay(&replay, at[0], at[1], at[2], at[3], at[4], at[5], at[6], at[7], at[8])) return 1;
    for (int64_t n = 0; n < count; n++)
        if (fwrite(tensors[n], 1, bytes[n], stdout) != (size_t)bytes[n]) return 1;
    return 0;
}
