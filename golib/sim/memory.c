/* cuMemAlloc, cuMemFree, cuMemGetInfo, and CUDA's IPC of such memory. */
#include <search.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "internal.h"

enum { PAGE = 4096 };

/* Maps memory that has one handle, which the mapping takes the place of. */
static CUresult map_block(CUcontext owner, struct sim_physical *physical, uint64_t requested, CUdeviceptr *out)
{
    CUresult result = CUDA_SUCCESS;
    struct sim_mapping *mapping = calloc(1, sizeof *mapping);
    uint64_t bit = UINT64_C(1) << owner->device;
    if (mapping)
        *mapping = (struct sim_mapping){{0, physical->trailer.size}, physical, {bit, bit}, owner, requested, false};
    pthread_mutex_lock(&sim_tables_lock);
    if (!mapping) {
        result = CUDA_ERROR_OPERATING_SYSTEM;
    } else if (!sim_map_file(mapping, false)) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else if (!tsearch(mapping, &sim_mappings, sim_range_compare)) {
        munmap((void *)mapping->range.base, mapping->range.size);
        result = CUDA_ERROR_OPERATING_SYSTEM;
    } else {
        physical->uses = 1;
        *out = mapping->range.base;
    }
    /* From here on the mapping alone keeps the memory. */
    physical->handles = 0;
    sim_physical_put(physical);
    pthread_mutex_unlock(&sim_tables_lock);
    if (result) {
        free(mapping);
        sim_physical_collect();
    }
    return result;
}

static CUresult allocate(CUcontext context, CUdeviceptr *out, uint64_t size)
{
    if (!out || !size || size > sim_config.memory)
        return out && size ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_capture_refusal();
    if (result)
        return result;
    struct sim_trailer trailer = {.size = (size + PAGE - 1) / PAGE * PAGE, .area = sim_config.physical[context->device]};
    struct sim_physical *physical;
    result = sim_physical_create(&trailer, &physical);
    return result ? result : map_block(context, physical, size, out);
}

/* Callers hold sim_tables_lock. */
static void free_mapping(struct sim_mapping *mapping)
{
    munmap((void *)mapping->range.base, mapping->range.size);
    tdelete(mapping, &sim_mappings, sim_range_compare);
    mapping->physical->uses--;
    sim_physical_put(mapping->physical);
    free(mapping);
}

/* Callers hold sim_tables_lock. */
static struct sim_mapping *find_block(uint64_t address)
{
    struct sim_mapping *mapping = sim_range_find(&sim_mappings, address, 1);
    return mapping && mapping->owner && mapping->range.base == address ? mapping : NULL;
}

/* Frees what cuMemAlloc gave or, with opened, cuIpcOpenMemHandle. */
static CUresult free_block(uint64_t address, bool opened)
{
    CUcontext context;
    if (!address)
        return CUDA_SUCCESS;
    CUresult result = sim_current_context(&context);
    if (!result)
        result = sim_capture_refusal();
    if (result)
        return result;
    pthread_mutex_lock(&sim_tables_lock);
    struct sim_mapping *mapping = find_block(address);
    context = mapping && !mapping->requested == opened ? mapping->owner : NULL;
    pthread_mutex_unlock(&sim_tables_lock);
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    sim_synchronize(context);
    pthread_mutex_lock(&sim_tables_lock);
    mapping = find_block(address);
    if (mapping)
        free_mapping(mapping);
    pthread_mutex_unlock(&sim_tables_lock);
    sim_physical_collect();
    return mapping ? atomic_load(&context->error) : CUDA_ERROR_INVALID_VALUE;
}

static _Thread_local struct {
    CUcontext context;
    struct sim_mapping *found;
} search;

static void match_owner(const void *node, VISIT visit, int depth)
{
    (void)depth;
    struct sim_mapping *mapping = *(struct sim_mapping *const *)node;
    if ((visit == postorder || visit == leaf) && mapping->owner == search.context)
        search.found = mapping;
}

/* Called when the context's last reference is gone. */
void sim_memory_free_all(CUcontext context)
{
    pthread_mutex_lock(&sim_tables_lock);
    for (;;) {
        search.context = context;
        search.found = NULL;
        twalk(sim_mappings, match_owner);
        if (!search.found)
            break;
        free_mapping(search.found);
    }
    pthread_mutex_unlock(&sim_tables_lock);
    sim_physical_collect();
}

static CUresult get_info(CUcontext context, size_t *available, size_t *total)
{
    if (!available || !total)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t used;
    CUresult result = sim_physical_usage(sim_config.physical[context->device], &used);
    if (result)
        return result;
    *available = used < sim_config.memory ? sim_config.memory - used : 0;
    *total = sim_config.memory;
    return CUDA_SUCCESS;
}

/* What a handle of CUDA's IPC says; the rest of its 64 bytes is 0. */
struct ipc_handle {
    char magic[8];
    int32_t area, pid;
    char name[SIM_NAME_SIZE];
    char rest[8];
};
_Static_assert(sizeof(struct ipc_handle) == 64, "as CUipcMemHandle");
static const char ipc_magic[8] = "amemipc";

/* As in the real driver, of memory by cuMemAlloc only. */
static CUresult get_ipc_handle(struct ipc_handle *handle, uint64_t address)
{
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    memset(handle, 0, sizeof *handle);
    pthread_mutex_lock(&sim_tables_lock);
    const struct sim_mapping *mapping = sim_range_find(&sim_mappings, address, 1);
    bool found = mapping && mapping->owner && mapping->requested;
    if (found) {
        memcpy(handle->magic, ipc_magic, sizeof ipc_magic);
        handle->area = mapping->physical->trailer.area;
        handle->pid = (int32_t)getpid();
        memcpy(handle->name, mapping->physical->trailer.name, sizeof handle->name);
    }
    pthread_mutex_unlock(&sim_tables_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult open_ipc_handle(CUdeviceptr *out, const struct ipc_handle *handle, unsigned flags)
{
    enum { LAZY_ENABLE_PEER_ACCESS = 1 };
    if (!out || flags != LAZY_ENABLE_PEER_ACCESS || memcmp(handle->magic, ipc_magic, sizeof ipc_magic)
        || !memchr(handle->name, 0, sizeof handle->name))
        return CUDA_ERROR_INVALID_VALUE;
    int ordinal = sim_ordinal(handle->area);
    if (ordinal < 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (handle->pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    struct sim_physical *physical;
    CUresult result = sim_physical_open(handle->area, handle->name, &physical);
    return result ? result : map_block(&sim_contexts[ordinal], physical, 0, out);
}

SIM_FUNCTION(cuIpcGetMemHandle, cuIpcGetMemHandle, 4010, NEEDS_INIT, (struct ipc_handle *handle, CUdeviceptr address),
             get_ipc_handle(handle, address))
SIM_FUNCTION(cuIpcOpenMemHandle, cuIpcOpenMemHandle_v2, 11000, NEEDS_CONTEXT,
             (CUdeviceptr *address, struct ipc_handle handle, unsigned flags), open_ipc_handle(address, &handle, flags))
SIM_FUNCTION(cuIpcCloseMemHandle, cuIpcCloseMemHandle, 4010, NEEDS_CONTEXT, (CUdeviceptr address), free_block(address, true))
SIM_FUNCTION(cuMemAlloc, cuMemAlloc_v2, 3020, NEEDS_CONTEXT, (CUdeviceptr *address, size_t size),
             allocate(call.context, address, size))
SIM_FUNCTION(cuMemFree, cuMemFree_v2, 3020, NEEDS_INIT, (CUdeviceptr address), free_block(address, false))
SIM_FUNCTION(cuMemGetInfo, cuMemGetInfo_v2, 3020, NEEDS_CONTEXT, (size_t *available, size_t *total),
             get_info(call.context, available, total))
