/*
 * Operations and groups. At the end of a group, communicators are initialised
 * and connected, in a thread each when there are several in one process, since
 * they wait for each other; then the kernels are launched on the caller's
 * thread. Nothing that a kernel needs is kept on the host, so that a launch
 * which fails, or which a graph repeats, changes nothing here.
 */
#include "group.h"

#include <stdlib.h>
#include <string.h>

struct op {
    struct op *next;
    struct ncclComm *comm;
    CUstream stream;
    struct work work;
    rank_set send_peers, recv_peers; /* to connect before */
    struct registration *share;      /* to share with work.peer before, or, in a collective, with all */
    bool captured;
};

static _Thread_local struct {
    int depth;
    struct comm_init *inits;
    struct op *ops;
} group;

/* ---- threads for what several communicators do at the same time ---- */

struct job {
    ncclResult_t (*run)(void *arg);
    void *arg;
    ncclResult_t result;
    pthread_t thread;
};

static void *job_main(void *arg) {
    struct job *job = arg;
    job->result = job->run(job->arg);
    return NULL;
}

static ncclResult_t run_jobs(struct job *jobs, int n) {
    ncclResult_t result = ncclSuccess;
    if (n == 1) return jobs[0].run(jobs[0].arg);
    for (int i = 0; i < n; i++) {
        if (pthread_create(&jobs[i].thread, NULL, job_main, &jobs[i]) != 0) abort();
    }
    for (int i = 0; i < n; i++) {
        pthread_join(jobs[i].thread, NULL);
        if (result == ncclSuccess) result = jobs[i].result;
    }
    return result;
}

/* ---- initialisation ---- */

static ncclResult_t run_inits(struct comm_init *list) {
    struct job jobs[MAX_RANKS];
    int n = 0;
    CUcontext saved = NULL;
    driver.cuCtxGetCurrent(&saved);
    for (struct comm_init *i = list; i != NULL && n < MAX_RANKS; i = i->next) {
        jobs[n++] = (struct job){.run = i->run, .arg = i};
    }
    ncclResult_t result = run_jobs(jobs, n);
    driver.cuCtxSetCurrent(saved);
    while (list != NULL) {
        struct comm_init *next = list->next;
        free(list);
        list = next;
    }
    return result;
}

ncclResult_t group_add_init(struct comm_init *init) {
    if (group.depth == 0) return run_inits(init);
    struct comm_init **end = &group.inits;
    while (*end != NULL) end = &(*end)->next;
    *end = init;
    return ncclSuccess;
}

/* ---- connections ---- */

static bool is_p2p(const struct op *op) { return op->work.kind == SEND || op->work.kind == RECV; }

enum { TAG_DIRECT = 0x30000000 };

/* Any tensor of a captured operation is registered: NCCL_GRAPH_REGISTER. A collective's is where it receives. */
static void register_captured(struct op *op) {
    const struct work *w = &op->work;
    if (!op->captured || !options.graph_register || w->kind == WINDOW_ALL_GATHER || w->count == 0) return;
    if (is_p2p(op) && (w->peer == op->comm->rank || w->direct)) return;
    size_t bytes = w->count * dtype_size(w->dtype) * (w->kind == ALL_GATHER ? (size_t)op->comm->nranks : 1);
    uint64_t at = w->kind == SEND ? w->send : w->recv;
    if (at == 0) return;
    struct registration *reg = registration_of_captured(op->comm, (const void *)(uintptr_t)at, bytes);
    if (w->kind != SEND) op->share = reg;
    op->work.direct = is_p2p(op); /* what the receiver says counts */
}

/* The receiver says where the sender may write, and whether it may. */
static ncclResult_t offer_direct(struct op *op) {
    struct work *w = &op->work;
    if (!w->direct || w->kind == SEND) return ncclSuccess;
    w->direct = op->share != NULL && registration_share(op->comm, op->share, w->peer);
    if (w->direct) w->remote = op->share->remote[w->peer] + (w->recv - op->share->ptr);
    return bootstrap_send(op->comm, w->peer, TAG_DIRECT, &w->direct, sizeof w->direct);
}

static ncclResult_t accept_direct(struct op *op) {
    if (!op->work.direct || op->work.kind == RECV) return ncclSuccess;
    return bootstrap_recv(op->comm, op->work.peer, TAG_DIRECT, &op->work.direct, sizeof op->work.direct);
}

/* All ranks write directly, or none. Only all-gathers do; but the peers map what any collective receives to. */
static ncclResult_t agree_on_direct(struct op *op) {
    uint8_t shared[MAX_RANKS] = {0};
    if (!op->captured || !options.graph_register || op->work.kind == WINDOW_ALL_GATHER) return ncclSuccess;
    shared[op->comm->rank] = op->share != NULL && registration_share_all(op->comm, op->share);
    TRY(bootstrap_all_gather(op->comm, shared, 1));
    TRY(nvls_register(op->comm, op->share, op->work.recv));
    bool all = op->work.kind == ALL_GATHER;
    for (int r = 0; r < op->comm->nranks; r++) all = all && shared[r];
    if (!all) return ncclSuccess;
    op->work.direct = 1;
    op->work.remote = op->share->remotes;
    op->work.offset = op->work.recv - op->share->ptr;
    return ncclSuccess;
}

struct connecting {
    struct ncclComm *comm;
    struct op *ops;
};

static ncclResult_t connect_main(void *arg) {
    struct connecting *c = arg;
    struct ncclComm *comm = c->comm;
    rank_set send_peers = 0, recv_peers = 0;
    CU(cuCtxSetCurrent(comm->ctx));
    for (struct op *op = c->ops; op != NULL; op = op->next) {
        if (op->comm != comm) continue;
        send_peers |= op->send_peers;
        recv_peers |= op->recv_peers;
    }
    TRY(transport_connect(comm, send_peers, recv_peers));
    for (struct op *op = c->ops; op != NULL; op = op->next) {
        if (op->comm == comm) register_captured(op);
        if (op->comm == comm && is_p2p(op)) TRY(offer_direct(op));
    }
    for (struct op *op = c->ops; op != NULL; op = op->next) {
        if (op->comm == comm) TRY(is_p2p(op) ? accept_direct(op) : agree_on_direct(op));
    }
    return ncclSuccess;
}

/* The communicators of the group, in the order of their first operation. */
static int communicators(struct op *ops, struct ncclComm **comms) {
    int n = 0;
    for (struct op *op = ops; op != NULL; op = op->next) {
        int i = 0;
        while (i < n && comms[i] != op->comm) i++;
        if (i == n && n < MAX_RANKS) comms[n++] = op->comm;
    }
    return n;
}

/* ---- launches ---- */

static bool capturing(CUstream stream) {
    int status = 0;
    return driver.cuStreamIsCapturing != NULL && driver.cuStreamIsCapturing(stream, &status) == CUDA_SUCCESS &&
           status != 0;
}

/* As CUDA names them: CU_LAUNCH_PARAM_*. */
#define LAUNCH_PARAM_END ((void *)0)
#define LAUNCH_PARAM_BUFFER ((void *)1)
#define LAUNCH_PARAM_SIZE ((void *)2)

static ncclResult_t launch(struct ncclComm *comm, CUstream stream, CUfunction function, struct works *works, uint32_t n) {
    struct kernel_args args = {.dev_comm = comm->dev_comm, .dev = comm->dev, .n = n, .works = *works};
    size_t size = offsetof(struct kernel_args, works) + n * sizeof works->list[0];
    void *extra[] = {LAUNCH_PARAM_BUFFER, &args, LAUNCH_PARAM_SIZE, &size, LAUNCH_PARAM_END};
    bool captured = capturing(stream);
    /* Kernels of one communicator share its steps: they run one after another, on whatever streams. */
    if (!captured && comm->launched && comm->last_stream != stream) CU(cuStreamWaitEvent(stream, comm->last_launch, 0));
    if (function == collective_function) {
        CUlaunchConfig config = {.gridDimX = (unsigned)comm->channels,
                                 .gridDimY = 1,
                                 .gridDimZ = 1,
                                 .blockDimX = 512,
                                 .blockDimY = 1,
                                 .blockDimZ = 1,
                                 .hStream = stream};
        CU(cuLaunchKernelEx(&config, function, NULL, extra));
    } else { /* as where the driver is older than 11.8 */
        CU(cuLaunchKernel(function, (unsigned)comm->channels, 1, 1, 512, 1, 1, 0, stream, NULL, extra));
    }
    if (!captured) {
        CU(cuEventRecord(comm->last_launch, stream));
        comm->last_stream = stream;
        comm->launched = true;
    }
    return ncclSuccess;
}

/* Sends to the own rank need as many receives from it in the same kernel. */
static ncclResult_t check_self(const struct ncclComm *comm, const struct works *works, uint32_t n) {
    int open = 0;
    for (uint32_t i = 0; i < n; i++) {
        if (works->list[i].peer == comm->rank) open += works->list[i].kind == SEND ? 1 : -1;
    }
    return open == 0 ? ncclSuccess : fail(ncclInvalidUsage, "sends to and receives from the own rank don't match");
}

/* All sends and receives of a communicator go side by side, on the first one's stream. */
static ncclResult_t launch_p2p(struct ncclComm *comm, struct op *ops) {
    struct works works;
    uint32_t n = 0;
    CUstream stream = NULL;
    memset(&works, 0, sizeof works);
    for (struct op *op = ops; op != NULL; op = op->next) {
        if (op->comm != comm || !is_p2p(op)) continue;
        if (n == MAX_WORKS) return fail(ncclInvalidUsage, "more than %d sends and receives in a group", MAX_WORKS);
        if (n == 0) stream = op->stream;
        works.list[n++] = op->work;
    }
    if (n == 0) return ncclSuccess;
    TRY(check_self(comm, &works, n));
    bool captured = capturing(stream);
    for (struct op *op = ops; op != NULL && !captured; op = op->next) {
        if (op->comm != comm || !is_p2p(op) || op->stream == stream) continue;
        CUevent before;
        CU(cuEventCreate(&before, CU_EVENT_DISABLE_TIMING));
        CUresult result = driver.cuEventRecord(before, op->stream);
        if (result == CUDA_SUCCESS) result = driver.cuStreamWaitEvent(stream, before, 0);
        driver.cuEventDestroy(before);
        if (result != CUDA_SUCCESS) return fail(ncclUnhandledCudaError, "order of streams: CUDA error %d", result);
    }
    TRY(launch(comm, stream, p2p_function, &works, n));
    for (struct op *op = ops; op != NULL && !captured; op = op->next) {
        if (op->comm == comm && is_p2p(op) && op->stream != stream) {
            CU(cuStreamWaitEvent(op->stream, comm->last_launch, 0));
        }
    }
    return ncclSuccess;
}

static ncclResult_t launch_all(struct ncclComm *comm, struct op *ops) {
    struct works works;
    CU(cuCtxSetCurrent(comm->ctx));
    memset(&works, 0, sizeof works);
    for (struct op *op = ops; op != NULL; op = op->next) {
        if (op->comm != comm || is_p2p(op)) continue;
        works.list[0] = op->work;
        TRY(launch(comm, op->stream, collective_function, &works, 1));
    }
    return launch_p2p(comm, ops);
}

static ncclResult_t run_ops(struct op *ops) {
    struct ncclComm *comms[MAX_RANKS];
    struct job jobs[MAX_RANKS];
    struct connecting connecting[MAX_RANKS];
    int n = communicators(ops, comms);
    for (int i = 0; i < n; i++) {
        connecting[i] = (struct connecting){.comm = comms[i], .ops = ops};
        jobs[i] = (struct job){.run = connect_main, .arg = &connecting[i]};
    }
    TRY(run_jobs(jobs, n));
    for (int i = 0; i < n; i++) TRY(launch_all(comms[i], ops));
    return ncclSuccess;
}

/* ---- the interface ---- */

ncclResult_t ncclGroupStart(void) {
    group.depth++;
    return ncclSuccess;
}

void group_discard(void) {
    group.depth = 0;
    while (group.ops != NULL) {
        struct op *op = group.ops;
        group.ops = op->next;
        free(op);
    }
    while (group.inits != NULL) {
        struct comm_init *init = group.inits;
        group.inits = init->next;
        free(init->comm);
        free(init);
    }
}

ncclResult_t ncclGroupEnd(void) {
    if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupEnd without ncclGroupStart");
    if (--group.depth > 0) return ncclSuccess;
    struct comm_init *inits = group.inits;
    struct op *ops = group.ops;
    group.inits = NULL;
    group.ops = NULL;
    ncclResult_t result = ncclSuccess;
    if (inits != NULL) result = run_inits(inits);
    if (ops != NULL && result == ncclSuccess) {
        CUcontext saved = NULL;
        driver.cuCtxGetCurrent(&saved);
        result = run_ops(ops);
        driver.cuCtxSetCurrent(saved);
    }
    while (ops != NULL) {
        struct op *next = ops->next;
        free(ops);
        ops = next;
    }
    return result;
}

static ncclResult_t enqueue(struct op op) {
    struct op *copy = malloc(sizeof *copy);
    if (copy == NULL) return fail(ncclSystemError, "no host memory");
    *copy = op;
    copy->captured = capturing(op.stream);
    TRY(ncclGroupStart());
    struct op **end = &group.ops;
    while (*end != NULL) end = &(*end)->next;
    *end = copy;
    return ncclGroupEnd();
}

static bool can_sum(int dtype) {
    return dtype <= ncclUint64 || dtype == ncclFloat32 || dtype == ncclFloat64;
}

static ncclResult_t check(const struct ncclComm *comm, const char *name, size_t count, int dtype, int peer,
                          const void *needed) {
    if (comm == NULL) return fail(ncclInvalidArgument, "%s: no communicator", name);
    if (dtype_size(dtype) == 0) return fail(ncclInvalidArgument, "%s: type %d", name, dtype);
    if (peer < 0 || peer >= comm->nranks) return fail(ncclInvalidArgument, "%s: rank %d of %d", name, peer, comm->nranks);
    if (needed == NULL && count > 0) return fail(ncclInvalidArgument, "%s: no buffer", name);
    return ncclSuccess;
}

static ncclResult_t collective(struct ncclComm *comm, CUstream stream, enum work_kind kind, const void *send, void *recv,
                               size_t count, int dtype, int root) {
    rank_set all = comm->nranks == MAX_RANKS ? ~(rank_set)0 : RANK(comm->nranks) - 1;
    struct op op = {.comm = comm,
                    .stream = stream,
                    .work = {.kind = (uint8_t)kind,
                             .dtype = (uint8_t)dtype,
                             .peer = root,
                             .send = (uintptr_t)send,
                             .recv = (uintptr_t)recv,
                             .count = count},
                    .send_peers = all,
                    .recv_peers = all};
    uint64_t unused;
    size_t bytes = count * dtype_size(dtype);
    if (kind == ALL_GATHER && window_find(comm, send, bytes, &unused) &&
        window_find(comm, recv, bytes * (size_t)comm->nranks, &op.work.remote)) {
        op.work.kind = WINDOW_ALL_GATHER;
        op.send_peers = op.recv_peers = 0;
    }
    return enqueue(op);
}

static ncclResult_t check_sum(const char *name, int dtype, ncclRedOp_t op) {
    if (op != ncclSum || !can_sum(dtype)) return fail(ncclInvalidArgument, "%s: only sums, not of type %d", name, dtype);
    return ncclSuccess;
}

ncclResult_t ncclAllReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                           ncclComm_t comm, CUstream stream) {
    TRY(check(comm, "ncclAllReduce", count, datatype, 0, recvbuff));
    TRY(check_sum("ncclAllReduce", datatype, op));
    return collective(comm, stream, ALL_REDUCE, sendbuff, recvbuff, count, datatype, 0);
}

ncclResult_t ncclBroadcast(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                           ncclComm_t comm, CUstream stream) {
    TRY(check(comm, "ncclBroadcast", count, datatype, root, recvbuff));
    return collective(comm, stream, BROADCAST, sendbuff, recvbuff, count, datatype, root);
}

ncclResult_t ncclReduce(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclRedOp_t op,
                        int root, ncclComm_t comm, CUstream stream) {
    TRY(check(comm, "ncclReduce", count, datatype, root, sendbuff));
    TRY(check_sum("ncclReduce", datatype, op));
    return collective(comm, stream, REDUCE, sendbuff, recvbuff, count, datatype, root);
}

ncclResult_t ncclAllGather(const void *sendbuff, void *recvbuff, size_t sendcount, ncclDataType_t datatype,
                           ncclComm_t comm, CUstream stream) {
    TRY(check(comm, "ncclAllGather", sendcount, datatype, 0, recvbuff));
    return collective(comm, stream, ALL_GATHER, sendbuff, recvbuff, sendcount, datatype, 0);
}

ncclResult_t ncclReduceScatter(const void *sendbuff, void *recvbuff, size_t recvcount, ncclDataType_t datatype,
                               ncclRedOp_t op, ncclComm_t comm, CUstream stream) {
    TRY(check(comm, "ncclReduceScatter", recvcount, datatype, 0, recvbuff));
    TRY(check_sum("ncclReduceScatter", datatype, op));
    return collective(comm, stream, REDUCE_SCATTER, sendbuff, recvbuff, recvcount, datatype, 0);
}

static ncclResult_t p2p(struct ncclComm *comm, CUstream stream, enum work_kind kind, const void *buff, size_t count,
                        int dtype, int peer) {
    struct op op = {.comm = comm,
                    .stream = stream,
                    .work = {.kind = (uint8_t)kind,
                             .dtype = (uint8_t)dtype,
                             .peer = peer,
                             .send = kind == SEND ? (uintptr_t)buff : 0,
                             .recv = kind == RECV ? (uintptr_t)buff : 0,
                             .count = count}};
    if (kind == SEND) {
        op.send_peers = RANK(peer);
    } else {
        op.recv_peers = RANK(peer);
    }
    struct registration *reg = registration_find(comm, buff, count * dtype_size(dtype));
    if (reg != NULL && peer != comm->rank && count > 0) {
        op.work.direct = 1;
        op.share = kind == RECV ? reg : NULL;
    }
    return enqueue(op);
}

ncclResult_t ncclSend(const void *sendbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      CUstream stream) {
    TRY(check(comm, "ncclSend", count, datatype, peer, sendbuff));
    return p2p(comm, stream, SEND, sendbuff, count, datatype, peer);
}

ncclResult_t ncclRecv(void *recvbuff, size_t count, ncclDataType_t datatype, int peer, ncclComm_t comm,
                      CUstream stream) {
    TRY(check(comm, "ncclRecv", count, datatype, peer, recvbuff));
    return p2p(comm, stream, RECV, recvbuff, count, datatype, peer);
}

ncclResult_t ncclBcast(void *buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm, CUstream stream) {
    return ncclBroadcast(buff, buff, count, datatype, root, comm, stream);
}

static ncclResult_t send_and_receive(const void *send, void *recv, size_t count, int dtype, int peer, bool sends,
                                     bool receives, struct ncclComm *comm, CUstream stream) {
    size_t bytes = count * dtype_size(dtype);
    if (sends) TRY(ncclSend(send, count, (ncclDataType_t)dtype, peer, comm, stream));
    if (receives) TRY(ncclRecv((char *)recv + (size_t)peer * bytes, count, (ncclDataType_t)dtype, peer, comm, stream));
    return ncclSuccess;
}

ncclResult_t ncclAlltoAll(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, ncclComm_t comm,
                          CUstream stream) {
    TRY(check(comm, "ncclAlltoAll", count, datatype, 0, recvbuff));
    size_t bytes = count * dtype_size(datatype);
    TRY(ncclGroupStart());
    for (int peer = 0; peer < comm->nranks; peer++) {
        const char *send = (const char *)sendbuff + (size_t)peer * bytes;
        TRY(send_and_receive(send, recvbuff, count, datatype, peer, true, true, comm, stream));
    }
    return ncclGroupEnd();
}

ncclResult_t ncclGather(const void *sendbuff, void *recvbuff, size_t count, ncclDataType_t datatype, int root,
                        ncclComm_t comm, CUstream stream) {
    TRY(check(comm, "ncclGather", count, datatype, root, sendbuff));
    TRY(ncclGroupStart());
    for (int peer = 0; peer < comm->nranks; peer++)
        TRY(send_and_receive(sendbuff, recvbuff, count, datatype, peer, peer == root, comm->rank == root, comm, stream));
    return ncclGroupEnd();
}

/* Does nothing of what the group holds. */
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t *simInfo) {
    if (group.depth == 0) return fail(ncclInvalidUsage, "ncclGroupSimulateEnd without ncclGroupStart");
    group_discard();
    if (simInfo != NULL) simInfo->estimatedTime = 0;
    return ncclSuccess;
}

ncclResult_t ncclStandinVerify(ncclComm_t comm, CUstream stream) {
    struct works none;
    CUcontext saved = NULL;
    if (comm == NULL) return fail(ncclInvalidArgument, "ncclStandinVerify: no communicator");
    memset(&none, 0, sizeof none);
    driver.cuCtxGetCurrent(&saved);
    CU(cuCtxSetCurrent(comm->ctx));
    ncclResult_t result = launch(comm, stream, verify_function, &none, 0);
    driver.cuCtxSetCurrent(saved);
    return result;
}
