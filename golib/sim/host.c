/* Pinned host memory. */
#define _GNU_SOURCE
#include <errno.h>
#include <search.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

static void *pinned_ranges;
static atomic_uint pin_us_per_mb;

/* The pinned memory that holds all of the range. */
struct sim_pinned *sim_pinned_find(uint64_t address, uint64_t size)
{
    struct sim_pinned *pinned = sim_range_find(&pinned_ranges, address, 1);
    return pinned && address + size <= pinned->range.base + pinned->range.size ? pinned : NULL;
}

/* Callers hold sim_tables_lock. */
static bool add(uint64_t base, uint64_t size, bool registered)
{
    struct sim_pinned *pinned = malloc(sizeof *pinned);
    if (!pinned)
        return false;
    *pinned = (struct sim_pinned){{base, size}, registered};
    if (tsearch(pinned, &pinned_ranges, sim_range_compare))
        return true;
    free(pinned);
    return false;
}

static CUresult allocate(void **out, size_t size)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult refusal = sim_capture_refusal();
    if (refusal)
        return refusal;
    *out = NULL;
    if (!size)
        return CUDA_SUCCESS;
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (memory == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&sim_tables_lock);
    bool added = add((uint64_t)memory, size, false);
    pthread_mutex_unlock(&sim_tables_lock);
    if (!added) {
        munmap(memory, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = memory;
    return CUDA_SUCCESS;
}

/* Waits for the device first, as the real one does: copies may still use the memory. */
static CUresult free_memory(CUcontext context, void *memory)
{
    CUresult refusal = sim_capture_refusal();
    if (refusal)
        return refusal;
    sim_synchronize(context);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    struct sim_pinned *pinned = sim_range_find(&pinned_ranges, (uint64_t)memory, 1);
    if (pinned && !pinned->registered && pinned->range.base == (uint64_t)memory) {
        munmap(memory, pinned->range.size);
        tdelete(pinned, &pinned_ranges, sim_range_compare);
        free(pinned);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return result;
}

static bool is_mapped(uint64_t base, uint64_t size)
{
    uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE), from = base & ~(page - 1), to = (base + size + page - 1) & ~(page - 1);
    unsigned char resident[1024];
    for (uint64_t step; from < to; from += step) {
        step = to - from < page * sizeof resident ? to - from : page * sizeof resident;
        if (mincore((void *)from, step, resident))
            return false;
    }
    return true;
}

/* As the real driver (H200, CUDA 13.0), which launches nothing for some 30 us a MB meanwhile: cuSimSetPinning. */
static void stop_for(size_t size)
{
    uint64_t us = atomic_load(&pin_us_per_mb) * (uint64_t)size >> 20;
    if (!us)
        return;
    struct timespec rest = {(time_t)(us / 1000000), (long)(us % 1000000) * 1000};
    sim_stop_launches(false);
    while (nanosleep(&rest, &rest) && errno == EINTR)
        ;
    sim_resume_launches();
}

static CUresult register_memory(void *memory, size_t size, unsigned flags)
{
    uint64_t base = (uint64_t)memory;
    if (!memory || !size || base + size < base || flags & ~15u || !is_mapped(base, size))
        return CUDA_ERROR_INVALID_VALUE;
    stop_for(size);
    pthread_mutex_lock(&sim_tables_lock);
    const struct sim_pinned *other = sim_range_find(&pinned_ranges, base, size);
    CUresult result = CUDA_SUCCESS;
    if (other)
        result = other->registered ? CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED : CUDA_ERROR_INVALID_VALUE;
    else if (sim_is_reserved(base) || sim_range_find(&sim_mappings, base, size))
        result = CUDA_ERROR_INVALID_VALUE;
    else if (!add(base, size, true))
        result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_unlock(&sim_tables_lock);
    return result;
}

/* Callers hold sim_tables_lock. */
static CUresult find_registered(const void *memory, struct sim_pinned **pinned)
{
    *pinned = sim_range_find(&pinned_ranges, (uint64_t)memory, 1);
    if (!*pinned)
        return CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    return (*pinned)->registered && (*pinned)->range.base == (uint64_t)memory ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* Waits for all kernels, and keeps all launches waiting meanwhile, as the real driver does (H200, CUDA 13.0). */
static CUresult unregister_memory(const void *memory)
{
    struct sim_pinned *pinned;
    pthread_mutex_lock(&sim_tables_lock);
    CUresult result = find_registered(memory, &pinned);
    pthread_mutex_unlock(&sim_tables_lock);
    if (result)
        return result;
    sim_stop_launches(true);
    pthread_mutex_lock(&sim_tables_lock);
    result = find_registered(memory, &pinned);
    if (!result) {
        tdelete(pinned, &pinned_ranges, sim_range_compare);
        free(pinned);
    }
    pthread_mutex_unlock(&sim_tables_lock);
    sim_resume_launches();
    return result;
}

static CUresult set_pinning(unsigned us)
{
    atomic_store(&pin_us_per_mb, us);
    return CUDA_SUCCESS;
}

static CUresult get_device_pointer(CUdeviceptr *out, void *memory, unsigned flags)
{
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    bool pinned = sim_pinned_find((uint64_t)memory, 1);
    pthread_mutex_unlock(&sim_tables_lock);
    if (!pinned)
        return CUDA_ERROR_INVALID_VALUE;
    *out = (uint64_t)memory;
    return CUDA_SUCCESS;
}

SIM_FUNCTION(cuMemHostAlloc, cuMemHostAlloc, 2020, NEEDS_CONTEXT, (void **memory, size_t size, unsigned flags),
             flags & ~7u ? CUDA_ERROR_INVALID_VALUE : allocate(memory, size))
SIM_FUNCTION(cuMemFreeHost, cuMemFreeHost, 2000, NEEDS_CONTEXT, (void *memory), free_memory(call.context, memory))
SIM_FUNCTION(cuMemHostRegister, cuMemHostRegister_v2, 6050, NEEDS_CONTEXT, (void *memory, size_t size, unsigned flags),
             register_memory(memory, size, flags))
SIM_FUNCTION(cuMemHostUnregister, cuMemHostUnregister, 4000, NEEDS_CONTEXT, (void *memory),
             unregister_memory(memory))
SIM_FUNCTION(cuMemHostGetDevicePointer, cuMemHostGetDevicePointer_v2, 3020, NEEDS_CONTEXT,
             (CUdeviceptr *address, void *memory, unsigned flags), get_device_pointer(address, memory, flags))
SIM_FUNCTION(cuSimSetPinning, cuSimSetPinning, 0, NEEDS_NOTHING, (unsigned us), set_pinning(us))
