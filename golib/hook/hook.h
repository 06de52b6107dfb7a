/* What the files of libamem_hook.so share. */
#ifndef AMEM_HOOK_H
#define AMEM_HOOK_H

#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>

#include "amem.h"
#include "core.h"

/* config.c: the environment, checked. On failure text says which variable, what it was and what it may be. */
amem_status config_read(struct amem_config *config, char *text);

/* log.c: one line to stderr, if the level is enabled. Any thread. */
enum { LOG_ERROR = 1, LOG_WARN = 2, LOG_INFO = 3, LOG_DEBUG = 4 };
extern int log_level;
void log_line(int level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* elf.c: the objects loaded in this process and their GOT slots. */
struct object {
    char path[512];
    size_t base;       /* load address */
    const void *phdr;
    int phdr_count;
};
/* How many objects were ever loaded: changes whenever a library is. */
unsigned long long elf_loads(void);
/* Calls visit for each loaded object, with no lock of the dynamic linker held. */
void elf_each(void (*visit)(const struct object *object, void *arg), void *arg);
/* Replaces the GOT slots of a symbol in the object; returns how many there were. */
int elf_replace(const struct object *object, const char *symbol, void *value);
struct replacement {
    const char *symbol;
    void *value;
};
int elf_replace_all(const struct object *object, const struct replacement *list, int n); /* in one pass */
/* Whether one of the n values stands as a pointer in the object's writable memory. */
bool elf_holds(const struct object *object, void *const *values, int n);

/* watch.c: finds libnccl, now or when it is loaded. */
amem_status watch_start(char *text);
void watch_runtime(void); /* hooks PyTorch's libraries for regions, now and when they are loaded */
bool watch_found(void);   /* a libnccl has been hooked */
bool watch_out_of_reach(void); /* PyTorch's allocator was found, and calls a CUDA runtime that is inside of it */
bool watch_too_late(void); /* a libnccl was found that had the driver's functions already */

/* driver.c: the wrappers of the driver's functions. */
void *driver_dlsym(void *handle, const char *name);                       /* for libnccl's slot of dlsym */
void *driver_dlvsym(void *handle, const char *name, const char *version); /* and of dlvsym */
int driver_entry_point(const char *symbol, void **function, unsigned long long flags, int *status);
int driver_entry_point_by_version(const char *symbol, void **function, unsigned int version,
                                  unsigned long long flags, int *status);
/* A function of the CUDA runtime that is linked dynamically, or NULL. */
void *driver_runtime_function(const char *name);
/* What NCCL gets in place of the driver's function of this name. */
void *driver_wrap(const char *name, void *function);
/* One of AMEM_GUARD_*; set by the core. */
extern int driver_guard;
/* How many launches of NCCL's are under way. */
extern int driver_launches;

/* core.c: libamem_nccl.so, loaded when NCCL first asks for the driver. */
const struct amem_core *core_load(void); /* loads it on the first call; NULL on failure */
const struct amem_core *core_loaded(void); /* NULL before core_load, after a failure, and in a forked child */
amem_status core_failure(char *text);    /* why core_load failed, or AMEM_OK */
bool core_forked(void);

/* runtime.c: the CUDA runtime's functions for regions' memory, in the slots of one of PyTorch's libraries. */
int runtime_hook(const struct object *object); /* answers how many slots */
bool runtime_allocates_for(const struct object *object); /* after runtime_hook: the library's cudaMalloc comes here */
bool runtime_found(void);                      /* there is a CUDA runtime to allocate ordinary memory with */
void *runtime_allocate(size_t size);           /* ordinary memory; NULL on failure */
void runtime_free(void *ptr);
extern int runtime_paused_regions;             /* how many have memory that is not there; set by the core */

/* region.c */
bool region_has_default(void);
/* Memory of the default region; AMEM_PASS if there is none. */
int region_allocate_default(size_t size, int device, CUdeviceptr *ptr, char *text);
bool region_gave_default(void); /* there was a default region, and it gave memory */
extern size_t region_margin;    /* bytes that regions leave free on a device */

/* api.c */
extern struct amem_config config;
amem_status api_configure(void);                            /* reads the environment, once */
bool api_is_on(const char *variable);                       /* a switch in the environment */
amem_status api_fail(amem_status status, const char *text); /* sets this thread's amem_last_error() */

#endif
