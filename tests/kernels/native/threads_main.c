/* Several threads share calls among the threads of threads.c, or use a team of threads, and fork, under ThreadSanitizer.
   Prints "right" at the end.

   Each call counts in memory of its own, so that a call that runs twice, or not at all, shows. */

#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#define CALLERS 4
#define ROUNDS 200
#define MOST 6

int flashpoint_share(int (*compute)(const void *call), const char *calls, int64_t size, int64_t count);
void flashpoint_use_team(void (*parallel)(void (*work)(void *), void *argument, unsigned threads, unsigned flags));

/* In the place of OpenMP's function, whose library ThreadSanitizer does not know. Only one call at a time has a team. */
#define TEAM 3
static atomic_int teams, most_teams, uses;

struct member {
    void (*work)(void *);
    void *argument;
};

static void *run_member(void *given) {
    const struct member *own = given;
    own->work(own->argument);
    return 0;
}

static void run_team(void (*work)(void *), void *argument, unsigned threads, unsigned flags) {
    pthread_t others[TEAM - 1];
    struct member member = {work, argument};
    if (threads || flags) exit(3);
    if (atomic_fetch_add(&teams, 1)) atomic_store(&most_teams, 2);
    atomic_fetch_add(&uses, 1);
    for (int n = 0; n < TEAM - 1; n++)
        if (pthread_create(others + n, 0, run_member, &member)) exit(2);
    work(argument);
    for (int n = 0; n < TEAM - 1; n++) pthread_join(others[n], 0);
    atomic_fetch_sub(&teams, 1);
}

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

static int run_callers_and_forks(void) {
    int wrong = run_callers();
    for (int n = 0; n < 3; n++) { /* a child has none of its parent's threads, and makes its own */
        const pid_t child = fork();
        if (child < 0) exit(2);
        if (child == 0) {
            const int before = atomic_load(&uses);
            _exit(share_rounds(ROUNDS / 4, n) != 0 || atomic_load(&uses) != before);
        }
        int status;
        wrong += run_callers();
        waitpid(child, &status, 0);
        wrong += status != 0;
    }
    return wrong;
}

int main(void) {
    int wrong = run_callers_and_forks();
    flashpoint_use_team(run_team);
    wrong += run_callers_and_forks();
    wrong += !atomic_load(&uses) || atomic_load(&most_teams);
    puts(wrong ? "wrong" : "right");
    return wrong != 0;
}
