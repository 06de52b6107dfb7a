/*
 * NCCL's own suspension, in the order of the driver's calls of mem_manager.cc (2.29.7 and
 * later): each buffer is unmapped and its handle released while its addresses stay reserved,
 * and with the resume another handle is created and mapped at the same place.
 */
#include "internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { TAG_RESUMED = 0x20000000, STATS_SUSPEND = 0, STATS_SUSPENDED, STATS_PERSIST, STATS_TOTAL };

/* Calls f for each end of each connection. */
static ncclResult_t each(struct ncclComm *comm, ncclResult_t (*f)(struct ncclComm *comm, struct conn *conn)) {
    for (int c = 0; c < comm->channels; c++) {
        for (int p = 0; p < comm->nranks; p++) {
            if (comm->send[c][p].connected) TRY(f(comm, &comm->send[c][p]));
            if (comm->recv[c][p].connected) TRY(f(comm, &comm->recv[c][p]));
        }
    }
    return ncclSuccess;
}

static ncclResult_t let_go(struct ncclComm *comm, struct conn *conn) {
    (void)comm;
    CU(cuMemGetAddressRange(NULL, &conn->remote_size, conn->remote));
    CU(cuMemUnmap(conn->remote, conn->remote_size));
    if (conn->remote_handle != 0) CU(cuMemRelease(conn->remote_handle));
    conn->remote_handle = 0;
    return ncclSuccess;
}

static ncclResult_t offload(struct ncclComm *comm, struct conn *conn) {
    (void)comm;
    CU(cuMemGetAddressRange(NULL, &conn->mapped, conn->own));
    CU(cuMemHostAlloc(&conn->backup, conn->mapped, 0));
    CU(cuMemcpyDtoH(conn->backup, conn->own, conn->mapped));
    CU(cuMemUnmap(conn->own, conn->mapped));
    CU(cuMemRelease(conn->own_handle));
    conn->own_handle = 0;
    return ncclSuccess;
}

static ncclResult_t restore(struct ncclComm *comm, struct conn *conn) {
    CUmemAllocationProp prop = {.type = CU_MEM_ALLOCATION_TYPE_PINNED,
                                .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                .location = {.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = comm->dev}};
    CU(cuMemCreate(&conn->own_handle, conn->mapped, &prop, 0)); /* after no question of the granularity */
    CU(cuMemMap(conn->own, conn->mapped, 0, conn->own_handle, 0));
    TRY(mem_allow(conn->own, conn->mapped, comm->dev));
    CU(cuMemcpyHtoD(conn->own, conn->backup, conn->mapped));
    CU(cuMemFreeHost(conn->backup));
    conn->backup = NULL;
    return ncclSuccess;
}

/* Channel by channel, the handles that a peer needs: the ends of its own connections. */
static ncclResult_t tell_peer(struct ncclComm *comm, int peer, bool sender) {
    uint64_t handles[MAX_CHANNELS];
    for (int c = 0; c < comm->channels; c++)
        handles[c] = sender ? comm->send[c][peer].own_handle : comm->recv[c][peer].own_handle;
    return bootstrap_send(comm, peer, TAG_RESUMED + (sender ? 1 : 0), handles, sizeof handles);
}

static ncclResult_t map_again(struct ncclComm *comm, int peer, bool sender) {
    uint64_t handles[MAX_CHANNELS];
    TRY(bootstrap_recv(comm, peer, TAG_RESUMED + (sender ? 0 : 1), handles, sizeof handles));
    for (int c = 0; c < comm->channels; c++) {
        struct conn *conn = sender ? &comm->send[c][peer] : &comm->recv[c][peer];
        CUmemGenericAllocationHandle handle = handles[c];
        if (!conn->same_process) {
            int fd = -1;
            TRY(proxy_get_fd(comm, peer, handles[c], &fd));
            CUresult result = driver.cuMemImportFromShareableHandle(&handle, (void *)(uintptr_t)fd,
                                                                    CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
            close(fd);
            if (result != CUDA_SUCCESS) return cuda_failure("import of a resumed buffer", result);
            conn->remote_handle = handle;
        }
        CU(cuMemMap(conn->remote, conn->remote_size, 0, handle, 0));
        TRY(mem_allow(conn->remote, conn->remote_size, comm->dev));
    }
    return ncclSuccess;
}

static ncclResult_t suspend(struct ncclComm *comm) {
    CU(cuCtxSynchronize());
    TRY(bootstrap_barrier(comm));
    TRY(each(comm, let_go));
    return each(comm, offload);
}

static ncclResult_t resume(struct ncclComm *comm) {
    TRY(each(comm, restore));
    TRY(bootstrap_barrier(comm));
    for (int p = 0; p < comm->nranks; p++) {
        if (comm->sends_connected >> p & 1) TRY(tell_peer(comm, p, true));
        if (comm->recvs_connected >> p & 1) TRY(tell_peer(comm, p, false));
    }
    for (int p = 0; p < comm->nranks; p++) {
        if (comm->sends_connected >> p & 1) TRY(map_again(comm, p, true));
        if (comm->recvs_connected >> p & 1) TRY(map_again(comm, p, false));
    }
    return bootstrap_barrier(comm);
}

static ncclResult_t on_device(struct ncclComm *comm, bool wanted, ncclResult_t (*f)(struct ncclComm *)) {
    CUcontext saved = NULL;
    CU(cuCtxGetCurrent(&saved));
    CU(cuCtxSetCurrent(comm->ctx));
    ncclResult_t result = f(comm);
    driver.cuCtxSetCurrent(saved);
    if (result == ncclSuccess) comm->suspended = wanted;
    return result;
}

/* The caller's thread; collective. */
ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags) {
    if (comm == NULL) return fail(ncclInvalidArgument, "ncclCommSuspend: no communicator");
    if (!(flags & NCCL_SUSPEND_MEM)) return ncclSuccess;
    if (!options.cumem) return fail(ncclInvalidUsage, "ncclCommSuspend: memory manager is disabled");
    if (comm->suspended) return fail(ncclInvalidUsage, "ncclCommSuspend: already suspended");
    return on_device(comm, true, suspend);
}

/* The caller's thread; collective. */
ncclResult_t ncclCommResume(ncclComm_t comm) {
    if (comm == NULL) return fail(ncclInvalidArgument, "ncclCommResume: no communicator");
    if (!comm->suspended) return fail(ncclInvalidUsage, "ncclCommResume: not in suspended state");
    return on_device(comm, false, resume);
}

/* Of what ncclCommSuspend releases alone: the rest is not tracked. */
ncclResult_t ncclCommMemStats(ncclComm_t comm, int stat, unsigned long long *value) {
    if (comm == NULL || value == NULL) return fail(ncclInvalidArgument, "ncclCommMemStats: an argument is missing");
    if (stat < STATS_SUSPEND || stat > STATS_TOTAL) return fail(ncclInvalidArgument, "ncclCommMemStats: statistic %d", stat);
    *value = 0;
    if (stat == STATS_SUSPENDED) *value = comm->suspended;
    if (stat == STATS_SUSPENDED || stat == STATS_PERSIST) return ncclSuccess;
    for (int p = 0; p < comm->nranks; p++)
        *value += (unsigned long long)comm->channels * ((comm->sends_connected >> p & 1 ? options.shareable : 0) +
                                                        (comm->recvs_connected >> p & 1 ? recv_size() : 0));
    return ncclSuccess;
}
