/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded into tritonserver, which then outlives stages that stall, and stages that die at a bad moment.
 *
 * Triton's Python backend waits one second for a stage to take a request over. It then gives up a stage that lives but
 * did not run meanwhile (a moved virtual machine, a stopped process, swap). It frees the request's memory while the
 * stage's queue still names it, and the stage, or the server, ends by a segmentation fault. The backend waits on a
 * semaphore, so this library continues the wait for as long as the stage lives. It learns each semaphore's stage at the
 * stage's start: the thread that forked a stage waits for it next, and all later waits for that stage use the same
 * semaphore. For an unknown semaphore, all children of the server must live.
 *
 * The backend and a stage share locks in memory. If a stage dies with a lock, the next owner gets the error EOWNERDEAD.
 * Boost turns it into an exception, which the backend's own threads do not catch, and the server aborts. So the backend
 * gets such a lock as if it had been free. The guarded memory has no other user any more and is freed soon.
 *
 * The backend makes a folder in /tmp and removes it only if the server ends in order. Here it makes the folder inside
 * one that the supervisor names, and removes however the server ends.
 *
 * Triton hides a request's parameter `priority` from models, and ignores it if no model has priority levels. Here such a
 * request is refused, with the code and in the words of our refusals.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#ifndef STALL_LIMIT_MS
#error "STALL_LIMIT_MS: how long a wait that has timed out continues"
#endif
enum { SLICE_MS = 50, NS_A_MS = 1000000, NS_A_S = 1000000000, STAGES = 64 };
/* TRITONSERVER_ERROR_INVALID_ARG */
enum { INVALID_ARG = 3 };

#define PYTHON_BACKEND "/libtriton_python.so"

static int (*timed_wait)(sem_t *, const struct timespec *);
static int (*lock)(pthread_mutex_t *);
static int (*timed_lock)(pthread_mutex_t *, const struct timespec *);
static int in_tritonserver;

__attribute__((constructor)) static void look_around(void) {
    timed_wait = (int (*)(sem_t *, const struct timespec *))dlsym(RTLD_NEXT, "sem_timedwait");
    timed_lock = (int (*)(pthread_mutex_t *, const struct timespec *))dlsym(RTLD_NEXT, "pthread_mutex_timedlock");
    /* Stages inherit the preload; in Python the same call is the time-out of a lock. */
    in_tritonserver = strcmp(program_invocation_short_name, "tritonserver") == 0;
}

static struct {
    const sem_t *semaphore;
    pid_t stage;
} known[STAGES];
static pthread_mutex_t known_mutex = PTHREAD_MUTEX_INITIALIZER;
static __thread pid_t forked;

pid_t fork(void) {
    pid_t child = ((pid_t (*)(void))dlsym(RTLD_NEXT, "fork"))();
    if (child > 0)
        forked = child;
    return child;
}

/* The backend collects the process. A collected process is no child any more, and neither is process 0. */
static int has_ended(idtype_t which, pid_t child) {
    siginfo_t ended = {0};
    if (waitid(which, child, &ended, WEXITED | WNOHANG | WNOWAIT) != 0)
        return which == P_PID;
    return ended.si_pid != 0;
}

/* 0 = not known. A restarted stage has another semaphore, which takes the place of an ended stage's. */
static pid_t stage_behind(const sem_t *semaphore) {
    int place = -1;
    pid_t stage = 0;
    pthread_mutex_lock(&known_mutex);
    for (int at = 0; at < STAGES && place < 0; at++)
        if (known[at].semaphore == semaphore)
            place = at;
    for (int at = 0; at < STAGES && place < 0 && forked != 0; at++)
        if (has_ended(P_PID, known[at].stage))
            place = at;
    if (place >= 0) {
        known[place].semaphore = semaphore;
        known[place].stage = stage = forked != 0 ? forked : known[place].stage;
    }
    pthread_mutex_unlock(&known_mutex);
    forked = 0;
    return stage;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *until) {
    if (!in_tritonserver)
        return timed_wait(semaphore, until);
    pid_t stage = stage_behind(semaphore);
    int result = timed_wait(semaphore, until);
    for (int waited = 0; result != 0 && errno == ETIMEDOUT && waited < STALL_LIMIT_MS; waited += SLICE_MS) {
        struct timespec next;
        if (has_ended(stage != 0 ? P_PID : P_ALL, stage)) {
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

/* A function of libtritonserver.so, which its front ends call. */
void *TRITONSERVER_InferenceRequestSetPriorityUInt64(void *request, uint64_t priority) {
    void *(*set)(void *, uint64_t) = (void *(*)(void *, uint64_t))dlsym(RTLD_NEXT, __func__);
    void *(*new_error)(int, const char *) = (void *(*)(int, const char *))dlsym(RTLD_NEXT, "TRITONSERVER_ErrorNew");
    if (priority == 0 || new_error == NULL)
        return set(request, priority);
    return new_error(INVALID_ARG, "priority: this parameter of Triton's is not taken, give a priority from -100 to 100 "
                                  "in sampling_parameters [omni:bad_request]");
}

static int of_the_python_backend(const void *code) {
    Dl_info found;
    return dladdr(code, &found) != 0 && found.dli_fname != NULL && strstr(found.dli_fname, PYTHON_BACKEND) != NULL;
}

static int take_over(int result, pthread_mutex_t *mutex, const void *caller) {
    if (result != EOWNERDEAD || !in_tritonserver || !of_the_python_backend(caller))
        return result;
    return pthread_mutex_consistent(mutex);
}

int pthread_mutex_lock(pthread_mutex_t *mutex) {
    /* Libraries lock while they are loaded, before this one has looked around. */
    if (lock == NULL)
        lock = (int (*)(pthread_mutex_t *))dlsym(RTLD_NEXT, "pthread_mutex_lock");
    return take_over(lock(mutex), mutex, __builtin_return_address(0));
}

int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *until) {
    return take_over(timed_lock(mutex, until), mutex, __builtin_return_address(0));
}

/* The backend's buffer holds PATH_MAX characters. */
char *mkdtemp(char *path) {
    const char *folder = getenv("OMNI_SCRATCH");
    if (folder != NULL && in_tritonserver && of_the_python_backend(__builtin_return_address(0)) &&
        strlen(folder) + sizeof "/python_env_XXXXXX" <= PATH_MAX)
        sprintf(path, "%s/python_env_XXXXXX", folder);
    return ((char *(*)(char *))dlsym(RTLD_NEXT, "mkdtemp"))(path);
}
