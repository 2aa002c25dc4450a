/* SPDX-License-Identifier: Apache-2.0
 *
 * Preloaded into tritonserver by a test: what its heap has in use, in bytes, in a file that is written anew all the time.
 * Resident memory would not do: what is freed in the middle of a heap stays resident.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <malloc.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { EVERY_US = 100000 };

static void *watch(void *path) {
    char line[32];
    int file = open(path, O_WRONLY | O_CREAT | O_TRUNC, 0600);
    for (;;) {
        struct mallinfo2 heaps = mallinfo2();
        /* Of one length, so that a reader finds no rest of a longer one. */
        int length = snprintf(line, sizeof line, "%020zu\n", heaps.uordblks + heaps.hblkhd);
        if (pwrite(file, line, length, 0) != length)
            return NULL;
        usleep(EVERY_US);
    }
}

__attribute__((constructor)) static void begin(void) {
    pthread_t thread;
    char *path = getenv("HEAP_WATCH");
    /* Stages inherit the preload. */
    if (path != NULL && strcmp(program_invocation_short_name, "tritonserver") == 0)
        pthread_create(&thread, NULL, watch, path);
}
