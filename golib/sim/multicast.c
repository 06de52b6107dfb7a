/*
 * Multicast objects: their membership and what they hold, not their writes.
 * Which devices are members and which have memory bound is in the object's
 * file, for all processes. Bound memory is held by the process that bound it,
 * until it unbinds it or drops the object.
 */
#include <stddef.h>
#include <stdlib.h>
#include <unistd.h>

#include "internal.h"

static bool read_state(const struct sim_physical *object, struct sim_trailer *state)
{
    return pread(object->fd, state, sizeof *state, (off_t)object->trailer.size) == sizeof *state;
}

static bool write_state(const struct sim_physical *object, const struct sim_trailer *state)
{
    return pwrite(object->fd, state, sizeof *state, (off_t)object->trailer.size) == sizeof *state;
}

static struct sim_physical *find_object(uint64_t handle)
{
    struct sim_physical *object = sim_physical_find(handle);
    return object && object->handles && object->trailer.area == AREA_MULTICAST ? object : NULL;
}

static bool is_complete(const struct sim_trailer *state)
{
    return (unsigned)__builtin_popcount(state->devices_added) == state->num_devices;
}

bool sim_multicast_complete(const struct sim_physical *object)
{
    struct sim_trailer state;
    return read_state(object, &state) && is_complete(&state);
}

bool sim_multicast_bound(const struct sim_physical *object, uint32_t devices)
{
    struct sim_trailer state;
    if (!read_state(object, &state))
        return false;
    for (int i = 0; i < SIM_MAX_DEVICES; i++)
        if (devices >> i & 1 && !state.bindings[i])
            return false;
    return true;
}

static bool is_valid(const CUmulticastObjectProp *prop)
{
    unsigned long long types = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR | CU_MEM_HANDLE_TYPE_FABRIC;
    return prop->numDevices && prop->numDevices <= (unsigned)sim_config.devices && !prop->flags
        && !(prop->handleTypes & ~types);
}

static CUresult create(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop)
{
    if (!sim_config.multicast)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!handle || !prop || !is_valid(prop) || !prop->size || prop->size % sim_config.granularity)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->handleTypes & CU_MEM_HANDLE_TYPE_FABRIC && !sim_config.fabric)
        return CUDA_ERROR_NOT_PERMITTED;
    struct sim_trailer trailer = {.size = prop->size,
                                  .area = AREA_MULTICAST,
                                  .handle_types = (uint32_t)prop->handleTypes,
                                  .num_devices = prop->numDevices};
    struct sim_physical *object;
    CUresult result = sim_physical_create(&trailer, &object);
    if (object)
        *handle = object->handle;
    return result;
}

/* Callers of the functions named "locked" hold the area's lock and sim_tables_lock. */
static CUresult add_device_locked(uint64_t handle, CUdevice device)
{
    struct sim_trailer state;
    struct sim_physical *object = find_object(handle);
    if (!object)
        return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= sim_config.visible)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!read_state(object, &state))
        return CUDA_ERROR_OPERATING_SYSTEM;
    uint32_t bit = 1u << sim_config.physical[device];
    if (state.devices_added & bit || is_complete(&state))
        return CUDA_ERROR_INVALID_VALUE;
    state.devices_added |= bit;
    return write_state(object, &state) ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static bool overlaps(const struct sim_physical *object, int device, uint64_t offset, uint64_t size)
{
    for (const struct sim_binding *b = object->bindings; b; b = b->next)
        if (b->device == device && offset < b->offset + b->size && b->offset < offset + size)
            return true;
    return false;
}

static bool fits(uint64_t offset, uint64_t size, uint64_t whole)
{
    return size && offset % sim_config.granularity == 0 && size % sim_config.granularity == 0 && size <= whole
        && offset <= whole - size;
}

static CUresult bind_locked(uint64_t handle, uint64_t offset, struct sim_physical *memory, uint64_t memory_offset, uint64_t size)
{
    struct sim_trailer state;
    struct sim_physical *object = find_object(handle);
    if (!object || !memory || memory->trailer.area >= SIM_MAX_DEVICES || !fits(offset, size, object->trailer.size)
        || !fits(memory_offset, size, memory->trailer.size))
        return CUDA_ERROR_INVALID_VALUE;
    if (!read_state(object, &state))
        return CUDA_ERROR_OPERATING_SYSTEM;
    int device = memory->trailer.area;
    if (!is_complete(&state))
        return CUDA_ERROR_ILLEGAL_STATE;
    if (!(state.devices_added >> device & 1) || overlaps(object, device, offset, size))
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_binding *binding = malloc(sizeof *binding);
    state.bindings[device]++;
    if (!binding || !write_state(object, &state)) {
        free(binding);
        return CUDA_ERROR_OPERATING_SYSTEM;
    }
    *binding = (struct sim_binding){object->bindings, memory, device, offset, size};
    object->bindings = binding;
    memory->uses++;
    return CUDA_SUCCESS;
}

/* Takes the binding out of the list. */
static void drop(struct sim_binding **link)
{
    struct sim_binding *binding = *link;
    *link = binding->next;
    binding->memory->uses--;
    sim_physical_put(binding->memory);
    free(binding);
}

void sim_multicast_unbind_all(struct sim_physical *object)
{
    while (object->bindings)
        drop(&object->bindings);
}

static CUresult unbind_locked(uint64_t handle, CUdevice device, uint64_t offset, uint64_t size)
{
    struct sim_trailer state;
    struct sim_physical *object = find_object(handle);
    if (!object || device < 0 || device >= sim_config.visible || !fits(offset, size, object->trailer.size))
        return CUDA_ERROR_INVALID_VALUE;
    if (!read_state(object, &state))
        return CUDA_ERROR_OPERATING_SYSTEM;
    int physical = sim_config.physical[device];
    bool found = false;
    for (struct sim_binding **link = &object->bindings; *link;) {
        struct sim_binding *b = *link;
        if (b->device == physical && b->offset >= offset && b->offset + b->size <= offset + size) {
            drop(link);
            state.bindings[physical]--;
            found = true;
        } else {
            link = &b->next;
        }
    }
    if (!found)
        return CUDA_ERROR_INVALID_VALUE;
    return write_state(object, &state) ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

static void lock(void)
{
    sim_area_lock(AREA_MULTICAST);
    pthread_mutex_lock(&sim_tables_lock);
}

static CUresult unlock(CUresult result)
{
    pthread_mutex_unlock(&sim_tables_lock);
    sim_area_unlock(AREA_MULTICAST);
    return result;
}

static CUresult add_device(uint64_t handle, CUdevice device)
{
    lock();
    return unlock(add_device_locked(handle, device));
}

static CUresult bind_memory(uint64_t handle, uint64_t offset, uint64_t memory, uint64_t memory_offset, uint64_t size, uint64_t flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    struct sim_physical *physical = sim_physical_find(memory);
    if (physical && !physical->handles)
        physical = NULL;
    return unlock(bind_locked(handle, offset, physical, memory_offset, size));
}

static CUresult bind_address(uint64_t handle, uint64_t offset, uint64_t address, uint64_t size, uint64_t flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    lock();
    const struct sim_mapping *mapping = sim_range_find(&sim_mappings, address, 1);
    if (!mapping || mapping->owner)
        return unlock(CUDA_ERROR_INVALID_VALUE);
    return unlock(bind_locked(handle, offset, mapping->physical, address - mapping->range.base, size));
}

static CUresult unbind(uint64_t handle, CUdevice device, uint64_t offset, uint64_t size)
{
    lock();
    CUresult result = unlock(unbind_locked(handle, device, offset, size));
    sim_physical_collect();
    return result;
}

static CUresult get_granularity(size_t *granularity, const CUmulticastObjectProp *prop, int option)
{
    if (!sim_config.multicast)
        return CUDA_ERROR_NOT_SUPPORTED;
    if (!granularity || !prop || !is_valid(prop) || option < CU_MULTICAST_GRANULARITY_MINIMUM
        || option > CU_MULTICAST_GRANULARITY_RECOMMENDED)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = sim_config.granularity;
    return CUDA_SUCCESS;
}

SIM_FUNCTION(cuMulticastCreate, cuMulticastCreate, 12010, NEEDS_INIT,
             (CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop), create(handle, prop))
SIM_FUNCTION(cuMulticastAddDevice, cuMulticastAddDevice, 12010, NEEDS_INIT,
             (CUmemGenericAllocationHandle handle, CUdevice device), add_device(handle, device))
SIM_FUNCTION(cuMulticastBindMem, cuMulticastBindMem, 12010, NEEDS_INIT,
             (CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory, size_t memory_offset,
              size_t size, unsigned long long flags),
             bind_memory(handle, offset, memory, memory_offset, size, flags))
SIM_FUNCTION(cuMulticastBindAddr, cuMulticastBindAddr, 12010, NEEDS_INIT,
             (CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr address, size_t size, unsigned long long flags),
             bind_address(handle, offset, address, size, flags))
SIM_FUNCTION(cuMulticastUnbind, cuMulticastUnbind, 12010, NEEDS_INIT,
             (CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t size),
             unbind(handle, device, offset, size))
SIM_FUNCTION(cuMulticastGetGranularity, cuMulticastGetGranularity, 12010, NEEDS_INIT,
             (size_t *granularity, const CUmulticastObjectProp *prop, CUmulticastGranularity_flags option),
             get_granularity(granularity, prop, (int)option))
