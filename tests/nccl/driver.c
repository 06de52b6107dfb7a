/*
 * How the stand-in reaches the driver: nothing at load; at the first unique id
 * or communicator it loads libcuda.so.1 as the CUDA runtime does, and fills
 * one table. With NCCL_STANDIN_CUDART_DYNAMIC the runtime is a library of its
 * own, which is asked for each function instead.
 */
#include "internal.h"

#include <dlfcn.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct driver driver;
struct options options;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static ncclResult_t once_result;
static pthread_mutex_t error_lock = PTHREAD_MUTEX_INITIALIZER;
static char last_error[1024];

ncclResult_t fail(ncclResult_t result, const char *format, ...) {
    char text[sizeof last_error];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);

    pthread_mutex_lock(&error_lock);
    memcpy(last_error, text, sizeof text);
    pthread_mutex_unlock(&error_lock);

    const char *debug = getenv("NCCL_DEBUG");
    if (debug != NULL && strcmp(debug, "VERSION") != 0 && debug[0] != '\0') fprintf(stderr, "NCCL WARN %s\n", text);
    return result;
}

ncclResult_t cuda_failure(const char *call, CUresult error) {
    const char *text = NULL;
    if (driver.cuGetErrorString == NULL || driver.cuGetErrorString(error, &text) != CUDA_SUCCESS) text = "unknown";
    return fail(ncclUnhandledCudaError, "%s: CUDA error %d '%s'", call, error, text);
}

const char *ncclGetLastError(ncclComm_t comm) {
    static _Thread_local char copy[sizeof last_error];
    (void)comm;
    pthread_mutex_lock(&error_lock);
    memcpy(copy, last_error, sizeof copy);
    pthread_mutex_unlock(&error_lock);
    return copy;
}

#ifdef NCCL_STANDIN_CUDART_DYNAMIC

int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                     int *status);
int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status);

static ncclResult_t reach_driver(void) { return ncclSuccess; }

static void *lookup(const char *name, int version) {
    void *function = NULL;
    int status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    const char *way = getenv("NCCL_STANDIN_ENTRY_POINT");
    int error;
    if (way != NULL && strcmp(way, "unversioned") == 0) {
        error = cudaGetDriverEntryPoint(name, &function, CU_GET_PROC_ADDRESS_DEFAULT, &status);
    } else {
        error = cudaGetDriverEntryPointByVersion(name, &function, (unsigned)version, CU_GET_PROC_ADDRESS_DEFAULT,
                                                 &status);
    }
    return error == 0 && status == CU_GET_PROC_ADDRESS_SUCCESS ? function : NULL;
}

static void *lookup_simulator(const char *name) { return lookup(name, 12000); }

#else

typedef CUresult (*get_proc_address_v1)(const char *symbol, void **function, int version, cuuint64_t flags);
typedef CUresult (*get_proc_address_v2)(const char *symbol, void **function, int version, cuuint64_t flags,
                                        CUdriverProcAddressQueryResult *status);

static void *library;
static get_proc_address_v1 get_v1;
static get_proc_address_v2 get_v2;

/* The runtime asks cuGetProcAddress for itself in both versions and uses the answers. */
static ncclResult_t reach_driver(void) {
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL) return fail(ncclUnhandledCudaError, "no driver: %s", dlerror());

    get_proc_address_v2 first;
    void *symbol = dlsym(library, "cuGetProcAddress_v2");
    if (symbol == NULL) return fail(ncclUnhandledCudaError, "the driver has no cuGetProcAddress_v2");
    memcpy(&first, &symbol, sizeof first);

    CUdriverProcAddressQueryResult status;
    if (first("cuGetProcAddress", &symbol, 11030, CU_GET_PROC_ADDRESS_DEFAULT, &status) != CUDA_SUCCESS ||
        symbol == NULL) {
        return fail(ncclUnhandledCudaError, "the driver has no cuGetProcAddress of version 11030");
    }
    memcpy(&get_v1, &symbol, sizeof get_v1);
    if (first("cuGetProcAddress", &symbol, 12000, CU_GET_PROC_ADDRESS_DEFAULT, &status) != CUDA_SUCCESS ||
        symbol == NULL) {
        return fail(ncclUnhandledCudaError, "the driver has no cuGetProcAddress of version 12000");
    }
    memcpy(&get_v2, &symbol, sizeof get_v2);
    return ncclSuccess;
}

static void *lookup(const char *name, int version) {
    void *function = NULL;
    if (version < 4000) {
        return get_v1(name, &function, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM) == CUDA_SUCCESS ? function : NULL;
    }
    CUdriverProcAddressQueryResult status = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (get_v2(name, &function, version, CU_GET_PROC_ADDRESS_LEGACY_STREAM, &status) != CUDA_SUCCESS) return NULL;
    return status == CU_GET_PROC_ADDRESS_SUCCESS ? function : NULL;
}

/* NCCL too looks up other names through the slot that amem replaces. */
static void *lookup_simulator(const char *name) { return dlsym(library, name); }

#endif

static ncclResult_t load(void *slot, const char *name, int version, int needed) {
    void *function = lookup(name, version);
    memcpy(slot, &function, sizeof function);
    if (function == NULL && needed) {
        return fail(ncclSystemError, "the driver has no %s of version %d", name, version);
    }
    return ncclSuccess;
}

static ncclResult_t load_table(void) {
#define F(name, version, needed, args) TRY(load(&driver.name, #name, version, needed));
    DRIVER_FUNCTIONS(F)
#undef F
    void *check = lookup_simulator("cuSimCheckAccess");
    memcpy(&driver.cuSimCheckAccess, &check, sizeof check);
    return ncclSuccess;
}

static long long number(const char *name, long long otherwise, long long least, long long most) {
    const char *text = getenv(name);
    long long value = text != NULL && text[0] != '\0' ? atoll(text) : otherwise;
    return value < least ? least : value > most ? most : value;
}

static void read_options(void) {
    options.cumem = number("NCCL_CUMEM_ENABLE", 1, 0, 1) != 0;
    options.host_numa = options.cumem && number("NCCL_STANDIN_HOST_NUMA", 1, 0, 1) != 0;
    options.nvls = options.cumem && number("NCCL_STANDIN_NVLS", 0, 0, 1) != 0;
    options.graph_register = options.cumem && number("NCCL_GRAPH_REGISTER", 1, 0, 1) != 0;
    options.net = number("NCCL_STANDIN_NET", 0, 0, 1) != 0;
    options.channels = (int)number("NCCL_STANDIN_CHANNELS", 2, 1, MAX_CHANNELS);
    options.metadata = (int)number("NCCL_STANDIN_METADATA", 24, 0, MAX_METADATA);
    options.buffsize = (size_t)number("NCCL_STANDIN_BUFFSIZE", 512 << 10, 64 << 10, 1 << 30);
    options.buffsize = (options.buffsize + 0xffff) & ~(size_t)0xffff;
    options.shareable = (size_t)number("NCCL_STANDIN_SHAREABLE", 2 << 20, 64 << 10, 1 << 30);
    options.shareable = (options.shareable + 0xffff) & ~(size_t)0xffff;
    options.credit_delay_us = (unsigned)number("NCCL_STANDIN_CREDIT_DELAY_US", 0, 0, 60 * 1000 * 1000);
    options.timeout_s = (unsigned)number("NCCL_STANDIN_TIMEOUT_S", 120, 1, 1 << 20);
}

/* NCCL creates and releases one handle, never mapped, to see whether host memory works. */
static ncclResult_t probe_host_memory(void) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA}};
    CUmemGenericAllocationHandle handle;
    size_t granularity = 0;
    CUdevice dev;
    CU(cuDeviceGet(&dev, 0));
    if (driver.cuDeviceGetAttribute(&prop.location.id, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, dev) != CUDA_SUCCESS ||
        prop.location.id < 0) {
        prop.location.id = 0;
    }
    CU(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    if (driver.cuMemCreate(&handle, granularity, &prop, 0) != CUDA_SUCCESS) {
        options.host_numa = false;
        return ncclSuccess;
    }
    CU(cuMemRelease(handle));
    return ncclSuccess;
}

static ncclResult_t init(void) {
    int version = 0;
    TRY(reach_driver());
    TRY(load_table());
    CU(cuInit(0));
    CU(cuDriverGetVersion(&version));
    read_options();
    if (options.host_numa) TRY(probe_host_memory());
    return kernels_init();
}

static void init_once(void) { once_result = init(); }

ncclResult_t driver_init(void) {
    pthread_once(&once, init_once);
    return once_result;
}
