/*
 * The wrappers of the driver's functions that NCCL gets instead of the real
 * ones. They run on NCCL's threads. What needs memory of its own (tables,
 * slabs, peers) is the core's; here is the fast path: memory that is not
 * amem's, the launch guard, and what belongs to a thread.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

#include "hook.h"

int driver_guard = AMEM_GUARD_OPEN;
int driver_launches;

/*
 * NCCL's allocator asks for the granularity, creates, reserves and maps on one
 * thread, in this order. These two remember where in it the thread is.
 */
static __thread bool own_allocator;                   /* the granularity was asked in the allocator's way */
static __thread CUmemGenericAllocationHandle pending; /* the handle that the next reservation may be for */

/* The last error of this thread that was amem's own, and why. */
static __thread CUresult refusal;
static __thread const char *refusal_text;

static CUresult refuse(CUresult error, const char *text) {
    refusal = error;
    refusal_text = text;
    return error;
}

static bool is_virtual(CUmemGenericAllocationHandle handle) {
    return (handle & AMEM_HANDLE_TAG_MASK) == AMEM_HANDLE_TAG;
}

/* The real functions, stored when NCCL asks for them. */
static struct {
    CUresult (*GetProcAddress)(const char *, void **, int, cuuint64_t);
    CUresult (*GetProcAddress_v2)(const char *, void **, int, cuuint64_t, CUdriverProcAddressQueryResult *);
    CUresult (*GetErrorString)(CUresult, const char **);
    CUresult (*CtxEnablePeerAccess)(CUcontext, unsigned int);
    CUresult (*MemCreate)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *, unsigned long long);
    CUresult (*MemRelease)(CUmemGenericAllocationHandle);
    CUresult (*MemRetainAllocationHandle)(CUmemGenericAllocationHandle *, void *);
    CUresult (*MemAddressReserve)(CUdeviceptr *, size_t, size_t, CUdeviceptr, unsigned long long);
    CUresult (*MemAddressFree)(CUdeviceptr, size_t);
    CUresult (*MemMap)(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long);
    CUresult (*MemUnmap)(CUdeviceptr, size_t);
    CUresult (*MemSetAccess)(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t);
    CUresult (*MemGetAddressRange)(CUdeviceptr *, size_t *, CUdeviceptr);
    CUresult (*MemGetAllocationGranularity)(size_t *, const CUmemAllocationProp *, CUmemAllocationGranularity_flags);
    CUresult (*MemGetAllocationPropertiesFromHandle)(CUmemAllocationProp *, CUmemGenericAllocationHandle);
    CUresult (*MemExportToShareableHandle)(void *, CUmemGenericAllocationHandle, CUmemAllocationHandleType,
                                           unsigned long long);
    CUresult (*MemImportFromShareableHandle)(CUmemGenericAllocationHandle *, void *, CUmemAllocationHandleType);
    CUresult (*MemGetHandleForAddressRange)(void *, CUdeviceptr, size_t, CUmemRangeHandleType, unsigned long long);
    CUresult (*MulticastBindMem)(CUmemGenericAllocationHandle, size_t, CUmemGenericAllocationHandle, size_t, size_t,
                                 unsigned long long);
    CUresult (*MulticastBindAddr)(CUmemGenericAllocationHandle, size_t, CUdeviceptr, size_t, unsigned long long);
    /* Of the launches there is one for the legacy and one for the per-thread default stream. */
    CUresult (*LaunchKernel[2])(CUfunction, unsigned int, unsigned int, unsigned int, unsigned int, unsigned int,
                                unsigned int, unsigned int, CUstream, void **, void **);
    CUresult (*LaunchKernelEx[2])(const CUlaunchConfig *, CUfunction, void **, void **);
} real;

/*
 * Whether the core has stopped after an internal error, so that nobody knows any more
 * what is its memory. NCCL gives none back then: the driver would take the whole slab
 * that begins with the memory, and other communicators' with it.
 */
static bool stopped(void) { return !core_forked() && core_failure(NULL) == AMEM_ERROR_INTERNAL; }

/* Makes the core's call, and the driver's where the memory is not the core's. */
#define CORE_OR_DRIVER(core_call, driver_call)              \
    const struct amem_core *core = core_loaded();           \
    CUresult result = core ? core->core_call : AMEM_PASS;   \
    return result == AMEM_PASS ? real.driver_call : result

enum { PEER_ACCESS_ALREADY_ENABLED = 704 };

/* Between GPUs of one process NCCL's kernels use the peer's buffers, the program's among them, as they are (p2p.cc). */
static CUresult enable_peer_access(CUcontext peer, unsigned int flags) {
    char text[AMEM_ERROR_TEXT] = "";
    int from, to;
    const struct amem_core *core = core_loaded();
    CUresult result = real.CtxEnablePeerAccess(peer, flags);
    if ((result && result != PEER_ACCESS_ALREADY_ENABLED) || !core) return result;
    if (core->device_of(NULL, &from) || core->device_of(peer, &to)) return result;
    if (region_reach(from, to, text) == AMEM_OK) return result;
    log_line(LOG_ERROR, "%s", text);
    return refuse(CUDA_ERROR_UNKNOWN, "amem could not give a peer GPU access to regions' memory; amem's log says why");
}
/* The same for a virtual handle, which the driver must never see. */
#define CORE_OF_HANDLE(core_call)                           \
    const struct amem_core *core = core_loaded();           \
    CUresult result = core ? core->core_call : AMEM_PASS;   \
    return result == AMEM_PASS ? CUDA_ERROR_INVALID_VALUE : result

static CUresult granularity(size_t *bytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags flag) {
    CUresult result = real.MemGetAllocationGranularity(bytes, prop, flag);
    const struct amem_core *core = core_loaded();
    /*
     * NCCL's own allocator asks for the minimum; ncclMemAlloc, NVLS and
     * symmetric windows, whose memory must stay the driver's, for the
     * recommended one (alloc.h, allocator.cc, nvls.cc, dev_runtime.cc of 2.27
     * to 2.30).
     */
    own_allocator = core && !result && flag == CU_MEM_ALLOC_GRANULARITY_MINIMUM &&
                    prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    if (own_allocator && core->granularity) *bytes = core->granularity;
    return result;
}

static CUresult create(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                       unsigned long long flags) {
    const struct amem_core *core = core_loaded();
    bool own = own_allocator;
    own_allocator = false;
    pending = 0;
    watch_scan(); /* a plug-in may have loaded what this memory will be registered with */
    if (!core || !prop || prop->location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return real.MemCreate(handle, size, prop, flags);
    CUresult result = core->create(handle, size, prop, flags, own);
    if (result == AMEM_PASS) return real.MemCreate(handle, size, prop, flags);
    if (!result) pending = *handle;
    return result;
}

static CUresult release(CUmemGenericAllocationHandle handle) {
    if (pending == handle) pending = 0;
    if (!is_virtual(handle)) return real.MemRelease(handle);
    CORE_OF_HANDLE(release(handle));
}

static CUresult refuse_stopped(void) {
    return refuse(CUDA_ERROR_ILLEGAL_STATE, "amem has stopped after an internal error, and what it manages stays as it "
                                            "is: end this process, and report the error with the log");
}

static CUresult retain(CUmemGenericAllocationHandle *handle, void *addr) {
    if (stopped()) return refuse_stopped();
    CORE_OR_DRIVER(retain(handle, (CUdeviceptr)(uintptr_t)addr), MemRetainAllocationHandle(handle, addr));
}

static CUresult reserve(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags) {
    CUmemGenericAllocationHandle handle = pending;
    pending = 0;
    own_allocator = false;
    CORE_OR_DRIVER(reserve(ptr, size, alignment, addr, flags, handle),
                   MemAddressReserve(ptr, size, alignment, addr, flags));
}

static CUresult address_free(CUdeviceptr ptr, size_t size) {
    if (stopped()) return refuse_stopped();
    CORE_OR_DRIVER(address_free(ptr, size), MemAddressFree(ptr, size));
}

static CUresult map(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags) {
    if (!is_virtual(handle)) return real.MemMap(ptr, size, offset, handle, flags);
    CORE_OF_HANDLE(map(ptr, size, offset, handle, flags));
}

static CUresult unmap(CUdeviceptr ptr, size_t size) {
    if (stopped()) return refuse_stopped();
    CORE_OR_DRIVER(unmap(ptr, size), MemUnmap(ptr, size));
}

static CUresult set_access(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count) {
    CORE_OR_DRIVER(set_access(ptr, size, desc, count), MemSetAccess(ptr, size, desc, count));
}

static CUresult address_range(CUdeviceptr *base, size_t *size, CUdeviceptr ptr) {
    CORE_OR_DRIVER(address_range(base, size, ptr), MemGetAddressRange(base, size, ptr));
}

static CUresult properties(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle) {
    if (!is_virtual(handle)) return real.MemGetAllocationPropertiesFromHandle(prop, handle);
    const struct amem_core *core = core_loaded();
    if (!core) return CUDA_ERROR_INVALID_VALUE;
    CUresult result = core->properties(prop, handle);
    /* A second device of this process looks at a handle before it reserves and maps it for itself. */
    if (!result) pending = handle;
    return result;
}

static CUresult export_handle(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                              unsigned long long flags) {
    if (!is_virtual(handle)) return real.MemExportToShareableHandle(shareable, handle, type, flags);
    CORE_OF_HANDLE(export_handle(shareable, handle, type, flags));
}

static CUresult import_handle(CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType type) {
    const struct amem_core *core = core_loaded();
    bool own = own_allocator;
    own_allocator = false;
    pending = 0;
    CUresult result = core ? core->import_handle(handle, shareable, type) : AMEM_PASS;
    if (result == AMEM_PASS) {
        /*
         * Before it imports a peer's buffer, NCCL asks for the granularity as
         * its allocator does (p2p.cc), and a peer's buffer is never the
         * driver's own where amem is.
         */
        if (core && own && type == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) {
            const char *text = "amem is not enabled in the process of a peer: set AMEM_ENABLE=1 in every rank, or in none";
            log_line(LOG_ERROR, "%s", text);
            return refuse(CUDA_ERROR_NOT_SUPPORTED, text);
        }
        return real.MemImportFromShareableHandle(handle, shareable, type);
    }
    if (!result) pending = *handle;
    return result;
}

uint64_t driver_keep(CUdeviceptr ptr, size_t size, int why) {
    const struct amem_core *core = core_loaded();
    return core ? core->keep(ptr, size, why) : 0;
}

void driver_registered(uint64_t kept, uintptr_t registration) {
    const struct amem_core *core = kept ? core_loaded() : NULL;
    if (core) core->registered(kept, registration);
}

uint64_t driver_deregister(uintptr_t registration) {
    const struct amem_core *core = core_loaded();
    return core ? core->deregister(registration) : 0;
}

static CUresult handle_for_address_range(void *handle, CUdeviceptr ptr, size_t size, CUmemRangeHandleType type,
                                         unsigned long long flags) {
    uint64_t kept = driver_keep(ptr, size, AMEM_KEEP_BUFFER);
    CUresult result = real.MemGetHandleForAddressRange(handle, ptr, size, type, flags);
    if (result) driver_registered(kept, 0);
    return result;
}

static CUresult multicast_bind_mem(CUmemGenericAllocationHandle multicast, size_t multicast_offset,
                                   CUmemGenericAllocationHandle handle, size_t offset, size_t size,
                                   unsigned long long flags) {
    if (!is_virtual(handle)) return real.MulticastBindMem(multicast, multicast_offset, handle, offset, size, flags);
    CORE_OF_HANDLE(bind_multicast(multicast, multicast_offset, handle, offset, size, flags));
}

static CUresult multicast_bind_addr(CUmemGenericAllocationHandle multicast, size_t offset, CUdeviceptr ptr,
                                    size_t size, unsigned long long flags) {
    uint64_t kept = driver_keep(ptr, size, AMEM_KEEP_MULTICAST);
    CUresult result = real.MulticastBindAddr(multicast, offset, ptr, size, flags);
    driver_registered(kept, result ? 0 : (uintptr_t)&kept);
    return result;
}

/*
 * Counts a launch and answers where the guard is; where that is open, launched()
 * must follow. It is counted before the guard is read, so that who has closed the
 * guard and then sees no launch under way knows that none will come.
 */
static int count_launch(void) {
    __atomic_add_fetch(&driver_launches, 1, __ATOMIC_SEQ_CST);
    int position = __atomic_load_n(&driver_guard, __ATOMIC_SEQ_CST);
    if (position != AMEM_GUARD_OPEN) __atomic_sub_fetch(&driver_launches, 1, __ATOMIC_SEQ_CST);
    return position;
}

/*
 * Begins a launch of NCCL's; launched() must follow where it answers 0. One that
 * needs peers' memory that is still being mapped waits. The log tells a refusal
 * once a pause.
 */
static CUresult launch(void) {
    static atomic_int told = AMEM_GUARD_OPEN;
    int position = count_launch();
    while (position == AMEM_GUARD_ARRIVING) {
        const struct amem_core *core = core_loaded();
        if (!core || core->arrived()) break;
        position = count_launch();
    }
    if (position == AMEM_GUARD_OPEN) {
        if (told != AMEM_GUARD_OPEN) told = AMEM_GUARD_OPEN;
        return CUDA_SUCCESS;
    }
    const char *text =
        position == AMEM_GUARD_PAUSED
            ? "amem refused a collective because NCCL's memory is paused: call amem.resume() first"
            : "amem refused a collective because a peer's memory is not mapped here, after a pause that failed or an "
              "import that did: call amem.resume() first, or destroy the communicator if the peer has ended";
    if (atomic_exchange(&told, position) != position) log_line(LOG_ERROR, "%s", text);
    return refuse(CUDA_ERROR_ILLEGAL_STATE, text);
}

static CUresult launched(CUresult result) {
    __atomic_sub_fetch(&driver_launches, 1, __ATOMIC_SEQ_CST);
    return result;
}

/* NCCL puts this text into the error that its caller sees. */
static CUresult error_string(CUresult error, const char **text) {
    if (!refusal_text || error != refusal) return real.GetErrorString(error, text);
    *text = refusal_text;
    refusal_text = NULL;
    return CUDA_SUCCESS;
}

#define LAUNCH_KERNEL(suffix, variant)                                                                              \
    static CUresult launch_kernel##suffix(CUfunction f, unsigned int gx, unsigned int gy, unsigned int gz,           \
                                          unsigned int bx, unsigned int by, unsigned int bz, unsigned int shared,    \
                                          CUstream stream, void **params, void **extra) {                            \
        CUresult refused = launch();                                                                                 \
        if (refused) return refused;                                                                                 \
        return launched(real.LaunchKernel[variant](f, gx, gy, gz, bx, by, bz, shared, stream, params, extra));       \
    }                                                                                                                \
    static CUresult launch_kernel_ex##suffix(const CUlaunchConfig *config, CUfunction f, void **params,              \
                                             void **extra) {                                                         \
        CUresult refused = launch();                                                                                 \
        if (refused) return refused;                                                                                 \
        return launched(real.LaunchKernelEx[variant](config, f, params, extra));                                     \
    }
LAUNCH_KERNEL(_legacy, 0)
LAUNCH_KERNEL(_per_thread, 1)

static CUresult get_proc_address(const char *symbol, void **function, int version, cuuint64_t flags);
static CUresult get_proc_address_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status);

static const struct {
    const char *name;
    void *wrapper;
    void *real; /* where the real function is stored */
} wrappers[] = {
    {"cuGetErrorString", error_string, &real.GetErrorString},
    {"cuCtxEnablePeerAccess", enable_peer_access, &real.CtxEnablePeerAccess},
    {"cuMemCreate", create, &real.MemCreate},
    {"cuMemRelease", release, &real.MemRelease},
    {"cuMemRetainAllocationHandle", retain, &real.MemRetainAllocationHandle},
    {"cuMemAddressReserve", reserve, &real.MemAddressReserve},
    {"cuMemAddressFree", address_free, &real.MemAddressFree},
    {"cuMemMap", map, &real.MemMap},
    {"cuMemUnmap", unmap, &real.MemUnmap},
    {"cuMemSetAccess", set_access, &real.MemSetAccess},
    {"cuMemGetAddressRange", address_range, &real.MemGetAddressRange},
    {"cuMemGetAllocationGranularity", granularity, &real.MemGetAllocationGranularity},
    {"cuMemGetAllocationPropertiesFromHandle", properties, &real.MemGetAllocationPropertiesFromHandle},
    {"cuMemExportToShareableHandle", export_handle, &real.MemExportToShareableHandle},
    {"cuMemImportFromShareableHandle", import_handle, &real.MemImportFromShareableHandle},
    {"cuMemGetHandleForAddressRange", handle_for_address_range, &real.MemGetHandleForAddressRange},
    {"cuMulticastBindMem", multicast_bind_mem, &real.MulticastBindMem},
    {"cuMulticastBindAddr", multicast_bind_addr, &real.MulticastBindAddr},
};

static void *store(void *slot, void *function, void *wrapper) {
    __atomic_store_n((void **)slot, function, __ATOMIC_RELEASE);
    return wrapper;
}

static atomic_bool asked; /* NCCL has, for the driver */

bool driver_asked(void) { return asked; }

/* The function that NCCL gets for the driver's function of this name. */
static void *wrap(const char *name, void *function, int version, cuuint64_t flags) {
    asked = true;
    if (!core_load()) return function; /* the failure is told by core_load, and by every pause */
    int per_thread = (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0;
    if (!strcmp(name, "cuGetProcAddress"))
        return version >= 12000 ? store(&real.GetProcAddress_v2, function, (void *)get_proc_address_v2)
                                : store(&real.GetProcAddress, function, (void *)get_proc_address);
    if (!strcmp(name, "cuLaunchKernel"))
        return store(&real.LaunchKernel[per_thread], function,
                     per_thread ? (void *)launch_kernel_per_thread : (void *)launch_kernel_legacy);
    if (!strcmp(name, "cuLaunchKernelEx"))
        return store(&real.LaunchKernelEx[per_thread], function,
                     per_thread ? (void *)launch_kernel_ex_per_thread : (void *)launch_kernel_ex_legacy);
    for (size_t i = 0; i < sizeof wrappers / sizeof *wrappers; i++)
        if (!strcmp(name, wrappers[i].name)) return store(wrappers[i].real, function, wrappers[i].wrapper);
    return function;
}

void *driver_wrap(const char *name, void *function) { return wrap(name, function, 12000, 0); }

static CUresult get_proc_address(const char *symbol, void **function, int version, cuuint64_t flags) {
    CUresult result = real.GetProcAddress(symbol, function, version, flags);
    if (!result && function && *function) *function = wrap(symbol, *function, version, flags);
    return result;
}

static CUresult get_proc_address_v2(const char *symbol, void **function, int version, cuuint64_t flags,
                                    CUdriverProcAddressQueryResult *status) {
    CUresult result = real.GetProcAddress_v2(symbol, function, version, flags, status);
    if (!result && function && *function) *function = wrap(symbol, *function, version, flags);
    return result;
}

static void *wrap_lookup(const char *name, void *function) {
    if (!function) return NULL;
    if (strncmp(name, "cu", 2) || core_forked()) return divert_lookup(function);
    if (!strcmp(name, "cuGetProcAddress_v2")) return wrap("cuGetProcAddress", function, 12000, 0);
    if (!strcmp(name, "cuMemGetAddressRange_v2")) return wrap("cuMemGetAddressRange", function, 0, 0);
    return wrap(name, function, 0, 0);
}

/* NCCL loads its network plug-ins itself, and looks them up next. */
void *driver_dlsym(void *handle, const char *name) {
    watch_scan();
    return wrap_lookup(name, dlsym(handle, name));
}

void *driver_dlvsym(void *handle, const char *name, const char *version) {
    watch_scan();
    return wrap_lookup(name, dlvsym(handle, name, version));
}

void *driver_runtime_function(const char *name) {
    static void *(*const lookup)(void *, const char *) = dlsym;
    void *function = lookup(RTLD_DEFAULT, name);
    static const char *const runtimes[] = {"libcudart.so.13", "libcudart.so.12", "libcudart.so.11.0"};
    for (size_t i = 0; !function && i < sizeof runtimes / sizeof *runtimes; i++) {
        void *runtime = dlopen(runtimes[i], RTLD_LAZY | RTLD_NOLOAD);
        if (runtime) function = lookup(runtime, name);
    }
    return function;
}

enum { CUDA_RUNTIME_SYMBOL_NOT_FOUND = 500 };

int driver_entry_point(const char *symbol, void **function, unsigned long long flags, int *status) {
    int (*entry_point)(const char *, void **, unsigned long long, int *);
    *(void **)&entry_point = driver_runtime_function("cudaGetDriverEntryPoint");
    if (!entry_point) return CUDA_RUNTIME_SYMBOL_NOT_FOUND;
    int result = entry_point(symbol, function, flags, status);
    if (!result && function && *function) *function = wrap(symbol, *function, 12000, flags);
    return result;
}

int driver_entry_point_by_version(const char *symbol, void **function, unsigned int version,
                                  unsigned long long flags, int *status) {
    int (*entry_point)(const char *, void **, unsigned int, unsigned long long, int *);
    *(void **)&entry_point = driver_runtime_function("cudaGetDriverEntryPointByVersion");
    if (!entry_point) return CUDA_RUNTIME_SYMBOL_NOT_FOUND;
    int result = entry_point(symbol, function, version, flags, status);
    if (!result && function && *function) *function = wrap(symbol, *function, (int)version, flags);
    return result;
}
