/* NCCL's order of the driver's memory calls. All of it on the thread that calls, whose context is current. */
#include "internal.h"

#include <string.h>

static size_t round_up(size_t size, size_t granularity) { return (size + granularity - 1) / granularity * granularity; }

static void device_prop(CUmemAllocationProp *prop, CUdevice dev) {
    memset(prop, 0, sizeof *prop);
    prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop->location.type = CU_MEM_LOCATION_TYPE_DEVICE;
    prop->location.id = dev;
}

ncclResult_t mem_allow(CUdeviceptr ptr, size_t size, CUdevice dev) {
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = dev},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    CU(cuMemSetAccess(ptr, size, &access, 1));
    return ncclSuccess;
}

/* The one place of cuMemCreate for peers', the network's and metadata alike: it tells nothing of the purpose. */
ncclResult_t mem_alloc(CUdeviceptr *ptr, CUmemGenericAllocationHandle *handle_out, size_t size) {
    if (!options.cumem) {
        CU(cuMemAlloc(ptr, size));
        return ncclSuccess;
    }
    CUmemAllocationProp prop;
    CUmemGenericAllocationHandle handle;
    CUdevice dev;
    size_t granularity = 0;
    int rdma = 0;
    CU(cuCtxGetDevice(&dev));
    device_prop(&prop, dev);
    CU(cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, dev));
    if (rdma) prop.allocFlags.gpuDirectRDMACapable = 1;
    CU(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    size = round_up(size, granularity);
    CU(cuMemCreate(&handle, size, &prop, 0));
    CU(cuMemAddressReserve(ptr, size, granularity, 0, 0));
    CU(cuMemMap(*ptr, size, 0, handle, 0));
    TRY(mem_allow(*ptr, size, dev));
    if (handle_out != NULL) *handle_out = handle;
    return ncclSuccess;
}

ncclResult_t mem_free(CUdeviceptr ptr) {
    if (ptr == 0) return ncclSuccess;
    if (!options.cumem) {
        CU(cuMemFree(ptr));
        return ncclSuccess;
    }
    CUmemGenericAllocationHandle handle;
    size_t size = 0;
    CU(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)ptr));
    CU(cuMemRelease(handle));
    CU(cuMemGetAddressRange(NULL, &size, ptr));
    CU(cuMemUnmap(ptr, size));
    CU(cuMemRelease(handle));
    CU(cuMemAddressFree(ptr, size));
    return ncclSuccess;
}

ncclResult_t mem_map_again(CUdeviceptr *ptr, CUmemGenericAllocationHandle handle, size_t size) {
    CUmemAllocationProp prop;
    CUdevice dev;
    size_t granularity = 0;
    memset(&prop, 0, sizeof prop);
    CU(cuCtxGetDevice(&dev));
    CU(cuMemGetAllocationPropertiesFromHandle(&prop, handle));
    CU(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    size = round_up(size, granularity);
    CU(cuMemAddressReserve(ptr, size, granularity, 0, 0));
    CU(cuMemMap(*ptr, size, 0, handle, 0));
    return mem_allow(*ptr, size, dev);
}

ncclResult_t mem_free_second_mapping(CUdeviceptr ptr) {
    if (ptr == 0) return ncclSuccess;
    size_t size = 0;
    CU(cuMemGetAddressRange(NULL, &size, ptr));
    CU(cuMemUnmap(ptr, size));
    CU(cuMemAddressFree(ptr, size));
    return ncclSuccess;
}

static ncclResult_t host_prop(CUmemAllocationProp *prop, CUdevice *dev, size_t *granularity) {
    CU(cuCtxGetDevice(dev));
    memset(prop, 0, sizeof *prop);
    prop->type = CU_MEM_ALLOCATION_TYPE_PINNED;
    prop->requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
    prop->location.type = CU_MEM_LOCATION_TYPE_HOST_NUMA;
    CU(cuDeviceGetAttribute(&prop->location.id, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID, *dev));
    if (prop->location.id < 0) prop->location.id = 0;
    CU(cuMemGetAllocationGranularity(granularity, prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    return ncclSuccess;
}

/* The device may use it first, the processor next. */
static ncclResult_t host_allow(CUdeviceptr ptr, size_t size, CUdevice dev, int node) {
    CUmemAccessDesc access = {.location = {.type = CU_MEM_LOCATION_TYPE_HOST_NUMA, .id = node},
                              .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    TRY(mem_allow(ptr, size, dev));
    CU(cuMemSetAccess(ptr, size, &access, 1));
    return ncclSuccess;
}

ncclResult_t mem_host_alloc(CUdeviceptr *ptr, CUmemGenericAllocationHandle *handle, size_t size) {
    CUmemAllocationProp prop;
    CUdevice dev;
    size_t granularity = 0;
    TRY(host_prop(&prop, &dev, &granularity));
    size = round_up(size, granularity);
    CU(cuMemCreate(handle, size, &prop, 0));
    CU(cuMemAddressReserve(ptr, size, granularity, 0, 0));
    CU(cuMemMap(*ptr, size, 0, *handle, 0));
    return host_allow(*ptr, size, dev, prop.location.id);
}

ncclResult_t mem_host_map(CUdeviceptr *ptr, CUmemGenericAllocationHandle handle, size_t size) {
    CUmemAllocationProp prop;
    CUdevice dev;
    size_t granularity = 0;
    TRY(host_prop(&prop, &dev, &granularity));
    size = round_up(size, granularity);
    CU(cuMemAddressReserve(ptr, size, 0, 0, 0));
    CU(cuMemMap(*ptr, size, 0, handle, 0));
    return host_allow(*ptr, size, dev, prop.location.id);
}

/* A side stream, so as not to disturb a capture on the caller's. */
static ncclResult_t side_stream(CUdeviceptr dst, const void *src, size_t size) {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    CUstream stream;
    CUresult result;
    if (driver.cuThreadExchangeStreamCaptureMode != NULL) CU(cuThreadExchangeStreamCaptureMode(&mode));
    CU(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    result = src != NULL ? driver.cuMemcpyHtoDAsync(dst, src, size, stream)
                         : driver.cuMemsetD8Async(dst, 0, size, stream);
    if (result == CUDA_SUCCESS) result = driver.cuStreamSynchronize(stream);
    driver.cuStreamDestroy(stream);
    if (driver.cuThreadExchangeStreamCaptureMode != NULL) CU(cuThreadExchangeStreamCaptureMode(&mode));
    if (result != CUDA_SUCCESS) {
        return fail(ncclUnhandledCudaError, "%s of %zu bytes at %#llx: CUDA error %d", src != NULL ? "upload" : "memset",
                    size, dst, result);
    }
    return ncclSuccess;
}

ncclResult_t mem_alloc_zeroed(CUdeviceptr *ptr, size_t size) {
    TRY(mem_alloc(ptr, NULL, size));
    return side_stream(*ptr, NULL, size);
}

ncclResult_t mem_upload(CUdeviceptr dst, const void *src, size_t size) { return side_stream(dst, src, size); }

/* Of the whole allocation, with access for each device that can reach it. */
static ncclResult_t user_alloc(CUdeviceptr *ptr, size_t size) {
    CUmemAllocationProp prop;
    CUmemGenericAllocationHandle handle;
    CUdevice dev;
    size_t granularity = 0;
    int fabric = 0, rdma = 0, count = 0;
    CU(cuCtxGetDevice(&dev));
    device_prop(&prop, dev);
    driver.cuDeviceGetAttribute(&fabric, CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED, dev);
    if (fabric) prop.requestedHandleTypes |= CU_MEM_HANDLE_TYPE_FABRIC;
    CU(cuDeviceGetAttribute(&rdma, CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED, dev));
    if (rdma) prop.allocFlags.gpuDirectRDMACapable = 1;
    CU(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    CU(cuDeviceGetCount(&count));
    size = round_up(size, granularity);
    CUresult result = driver.cuMemCreate(&handle, size, &prop, 0);
    if (fabric && (result == CUDA_ERROR_NOT_PERMITTED || result == CUDA_ERROR_NOT_SUPPORTED)) {
        prop.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
        result = driver.cuMemCreate(&handle, size, &prop, 0);
    }
    if (result != CUDA_SUCCESS) {
        return fail(ncclUnhandledCudaError, "cuMemCreate of %zu bytes for the user: CUDA error %d", size, result);
    }
    CU(cuMemAddressReserve(ptr, size, granularity, 0, 0));
    CU(cuMemMap(*ptr, size, 0, handle, 0));
    for (int i = 0; i < count; i++) {
        int reachable = i == dev;
        if (!reachable && driver.cuDeviceCanAccessPeer != NULL) driver.cuDeviceCanAccessPeer(&reachable, i, dev);
        if (reachable) TRY(mem_allow(*ptr, size, i));
    }
    return ncclSuccess;
}

/* The caller's thread. */
ncclResult_t ncclMemAlloc(void **ptr, size_t size) {
    CUdeviceptr dptr = 0;
    if (ptr == NULL || size == 0) return fail(ncclInvalidArgument, "ncclMemAlloc: no pointer or no size");
    TRY(driver_init());
    if (options.cumem) {
        TRY(user_alloc(&dptr, size));
    } else {
        CU(cuMemAlloc(&dptr, size));
    }
    *ptr = (void *)(uintptr_t)dptr;
    return ncclSuccess;
}

/* The caller's thread. */
ncclResult_t ncclMemFree(void *ptr) {
    CUcontext saved, ctx;
    CUdevice dev = 0;
    CUdeviceptr dptr = (CUdeviceptr)(uintptr_t)ptr;
    if (ptr == NULL) return ncclSuccess;
    TRY(driver_init());
    CU(cuCtxGetCurrent(&saved));
    CU(cuPointerGetAttribute(&dev, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, dptr));
    CU(cuDevicePrimaryCtxRetain(&ctx, dev));
    CU(cuCtxSetCurrent(ctx));
    ncclResult_t result = mem_free(dptr);
    driver.cuCtxSetCurrent(saved);
    return result;
}
