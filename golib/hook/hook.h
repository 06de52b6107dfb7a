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
/*
 * A switch in the environment: 1, on, true, yes, 0, off, false or no, in any case of
 * letters. What is unset, or empty, is `otherwise`, and so is another value, with a warning.
 */
bool config_switch(const char *name, bool otherwise);

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
/*
 * Calls visit for each loaded object, with no lock of the dynamic linker held: another
 * thread may have unloaded an object by then, so visit reads only what can't be, or is pinned.
 */
void elf_each(void (*visit)(const struct object *object, void *arg), void *arg);
/* Replaces the GOT slots of a symbol in the object; returns how many there were. */
int elf_replace(const struct object *object, const char *symbol, void *value);
struct replacement {
    const char *symbol;
    void *value;
};
int elf_replace_all(const struct object *object, const struct replacement *list, int n); /* in one pass */
/*
 * What others get of this object's functions. elf_find answers where a function is,
 * by its default version; elf_divert makes all later look-ups of the function at
 * `from`, under whatever name, find `to`: false if the symbol table can't be written.
 * elf_rebind replaces each `from` by its `to` where another object has it already.
 */
void *elf_find(const struct object *object, const char *symbol);
bool elf_divert(const struct object *object, void *from, void *to);
struct rebinding {
    void *from, *to;
};
void elf_rebind(const struct object *object, const struct rebinding *list, int n);
/* Around fork(): no page is written to meanwhile. */
void elf_lock_writing(void);
void elf_unlock_writing(void);
/* Whether one of the n values stands as a pointer in the object's writable memory. */
bool elf_holds(const struct object *object, void *const *values, int n);

/* divert.c: functions of other libraries, for which their callers get amem's. Any thread; again is harmless. */
void divert_nccl(const struct object *object);     /* NCCL's own suspension */
bool divert_registers(const struct object *object); /* whether this library registers memory with a device */
void divert_registration(const struct object *object);
void *divert_lookup(void *function);               /* what libnccl gets where it has looked the function up */

/* watch.c: finds libnccl, now or when it is loaded. */
amem_status watch_start(char *text);
void watch_runtime(void); /* hooks PyTorch's libraries for regions, now and when they are loaded */
void watch_scan(void);    /* looks for libraries that have been loaded since; cheap if there are none */
bool watch_found(void);   /* a libnccl has been hooked */
bool watch_out_of_reach(void); /* PyTorch's allocator was found, and calls a CUDA runtime that is inside of it */
bool watch_too_late(void);
bool watch_unhooked(void); /* NCCL is in use in this process, and amem does not see its memory */ /* a libnccl was found that had the driver's functions already */

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
bool driver_asked(void); /* whether NCCL is in use, and finds the driver through the hook */
/*
 * Memory is about to be registered, and must stay where it is: driver_registered()
 * follows, with the registration, or 0 where it has failed. A registration is about
 * to end: then it follows with 0, or the registration where it has not.
 */
uint64_t driver_keep(CUdeviceptr ptr, size_t size, int why);
uint64_t driver_deregister(uintptr_t registration);
void driver_registered(uint64_t kept, uintptr_t registration);
/* One of AMEM_GUARD_*; set by the core. */
extern int driver_guard;
/* How many launches of NCCL's are under way. */
extern int driver_launches;

/* core.c: libamem_nccl.so, loaded when NCCL first asks for the driver. */
const struct amem_core *core_load(void); /* loads it on the first call; NULL on failure */
const struct amem_core *core_loaded(void); /* NULL before core_load, after a failure of it or in it, and in a forked child */
amem_status core_failure(char *text);    /* why there is no core though it was to be loaded, or AMEM_OK */
bool core_forked(void);

/* runtime.c: the CUDA runtime's functions for regions' memory, in the slots of one of PyTorch's libraries. */
int runtime_hook(const struct object *object); /* answers how many slots */
bool runtime_allocates_for(const struct object *object); /* after runtime_hook: the library's cudaMalloc comes here */
bool runtime_found(void);                      /* there is a CUDA runtime to allocate ordinary memory with */
void *runtime_allocate(size_t size);           /* ordinary memory; NULL on failure */
void runtime_free(void *ptr);
extern atomic_bool runtime_lent_backups;       /* the program has been told where backups are */
extern int runtime_paused_regions;             /* how many have memory that is not there; set by the core */

/* region.c */
bool region_has_default(void);
/* Memory of the default region; AMEM_PASS if there is none. */
int region_allocate_default(size_t size, int device, CUdeviceptr *ptr, char *text);
bool region_gave_default(void); /* there was a default region, and it gave memory */
extern size_t region_margin;    /* bytes that regions leave free on a device */
extern uint64_t region_reached[AMEM_DEVICES]; /* as amem_host.reached */
/* Device from has got peer access to device to: that is to regions' memory too. An amem_status. */
int region_reach(int from, int to, char *text);

/* api.c */
extern struct amem_config config;
amem_status api_configure(void);                            /* reads the environment, once */
amem_status api_fail(amem_status status, const char *text); /* sets this thread's amem_last_error() */
/* The same, with what the core wrote to text: the figures too. */
amem_status api_fail_in_core(amem_status status, const char text[static AMEM_ERROR_TEXT]);

#endif
