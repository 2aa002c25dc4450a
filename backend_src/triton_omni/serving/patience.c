/* SPDX-License-Identifier: Apache-2.0
 *
 * More time for stages that stand still, preloaded into tritonserver.
 *
 * Triton's Python backend waits one second for a stage to take a request over. A stage that lives but did not run
 * meanwhile (a virtual machine that was moved, a stopped process, swap) is then given up: the request's memory is freed
 * while the stage's queue still names it, and the stage, or the server, ends by a segmentation fault. The wait is a
 * semaphore's, so it goes on here, for as long as all children of the server live.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <semaphore.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>

#ifndef PATIENCE_MS
#error "PATIENCE_MS: for how long a wait that has timed out goes on"
#endif
enum { SLICE_MS = 50, NS_A_MS = 1000000, NS_A_S = 1000000000 };

static int (*timed_wait)(sem_t *, const struct timespec *);
static int in_tritonserver;

__attribute__((constructor)) static void look_around(void) {
    timed_wait = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    /* Stages inherit the preload; in Python the same call is the time-out of a lock. */
    in_tritonserver = strcmp(program_invocation_short_name, "tritonserver") == 0;
}

static int a_child_has_ended(void) {
    siginfo_t ended = {0};
    return waitid(P_ALL, 0, &ended, WEXITED | WNOHANG | WNOWAIT) == 0 && ended.si_pid != 0;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    int result = timed_wait(semaphore, until);
    if (!in_tritonserver)
        return result;
    for (int waited = 0; result != 0 && errno == ETIMEDOUT && waited < PATIENCE_MS; waited += SLICE_MS) {
        struct timespec next;
        if (a_child_has_ended()) {
            errno = ETIMEDOUT;
            break;
        }
        clock_gettime(CLOCK_REALTIME, &next);
        next.tv_nsec += SLICE_MS * NS_A_MS;
        if (next.tv_nsec >= NS_A_S) {
            next.tv_sec++;
            next.tv_nsec -= NS_A_S;
        }
        result = timed_wait(semaphore, &next);
    }
    return result;
}
