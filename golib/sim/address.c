/*
 * Virtual addresses: reservations, mappings, and which device may use what.
 * A page's protection is the union of all devices' rights; sim_reach tells the
 * devices apart.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <search.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#include "internal.h"

void *sim_mappings;
static void *reservations;

int sim_range_compare(const void *a, const void *b)
{
    const struct sim_range *x = a, *y = b;
    return x->base >= y->base + y->size ? 1 : y->base >= x->base + x->size ? -1 : 0;
}

void *sim_range_find(void *const *root, uint64_t base, uint64_t size)
{
    struct sim_range key = {base, size};
    void **node = tfind(&key, root, sim_range_compare);
    return node ? *node : NULL;
}

static bool wraps(uint64_t base, uint64_t size)
{
    return base + size < base;
}

static bool is_granular(uint64_t value)
{
    return value % sim_config.granularity == 0;
}

bool sim_is_reserved(uint64_t address)
{
    return sim_range_find(&reservations, address, 1) != NULL;
}

static void *map_nothing(void *at, uint64_t size, int flags)
{
    return mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | flags, -1, 0);
}

/* Aligned by mapping too much and giving back the ends. */
static uint64_t map_aligned(uint64_t size, uint64_t alignment)
{
    void *start = map_nothing(NULL, size + alignment, 0);
    if (start == MAP_FAILED)
        return 0;
    uint64_t from = (uint64_t)start, base = (from + alignment - 1) & ~(alignment - 1);
    if (base > from)
        munmap(start, base - from);
    munmap((void *)(base + size), from + alignment - base);
    return base;
}

static CUresult reserve(CUdeviceptr *out, uint64_t size, uint64_t alignment, uint64_t hint, uint64_t flags)
{
    if (!out || !size || !is_granular(size) || flags || alignment & (alignment - 1) || size > UINT64_C(1) << 46
        || alignment > UINT64_C(1) << 40)
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment < sim_config.granularity)
        alignment = sim_config.granularity;
    struct sim_range *range = malloc(sizeof *range);
    if (!range)
        return CUDA_ERROR_OPERATING_SYSTEM;
    CUresult result = CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&sim_tables_lock);
    *range = (struct sim_range){0, size};
    if (hint && hint % alignment == 0) {
        void *at = map_nothing((void *)hint, size, MAP_FIXED_NOREPLACE);
        if (at == (void *)hint)
            range->base = hint;
        else if (at != MAP_FAILED)
            munmap(at, size);
    }
    if (!range->base)
        range->base = map_aligned(size, alignment);
    if (range->base && tsearch(range, &reservations, sim_range_compare)) {
        *out = range->base;
        result = CUDA_SUCCESS;
    } else if (range->base) {
        munmap((void *)range->base, size);
    }
    pthread_mutex_unlock(&sim_tables_lock);
    if (result)
        free(range);
    return result;
}

static CUresult free_reservation(uint64_t base, uint64_t size)
{
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    struct sim_range *range = sim_range_find(&reservations, base, 1);
    if (range && range->base == base && range->size == size && !sim_range_find(&sim_mappings, base, size)) {
        tdelete(range, &reservations, sim_range_compare);
        munmap((void *)base, size);
        free(range);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return result;
}

static int protection(const struct sim_mapping *mapping)
{
    return mapping->rights.write ? PROT_READ | PROT_WRITE : mapping->rights.read ? PROT_READ : PROT_NONE;
}

/* Maps the file at its address, or, unless fixed, anywhere. A child of fork gets no copy. */
bool sim_map_file(struct sim_mapping *mapping, bool fixed)
{
    void *at = mmap((void *)mapping->range.base, mapping->range.size, protection(mapping),
                    MAP_SHARED | MAP_NORESERVE | (fixed ? MAP_FIXED : 0), mapping->physical->fd, 0);
    if (at == MAP_FAILED)
        return false;
    madvise(at, mapping->range.size, MADV_DONTFORK);
    mapping->range.base = (uint64_t)at;
    return true;
}

/* Callers hold sim_tables_lock. */
static CUresult check_map(uint64_t base, uint64_t size, uint64_t offset, const struct sim_physical *physical, uint64_t flags)
{
    if (!physical || !physical->handles || flags || !base || !size || !is_granular(base) || wraps(base, size))
        return CUDA_ERROR_INVALID_VALUE;
    if (offset || size != physical->trailer.size)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (physical->trailer.area == AREA_MULTICAST && !sim_multicast_complete(physical))
        return CUDA_ERROR_ILLEGAL_STATE;
    const struct sim_range *reservation = sim_range_find(&reservations, base, 1);
    if (!reservation || base + size > reservation->base + reservation->size || sim_range_find(&sim_mappings, base, size))
        return CUDA_ERROR_INVALID_VALUE;
    return CUDA_SUCCESS;
}

static CUresult map(uint64_t base, uint64_t size, uint64_t offset, CUmemGenericAllocationHandle handle, uint64_t flags)
{
    struct sim_mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping)
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_mutex_lock(&sim_tables_lock);
    struct sim_physical *physical = sim_physical_find(handle);
    CUresult result = check_map(base, size, offset, physical, flags);
    if (!result) {
        mapping->range = (struct sim_range){base, size};
        mapping->physical = physical;
        if (!sim_map_file(mapping, true)) {
            result = CUDA_ERROR_OUT_OF_MEMORY;
        } else if (!tsearch(mapping, &sim_mappings, sim_range_compare)) {
            map_nothing((void *)base, size, MAP_FIXED);
            result = CUDA_ERROR_OPERATING_SYSTEM;
        } else {
            physical->uses++;
        }
    }
    pthread_mutex_unlock(&sim_tables_lock);
    if (result)
        free(mapping);
    return result;
}

/* True if [base, base+size) is whole mappings by cuMemMap without a gap. Callers hold sim_tables_lock. */
static bool is_whole(uint64_t base, uint64_t size)
{
    if (!base || !size || wraps(base, size))
        return false;
    uint64_t end = base + size;
    while (base < end) {
        const struct sim_mapping *mapping = sim_range_find(&sim_mappings, base, 1);
        if (!mapping || mapping->owner || mapping->range.base != base)
            return false;
        base += mapping->range.size;
    }
    return base == end;
}

static CUresult unmap(uint64_t base, uint64_t size)
{
    pthread_mutex_lock(&sim_tables_lock);
    bool whole = is_whole(base, size);
    for (uint64_t at = base; whole && at < base + size;) {
        struct sim_mapping *mapping = sim_range_find(&sim_mappings, at, 1);
        at += mapping->range.size;
        map_nothing((void *)mapping->range.base, mapping->range.size, MAP_FIXED);
        tdelete(mapping, &sim_mappings, sim_range_compare);
        mapping->physical->uses--;
        sim_physical_put(mapping->physical);
        free(mapping);
    }
    pthread_mutex_unlock(&sim_tables_lock);
    sim_physical_collect();
    return whole ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult location_bit(const CUmemLocation *location, uint64_t *bit)
{
    switch (location->type) {
    case CU_MEM_LOCATION_TYPE_DEVICE:
        if (location->id < 0 || location->id >= sim_config.visible)
            return CUDA_ERROR_INVALID_VALUE;
        *bit = UINT64_C(1) << location->id;
        return CUDA_SUCCESS;
    case CU_MEM_LOCATION_TYPE_HOST:
    case CU_MEM_LOCATION_TYPE_HOST_NUMA:
        *bit = HOST_BIT;
        return CUDA_SUCCESS;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static void grant(struct sim_rights *rights, uint64_t bit, CUmemAccess_flags flags)
{
    rights->read = flags & CU_MEM_ACCESS_FLAGS_PROT_READ ? rights->read | bit : rights->read & ~bit;
    rights->write = flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? rights->write | bit : rights->write & ~bit;
}

/* Callers hold sim_tables_lock. */
static CUresult check_access(uint64_t base, uint64_t size, const CUmemAccessDesc *access, size_t count)
{
    if (!access || !count || !is_whole(base, size))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        uint64_t bit = 0;
        CUresult result = location_bit(&access[i].location, &bit);
        int flags = (int)access[i].flags;
        if (result)
            return result;
        if (flags != CU_MEM_ACCESS_FLAGS_PROT_NONE && flags != CU_MEM_ACCESS_FLAGS_PROT_READ
            && flags != CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
            return CUDA_ERROR_INVALID_VALUE;
        for (uint64_t at = base; at < base + size;) {
            const struct sim_mapping *mapping = sim_range_find(&sim_mappings, at, 1);
            at += mapping->range.size;
            int area = mapping->physical->trailer.area;
            if (bit == HOST_BIT && area != AREA_HOST)
                return CUDA_ERROR_NOT_SUPPORTED; /* as the real driver, of memory on a device */
            if (bit != HOST_BIT && area < SIM_MAX_DEVICES && sim_config.physical[access[i].location.id] != area && !sim_config.p2p)
                return CUDA_ERROR_INVALID_DEVICE;
            if (area == AREA_MULTICAST && flags
                && !sim_multicast_bound(mapping->physical, 1u << sim_config.physical[access[i].location.id]))
                return CUDA_ERROR_ILLEGAL_STATE;
        }
    }
    return CUDA_SUCCESS;
}

/* Calls for each mapping of the range. Callers hold sim_tables_lock. */
static bool any_changing(uint64_t base, uint64_t size)
{
    for (uint64_t at = base; at < base + size;) {
        const struct sim_mapping *mapping = sim_range_find(&sim_mappings, at, 1);
        if (mapping->changing)
            return true;
        at += mapping->range.size;
    }
    return false;
}

static void mark_changing(uint64_t base, uint64_t size, bool changing)
{
    for (uint64_t at = base; at < base + size;) {
        struct sim_mapping *mapping = sim_range_find(&sim_mappings, at, 1);
        mapping->changing = changing;
        at += mapping->range.size;
    }
}

static CUresult set_access(uint64_t base, uint64_t size, const CUmemAccessDesc *access, size_t count)
{
    pthread_mutex_lock(&sim_tables_lock);
    CUresult result = check_access(base, size, access, count);
    /* Seen on H200: of two threads that give access to one mapping at once, one gets this. */
    if (!result && any_changing(base, size))
        result = CUDA_ERROR_ALREADY_MAPPED;
    if (!result) {
        mark_changing(base, size, true);
        pthread_mutex_unlock(&sim_tables_lock);
        nanosleep(&(struct timespec){.tv_nsec = 20000}, NULL);
        pthread_mutex_lock(&sim_tables_lock);
        if (is_whole(base, size)) /* else another thread has unmapped some of it meanwhile */
            mark_changing(base, size, false);
        else
            result = CUDA_ERROR_INVALID_VALUE;
    }
    for (uint64_t at = base; !result && at < base + size;) {
        struct sim_mapping *mapping = sim_range_find(&sim_mappings, at, 1);
        at += mapping->range.size;
        for (size_t i = 0; i < count; i++) {
            uint64_t bit = 0;
            location_bit(&access[i].location, &bit);
            grant(&mapping->rights, bit, access[i].flags);
        }
        if (mprotect((void *)mapping->range.base, mapping->range.size, protection(mapping)))
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return result;
}

static CUresult get_access(unsigned long long *flags, const CUmemLocation *location, uint64_t address)
{
    uint64_t bit;
    if (!flags || !location || location_bit(location, &bit))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    const struct sim_mapping *mapping = sim_range_find(&sim_mappings, address, 1);
    if (mapping && !mapping->owner) {
        *flags = mapping->rights.write & bit  ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE
                 : mapping->rights.read & bit ? CU_MEM_ACCESS_FLAGS_PROT_READ
                                              : CU_MEM_ACCESS_FLAGS_PROT_NONE;
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return result;
}

static CUresult retain_handle(CUmemGenericAllocationHandle *handle, void *address)
{
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    const struct sim_mapping *mapping = sim_range_find(&sim_mappings, (uint64_t)address, 1);
    bool found = mapping && !mapping->owner;
    if (found) {
        mapping->physical->handles++;
        *handle = mapping->physical->handle;
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult get_range(CUdeviceptr *base, size_t *size, uint64_t address)
{
    struct sim_range range = {0, 0};
    pthread_mutex_lock(&sim_tables_lock);
    const struct sim_mapping *mapping = sim_range_find(&sim_mappings, address, 1);
    const struct sim_pinned *pinned = sim_pinned_find(address, 1);
    if (mapping)
        range = (struct sim_range){mapping->range.base, mapping->owner ? mapping->requested : mapping->range.size};
    else if (pinned)
        range = pinned->range;
    pthread_mutex_unlock(&sim_tables_lock);
    if (!range.size)
        return CUDA_ERROR_NOT_FOUND;
    if (base)
        *base = range.base;
    if (size)
        *size = range.size;
    return CUDA_SUCCESS;
}

/* A dma-buf: an fd that keeps the memory, as a NIC's registration does. */
static CUresult get_range_handle(void *out, uint64_t base, uint64_t size, int type, uint64_t flags)
{
    if (!out || type != CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD || flags || !size || base % 4096 || size % 4096 || wraps(base, size))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    const struct sim_mapping *mapping = sim_range_find(&sim_mappings, base, 1);
    if (mapping && base + size <= mapping->range.base + mapping->range.size) {
        *(int *)out = fcntl(mapping->physical->fd, F_DUPFD_CLOEXEC, 0);
        result = *(int *)out < 0 ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return result;
}

static bool may(CUcontext context, const struct sim_mapping *mapping, bool write)
{
    if (mapping->owner)
        return mapping->owner == context || atomic_load(&context->peers) >> mapping->owner->device & 1;
    uint64_t bit = UINT64_C(1) << context->device;
    return (write ? mapping->rights.write : mapping->rights.read) & bit;
}

enum sim_reach sim_reach(CUcontext context, uint64_t address, uint64_t size, bool write)
{
    enum sim_reach reach = REACH_HOST;
    uint64_t end = wraps(address, size) ? UINT64_MAX : address + size;
    pthread_mutex_lock(&sim_tables_lock);
    if (sim_is_reserved(address) || sim_range_find(&sim_mappings, address, 1)) {
        reach = REACH_DEVICE;
        while (reach == REACH_DEVICE && address < end) {
            const struct sim_mapping *mapping = sim_range_find(&sim_mappings, address, 1);
            if (!mapping)
                reach = REACH_UNMAPPED;
            else if (!may(context, mapping, write))
                reach = REACH_NO_ACCESS;
            else
                address = mapping->range.base + mapping->range.size;
        }
    } else if (sim_range_find(&sim_mappings, address, size) || sim_range_find(&reservations, address, size)) {
        reach = REACH_UNMAPPED; /* starts outside and runs into device memory */
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return reach;
}

static CUresult get_pointer_attribute(void *data, int attribute, uint64_t address)
{
    if (!data)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_tables_lock);
    const struct sim_mapping *mapping = sim_range_find(&sim_mappings, address, 1);
    bool device = mapping && mapping->physical->trailer.area != AREA_HOST;
    if (mapping || sim_pinned_find(address, 1)) {
        result = CUDA_SUCCESS;
        if (attribute == CU_POINTER_ATTRIBUTE_CONTEXT)
            *(CUcontext *)data = mapping ? mapping->owner : NULL;
        else if (attribute == CU_POINTER_ATTRIBUTE_MEMORY_TYPE)
            *(unsigned *)data = device ? CU_MEMORYTYPE_DEVICE : CU_MEMORYTYPE_HOST;
        else if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
            *(int *)data = device && mapping->physical->trailer.area < SIM_MAX_DEVICES
                               ? sim_ordinal(mapping->physical->trailer.area)
                               : 0;
        else if (attribute == CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE)
            *(int *)data = mapping && mapping->owner;
        else
            result = CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return result;
}

/* Called by kernels, on a stream's thread. */
SIM_API void cuSimCheckAccess(CUdevice dev, CUdeviceptr ptr, size_t size, int write)
{
    enum sim_reach reach = REACH_UNMAPPED;
    if (!atomic_load(&sim_forked) && dev >= 0 && dev < sim_config.visible && size)
        reach = sim_reach(&sim_contexts[dev], ptr, size, write);
    if (reach == REACH_HOST) {
        pthread_mutex_lock(&sim_tables_lock);
        reach = sim_pinned_find(ptr, size) ? REACH_DEVICE : REACH_UNMAPPED;
        pthread_mutex_unlock(&sim_tables_lock);
    }
    if (reach == REACH_DEVICE)
        return;
    fprintf(stderr, "simulated driver: illegal address: device %d may not %s %zu bytes at %#llx: %s\n", dev,
            write ? "write" : "read", size, ptr, reach == REACH_NO_ACCESS ? "no access" : "not mapped");
    abort();
}

SIM_LIST(cuSimCheckAccess, cuSimCheckAccess, 0, NEEDS_NOTHING)
SIM_FUNCTION(cuMemAddressReserve, cuMemAddressReserve, 10020, NEEDS_INIT,
             (CUdeviceptr *base, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags),
             reserve(base, size, alignment, hint, flags))
SIM_FUNCTION(cuMemAddressFree, cuMemAddressFree, 10020, NEEDS_INIT, (CUdeviceptr base, size_t size), free_reservation(base, size))
SIM_FUNCTION(cuMemMap, cuMemMap, 10020, NEEDS_INIT,
             (CUdeviceptr base, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags),
             map(base, size, offset, handle, flags))
SIM_FUNCTION(cuMemUnmap, cuMemUnmap, 10020, NEEDS_INIT, (CUdeviceptr base, size_t size), unmap(base, size))
SIM_FUNCTION(cuMemSetAccess, cuMemSetAccess, 10020, NEEDS_INIT,
             (CUdeviceptr base, size_t size, const CUmemAccessDesc *access, size_t count),
             set_access(base, size, access, count))
SIM_FUNCTION(cuMemGetAccess, cuMemGetAccess, 10020, NEEDS_INIT,
             (unsigned long long *flags, const CUmemLocation *location, CUdeviceptr address),
             get_access(flags, location, address))
SIM_FUNCTION(cuMemRetainAllocationHandle, cuMemRetainAllocationHandle, 11000, NEEDS_INIT,
             (CUmemGenericAllocationHandle *handle, void *address), retain_handle(handle, address))
SIM_FUNCTION(cuMemGetAddressRange, cuMemGetAddressRange_v2, 3020, NEEDS_CONTEXT,
             (CUdeviceptr *base, size_t *size, CUdeviceptr address), get_range(base, size, address))
SIM_FUNCTION(cuMemGetHandleForAddressRange, cuMemGetHandleForAddressRange, 11070, NEEDS_INIT,
             (void *handle, CUdeviceptr base, size_t size, CUmemRangeHandleType type, unsigned long long flags),
             get_range_handle(handle, base, size, (int)type, flags))
SIM_FUNCTION(cuPointerGetAttribute, cuPointerGetAttribute, 4000, NEEDS_INIT,
             (void *data, CUpointer_attribute attribute, CUdeviceptr address),
             get_pointer_attribute(data, (int)attribute, address))
