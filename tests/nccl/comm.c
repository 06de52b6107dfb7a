/* The life of a communicator. */
#include "internal.h"
#include "group.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>
#include <unistd.h>

static pthread_once_t process_once = PTHREAD_ONCE_INIT;
static uint64_t process_id;

static void make_process_id(void) {
    if (getrandom(&process_id, sizeof process_id, 0) != sizeof process_id) process_id = mix((uint64_t)getpid());
}

bool same_process(const struct ncclComm *comm, int a, int b) {
    return comm->peers[a].process == comm->peers[b].process;
}

ncclResult_t ncclGetVersion(int *version) {
    if (version == NULL) return fail(ncclInvalidArgument, "ncclGetVersion: no pointer");
    const char *given = getenv("NCCL_STANDIN_VERSION");
    *version = given != NULL && given[0] != '\0' ? atoi(given) : 22809;
    return ncclSuccess;
}

ncclResult_t ncclGetUniqueId(ncclUniqueId *id) {
    if (id == NULL) return fail(ncclInvalidArgument, "ncclGetUniqueId: no pointer");
    TRY(driver_init());
    memset(id, 0, sizeof *id);
    if (getrandom(id->internal, 16, 0) != 16) return fail(ncclSystemError, "no random numbers");
    return ncclSuccess;
}

const char *ncclGetErrorString(ncclResult_t result) {
    switch (result) {
    case ncclSuccess:
        return "no error";
    case ncclUnhandledCudaError:
        return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError:
        return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInternalError:
        return "internal error - please report this issue to the NCCL developers";
    case ncclInvalidArgument:
        return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage:
        return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError:
        return "remote process exited or there was a network error";
    case ncclInProgress:
        return "NCCL operation in progress";
    default:
        return "unknown result code";
    }
}

/* ---- making one ---- */

static ncclResult_t bring_up(struct ncclComm *comm) {
    TRY(bootstrap_start(comm));
    CU(cuMemHostAlloc((void **)&comm->abort_flag, sizeof *comm->abort_flag, CU_MEMHOSTALLOC_PORTABLE));
    __atomic_store_n(comm->abort_flag, 0, __ATOMIC_RELEASE);
    CU(cuEventCreate(&comm->last_launch, CU_EVENT_DISABLE_TIMING));
    pthread_once(&process_once, make_process_id);
    comm->peers[comm->rank] = (struct peer_info){.process = process_id, .dev = comm->dev};
    TRY(bootstrap_all_gather(comm, comm->peers, sizeof comm->peers[0]));
    for (int p = 0; p < comm->nranks; p++) {
        if (p != comm->rank && same_process(comm, p, comm->rank) && comm->peers[p].dev == comm->dev) {
            return fail(ncclInvalidUsage, "ranks %d and %d of one process share device %d", p, comm->rank, comm->dev);
        }
    }
    TRY(host_numa_init(comm));
    TRY(metadata_init(comm));
    TRY(nvls_init(comm));
    return bootstrap_barrier(comm);
}

static void tear_down(struct ncclComm *comm) {
    CUcontext saved = NULL;
    driver.cuCtxGetCurrent(&saved);
    driver.cuCtxSetCurrent(comm->ctx);
    window_free_all(comm);
    bootstrap_stop(comm);
    transport_free(comm);
    if (comm->last_launch != NULL) driver.cuEventDestroy(comm->last_launch);
    if (comm->abort_flag != NULL) driver.cuMemFreeHost(comm->abort_flag);
    registration_free_all(comm);
    driver.cuCtxSetCurrent(saved);
    pthread_cond_destroy(&comm->arrived);
    pthread_mutex_destroy(&comm->lock);
    free(comm);
}

static ncclResult_t init_main(void *arg) {
    struct comm_init *init = arg;
    struct ncclComm *comm = init->comm;
    CU(cuCtxSetCurrent(comm->ctx));
    ncclResult_t result = bring_up(comm);
    if (result != ncclSuccess) {
        tear_down(comm);
        comm = NULL;
    }
    *init->out = comm;
    return result;
}

/* In the caller's thread; the rest of the work in the group's. */
static ncclResult_t begin_init(ncclComm_t *out, int nranks, const uint64_t id[2], int rank, CUcontext ctx, CUdevice dev) {
    struct comm_init *init = calloc(1, sizeof *init);
    struct ncclComm *comm = calloc(1, sizeof *comm);
    pthread_condattr_t attr;
    if (init == NULL || comm == NULL) {
        free(init);
        free(comm);
        return fail(ncclSystemError, "no host memory");
    }
    comm->rank = rank;
    comm->nranks = nranks;
    comm->channels = options.channels;
    comm->dev = dev;
    comm->ctx = ctx;
    memcpy(comm->id, id, sizeof comm->id);
    comm->listen_fd = comm->stop_fd = -1;
    for (int i = 0; i < MAX_RANKS; i++) comm->sockets[i] = -1;
    pthread_mutex_init(&comm->lock, NULL);
    pthread_condattr_init(&attr);
    pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    pthread_cond_init(&comm->arrived, &attr);
    pthread_condattr_destroy(&attr);
    *out = NULL;
    *init = (struct comm_init){.comm = comm, .out = out, .run = init_main};
    return group_add_init(init);
}

/* As the CUDA runtime does: without a context, the primary one of device 0. */
static ncclResult_t current_device(CUcontext *ctx, CUdevice *dev) {
    CU(cuCtxGetCurrent(ctx));
    if (*ctx == NULL) {
        CU(cuDeviceGet(dev, 0));
        CU(cuDevicePrimaryCtxRetain(ctx, *dev));
        CU(cuCtxSetCurrent(*ctx));
    }
    CU(cuCtxGetDevice(dev));
    return ncclSuccess;
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank, ncclConfig_t *config) {
    uint64_t id[2];
    CUcontext ctx;
    CUdevice dev;
    (void)config;
    if (comm == NULL || nranks < 1 || nranks > MAX_RANKS || rank < 0 || rank >= nranks) {
        return fail(ncclInvalidArgument, "ncclCommInitRank: rank %d of %d (at most %d)", rank, nranks, MAX_RANKS);
    }
    TRY(driver_init());
    TRY(current_device(&ctx, &dev));
    memcpy(id, commId.internal, sizeof id);
    return begin_init(comm, nranks, id, rank, ctx, dev);
}

ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank) {
    return ncclCommInitRankConfig(comm, nranks, commId, rank, NULL);
}

ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ndev, const int *devlist) {
    ncclUniqueId unique;
    uint64_t id[2];
    if (comms == NULL || ndev < 1 || ndev > MAX_RANKS) return fail(ncclInvalidArgument, "ncclCommInitAll: %d devices", ndev);
    TRY(ncclGetUniqueId(&unique));
    memcpy(id, unique.internal, sizeof id);
    TRY(ncclGroupStart());
    ncclResult_t result = ncclSuccess;
    for (int i = 0; i < ndev && result == ncclSuccess; i++) {
        CUdevice dev;
        CUcontext ctx;
        if (driver.cuDeviceGet(&dev, devlist != NULL ? devlist[i] : i) != CUDA_SUCCESS ||
            driver.cuDevicePrimaryCtxRetain(&ctx, dev) != CUDA_SUCCESS) {
            result = fail(ncclInvalidArgument, "ncclCommInitAll: no device for rank %d", i);
        } else {
            result = begin_init(&comms[i], ndev, id, i, ctx, dev);
        }
    }
    if (result != ncclSuccess) {
        group_discard();
        return result;
    }
    return ncclGroupEnd();
}

struct split_choice {
    int32_t color, key, rank;
};

static int by_key(const void *a, const void *b) {
    const struct split_choice *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return (x->rank > y->rank) - (x->rank < y->rank);
}

/* The caller's thread; collective over the parent. */
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm, ncclConfig_t *config) {
    struct split_choice all[MAX_RANKS], mine[MAX_RANKS];
    int n = 0, rank = -1;
    (void)config;
    if (comm == NULL || newcomm == NULL) return fail(ncclInvalidArgument, "ncclCommSplit: an argument is missing");
    all[comm->rank] = (struct split_choice){color, key, comm->rank};
    TRY(bootstrap_all_gather(comm, all, sizeof all[0]));
    uint32_t number = ++comm->splits;
    *newcomm = NULL;
    if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
    for (int i = 0; i < comm->nranks; i++) {
        if (all[i].color == color) mine[n++] = all[i];
    }
    qsort(mine, (size_t)n, sizeof mine[0], by_key);
    for (int i = 0; i < n; i++) {
        if (mine[i].rank == comm->rank) rank = i;
    }
    uint64_t salt = mix((uint64_t)number << 32 | (uint32_t)color);
    uint64_t id[2] = {mix(comm->id[0] ^ salt), mix(comm->id[1] + salt)};
    return begin_init(newcomm, n, id, rank, comm->ctx, comm->dev);
}

ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId, ncclUniqueId *commIds,
                                      ncclConfig_t *config) {
    if (nId < 1 || commIds == NULL) return fail(ncclInvalidArgument, "ncclCommInitRankScalable: no unique id");
    return ncclCommInitRankConfig(newcomm, nranks, commIds[0], myrank, config);
}

/* Collective over the ranks that stay: the others may be gone. */
ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount, ncclComm_t *newcomm,
                            ncclConfig_t *config, int shrinkFlags) {
    rank_set excluded = 0;
    int n = 0, rank = -1;
    (void)config, (void)shrinkFlags;
    if (comm == NULL || newcomm == NULL) return fail(ncclInvalidArgument, "ncclCommShrink: an argument is missing");
    for (int i = 0; i < excludeRanksCount; i++) {
        int r = excludeRanksList[i];
        if (r < 0 || r >= comm->nranks || r == comm->rank) return fail(ncclInvalidArgument, "ncclCommShrink: rank %d", r);
        excluded |= RANK(r);
    }
    for (int r = 0; r < comm->nranks; r++) {
        if (excluded >> r & 1) continue;
        if (r == comm->rank) rank = n;
        n++;
    }
    uint64_t salt = mix((uint64_t)excluded ^ (uint64_t)(excluded >> 64) ^ 0x5371a4b);
    uint64_t id[2] = {mix(comm->id[0] ^ salt), mix(comm->id[1] + salt)};
    *newcomm = NULL;
    return begin_init(newcomm, n, id, rank, comm->ctx, comm->dev);
}

/* ---- what the stand-in has not ---- */

static ncclResult_t lacks(const char *function) {
    return fail(ncclInvalidUsage, "%s: the stand-in for NCCL has no such thing", function);
}

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype, int residence,
                                      ncclComm_t comm) {
    (void)op, (void)scalar, (void)datatype, (void)residence, (void)comm;
    return lacks("ncclRedOpCreatePreMulSum");
}

ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm) {
    (void)op, (void)comm;
    return lacks("ncclRedOpDestroy");
}

ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void *reqs, void *outDevComm) {
    (void)comm, (void)reqs, (void)outDevComm;
    return lacks("ncclDevCommCreate");
}

ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const void *devComm) {
    (void)comm, (void)devComm;
    return lacks("ncclDevCommDestroy");
}

ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId) {
    (void)comm, (void)uniqueId;
    return lacks("ncclCommGetUniqueId");
}

ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank, ncclComm_t *newcomm,
                          ncclConfig_t *config) {
    (void)comm, (void)nRanks, (void)uniqueId, (void)rank, (void)newcomm, (void)config;
    return lacks("ncclCommGrow");
}

ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags) {
    (void)comm, (void)revokeFlags;
    return lacks("ncclCommRevoke");
}

ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr) {
    (void)comm, (void)win, (void)outUserPtr;
    return lacks("ncclWinGetUserPtr");
}

ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void **outPtr) {
    (void)window, (void)offset, (void)outPtr;
    return lacks("ncclGetLsaMultimemDevicePointer");
}

ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **outPtr) {
    (void)window, (void)offset, (void)peer, (void)outPtr;
    return lacks("ncclGetPeerDevicePointer");
}

ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer, ncclWindow_t peerWin,
                           size_t peerWinOffset, int sigIdx, int ctx, unsigned flags, ncclComm_t comm, CUstream stream) {
    (void)localbuff, (void)count, (void)datatype, (void)peer, (void)peerWin, (void)peerWinOffset;
    (void)sigIdx, (void)ctx, (void)flags, (void)comm, (void)stream;
    return lacks("ncclPutSignal");
}

ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned flags, ncclComm_t comm, CUstream stream) {
    (void)peer, (void)sigIdx, (void)ctx, (void)flags, (void)comm, (void)stream;
    return lacks("ncclSignal");
}

ncclResult_t ncclWaitSignal(int nDesc, void *signalDescs, ncclComm_t comm, CUstream stream) {
    (void)nDesc, (void)signalDescs, (void)comm, (void)stream;
    return lacks("ncclWaitSignal");
}

/* ---- ending one ---- */

static ncclResult_t wait_for_kernels(struct ncclComm *comm) {
    if (comm->launched) CU(cuEventSynchronize(comm->last_launch));
    return ncclSuccess;
}

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    if (comm == NULL) return fail(ncclInvalidArgument, "ncclCommFinalize: no communicator");
    return wait_for_kernels(comm);
}

/* Host-side state alone: the communicator's device memory may not be there. */
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    if (comm == NULL) return ncclSuccess;
    ncclResult_t result = wait_for_kernels(comm);
    tear_down(comm);
    return result;
}

ncclResult_t ncclCommAbort(ncclComm_t comm) {
    if (comm == NULL) return ncclSuccess;
    __atomic_store_n(comm->abort_flag, 1, __ATOMIC_RELEASE);
    return ncclCommDestroy(comm);
}

/* ---- questions ---- */

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *error) {
    if (comm == NULL || error == NULL) return fail(ncclInvalidArgument, "ncclCommGetAsyncError: an argument is missing");
    *error = ncclSuccess;
    return ncclSuccess;
}

static ncclResult_t answer(const struct ncclComm *comm, int *out, int value) {
    if (comm == NULL || out == NULL) return fail(ncclInvalidArgument, "an argument is missing");
    *out = value;
    return ncclSuccess;
}

ncclResult_t ncclCommCount(const ncclComm_t comm, int *count) { return answer(comm, count, comm ? comm->nranks : 0); }
ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device) { return answer(comm, device, comm ? comm->dev : 0); }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank) { return answer(comm, rank, comm ? comm->rank : 0); }
