/* Fills the hook's table with the core's functions. */
#include "../../hook/amem.h"
#include "_cgo_export.h"

/* The driver takes a descriptor's number itself as the pointer, which Go must never hold as one. */
static CUresult import_handle(CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType type) {
    if (type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR) return AMEM_PASS;
    return amemImport(handle, (int)(uintptr_t)shareable);
}

__attribute__((visibility("default"))) int amem_core_init(const struct amem_host *host, struct amem_core *core,
                                                          char *text) {
    /* Told before anything else is done: the hook compares them. */
    core->abi = AMEM_CORE_ABI;
    core->version = AMEM_VERSION;
    if (host->abi != AMEM_CORE_ABI) return AMEM_OK; /* the hook refuses us */

    int status = amemStart((struct amem_host *)host, text);
    if (status != AMEM_OK) return status;

    core->granularity = amemGranularity();
    core->create = (void *)amemCreate;
    core->release = amemRelease;
    core->retain = amemRetain;
    core->reserve = amemReserve;
    core->address_free = amemAddressFree;
    core->map = amemMap;
    core->unmap = amemUnmap;
    core->set_access = (void *)amemSetAccess;
    core->address_range = amemAddressRange;
    core->properties = amemProperties;
    core->export_handle = amemExport;
    core->import_handle = import_handle;
    core->bind_multicast = amemBindMulticast;
    core->arrived = amemArrived;
    core->keep = (void *)amemKeep;
    core->registered = (void *)amemRegistered;
    core->deregister = (void *)amemDeregister;
    core->pause = (void *)amemPause;
    core->resume = (void *)amemResume;
    core->state = (void *)amemState;
    core->stats = amemStats;
    core->free_host = (void *)amemFreeHost;
    core->set_group = amemSetGroup;
    core->get_group = amemGetGroup;
    core->region = (void *)amemRegion;
    core->allocate = amemAllocate;
    core->deallocate = amemDeallocate;
    core->free_memory = amemFreeMemory;
    core->memory_state = amemMemoryState;
    core->reach = amemReach;
    core->device_of = amemDeviceOf;
    core->read_backup = amemReadBackup;
    core->find_backup = (void *)amemFindBackup;
    core->pinned = (void *)amemPinned;
    core->set_disk_directory = (void *)amemSetDiskFolder;
    core->retain_backups = amemRetainBackups;
    core->ipc_get = amemIPCGet;
    core->ipc_open = (void *)amemIPCOpen;
    core->ipc_close = amemIPCClose;
    return AMEM_OK;
}
