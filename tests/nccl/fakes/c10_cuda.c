/*
 * A stand-in for PyTorch's libc10_cuda.so: it calls the CUDA runtime as that
 * does, through slots of its own.
 */
#include <stddef.h>

#define API __attribute__((visibility("default")))

typedef struct {
    char bytes[64];
} ipc_handle;

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
API int c10_share(ipc_handle *handle, void *ptr);
API int c10_open(void **ptr, const ipc_handle *handle);
API int c10_close(void *ptr);
API int c10_copy(void *to, const void *from, size_t size, int how);
API int c10_clear(void *to, size_t size, int how);
API const char *c10_error(int error);

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
