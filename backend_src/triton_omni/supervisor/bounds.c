/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded into tritonserver: it bounds what callers can make of Triton's HTTP and gRPC front ends.
 *
 * Bodies. Triton 24.10 reads an HTTP body of any length, keeps 1 KiB for each of its chunks, and parses JSON by a
 * recursion. Here a connection with too many bytes, line ends (two a chunk) or opening brackets between two answers is
 * answered 413, and its further input is dropped. Brackets count everywhere: in random bytes every 128th is one.
 *
 * Pipelining. Triton 24.10 reads requests that are sent ahead without a bound, and logs a line for each. Here a
 * connection on which input waits while AHEAD answers are written is closed.
 *
 * Stacks. Triton's HTTP threads put parts of a body on their stack: two bytes for each byte of a body of the form
 * content type, which is curl's default, and less than BRACKET_BYTES for each level of JSON. So they get larger ones.
 * Stack memory that a large body has touched is released with the answer.
 *
 * Compression. Triton unpacks compressed HTTP bodies and gRPC messages whole. Here the same bounds hold after unpacking.
 *
 * Classification. This extension divides by the size of a string, which is 0, and sorts NaN. Both front ends ask for a
 * model's batch properties for nothing else, so this question is refused.
 *
 * Parts. Triton looks each parameter and each input of a request up among all the others: 40,000 parameters took an HTTP
 * thread 13 s. Here a request has at most PARTS of them.
 *
 * Objects. Triton takes no JSON object for an input, such as `sampling_parameters`, and says so in words of its parser,
 * with the status 500. Here the error says how to write it.
 *
 * Shared memory. Triton maps each file of /dev/shm that a caller names. Here it maps none but those of clients. Boost
 * sets the mode of the Python backend's regions to 0644 whatever the umask is. Here they are for their owner alone, and
 * the backend's errors, which callers read, do not name them.
 *
 * Triton closes the file of a region once it is mapped. It keeps the file's number and takes it for open if the same key
 * is registered again. It then maps and closes whatever file has that number by now. Here such a number is no open file.
 * Triton also leaves a file open if the region is larger than the file. Here the next registration closes it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#ifndef BODY_BYTES
#error "BODY_BYTES: the longest body of an HTTP request"
#endif
#define CLIENTS_FILE "triton_omni_client_"
#define OWN_FILE "triton_omni_"
#define NAME_CHARACTERS "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-"
enum { MIB = 1 << 20, CONNECTIONS = 1 << 20, HEADERS_BYTES = 1 << 16, DROPPED_BYTES = 1 << 30, IN_USE_BYTES = 1 << 18 };
enum { LINE_ENDS = 1 << 18, BRACKETS = BODY_BYTES / 64 + MIB, BRACKET_BYTES = 128 };
enum { PARTS = 1024, AHEAD = 64 };
enum { TRITONSERVER_ERROR_INVALID_ARG = 3, Z_STREAM_ERROR = -2 };
static const size_t STACK_BYTES = 2UL * BODY_BYTES + (size_t)BRACKET_BYTES * MIB + 8UL * MIB;

static const char NO_CLASSES[] = "parameter classification: this server classifies no output, ask for the output itself "
                                 "[omni:bad_request;stage=thinker]";
static const char TOO_MANY_PARTS[] = "the request has over 1024 inputs, outputs and parameters, which is the limit "
                                     "[omni:too_large;stage=thinker]";
static const char NO_OBJECT[] = "an input is not text: write an object such as sampling_parameters as a string of JSON, "
                                "or its keys into parameters, such as {\"seed\": 7} [omni:bad_request;stage=thinker]";
static const char TRITONS_NO_OBJECT[] = "Unable to parse JSON bytes array: attempt to access JSON non-string";

/* The documented part of zlib's stream. */
typedef struct {
    const unsigned char *next_in;
    unsigned avail_in;
    unsigned long total_in;
    unsigned char *next_out;
    unsigned avail_out;
    unsigned long total_out;
} zlib_stream;

/* Not of a library: of the program itself, to which Triton's front ends, evhtp and gRPC are linked. */
static int of_the_front_ends(const void *code) {
    Dl_info found;
    return dladdr(code, &found) != 0 && strcmp(found.dli_fname, program_invocation_name) == 0;
}

static int of_the_python_backend(const void *code) {
    Dl_info found;
    return dladdr(code, &found) != 0 && strstr(found.dli_fname, "/libtriton_python.so") != NULL;
}

/* Stages do not inherit this: Python's packages bring zlib libraries of their own, whose streams no other may inflate. */
__attribute__((constructor)) static void leave_the_stages_alone(void) {
    Dl_info own;
    char *list = getenv("LD_PRELOAD"), *place;
    if (strcmp(program_invocation_short_name, "tritonserver") != 0 || list == NULL || (list = strdup(list)) == NULL)
        return;
    if (dladdr((const void *)leave_the_stages_alone, &own) != 0 && (place = strstr(list, own.dli_fname)) != NULL) {
        memset(place, ':', strlen(own.dli_fname));
        setenv("LD_PRELOAD", list, 1);
    }
    free(list);
}

/* Input since the last answer, by file descriptor. */
typedef struct {
    int64_t bytes, line_ends, brackets;
} quantity;
static quantity taken[CONNECTIONS];
/* Answers during which input waited: a caller that waits for its answer sends nothing meanwhile. */
static int ahead[CONNECTIONS];

static int is_too_large(const quantity *body) {
    return body->bytes > BODY_BYTES + HEADERS_BYTES || body->line_ends > LINE_ENDS || body->brackets > BRACKETS;
}

static void add(quantity *body, const unsigned char *part, size_t size) {
    int64_t line_ends = 0, brackets = 0;
    for (size_t at = 0; at < size; at++)
        brackets += (part[at] == '[') | (part[at] == '{');
    for (size_t at = 1; at < size; at++)
        line_ends += (part[at - 1] == '\r') & (part[at] == '\n');
    body->bytes += size;
    body->line_ends += line_ends;
    body->brackets += brackets;
}

static void refuse(int connection) {
    char said[256], answer[512];
    int length = snprintf(said, sizeof said,
                          "{\"error\":\"the body is over limits.max_body_bytes %ld, or has over %d brackets or %d chunks: "
                          "send large media over gRPC [omni:too_large;stage=thinker]\"}",
                          (long)BODY_BYTES, BRACKETS, LINE_ENDS / 2);
    length = snprintf(answer, sizeof answer,
                      "HTTP/1.1 413 Payload Too Large\r\nContent-Type: application/json\r\nConnection: close\r\n"
                      "Content-Length: %d\r\n\r\n%s",
                      length, said);
    /* One that does not read gets no answer. */
    send(connection, answer, length, MSG_NOSIGNAL | MSG_DONTWAIT);
    shutdown(connection, SHUT_WR);
}

/* HTTP alone reads this way. */
ssize_t readv(int connection, const struct iovec *parts, int count) {
    if (connection >= 0 && connection < CONNECTIONS && ahead[connection] > AHEAD)
        return 0;
    ssize_t got = ((ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "readv"))(connection, parts, count);
    if (got <= 0 || connection >= CONNECTIONS)
        return got;
    quantity *body = &taken[connection];
    int was_too_large = is_too_large(body);
    ssize_t left = got;
    for (int part = 0; left > 0 && part < count; left -= parts[part++].iov_len)
        add(body, parts[part].iov_base, (size_t)left < parts[part].iov_len ? (size_t)left : parts[part].iov_len);
    if (!is_too_large(body))
        return got;
    if (!was_too_large)
        refuse(connection);
    if (body->bytes > (int64_t)BODY_BYTES + DROPPED_BYTES)
        return 0;
    errno = EAGAIN;
    return -1;
}

/* The event loop writes an answer, so the stack holds no body any more. */
static void give_stack_back(void) {
    pthread_attr_t attributes;
    void *lowest;
    size_t size;
    if (pthread_getattr_np(pthread_self(), &attributes) != 0)
        return;
    pthread_attr_getstack(&attributes, &lowest, &size);
    pthread_attr_destroy(&attributes);
    uintptr_t page = sysconf(_SC_PAGESIZE);
    uintptr_t in_use = ((uintptr_t)__builtin_frame_address(0) - IN_USE_BYTES) & ~(page - 1);
    if (in_use > (uintptr_t)lowest)
        madvise(lowest, in_use - (uintptr_t)lowest, MADV_DONTNEED);
}

ssize_t writev(int connection, const struct iovec *parts, int count) {
    if (connection >= 0 && connection < CONNECTIONS) {
        if (taken[connection].bytes > MIB)
            give_stack_back();
        taken[connection] = (quantity){0};
        int waiting = 0;
        ahead[connection] += ioctl(connection, FIONREAD, &waiting) == 0 && waiting > 0;
    }
    return ((ssize_t(*)(int, const struct iovec *, int))dlsym(RTLD_NEXT, "writev"))(connection, parts, count);
}

int accept4(int listener, struct sockaddr *peer, socklen_t *length, int flags) {
    int connection =
        ((int (*)(int, struct sockaddr *, socklen_t *, int))dlsym(RTLD_NEXT, "accept4"))(listener, peer, length, flags);
    if (connection >= 0 && connection < CONNECTIONS) {
        taken[connection] = (quantity){0};
        ahead[connection] = 0;
    }
    return connection;
}

int pthread_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*work)(void *), void *argument) {
    int (*create)(pthread_t *, const pthread_attr_t *, void *(*)(void *), void *) = dlsym(RTLD_NEXT, "pthread_create");
    /* HTTP's threads are the only ones of the program without attributes. */
    if (attributes != NULL || !of_the_front_ends(__builtin_return_address(0)))
        return create(thread, attributes, work, argument);
    pthread_attr_t large;
    pthread_attr_init(&large);
    pthread_attr_setstacksize(&large, STACK_BYTES);
    int result = create(thread, &large, work, argument);
    pthread_attr_destroy(&large);
    if (result == 0)
        return 0;
    fprintf(stderr, "warning: no room for an HTTP thread's stack of %zu bytes: a large body may end the server\n",
            STACK_BYTES);
    return create(thread, NULL, work, argument);
}

/* A thread unpacks one body to its end before the next. */
int inflate(zlib_stream *stream, int flush) {
    static __thread quantity unpacked;
    const unsigned char *begin = stream->next_out;
    if (stream->total_out == 0)
        unpacked = (quantity){0};
    int result = ((int (*)(zlib_stream *, int))dlsym(RTLD_NEXT, "inflate"))(stream, flush);
    if (!of_the_front_ends(__builtin_return_address(0)))
        return result;
    add(&unpacked, begin, stream->next_out - begin);
    return is_too_large(&unpacked) ? Z_STREAM_ERROR : result;
}

/* File that this thread opened for a registration and has not closed yet; -1 = none. */
static __thread int registering = -1;
/* By file descriptor: true if it was that of a registration. */
static char has_registered[CONNECTIONS];

int shm_open(const char *name, int flags, mode_t mode) {
    int (*open_shared)(const char *, int, mode_t) = dlsym(RTLD_NEXT, "shm_open");
    if (!of_the_front_ends(__builtin_return_address(0)))
        return open_shared(name, flags, mode);
    if (registering >= 0)
        close(registering);
    if (strncmp(name + strspn(name, "/"), CLIENTS_FILE, strlen(CLIENTS_FILE)) != 0) {
        errno = EACCES;
        return -1;
    }
    registering = open_shared(name, flags, mode);
    if (registering >= 0 && registering < CONNECTIONS)
        has_registered[registering] = 1;
    return registering;
}

int close(int file) {
    if (file == registering)
        registering = -1;
    return syscall(SYS_close, file);
}

static int is_closed_region(int file, const void *caller) {
    int was_region = file >= 0 && file < CONNECTIONS && has_registered[file];
    return was_region && file != registering && of_the_front_ends(caller);
}

/* A registration asks for the size first. */
int fstat(int file, struct stat *found) {
    if (!is_closed_region(file, __builtin_return_address(0)))
        return fstatat(file, "", found, AT_EMPTY_PATH);
    errno = EBADF;
    return -1;
}

int fstat64(int file, struct stat64 *found) {
    if (!is_closed_region(file, __builtin_return_address(0)))
        return fstatat64(file, "", found, AT_EMPTY_PATH);
    errno = EBADF;
    return -1;
}

int fchmod(int file, mode_t mode) {
    if (of_the_python_backend(__builtin_return_address(0)))
        mode &= S_IRWXU;
    return ((int (*)(int, mode_t))dlsym(RTLD_NEXT, "fchmod"))(file, mode);
}

static void *new_error(int code, const char *message) {
    return ((void *(*)(int, const char *))dlsym(RTLD_NEXT, "TRITONSERVER_ErrorNew"))(code, message);
}

void *TRITONSERVER_ServerModelBatchProperties(void *server, const char *model, int64_t version, uint32_t *flags,
                                              void **voidp) {
    (void)server, (void)model, (void)version, (void)flags, (void)voidp;
    return new_error(TRITONSERVER_ERROR_INVALID_ARG, NO_CLASSES);
}

void *TRITONSERVER_ErrorNew(int code, const char *message) {
    if (strncmp(message, TRITONS_NO_OBJECT, strlen(TRITONS_NO_OBJECT)) == 0)
        return new_error(TRITONSERVER_ERROR_INVALID_ARG, NO_OBJECT);
    char *told = of_the_python_backend(__builtin_return_address(0)) ? strdup(message) : NULL;
    if (told == NULL)
        return new_error(code, message);
    for (char *name = told; (name = strstr(name, OWN_FILE)) != NULL;) {
        const char *rest = name + strspn(name, NAME_CHARACTERS);
        memmove(name, rest, strlen(rest) + 1);
    }
    void *error = new_error(code, told);
    free(told);
    return error;
}

/* Count for the request that this thread is reading. */
static __thread int parts;

void *TRITONSERVER_InferenceRequestNew(void **request, void *server, const char *model, int64_t version) {
    parts = 0;
    return ((void *(*)(void **, void *, const char *, int64_t))dlsym(RTLD_NEXT, __func__))(request, server, model,
                                                                                          version);
}

#define COUNTED(name, parameters, arguments)                                                                           \
    void *TRITONSERVER_InferenceRequest##name parameters {                                                             \
        if (++parts > PARTS)                                                                                           \
            return new_error(TRITONSERVER_ERROR_INVALID_ARG, TOO_MANY_PARTS);                                          \
        return ((void *(*)parameters)dlsym(RTLD_NEXT, __func__))arguments;                                             \
    }
COUNTED(AddInput, (void *request, const char *name, int type, const int64_t *shape, uint64_t dimensions),
        (request, name, type, shape, dimensions))
COUNTED(AddRequestedOutput, (void *request, const char *name), (request, name))
COUNTED(SetStringParameter, (void *request, const char *key, const char *value), (request, key, value))
COUNTED(SetIntParameter, (void *request, const char *key, int64_t value), (request, key, value))
COUNTED(SetBoolParameter, (void *request, const char *key, _Bool value), (request, key, value))
COUNTED(SetDoubleParameter, (void *request, const char *key, double value), (request, key, value))
