/*
 * A stand-in for PyTorch's libc10_cuda.so: it calls the CUDA runtime as that
 * does, through slots of its own, and caches memory as its allocator does.
 */
#include <pthread.h>
#include <stddef.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))

typedef struct {
    char bytes[64];
} ipc_handle;

int cudaSetDevice(int device);
int cudaDeviceCanAccessPeer(int *can, int device, int peer);
int cudaDeviceEnablePeerAccess(int peer, unsigned flags);
int cudaMalloc(void **ptr, size_t size);
int cudaFree(void *ptr);
int cudaGetLastError(void);
int cudaIpcGetMemHandle(ipc_handle *handle, void *ptr);
int cudaIpcOpenMemHandle(void **ptr, ipc_handle handle, unsigned flags);
int cudaIpcCloseMemHandle(void *ptr);
int cudaMemcpy(void *to, const void *from, size_t size, int kind);
int cudaMemcpyAsync(void *to, const void *from, size_t size, int kind, void *stream);
int cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size, void *stream);
int cudaMemset(void *to, int value, size_t size);
int cudaMemsetAsync(void *to, int value, size_t size, void *stream);
const char *cudaGetErrorString(int error);

/* Each answers the runtime's cudaError_t. */
API int c10_malloc(void **ptr, size_t size);
API int c10_free(void *ptr);
API int c10_share(ipc_handle *handle, void *ptr);
API int c10_open(void **ptr, const ipc_handle *handle);
API int c10_close(void *ptr);
API int c10_copy(void *to, const void *from, size_t size, int how);
API int c10_clear(void *to, size_t size, int how);
API const char *c10_error(int error);

/* As c10::cuda::get_p2p_access, which the first copy or kernel between two devices calls. */
API int c10_reach(int device, int peer);

/* Each answers memory as PyTorch's allocator does, or the error; the runtime has none left behind. */
API int c10_allocate(void **ptr, size_t size);
API int c10_deallocate(void *ptr);
API int c10_empty_cache(void);

int c10_malloc(void **ptr, size_t size) { return cudaMalloc(ptr, size); }
int c10_free(void *ptr) { return cudaFree(ptr); }

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct block {
    struct block *next;
    void *ptr;
    size_t size;
    int used;
} *blocks;

static int empty_cache(void) {
    for (struct block **at = &blocks; *at;) {
        struct block *block = *at;
        if (block->used) {
            at = &block->next;
            continue;
        }
        int error = cudaFree(block->ptr);
        if (error) return error;
        *at = block->next;
        free(block);
    }
    return 0;
}

static int allocate(void **ptr, size_t size) {
    for (struct block *block = blocks; block; block = block->next) {
        if (block->used || block->size != size) continue;
        block->used = 1;
        *ptr = block->ptr;
        return 0;
    }
    int error = cudaMalloc(ptr, size);
    if (error == 2) { /* cudaErrorMemoryAllocation */
        cudaGetLastError();
        error = empty_cache();
        if (!error) error = cudaMalloc(ptr, size);
        if (error == 2) cudaGetLastError();
    }
    struct block *block = error ? NULL : malloc(sizeof *block);
    if (!block) return error ? error : 2;
    *block = (struct block){blocks, *ptr, size, 1};
    blocks = block;
    return 0;
}

int c10_allocate(void **ptr, size_t size) {
    pthread_mutex_lock(&lock);
    int error = allocate(ptr, size);
    pthread_mutex_unlock(&lock);
    return error ? error : cudaGetLastError();
}

int c10_deallocate(void *ptr) {
    pthread_mutex_lock(&lock);
    for (struct block *block = blocks; block; block = block->next)
        if (block->ptr == ptr) block->used = 0;
    pthread_mutex_unlock(&lock);
    return 0;
}

int c10_empty_cache(void) {
    pthread_mutex_lock(&lock);
    int error = empty_cache();
    pthread_mutex_unlock(&lock);
    return error;
}

enum { PEER_ACCESS_ALREADY_ENABLED = 704, PEER_ACCESS_UNSUPPORTED = 217 };

int c10_reach(int device, int peer) {
    int can, error = cudaDeviceCanAccessPeer(&can, device, peer);
    if (error || !can) return error ? error : PEER_ACCESS_UNSUPPORTED;
    error = cudaSetDevice(device);
    if (!error) error = cudaDeviceEnablePeerAccess(peer, 0);
    if (error != PEER_ACCESS_ALREADY_ENABLED) return error;
    cudaGetLastError();
    return 0;
}

int c10_share(ipc_handle *handle, void *ptr) { return cudaIpcGetMemHandle(handle, ptr); }
int c10_open(void **ptr, const ipc_handle *handle) { return cudaIpcOpenMemHandle(ptr, *handle, 1); }
int c10_close(void *ptr) { return cudaIpcCloseMemHandle(ptr); }

int c10_copy(void *to, const void *from, size_t size, int how) {
    if (how == 0) return cudaMemcpy(to, from, size, 4);
    if (how == 1) return cudaMemcpyAsync(to, from, size, 4, NULL);
    return cudaMemcpyPeerAsync(to, 0, from, 0, size, NULL);
}

int c10_clear(void *to, size_t size, int how) {
    return how ? cudaMemsetAsync(to, 0, size, NULL) : cudaMemset(to, 0, size);
}

const char *c10_error(int error) { return cudaGetErrorString(error); }
