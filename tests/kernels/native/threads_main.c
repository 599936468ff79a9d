/* Several threads share calls among the threads of threads.c, and fork, under ThreadSanitizer. Prints "right" at the end.

   Each call counts in memory of its own, so that a call that runs twice, or not at all, shows. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define CALLERS 4
#define ROUNDS 200
#define MOST 6

int flashpoint_share(int (*compute)(const void *call), const char *calls, int64_t size, int64_t count);

struct call {
    int *counter, work;
};

static int compute(const void *given) {
    const struct call *call = given;
    volatile int spent = 0;
    for (int n = 0; n < call->work; n++) spent += n;
    ++*call->counter;
    return 0;
}

static int share_rounds(int rounds, int seed) {
    int wrong = 0;
    for (int round = 0; round < rounds; round++) {
        int counters[MOST] = {0};
        struct call calls[MOST];
        const int count = 1 + (round + seed) % MOST;
        for (int n = 0; n < count; n++) calls[n] = (struct call){counters + n, (n * 37 + round + seed) % 50 * 200};
        wrong += flashpoint_share(compute, (const char *)calls, sizeof *calls, count) != 0;
        for (int n = 0; n < count; n++) wrong += counters[n] != 1;
    }
    return wrong;
}

static void *caller(void *number) {
    return (void *)(intptr_t)share_rounds(ROUNDS, (int)(intptr_t)number);
}

static int run_callers(void) {
    pthread_t threads[CALLERS];
    int wrong = 0;
    for (intptr_t n = 0; n < CALLERS; n++)
        if (pthread_create(threads + n, 0, caller, (void *)n)) exit(2);
    for (int n = 0; n < CALLERS; n++) {
        void *found;
        pthread_join(threads[n], &found);
        wrong += (int)(intptr_t)found;
    }
    return wrong;
}

int main(void) {
    int wrong = run_callers();
    for (int n = 0; n < 3; n++) { /* a child has none of its parent's threads, and makes its own */
        const pid_t child = fork();
        if (child < 0) return 2;
        if (child == 0) _exit(share_rounds(ROUNDS / 4, n) != 0);
        int status;
        wrong += run_callers();
        waitpid(child, &status, 0);
        wrong += status != 0;
    }
    puts(wrong ? "wrong" : "right");
    return wrong != 0;
}
