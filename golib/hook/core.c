/* Loads libamem_nccl.so, the core, in the process whose NCCL first asks for the driver. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "hook.h"

static struct amem_core core;
static _Atomic(const struct amem_core *) loaded;
static char status_text[AMEM_ERROR_TEXT]; /* written before status is */
static _Atomic(amem_status) status = AMEM_OK;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static atomic_bool forked;

/* Whether a socket's name, its own or its peer's, is one that the core gives: "@amem-" and 32 digits. */
static bool names_core(int (*ask)(int, struct sockaddr *, socklen_t *), int fd) {
    struct sockaddr_un name;
    socklen_t size = sizeof name;
    return !ask(fd, (struct sockaddr *)&name, &size) && name.sun_family == AF_UNIX &&
           size == offsetof(struct sockaddr_un, sun_path) + sizeof "amem-" + 32 &&
           !memcmp(name.sun_path, "\0amem-", sizeof "amem-");
}

static int own_name(int fd, struct sockaddr *name, socklen_t *size) { return getsockname(fd, name, size); }
static int peer_name(int fd, struct sockaddr *name, socklen_t *size) { return getpeername(fd, name, size); }

/* In a child that lives on, they would keep from the peers that the parent has ended. */
static void close_connections(void) {
    DIR *folder = opendir("/proc/self/fd");
    if (!folder) return;
    for (struct dirent *entry; (entry = readdir(folder));) {
        int fd = atoi(entry->d_name);
        if (fd != dirfd(folder) && (names_core(own_name, fd) || names_core(peer_name, fd))) close(fd);
    }
    closedir(folder);
}

/* The Go runtime's threads do not exist in a child of fork(): nothing in the core may be called there. */
static void in_child(void) {
    forked = true;
    loaded = NULL;
    close_connections();
}

/*
 * A panic in the core may have left a lock held, on which the next call would wait for ever.
 * What it holds stays as it is: calls of NCCL's for it fail, and those of amem's say why.
 */
static void broken(const char *why) {
    snprintf(status_text, sizeof status_text,
             "amem has stopped after an internal error (%.600s), and what it manages stays as it is: end this process, "
             "and report the error with the log", why);
    status = AMEM_ERROR_INTERNAL;
    loaded = NULL;
}

static bool core_path(char *path, size_t size) {
    Dl_info self;
    if (!dladdr((void *)core_load, &self) || !self.dli_fname) return false;
    const char *slash = strrchr(self.dli_fname, '/');
    int directory = slash ? (int)(slash - self.dli_fname) + 1 : 0;
    return snprintf(path, size, "%.*slibamem_nccl.so", directory, self.dli_fname) < (int)size;
}

static amem_status load(void) {
    char path[4096];
    if (!core_path(path, sizeof path)) {
        snprintf(status_text, sizeof status_text, "libamem_hook.so can't tell where it lies");
        return AMEM_ERROR_CORE;
    }
    /* Before its threads start: a child that is forked meanwhile must not wait for them. */
    pthread_atfork(NULL, NULL, in_child);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!library) {
        snprintf(status_text, sizeof status_text, "amem's core can't be loaded: %.600s; install amem again", dlerror());
        return AMEM_ERROR_CORE;
    }
    int (*init)(const struct amem_host *, struct amem_core *, char *);
    *(void **)&init = dlsym(library, "amem_core_init");
    if (!init) {
        snprintf(status_text, sizeof status_text, "%.600s is not amem's core; install amem again", path);
        return AMEM_ERROR_CORE;
    }
    struct amem_host host = {
        .abi = AMEM_CORE_ABI,
        .version = AMEM_VERSION,
        .config = config,
        .guard = &driver_guard,
        .launches = &driver_launches,
        .paused_regions = &runtime_paused_regions,
        .broken = broken,
        .margin = &region_margin,
        .reached = region_reached,
    };
    amem_status result = (amem_status)init(&host, &core, status_text);
    if (result == AMEM_OK && (core.abi != AMEM_CORE_ABI || strcmp(core.version, AMEM_VERSION))) {
        snprintf(status_text, sizeof status_text,
                 "%.500s is of release %.40s, libamem_hook.so of %s; install amem again, and once only", path,
                 core.version ? core.version : "?", AMEM_VERSION);
        return AMEM_ERROR_CORE;
    }
    return result;
}

/*
 * Loads the core as a guest. Its threads start with this thread's mask, and a
 * signal to the program is for the program's own threads: a handler that does
 * not ask for a stack of its own would run on one of Go's small ones. The
 * Go runtime takes two signals that nothing in the core sends or needs, and
 * raises the limit of open files, which is the program's to choose.
 */
static amem_status load_as_guest(void) {
    static const int taken[] = {SIGPIPE, SIGURG};
    struct sigaction before[sizeof taken / sizeof *taken];
    sigset_t every, mask;
    struct rlimit files;
    bool limited = !getrlimit(RLIMIT_NOFILE, &files);
    sigfillset(&every);
    pthread_sigmask(SIG_SETMASK, &every, &mask);
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) sigaction(taken[i], NULL, &before[i]);
    amem_status result = load();
    for (size_t i = 0; i < sizeof taken / sizeof *taken; i++) sigaction(taken[i], &before[i], NULL);
    if (limited) setrlimit(RLIMIT_NOFILE, &files);
    pthread_sigmask(SIG_SETMASK, &mask, NULL);
    return result;
}

static void load_once(void) {
    status = load_as_guest();
    if (status == AMEM_OK)
        loaded = &core;
    else
        log_line(LOG_ERROR, "NCCL's memory can't be paused: %s", status_text);
}

const struct amem_core *core_load(void) {
    if (forked) return NULL;
    pthread_once(&once, load_once);
    return loaded;
}

const struct amem_core *core_loaded(void) { return loaded; }

amem_status core_failure(char *text) {
    if (status != AMEM_OK && text) memcpy(text, status_text, sizeof status_text);
    return status;
}

bool core_forked(void) { return forked; }
