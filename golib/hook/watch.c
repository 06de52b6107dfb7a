/*
 * Finds libnccl.so.2 and replaces the GOT slots through which it reaches the
 * driver, PyTorch's libraries and theirs of the CUDA runtime, and libraries that
 * register memory with a device. A library that is loaded later is found when somebody next calls
 * dlopen or dlsym: the slots of these two are replaced in the objects that
 * load libraries for others (the program itself, libpython and _ctypes) by
 * functions that look for new libraries first and then jump to the real one.
 * A library that was loaded by name or as a dependency is always followed by
 * such a call before its first use: Python's import looks up PyInit_*, ctypes
 * looks up the function it calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hook.h"

/* How many objects had been loaded at the last scan, times two, and one if it looked for libnccl. */
static _Atomic unsigned long long scanned;
static atomic_bool nccl_wanted, found, too_late, out_of_reach;

bool watch_out_of_reach(void) { return out_of_reach; }
bool watch_found(void) { return found; }
bool watch_too_late(void) { return too_late; }

/*
 * A tail call keeps the caller's return address, by which dlopen and dlsym
 * know whose search path and scope count. Clang is told; GCC does it at -O2.
 */
#if defined(__has_attribute)
#if __has_attribute(musttail)
#define TAIL __attribute__((musttail))
#endif
#endif
#ifndef TAIL
#define TAIL
#endif

static void *watching_dlopen(const char *file, int mode) {
    watch_scan();
    TAIL return dlopen(file, mode);
}

static void *watching_dlsym(void *handle, const char *name) {
    watch_scan();
    TAIL return dlsym(handle, name);
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static bool is_nccl(const struct object *object) {
    const char *chosen = getenv("AMEM_NCCL_LIBRARY");
    if (chosen && *chosen) return !strcmp(object->path, chosen) || !strcmp(base_name(object->path), chosen);
    return !strncmp(base_name(object->path), "libnccl.so", strlen("libnccl.so"));
}

static bool loads_for_others(const struct object *object) {
    const char *name = base_name(object->path);
    return !*name /* the program itself */ || !strncmp(name, "libpython", strlen("libpython")) ||
           !strncmp(name, "_ctypes.", strlen("_ctypes."));
}

/* Whether this libnccl has asked for the driver before: then it holds the driver's functions, not ours. */
static bool has_begun(const struct object *object) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    if (!driver) return false;
    void *functions[4] = {dlsym(driver, "cuGetProcAddress_v2"), dlsym(driver, "cuMemCreate")};
    CUresult (*lookup)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
    *(void **)&lookup = functions[0];
    if (lookup) {
        lookup("cuMemCreate", &functions[2], 12000, CU_GET_PROC_ADDRESS_DEFAULT, NULL);
        lookup("cuGetProcAddress", &functions[3], 12000, CU_GET_PROC_ADDRESS_DEFAULT, NULL);
    }
    bool begun = elf_holds(object, functions, 4);
    dlclose(driver);
    return begun;
}

/*
 * The objects that have been hooked. No lock is held while an object is: that calls the
 * dynamic linker, which a library's constructor, calling dlopen, would hold and then wait
 * for us. So several threads may hook the same object at once, which is harmless; none goes
 * on before it is hooked.
 */
static pthread_mutex_t finishing = PTHREAD_MUTEX_INITIALIZER;
static struct {
    size_t base[64];
    int count;
} hooked;

static bool is_finished_locked(const struct object *object) {
    for (int i = 0; i < hooked.count; i++)
        if (hooked.base[i] == object->base) return true;
    return false;
}

static bool is_finished(const struct object *object) {
    pthread_mutex_lock(&finishing);
    bool finished = is_finished_locked(object);
    pthread_mutex_unlock(&finishing);
    return finished;
}

/* The object is hooked; whether this thread is the first to say so. */
static bool first_to_finish(const struct object *object) {
    pthread_mutex_lock(&finishing);
    bool first = !is_finished_locked(object);
    if (first && hooked.count < (int)(sizeof hooked.base / sizeof *hooked.base)) hooked.base[hooked.count++] = object->base;
    pthread_mutex_unlock(&finishing);
    return first;
}

/*
 * It must stay where it is: its slots hold our functions, or we hold its. False if
 * another thread has unloaded it.
 */
static bool pin(const struct object *object) { return dlopen(object->path, RTLD_LAZY | RTLD_NOLOAD | RTLD_NODELETE); }

static void hook_nccl(const struct object *object) {
    if (!pin(object)) return;
    if (elf_replace(object, "dlsym", (void *)driver_dlsym) +
            elf_replace(object, "cudaGetDriverEntryPoint", (void *)driver_entry_point) +
            elf_replace(object, "cudaGetDriverEntryPointByVersion", (void *)driver_entry_point_by_version) ==
        0) {
        if (first_to_finish(object))
            log_line(LOG_ERROR, "%s has no slot through which it could reach the driver: it can't be paused",
                     object->path);
        return;
    }
    elf_replace(object, "dlvsym", (void *)driver_dlvsym);
    if (has_begun(object)) {
        too_late = true;
        if (first_to_finish(object))
            log_line(LOG_ERROR,
                     "NCCL (%s) was used before amem was enabled, so its memory can't be paused: enable amem before "
                     "the first NCCL communicator",
                     object->path);
        return;
    }
    divert_nccl(object);
    if (first_to_finish(object)) log_line(LOG_INFO, "hooked %s", object->path);
    found = true;
}

/* PyTorch's, which share and copy its memory. */
static bool uses_runtime(const struct object *object) {
    static const char *const names[] = {"libc10_cuda.so", "libtorch_cuda.so", "libtorch_python.so"};
    for (size_t i = 0; i < sizeof names / sizeof *names; i++)
        if (!strcmp(base_name(object->path), names[i])) return true;
    return false;
}

static void visit(const struct object *object, void *arg) {
    (void)arg;
    if (is_nccl(object)) {
        if (nccl_wanted && !is_finished(object)) hook_nccl(object);
    } else if (uses_runtime(object)) {
        if (is_finished(object)) return;
        int slots = runtime_hook(object);
        if (!strcmp(base_name(object->path), "libc10_cuda.so") && !runtime_allocates_for(object)) out_of_reach = true;
        if (first_to_finish(object)) log_line(LOG_DEBUG, "hooked %d slots of %s", slots, object->path);
    } else if (divert_registers(object)) {
        if (is_finished(object) || !pin(object)) return;
        divert_registration(object);
        if (first_to_finish(object)) log_line(LOG_DEBUG, "hooked the registrations of %s", object->path);
    } else if (loads_for_others(object)) {
        elf_replace(object, "dlopen", (void *)watching_dlopen);
        elf_replace(object, "dlsym", (void *)watching_dlsym);
    }
}

/* Any thread. */
void watch_scan(void) {
    unsigned long long now = 2 * elf_loads() + nccl_wanted;
    if (now == scanned || core_forked()) return;
    elf_each(visit, NULL);
    scanned = now;
}

/* A child of fork() must not find a lock held by a thread that it does not have. */
static void lock_all(void) {
    pthread_mutex_lock(&finishing);
    elf_lock_writing();
}

static void unlock_all(void) {
    elf_unlock_writing();
    pthread_mutex_unlock(&finishing);
}

static void start(void) {
    static atomic_flag registered = ATOMIC_FLAG_INIT;
    if (!atomic_flag_test_and_set(&registered)) pthread_atfork(lock_all, unlock_all, unlock_all);
    watch_scan();
}

void watch_runtime(void) { start(); }

static void find_begun(const struct object *object, void *begun) {
    if (is_nccl(object) && has_begun(object)) *(bool *)begun = true;
}

/* Not for a child of fork(). */
bool watch_unhooked(void) {
    bool begun = too_late;
    if (begun || found) return begun;
    elf_each(find_begun, &begun);
    return begun;
}

amem_status watch_start(char *text) {
    nccl_wanted = true; /* what was passed over before is looked at again */
    start();
    if (too_late) {
        snprintf(text, AMEM_ERROR_TEXT,
                 "NCCL was used in this process before amem was enabled, so its memory can't be paused: call "
                 "amem.enable(), or set AMEM_ENABLE=1 in the environment, before the first NCCL communicator");
        return AMEM_ERROR_TOO_LATE;
    }
    return AMEM_OK;
}
