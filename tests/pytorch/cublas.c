/*
 * A stand-in for libcublas.so: handles, which PyTorch makes with the workspaces
 * that it gets of its own allocator. There are no products: stubs.py adds those
 * functions, which end the process with their name.
 */
#include <stddef.h>
#include <stdlib.h>

#define API __attribute__((visibility("default")))

enum { SUCCESS = 0, ALLOC_FAILED = 3 }; /* cublasStatus_t */

struct handle {
    void *stream, *workspace;
    size_t size;
};

API int cublasCreate_v2(struct handle **handle);
API int cublasDestroy_v2(struct handle *handle);
API int cublasSetStream_v2(struct handle *handle, void *stream);
API int cublasSetWorkspace_v2(struct handle *handle, void *workspace, size_t size);
API int cublasSetMathMode(struct handle *handle, int mode);

int cublasCreate_v2(struct handle **handle) {
    *handle = calloc(1, sizeof **handle);
    return *handle ? SUCCESS : ALLOC_FAILED;
}

int cublasDestroy_v2(struct handle *handle) {
    free(handle);
    return SUCCESS;
}

int cublasSetStream_v2(struct handle *handle, void *stream) {
    handle->stream = stream;
    return SUCCESS;
}

int cublasSetWorkspace_v2(struct handle *handle, void *workspace, size_t size) {
    handle->workspace = workspace;
    handle->size = size;
    return SUCCESS;
}

int cublasSetMathMode(struct handle *handle, int mode) {
    (void)handle, (void)mode;
    return SUCCESS;
}
