/*
 * The CUDA runtime's functions as PyTorch's libraries call them, for the memory
 * of regions: cudaMalloc gives the default region's, CUDA's IPC is refused by the
 * driver for memory that is not cudaMalloc's, and copies would end the context on
 * paused memory. All other memory goes to the runtime as it is. Any thread.
 */
#define _GNU_SOURCE
#include <stdio.h>
#include <string.h>

#include "hook.h"

int runtime_paused_regions;
atomic_bool runtime_lent_backups;

/* cudaError_t */
enum {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    MEMORY_ALLOCATION = 2,
    ILLEGAL_STATE = 401,
    NOT_SUPPORTED = 801,
    PEER_ACCESS_ALREADY_ENABLED = 704,
    UNKNOWN = 999
};

typedef struct {
    char bytes[AMEM_IPC_HANDLE];
} ipc_handle;

static struct {
    int (*GetDevice)(int *);
    int (*DeviceEnablePeerAccess)(int, unsigned int);
    int (*Malloc)(void **, size_t);
    int (*Free)(void *);
    int (*IpcGetMemHandle)(ipc_handle *, void *);
    int (*IpcOpenMemHandle)(void **, ipc_handle, unsigned int);
    int (*IpcCloseMemHandle)(void *);
    int (*Memcpy)(void *, const void *, size_t, int);
    int (*MemcpyAsync)(void *, const void *, size_t, int, void *);
    int (*MemcpyPeerAsync)(void *, int, const void *, int, size_t, void *);
    int (*Memset)(void *, int, size_t);
    int (*MemsetAsync)(void *, int, size_t, void *);
    const char *(*GetErrorString)(int);
} real;

/* The last error of this thread that was amem's own, and why. */
static __thread int refusal;
static __thread char refusal_text[AMEM_ERROR_TEXT];

static int refuse(int error, const char *text) {
    refusal = error;
    snprintf(refusal_text, sizeof refusal_text, "amem: %s", text);
    log_line(LOG_ERROR, "%s", text);
    return error;
}

static int refuse_status(int status, const char *text) {
    switch (status) {
    case AMEM_ERROR_INVALID_STATE: return refuse(ILLEGAL_STATE, text);
    case AMEM_ERROR_OUT_OF_MEMORY: return refuse(MEMORY_ALLOCATION, text);
    case AMEM_ERROR_INVALID_ARGUMENT: return refuse(INVALID_VALUE, text);
    case AMEM_ERROR_PEER: return refuse(NOT_SUPPORTED, text);
    default: return refuse(UNKNOWN, text);
    }
}

/* PyTorch puts this text into the error that it raises. */
static const char *get_error_string(int error) {
    if (!refusal || error != refusal) return real.GetErrorString(error);
    refusal = 0;
    return refusal_text;
}

static CUdeviceptr at(const void *ptr) { return (CUdeviceptr)(uintptr_t)ptr; }

static int malloc_(void **ptr, size_t size) {
    char text[AMEM_ERROR_TEXT] = "";
    CUdeviceptr given;
    int device;
    if (!region_has_default() || !ptr || !size || !real.GetDevice || real.GetDevice(&device)) return real.Malloc(ptr, size);
    int status = region_allocate_default(size, device, &given, text);
    if (status == AMEM_PASS) return real.Malloc(ptr, size);
    if (status == AMEM_ERROR_OUT_OF_MEMORY) { /* no text: PyTorch gives back what it has cached, and tries again */
        log_line(LOG_DEBUG, "%s", text);
        return MEMORY_ALLOCATION;
    }
    if (status != AMEM_OK) return refuse_status(status, text);
    *ptr = (void *)(uintptr_t)given;
    return SUCCESS;
}

static int free_(void *ptr) {
    char text[AMEM_ERROR_TEXT] = "";
    const struct amem_core *core = ptr && region_gave_default() ? core_loaded() : NULL;
    int status = core ? core->free_memory(at(ptr), text) : AMEM_PASS;
    if (status == AMEM_PASS) return real.Free(ptr);
    return status == AMEM_OK ? SUCCESS : refuse_status(status, text);
}

/* cudaMalloc's memory is the peer's by this call alone; a region's must be given to it. */
static int device_enable_peer_access(int peer, unsigned int flags) {
    char text[AMEM_ERROR_TEXT] = "";
    int device, result = real.DeviceEnablePeerAccess(peer, flags);
    if ((result != SUCCESS && result != PEER_ACCESS_ALREADY_ENABLED) || !real.GetDevice || real.GetDevice(&device))
        return result;
    int status = region_reach(device, peer, text);
    return status == AMEM_OK ? result : refuse_status(status, text);
}

static int ipc_get_mem_handle(ipc_handle *handle, void *ptr) {
    char text[AMEM_ERROR_TEXT] = "";
    const struct amem_core *core = core_loaded();
    int status = core && handle ? core->ipc_get(handle, at(ptr), config_switch("AMEM_ENABLE", false), text) : AMEM_PASS;
    if (status == AMEM_PASS) return real.IpcGetMemHandle(handle, ptr);
    return status == AMEM_OK ? SUCCESS : refuse_status(status, text);
}

static int ipc_open_mem_handle(void **ptr, ipc_handle handle, unsigned int flags) {
    if (!ptr || memcmp(handle.bytes, AMEM_IPC_MAGIC, strlen(AMEM_IPC_MAGIC)))
        return real.IpcOpenMemHandle(ptr, handle, flags);
    char text[AMEM_ERROR_TEXT] = "";
    CUdeviceptr opened;
    amem_status status = api_configure();
    const struct amem_core *core = status == AMEM_OK ? core_load() : NULL;
    if (!core) return refuse(UNKNOWN, status == AMEM_OK ? "the core can't be loaded" : amem_last_error());
    status = (amem_status)core->ipc_open(&opened, &handle, text);
    if (status != AMEM_OK) return refuse_status(status, text);
    *ptr = (void *)(uintptr_t)opened;
    return SUCCESS;
}

static int ipc_close_mem_handle(void *ptr) {
    char text[AMEM_ERROR_TEXT] = "";
    const struct amem_core *core = core_loaded();
    int status = core ? core->ipc_close(at(ptr), text) : AMEM_PASS;
    if (status == AMEM_PASS) return real.IpcCloseMemHandle(ptr);
    return status == AMEM_OK ? SUCCESS : refuse_status(status, text);
}

/* Whether it is a region's memory that is paused, here or by its owner: the driver's fault would end the context. */
static bool paused(const void *ptr) {
    if (!__atomic_load_n(&runtime_paused_regions, __ATOMIC_ACQUIRE)) return false;
    const struct amem_core *core = core_loaded();
    return core && core->memory_state(at(ptr)) == AMEM_STATE_PAUSED;
}

static const char used_paused[] = "a copy from or to memory that is paused was refused: resume its tag first, "
                                  "in the process that has paused it";

/* How much of a copy the driver does at once: a backup is pinned in parts, and it refuses a copy of two. */
static size_t at_once(const void *to, const void *from, size_t size) {
    const struct amem_core *core = runtime_lent_backups ? core_loaded() : NULL;
    const void *ends[] = {to, from};
    for (int i = 0; core && i < 2; i++) {
        size_t pinned = core->pinned((uintptr_t)ends[i]);
        if (pinned && pinned < size) size = pinned;
    }
    return size;
}

/* Of a copy in several, all but the last. */
#define COPY_BUT_LAST(copy)                                                        \
    for (size_t now; (now = at_once(to, from, size)) < size; size -= now) {        \
        int error = copy;                                                          \
        if (error) return error;                                                   \
        to = (char *)to + now;                                                     \
        from = (const char *)from + now;                                           \
    }

static int memcpy_(void *to, const void *from, size_t size, int kind) {
    if (paused(to) || paused(from)) return refuse(ILLEGAL_STATE, used_paused);
    COPY_BUT_LAST(real.Memcpy(to, from, now, kind));
    return real.Memcpy(to, from, size, kind);
}

static int memcpy_async(void *to, const void *from, size_t size, int kind, void *stream) {
    if (paused(to) || paused(from)) return refuse(ILLEGAL_STATE, used_paused);
    COPY_BUT_LAST(real.MemcpyAsync(to, from, now, kind, stream));
    return real.MemcpyAsync(to, from, size, kind, stream);
}

static int memcpy_peer_async(void *to, int to_device, const void *from, int from_device, size_t size, void *stream) {
    if (paused(to) || paused(from)) return refuse(ILLEGAL_STATE, used_paused);
    return real.MemcpyPeerAsync(to, to_device, from, from_device, size, stream);
}

static int memset_(void *to, int value, size_t size) {
    if (paused(to)) return refuse(ILLEGAL_STATE, used_paused);
    return real.Memset(to, value, size);
}

static int memset_async(void *to, int value, size_t size, void *stream) {
    if (paused(to)) return refuse(ILLEGAL_STATE, used_paused);
    return real.MemsetAsync(to, value, size, stream);
}

static const struct {
    const char *name;
    void *wrapper; /* NULL: the function is called only */
    void *real;    /* where the real function is stored */
} wrappers[] = {
    {"cudaGetDevice", NULL, &real.GetDevice},
    {"cudaMalloc", malloc_, &real.Malloc},
    {"cudaDeviceEnablePeerAccess", device_enable_peer_access, &real.DeviceEnablePeerAccess},
    {"cudaFree", free_, &real.Free},
    {"cudaGetErrorString", get_error_string, &real.GetErrorString},
    {"cudaIpcGetMemHandle", ipc_get_mem_handle, &real.IpcGetMemHandle},
    {"cudaIpcOpenMemHandle", ipc_open_mem_handle, &real.IpcOpenMemHandle},
    {"cudaIpcCloseMemHandle", ipc_close_mem_handle, &real.IpcCloseMemHandle},
    {"cudaMemcpy", memcpy_, &real.Memcpy},
    {"cudaMemcpyAsync", memcpy_async, &real.MemcpyAsync},
    {"cudaMemcpyPeerAsync", memcpy_peer_async, &real.MemcpyPeerAsync},
    {"cudaMemset", memset_, &real.Memset},
    {"cudaMemsetAsync", memset_async, &real.MemsetAsync},
};

enum { COUNT = sizeof wrappers / sizeof *wrappers };

/* The runtime's function, or NULL. */
static void *resolve(int i) {
    void **slot = wrappers[i].real;
    void *function = __atomic_load_n(slot, __ATOMIC_ACQUIRE);
    if (!function) function = driver_runtime_function(wrappers[i].name);
    __atomic_store_n(slot, function, __ATOMIC_RELEASE);
    return function;
}

int runtime_hook(const struct object *object) {
    struct replacement list[COUNT];
    int found = 0;
    for (int i = 0; i < COUNT; i++)
        if (resolve(i) && wrappers[i].wrapper) list[found++] = (struct replacement){wrappers[i].name, wrappers[i].wrapper};
    return elf_replace_all(object, list, found);
}

bool runtime_allocates_for(const struct object *object) {
    return real.Malloc && elf_replace(object, "cudaMalloc", (void *)malloc_) > 0;
}

bool runtime_found(void) {
    for (int i = 0; i < COUNT; i++) resolve(i);
    return real.Malloc && real.Free;
}

void *runtime_allocate(size_t size) {
    void *ptr;
    return real.Malloc(&ptr, size) ? NULL : ptr;
}

void runtime_free(void *ptr) {
    int error = real.Free(ptr);
    if (error) log_line(LOG_ERROR, "cudaFree: %s", real.GetErrorString ? real.GetErrorString(error) : "failed");
}
