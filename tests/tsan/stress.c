/*
 * Threads that enable amem, load NCCL, connect, allocate, launch, pause, resume
 * and ask for statistics at the same time, through the hook, for
 * ThreadSanitizer. What the devices compute is checked too.
 *
 *   stress SECONDS
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "../../golib/hook/amem.h"
#include "../nccl/nccl_standin.h"

enum { ENABLERS = 4, CONNECTORS = 2, LAUNCHERS = 2, ALLOCATORS = 2, PAUSERS = 2, READERS = 2, COUNT = 3000 };

static atomic_bool ending;
static atomic_int connected, refused, launched, allocated, paused, read_statistics;

static void die(const char *format, ...) __attribute__((format(printf, 1, 2), noreturn));
static void die(const char *format, ...) {
    va_list args;
    va_start(args, format);
    vfprintf(stderr, format, args);
    va_end(args);
    fputc('\n', stderr);
    _exit(1);
}

static struct {
    CUresult (*Init)(unsigned);
    CUresult (*DevicePrimaryCtxRetain)(CUcontext *, CUdevice);
    CUresult (*CtxSetCurrent)(CUcontext);
    CUresult (*MemAlloc)(CUdeviceptr *, size_t);
    CUresult (*MemFree)(CUdeviceptr);
    CUresult (*MemcpyHtoD)(CUdeviceptr, const void *, size_t);
    CUresult (*MemcpyDtoH)(void *, CUdeviceptr, size_t);
    CUresult (*StreamCreate)(CUstream *, unsigned);
    CUresult (*StreamSynchronize)(CUstream);
    CUresult (*StreamDestroy)(CUstream);
} cuda;

static struct {
    ncclResult_t (*CommInitAll)(ncclComm_t *, int, const int *);
    ncclResult_t (*CommDestroy)(ncclComm_t);
    ncclResult_t (*MemAlloc)(void **, size_t);
    ncclResult_t (*MemFree)(void *);
    ncclResult_t (*GroupStart)(void);
    ncclResult_t (*GroupEnd)(void);
    ncclResult_t (*AllReduce)(const void *, void *, size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, CUstream);
    const char *(*GetLastError)(ncclComm_t);
} nccl;

#define CUDA(call)                                                            \
    do {                                                                      \
        CUresult result_ = cuda.call;                                         \
        if (result_) die("%s: CUDA error %d", #call, (int)result_);           \
    } while (0)
#define NCCL(call)                                                            \
    do {                                                                      \
        ncclResult_t result_ = nccl.call;                                     \
        if (result_) die("%s: NCCL error %d: %s", #call, (int)result_, nccl.GetLastError(NULL)); \
    } while (0)

static void *symbol(void *library, const char *name) {
    void *function = dlsym(library, name);
    if (!function) die("no %s", name);
    return function;
}

static void find_cuda(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!library) die("%s", dlerror());
#define FIND(name, text) *(void **)&cuda.name = symbol(library, text)
    FIND(Init, "cuInit");
    FIND(DevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    FIND(CtxSetCurrent, "cuCtxSetCurrent");
    FIND(MemAlloc, "cuMemAlloc_v2");
    FIND(MemFree, "cuMemFree_v2");
    FIND(MemcpyHtoD, "cuMemcpyHtoD_v2");
    FIND(MemcpyDtoH, "cuMemcpyDtoH_v2");
    FIND(StreamCreate, "cuStreamCreate");
    FIND(StreamSynchronize, "cuStreamSynchronize");
    FIND(StreamDestroy, "cuStreamDestroy_v2");
#undef FIND
}

static void find_nccl(void) {
    void *library = dlopen("libnccl.so.2", RTLD_NOW | RTLD_GLOBAL);
    if (!library) die("%s", dlerror());
#define FIND(name) *(void **)&nccl.name = symbol(library, "nccl" #name)
    FIND(CommInitAll);
    FIND(CommDestroy);
    FIND(MemAlloc);
    FIND(MemFree);
    FIND(GroupStart);
    FIND(GroupEnd);
    FIND(AllReduce);
    FIND(GetLastError);
#undef FIND
}

/*
 * A communicator must not be half connected, nor a collective of several
 * devices half launched, when a pause begins: those that do so and those that
 * pause take turns, with any number of each at a time. All else has no turns.
 */
static struct {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int inside[2];
    int turn;
} room = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, {0, 0}, 0};

enum { LAUNCHING, PAUSING };

static void enter(int side) {
    pthread_mutex_lock(&room.mutex);
    while (room.inside[!side] || (room.inside[side] && room.turn != side)) pthread_cond_wait(&room.changed, &room.mutex);
    room.inside[side]++;
    pthread_mutex_unlock(&room.mutex);
}

static void leave(int side) {
    pthread_mutex_lock(&room.mutex);
    room.inside[side]--;
    room.turn = !side;
    pthread_cond_broadcast(&room.changed);
    pthread_mutex_unlock(&room.mutex);
}

static CUstream open_device(int dev) {
    CUcontext ctx;
    CUstream stream;
    CUDA(DevicePrimaryCtxRetain(&ctx, dev));
    CUDA(CtxSetCurrent(ctx));
    CUDA(StreamCreate(&stream, 1));
    return stream;
}

static void make_current(int dev) {
    CUcontext ctx;
    CUDA(DevicePrimaryCtxRetain(&ctx, dev));
    CUDA(CtxSetCurrent(ctx));
}

/* An all-reduce over n devices in this thread. False: amem has refused it. */
static int reduce(ncclComm_t *comms, CUstream *streams, const int *devices, int n, int seed) {
    CUdeviceptr send[2], receive[2];
    static __thread int data[COUNT];
    int refusals = 0;
    for (int i = 0; i < n; i++) {
        make_current(devices[i]);
        CUDA(MemAlloc(&send[i], sizeof data));
        CUDA(MemAlloc(&receive[i], sizeof data));
        for (int k = 0; k < COUNT; k++) data[k] = seed * 7 + i * 1000 + k;
        CUDA(MemcpyHtoD(send[i], data, sizeof data));
    }
    NCCL(GroupStart());
    for (int i = 0; i < n; i++)
        refusals += nccl.AllReduce((void *)(uintptr_t)send[i], (void *)(uintptr_t)receive[i], COUNT, ncclInt32, ncclSum,
                                   comms[i], streams[i]) != ncclSuccess;
    refusals += nccl.GroupEnd() != ncclSuccess;
    for (int i = 0; i < n; i++) {
        make_current(devices[i]);
        CUDA(StreamSynchronize(streams[i]));
        if (!refusals) {
            CUDA(MemcpyDtoH(data, receive[i], sizeof data));
            for (int k = 0; k < COUNT; k++) {
                int want = n * (seed * 7 + k) + (n == 2 ? 1000 : 0);
                if (data[k] != want) die("element %d of %d devices is %d, not %d", k, n, data[k], want);
            }
        }
        CUDA(MemFree(send[i]));
        CUDA(MemFree(receive[i]));
    }
    return !refusals;
}

/* Connects two devices, reduces, and destroys, again and again. */
static void *connect(void *arg) {
    int first = 2 * (int)(intptr_t)arg;
    int devices[2] = {first, first + 1};
    CUstream streams[2];
    for (int i = 0; i < 2; i++) streams[i] = open_device(devices[i]);
    for (int round = 0; !ending; round++) {
        ncclComm_t comms[2];
        make_current(devices[0]);
        enter(LAUNCHING);
        NCCL(CommInitAll(comms, 2, devices));
        if (!reduce(comms, streams, devices, 2, round)) refused++; /* which connects the two */
        leave(LAUNCHING);
        for (int i = 0; i < 3; i++) {
            enter(LAUNCHING);
            if (!reduce(comms, streams, devices, 2, round + i)) refused++;
            leave(LAUNCHING);
        }
        for (int i = 0; i < 2; i++) {
            make_current(devices[i]);
            NCCL(CommDestroy(comms[i]));
        }
        connected++;
    }
    return NULL;
}

/* Launches on one device at any time: amem refuses while paused. */
static void *launch(void *arg) {
    int device = 4 + (int)(intptr_t)arg;
    CUstream stream = open_device(device);
    ncclComm_t comm;
    enter(LAUNCHING);
    NCCL(CommInitAll(&comm, 1, &device));
    if (!reduce(&comm, &stream, &device, 1, 0)) refused++;
    leave(LAUNCHING);
    for (int round = 0; !ending; round++) {
        if (reduce(&comm, &stream, &device, 1, round))
            launched++;
        else
            refused++;
    }
    NCCL(CommDestroy(comm));
    return NULL;
}

static void *allocate(void *arg) {
    open_device(6 + (int)(intptr_t)arg);
    static __thread unsigned char data[1 << 16], back[1 << 16];
    while (!ending) {
        void *memory[3];
        for (int i = 0; i < 3; i++) {
            NCCL(MemAlloc(&memory[i], sizeof data << i));
            memset(data, 17 * i + 1, sizeof data);
            CUDA(MemcpyHtoD((CUdeviceptr)(uintptr_t)memory[i], data, sizeof data));
        }
        for (int i = 0; i < 3; i++) {
            memset(data, 17 * i + 1, sizeof data);
            CUDA(MemcpyDtoH(back, (CUdeviceptr)(uintptr_t)memory[i], sizeof back));
            if (memcmp(data, back, sizeof data)) die("a user's memory has changed");
            NCCL(MemFree(memory[i]));
        }
        allocated++;
    }
    return NULL;
}

static void *pause_resume(void *arg) {
    (void)arg;
    while (!ending) {
        enter(PAUSING);
        if (amem_pause("nccl") != AMEM_OK) die("pause: %s", amem_last_error());
        leave(PAUSING);
        usleep(2000);
        enter(PAUSING);
        if (amem_resume(NULL) != AMEM_OK) die("resume: %s", amem_last_error());
        leave(PAUSING);
        usleep(2000);
        paused++;
    }
    if (amem_resume(NULL) != AMEM_OK) die("resume: %s", amem_last_error());
    return NULL;
}

static void *read_all(void *arg) {
    (void)arg;
    while (!ending) {
        char *text = amem_stats_json();
        if (!text || text[0] != '{') die("no statistics");
        amem_free(text);
        int group;
        if (amem_get_group_id(&group) != AMEM_OK || group != 0) die("group");
        amem_state();
        if (amem_pause("no such tag") != AMEM_ERROR_INVALID_ARGUMENT) die("a tag that there is not");
        if (!*amem_last_error()) die("no error text");
        if (amem_enable() != AMEM_OK) die("enable: %s", amem_last_error());
        read_statistics++;
    }
    return NULL;
}

static void *enable(void *arg) {
    pthread_barrier_wait(arg);
    if (amem_enable() != AMEM_OK) die("enable: %s", amem_last_error());
    free(amem_stats_json());
    amem_state();
    return NULL;
}

static void *load(void *arg) {
    pthread_barrier_wait(arg);
    find_cuda();
    find_nccl();
    return NULL;
}

int main(int argc, char **argv) {
    pthread_t threads[32];
    int n = 0;
    pthread_barrier_t start;
    pthread_barrier_init(&start, NULL, ENABLERS + 1);
    for (int i = 0; i < ENABLERS; i++) pthread_create(&threads[n++], NULL, enable, &start);
    pthread_create(&threads[n++], NULL, load, &start);
    while (n) pthread_join(threads[--n], NULL);
    CUDA(Init(0));

#define START(count, function)                       \
    for (intptr_t i = 0; i < (count); i++)           \
        if (pthread_create(&threads[n++], NULL, function, (void *)i)) die("no thread")
    START(CONNECTORS, connect);
    START(LAUNCHERS, launch);
    START(ALLOCATORS, allocate);
    START(PAUSERS, pause_resume);
    START(READERS, read_all);
    sleep((unsigned)(argc > 1 ? atoi(argv[1]) : 10));
    ending = true;
    while (n) pthread_join(threads[--n], NULL);
    if (amem_state() != AMEM_STATE_ACTIVE) die("state %d at the end", (int)amem_state());
    printf("%d communicators, %d all-reduces and %d refused ones, %d allocations, %d pauses, %d statistics\n", connected,
           launched, refused, allocated, paused, read_statistics);
    if (!connected || !launched || !refused || !allocated || !paused || !read_statistics) die("something was never done");
    return 0;
}
