/* Initialisation, fork, devices, and the names of results. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

#include "internal.h"

pthread_mutex_t sim_account_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t sim_tables_lock = PTHREAD_MUTEX_INITIALIZER;
pthread_mutex_t sim_work_lock = PTHREAD_MUTEX_INITIALIZER;

atomic_int sim_state = SIM_NEW;
atomic_bool sim_forked;
static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;

static void before_fork(void)
{
    pthread_mutex_lock(&sim_account_lock);
    pthread_mutex_lock(&sim_tables_lock);
    pthread_mutex_lock(&sim_work_lock);
}

static void after_fork_in_parent(void)
{
    pthread_mutex_unlock(&sim_work_lock);
    pthread_mutex_unlock(&sim_tables_lock);
    pthread_mutex_unlock(&sim_account_lock);
}

/* The child must hold no memory of its parent; the mappings were left behind by MADV_DONTFORK. */
static void after_fork_in_child(void)
{
    atomic_store(&sim_forked, true);
    sim_physical_close_all();
}

/* The workers and the fork handlers point into this library, so it must stay. */
static void stay_loaded(void)
{
    Dl_info info;
    if (dladdr((void *)stay_loaded, &info) && info.dli_fname)
        dlopen(info.dli_fname, RTLD_LAZY | RTLD_NODELETE | RTLD_NOLOAD);
}

static CUresult init(unsigned flags)
{
    if (atomic_load(&sim_forked))
        return CUDA_ERROR_NOT_INITIALIZED;
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&init_lock);
    if (atomic_load(&sim_state) == SIM_NEW) {
        bool ready = sim_config_read() && sim_areas_open();
        if (ready) {
            for (int i = 0; i < sim_config.visible; i++)
                sim_contexts[i].device = i;
            stay_loaded();
            pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
        }
        atomic_store(&sim_state, ready ? SIM_READY : SIM_FAILED);
    }
    CUresult result = CUDA_SUCCESS;
    if (atomic_load(&sim_state) == SIM_FAILED)
        result = CUDA_ERROR_UNKNOWN;
    else if (!sim_config.visible)
        result = CUDA_ERROR_NO_DEVICE;
    pthread_mutex_unlock(&init_lock);
    return result;
}

static bool is_device(CUdevice device)
{
    return device >= 0 && device < sim_config.visible;
}

static CUresult get_version(int *version)
{
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = DRIVER_VERSION;
    return CUDA_SUCCESS;
}

static CUresult get_count(int *count)
{
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = sim_config.visible;
    return CUDA_SUCCESS;
}

static CUresult get_device(CUdevice *device, int ordinal)
{
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(ordinal))
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

static CUresult get_name(char *name, int length, CUdevice device)
{
    if (!name || length < 1)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    snprintf(name, (size_t)length, "Simulated device");
    return CUDA_SUCCESS;
}

/* The same in every process that shares the folder, whatever its ordinals are. */
static CUresult get_uuid(CUuuid *uuid, CUdevice device)
{
    struct stat status;
    if (!uuid)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (stat(sim_config.dir, &status))
        return CUDA_ERROR_OPERATING_SYSTEM;
    uint64_t folder = (uint64_t)status.st_ino * 31 + (uint64_t)status.st_dev;
    memcpy(uuid->bytes, "amemsim", 7);
    uuid->bytes[7] = (char)sim_config.physical[device];
    memcpy(uuid->bytes + 8, &folder, sizeof folder);
    return CUDA_SUCCESS;
}

static CUresult get_attribute(int *value, int attribute, CUdevice device)
{
    if (!value)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT: *value = 132; break;
    case CU_DEVICE_ATTRIBUTE_PCI_BUS_ID: *value = sim_config.physical[device] + 1; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DEVICE_ID: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_PCI_DOMAIN_ID: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR: *value = 9; break;
    case CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR: *value = 0; break;
    case CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: *value = 1; break;
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: *value = sim_config.fabric_offered; break;
    case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED: *value = sim_config.multicast; break;
    case CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID: *value = 0; break;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
    return CUDA_SUCCESS;
}

static CUresult get_total(size_t *bytes, CUdevice device)
{
    if (!bytes)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device))
        return CUDA_ERROR_INVALID_DEVICE;
    *bytes = sim_config.memory;
    return CUDA_SUCCESS;
}

static CUresult can_access_peer(int *can, CUdevice device, CUdevice peer)
{
    if (!can)
        return CUDA_ERROR_INVALID_VALUE;
    if (!is_device(device) || !is_device(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    *can = device != peer && sim_config.p2p;
    return CUDA_SUCCESS;
}

static const struct {
    CUresult result;
    const char *name, *text;
} results[] = {
    {CUDA_SUCCESS, "CUDA_SUCCESS", "no error"},
    {CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {CUDA_ERROR_OUT_OF_MEMORY, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {CUDA_ERROR_NOT_INITIALIZED, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {CUDA_ERROR_DEINITIALIZED, "CUDA_ERROR_DEINITIALIZED", "driver shutting down"},
    {CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE", "no device"},
    {CUDA_ERROR_INVALID_DEVICE, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {CUDA_ERROR_INVALID_CONTEXT, "CUDA_ERROR_INVALID_CONTEXT", "invalid device context"},
    {CUDA_ERROR_OPERATING_SYSTEM, "CUDA_ERROR_OPERATING_SYSTEM", "the operating system refused a call"},
    {CUDA_ERROR_INVALID_HANDLE, "CUDA_ERROR_INVALID_HANDLE", "invalid handle"},
    {CUDA_ERROR_ALREADY_MAPPED, "CUDA_ERROR_ALREADY_MAPPED", "resource already mapped"},
    {CUDA_ERROR_ILLEGAL_STATE, "CUDA_ERROR_ILLEGAL_STATE", "not possible in this state"},
    {CUDA_ERROR_NOT_FOUND, "CUDA_ERROR_NOT_FOUND", "not found"},
    {CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY", "not ready"},
    {CUDA_ERROR_ILLEGAL_ADDRESS, "CUDA_ERROR_ILLEGAL_ADDRESS", "illegal address"},
    {CUDA_ERROR_PEER_ACCESS_UNSUPPORTED, "CUDA_ERROR_PEER_ACCESS_UNSUPPORTED", "no peer access between the two devices"},
    {CUDA_ERROR_PEER_ACCESS_NOT_ENABLED, "CUDA_ERROR_PEER_ACCESS_NOT_ENABLED", "peer access has not been enabled"},
    {CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED, "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED", "peer access is already enabled"},
    {CUDA_ERROR_CONTEXT_IS_DESTROYED, "CUDA_ERROR_CONTEXT_IS_DESTROYED", "context is destroyed"},
    {CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED", "host memory is already registered"},
    {CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED", "host memory is not registered"},
    {CUDA_ERROR_NOT_PERMITTED, "CUDA_ERROR_NOT_PERMITTED", "not permitted"},
    {CUDA_ERROR_NOT_SUPPORTED, "CUDA_ERROR_NOT_SUPPORTED", "not supported"},
    {CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED", "not permitted while a stream is capturing"},
    {CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED", "the capture failed earlier"},
    {CUDA_ERROR_STREAM_CAPTURE_UNMATCHED, "CUDA_ERROR_STREAM_CAPTURE_UNMATCHED", "the capture was not begun on this stream"},
    {CUDA_ERROR_STREAM_CAPTURE_ISOLATION, "CUDA_ERROR_STREAM_CAPTURE_ISOLATION", "a dependency on work outside of the capture"},
    {CUDA_ERROR_STREAM_CAPTURE_IMPLICIT, "CUDA_ERROR_STREAM_CAPTURE_IMPLICIT", "the legacy stream would depend on a capturing stream"},
    {CUDA_ERROR_CAPTURED_EVENT, "CUDA_ERROR_CAPTURED_EVENT", "not permitted on an event recorded in a capture"},
    {CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD, "CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD", "the capture was begun by another thread"},
    {CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN", "unknown error"},
};

static CUresult describe(CUresult result, const char **text, bool name)
{
    if (!text)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < sizeof results / sizeof *results; i++)
        if (results[i].result == result) {
            *text = name ? results[i].name : results[i].text;
            return CUDA_SUCCESS;
        }
    *text = NULL;
    return CUDA_ERROR_INVALID_VALUE;
}

SIM_FUNCTION(cuInit, cuInit, 2000, NEEDS_NOTHING, (unsigned flags), init(flags))
SIM_FUNCTION(cuDriverGetVersion, cuDriverGetVersion, 2020, NEEDS_NOTHING, (int *version), get_version(version))
SIM_FUNCTION(cuGetErrorName, cuGetErrorName, 6000, NEEDS_NOTHING, (CUresult result, const char **text), describe(result, text, true))
SIM_FUNCTION(cuGetErrorString, cuGetErrorString, 6000, NEEDS_NOTHING, (CUresult result, const char **text), describe(result, text, false))
SIM_FUNCTION(cuDeviceGetCount, cuDeviceGetCount, 2000, NEEDS_INIT, (int *count), get_count(count))
SIM_FUNCTION(cuDeviceGet, cuDeviceGet, 2000, NEEDS_INIT, (CUdevice *device, int ordinal), get_device(device, ordinal))
SIM_FUNCTION(cuDeviceGetName, cuDeviceGetName, 2000, NEEDS_INIT, (char *name, int length, CUdevice device), get_name(name, length, device))
SIM_FUNCTION(cuDeviceGetUuid, cuDeviceGetUuid, 9020, NEEDS_INIT, (CUuuid *uuid, CUdevice device), get_uuid(uuid, device))
SIM_FUNCTION(cuDeviceGetUuid, cuDeviceGetUuid_v2, 11040, NEEDS_INIT, (CUuuid *uuid, CUdevice device), get_uuid(uuid, device))
SIM_FUNCTION(cuDeviceGetAttribute, cuDeviceGetAttribute, 2000, NEEDS_INIT, (int *value, int attribute, CUdevice device),
             get_attribute(value, attribute, device))
SIM_FUNCTION(cuDeviceTotalMem, cuDeviceTotalMem_v2, 3020, NEEDS_INIT, (size_t *bytes, CUdevice device), get_total(bytes, device))
SIM_FUNCTION(cuDeviceCanAccessPeer, cuDeviceCanAccessPeer, 4000, NEEDS_INIT, (int *can, CUdevice device, CUdevice peer),
             can_access_peer(can, device, peer))
