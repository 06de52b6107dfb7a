/*
 * The driver's functions that the core calls, in a table that is filled from
 * libcuda.so.1 by dlsym: the core links with no CUDA library.
 */
#ifndef AMEM_FUNCTIONS_H
#define AMEM_FUNCTIONS_H

#include "driver.h"

/* X(short name, exported name, parameters, arguments) */
#define AMEM_DRIVER_FUNCTIONS(X)                                                                                      \
    X(GetErrorName, "cuGetErrorName", (CUresult r, const char **name), (r, name))                                     \
    X(DeviceGetCount, "cuDeviceGetCount", (int *count), (count))                                                      \
    X(DeviceGetAttribute, "cuDeviceGetAttribute", (int *value, CUdevice_attribute attribute, CUdevice dev),           \
      (value, attribute, dev))                                                                                        \
    X(DeviceGetUuid, "cuDeviceGetUuid_v2", (CUuuid * uuid, CUdevice dev), (uuid, dev))                                \
    X(CtxGetCurrent, "cuCtxGetCurrent", (CUcontext * ctx), (ctx))                                                     \
    X(CtxGetDevice, "cuCtxGetDevice", (CUdevice * dev), (dev))                                                        \
    X(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain", (CUcontext * ctx, CUdevice dev), (ctx, dev))                \
    X(CtxPushCurrent, "cuCtxPushCurrent_v2", (CUcontext ctx), (ctx))                                                  \
    X(CtxPopCurrent, "cuCtxPopCurrent_v2", (CUcontext * ctx), (ctx))                                                  \
    X(CtxSynchronize, "cuCtxSynchronize", (void), ())                                                                 \
    X(ThreadExchangeStreamCaptureMode, "cuThreadExchangeStreamCaptureMode", (CUstreamCaptureMode * mode), (mode))      \
    X(StreamCreate, "cuStreamCreate", (CUstream * stream, unsigned int flags), (stream, flags))                       \
    X(StreamSynchronize, "cuStreamSynchronize", (CUstream stream), (stream))                                          \
    X(EventCreate, "cuEventCreate", (CUevent * event, unsigned int flags), (event, flags))                            \
    X(EventRecord, "cuEventRecord", (CUevent event, CUstream stream), (event, stream))                                \
    X(EventSynchronize, "cuEventSynchronize", (CUevent event), (event))                                               \
    X(MemGetInfo, "cuMemGetInfo_v2", (size_t * free, size_t * total), (free, total))                                  \
    X(MemHostRegister, "cuMemHostRegister_v2", (void *ptr, size_t size, unsigned int flags), (ptr, size, flags))      \
    X(MemHostUnregister, "cuMemHostUnregister", (void *ptr), (ptr))                                                   \
    X(MemcpyDtoHAsync, "cuMemcpyDtoHAsync_v2", (void *dst, CUdeviceptr src, size_t n, CUstream stream),               \
      (dst, src, n, stream))                                                                                          \
    X(MemcpyHtoDAsync, "cuMemcpyHtoDAsync_v2", (CUdeviceptr dst, const void *src, size_t n, CUstream stream),         \
      (dst, src, n, stream))                                                                                          \
    X(Memcpy2DAsync, "cuMemcpy2DAsync_v2", (const CUDA_MEMCPY2D *copy, CUstream stream), (copy, stream))              \
    X(MemsetD8Async, "cuMemsetD8Async", (CUdeviceptr dst, unsigned char value, size_t n, CUstream stream),            \
      (dst, value, n, stream))                                                                                        \
    X(MemGetAllocationGranularity, "cuMemGetAllocationGranularity",                                                   \
      (size_t * bytes, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags flag), (bytes, prop, flag))  \
    X(MemCreate, "cuMemCreate",                                                                                       \
      (CUmemGenericAllocationHandle * handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags), \
      (handle, size, prop, flags))                                                                                    \
    X(MemRelease, "cuMemRelease", (CUmemGenericAllocationHandle handle), (handle))                                    \
    X(MemAddressReserve, "cuMemAddressReserve",                                                                       \
      (CUdeviceptr * ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags),                 \
      (ptr, size, alignment, addr, flags))                                                                            \
    X(MemAddressFree, "cuMemAddressFree", (CUdeviceptr ptr, size_t size), (ptr, size))                                \
    X(MemMap, "cuMemMap",                                                                                             \
      (CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),   \
      (ptr, size, offset, handle, flags))                                                                             \
    X(MemUnmap, "cuMemUnmap", (CUdeviceptr ptr, size_t size), (ptr, size))                                            \
    X(MemSetAccess, "cuMemSetAccess", (CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count),      \
      (ptr, size, desc, count))                                                                                       \
    X(MemExportToShareableHandle, "cuMemExportToShareableHandle",                                                     \
      (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,                          \
       unsigned long long flags),                                                                                     \
      (shareable, handle, type, flags))                                                                               \
    X(MemImportFromShareableHandle, "cuMemImportFromShareableHandle",                                                 \
      (CUmemGenericAllocationHandle * handle, void *shareable, CUmemAllocationHandleType type),                       \
      (handle, shareable, type))                                                                                      \
    X(MulticastBindMem, "cuMulticastBindMem",                                                                         \
      (CUmemGenericAllocationHandle multicast, size_t multicast_offset, CUmemGenericAllocationHandle handle,          \
       size_t offset, size_t size, unsigned long long flags),                                                         \
      (multicast, multicast_offset, handle, offset, size, flags))

struct amem_driver {
#define AMEM_FIELD(name, symbol, params, args) CUresult(*name) params;
    AMEM_DRIVER_FUNCTIONS(AMEM_FIELD)
#undef AMEM_FIELD
};

#endif
