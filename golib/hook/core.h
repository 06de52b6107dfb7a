/*
 * What the hook (libamem_hook.so, C) and the core (libamem_nccl.so, Go) offer
 * each other. Both are of one release: AMEM_CORE_ABI and the version text must
 * be the same, or the hook refuses the core.
 */
#ifndef AMEM_CORE_H
#define AMEM_CORE_H

#include <stdint.h>

#include "../cuda/driver.h"

#define AMEM_CORE_ABI 9

/*
 * A core function's answer for memory that is not amem's: the hook then makes
 * the driver's call. No CUresult is negative.
 */
#define AMEM_PASS (-1)

/*
 * Virtual handles carry this tag in their upper 16 bits. The driver's handles
 * are addresses in its own heap or small numbers: bits 63..48 clear.
 */
#define AMEM_HANDLE_TAG 0xA3E0000000000000ULL
#define AMEM_HANDLE_TAG_MASK 0xFFFF000000000000ULL

/* The environment, read and checked once by the hook. */
struct amem_config {
    int group;              /* AMEM_GROUPID */
    int arena;              /* AMEM_ARENA: 0 gives each allocation a physical handle of its own */
    int control_only;       /* AMEM_NCCL_OFFLOAD_FREE_TAG=7 */
    int host_prealloc;      /* AMEM_HOST_PREALLOC: 1 gets host memory for the first pause ahead */
    int log_level;          /* AMEM_LOG or GMM_LOG: 0 off, 1 error, 2 warn, 3 info, 4 debug, 5 trace */
    double timeout_seconds; /* AMEM_TIMEOUT_S */
    const char *disk_directory; /* AMEM_DISK_DIRECTORY; NULL: /var/tmp */
};

/* Unless it is open, NCCL's kernel launches wait or are refused. */
enum {
    AMEM_GUARD_OPEN = 0,
    AMEM_GUARD_PAUSED = 1,
    AMEM_GUARD_STALE = 2,   /* a peer's memory is not mapped here as it is now: resume first */
    AMEM_GUARD_ARRIVING = 3 /* peers' memory is being mapped: a launch waits for it */
};

/* Given to the core when it starts. */
struct amem_host {
    uint32_t abi;
    const char *version;
    struct amem_config config;
    int *guard;          /* one of AMEM_GUARD_*, accessed atomically */
    const int *launches; /* how many kernel launches are under way, accessed atomically */
    int *paused_regions; /* how many regions are paused, accessed atomically */
    void (*broken)(const char *why); /* an internal error: nothing of the core may be relied on, or called, any more */
    const size_t *margin; /* bytes that regions leave free on a device, accessed atomically */
    const uint64_t *reached; /* of AMEM_DEVICES devices: a bit for each that has peer access to it, accessed atomically */
};

#define AMEM_ERROR_TEXT 1024
#define AMEM_REPORT_TEXT 16384

/*
 * Given to the hook by the core. The driver wrappers are called on NCCL's
 * threads and answer a CUresult or AMEM_PASS. The control functions answer an
 * amem_status and write why they failed to text (AMEM_ERROR_TEXT bytes), and, after
 * the text's end, the failure's figures as JSON text, "" if it has none.
 */
struct amem_core {
    uint32_t abi;
    const char *version;

    /* What cuMemGetAllocationGranularity answers NCCL's own allocator; 0 leaves the driver's. */
    size_t granularity;

    /* own: NCCL's own allocator asks. */
    CUresult (*create)(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                       unsigned long long flags, int own);
    CUresult (*release)(CUmemGenericAllocationHandle handle);
    CUresult (*retain)(CUmemGenericAllocationHandle *handle, CUdeviceptr addr);
    /* pending: the virtual handle that this thread created, imported or looked at just before, or 0. */
    CUresult (*reserve)(CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags,
                        CUmemGenericAllocationHandle pending);
    CUresult (*address_free)(CUdeviceptr ptr, size_t size);
    CUresult (*map)(CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                    unsigned long long flags);
    CUresult (*unmap)(CUdeviceptr ptr, size_t size);
    CUresult (*set_access)(CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count);
    CUresult (*address_range)(CUdeviceptr *base, size_t *size, CUdeviceptr ptr);
    CUresult (*properties)(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle);
    CUresult (*export_handle)(void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                              unsigned long long flags);
    CUresult (*import_handle)(CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType type);
    CUresult (*bind_multicast)(CUmemGenericAllocationHandle multicast, size_t multicast_offset,
                               CUmemGenericAllocationHandle handle, size_t offset, size_t size,
                               unsigned long long flags);
    /* Waits while the guard says AMEM_GUARD_ARRIVING, for a time; an error says that it still does. */
    CUresult (*arrived)(void);
    /*
     * The memory in the range is about to be registered, and must stay where it is from now on; why: one of
     * AMEM_KEEP_*. It answers a number for registered(), or 0 where none of the memory is amem's.
     */
    uint64_t (*keep)(CUdeviceptr ptr, size_t size, int why);
    void (*registered)(uint64_t kept, uintptr_t registration); /* 0: it has failed, or ended */
    uint64_t (*deregister)(uintptr_t registration); /* is about to end: as keep(), before registered() */

    /* On success, text is the report of amem_last_report(): it has AMEM_REPORT_TEXT bytes. */
    int (*pause)(const char *tags, char *text);
    int (*resume)(const char *tags, char *text);
    int (*state)(const char *tag); /* an amem_state_t; "": paused if any tag is */
    char *(*stats)(void); /* JSON, malloc'd */
    int (*free_host)(const char *tags, char *text);
    int (*set_group)(int group, char *text);
    int (*get_group)(void);

    /* Regions are known by number, from 0 to AMEM_REGIONS - 1. */
    int (*region)(const char *tag, int backup, int *number, char *text);
    int (*allocate)(int region, size_t size, int device, CUdeviceptr *ptr, char *text);
    int (*deallocate)(int region, CUdeviceptr ptr, char *text);
    int (*free_memory)(CUdeviceptr ptr, char *text); /* of whichever region; AMEM_PASS: of none */
    int (*memory_state)(CUdeviceptr ptr); /* an amem_state_t */
    int (*reach)(int device, char *text); /* more devices have peer access to the device: see amem_host.reached */
    int (*device_of)(CUcontext context, int *device); /* NULL: the calling thread's */
    int (*read_backup)(CUdeviceptr ptr, size_t size, void *to, char *text);
    int (*find_backup)(CUdeviceptr ptr, size_t size, const void **backup, char *text);
    size_t (*pinned)(uintptr_t at); /* how many bytes of backups from here on one copy may have; 0: it is none */
    int (*set_disk_directory)(const char *path, int named, char *text);
    void (*retain_backups)(int on);
    /*
     * Handles of AMEM_IPC_HANDLE bytes for regions' memory. These answer AMEM_PASS
     * for memory, or a handle, that is not amem's. enabled: AMEM_ENABLE is in the
     * environment, which this process's children inherit.
     */
    int (*ipc_get)(void *handle, CUdeviceptr ptr, int enabled, char *text);
    int (*ipc_open)(CUdeviceptr *ptr, const void *handle, char *text);
    int (*ipc_close)(CUdeviceptr ptr, char *text);
};

#define AMEM_REGIONS 128
#define AMEM_DEVICES 64 /* as many as the bits of amem_host.reached */
#define AMEM_IPC_HANDLE 64
#define AMEM_IPC_MAGIC "amemipc\1"

enum {
    AMEM_KEEP_NIC = 1,
    AMEM_KEEP_MULTICAST = 2,
    AMEM_KEEP_BUFFER = 3 /* a dma-buf, which may be registered with a NIC next */
};

/* The core's only exported symbol. Called once. Returns an amem_status. */
int amem_core_init(const struct amem_host *host, struct amem_core *core, char *text);

#endif
