/* cuMemAlloc, cuMemFree, cuMemGetInfo. */
#include <search.h>
#include <stdlib.h>
#include <sys/mman.h>

#include "internal.h"

enum { PAGE = 4096 };

static CUresult allocate(CUcontext context, CUdeviceptr *out, uint64_t size)
{
    if (!out || !size || size > sim_config.memory)
        return out && size ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    CUresult result = sim_capture_refusal();
    if (result)
        return result;
    struct sim_mapping *mapping = calloc(1, sizeof *mapping);
    if (!mapping)
        return CUDA_ERROR_OPERATING_SYSTEM;
    struct sim_trailer trailer = {.size = (size + PAGE - 1) / PAGE * PAGE, .area = sim_config.physical[context->device]};
    struct sim_physical *physical;
    result = sim_physical_create(&trailer, &physical);
    if (result) {
        free(mapping);
        return result;
    }
    uint64_t bit = UINT64_C(1) << context->device;
    *mapping = (struct sim_mapping){{0, trailer.size}, physical, {bit, bit}, context, size, false};
    pthread_mutex_lock(&sim_tables_lock);
    if (!sim_map_file(mapping, false)) {
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

static CUresult free_block(uint64_t address)
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
    context = mapping ? mapping->owner : NULL;
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

SIM_FUNCTION(cuMemAlloc, cuMemAlloc_v2, 3020, NEEDS_CONTEXT, (CUdeviceptr *address, size_t size),
             allocate(call.context, address, size))
SIM_FUNCTION(cuMemFree, cuMemFree_v2, 3020, NEEDS_INIT, (CUdeviceptr address), free_block(address))
SIM_FUNCTION(cuMemGetInfo, cuMemGetInfo_v2, 3020, NEEDS_CONTEXT, (size_t *available, size_t *total),
             get_info(call.context, available, total))
