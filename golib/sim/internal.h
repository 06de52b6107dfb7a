/*
 * What the files of the simulated driver share.
 *
 * Three mutexes, taken in this order and none of them held while a caller
 * waits for a stream or a delay:
 *   sim_account_lock  this process's turn at the folders of physical memory
 *   sim_tables_lock   handles, reservations, mappings, pinned memory
 *   sim_work_lock     contexts, streams, events, graphs
 */
#ifndef AMEM_SIM_INTERNAL_H
#define AMEM_SIM_INTERNAL_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "sim.h"

#define SIM_API __attribute__((visibility("default")))

/* Results of the driver that only the simulator needs. */
enum {
    CUDA_ERROR_PEER_ACCESS_UNSUPPORTED = 217,
    CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED = 704,
    CUDA_ERROR_PEER_ACCESS_NOT_ENABLED = 705,
    CUDA_ERROR_CONTEXT_IS_DESTROYED = 709,
    CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED = 712,
    CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED = 713,
    CUDA_ERROR_STREAM_CAPTURE_UNMATCHED = 903,
    CUDA_ERROR_STREAM_CAPTURE_ISOLATION = 905,
    CUDA_ERROR_STREAM_CAPTURE_IMPLICIT = 906,
    CUDA_ERROR_CAPTURED_EVENT = 907,
    CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD = 908
};

enum { SIM_MAX_DEVICES = 32, DRIVER_VERSION = 13000 };

extern pthread_mutex_t sim_account_lock;
extern pthread_mutex_t sim_tables_lock;
extern pthread_mutex_t sim_work_lock;

/* ---- config.c: the environment, read once by cuInit ---- */

struct sim_config {
    char dir[4000];
    int devices;          /* in the folder */
    int visible;          /* to this process */
    int physical[SIM_MAX_DEVICES]; /* of each visible device */
    uint64_t memory;
    uint64_t granularity;
    bool multicast;
    bool fabric;
    bool fabric_offered;
    bool p2p;
};
extern struct sim_config sim_config;
bool sim_config_read(void);
/* The visible device of a physical one, or -1. */
int sim_ordinal(int physical);

/* ---- calls.c: what happens around each function ---- */

enum sim_needs { NEEDS_NOTHING, NEEDS_INIT, NEEDS_CONTEXT };

/* A time, or the name of the file whose appearance ends it. */
struct sim_pause {
    unsigned us;
    char *file; /* NULL: the time counts */
};

struct sim_function {
    const char *name;   /* what cuGetProcAddress is asked for */
    const char *symbol; /* what the library exports */
    void *address;
    int since; /* the first version of the driver that has it */
    enum sim_needs needs;
    atomic_ullong calls;
    atomic_uint delay_us;
    atomic_uint fault_in; /* calls until the fault; 0: none */
    atomic_int fault_result;
    atomic_uint wait_in; /* calls until the one that waits; 0: none */
    struct sim_pause wait; /* how; guarded by a mutex of calls.c */
    struct sim_function *next;
};

struct sim_call {
    struct sim_function *function;
    CUcontext context; /* the current one, if the function needs one */
    CUresult result;
};

extern struct sim_function *sim_functions;
void sim_register(struct sim_function *function);
bool sim_call_begin(struct sim_call *call);
CUresult sim_call_end(struct sim_call *call);
bool sim_calls_configure(const char *delays, const char *faults, const char *log);
/* Returns when the pause is over, and frees its name. Callers hold no lock. */
void sim_pause_end(struct sim_pause pause);

/* True on a thread that runs a kernel or a host function. */
extern _Thread_local bool sim_in_callback;

/* Puts an exported symbol into the list of functions. */
#define SIM_LIST(name, symbol, since, needs)                                                              \
    static struct sim_function function_##symbol = {#name, #symbol, (void *)symbol, since, needs, 0, 0, 0, 0, 0, {0, NULL}, NULL}; \
    __attribute__((constructor)) static void register_##symbol(void) { sim_register(&function_##symbol); }

/* Defines a driver function: the exported symbol around the expression body, and its place in the list. */
#define SIM_FUNCTION(name, symbol, since, needs, params, body)                                            \
    SIM_API CUresult symbol params;                                                                       \
    SIM_LIST(name, symbol, since, needs)                                                                  \
    SIM_API CUresult symbol params                                                                        \
    {                                                                                                     \
        struct sim_call call = {&function_##symbol, NULL, CUDA_SUCCESS};                                  \
        if (sim_call_begin(&call))                                                                        \
            call.result = (body);                                                                         \
        return sim_call_end(&call);                                                                       \
    }

/* ---- device.c ---- */

enum sim_state { SIM_NEW, SIM_READY, SIM_FAILED };
extern atomic_int sim_state;
extern atomic_bool sim_forked;

/* ---- context.c ---- */

struct CUctx_st {
    int device; /* ordinal */
    int refs;
    atomic_int error;      /* sticky */
    atomic_uint peers;     /* bit of each device whose cuMemAlloc memory this one may use */
    CUstream null_stream;
    CUstream streams; /* every one with a worker, the null stream too */
};
extern struct CUctx_st sim_contexts[SIM_MAX_DEVICES];
CUresult sim_current_context(CUcontext *context);

/* ---- physical.c ---- */

/* The folder of a physical allocation. Devices are numbered as in the folder, not as in this process. */
enum { AREA_HOST = SIM_MAX_DEVICES, AREA_MULTICAST, AREA_COUNT };

enum { SIM_TRAILER_SIZE = 4096, SIM_NAME_SIZE = 40 };

/* Stands behind the contents of each file, so that an fd alone tells all. */
struct sim_trailer {
    char magic[16];
    uint64_t size;
    int32_t area;
    uint32_t handle_types;
    int32_t numa_node;
    uint8_t alloc_flags[8];
    char name[SIM_NAME_SIZE];
    /* multicast objects only */
    uint32_t num_devices;
    uint32_t devices_added; /* bits */
    uint32_t bindings[SIM_MAX_DEVICES];
};

struct sim_binding {
    struct sim_binding *next;
    struct sim_physical *memory;
    int device; /* physical */
    uint64_t offset, size;
};

/* One for each handle that this process has. */
struct sim_physical {
    uint64_t handle;
    int fd;
    unsigned handles; /* references by cuMemCreate, cuMemImport..., cuMemRetain... */
    unsigned uses;    /* mappings and bindings */
    struct sim_trailer trailer;
    struct sim_binding *bindings;
    struct sim_physical *next_dead;
};

bool sim_areas_open(void);
CUresult sim_physical_create(const struct sim_trailer *trailer, struct sim_physical **physical);
/* Memory of another process, by what its trailer says; CUDA_ERROR_INVALID_VALUE if it is gone. */
CUresult sim_physical_open(int area, const char *name, struct sim_physical **physical);
/* Callers of these three hold sim_tables_lock. */
struct sim_physical *sim_physical_find(uint64_t handle);
void sim_physical_put(struct sim_physical *physical);
void sim_physical_close_all(void);
/* Gives back what sim_physical_put left dead. Callers hold no lock. */
void sim_physical_collect(void);
CUresult sim_physical_usage(int area, uint64_t *bytes);
void sim_area_lock(int area);
void sim_area_unlock(int area);

/* ---- address.c ---- */

struct sim_range {
    uint64_t base, size;
};
/* For tsearch: ranges that overlap are equal. */
int sim_range_compare(const void *a, const void *b);
void *sim_range_find(void *const *root, uint64_t base, uint64_t size);

struct sim_rights {
    uint64_t read, write; /* bits of devices; HOST_BIT */
};
#define HOST_BIT (UINT64_C(1) << 63)

struct sim_mapping {
    struct sim_range range;
    struct sim_physical *physical;
    struct sim_rights rights;
    CUcontext owner;    /* of memory by cuMemAlloc */
    uint64_t requested; /* size that cuMemAlloc was asked for; 0: cuIpcOpenMemHandle's */
    bool changing;      /* a thread is giving access */
};
/* Callers hold sim_tables_lock. */
extern void *sim_mappings;
bool sim_is_reserved(uint64_t address);
bool sim_map_file(struct sim_mapping *mapping, bool fixed);

enum sim_reach { REACH_HOST, REACH_DEVICE, REACH_UNMAPPED, REACH_NO_ACCESS };
/* What [address, address+size) is to a device. Callers hold no lock. */
enum sim_reach sim_reach(CUcontext context, uint64_t address, uint64_t size, bool write);

/* ---- host.c ---- */

struct sim_pinned {
    struct sim_range range;
    bool registered;
};
/* Callers hold sim_tables_lock. */
struct sim_pinned *sim_pinned_find(uint64_t address, uint64_t size);

/* ---- memory.c ---- */
void sim_memory_free_all(CUcontext context);

/* ---- multicast.c ---- */
/* Drops what a dead multicast object binds. Callers hold sim_tables_lock. */
void sim_multicast_unbind_all(struct sim_physical *object);
bool sim_multicast_complete(const struct sim_physical *object);
/* True if each of the devices (physical, bits) has memory bound. Callers hold sim_tables_lock. */
bool sim_multicast_bound(const struct sim_physical *object, uint32_t devices);

/* ---- stream.c ---- */

enum sim_operation_kind { OP_NOTHING, OP_KERNEL, OP_COPY, OP_SET, OP_HOST, OP_RECORD };

struct sim_dependency {
    CUstream stream;
    uint64_t sequence;
};

struct sim_operation {
    struct sim_operation *next;
    enum sim_operation_kind kind;
    uint64_t sequence; /* in its stream */
    uint64_t ticket;   /* in the process */
    union {
        struct { CUfunction function; void **params; } kernel;
        struct { uint64_t to, from, size; } copy;
        struct { uint64_t to, size; uint8_t value; } set;
        struct { CUhostFn function; void *data; } host;
        struct { CUevent event; } record;
    };
    struct sim_dependency *dependencies;
    unsigned num_dependencies;
};

struct CUgraph_st {
    struct sim_operation *first, **last;
    cuuint64_t capture; /* number of the capture that makes it */
    const void *tail;   /* what was captured last, for the caller of cuStreamGetCaptureInfo */
};

struct CUstream_st {
    CUcontext context;
    CUstream next;
    unsigned flags;
    unsigned refs;
    bool destroyed;
    uint64_t submitted, completed;
    struct sim_operation *first, **last;
    pthread_cond_t wake;
    CUgraph capture; /* while capturing */
    bool capture_invalid;
    CUstreamCaptureMode capture_mode;
    pthread_t capture_thread;
};

struct sim_operation *sim_operation_new(enum sim_operation_kind kind);
/* Callers of these hold sim_work_lock. */
struct sim_operation *sim_operation_copy(const struct sim_operation *operation);
void sim_operation_free(struct sim_operation *operation);
/* A stream of any context, or the context's own legacy stream for NULL; NULL if there is none. */
CUstream sim_stream_find(CUcontext context, CUstream handle);
bool sim_dependency_add(struct sim_operation *operation, CUstream stream, uint64_t sequence);
/* Takes the operation, even if it fails. */
CUresult sim_enqueue(CUstream stream, struct sim_operation *operation);
void sim_wait(CUstream stream, uint64_t sequence);
/* Waits while a call stops all launches. */
void sim_await_turn(void);
void sim_stream_put(CUstream stream);
/* Callers of these hold no lock. */
CUcontext sim_stream_context(CUcontext context, CUstream handle);
/* Takes the operation (NULL: out of memory); with wait, returns when it is done. */
CUresult sim_submit(CUcontext context, CUstream handle, struct sim_operation *operation, bool wait);
/* Waits for all that was submitted to the context until now. */
void sim_synchronize(CUcontext context);
/*
 * Makes all that would submit work wait until sim_resume_launches, and waits,
 * if told so, until all contexts are idle.
 */
void sim_stop_launches(bool until_idle);
void sim_resume_launches(void);
/* Spoils the captures that forbid an unsafe call by this thread, and returns the call's result; CUDA_SUCCESS if none does. */
CUresult sim_capture_refusal(void);

/* ---- graph.c: callers hold sim_work_lock ---- */
void sim_graph_free(CUgraph graph);
/* The stream that still captures into the graph, or NULL. */
CUstream sim_capturing_stream(const void *graph);

/* ---- event.c ---- */
/* Callers hold sim_work_lock. */
void sim_event_reached(CUevent event, uint64_t sequence);
void sim_event_put(CUevent event);

/* ---- launch.c ---- */
void sim_kernel_run(CUfunction function, void **params);
void **sim_kernel_params_copy(CUfunction function, void **params);

/* ---- a set of live objects, to know a handle from a stray pointer. Callers hold sim_work_lock. ---- */
bool sim_set_add(void **set, const void *object);
bool sim_set_remove(void **set, const void *object);
bool sim_set_has(void *const *set, const void *object);

#endif
