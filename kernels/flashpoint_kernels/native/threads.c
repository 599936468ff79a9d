/* Run calls of the kernels on several threads, and repeat calls with other tensors.

   The threads are those of torch's operators if `flashpoint_use_team` was called, else threads of this file
   (docs/decisions/threads.md says why). The first call that needs a thread of this file creates it. The thread then waits for jobs: first it polls for a short time,
   because waking a thread takes about as long as a small call, then it sleeps. A caller never waits for a thread that
   has not begun its job: the caller does that job itself. A forked child begins without threads.

   Each call runs in the default mode of the processor's arithmetic, whatever mode its thread is in: a program may have
   set its own thread to treat denormal numbers as zeros, and a new thread has the mode of the thread that makes it. */

#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "memory.h"

#define MOST_THREADS 255
#define LOOKS 2000 /* number of pauses while polling, about 0.1 ms */

#ifdef __x86_64__
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() atomic_signal_fence(memory_order_seq_cst)
#endif

typedef int function(const void *call); /* returns 0, or flags of memory.h */

/* Set the mode of this thread's arithmetic. The default rounds to nearest, keeps denormal numbers, and has no traps. */
#if defined(__x86_64__)
#define DEFAULT_MODE 0x1f80
typedef unsigned mode;
static mode mode_now(void) { return __builtin_ia32_stmxcsr(); }
static void set_mode(mode given) { __builtin_ia32_ldmxcsr(given); }
#elif defined(__aarch64__)
#define DEFAULT_MODE 0
typedef uint64_t mode;
static mode mode_now(void) {
    mode found;
    __asm__ volatile("mrs %0, fpcr" : "=r"(found));
    return found;
}
static void set_mode(mode given) { __asm__ volatile("msr fpcr, %0" : : "r"(given) : "memory"); }
#else
#define DEFAULT_MODE 0
typedef int mode;
static mode mode_now(void) { return 0; }
static void set_mode(mode given) { (void)given; }
#endif

static int in_default_mode(function *compute, const void *call) {
    const mode before = mode_now();
    set_mode(DEFAULT_MODE);
    const int failed = compute(call);
    set_mode(before);
    return failed;
}

struct job {
    function *compute;
    const void *call;
    int failed;
    atomic_int done;
};

struct worker {
    _Atomic(struct job *) job; /* the job to run next */
    atomic_int claimed;        /* 1 from a caller's claim until the job is done */
    atomic_int asleep;
    pthread_mutex_t mutex;
    pthread_cond_t wake;
};

static struct worker workers[MOST_THREADS];
static atomic_int made;   /* workers with index [0, made) have a thread */
static atomic_int making; /* a thread is being made */

static struct job *await_job(struct worker *own) {
    for (int look = 0; look < LOOKS; look++) {
        if (atomic_load_explicit(&own->job, memory_order_relaxed)) break;
        PAUSE();
    }
    struct job *found = atomic_exchange(&own->job, 0);
    if (found) return found;
    pthread_mutex_lock(&own->mutex);
    atomic_store(&own->asleep, 1);
    while (!(found = atomic_exchange(&own->job, 0))) pthread_cond_wait(&own->wake, &own->mutex);
    atomic_store(&own->asleep, 0);
    pthread_mutex_unlock(&own->mutex);
    return found;
}

static void *work(void *argument) {
    struct worker *own = argument;
    for (;;) {
        struct job *job = await_job(own);
        job->failed = in_default_mode(job->compute, job->call);
        atomic_store(&own->claimed, 0);
        atomic_store(&job->done, 1); /* do not use the job after this: it is in the caller's memory */
    }
    return 0;
}

/* The function GOMP_parallel of torch's OpenMP library: run work(argument) on a team of threads, of which this thread is
   one, and wait until all return. 0 threads is the number that torch has set for this thread. */
typedef void parallel(void (*work)(void *), void *argument, unsigned threads, unsigned flags);

static parallel *_Atomic team; /* null: use the threads of this file */
static atomic_int team_taken;  /* a call uses its thread's team; calls of other threads then use the threads of this file */

void flashpoint_use_team(parallel *function) { atomic_store(&team, function); }

/* Forget all threads in a forked child, which has none of its parent's threads. OpenMP would wait for them. */
static void forget(void) {
    atomic_store(&made, 0);
    atomic_store(&making, 0);
    atomic_store(&team, 0);
    atomic_store(&team_taken, 0);
}

__attribute__((constructor)) static void prepare(void) { pthread_atfork(0, 0, forget); }

/* Make and claim one more worker, unless there are already `most`. Return null if none was made. */
static struct worker *make_worker(int most) {
    struct worker *own = 0;
    if (atomic_exchange(&making, 1)) return 0;
    const int number = atomic_load(&made);
    if (number < most && number < MOST_THREADS) {
        pthread_attr_t detached;
        pthread_t thread;
        sigset_t all, before;
        own = workers + number;
        memset(own, 0, sizeof *own);
        atomic_store(&own->claimed, 1);
        pthread_mutex_init(&own->mutex, 0);
        pthread_cond_init(&own->wake, 0);
        pthread_attr_init(&detached);
        pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
        sigfillset(&all); /* the program's own threads handle signals */
        pthread_sigmask(SIG_SETMASK, &all, &before);
        if (pthread_create(&thread, &detached, work, own)) own = 0;
        pthread_sigmask(SIG_SETMASK, &before, 0);
        pthread_attr_destroy(&detached);
        if (own) atomic_store(&made, number + 1);
    }
    atomic_store(&making, 0);
    return own;
}

static struct worker *claim_worker(int most) {
    const int count = atomic_load(&made);
    for (int n = 0; n < count && n < most; n++) {
        int free = 0;
        if (atomic_compare_exchange_strong(&workers[n].claimed, &free, 1)) return workers + n;
    }
    return make_worker(most);
}

static void hand_over(struct worker *worker, struct job *job) {
    atomic_store(&worker->job, job);
    if (!atomic_load(&worker->asleep)) return;
    pthread_mutex_lock(&worker->mutex);
    pthread_cond_signal(&worker->wake);
    pthread_mutex_unlock(&worker->mutex);
}

/* Calls that the threads of a team take one by one. There may be more threads than calls, or fewer. */
struct untaken {
    function *compute;
    const char *calls;
    int64_t size, count;
    atomic_llong next;
    atomic_int failed;
};

static void take_calls(void *argument) {
    struct untaken *own = argument;
    for (int64_t n; (n = atomic_fetch_add(&own->next, 1)) < own->count;) {
        const int failed = in_default_mode(own->compute, own->calls + n * own->size);
        if (failed) atomic_fetch_or(&own->failed, failed);
    }
}

static int share_in_team(parallel *run, function *compute, const char *calls, int64_t size, int64_t count) {
    struct untaken all = {compute, calls, size, count, 0, 0};
    run(take_calls, &all, 0, 0);
    return atomic_load(&all.failed);
}

static int share_with_workers(function *compute, const char *calls, int64_t size, int64_t count) {
    struct job jobs[MOST_THREADS];
    struct worker *given[MOST_THREADS];
    const int others = count - 1 < MOST_THREADS ? (int)count - 1 : MOST_THREADS;
    int failed = 0;
    for (int n = 0; n < others; n++) {
        jobs[n] = (struct job){compute, calls + (n + 1) * size, 0, 0};
        given[n] = claim_worker(others);
        if (given[n]) hand_over(given[n], jobs + n);
    }
    failed |= in_default_mode(compute, calls);
    for (int64_t n = others + 1; n < count; n++) failed |= in_default_mode(compute, calls + n * size);
    for (int n = 0; n < others; n++) {
        struct job *own = jobs + n;
        if (!given[n] || atomic_compare_exchange_strong(&given[n]->job, &own, 0)) { /* no thread has begun this call */
            if (given[n]) atomic_store(&given[n]->claimed, 0);
            failed |= in_default_mode(compute, jobs[n].call);
            continue;
        }
        for (int look = 0; !atomic_load(&jobs[n].done); look++) {
            if (look < LOOKS)
                PAUSE();
            else
                sched_yield();
        }
        failed |= jobs[n].failed;
    }
    return failed;
}

/* Compute `count` calls, structures of `size` bytes each, on several threads, of which this thread is one. Return 0, or
   the flags of failed calls. */
int flashpoint_share(function *compute, const char *calls, int64_t size, int64_t count) {
    if (count == 1) return in_default_mode(compute, calls);
    parallel *run = atomic_load(&team);
    if (!run || atomic_exchange(&team_taken, 1)) return share_with_workers(compute, calls, size, count);
    const int failed = share_in_team(run, compute, calls, size, count);
    atomic_store(&team_taken, 0);
    return failed;
}

/* Calls to repeat: one structure for each thread, and then the data to which these point, as integers. `bases` has the
   type of each integer: 0 for a plain value, 1 for an offset in bytes into the integers, 2 and above for an offset in
   bytes from the address of a tensor. */
struct replay {
    function *compute;
    int64_t size, count; /* bytes of one structure, and number of structures */
    int64_t length;
    const int64_t *integers;
    const unsigned char *bases;
};

/* Repeat calls with tensors at other addresses. Return 0 or flags, like `flashpoint_share`. */
int flashpoint_replay(const struct replay *replay, int64_t a, int64_t b, int64_t c, int64_t d, int64_t e, int64_t f, int64_t g,
                      int64_t h, int64_t i) {
    int64_t *copy = malloc(sizeof *copy * replay->length);
    if (!copy) return NO_MEMORY;
    const int64_t bases[] = {0, (int64_t)(intptr_t)copy, a, b, c, d, e, f, g, h, i};
    for (int64_t n = 0; n < replay->length; n++) copy[n] = replay->integers[n] + bases[replay->bases[n]];
    const int failed = flashpoint_share(replay->compute, (const char *)copy, replay->size, replay->count);
    free(copy);
    return failed;
}
