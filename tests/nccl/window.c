/*
 * User memory that peers map: buffers registered with a communicator, which
 * are shared with a peer at the first receive from it, and symmetric windows,
 * where each rank maps every rank's memory into one large reservation.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- registered buffers ---- */

static struct registration *add_registration(struct ncclComm *comm, CUdeviceptr ptr, size_t size) {
    struct registration *reg = calloc(1, sizeof *reg);
    if (reg == NULL) return NULL;
    reg->ptr = ptr;
    reg->size = size;
    CUresult result = driver.cuMemGetAddressRange(&reg->base, &reg->base_size, ptr);
    if (result != CUDA_SUCCESS || ptr + size > reg->base + reg->base_size) {
        free(reg);
        return NULL;
    }
    reg->next = comm->registrations;
    comm->registrations = reg;
    return reg;
}

/* The caller's thread. Local: peers see the buffer when it is first used with them. */
ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle) {
    if (comm == NULL || buff == NULL || size == 0 || handle == NULL) {
        return fail(ncclInvalidArgument, "ncclCommRegister: an argument is missing");
    }
    *handle = add_registration(comm, (uintptr_t)buff, size);
    if (*handle != NULL) return ncclSuccess;
    return fail(ncclInvalidArgument, "ncclCommRegister: %p is not device memory of %zu bytes", buff, size);
}

/*
 * As ncclIpcGraphRegisterBuffer: the base, with its whole size. NCCL gives the registration up
 * with the graph; here it stays as long as the communicator.
 */
struct registration *registration_of_captured(struct ncclComm *comm, const void *ptr, size_t size) {
    CUdeviceptr p = (uintptr_t)ptr, base = 0;
    size_t base_size = 0;
    if (driver.cuMemGetAddressRange(&base, &base_size, p) != CUDA_SUCCESS || base + base_size < p + size) return NULL;
    for (struct registration *r = comm->registrations; r != NULL; r = r->next)
        if (r->captured && r->ptr == base && r->size == base_size) return r;
    struct registration *reg = add_registration(comm, base, base_size);
    if (reg == NULL) return NULL;
    reg->captured = true;
    if (options.net) reg->mr = nic_register(base, base_size, 0); /* ncclNetGraphRegisterBuffer */
    return reg;
}

static void unshare_all(struct ncclComm *comm, struct registration *reg) {
    for (int p = 0; p < comm->nranks; p++) {
        if (reg->remote[p] == 0) continue;
        struct request request = {.kind = REQUEST_DEREGISTER, .a = reg->remote[p] - (reg->ptr - reg->base)};
        struct reply reply;
        proxy_call(comm, p, &request, -1, &reply, NULL);
    }
}

/* The caller's thread. */
ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle) {
    if (comm == NULL) return fail(ncclInvalidArgument, "ncclCommDeregister: no communicator");
    for (struct registration **r = &comm->registrations; *r != NULL; r = &(*r)->next) {
        if (*r != handle) continue;
        struct registration *found = *r;
        *r = found->next;
        unshare_all(comm, found);
        mem_free(found->remotes);
        free(found);
        return ncclSuccess;
    }
    return handle == NULL ? ncclSuccess : fail(ncclInvalidArgument, "ncclCommDeregister: unknown handle");
}

struct registration *registration_find(struct ncclComm *comm, const void *ptr, size_t size) {
    CUdeviceptr p = (uintptr_t)ptr;
    struct registration *r = comm->registrations;
    while (r != NULL && (r->captured || p < r->ptr || p + size > r->ptr + r->size)) r = r->next;
    return options.cumem ? r : NULL;
}

static ncclResult_t share(struct ncclComm *comm, struct registration *reg, int peer) {
    CUmemGenericAllocationHandle handle;
    struct request request = {.kind = REQUEST_REGISTER, .b = reg->base_size};
    struct reply reply;
    ncclResult_t result;
    int legacy = 0;
    CU(cuPointerGetAttribute(&legacy, CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE, reg->base));
    /* No error: NCCL tries, and then, without NCCL_LEGACY_CUDA_REGISTER, does without. */
    if (driver.cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)reg->base) != CUDA_SUCCESS) return ncclInvalidUsage;
    if (same_process(comm, comm->rank, peer)) {
        request.a = handle;
        result = proxy_call(comm, peer, &request, -1, &reply, NULL);
        CU(cuMemRelease(handle));
    } else {
        int fd = -1;
        CUresult exported =
            driver.cuMemExportToShareableHandle(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0);
        CU(cuMemRelease(handle));
        if (exported != CUDA_SUCCESS) {
            return fail(ncclUnhandledCudaError, "export of a registered buffer: CUDA error %d", exported);
        }
        result = proxy_call(comm, peer, &request, fd, &reply, NULL);
        close(fd);
    }
    TRY(result);
    reg->remote[peer] = reply.ptr + (reg->ptr - reg->base);
    return ncclSuccess;
}

bool registration_share(struct ncclComm *comm, struct registration *reg, int peer) {
    return reg->remote[peer] != 0 || share(comm, reg, peer) == ncclSuccess;
}

bool registration_share_all(struct ncclComm *comm, struct registration *reg) {
    if (reg->remotes != 0) return true;
    for (int p = 0; p < comm->nranks; p++)
        if (p != comm->rank && !registration_share(comm, reg, p)) return false;
    size_t size = sizeof reg->remote[0] * (size_t)comm->nranks;
    return mem_alloc_zeroed(&reg->remotes, size) == ncclSuccess && mem_upload(reg->remotes, reg->remote, size) == ncclSuccess;
}

void registration_free_all(struct ncclComm *comm) {
    while (comm->registrations != NULL) {
        struct registration *r = comm->registrations;
        comm->registrations = r->next;
        nic_deregister(r->mr);
        nvls_deregister(comm, r);
        mem_free(r->remotes);
        free(r);
    }
}

/* ---- symmetric windows ---- */

struct ncclWindow_vidmem {
    struct window_memory *memory; /* NULL without VMM: a registration alone */
    void *registration;
};

static ncclResult_t flat_init(struct ncclComm *comm, size_t *granularity) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = comm->dev}};
    size_t total = 1;
    CU(cuMemGetAllocationGranularity(granularity, &prop, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    if (driver.cuDeviceTotalMem != NULL) CU(cuDeviceTotalMem(&total, comm->dev));
    if (comm->stride == 0) comm->stride = (total + 0xffffffffull) & ~0xffffffffull;
    return ncclSuccess;
}

static ncclResult_t map_all(struct ncclComm *comm, CUmemGenericAllocationHandle handle, size_t size, size_t offset) {
    uint64_t handles[MAX_RANKS];
    handles[comm->rank] = handle;
    TRY(bootstrap_all_gather(comm, handles, sizeof handles[0]));
    if (comm->flat == 0) {
        CU(cuMemAddressReserve(&comm->flat, comm->stride * (size_t)comm->nranks, 512 << 20, 0, 0));
    }
    for (int r = 0; r < comm->nranks; r++) {
        CUmemGenericAllocationHandle mapped = handle;
        CUdeviceptr at = comm->flat + comm->stride * (size_t)r + offset;
        if (r != comm->rank) {
            int fd = -1;
            TRY(proxy_get_fd(comm, r, handles[r], &fd));
            CUresult result = driver.cuMemImportFromShareableHandle(&mapped, (void *)(uintptr_t)fd,
                                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
            close(fd);
            if (result != CUDA_SUCCESS) {
                return fail(ncclUnhandledCudaError, "import of the window of rank %d: CUDA error %d", r, result);
            }
        }
        CU(cuMemMap(at, size, 0, mapped, 0));
        TRY(mem_allow(at, size, comm->dev));
        if (r != comm->rank) CU(cuMemRelease(mapped));
    }
    return bootstrap_barrier(comm);
}

/* Takes over the caller's reference of the handle. */
static ncclResult_t obtain(struct ncclComm *comm, CUmemGenericAllocationHandle handle, CUdeviceptr base, size_t size,
                           size_t granularity, struct window_memory **memory) {
    size_t end = 0;
    *memory = NULL;
    for (int i = 0; i < MAX_WINDOWS; i++) {
        struct window_memory *m = &comm->windows[i];
        if (!m->used && *memory == NULL) *memory = m;
        if (m->used && m->offset + m->size > end) end = m->offset + m->size;
    }
    end = (end + granularity - 1) / granularity * granularity;
    if (*memory == NULL || end + size > comm->stride) return fail(ncclInvalidUsage, "no room for another window");
    TRY(map_all(comm, handle, size, end));
    **memory = (struct window_memory){.used = true, .handle = handle, .base = base, .size = size, .offset = end};
    return ncclSuccess;
}

static void drop(struct ncclComm *comm, struct window_memory *m) {
    for (int r = 0; r < comm->nranks; r++) driver.cuMemUnmap(comm->flat + comm->stride * (size_t)r + m->offset, m->size);
    driver.cuMemRelease(m->handle);
    m->used = false;
}

/* Memory of NCCL's own in the reservation, with no address but that one. */
static ncclResult_t resource_init(struct ncclComm *comm, size_t granularity) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = comm->dev}};
    size_t size = (sizeof(struct window_resource) + granularity - 1) / granularity * granularity;
    CUmemGenericAllocationHandle handle;
    struct window_memory *memory;
    CU(cuMemCreate(&handle, size, &prop, 0));
    TRY(obtain(comm, handle, 0, size, granularity, &memory));
    comm->shadow.window = (struct dev_window_state){comm->flat, comm->stride, memory->offset};
    return mem_upload(comm->dev_comm + offsetof(struct dev_comm, window), &comm->shadow.window,
                      sizeof comm->shadow.window);
}

static ncclResult_t register_symmetric(struct ncclComm *comm, CUdeviceptr ptr, struct window_memory **memory) {
    CUmemGenericAllocationHandle handle;
    CUdeviceptr base = 0;
    size_t size = 0, granularity = 0;
    TRY(flat_init(comm, &granularity));
    CU(cuMemGetAddressRange(&base, &size, ptr));
    if ((ptr - base) % NCCL_WIN_REQUIRED_ALIGNMENT != 0) {
        return fail(ncclInvalidArgument, "a window starts at a multiple of %d bytes", NCCL_WIN_REQUIRED_ALIGNMENT);
    }
    CU(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)base));
    TRY(obtain(comm, handle, base, size, granularity, memory));
    return comm->shadow.window.flat == 0 ? resource_init(comm, granularity) : ncclSuccess;
}

/* The caller's thread; collective. */
ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win, int winFlags) {
    (void)winFlags;
    if (win == NULL) return fail(ncclInvalidArgument, "ncclCommWindowRegister: no place for the window");
    struct ncclWindow_vidmem w = {0};
    TRY(ncclCommRegister(comm, buff, size, &w.registration));
    if (options.cumem) TRY(register_symmetric(comm, (uintptr_t)buff, &w.memory));
    *win = malloc(sizeof **win);
    if (*win == NULL) return fail(ncclSystemError, "no host memory");
    **win = w;
    return ncclSuccess;
}

/* The caller's thread. */
ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win) {
    if (comm == NULL || win == NULL) return fail(ncclInvalidArgument, "ncclCommWindowDeregister: an argument is missing");
    if (win->memory != NULL) drop(comm, win->memory);
    ncclResult_t result = ncclCommDeregister(comm, win->registration);
    free(win);
    return result;
}

bool window_find(struct ncclComm *comm, const void *ptr, size_t size, uint64_t *offset) {
    CUdeviceptr p = (uintptr_t)ptr;
    for (int i = 0; i < MAX_WINDOWS; i++) {
        const struct window_memory *m = &comm->windows[i];
        if (!m->used || m->base == 0 || p < m->base || p + size > m->base + m->size) continue;
        *offset = m->offset + (p - m->base);
        return true;
    }
    return false;
}

void window_free_all(struct ncclComm *comm) {
    if (comm->flat == 0) return;
    for (int i = 0; i < MAX_WINDOWS; i++) {
        if (comm->windows[i].used) drop(comm, &comm->windows[i]);
    }
    /* As NCCL does, which ignores that nothing is mapped there any more. */
    driver.cuMemUnmap(comm->flat, comm->stride * (size_t)comm->nranks);
    driver.cuMemAddressFree(comm->flat, comm->stride * (size_t)comm->nranks);
    comm->flat = 0;
}
