/*
 * Copies and fills. As in the real driver, an address that is no device's or
 * that the device may not use is refused by the call (invalid value); one that
 * became so before the stream got there is a fault of the context.
 */
#include "internal.h"

enum side { SIDE_DEVICE, SIDE_HOST, SIDE_ANY };

enum pinning { NOT_PINNED, PINNED, BEYOND };

/* BEYOND: the range begins in pinned memory and goes on after it, though it may be into other pinned memory. */
static enum pinning pinning(uint64_t address, uint64_t size)
{
    pthread_mutex_lock(&sim_tables_lock);
    enum pinning is = sim_pinned_find(address, size) ? PINNED : sim_pinned_find(address, 1) ? BEYOND : NOT_PINNED;
    pthread_mutex_unlock(&sim_tables_lock);
    return is;
}

/* Clears *pinned for host memory that is not. The real driver (H200, CUDA 13.0) refuses what goes beyond, too. */
static bool is_usable(CUcontext context, uint64_t address, uint64_t size, bool write, enum side side, bool *pinned)
{
    switch (sim_reach(context, address, size, write)) {
    case REACH_DEVICE:
        return true;
    case REACH_HOST:
        switch (pinning(address, size)) {
        case PINNED:
            return true;
        case BEYOND:
            return false;
        case NOT_PINNED:
            *pinned = false;
            return side != SIDE_DEVICE && address;
        }
        return false;
    default:
        return false;
    }
}

/* A copy with pageable memory returns when it is done; the real driver stages it. */
static CUresult copy(CUcontext current, CUstream handle, uint64_t to, enum side to_side, uint64_t from, enum side from_side,
                     uint64_t size, bool wait)
{
    CUcontext context = sim_stream_context(current, handle);
    bool pinned = true;
    if (!context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!size)
        return CUDA_SUCCESS;
    if (!is_usable(context, from, size, false, from_side, &pinned) || !is_usable(context, to, size, true, to_side, &pinned))
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_operation *operation = sim_operation_new(OP_COPY);
    if (operation) {
        operation->copy.to = to;
        operation->copy.from = from;
        operation->copy.size = size;
    }
    return sim_submit(current, handle, operation, wait || !pinned);
}

/* Row by row. Arrays, and offsets into either side, are not modelled. */
static CUresult copy_rows(CUcontext current, CUstream handle, const CUDA_MEMCPY2D *c)
{
    bool out = c && c->srcMemoryType == CU_MEMORYTYPE_DEVICE && c->dstMemoryType == CU_MEMORYTYPE_HOST;
    bool in = c && c->srcMemoryType == CU_MEMORYTYPE_HOST && c->dstMemoryType == CU_MEMORYTYPE_DEVICE;
    if (!out && !in)
        return c ? CUDA_ERROR_NOT_SUPPORTED : CUDA_ERROR_INVALID_VALUE;
    if (c->srcXInBytes || c->srcY || c->dstXInBytes || c->dstY)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (c->srcPitch < c->WidthInBytes || c->dstPitch < c->WidthInBytes || c->srcPitch > INT32_MAX || c->dstPitch > INT32_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t from = out ? c->srcDevice : (uint64_t)c->srcHost, to = out ? (uint64_t)c->dstHost : c->dstDevice;
    CUresult result = CUDA_SUCCESS;
    for (size_t row = 0; row < c->Height && !result; row++)
        result = copy(current, handle, to + row * c->dstPitch, out ? SIDE_HOST : SIDE_DEVICE, from + row * c->srcPitch,
                      out ? SIDE_DEVICE : SIDE_HOST, c->WidthInBytes, false);
    return result;
}

static CUresult set(CUcontext current, CUstream handle, uint64_t to, uint8_t value, uint64_t size, bool wait)
{
    CUcontext context = sim_stream_context(current, handle);
    bool pinned = true;
    if (!context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!size)
        return CUDA_SUCCESS;
    if (!is_usable(context, to, size, true, SIDE_DEVICE, &pinned))
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_operation *operation = sim_operation_new(OP_SET);
    if (operation) {
        operation->set.to = to;
        operation->set.value = value;
        operation->set.size = size;
    }
    return sim_submit(current, handle, operation, wait);
}

SIM_FUNCTION(cuMemcpyDtoH, cuMemcpyDtoH_v2, 3020, NEEDS_CONTEXT, (void *to, CUdeviceptr from, size_t size),
             copy(call.context, NULL, (uint64_t)to, SIDE_HOST, from, SIDE_DEVICE, size, true))
SIM_FUNCTION(cuMemcpyHtoD, cuMemcpyHtoD_v2, 3020, NEEDS_CONTEXT, (CUdeviceptr to, const void *from, size_t size),
             copy(call.context, NULL, to, SIDE_DEVICE, (uint64_t)from, SIDE_HOST, size, true))
SIM_FUNCTION(cuMemcpyDtoHAsync, cuMemcpyDtoHAsync_v2, 3020, NEEDS_CONTEXT,
             (void *to, CUdeviceptr from, size_t size, CUstream stream),
             copy(call.context, stream, (uint64_t)to, SIDE_HOST, from, SIDE_DEVICE, size, false))
SIM_FUNCTION(cuMemcpyHtoDAsync, cuMemcpyHtoDAsync_v2, 3020, NEEDS_CONTEXT,
             (CUdeviceptr to, const void *from, size_t size, CUstream stream),
             copy(call.context, stream, to, SIDE_DEVICE, (uint64_t)from, SIDE_HOST, size, false))
SIM_FUNCTION(cuMemcpyDtoDAsync, cuMemcpyDtoDAsync_v2, 3020, NEEDS_CONTEXT,
             (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),
             copy(call.context, stream, to, SIDE_DEVICE, from, SIDE_DEVICE, size, false))
SIM_FUNCTION(cuMemcpy2DAsync, cuMemcpy2DAsync_v2, 3020, NEEDS_CONTEXT, (const CUDA_MEMCPY2D *rows, CUstream stream),
             copy_rows(call.context, stream, rows))
SIM_FUNCTION(cuMemcpyAsync, cuMemcpyAsync, 4000, NEEDS_CONTEXT,
             (CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream),
             copy(call.context, stream, to, SIDE_ANY, from, SIDE_ANY, size, false))
SIM_FUNCTION(cuMemsetD8, cuMemsetD8_v2, 3020, NEEDS_CONTEXT, (CUdeviceptr to, unsigned char value, size_t size),
             set(call.context, NULL, to, value, size, true))
SIM_FUNCTION(cuMemsetD8Async, cuMemsetD8Async, 3020, NEEDS_CONTEXT,
             (CUdeviceptr to, unsigned char value, size_t size, CUstream stream),
             set(call.context, stream, to, value, size, false))
