/* A communicator's memory: metadata, connections to peers, host memory, multicast, network buffers. */
#include "internal.h"

#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum {
    HOST_BUFFER = 64 << 10,
    NVLS_BUFFER = 4 << 20,
    NET_CONTROL = 4096, /* in front of what a NIC registers */
    TAG_SEND = 0x40000000,
    TAG_RECV = 0x50000000,
    TAG_SEND_DONE = 0x60000000,
    TAG_RECV_DONE = 0x70000000
};

enum { PEER_ACCESS_ALREADY_ENABLED = 704 };

struct connect_info {
    uint64_t handle;
    uint64_t ptr;
    uint64_t size;
};

/* ---- the NIC: NCCL finds libibverbs by dlopen, and its functions by dlvsym ---- */

static struct {
    pthread_once_t once;
    void *(*reg_mr)(void *pd, void *addr, size_t length, int access);
    void *(*reg_mr_iova2)(void *pd, void *addr, size_t length, uint64_t iova, unsigned access);
    void *(*reg_dmabuf_mr)(void *pd, uint64_t offset, size_t length, uint64_t iova, int fd, int access);
    int (*dereg_mr)(void *mr);
} verbs = {.once = PTHREAD_ONCE_INIT};

static void load_verb(void *slot, void *library, const char *name, const char *version) {
    void *function = dlvsym(library, name, version);
    memcpy(slot, &function, sizeof function);
}

static void load_verbs(void) {
    void *library = dlopen("libibverbs.so.1", RTLD_NOW);
    if (library == NULL) return;
    load_verb(&verbs.reg_mr, library, "ibv_reg_mr", "IBVERBS_1.1");
    load_verb(&verbs.reg_mr_iova2, library, "ibv_reg_mr_iova2", "IBVERBS_1.8");
    load_verb(&verbs.reg_dmabuf_mr, library, "ibv_reg_dmabuf_mr", "IBVERBS_1.12");
    load_verb(&verbs.dereg_mr, library, "ibv_dereg_mr", "IBVERBS_1.1");
}

/* ---- what the proxy thread does for the rank and its peers ---- */

static ncclResult_t remember(struct ncclComm *comm, struct proxy_buffer buffer) {
    struct proxy_buffer *b = malloc(sizeof *b);
    if (b == NULL) return fail(ncclSystemError, "no host memory");
    *b = buffer;
    b->next = comm->proxy_buffers;
    comm->proxy_buffers = b;
    return ncclSuccess;
}

static ncclResult_t memory_file(size_t size, struct proxy_buffer *buffer) {
    buffer->fd = memfd_create("nccl-standin", MFD_CLOEXEC);
    if (buffer->fd < 0 || ftruncate(buffer->fd, (off_t)size) != 0) {
        return fail(ncclSystemError, "memory file: %s", strerror(errno));
    }
    void *ptr = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, buffer->fd, 0);
    if (ptr == MAP_FAILED) return fail(ncclSystemError, "mmap: %s", strerror(errno));
    buffer->ptr = (uintptr_t)ptr;
    return ncclSuccess;
}

ncclResult_t proxy_setup(struct ncclComm *comm, size_t size, int retains, bool host, struct reply *reply) {
    struct proxy_buffer buffer = {.size = size, .fd = -1};
    CUmemGenericAllocationHandle handle = 0;
    if (!options.cumem) {
        TRY(memory_file(size, &buffer));
        handle = (uint64_t)buffer.fd;
    } else if (host) {
        TRY(mem_host_alloc(&buffer.ptr, &handle, size));
    } else {
        TRY(mem_alloc(&buffer.ptr, &handle, size));
        for (int i = 0; i < retains; i++) CU(cuMemRetainAllocationHandle(&handle, (void *)(uintptr_t)buffer.ptr));
    }
    reply->handle = handle;
    reply->ptr = buffer.ptr;
    return remember(comm, buffer);
}

/* By each of the three ways in turn. */
void *nic_register(CUdeviceptr at, size_t size, int way) {
    void *addr = (void *)(uintptr_t)at;
    int fd = -1;
    pthread_once(&verbs.once, load_verbs);
    if (verbs.reg_mr == NULL || verbs.reg_mr_iova2 == NULL || verbs.dereg_mr == NULL) return NULL;
    if (way == 0) return verbs.reg_mr_iova2(NULL, addr, size, at, 7);
    if (way == 1 || verbs.reg_dmabuf_mr == NULL || driver.cuMemGetHandleForAddressRange == NULL ||
        driver.cuMemGetHandleForAddressRange(&fd, at, size, CU_MEM_RANGE_HANDLE_TYPE_DMA_BUF_FD, 0) != CUDA_SUCCESS) {
        return verbs.reg_mr(NULL, addr, size, 7);
    }
    void *mr = verbs.reg_dmabuf_mr(NULL, 0, size, at, fd, 7);
    close(fd);
    return mr;
}

void nic_deregister(void *mr) {
    if (mr != NULL) verbs.dereg_mr(mr);
}

ncclResult_t proxy_net_setup(struct ncclComm *comm, int index, struct reply *reply) {
    size_t size = recv_size();
    struct proxy_buffer buffer = {.size = size, .fd = -1};
    /* As a peer's, by the same function: the network's too may be shared with a peer. What is registered is a part. */
    TRY(mem_alloc(&buffer.ptr, NULL, size));
    buffer.mr = nic_register(buffer.ptr + NET_CONTROL, size - NET_CONTROL, index);
    reply->ptr = buffer.ptr;
    TRY(remember(comm, buffer));
    return buffer.mr != NULL ? ncclSuccess
                             : fail(ncclSystemError, "NCCL_STANDIN_NET=1, but registration %d failed: is libibverbs.so.1 there?", index);
}

/* Reserves first and imports next, as NCCL 2.30 does for registered buffers. */
ncclResult_t proxy_register(struct ncclComm *comm, uint64_t handle, size_t size, int fd, struct reply *reply) {
    struct proxy_buffer buffer = {.size = size, .fd = -1, .is_import = true, .same_process_mapping = fd < 0};
    CUmemGenericAllocationHandle mapped = handle;
    CU(cuMemAddressReserve(&buffer.ptr, size, 0, 0, 0));
    if (fd >= 0) {
        CUresult result = driver.cuMemImportFromShareableHandle(&mapped, (void *)(uintptr_t)fd,
                                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        close(fd);
        if (result != CUDA_SUCCESS) {
            driver.cuMemAddressFree(buffer.ptr, size);
            return fail(ncclUnhandledCudaError, "import of a registered buffer: CUDA error %d", result);
        }
    }
    CU(cuMemMap(buffer.ptr, size, 0, mapped, 0));
    TRY(mem_allow(buffer.ptr, size, comm->dev));
    reply->ptr = buffer.ptr;
    return remember(comm, buffer);
}

static void proxy_free(struct proxy_buffer *b) {
    nic_deregister(b->mr);
    if (b->fd >= 0) {
        munmap((void *)(uintptr_t)b->ptr, b->size);
        close(b->fd);
    } else if (b->is_import && b->same_process_mapping) {
        mem_free_second_mapping(b->ptr);
    } else {
        mem_free(b->ptr);
    }
    free(b);
}

ncclResult_t proxy_deregister(struct ncclComm *comm, CUdeviceptr ptr) {
    for (struct proxy_buffer **b = &comm->proxy_buffers; *b != NULL; b = &(*b)->next) {
        if ((*b)->is_import && (*b)->ptr == ptr) {
            struct proxy_buffer *found = *b;
            *b = found->next;
            proxy_free(found);
            return ncclSuccess;
        }
    }
    return fail(ncclInternalError, "no registered buffer at %#llx", ptr);
}

void proxy_free_all(struct ncclComm *comm) {
    while (comm->proxy_buffers != NULL) {
        struct proxy_buffer *b = comm->proxy_buffers;
        comm->proxy_buffers = b->next;
        proxy_free(b);
    }
}

/* ---- peers' buffers ---- */

ncclResult_t transport_import(struct ncclComm *comm, int owner, uint64_t handle, size_t size, bool host,
                              CUdeviceptr *ptr, CUmemGenericAllocationHandle *imported) {
    int fd = -1;
    if (!options.cumem) {
        TRY(proxy_get_fd(comm, owner, handle, &fd));
        void *p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        close(fd);
        if (p == MAP_FAILED) return fail(ncclSystemError, "mmap: %s", strerror(errno));
        *ptr = (uintptr_t)p;
        return ncclSuccess;
    }
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = comm->dev}};
    size_t granularity = 1;
    if (!host) CU(cuMemGetAllocationGranularity(&granularity, &prop, CU_MEM_ALLOC_GRANULARITY_MINIMUM));
    size = (size + granularity - 1) / granularity * granularity;
    TRY(proxy_get_fd(comm, owner, handle, &fd));
    CUresult result = driver.cuMemImportFromShareableHandle(imported, (void *)(uintptr_t)fd,
                                                            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
    close(fd);
    if (result != CUDA_SUCCESS) return cuda_failure("import of a peer's buffer", result);
    if (host) return mem_host_map(ptr, *imported, size);
    CU(cuMemAddressReserve(ptr, size, 0, 0, 0));
    CU(cuMemMap(*ptr, size, 0, *imported, 0));
    return mem_allow(*ptr, size, comm->dev);
}

void transport_free_import(struct ncclComm *comm, CUdeviceptr ptr, size_t size, bool from_same_process) {
    (void)comm;
    if (ptr == 0) return;
    if (!options.cumem) {
        if (!from_same_process) munmap((void *)(uintptr_t)ptr, size);
    } else if (from_same_process) {
        mem_free_second_mapping(ptr);
    } else {
        mem_free(ptr);
    }
}

/* Maps the peer's end of a connection. */
static ncclResult_t map_peer(struct ncclComm *comm, int peer, const struct connect_info *info, struct conn *conn) {
    conn->remote_size = info->size;
    conn->same_process = same_process(comm, comm->rank, peer);
    if (!conn->same_process)
        return transport_import(comm, peer, info->handle, info->size, false, &conn->remote, &conn->remote_handle);
    CUcontext peer_ctx;
    CU(cuDevicePrimaryCtxRetain(&peer_ctx, comm->peers[peer].dev));
    CUresult enabled = driver.cuCtxEnablePeerAccess(peer_ctx, 0);
    if (enabled != CUDA_SUCCESS && enabled != PEER_ACCESS_ALREADY_ENABLED) return cuda_failure("peer access", enabled);
    if (!options.cumem) {
        conn->remote = info->ptr;
        return ncclSuccess;
    }
    TRY(mem_map_again(&conn->remote, info->handle, info->size));
    CU(cuMemRelease(info->handle));
    return ncclSuccess;
}

static size_t send_size(void) { return options.shareable; }

size_t recv_size(void) {
    size_t size = SIMPLE_OFFSET + options.buffsize;
    return (size + options.shareable - 1) / options.shareable * options.shareable;
}

/* The own end of a connection on each channel, and word of it to the peer. */
static ncclResult_t setup_end(struct ncclComm *comm, int peer, bool sender) {
    struct connect_info info[MAX_CHANNELS];
    for (int c = 0; c < comm->channels; c++) {
        struct conn *conn = sender ? &comm->send[c][peer] : &comm->recv[c][peer];
        struct request request = {.kind = REQUEST_SETUP,
                                  .a = sender ? send_size() : recv_size(),
                                  .b = same_process(comm, comm->rank, peer) ? 1 : 0};
        struct reply reply;
        TRY(proxy_call(comm, comm->rank, &request, -1, &reply, NULL));
        conn->own = reply.ptr;
        conn->own_handle = reply.handle;
        info[c] = (struct connect_info){.handle = reply.handle, .ptr = reply.ptr, .size = request.a};
    }
    return bootstrap_send(comm, peer, sender ? TAG_SEND : TAG_RECV, info, sizeof info[0] * (size_t)comm->channels);
}

static ncclResult_t connect_end(struct ncclComm *comm, int peer, bool sender) {
    struct connect_info info[MAX_CHANNELS];
    TRY(bootstrap_recv(comm, peer, sender ? TAG_RECV : TAG_SEND, info, sizeof info[0] * (size_t)comm->channels));
    for (int c = 0; c < comm->channels; c++) {
        struct conn *conn = sender ? &comm->send[c][peer] : &comm->recv[c][peer];
        TRY(map_peer(comm, peer, &info[c], conn));
        struct dev_conn dev_conn = {.magic = mix((uint64_t)(c * MAX_RANKS + peer) + (sender ? 1 : 1 << 20)),
                                    .own = conn->own,
                                    .remote = conn->remote,
                                    .on_host = !options.cumem};
        CUdeviceptr array = sender ? comm->shadow.send[c] : comm->shadow.recv[c];
        TRY(mem_upload(array + sizeof dev_conn * (size_t)peer, &dev_conn, sizeof dev_conn));
        conn->connected = true;
    }
    return ncclSuccess;
}

static ncclResult_t net_init(struct ncclComm *comm) {
    for (int i = 0; i < NET_BUFFERS; i++) {
        struct request request = {.kind = REQUEST_NET, .a = (uint64_t)i};
        struct reply reply;
        TRY(proxy_call(comm, comm->rank, &request, -1, &reply, NULL));
        TRY(metadata_check_later(comm, reply.ptr, recv_size(), mix((uint64_t)(1000 + i)) | 1));
    }
    return ncclSuccess;
}

ncclResult_t transport_connect(struct ncclComm *comm, rank_set send_peers, rank_set recv_peers) {
    send_peers &= ~comm->sends_connected & ~RANK(comm->rank);
    recv_peers &= ~comm->recvs_connected & ~RANK(comm->rank);
    if ((send_peers | recv_peers) == 0) return ncclSuccess;
    int n = comm->nranks;
    if (options.net && !comm->net_done) {
        TRY(net_init(comm));
        comm->net_done = true;
    }
    for (int i = 1; i < n; i++) {
        int from = (comm->rank - i + n) % n, to = (comm->rank + i) % n;
        if (recv_peers >> from & 1) TRY(setup_end(comm, from, false));
        if (send_peers >> to & 1) TRY(setup_end(comm, to, true));
    }
    for (int i = 1; i < n; i++) {
        int from = (comm->rank - i + n) % n, to = (comm->rank + i) % n;
        if (recv_peers >> from & 1) TRY(connect_end(comm, from, false));
        if (send_peers >> to & 1) TRY(connect_end(comm, to, true));
    }
    /* Nobody goes on before its peers have mapped its buffers: it might be destroyed before they have. */
    for (int p = 0; p < n; p++) {
        if (recv_peers >> p & 1) TRY(bootstrap_send(comm, p, TAG_RECV_DONE, "", 1));
        if (send_peers >> p & 1) TRY(bootstrap_send(comm, p, TAG_SEND_DONE, "", 1));
    }
    for (int p = 0; p < n; p++) {
        char nothing;
        if (recv_peers >> p & 1) TRY(bootstrap_recv(comm, p, TAG_SEND_DONE, &nothing, 1));
        if (send_peers >> p & 1) TRY(bootstrap_recv(comm, p, TAG_RECV_DONE, &nothing, 1));
    }
    comm->sends_connected |= send_peers;
    comm->recvs_connected |= recv_peers;
    return ncclSuccess;
}

/* ---- metadata ---- */

static ncclResult_t fill(CUdeviceptr ptr, size_t size, uint64_t seed) {
    uint64_t *words = malloc(size);
    if (words == NULL) return fail(ncclSystemError, "no host memory");
    for (size_t i = 0; i < size / 8; i++) words[i] = mix(seed ^ i);
    ncclResult_t result = mem_upload(ptr, words, size);
    free(words);
    return result;
}

static ncclResult_t add_checked(struct ncclComm *comm, CUdeviceptr ptr, size_t size, uint64_t seed) {
    struct dev_comm *d = &comm->shadow;
    if (d->nchecked == MAX_CHECKED) return fail(ncclInternalError, "too many buffers to check");
    if (seed != 0) TRY(fill(ptr, size, seed));
    d->checked[d->nchecked++] = (struct dev_checked){.ptr = ptr, .bytes = size, .seed = seed};
    return ncclSuccess;
}

ncclResult_t metadata_check_later(struct ncclComm *comm, CUdeviceptr ptr, size_t size, uint64_t seed) {
    struct dev_comm *d = &comm->shadow;
    TRY(add_checked(comm, ptr, size, seed));
    size_t last = d->nchecked - 1;
    TRY(mem_upload(comm->dev_comm + offsetof(struct dev_comm, checked) + last * sizeof d->checked[0], &d->checked[last],
                   sizeof d->checked[0]));
    return mem_upload(comm->dev_comm + offsetof(struct dev_comm, nchecked), &d->nchecked, sizeof d->nchecked);
}

static ncclResult_t new_metadata(struct ncclComm *comm, size_t size, CUdeviceptr *ptr) {
    TRY(mem_alloc_zeroed(ptr, size));
    comm->metadata[comm->nmetadata++] = *ptr;
    return ncclSuccess;
}

ncclResult_t metadata_init(struct ncclComm *comm) {
    static const size_t sizes[] = {4096, 8192, 65536, 16384, 4096, 32768, 6144, 49152};
    struct dev_comm *d = &comm->shadow;
    d->magic = mix(comm->id[0]);
    d->rank = comm->rank;
    d->nranks = comm->nranks;
    d->channels = comm->channels;
    d->dev = comm->dev;
    d->buffsize = options.buffsize;
    d->abort_flag = (uintptr_t)comm->abort_flag;
    d->host_own = comm->host_own;
    d->host_prev = comm->host_prev;
    TRY(new_metadata(comm, sizeof *d, &comm->dev_comm));
    for (int c = 0; c < comm->channels; c++) {
        CUdeviceptr array;
        TRY(new_metadata(comm, sizeof(struct dev_conn) * (size_t)comm->nranks, &array));
        d->send[c] = array;
        TRY(new_metadata(comm, sizeof(struct dev_conn) * (size_t)comm->nranks, &array));
        d->recv[c] = array;
    }
    for (int i = 0; i < options.metadata; i++) {
        size_t size = sizes[(size_t)i % (sizeof sizes / sizeof sizes[0])];
        CUdeviceptr ptr;
        TRY(new_metadata(comm, size, &ptr));
        TRY(add_checked(comm, ptr, size, i % 3 == 2 ? 0 : mix(comm->id[1] + (uint64_t)(comm->rank * 100 + i)) | 1));
    }
    d->checksum = checksum_of(d, offsetof(struct dev_comm, checksum));
    return mem_upload(comm->dev_comm, d, sizeof *d);
}

/* ---- a host buffer for each rank and the next ---- */

ncclResult_t host_numa_init(struct ncclComm *comm) {
    if (!options.host_numa || comm->nranks < 2) return ncclSuccess;
    struct {
        uint64_t handle, size;
    } all[MAX_RANKS];
    CUmemGenericAllocationHandle imported;
    struct request request = {.kind = REQUEST_HOST_SETUP, .a = HOST_BUFFER};
    struct reply reply;
    int prev = (comm->rank + comm->nranks - 1) % comm->nranks;
    TRY(proxy_call(comm, comm->rank, &request, -1, &reply, NULL));
    comm->host_own = reply.ptr;
    *(uint64_t *)(uintptr_t)comm->host_own = mix((uint64_t)comm->rank + 1);
    all[comm->rank].handle = reply.handle;
    all[comm->rank].size = HOST_BUFFER;
    TRY(bootstrap_all_gather(comm, all, sizeof all[0]));
    TRY(transport_import(comm, prev, all[prev].handle, all[prev].size, true, &comm->host_prev, &imported));
    if (*(uint64_t *)(uintptr_t)comm->host_prev != mix((uint64_t)prev + 1)) {
        return fail(ncclInternalError, "the host buffer of rank %d is not what it shared", prev);
    }
    return ncclSuccess;
}

/* ---- multicast ---- */

ncclResult_t nvls_init(struct ncclComm *comm) {
    if (!options.nvls || comm->nranks < 2) return ncclSuccess;
    int supported = 0;
    CU(cuDeviceGetAttribute(&supported, CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED, comm->dev));
    if (!supported || driver.cuMulticastCreate == NULL) return ncclSuccess;

    size_t mc_granularity = 0, uc_granularity = 0;
    uint64_t handles[MAX_RANKS] = {0};
    CUmulticastObjectProp mc = {.numDevices = (unsigned)comm->nranks,
                                .size = NVLS_BUFFER,
                                .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    CU(cuMulticastGetGranularity(&mc_granularity, &mc, CU_MULTICAST_GRANULARITY_RECOMMENDED));
    mc.size = comm->mc_size = (NVLS_BUFFER + mc_granularity - 1) / mc_granularity * mc_granularity;
    if (comm->rank == 0) {
        CU(cuMulticastCreate(&comm->mc_handle, &mc));
        handles[0] = comm->mc_handle;
    }
    TRY(bootstrap_all_gather(comm, handles, sizeof handles[0]));
    if (comm->rank != 0) {
        int fd = -1;
        TRY(proxy_get_fd(comm, 0, handles[0], &fd));
        CUresult result = driver.cuMemImportFromShareableHandle(&comm->mc_handle, (void *)(uintptr_t)fd,
                                                                CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        close(fd);
        if (result != CUDA_SUCCESS) {
            return fail(ncclUnhandledCudaError, "import of the multicast object: CUDA error %d", result);
        }
    }
    CU(cuMulticastAddDevice(comm->mc_handle, comm->dev));

    CUmemAllocationProp uc = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                              .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                              .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = comm->dev}};
    CU(cuMemGetAllocationGranularity(&uc_granularity, &uc, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    comm->uc_size = (NVLS_BUFFER + uc_granularity - 1) / uc_granularity * uc_granularity;
    CU(cuMemAddressReserve(&comm->uc_ptr, comm->uc_size, uc_granularity, 0, 0));
    CU(cuMemCreate(&comm->uc_handle, comm->uc_size, &uc, 0));
    CU(cuMemMap(comm->uc_ptr, comm->uc_size, 0, comm->uc_handle, 0));
    TRY(mem_allow(comm->uc_ptr, comm->uc_size, comm->dev));
    TRY(metadata_check_later(comm, comm->uc_ptr, 64 << 10, mix(comm->id[0] + (uint64_t)comm->rank) | 1));

    TRY(bootstrap_barrier(comm));
    CU(cuMulticastBindMem(comm->mc_handle, 0, comm->uc_handle, 0, comm->uc_size, 0));
    comm->mc_bound = true;
    CU(cuMemAddressReserve(&comm->mc_ptr, comm->mc_size, mc_granularity, 0, 0));
    CU(cuMemMap(comm->mc_ptr, comm->mc_size, 0, comm->mc_handle, 0));
    TRY(mem_allow(comm->mc_ptr, comm->mc_size, comm->dev));
    return bootstrap_barrier(comm);
}

/* As tryRegisterBuffer in nvls.cc: the base, with the least size of all ranks. */
ncclResult_t nvls_register(struct ncclComm *comm, struct registration *reg, CUdeviceptr ptr) {
    struct {
        uint64_t possible, offset, size;
    } all[MAX_RANKS] = {{0}};
    uint64_t handles[MAX_RANKS] = {0};
    CUmemAllocationProp uc = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                              .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                              .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = comm->dev}};
    CUmulticastObjectProp mc = {.numDevices = (unsigned)comm->nranks,
                                .handleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR};
    size_t mc_granularity = 0, uc_granularity = 0, size = SIZE_MAX;
    if (comm->mc_handle == 0 || (reg != NULL && reg->mc_tried)) return ncclSuccess;
    CU(cuMemGetAllocationGranularity(&uc_granularity, &uc, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED));
    if (reg != NULL) {
        reg->mc_tried = true;
        all[comm->rank].possible = reg->base % uc_granularity == 0;
        all[comm->rank].offset = ptr - reg->base;
        all[comm->rank].size = (reg->base_size + uc_granularity - 1) / uc_granularity * uc_granularity;
    }
    TRY(bootstrap_all_gather(comm, all, sizeof all[0]));
    for (int r = 0; r < comm->nranks; r++) {
        if (!all[r].possible || all[r].offset != all[0].offset) return ncclSuccess;
        if (all[r].size < size) size = all[r].size;
    }
    mc.size = size;
    CU(cuMulticastGetGranularity(&mc_granularity, &mc, CU_MULTICAST_GRANULARITY_RECOMMENDED));
    mc.size = reg->mc_size = (size + mc_granularity - 1) / mc_granularity * mc_granularity;
    if (comm->rank == 0) CU(cuMulticastCreate(&reg->mc_handle, &mc));
    handles[comm->rank] = reg->mc_handle;
    TRY(bootstrap_all_gather(comm, handles, sizeof handles[0]));
    if (comm->rank != 0) {
        int fd = -1;
        TRY(proxy_get_fd(comm, 0, handles[0], &fd));
        CUresult imported = driver.cuMemImportFromShareableHandle(&reg->mc_handle, (void *)(uintptr_t)fd,
                                                                  CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
        close(fd);
        if (imported != CUDA_SUCCESS) return cuda_failure("import of a buffer's multicast object", imported);
    }
    CU(cuMulticastAddDevice(reg->mc_handle, comm->dev));
    TRY(bootstrap_barrier(comm));
    /* No error: NCCL does without, as with memory by cuMemAlloc. */
    if (driver.cuMulticastBindAddr(reg->mc_handle, 0, reg->base, size, 0) != CUDA_SUCCESS) return ncclSuccess;
    reg->uc_size = size;
    CU(cuMemAddressReserve(&reg->mc_ptr, reg->mc_size, mc_granularity, 0, 0));
    CU(cuMemMap(reg->mc_ptr, reg->mc_size, 0, reg->mc_handle, 0));
    return mem_allow(reg->mc_ptr, reg->mc_size, comm->dev);
}

void nvls_deregister(struct ncclComm *comm, struct registration *reg) {
    if (reg->uc_size != 0) driver.cuMulticastUnbind(reg->mc_handle, comm->dev, 0, reg->uc_size);
    if (reg->mc_ptr != 0) {
        driver.cuMemUnmap(reg->mc_ptr, reg->mc_size);
        driver.cuMemAddressFree(reg->mc_ptr, reg->mc_size);
    }
    if (reg->mc_handle != 0) driver.cuMemRelease(reg->mc_handle);
}

void nvls_free(struct ncclComm *comm) {
    if (comm->mc_bound) driver.cuMulticastUnbind(comm->mc_handle, comm->dev, 0, comm->uc_size);
    if (comm->uc_handle != 0) {
        driver.cuMemUnmap(comm->uc_ptr, comm->uc_size);
        driver.cuMemAddressFree(comm->uc_ptr, comm->uc_size);
        driver.cuMemRelease(comm->uc_handle);
    }
    if (comm->mc_ptr != 0) {
        driver.cuMemUnmap(comm->mc_ptr, comm->mc_size);
        driver.cuMemAddressFree(comm->mc_ptr, comm->mc_size);
    }
    if (comm->mc_handle != 0) driver.cuMemRelease(comm->mc_handle);
}

/* Imports, then what the kernels used; the proxy thread has freed the own ends before. */
void transport_free(struct ncclComm *comm) {
    transport_free_import(comm, comm->host_prev, HOST_BUFFER, false);
    for (int c = 0; c < comm->channels; c++) {
        for (int p = 0; p < comm->nranks; p++) {
            struct conn *s = &comm->send[c][p], *r = &comm->recv[c][p];
            transport_free_import(comm, s->remote, s->remote_size, s->same_process);
            transport_free_import(comm, r->remote, r->remote_size, r->same_process);
        }
    }
    nvls_free(comm);
    while (comm->nmetadata > 0) mem_free(comm->metadata[--comm->nmetadata]);
}
