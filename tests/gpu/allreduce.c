/*
 * A plain C program that knows amem only as AMem's users do: it is linked with
 * libnccl.so.2, finds ncclPause and ncclResume by name, and runs with
 * LD_PRELOAD=libamem_hook.so AMEM_ENABLE=1. It verifies contents and the
 * memory that comes back to the device.
 *
 *   allreduce RANKS COMMUNICATORS CYCLES MAX_FLOATS
 *
 * One process a GPU, forked before anything of CUDA. No CUDA headers: the few
 * declarations needed stand below. With CYCLES 0 it runs on stock NCCL too.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <execinfo.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MAX_RANKS 16
#define MAX_COMMS 64
#define SLACK (32ull << 20)
#define POISON (-1.0f)

typedef struct ncclComm *ncclComm_t;
typedef struct CUstream_st *stream_t;
typedef struct {
    char internal[128];
} ncclUniqueId;
enum { NCCL_FLOAT = 7, NCCL_SUM = 0 };

int ncclGetUniqueId(ncclUniqueId *id);
int ncclCommInitRank(ncclComm_t *comm, int ranks, ncclUniqueId id, int rank);
int ncclCommDestroy(ncclComm_t comm);
int ncclAllReduce(const void *send, void *recv, size_t count, int type, int op, ncclComm_t comm, stream_t stream);
const char *ncclGetErrorString(int result);
const char *ncclGetLastError(ncclComm_t comm);

static struct {
    int (*Init)(unsigned);
    int (*DeviceGet)(int *, int);
    int (*DevicePrimaryCtxRetain)(void **, int);
    int (*CtxSetCurrent)(void *);
    int (*CtxSynchronize)(void);
    int (*MemGetInfo)(size_t *, size_t *);
    int (*MemAlloc)(unsigned long long *, size_t);
    int (*MemcpyHtoD)(unsigned long long, const void *, size_t);
    int (*MemcpyDtoH)(void *, unsigned long long, size_t);
    int (*StreamCreate)(stream_t *, unsigned);
    int (*StreamSynchronize)(stream_t);
} cu;

static struct shared {
    pthread_barrier_t barrier;
    ncclUniqueId ids[MAX_COMMS];
    unsigned seed;
    double pause[MAX_RANKS], resume[MAX_RANKS], connect[MAX_RANKS];
    unsigned long long active[MAX_RANKS], given[MAX_RANKS], destroyed[MAX_RANKS];
    char error[MAX_RANKS][400];
} *shared;

static int rank, ranks;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* Ends this rank; the parent then ends the others, which may wait for it in NCCL. */
__attribute__((noreturn, format(printf, 1, 2))) static void fail(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(shared->error[rank], sizeof(shared->error[rank]), format, args);
    va_end(args);
    fprintf(stderr, "rank %d: %s\n", rank, shared->error[rank]);
    _exit(1);
}

#define CU(call)                                                                   \
    do {                                                                           \
        int result_ = cu.call;                                                     \
        if (result_ != 0)                                                          \
            fail("line %d: %s: CUDA error %d", __LINE__, #call, result_);          \
    } while (0)
#define NCCL(call)                                                                 \
    do {                                                                           \
        int result_ = (call);                                                      \
        if (result_ != 0)                                                          \
            fail("line %d: %s: %s: %s", __LINE__, #call, ncclGetErrorString(result_), ncclGetLastError(NULL)); \
    } while (0)

static void meet(void)
{
    pthread_barrier_wait(&shared->barrier);
}

/* On the main thread of each rank, when the launcher has lost patience. */
static void print_stack(int number)
{
    void *frames[64];
    (void)number;
    backtrace_symbols_fd(frames, backtrace(frames, 64), STDERR_FILENO);
}

static void load_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        fail("%s", dlerror());
    static const struct {
        const char *name;
        void *slot;
    } table[] = {
        {"cuInit", &cu.Init},
        {"cuDeviceGet", &cu.DeviceGet},
        {"cuDevicePrimaryCtxRetain", &cu.DevicePrimaryCtxRetain},
        {"cuCtxSetCurrent", &cu.CtxSetCurrent},
        {"cuCtxSynchronize", &cu.CtxSynchronize},
        {"cuMemGetInfo_v2", &cu.MemGetInfo},
        {"cuMemAlloc_v2", &cu.MemAlloc},
        {"cuMemcpyHtoD_v2", &cu.MemcpyHtoD},
        {"cuMemcpyDtoH_v2", &cu.MemcpyDtoH},
        {"cuStreamCreate", &cu.StreamCreate},
        {"cuStreamSynchronize", &cu.StreamSynchronize},
    };
    for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
        void *symbol = dlsym(library, table[i].name);
        if (symbol == NULL)
            fail("the driver has no %s", table[i].name);
        memcpy(table[i].slot, &symbol, sizeof(symbol));
    }
}

static unsigned long long used(void)
{
    size_t available, total;
    CU(CtxSynchronize());
    CU(MemGetInfo(&available, &total));
    return total - available;
}

/* What a rank contributes at index i; small integers, so that sums are exact. */
static float value(uint64_t seed, int member, size_t i)
{
    uint64_t x = seed ^ ((uint64_t)member << 40) ^ (i * 0x9E3779B97F4A7C15ull);
    x ^= x >> 31;
    x *= 0xD6E8FEB86659FD93ull;
    x ^= x >> 29;
    return (float)(x & 0xFFFF);
}

struct buffers {
    unsigned long long source, output;
    float *host;
    size_t count;
    stream_t stream;
};

static void verify(ncclComm_t comm, struct buffers *b, size_t count, int cycle)
{
    static uint64_t round;
    uint64_t seed = ((uint64_t)shared->seed << 20) + ++round;
    for (size_t i = 0; i < count; i++)
        b->host[i] = POISON;
    CU(MemcpyHtoD(b->output, b->host, count * sizeof(float)));
    for (size_t i = 0; i < count; i++)
        b->host[i] = value(seed, rank, i);
    CU(MemcpyHtoD(b->source, b->host, count * sizeof(float)));
    /* The copy of pageable memory may still be on its way, and the stream waits for no other. */
    CU(CtxSynchronize());
    NCCL(ncclAllReduce((void *)(uintptr_t)b->source, (void *)(uintptr_t)b->output, count, NCCL_FLOAT, NCCL_SUM, comm,
                       b->stream));
    CU(StreamSynchronize(b->stream));
    CU(MemcpyDtoH(b->host, b->output, count * sizeof(float)));
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (int member = 0; member < ranks; member++)
            sum += value(seed, member, i);
        if (b->host[i] != sum)
            fail("all-reduce of %zu floats, cycle %d: element %zu is %g, not %g", count, cycle, i,
                 (double)b->host[i], (double)sum);
    }
}

static void run_rank(int comms, int cycles, size_t max_floats)
{
    static const size_t sizes[] = {4, 1000, 33333, 1 << 18, 1 << 21, 1 << 24};
    struct buffers b = {.count = max_floats};
    ncclComm_t comm[MAX_COMMS];
    void *context;
    int device;

    load_driver();
    CU(Init(0));
    CU(DeviceGet(&device, rank));
    CU(DevicePrimaryCtxRetain(&context, device));
    CU(CtxSetCurrent(context));
    CU(StreamCreate(&b.stream, 1));
    CU(MemAlloc(&b.source, max_floats * sizeof(float)));
    CU(MemAlloc(&b.output, max_floats * sizeof(float)));
    b.host = malloc(max_floats * sizeof(float));
    if (b.host == NULL)
        fail("no host memory");

    double started = now();
    if (rank == 0)
        for (int i = 0; i < comms; i++)
            NCCL(ncclGetUniqueId(&shared->ids[i]));
    meet();
    for (int i = 0; i < comms; i++)
        NCCL(ncclCommInitRank(&comm[i], ranks, shared->ids[i], rank));
    for (int i = 0; i < comms; i++)
        verify(comm[i], &b, max_floats < sizes[3] ? max_floats : sizes[3], 0);
    shared->connect[rank] = now() - started;

    int (*pause_nccl)(ncclComm_t *) = NULL, (*resume_nccl)(ncclComm_t *) = NULL;
    if (cycles > 0) {
        *(void **)&pause_nccl = dlsym(RTLD_DEFAULT, "ncclPause");
        *(void **)&resume_nccl = dlsym(RTLD_DEFAULT, "ncclResume");
        if (pause_nccl == NULL || resume_nccl == NULL)
            fail("ncclPause and ncclResume are not there: LD_PRELOAD libamem_hook.so");
    }
    for (int cycle = 1; cycle <= cycles; cycle++) {
        CU(CtxSynchronize());
        meet();
        unsigned long long before = used();
        meet();
        double t = now();
        NCCL(pause_nccl(NULL));
        shared->pause[rank] = now() - t;
        meet();
        unsigned long long paused = used();
        meet();
        t = now();
        NCCL(resume_nccl(NULL));
        shared->resume[rank] = now() - t;
        meet();
        unsigned long long after = used();
        meet();
        if (after > before + SLACK || before > after + SLACK)
            fail("cycle %d: %llu bytes in use before the pause, %llu after the resume", cycle, before, after);
        shared->active[rank] = before;
        shared->given[rank] = before > paused ? before - paused : 0;
        for (int i = 0; i < comms; i++) {
            size_t count = sizes[(size_t)(cycle + i) % (sizeof(sizes) / sizeof(sizes[0]))];
            verify(comm[i], &b, count < max_floats ? count : max_floats, cycle);
        }
    }
    CU(CtxSynchronize());
    meet();
    unsigned long long before = used();
    meet();
    for (int i = 0; i < comms; i++)
        NCCL(ncclCommDestroy(comm[i]));
    meet();
    usleep(100000);
    unsigned long long after = used();
    shared->destroyed[rank] = before > after ? before - after : 0;
    /* Destroying the communicators shows what NCCL held: a pause must give back as much. */
    if (cycles > 0 && (double)(shared->given[rank] + SLACK) < 0.99 * (double)shared->destroyed[rank])
        fail("a pause gave back %llu bytes, destroying the communicators %llu", shared->given[rank],
             shared->destroyed[rank]);
    if (cycles > 0 && shared->given[rank] == 0)
        fail("the pause gave nothing back");
    meet();
}

static void write_result(int comms, int cycles)
{
    const char *path = getenv("GPU_STEP_RESULT");
    FILE *file = path != NULL ? fopen(path, "a") : stdout;
    if (file == NULL)
        return;
    double pause = 0, resume = 0, connect = 0;
    const char *error = "";
    for (int i = 0; i < ranks; i++) {
        if (shared->pause[i] > pause)
            pause = shared->pause[i];
        if (shared->resume[i] > resume)
            resume = shared->resume[i];
        if (shared->connect[i] > connect)
            connect = shared->connect[i];
        if (shared->error[i][0] != '\0' && error[0] == '\0')
            error = shared->error[i];
    }
    fprintf(file, "{\"communicators\": %d, \"cycles\": %d, \"connect_s\": %.6f", comms, cycles, connect);
    if (cycles > 0 && shared->destroyed[0] > 0)
        fprintf(file, ", \"pause_s\": %.6f, \"resume_s\": %.6f, \"nccl_bytes\": %llu, \"given_back\": %.6f", pause,
                resume, shared->destroyed[0], (double)shared->given[0] / (double)shared->destroyed[0]);
    if (error[0] != '\0') {
        fputs(", \"error\": \"", file);
        for (const char *c = error; *c != '\0'; c++)
            fputc(*c == '"' || *c == '\\' || *c < ' ' ? ' ' : *c, file);
        fputc('"', file);
    }
    fputs("}\n", file);
    if (file != stdout)
        fclose(file);
}

int main(int argc, char **argv)
{
    if (argc != 5) {
        fprintf(stderr, "usage: %s RANKS COMMUNICATORS CYCLES MAX_FLOATS\n", argv[0]);
        return 2;
    }
    ranks = atoi(argv[1]);
    int comms = atoi(argv[2]), cycles = atoi(argv[3]);
    size_t max_floats = strtoull(argv[4], NULL, 10);
    if (ranks < 1 || ranks > MAX_RANKS || comms < 1 || comms > MAX_COMMS || max_floats < 4)
        return 2;
    /* Ranks that outlive the launcher would keep the GPUs. */
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGUSR1, print_stack);
    shared = mmap(NULL, sizeof(*shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 2;
    pthread_barrierattr_t attributes;
    pthread_barrierattr_init(&attributes);
    pthread_barrierattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_barrier_init(&shared->barrier, &attributes, (unsigned)ranks);
    shared->seed = (unsigned)(now() * 1e6) ^ (unsigned)getpid();

    pid_t pids[MAX_RANKS];
    for (rank = 0; rank < ranks; rank++) {
        pids[rank] = fork();
        if (pids[rank] == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            run_rank(comms, cycles, max_floats);
            exit(0);
        }
    }
    int failed = 0;
    for (int left = ranks; left > 0; left--) {
        int status;
        pid_t pid = wait(&status);
        if (status != 0 && !failed) {
            failed = 1;
            for (int i = 0; i < ranks; i++) {
                if (pids[i] == pid && WIFSIGNALED(status) && shared->error[i][0] == '\0')
                    snprintf(shared->error[i], sizeof(shared->error[i]), "rank %d was killed by signal %d", i,
                             WTERMSIG(status));
                if (pids[i] > 0 && pids[i] != pid)
                    kill(pids[i], SIGKILL);
            }
        }
    }
    write_result(comms, cycles);
    return failed;
}
