/*
 * A stand-in for libcudart.so: what PyTorch calls of the CUDA runtime, over
 * whichever libcuda.so.1 there is, which in the tests is the simulated driver.
 * Memory, streams, events, copies and captures are the driver's. Of kernels it
 * has one kind, PyTorch's fill; every other launch fails with
 * cudaErrorNoKernelImageForDevice. It is compiled with NVIDIA's own headers, so
 * that the compiler checks each signature. stubs.py adds the functions that are
 * not here: they end the process with their name.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <pthread.h>
#include <search.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

enum { MAX_DEVICES = 32 };

/* ---- the driver ---- */

static void *library;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static CUresult started;
static int devices;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext primary[MAX_DEVICES];

static void *driver(const char *name) {
    void *function = library ? dlsym(library, name) : NULL;
    if (!function) {
        fprintf(stderr, "stand-in for libcudart: libcuda.so.1 has no %s\n", name);
        abort();
    }
    return function;
}

/* The driver's function, looked up once at each place. The headers' macros choose its version. */
#define NAME(function) #function
#define NAME_OF(function) NAME(function)
#define CU(function)                                                                           \
    ({                                                                                         \
        static void *found;                                                                    \
        if (!__atomic_load_n(&found, __ATOMIC_ACQUIRE))                                        \
            __atomic_store_n(&found, driver(NAME_OF(function)), __ATOMIC_RELEASE);             \
        (__typeof__(&function))__atomic_load_n(&found, __ATOMIC_ACQUIRE);                      \
    })

static void start(void) {
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library) {
        fprintf(stderr, "stand-in for libcudart: %s\n", dlerror());
        started = CUDA_ERROR_NO_DEVICE;
        return;
    }
    started = CU(cuInit)(0);
    if (!started) started = CU(cuDeviceGetCount)(&devices);
    if (devices > MAX_DEVICES) devices = MAX_DEVICES;
}

/* A thread's own, until cudaSetDevice or somebody else makes a context current. */
static __thread int chosen;
static __thread cudaError_t last_error;

/* Most numbers of the runtime's errors are the driver's. */
static cudaError_t answer(CUresult result) {
    if (result) last_error = (cudaError_t)result;
    return (cudaError_t)result;
}

static CUresult initialise(void) {
    pthread_once(&once, start);
    return started;
}

static CUresult use_primary(int device) {
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&lock);
    if (!primary[device]) result = CU(cuDevicePrimaryCtxRetain)(&primary[device], device);
    pthread_mutex_unlock(&lock);
    return result ? result : CU(cuCtxSetCurrent)(primary[device]);
}

/* As in the real one: the thread's current context counts, and where there is none, its device's primary one becomes it. */
static CUresult ready(void) {
    CUcontext context = NULL;
    CUresult result = initialise();
    if (!result) result = CU(cuCtxGetCurrent)(&context);
    if (!result && !context) result = use_primary(chosen);
    return result;
}

/* What a function answers: the driver's result, in a thread with a context. */
#define RUN(call)                            \
    do {                                     \
        CUresult result_ = ready();          \
        if (!result_) result_ = (call);      \
        return answer(result_);              \
    } while (0)

static CUdeviceptr at(const void *ptr) { return (CUdeviceptr)(uintptr_t)ptr; }

static void unlock_in_child(void) { pthread_mutex_unlock(&lock); }
static void lock_before_fork(void) { pthread_mutex_lock(&lock); }
__attribute__((constructor)) static void survive_fork(void) { pthread_atfork(lock_before_fork, unlock_in_child, unlock_in_child); }

/* ---- versions, errors, devices ---- */

API cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = CUDART_VERSION;
    return cudaSuccess;
}

API cudaError_t cudaDriverGetVersion(int *version) {
    *version = 0; /* the real one's answer where there is no driver */
    return initialise() ? cudaSuccess : answer(CU(cuDriverGetVersion)(version));
}

API cudaError_t cudaGetLastError(void) {
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

API cudaError_t cudaPeekAtLastError(void) { return last_error; }

API const char *cudaGetErrorName(cudaError_t error) {
    const char *text = NULL;
    if (error == cudaErrorNoKernelImageForDevice) return "cudaErrorNoKernelImageForDevice";
    return !initialise() && !CU(cuGetErrorName)((CUresult)error, &text) ? text : "unrecognized error code";
}

API const char *cudaGetErrorString(cudaError_t error) {
    const char *text = NULL;
    if (error == cudaErrorNoKernelImageForDevice) return "the stand-in for the CUDA runtime has no such kernel";
    return !initialise() && !CU(cuGetErrorString)((CUresult)error, &text) ? text : "unrecognized error code";
}

API cudaError_t cudaGetDeviceCount(int *count) {
    CUresult result = initialise();
    *count = devices;
    return answer(result);
}

API cudaError_t cudaGetDevice(int *device) {
    CUcontext context = NULL;
    CUresult result = initialise();
    *device = chosen;
    if (!result && !CU(cuCtxGetCurrent)(&context) && context) result = CU(cuCtxGetDevice)(device);
    return answer(result);
}

API cudaError_t cudaSetDevice(int device) {
    CUresult result = initialise();
    if (!result && (device < 0 || device >= devices)) result = CUDA_ERROR_INVALID_DEVICE;
    if (!result) result = use_primary(device);
    if (!result) chosen = device;
    return answer(result);
}

API cudaError_t cudaDeviceSynchronize(void) { RUN(CU(cuCtxSynchronize)()); }

API cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    CUresult result = initialise();
    if (!result) result = CU(cuDeviceGetAttribute)(value, (CUdevice_attribute)attribute, device);
    return answer(result);
}

API cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device) {
    CUresult result = initialise();
    memset(properties, 0, sizeof *properties);
    if (!result) result = CU(cuDeviceGetName)(properties->name, sizeof properties->name, device);
    if (!result) result = CU(cuDeviceGetUuid)(&properties->uuid, device);
    if (!result) result = CU(cuDeviceTotalMem)(&properties->totalGlobalMem, device);
    static const struct {
        CUdevice_attribute attribute;
        size_t offset;
    } asked[] = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, offsetof(struct cudaDeviceProp, major)},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, offsetof(struct cudaDeviceProp, minor)},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, offsetof(struct cudaDeviceProp, multiProcessorCount)},
        {CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, offsetof(struct cudaDeviceProp, pciBusID)},
        {CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID, offsetof(struct cudaDeviceProp, pciDeviceID)},
        {CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID, offsetof(struct cudaDeviceProp, pciDomainID)},
    };
    for (size_t i = 0; i < sizeof asked / sizeof *asked && !result; i++)
        result = CU(cuDeviceGetAttribute)((int *)((char *)properties + asked[i].offset), asked[i].attribute, device);
    properties->warpSize = 32;
    properties->maxThreadsPerBlock = 1024;
    properties->maxThreadsPerMultiProcessor = 2048;
    for (int i = 0; i < 3; i++) properties->maxThreadsDim[i] = properties->maxGridSize[i] = 65535;
    properties->sharedMemPerBlock = 48 << 10;
    properties->unifiedAddressing = properties->canMapHostMemory = properties->hostRegisterSupported = 1;
    properties->ipcEventSupported = 1;
    return answer(result);
}

API cudaError_t cudaDeviceGetPCIBusId(char *text, int size, int device) {
    int bus = 0;
    CUresult result = initialise();
    if (!result) result = CU(cuDeviceGetAttribute)(&bus, CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, device);
    if (!result) snprintf(text, (size_t)size, "0000:%02X:00.0", bus);
    return answer(result);
}

API cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    CUresult result = initialise();
    if (!result) result = CU(cuDeviceCanAccessPeer)(can, device, peer);
    return answer(result);
}

API cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) {
    CUcontext here = NULL;
    CUresult result = ready();
    if (!result) result = peer < 0 || peer >= devices ? CUDA_ERROR_INVALID_DEVICE : CU(cuCtxGetCurrent)(&here);
    if (!result) result = use_primary(peer);
    if (here) CU(cuCtxSetCurrent)(here);
    if (!result) result = CU(cuCtxEnablePeerAccess)(primary[peer], flags);
    return answer(result);
}

/* Streams of the simulated driver have no priorities; the range is that of a GPU. */
API cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0;
    *greatest = -5;
    RUN(CUDA_SUCCESS);
}

static CUresult not_there(void) { return CUDA_ERROR_NOT_SUPPORTED; }

/* A function that the driver lacks is one that says so: PyTorch insists on all of its table. */
API cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **function, unsigned version, unsigned long long flags,
                                                 enum cudaDriverEntryPointQueryResult *status) {
    CUdriverProcAddressQueryResult found = CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    CUresult result = initialise();
    *function = NULL;
    if (!result) result = CU(cuGetProcAddress)(symbol, function, (int)version, flags, &found);
    if (!result && !*function) {
        if (getenv("STAND_IN_VERBOSE")) fprintf(stderr, "stand-in for libcudart: the driver has no %s\n", symbol);
        *function = (void *)not_there;
        found = CU_GET_PROC_ADDRESS_SUCCESS;
    }
    if (status) *status = (enum cudaDriverEntryPointQueryResult)found;
    return answer(result);
}

/* ---- memory ---- */

API cudaError_t cudaMalloc(void **ptr, size_t size) {
    CUdeviceptr given = 0;
    CUresult result = ready();
    if (!result && size) result = CU(cuMemAlloc)(&given, size);
    if (!result) *ptr = (void *)(uintptr_t)given;
    return answer(result);
}

API cudaError_t cudaFree(void *ptr) { RUN(ptr ? CU(cuMemFree)(at(ptr)) : CUDA_SUCCESS); }

API cudaError_t cudaMemGetInfo(size_t *available, size_t *total) { RUN(CU(cuMemGetInfo)(available, total)); }

API cudaError_t cudaHostAlloc(void **ptr, size_t size, unsigned flags) { RUN(CU(cuMemHostAlloc)(ptr, size, flags)); }

API cudaError_t cudaMallocHost(void **ptr, size_t size) { RUN(CU(cuMemHostAlloc)(ptr, size, 0)); }

API cudaError_t cudaFreeHost(void *ptr) { RUN(ptr ? CU(cuMemFreeHost)(ptr) : CUDA_SUCCESS); }

API cudaError_t cudaHostRegister(void *ptr, size_t size, unsigned flags) { RUN(CU(cuMemHostRegister)(ptr, size, flags)); }

API cudaError_t cudaHostUnregister(void *ptr) { RUN(CU(cuMemHostUnregister)(ptr)); }

API cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *ptr) {
    unsigned type = 0;
    CUresult result = ready();
    memset(attributes, 0, sizeof *attributes);
    attributes->device = -1;
    if (result) return answer(result);
    if (CU(cuPointerGetAttribute)(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, at(ptr))) return cudaSuccess; /* unregistered */
    result = CU(cuPointerGetAttribute)(&attributes->device, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, at(ptr));
    attributes->type = type == CU_MEMORYTYPE_DEVICE ? cudaMemoryTypeDevice : cudaMemoryTypeHost;
    attributes->devicePointer = (void *)ptr;
    if (type == CU_MEMORYTYPE_HOST) attributes->hostPointer = (void *)ptr;
    return answer(result);
}

/* ---- copies ---- */

/* On the stream. The kind says nothing that the addresses do not. */
API cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    (void)kind;
    RUN(CU(cuMemcpyAsync)(at(to), at(from), size, stream));
}

API cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    cudaError_t error = cudaMemcpyAsync(to, from, size, kind, NULL);
    return error ? error : answer(CU(cuStreamSynchronize)(NULL));
}

API cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                                  enum cudaMemcpyKind kind, cudaStream_t stream) {
    CUDA_MEMCPY2D rows = {.WidthInBytes = width, .Height = height, .srcPitch = from_pitch, .dstPitch = to_pitch};
    rows.srcMemoryType = kind == cudaMemcpyHostToDevice ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    rows.dstMemoryType = kind == cudaMemcpyDeviceToHost ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
    rows.srcHost = from, rows.dstHost = to;
    rows.srcDevice = at(from), rows.dstDevice = at(to);
    RUN(CU(cuMemcpy2DAsync)(&rows, stream));
}

/* Through the host, and done when it returns. The stream is of from_device, as PyTorch's is. */
API cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, cudaStream_t stream) {
    CUcontext here = NULL;
    CUresult result = ready();
    void *staging = malloc(size ? size : 1);
    if (!result && !staging) result = CUDA_ERROR_OUT_OF_MEMORY;
    if (!result) result = CU(cuCtxGetCurrent)(&here);
    if (!result) result = use_primary(from_device);
    if (!result) result = CU(cuMemcpyDtoHAsync)(staging, at(from), size, stream);
    if (!result) result = CU(cuStreamSynchronize)(stream);
    if (!result) result = use_primary(to_device);
    if (!result) result = CU(cuMemcpyHtoD)(at(to), staging, size);
    if (here) CU(cuCtxSetCurrent)(here);
    free(staging);
    return answer(result);
}

API cudaError_t cudaMemset(void *to, int value, size_t size) { RUN(CU(cuMemsetD8)(at(to), (unsigned char)value, size)); }

API cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) {
    RUN(CU(cuMemsetD8Async)(at(to), (unsigned char)value, size, stream));
}

/* ---- streams and events ---- */

API cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { RUN(CU(cuStreamCreate)(stream, flags)); }

API cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithFlags(stream, cudaStreamDefault); }

API cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    (void)priority;
    return cudaStreamCreateWithFlags(stream, flags);
}

API cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    (void)stream;
    *priority = 0;
    RUN(CUDA_SUCCESS);
}

API cudaError_t cudaStreamDestroy(cudaStream_t stream) { RUN(CU(cuStreamDestroy)(stream)); }

API cudaError_t cudaStreamSynchronize(cudaStream_t stream) { RUN(CU(cuStreamSynchronize)(stream)); }

API cudaError_t cudaStreamQuery(cudaStream_t stream) {
    CUresult result = ready();
    if (!result) result = CU(cuStreamQuery)(stream);
    /* Not ready is no error that stays. */
    return result == CUDA_ERROR_NOT_READY ? cudaErrorNotReady : answer(result);
}

API cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    RUN(CU(cuStreamWaitEvent)(stream, event, flags));
}

API cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) { RUN(CU(cuEventCreate)(event, flags)); }

API cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, cudaEventDefault); }

API cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) { RUN(CU(cuEventRecord)(event, stream)); }

API cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    RUN(flags ? CUDA_ERROR_NOT_SUPPORTED : CU(cuEventRecord)(event, stream));
}

API cudaError_t cudaEventQuery(cudaEvent_t event) {
    CUresult result = ready();
    if (!result) result = CU(cuEventQuery)(event);
    return result == CUDA_ERROR_NOT_READY ? cudaErrorNotReady : answer(result);
}

API cudaError_t cudaEventSynchronize(cudaEvent_t event) { RUN(CU(cuEventSynchronize)(event)); }

API cudaError_t cudaEventDestroy(cudaEvent_t event) { RUN(CU(cuEventDestroy)(event)); }

API cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to) {
    RUN(CU(cuEventElapsedTime)(milliseconds, from, to));
}

/* ---- captures and graphs ---- */

API cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    RUN(CU(cuStreamBeginCapture)(stream, (CUstreamCaptureMode)mode));
}

API cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) { RUN(CU(cuStreamEndCapture)(stream, graph)); }

API cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    RUN(CU(cuStreamIsCapturing)(stream, (CUstreamCaptureStatus *)status));
}

API cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                         cudaGraph_t *graph, const cudaGraphNode_t **dependencies,
                                         const cudaGraphEdgeData **edges, size_t *count) {
    RUN(CU(cuStreamGetCaptureInfo)(stream, (CUstreamCaptureStatus *)status, (cuuint64_t *)id, graph,
                                   (const CUgraphNode **)dependencies, (const CUgraphEdgeData **)edges, count));
}

API cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) {
    CUresult result = initialise();
    return answer(result ? result : CU(cuThreadExchangeStreamCaptureMode)((CUstreamCaptureMode *)mode));
}

API cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    RUN(CU(cuGraphGetNodes)(graph, nodes, count));
}

API cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    RUN(CU(cuGraphInstantiateWithFlags)(executable, graph, flags));
}

API cudaError_t cudaGraphInstantiate(cudaGraphExec_t *executable, cudaGraph_t graph, unsigned long long flags) {
    return cudaGraphInstantiateWithFlags(executable, graph, flags);
}

API cudaError_t cudaGraphLaunch(cudaGraphExec_t executable, cudaStream_t stream) { RUN(CU(cuGraphLaunch)(executable, stream)); }

API cudaError_t cudaGraphExecDestroy(cudaGraphExec_t executable) { RUN(CU(cuGraphExecDestroy)(executable)); }

API cudaError_t cudaGraphDestroy(cudaGraph_t graph) { RUN(CU(cuGraphDestroy)(graph)); }

/* ---- CUDA's IPC ---- */

API cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *ptr) {
    RUN(CU(cuIpcGetMemHandle)((CUipcMemHandle *)handle, at(ptr)));
}

API cudaError_t cudaIpcOpenMemHandle(void **ptr, cudaIpcMemHandle_t handle, unsigned flags) {
    CUipcMemHandle of_driver;
    CUdeviceptr opened = 0;
    memcpy(&of_driver, &handle, sizeof of_driver);
    CUresult result = ready();
    if (!result) result = CU(cuIpcOpenMemHandle)(&opened, of_driver, flags);
    if (!result) *ptr = (void *)(uintptr_t)opened;
    return answer(result);
}

API cudaError_t cudaIpcCloseMemHandle(void *ptr) { RUN(CU(cuIpcCloseMemHandle)(at(ptr))); }

/*
 * An event of another process. What it stands for is over when the handle is
 * made, so that the other side has nothing to wait for: later than a real one,
 * never earlier.
 */
static const char event_magic[] = "event that is over";

API cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) {
    memset(handle, 0, sizeof *handle);
    memcpy(handle, event_magic, sizeof event_magic);
    RUN(CU(cuEventSynchronize)(event));
}

API cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) {
    RUN(memcmp(&handle, event_magic, sizeof event_magic) ? CUDA_ERROR_INVALID_HANDLE
                                                         : CU(cuEventCreate)(event, CU_EVENT_DISABLE_TIMING));
}

/* ---- kernels ---- */

typedef void (*kernel)(void **params);
/* Of the simulated driver, golib/sim/sim.h. */
CUresult cuSimFunctionCreate(CUfunction *function, kernel run, int count, const size_t *sizes);

/* PyTorch's fill with values of a type: how many, the value, and where. */
#define FILL(type)                                                  \
    static void fill_##type(void **params) {                        \
        int count = *(int *)params[0];                              \
        type value = *(type *)params[1], *to = *(type **)params[2]; \
        for (int i = 0; i < count; i++) to[i] = value;              \
    }
FILL(uint8_t)
FILL(uint16_t)
FILL(uint32_t)
FILL(uint64_t)

struct fill {
    const void *host; /* the function by which the program names the kernel */
    size_t size;
    CUfunction function;
};
static void *fills;

static int compare_hosts(const void *a, const void *b) {
    const void *x = ((const struct fill *)a)->host, *y = ((const struct fill *)b)->host;
    return (x > y) - (x < y);
}

/* The size of the values of the kernel of this name, if it is a fill; 0 if it is none. */
static size_t fill_size(const char *name) {
    if (!strstr(name, "29vectorized_elementwise_kernelI")) return 0;
    const char *type = strstr(name, "11FillFunctorI");
    if (!type) return 0;
    switch (type[strlen("11FillFunctorI")]) {
    case 'a': case 'b': case 'h': return 1;
    case 's': case 't': return 2;
    case 'i': case 'j': case 'f': return 4;
    case 'l': case 'm': case 'd': return 8;
    default: return 0;
    }
}

API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *thread,
                                void *block, void *block_dim, void *grid_dim, int *warp);
API void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *thread,
                                void *block, void *block_dim, void *grid_dim, int *warp) {
    (void)handle, (void)device, (void)limit, (void)thread, (void)block, (void)block_dim, (void)grid_dim, (void)warp;
    size_t size = fill_size(name);
    struct fill *fill = size ? malloc(sizeof *fill) : NULL;
    if (!fill) return;
    *fill = (struct fill){host, size, NULL};
    pthread_mutex_lock(&lock);
    if (*(struct fill **)tsearch(fill, &fills, compare_hosts) != fill) free(fill);
    pthread_mutex_unlock(&lock);
}

static CUresult find_fill(const void *host, CUfunction *function) {
    struct fill wanted = {.host = host};
    pthread_mutex_lock(&lock);
    struct fill **found = tfind(&wanted, &fills, compare_hosts);
    CUresult result = CUDA_SUCCESS;
    if (found && !(*found)->function) {
        size_t size = (*found)->size, sizes[] = {sizeof(int), size, sizeof(void *)};
        kernel run = size == 1 ? fill_uint8_t : size == 2 ? fill_uint16_t : size == 4 ? fill_uint32_t : fill_uint64_t;
        result = CU(cuSimFunctionCreate)(&(*found)->function, run, 3, sizes);
    }
    *function = found ? (*found)->function : NULL;
    pthread_mutex_unlock(&lock);
    return result;
}

API cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **params, size_t shared, cudaStream_t stream) {
    CUfunction function = NULL;
    CUresult result = ready();
    if (!result) result = find_fill(host, &function);
    if (!result && !function) result = CUDA_ERROR_NO_BINARY_FOR_GPU;
    if (!result)
        result = CU(cuLaunchKernel)(function, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned)shared, stream, params, NULL);
    return answer(result);
}

API cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block, void **params, size_t shared, cudaStream_t stream);
API cudaError_t __cudaLaunchKernel(cudaKernel_t function, dim3 grid, dim3 block, void **params, size_t shared, cudaStream_t stream) {
    return cudaLaunchKernel(function, grid, block, params, shared, stream);
}

API cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **params) {
    return cudaLaunchKernel(host, config->gridDim, config->blockDim, params, config->dynamicSmemBytes, config->stream);
}

API cudaError_t __cudaGetKernel(cudaKernel_t *function, const void *host);
API cudaError_t __cudaGetKernel(cudaKernel_t *function, const void *host) {
    *function = (cudaKernel_t)host;
    return cudaSuccess;
}

/* What <<<>>> says about a launch, between the program and the function that it names the kernel by. */
static __thread struct {
    dim3 grid, block;
    size_t shared;
    struct CUstream_st *stream;
} configuration;

API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream);
API unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, struct CUstream_st *stream) {
    configuration.grid = grid, configuration.block = block;
    configuration.shared = shared, configuration.stream = stream;
    return 0;
}

API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream);
API cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block;
    *shared = configuration.shared;
    memcpy(stream, &configuration.stream, sizeof configuration.stream);
    return cudaSuccess;
}

/* The code that is registered is never looked at. */
API void **__cudaRegisterFatBinary(void *binary);
API void **__cudaRegisterFatBinary(void *binary) {
    (void)binary;
    static void *handle;
    return &handle;
}

API void __cudaRegisterFatBinaryEnd(void **handle);
API void __cudaRegisterFatBinaryEnd(void **handle) { (void)handle; }

API void __cudaUnregisterFatBinary(void **handle);
API void __cudaUnregisterFatBinary(void **handle) { (void)handle; }

API char __cudaInitModule(void **handle);
API char __cudaInitModule(void **handle) {
    (void)handle;
    return 1;
}

API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size, int constant, int global);
API void __cudaRegisterVar(void **handle, char *host, char *device, const char *name, int external, size_t size, int constant, int global) {
    (void)handle, (void)host, (void)device, (void)name, (void)external, (void)size, (void)constant, (void)global;
}
