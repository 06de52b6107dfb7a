/*
 * A stand-in for NCCL (libnccl.so.2) for tests on the simulated driver: it
 * reaches the driver, allocates, shares, frees and communicates in NCCL's
 * order, with NCCL's signatures and result codes. Names and values are NCCL's.
 *
 * Environment, read at the first use of the driver:
 *   NCCL_CUMEM_ENABLE             0: cuMemAlloc and host shared memory, no VMM calls (default 1)
 *   NCCL_DEBUG                    WARN: error texts on stderr as well
 *   NCCL_STANDIN_CHANNELS         channels a communicator (default 2, at most 8)
 *   NCCL_STANDIN_BUFFSIZE         bytes of a connection's FIFO (default 524288)
 *   NCCL_STANDIN_SHAREABLE        what the size of a connection's buffers is a multiple of (default 2097152)
 *   NCCL_STANDIN_METADATA         small metadata allocations a communicator (default 24, at most 64)
 *   NCCL_STANDIN_HOST_NUMA        0: no shared buffers in host memory (default 1)
 *   NCCL_STANDIN_NVLS             1: a multicast object a communicator (default 0)
 *   NCCL_STANDIN_NET              1: buffers that a NIC has registered (default 0): like peers' in size, and made first
 *   NCCL_GRAPH_REGISTER           0: captured operations register no buffers (default 1)
 *   NCCL_STANDIN_VERSION          what ncclGetVersion answers (default 22809)
 *   NCCL_STANDIN_CREDIT_DELAY_US  how long a kernel waits before its last credits,
 *                                 so that the sender's kernel has ended by then (default 0)
 *   NCCL_STANDIN_TIMEOUT_S        a longer wait ends the process with a message (default 120)
 *   NCCL_STANDIN_ENTRY_POINT      in the variant with a dynamic CUDA runtime, "unversioned":
 *                                 cudaGetDriverEntryPoint instead of the ...ByVersion one
 *
 * Where it is simpler than NCCL:
 *   - ncclCommDestroy does not wait for graphs that hold the communicator's
 *     kernels; such a graph must not be launched afterwards.
 *   - A captured operation's registration lasts as long as the communicator, not as
 *     the graph; and an operation is captured by all its ranks, or by none.
 *   - ncclCommSuspend releases peers' buffers; NCCL's releases channels' metadata too.
 *   - Only the sum is a reduction, over integers and float32 and float64. Operators of the
 *     user's, device communicators and one-sided operations are refused: they are there
 *     so that PyTorch's libraries find all that they link with.
 *   - A receive into a registered buffer is direct when, and must only be
 *     matched by, a send from a registered buffer (ncclCommRegister).
 *   - ncclAllGather is direct when both buffers lie in windows of all ranks.
 */
#ifndef NCCL_STANDIN_H
#define NCCL_STANDIN_H

#include <limits.h>
#include <stddef.h>

#include "../../golib/cuda/driver.h"

#define NCCL_STANDIN_API __attribute__((visibility("default")))

#define NCCL_UNIQUE_ID_BYTES 128
#define NCCL_SPLIT_NOCOLOR (-1)
#define NCCL_WIN_DEFAULT 0x00
#define NCCL_WIN_COLL_SYMMETRIC 0x01
#define NCCL_WIN_REQUIRED_ALIGNMENT 4096
#define NCCL_CONFIG_UNDEF_INT INT_MIN

typedef struct ncclComm *ncclComm_t;
typedef struct ncclWindow_vidmem *ncclWindow_t;
typedef struct {
    char internal[NCCL_UNIQUE_ID_BYTES];
} ncclUniqueId;

typedef enum {
    ncclSuccess = 0,
    ncclUnhandledCudaError = 1,
    ncclSystemError = 2,
    ncclInternalError = 3,
    ncclInvalidArgument = 4,
    ncclInvalidUsage = 5,
    ncclRemoteError = 6,
    ncclInProgress = 7,
    ncclNumResults = 8
} ncclResult_t;

typedef enum { ncclSum = 0, ncclProd = 1, ncclMax = 2, ncclMin = 3, ncclAvg = 4 } ncclRedOp_t;

typedef enum {
    ncclInt8 = 0,
    ncclUint8 = 1,
    ncclInt32 = 2,
    ncclUint32 = 3,
    ncclInt64 = 4,
    ncclUint64 = 5,
    ncclFloat16 = 6,
    ncclFloat32 = 7,
    ncclFloat64 = 8,
    ncclBfloat16 = 9,
    ncclFloat8e4m3 = 10,
    ncclFloat8e5m2 = 11,
    ncclNumTypes = 12
} ncclDataType_t;

/* Accepted and not read: the stand-in has nothing to configure this way. */
typedef struct ncclConfig_v22800 ncclConfig_t;

NCCL_STANDIN_API ncclResult_t ncclGetVersion(int *version);
NCCL_STANDIN_API ncclResult_t ncclGetUniqueId(ncclUniqueId *uniqueId);
NCCL_STANDIN_API const char *ncclGetErrorString(ncclResult_t result);
NCCL_STANDIN_API const char *ncclGetLastError(ncclComm_t comm);

NCCL_STANDIN_API ncclResult_t ncclCommInitRank(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank);
NCCL_STANDIN_API ncclResult_t ncclCommInitRankConfig(ncclComm_t *comm, int nranks, ncclUniqueId commId, int rank,
                                                     ncclConfig_t *config);
NCCL_STANDIN_API ncclResult_t ncclCommInitAll(ncclComm_t *comms, int ndev, const int *devlist);
NCCL_STANDIN_API ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t *newcomm,
                                            ncclConfig_t *config);
NCCL_STANDIN_API ncclResult_t ncclCommFinalize(ncclComm_t comm);
NCCL_STANDIN_API ncclResult_t ncclCommDestroy(ncclComm_t comm);
NCCL_STANDIN_API ncclResult_t ncclCommAbort(ncclComm_t comm);
NCCL_STANDIN_API ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t *asyncError);
NCCL_STANDIN_API ncclResult_t ncclCommCount(const ncclComm_t comm, int *count);
NCCL_STANDIN_API ncclResult_t ncclCommCuDevice(const ncclComm_t comm, int *device);
NCCL_STANDIN_API ncclResult_t ncclCommUserRank(const ncclComm_t comm, int *rank);

NCCL_STANDIN_API ncclResult_t ncclMemAlloc(void **ptr, size_t size);
NCCL_STANDIN_API ncclResult_t ncclMemFree(void *ptr);
NCCL_STANDIN_API ncclResult_t ncclCommRegister(const ncclComm_t comm, void *buff, size_t size, void **handle);
NCCL_STANDIN_API ncclResult_t ncclCommDeregister(const ncclComm_t comm, void *handle);
NCCL_STANDIN_API ncclResult_t ncclCommWindowRegister(ncclComm_t comm, void *buff, size_t size, ncclWindow_t *win,
                                                     int winFlags);
NCCL_STANDIN_API ncclResult_t ncclCommWindowDeregister(ncclComm_t comm, ncclWindow_t win);

NCCL_STANDIN_API ncclResult_t ncclGroupStart(void);
NCCL_STANDIN_API ncclResult_t ncclGroupEnd(void);

NCCL_STANDIN_API ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count,
                                            ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                            CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count,
                                            ncclDataType_t datatype, int root, ncclComm_t comm, CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count,
                                         ncclDataType_t datatype, ncclRedOp_t op, int root, ncclComm_t comm,
                                         CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount,
                                            ncclDataType_t datatype, ncclComm_t comm, CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount,
                                                ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                                                CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer,
                                       ncclComm_t comm, CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer,
                                       ncclComm_t comm, CUstream stream);

/* NCCL 2.29.7 and later. */
#define NCCL_SUSPEND_MEM 0x01
NCCL_STANDIN_API ncclResult_t ncclCommSuspend(ncclComm_t comm, int flags);
NCCL_STANDIN_API ncclResult_t ncclCommResume(ncclComm_t comm);
NCCL_STANDIN_API ncclResult_t ncclCommMemStats(ncclComm_t comm, int stat, unsigned long long *value);

/* What PyTorch 2.11 and 2.15 link with beside the functions above. */
typedef struct {
    size_t size;
    unsigned magic, version;
    float estimatedTime;
} ncclSimInfo_t;
NCCL_STANDIN_API ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                           ncclComm_t comm, CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                                        CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype,
                                         int root, ncclComm_t comm, CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo);
NCCL_STANDIN_API ncclResult_t ncclCommInitRankScalable(ncclComm_t *newcomm, int nranks, int myrank, int nId,
                                                       ncclUniqueId *commIds, ncclConfig_t *config);
NCCL_STANDIN_API ncclResult_t ncclCommShrink(ncclComm_t comm, int *excludeRanksList, int excludeRanksCount,
                                             ncclComm_t *newcomm, ncclConfig_t *config, int shrinkFlags);
NCCL_STANDIN_API ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t *op, void *scalar, ncclDataType_t datatype,
                                                       int residence, ncclComm_t comm);
NCCL_STANDIN_API ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t comm);
NCCL_STANDIN_API ncclResult_t ncclDevCommCreate(ncclComm_t comm, const void *reqs, void *outDevComm);
NCCL_STANDIN_API ncclResult_t ncclDevCommDestroy(ncclComm_t comm, const void *devComm);
NCCL_STANDIN_API ncclResult_t ncclCommGetUniqueId(ncclComm_t comm, ncclUniqueId *uniqueId);
NCCL_STANDIN_API ncclResult_t ncclCommGrow(ncclComm_t comm, int nRanks, const ncclUniqueId *uniqueId, int rank,
                                           ncclComm_t *newcomm, ncclConfig_t *config);
NCCL_STANDIN_API ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags);
NCCL_STANDIN_API ncclResult_t ncclWinGetUserPtr(ncclComm_t comm, ncclWindow_t win, void **outUserPtr);
NCCL_STANDIN_API ncclResult_t ncclGetLsaMultimemDevicePointer(ncclWindow_t window, size_t offset, void **outPtr);
NCCL_STANDIN_API ncclResult_t ncclGetPeerDevicePointer(ncclWindow_t window, size_t offset, int peer, void **outPtr);
NCCL_STANDIN_API ncclResult_t ncclPutSignal(const void *localbuff, size_t count, ncclDataType_t datatype, int peer,
                                            ncclWindow_t peerWin, size_t peerWinOffset, int sigIdx, int ctx,
                                            unsigned flags, ncclComm_t comm, CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclSignal(int peer, int sigIdx, int ctx, unsigned flags, ncclComm_t comm,
                                         CUstream stream);
NCCL_STANDIN_API ncclResult_t ncclWaitSignal(int nDesc, void *signalDescs, ncclComm_t comm, CUstream stream);

/*
 * Not NCCL's. Checks on the stream all of the communicator's metadata, network
 * and multicast memory byte by byte, and ends the process with a message when
 * something is not as it was written.
 */
NCCL_STANDIN_API ncclResult_t ncclStandinVerify(ncclComm_t comm, CUstream stream);

#endif
