/*
 * A stand-in for libcudart.so: the two functions by which a library that links
 * the CUDA runtime dynamically finds the driver's functions, and those that
 * PyTorch allocates, shares and copies memory with.
 */
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

#include "../../../golib/cuda/driver.h"

#define API __attribute__((visibility("default")))

enum { CUDA_ERROR_NO_LIBRARY = 999 };

API int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version,
                                         unsigned long long flags, int *status);
API int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status);

static CUresult (*get)(const char *symbol, void **function, int version, cuuint64_t flags,
                       CUdriverProcAddressQueryResult *status);

static void reach_driver(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    void *symbol = library != NULL ? dlsym(library, "cuGetProcAddress_v2") : NULL;
    memcpy(&get, &symbol, sizeof get);
}

int cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                     int *status) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    pthread_once(&once, reach_driver);
    *function = NULL;
    if (get == NULL) return CUDA_ERROR_NO_LIBRARY;
    CUresult result = get(symbol, function, (int)version, flags, &found);
    *status = (int)found;
    return result;
}

int cudaGetDriverEntryPoint(const char *symbol, void **function, unsigned long long flags, int *status) {
    return cudaGetDriverEntryPointByVersion(symbol, function, 13000, flags, status);
}

/* cudaError_t, which these answer. */
enum { SUCCESS = 0, INVALID_VALUE = 1, MEMORY_ALLOCATION = 2 };

typedef struct {
    char bytes[64];
} ipc_handle;

API int cudaGetDevice(int *device);
API int cudaSetDevice(int device);
API int cudaDeviceCanAccessPeer(int *can, int device, int peer);
API int cudaDeviceEnablePeerAccess(int peer, unsigned flags);
API int cudaMalloc(void **ptr, size_t size);
API int cudaFree(void *ptr);
API int cudaGetLastError(void);
API int cudaIpcGetMemHandle(ipc_handle *handle, void *ptr);
API int cudaIpcOpenMemHandle(void **ptr, ipc_handle handle, unsigned flags);
API int cudaIpcCloseMemHandle(void *ptr);
API int cudaMemcpy(void *to, const void *from, size_t size, int kind);
API int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream);
API int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *stream);
API int cudaMemset(void *to, int value, size_t size);
API int cudaMemsetAsync(void *to, int value, size_t size, void *stream);
API const char *cudaGetErrorString(int error);

static void *driver_function(const char *name) {
    void *function = NULL;
    int status = 0;
    return cudaGetDriverEntryPoint(name, &function, 0, &status) ? NULL : function;
}

static __thread int last_error;

static CUresult call(const char *name, uintptr_t a, uintptr_t b) {
    CUresult (*function)(uintptr_t, uintptr_t);
    void *found = driver_function(name);
    memcpy(&function, &found, sizeof function);
    return function(a, b);
}

int cudaGetDevice(int *device) {
    *device = 0;
    call("cuCtxGetDevice", (uintptr_t)device, 0);
    return SUCCESS;
}

static int use_context_of(int device, void **context) {
    call("cuInit", 0, 0);
    return (int)call("cuDevicePrimaryCtxRetain", (uintptr_t)context, (uintptr_t)device);
}

int cudaSetDevice(int device) {
    void *context;
    int error = use_context_of(device, &context);
    return last_error = error ? error : (int)call("cuCtxSetCurrent", (uintptr_t)context, 0);
}

int cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    CUresult (*function)(int *, CUdevice, CUdevice);
    void *found = driver_function("cuDeviceCanAccessPeer");
    memcpy(&function, &found, sizeof function);
    return last_error = (int)function(can, device, peer);
}

int cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    void *context;
    int error = use_context_of(peer, &context);
    return last_error = error ? error : (int)call("cuCtxEnablePeerAccess", (uintptr_t)context, flags);
}

/* As the real one, it makes the device's primary context the thread's where that has none. */
static void use_device(void) {
    int device;
    void *context;
    if (!call("cuCtxGetDevice", (uintptr_t)&device, 0)) return;
    call("cuInit", 0, 0);
    if (!call("cuDevicePrimaryCtxRetain", (uintptr_t)&context, 0)) call("cuCtxSetCurrent", (uintptr_t)context, 0);
}

/* The numbers of these errors are the driver's. */
int cudaMalloc(void **ptr, size_t size) {
    use_device();
    return last_error = (int)call("cuMemAlloc", (uintptr_t)ptr, size);
}

int cudaFree(void *ptr) {
    use_device();
    return last_error = ptr ? (int)call("cuMemFree", (uintptr_t)ptr, 0) : SUCCESS;
}

int cudaGetLastError(void) {
    int error = last_error;
    last_error = SUCCESS;
    return error;
}

/* As the real one, it refuses memory that is not cudaMalloc's. */
int cudaIpcGetMemHandle(ipc_handle *handle, void *ptr) {
    CUresult (*retain)(CUmemGenericAllocationHandle *, void *);
    CUresult (*release)(CUmemGenericAllocationHandle);
    void *functions[2] = {driver_function("cuMemRetainAllocationHandle"), driver_function("cuMemRelease")};
    memcpy(&retain, &functions[0], sizeof retain);
    memcpy(&release, &functions[1], sizeof release);
    CUmemGenericAllocationHandle physical;
    if (!retain(&physical, ptr)) {
        release(physical);
        return INVALID_VALUE;
    }
    memset(handle, 0, sizeof *handle);
    memcpy(handle, "cudart", sizeof "cudart");
    memcpy(handle->bytes + 8, &ptr, sizeof ptr);
    return SUCCESS;
}

int cudaIpcOpenMemHandle(void **ptr, ipc_handle handle, unsigned flags) {
    (void)flags;
    if (memcmp(handle.bytes, "cudart", sizeof "cudart")) return INVALID_VALUE;
    memcpy(ptr, handle.bytes + 8, sizeof *ptr);
    return SUCCESS;
}

int cudaIpcCloseMemHandle(void *ptr) { return ptr ? SUCCESS : INVALID_VALUE; }

/* Memory of the simulated device is at its own address in this process. */
int cudaMemcpy(void *to, const void *from, size_t size, int kind) {
    int error = cudaMemcpyAsync(to, from, size, kind, NULL);
    return error ? error : (int)call("cuStreamSynchronize", 0, 0);
}

/* The driver refuses some copies of host memory that it has pinned. */
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream) {
    (void)kind;
    CUresult (*function)(CUdeviceptr, CUdeviceptr, size_t, void *);
    void *found = driver_function("cuMemcpyAsync");
    memcpy(&function, &found, sizeof function);
    return (int)function((uintptr_t)to, (uintptr_t)from, size, stream);
}

int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *stream) {
    (void)to_device, (void)from_device, (void)stream;
    return cudaMemcpy(to, from, size, 0);
}

int cudaMemset(void *to, int value, size_t size) {
    memset(to, value, size);
    return SUCCESS;
}

int cudaMemsetAsync(void *to, int value, size_t size, void *stream) {
    (void)stream;
    return cudaMemset(to, value, size);
}

const char *cudaGetErrorString(int error) { return error ? "the runtime's own text" : "no error"; }
