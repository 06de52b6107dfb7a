/* Shared by the stand-in's own files: include it first. */
#ifndef NCCL_STANDIN_INTERNAL_H
#define NCCL_STANDIN_INTERNAL_H

#define _GNU_SOURCE

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "../../golib/sim/sim.h"
#include "nccl_standin.h"

/* Only what nccl_standin.h declares is exported, whatever the compiler's flags. */
#pragma GCC visibility push(hidden)

enum {
    MAX_RANKS = 128,
    MAX_CHANNELS = 8,
    MAX_METADATA = 64,
    MAX_CHECKED = 128,
    MAX_WORKS = 32,
    MAX_WINDOWS = 16,
    NET_BUFFERS = 3
};

/* A bit a rank of a communicator. */
__extension__ typedef unsigned __int128 rank_set;
#define RANK(rank) ((rank_set)1 << (rank))

#define TRY(call)                                                                                                    \
    do {                                                                                                             \
        ncclResult_t try_result = (call);                                                                            \
        if (try_result != ncclSuccess) return try_result;                                                            \
    } while (0)

#define CU(call)                                                                                                     \
    do {                                                                                                             \
        CUresult cu_result = driver.call;                                                                            \
        if (cu_result != CUDA_SUCCESS) return cuda_failure(#call, cu_result);                                        \
    } while (0)

/* Records the text for ncclGetLastError and returns result. Any thread. */
ncclResult_t fail(ncclResult_t result, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* ---- driver.c: how the driver is reached ---- */

/* As NCCL's check of a driver call does: the text is the driver's. Any thread. */
ncclResult_t cuda_failure(const char *call, CUresult error);

/*
 * Name, version as the CUDA runtime asks for it, whether the stand-in can't do
 * without it, and arguments.
 */
#define DRIVER_FUNCTIONS(F)                                                                                          \
    F(cuInit, 2000, 1, (unsigned flags))                                                                             \
    F(cuDriverGetVersion, 2020, 1, (int *version))                                                                   \
    F(cuGetErrorString, 6000, 0, (CUresult result, const char **text))                                               \
    F(cuGetErrorName, 6000, 0, (CUresult result, const char **name))                                                 \
    F(cuDeviceGet, 2000, 1, (CUdevice *dev, int ordinal))                                                            \
    F(cuDeviceGetCount, 2000, 1, (int *count))                                                                       \
    F(cuDeviceGetAttribute, 2000, 1, (int *value, CUdevice_attribute attribute, CUdevice dev))                       \
    F(cuDeviceTotalMem, 3020, 0, (size_t *bytes, CUdevice dev))                                                      \
    F(cuDeviceCanAccessPeer, 4000, 0, (int *can, CUdevice dev, CUdevice peer))                                       \
    F(cuCtxEnablePeerAccess, 4000, 1, (CUcontext peer, unsigned flags))                                              \
    F(cuDevicePrimaryCtxRetain, 7000, 1, (CUcontext *ctx, CUdevice dev))                                             \
    F(cuCtxGetCurrent, 4000, 1, (CUcontext *ctx))                                                                    \
    F(cuCtxSetCurrent, 4000, 1, (CUcontext ctx))                                                                     \
    F(cuCtxGetDevice, 2000, 1, (CUdevice *dev))                                                                      \
    F(cuThreadExchangeStreamCaptureMode, 10010, 0, (CUstreamCaptureMode *mode))                                      \
    F(cuStreamCreate, 2000, 1, (CUstream *stream, unsigned flags))                                                   \
    F(cuStreamDestroy, 4000, 1, (CUstream stream))                                                                   \
    F(cuStreamSynchronize, 2000, 1, (CUstream stream))                                                               \
    F(cuStreamWaitEvent, 3020, 1, (CUstream stream, CUevent event, unsigned flags))                                  \
    F(cuStreamIsCapturing, 10000, 0, (CUstream stream, int *status))                                                 \
    F(cuEventCreate, 2000, 1, (CUevent *event, unsigned flags))                                                      \
    F(cuEventRecord, 2000, 1, (CUevent event, CUstream stream))                                                      \
    F(cuEventSynchronize, 2000, 1, (CUevent event))                                                                  \
    F(cuEventDestroy, 4000, 1, (CUevent event))                                                                      \
    F(cuMemAlloc, 3020, 1, (CUdeviceptr *ptr, size_t size))                                                          \
    F(cuMemFree, 3020, 1, (CUdeviceptr ptr))                                                                         \
    F(cuMemHostAlloc, 2020, 1, (void **ptr, size_t size, unsigned flags))                                            \
    F(cuMemFreeHost, 2000, 1, (void *ptr))                                                                           \
    F(cuMemsetD8Async, 3020, 1, (CUdeviceptr ptr, unsigned char value, size_t size, CUstream stream))                \
    F(cuCtxSynchronize, 2000, 1, (void))                                                                             \
    F(cuMemcpyDtoH, 3020, 1, (void *dst, CUdeviceptr src, size_t size))                                              \
    F(cuMemcpyHtoD, 3020, 1, (CUdeviceptr dst, const void *src, size_t size))                                        \
    F(cuMemcpyHtoDAsync, 3020, 1, (CUdeviceptr dst, const void *src, size_t size, CUstream stream))                  \
    F(cuLaunchKernel, 4000, 1,                                                                                       \
      (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,            \
       unsigned shared, CUstream stream, void **params, void **extra))                                               \
    F(cuLaunchKernelEx, 11060, 1,                                                                                    \
      (const CUlaunchConfig *config, CUfunction function, void **params, void **extra))                              \
    F(cuMemGetAddressRange, 3020, 1, (CUdeviceptr *base, size_t *size, CUdeviceptr ptr))                             \
    F(cuMemAddressReserve, 10020, 1,                                                                                 \
      (CUdeviceptr *ptr, size_t size, size_t alignment, CUdeviceptr addr, unsigned long long flags))                 \
    F(cuMemAddressFree, 10020, 1, (CUdeviceptr ptr, size_t size))                                                    \
    F(cuMemCreate, 10020, 1,                                                                                         \
      (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,                           \
       unsigned long long flags))                                                                                    \
    F(cuMemGetAllocationGranularity, 10020, 1,                                                                       \
      (size_t *granularity, const CUmemAllocationProp *prop, CUmemAllocationGranularity_flags option))               \
    F(cuMemExportToShareableHandle, 10020, 1,                                                                        \
      (void *shareable, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,                         \
       unsigned long long flags))                                                                                    \
    F(cuMemImportFromShareableHandle, 10020, 1,                                                                      \
      (CUmemGenericAllocationHandle *handle, void *shareable, CUmemAllocationHandleType type))                       \
    F(cuMemMap, 10020, 1,                                                                                            \
      (CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))  \
    F(cuMemRelease, 10020, 1, (CUmemGenericAllocationHandle handle))                                                 \
    F(cuMemRetainAllocationHandle, 11000, 1, (CUmemGenericAllocationHandle *handle, void *ptr))                      \
    F(cuMemSetAccess, 10020, 1, (CUdeviceptr ptr, size_t size, const CUmemAccessDesc *desc, size_t count))           \
    F(cuMemUnmap, 10020, 1, (CUdeviceptr ptr, size_t size))                                                          \
    F(cuMemGetAllocationPropertiesFromHandle, 10020, 1,                                                              \
      (CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle))                                              \
    F(cuPointerGetAttribute, 4000, 1, (void *value, CUpointer_attribute attribute, CUdeviceptr ptr))                 \
    F(cuMemGetHandleForAddressRange, 11070, 0,                                                                       \
      (void *handle, CUdeviceptr ptr, size_t size, CUmemRangeHandleType type, unsigned long long flags))             \
    F(cuMulticastAddDevice, 12010, 0, (CUmemGenericAllocationHandle mc, CUdevice dev))                               \
    F(cuMulticastBindMem, 12010, 0,                                                                                  \
      (CUmemGenericAllocationHandle mc, size_t mcOffset, CUmemGenericAllocationHandle mem, size_t memOffset,         \
       size_t size, unsigned long long flags))                                                                       \
    F(cuMulticastBindAddr, 12010, 0,                                                                                 \
      (CUmemGenericAllocationHandle mc, size_t mcOffset, CUdeviceptr ptr, size_t size, unsigned long long flags))    \
    F(cuMulticastCreate, 12010, 0, (CUmemGenericAllocationHandle *mc, const CUmulticastObjectProp *prop))            \
    F(cuMulticastGetGranularity, 12010, 0,                                                                           \
      (size_t *granularity, const CUmulticastObjectProp *prop, CUmulticastGranularity_flags option))                 \
    F(cuMulticastUnbind, 12010, 0, (CUmemGenericAllocationHandle mc, CUdevice dev, size_t mcOffset, size_t size))    \
    F(cuSimFunctionCreate, 12000, 1,                                                                                 \
      (CUfunction *function, cuSimKernel kernel, int nparams, const size_t *paramSizes))

struct driver {
#define F(name, version, needed, args) CUresult(*name) args;
    DRIVER_FUNCTIONS(F)
#undef F
    void (*cuSimCheckAccess)(CUdevice dev, CUdeviceptr ptr, size_t size, int write);
};

extern struct driver driver;

struct options {
    bool cumem;
    bool host_numa;
    bool nvls;
    bool net;
    bool graph_register;
    int channels;
    int metadata;
    size_t buffsize;
    size_t shareable; /* buffers that peers map are rounded up to this, whatever the granularity */
    unsigned credit_delay_us;
    unsigned timeout_s;
};

extern struct options options;

/* Finds the driver's functions once a process. Any thread. */
ncclResult_t driver_init(void);

/* ---- memory.c: NCCL's order of the driver's calls ---- */

ncclResult_t mem_alloc(CUdeviceptr *ptr, CUmemGenericAllocationHandle *handle, size_t size);
ncclResult_t mem_alloc_zeroed(CUdeviceptr *ptr, size_t size);
ncclResult_t mem_free(CUdeviceptr ptr);
/* Maps a handle of this process a second time, for the current device. */
ncclResult_t mem_map_again(CUdeviceptr *ptr, CUmemGenericAllocationHandle handle, size_t size);
ncclResult_t mem_free_second_mapping(CUdeviceptr ptr);
ncclResult_t mem_host_alloc(CUdeviceptr *ptr, CUmemGenericAllocationHandle *handle, size_t size);
ncclResult_t mem_host_map(CUdeviceptr *ptr, CUmemGenericAllocationHandle handle, size_t size);
ncclResult_t mem_allow(CUdeviceptr ptr, size_t size, CUdevice dev);
ncclResult_t mem_upload(CUdeviceptr dst, const void *src, size_t size);

/* ---- kernels.c: what runs on the streams, and the layout of what it uses ---- */

enum { STEPS = 8, LL_LINES = 2048, LL_SLOT = LL_LINES * 8, LL_DATA = 8128, LL_MAX = 2 * LL_DATA };

/* At the start of the sender's buffer; the receiver writes it through its mapping. */
struct send_mem {
    uint64_t head; /* steps that the receiver has consumed */
    uint64_t pad[15];
    uint64_t ptr_exchange; /* where a direct send goes, in the sender's address space */
};

struct slot_info {
    uint64_t step;
    uint64_t bytes;
    uint64_t checksum;
};

/* At the start of the receiver's buffer; the sender writes it through its mapping. */
struct recv_mem {
    uint64_t tail; /* steps that the sender has written */
    uint64_t pad[15];
    struct slot_info slots[STEPS];
};

enum { CONTROL_BYTES = 4096, LL_OFFSET = CONTROL_BYTES, SIMPLE_OFFSET = LL_OFFSET + STEPS * LL_SLOT };

/* In device memory: one direction to one peer on one channel. */
struct dev_conn {
    uint64_t magic;
    uint64_t step;   /* written by kernels alone */
    uint64_t posted; /* the receiver's last credit, written by kernels alone */
    uint64_t own;    /* send_mem of a sender, recv_mem of a receiver */
    uint64_t remote; /* the peer's counterpart */
    uint64_t on_host;
};

struct dev_checked {
    uint64_t ptr;
    uint64_t bytes;
    uint64_t seed; /* 0: zeros */
};

struct dev_window_state {
    uint64_t flat;     /* base of the flat reservation */
    uint64_t stride;   /* bytes a rank in it */
    uint64_t resource; /* offset of the resource memory in a rank's part */
};

struct dev_comm {
    uint64_t magic;
    int32_t rank, nranks, channels, dev;
    uint64_t buffsize;
    uint64_t abort_flag;
    uint64_t send[MAX_CHANNELS], recv[MAX_CHANNELS]; /* dev_conn[nranks] */
    uint64_t host_own, host_prev;                    /* shared buffers in host memory, or 0 */
    uint64_t checksum;                               /* of all before */
    uint64_t launches;                               /* written by kernels alone */
    uint64_t nchecked;
    struct dev_checked checked[MAX_CHECKED];
    struct dev_window_state window;
};

/* In the resource memory of a window; each rank writes its own element at every peer. */
struct window_resource {
    uint64_t epoch;
    uint64_t enter[MAX_RANKS];
    uint64_t leave[MAX_RANKS];
};

enum work_kind { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, SEND, RECV, WINDOW_ALL_GATHER };

struct work {
    uint8_t kind, dtype, direct;
    int32_t peer; /* or root */
    uint64_t send, recv;
    uint64_t count;
    /*
     * RECV, direct: recv in the sender's address space; WINDOW_ALL_GATHER: recv's offset; other
     * collectives, direct: recv's base in each peer's address space, on the device, and recv's offset.
     */
    uint64_t remote, offset;
};

struct works {
    struct work list[MAX_WORKS];
};

/* The one param of each kernel: as NCCL's, its first word is the communicator's address on the device. */
struct kernel_args {
    uint64_t dev_comm;
    int32_t dev;
    uint32_t n;
    struct works works;
};

uint64_t mix(uint64_t x);
uint64_t checksum_of(const void *data, size_t size);
size_t dtype_size(int dtype);
extern CUfunction collective_function, p2p_function, verify_function;
ncclResult_t kernels_init(void);

/* ---- bootstrap.c: sockets, messages, the proxy thread ---- */

struct ncclComm;

struct reply {
    int32_t result;
    uint64_t handle;
    uint64_t ptr;
};

enum request_kind { REQUEST_DATA, REQUEST_GET_FD, REQUEST_SETUP, REQUEST_HOST_SETUP, REQUEST_NET, REQUEST_REGISTER,
                    REQUEST_DEREGISTER };

struct request {
    uint32_t kind;
    int32_t from;
    uint32_t tag;
    uint32_t len; /* of the payload that follows */
    uint64_t a, b, c;
};

enum { MAX_PAYLOAD = 4096 };

ncclResult_t bootstrap_start(struct ncclComm *comm);
/* Ends the proxy thread, which frees the buffers it allocated. */
void bootstrap_stop(struct ncclComm *comm);
ncclResult_t bootstrap_send(struct ncclComm *comm, int peer, uint32_t tag, const void *data, size_t len);
ncclResult_t bootstrap_recv(struct ncclComm *comm, int peer, uint32_t tag, void *data, size_t len);
/* all: nranks elements of size bytes, own element filled in. Collective. */
ncclResult_t bootstrap_all_gather(struct ncclComm *comm, void *all, size_t size);
ncclResult_t bootstrap_barrier(struct ncclComm *comm);
/* Asks a rank's proxy; fd_in is -1 or goes along; *fd_out gets the fd of the answer. */
ncclResult_t proxy_call(struct ncclComm *comm, int rank, struct request *request, int fd_in, struct reply *reply,
                        int *fd_out);
ncclResult_t proxy_get_fd(struct ncclComm *comm, int rank, uint64_t handle, int *fd);

struct registration;

/* ---- transport.c: connections and the rest of a communicator's memory ---- */

struct conn {
    bool connected;
    CUdeviceptr own; /* allocated by the proxy thread, which frees it */
    CUdeviceptr remote;
    size_t remote_size;
    bool same_process;
    CUmemGenericAllocationHandle own_handle, remote_handle; /* remote_handle: 0 in the same process */
    void *backup;                                           /* of own, while suspended */
    size_t mapped;                                          /* bytes of own, while suspended */
};

struct proxy_buffer {
    struct proxy_buffer *next;
    CUdeviceptr ptr;
    size_t size;
    int fd; /* NCCL_CUMEM_ENABLE=0: the memory file; -1 otherwise */
    bool same_process_mapping;
    bool is_import;
    void *mr;
};

/* NULL: there is no NIC, or it refuses. way: which of the three functions for it. */
void *nic_register(CUdeviceptr at, size_t size, int way);
void nic_deregister(void *mr);

/* Proxy thread. */
ncclResult_t proxy_setup(struct ncclComm *comm, size_t size, int retains, bool host, struct reply *reply);
ncclResult_t proxy_net_setup(struct ncclComm *comm, int index, struct reply *reply);
ncclResult_t proxy_register(struct ncclComm *comm, uint64_t handle, size_t size, int fd, struct reply *reply);
ncclResult_t proxy_deregister(struct ncclComm *comm, CUdeviceptr ptr);
void proxy_free_all(struct ncclComm *comm);

/* Caller's thread, or a thread of the group. Both ends must call it for the same connections. */
ncclResult_t transport_connect(struct ncclComm *comm, rank_set send_peers, rank_set recv_peers);
ncclResult_t transport_import(struct ncclComm *comm, int owner, uint64_t handle, size_t size, bool host,
                              CUdeviceptr *ptr, CUmemGenericAllocationHandle *imported);
size_t recv_size(void); /* bytes of a receiver's buffer, and of the network's */
void transport_free_import(struct ncclComm *comm, CUdeviceptr ptr, size_t size, bool same_process);
ncclResult_t metadata_init(struct ncclComm *comm);
ncclResult_t metadata_check_later(struct ncclComm *comm, CUdeviceptr ptr, size_t size, uint64_t seed);
ncclResult_t host_numa_init(struct ncclComm *comm);
ncclResult_t nvls_init(struct ncclComm *comm);
/* Binds a captured buffer to a multicast object, if all ranks can. Collective; reg may be NULL. */
ncclResult_t nvls_register(struct ncclComm *comm, struct registration *reg, CUdeviceptr ptr);
void nvls_deregister(struct ncclComm *comm, struct registration *reg);
void nvls_free(struct ncclComm *comm);
void transport_free(struct ncclComm *comm);

/* ---- window.c: registered buffers and symmetric windows ---- */

struct registration {
    struct registration *next;
    CUdeviceptr base, ptr;
    size_t base_size, size;
    CUdeviceptr remote[MAX_RANKS]; /* ptr in each peer's address space, where registered */
    CUdeviceptr remotes;           /* the same on the device, once a collective has used it */
    bool captured;                 /* registered by a captured operation, not by the user */
    void *mr;                      /* a captured one's registration with the NIC */
    CUmemGenericAllocationHandle mc_handle; /* and its multicast object, 0: none */
    CUdeviceptr mc_ptr;
    size_t mc_size, uc_size;
    bool mc_tried;
};

struct window_memory {
    bool used;
    CUmemGenericAllocationHandle handle;
    CUdeviceptr base;
    size_t size;
    size_t offset;
};

struct registration *registration_find(struct ncclComm *comm, const void *ptr, size_t size);
/* The registration of a captured operation's buffer: of the base of its memory, with the whole size. NULL: not possible. */
struct registration *registration_of_captured(struct ncclComm *comm, const void *ptr, size_t size);
/* False: the memory can't be shared, and NCCL does without. */
bool registration_share(struct ncclComm *comm, struct registration *reg, int peer);
/* Shares it with all peers, with their addresses on the device. */
bool registration_share_all(struct ncclComm *comm, struct registration *reg);
/* The offset of [ptr, ptr+size) in a rank's part of the flat reservation; false: not in a window. */
bool window_find(struct ncclComm *comm, const void *ptr, size_t size, uint64_t *offset);
void window_free_all(struct ncclComm *comm);
void registration_free_all(struct ncclComm *comm);

/* ---- comm.c ---- */

struct peer_info {
    uint64_t process; /* random, the same for all ranks of one process */
    int32_t dev;
};

struct message {
    struct message *next;
    int from;
    uint32_t tag;
    size_t len;
    unsigned char data[];
};

struct ncclComm {
    int rank, nranks, channels;
    CUdevice dev;
    CUcontext ctx;
    uint64_t id[2];
    uint32_t sequence; /* of collective exchanges over the bootstrap */
    uint32_t splits;
    struct peer_info peers[MAX_RANKS];

    int listen_fd, stop_fd;
    int sockets[MAX_RANKS];
    bool proxy_started;
    pthread_t proxy;
    pthread_mutex_t lock; /* of the mailbox */
    pthread_cond_t arrived;
    struct message *mailbox;
    struct proxy_buffer *proxy_buffers; /* proxy thread alone */

    uint32_t *abort_flag; /* host memory that kernels read */
    CUevent last_launch;
    CUstream last_stream;
    bool launched;

    CUdeviceptr dev_comm;
    struct dev_comm shadow;
    CUdeviceptr metadata[MAX_METADATA + 2 * MAX_CHANNELS + 1];
    int nmetadata;
    struct conn send[MAX_CHANNELS][MAX_RANKS], recv[MAX_CHANNELS][MAX_RANKS];
    rank_set sends_connected, recvs_connected;
    bool net_done;

    CUdeviceptr host_own, host_prev;

    CUmemGenericAllocationHandle uc_handle, mc_handle;
    CUdeviceptr uc_ptr, mc_ptr;
    size_t uc_size, mc_size;
    bool mc_bound;

    bool suspended; /* from ncclCommSuspend to ncclCommResume */
    struct registration *registrations;
    CUdeviceptr flat;
    size_t stride;
    struct window_memory windows[MAX_WINDOWS];
};

bool same_process(const struct ncclComm *comm, int a, int b);
double now_seconds(void);

#pragma GCC visibility pop

#endif
