/*
 * Regions: the program's own memory. The functions that an allocator is given
 * know their region by themselves, so that what they allocate has its tag
 * whichever thread calls them. Any thread may call what is here.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "hook.h"

#define PUBLIC __attribute__((visibility("default")))

enum { MAX_TAG = 64 };

size_t region_margin;
uint64_t region_reached[AMEM_DEVICES];

/* Noted first: a core that is loaded meanwhile makes memory as this says. */
int region_reach(int from, int to, char *text) {
    if ((unsigned)from >= AMEM_DEVICES || (unsigned)to >= AMEM_DEVICES) {
        snprintf(text, AMEM_ERROR_TEXT, "regions' memory of GPU %d can't be reached from GPU %d: amem knows %d GPUs", to, from,
                 AMEM_DEVICES);
        return AMEM_ERROR_INTERNAL;
    }
    __atomic_fetch_or(&region_reached[to], UINT64_C(1) << from, __ATOMIC_SEQ_CST);
    const struct amem_core *core = core_loaded();
    return core ? core->reach(to, text) : AMEM_OK;
}

/* The tags of the regions that this process has asked for, by number. */
static _Atomic(char *) tags[AMEM_REGIONS];

/* The default region. Never freed: another thread may be about to allocate in it. */
static _Atomic(struct default_region {
    char tag[MAX_TAG + 1];
    int backup;
    atomic_int number; /* -1 before the first allocation */
} *) default_region;
static atomic_bool gave_default;

static void *allocate(int region, ssize_t size, int device) {
    char text[AMEM_ERROR_TEXT] = "";
    CUdeviceptr ptr = 0;
    const struct amem_core *core = core_loaded();
    int status = AMEM_ERROR_FORKED;
    if (core)
        status = core->allocate(region, (size_t)size, device, &ptr, text);
    else if (core_forked())
        strcpy(text, "CUDA does not work in a process that was forked from one that uses it");
    else
        status = core_failure(text);
    if (status == AMEM_OK) return (void *)(uintptr_t)ptr;
    api_fail_in_core((amem_status)status, text);
    log_line(LOG_WARN, "%s", text);
    return NULL;
}

/* Nobody hears of a failure but by the log. */
static void deallocate(int region, void *ptr) {
    char text[AMEM_ERROR_TEXT] = "";
    const struct amem_core *core = core_loaded();
    if (core && ptr && core->deallocate(region, (CUdeviceptr)(uintptr_t)ptr, text) != AMEM_OK) log_line(LOG_ERROR, "%s", text);
}

/* AMEM_REGIONS pairs of functions. */
#define PAIR(n)                                                                              \
    static void *allocate_##n(ssize_t size, int device, void *stream) {                      \
        (void)stream;                                                                        \
        return allocate(0##n, size, device);                                                 \
    }                                                                                        \
    static void deallocate_##n(void *ptr, ssize_t size, int device, void *stream) {          \
        (void)size, (void)device, (void)stream;                                              \
        deallocate(0##n, ptr);                                                               \
    }
/* X of each octal number from 000 to 177. */
#define EACH_OF_8(X, a) X(a##0) X(a##1) X(a##2) X(a##3) X(a##4) X(a##5) X(a##6) X(a##7)
#define EACH_OF_64(X, a)                                                                      \
    EACH_OF_8(X, a##0) EACH_OF_8(X, a##1) EACH_OF_8(X, a##2) EACH_OF_8(X, a##3)               \
    EACH_OF_8(X, a##4) EACH_OF_8(X, a##5) EACH_OF_8(X, a##6) EACH_OF_8(X, a##7)
#define EACH_REGION(X) EACH_OF_64(X, 0) EACH_OF_64(X, 1)

EACH_REGION(PAIR)

static const amem_region_t functions[] = {
#define ENTRY(n) {allocate_##n, deallocate_##n},
    EACH_REGION(ENTRY)
};
_Static_assert(sizeof functions / sizeof *functions == AMEM_REGIONS, "a pair of functions for each region");

/* The core, for a region: it needs neither NCCL nor amem_enable. NULL on failure. */
static const struct amem_core *region_core(amem_status *status) {
    char text[AMEM_ERROR_TEXT] = "";
    if ((*status = api_configure()) != AMEM_OK) return NULL;
    const struct amem_core *core = core_load();
    if (core) return core;
    if ((*status = core_failure(text)) == AMEM_OK) {
        *status = AMEM_ERROR_FORKED;
        strcpy(text, "this process was forked from one that uses CUDA, which does not work in it: use the start method spawn");
    }
    api_fail(*status, text);
    return NULL;
}

/* The number of the region of a tag and a backup. */
static amem_status find_region(const char *tag, int backup, int *number) {
    amem_status status;
    char text[AMEM_ERROR_TEXT] = "";
    const struct amem_core *core = region_core(&status);
    if (!core) return status;
    status = (amem_status)core->region(tag, backup, number, text);
    if (status != AMEM_OK) return api_fail(status, text);
    char *none = NULL, *copy = tags[*number] ? NULL : strdup(tag);
    if (copy && !atomic_compare_exchange_strong(&tags[*number], &none, copy)) free(copy);
    return AMEM_OK;
}

PUBLIC amem_status amem_region(const char *tag, amem_backup_t backup, amem_region_t *region) {
    int number;
    if (!tag || !region) return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "amem_region: no tag, or no place for the answer");
    amem_status status = find_region(tag, (int)backup, &number);
    if (status != AMEM_OK) return status;
    *region = functions[number];
    watch_runtime();
    return AMEM_OK;
}

PUBLIC amem_status amem_default_region(const char *tag, amem_backup_t backup) {
    amem_status status = api_configure();
    if (status != AMEM_OK) return status;
    struct default_region *wanted = NULL;
    if (tag) {
        /* The core checks it too, but is not there yet. */
        if (!*tag || strlen(tag) > MAX_TAG || strchr(tag, ',') || !strcmp(tag, "nccl"))
            return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "a region's tag has 1 to 64 bytes without commas, and is not nccl");
        if ((unsigned)backup > AMEM_BACKUP_DISK)
            return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "amem_default_region: no such backup");
        wanted = malloc(sizeof *wanted);
        if (!wanted) return api_fail(AMEM_ERROR_INTERNAL, "amem_default_region: no memory");
        strcpy(wanted->tag, tag);
        wanted->backup = (int)backup;
        wanted->number = -1;
    }
    watch_runtime();
    if (wanted && watch_out_of_reach()) {
        free(wanted);
        return api_fail(AMEM_ERROR_INVALID_STATE,
                        "PyTorch's libc10_cuda.so does not call the cudaMalloc of a libcudart.so, so its memory can't be a "
                        "default region's: enter regions, or use a PyTorch that links libcudart");
    }
    default_region = wanted;
    return AMEM_OK;
}

/* In a child of fork() that has the core of its parent, nothing is a region's. */
bool region_has_default(void) { return default_region && !core_forked(); }
bool region_gave_default(void) { return gave_default; }

int region_allocate_default(size_t size, int device, CUdeviceptr *ptr, char *text) {
    struct default_region *wanted = default_region;
    if (!wanted) return AMEM_PASS;
    int number = wanted->number;
    if (number < 0) {
        runtime_free(NULL); /* starts CUDA, as cudaMalloc would */
        amem_status status = find_region(wanted->tag, wanted->backup, &number);
        if (status != AMEM_OK) {
            snprintf(text, AMEM_ERROR_TEXT, "%s", amem_last_error());
            return status;
        }
        wanted->number = number;
    }
    const struct amem_core *core = core_loaded();
    int status = core ? core->allocate(number, size, device, ptr, text) : AMEM_PASS;
    if (status == AMEM_OK) gave_default = true;
    return status;
}

static void *allocate_ordinary(ssize_t size, int device, void *stream) {
    (void)device, (void)stream; /* PyTorch's current device is the one */
    void *ptr = runtime_allocate((size_t)size);
    if (!ptr) api_fail(AMEM_ERROR_CUDA, "cudaMalloc failed");
    return ptr;
}

static void deallocate_ordinary(void *ptr, ssize_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    runtime_free(ptr);
}

PUBLIC amem_status amem_ordinary_memory(amem_region_t *region) {
    amem_status status = api_configure();
    if (status != AMEM_OK) return status;
    if (!region) return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "amem_ordinary_memory: no place for the answer");
    if (!runtime_found()) return api_fail(AMEM_ERROR_NO_DRIVER, "no CUDA runtime is loaded in this process");
    *region = (amem_region_t){allocate_ordinary, deallocate_ordinary};
    return AMEM_OK;
}

PUBLIC void amem_set_memory_margin(size_t bytes) { __atomic_store_n(&region_margin, bytes, __ATOMIC_SEQ_CST); }

/* torch_memory_saver's functions: NULL is all of the program's own memory, an unknown tag nothing. */
static int change_regions(const char *tag, const char *what, amem_status (*change)(const char *)) {
    char list[AMEM_REGIONS * (MAX_TAG + 1)], *end = list;
    for (int i = 0; i < AMEM_REGIONS; i++)
        if (tags[i] && (!tag || !*tag || !strcmp(tag, tags[i]))) end += sprintf(end, "%s%s", end == list ? "" : ",", tags[i]);
    if (end == list) return AMEM_OK;
    amem_status status = change(list);
    if (status != AMEM_OK) log_line(LOG_ERROR, "%s: %s", what, amem_last_error());
    return status;
}

PUBLIC int tms_pause(const char *tag) { return change_regions(tag, "tms_pause", amem_pause); }
PUBLIC int tms_resume(const char *tag) { return change_regions(tag, "tms_resume", amem_resume); }

static amem_status set_disk_directory(const char *path, bool named) {
    amem_status status;
    char text[AMEM_ERROR_TEXT] = "";
    const struct amem_core *core = region_core(&status);
    if (!core) return status;
    if (!path) return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "amem_set_disk_directory: no path");
    status = (amem_status)core->set_disk_directory(path, named, text);
    return status == AMEM_OK ? AMEM_OK : api_fail(status, text);
}

PUBLIC amem_status amem_set_disk_directory(const char *path) { return set_disk_directory(path, false); }
PUBLIC amem_status amem_set_named_disk_directory(const char *path) { return set_disk_directory(path, true); }

PUBLIC void amem_retain_backups(int on) {
    const struct amem_core *core = core_loaded();
    if (core) core->retain_backups(on); /* without it there are no regions to resume */
}

PUBLIC amem_state_t amem_memory_state(const void *ptr) {
    const struct amem_core *core = core_loaded();
    return core ? (amem_state_t)core->memory_state((CUdeviceptr)(uintptr_t)ptr) : AMEM_STATE_OFF;
}

PUBLIC amem_status amem_read_backup(const void *ptr, size_t size, void *to) {
    char text[AMEM_ERROR_TEXT] = "";
    const struct amem_core *core = core_loaded();
    if (!core || !to) return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "no region in this process, or no buffer");
    amem_status status = (amem_status)core->read_backup((CUdeviceptr)(uintptr_t)ptr, size, to, text);
    return status == AMEM_OK ? AMEM_OK : api_fail(status, text);
}

PUBLIC amem_status amem_backup_pointer(const void *ptr, size_t size, const void **backup) {
    char text[AMEM_ERROR_TEXT] = "";
    const struct amem_core *core = core_loaded();
    if (!core || !backup) return api_fail(AMEM_ERROR_INVALID_ARGUMENT, "no region in this process, or no place for the answer");
    runtime_lent_backups = true;
    amem_status status = (amem_status)core->find_backup((CUdeviceptr)(uintptr_t)ptr, size, backup, text);
    return status == AMEM_OK ? AMEM_OK : api_fail(status, text);
}
