/* Kernels, which are host functions here, and the driver's own host functions. */
#include <stdlib.h>
#include <string.h>

#include "internal.h"

struct CUfunc_st {
    cuSimKernel kernel;
    int nparams;
    size_t sizes[];
};

static void *functions;

/* The values are kept apart by this much, so that any type is aligned. */
enum { PARAM_ALIGNMENT = 16 };

static size_t padded(size_t size)
{
    return (size + PARAM_ALIGNMENT - 1) / PARAM_ALIGNMENT * PARAM_ALIGNMENT;
}

/* Pointers to copies of the values, in one block. */
void **sim_kernel_params_copy(CUfunction function, void **params)
{
    size_t header = padded((size_t)(function->nparams + 1) * sizeof(void *)), total = header;
    for (int i = 0; i < function->nparams; i++)
        total += padded(function->sizes[i]);
    void **copy = malloc(total);
    if (!copy)
        return NULL;
    char *value = (char *)copy + header;
    for (int i = 0; i < function->nparams; i++) {
        memcpy(value, params[i], function->sizes[i]);
        copy[i] = value;
        value += padded(function->sizes[i]);
    }
    copy[function->nparams] = NULL;
    return copy;
}

/* On the stream's thread. */
void sim_kernel_run(CUfunction function, void **params)
{
    function->kernel(params);
}

static CUresult create(CUfunction *out, cuSimKernel kernel, int nparams, const size_t *sizes)
{
    if (!out || !kernel || nparams < 0 || (nparams && !sizes))
        return CUDA_ERROR_INVALID_VALUE;
    CUfunction function = malloc(sizeof *function + (size_t)nparams * sizeof *sizes);
    if (!function)
        return CUDA_ERROR_OUT_OF_MEMORY;
    function->kernel = kernel;
    function->nparams = nparams;
    if (nparams)
        memcpy(function->sizes, sizes, (size_t)nparams * sizeof *sizes);
    pthread_mutex_lock(&sim_work_lock);
    bool added = sim_set_add(&functions, function);
    pthread_mutex_unlock(&sim_work_lock);
    if (!added) {
        free(function);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = function;
    return CUDA_SUCCESS;
}

/* What CU_LAUNCH_PARAM_* say in pairs: where the values are, side by side, and how many bytes. */
static bool read_extra(void **extra, const void **buffer, size_t *size)
{
    enum { END, POINTER, SIZE };
    for (; *extra != (void *)END; extra += 2) {
        if (*extra == (void *)POINTER)
            *buffer = extra[1];
        else if (*extra == (void *)SIZE)
            *size = *(size_t *)extra[1];
        else
            return false;
    }
    return *buffer && *size;
}

static CUresult launch_params(CUcontext current, CUfunction function, const CUlaunchConfig *config, void **params);

static CUresult launch(CUcontext current, CUfunction function, const CUlaunchConfig *config, void **params, void **extra)
{
    if (!extra)
        return launch_params(current, function, config, params);
    pthread_mutex_lock(&sim_work_lock);
    bool known = sim_set_has(&functions, function);
    pthread_mutex_unlock(&sim_work_lock);
    const void *buffer = NULL;
    size_t size = 0;
    if (!known)
        return CUDA_ERROR_INVALID_HANDLE;
    if (params || function->nparams != 1 || !read_extra(extra, &buffer, &size) || size > function->sizes[0])
        return CUDA_ERROR_INVALID_VALUE;
    void *value = calloc(1, function->sizes[0]);
    if (!value)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(value, buffer, size);
    CUresult result = launch_params(current, function, config, &value);
    free(value);
    return result;
}

static CUresult launch_params(CUcontext current, CUfunction function, const CUlaunchConfig *config, void **params)
{
    if (!config || !config->gridDimX || !config->gridDimY || !config->gridDimZ || !config->blockDimX
        || !config->blockDimY || !config->blockDimZ)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_work_lock);
    bool known = sim_set_has(&functions, function);
    pthread_mutex_unlock(&sim_work_lock);
    if (!known || sim_stream_context(current, config->hStream) != current)
        return CUDA_ERROR_INVALID_HANDLE;
    if (function->nparams && !params)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_operation *operation = sim_operation_new(OP_KERNEL);
    if (operation) {
        operation->kernel.function = function;
        operation->kernel.params = sim_kernel_params_copy(function, params);
        if (!operation->kernel.params) {
            free(operation);
            operation = NULL;
        }
    }
    return sim_submit(current, config->hStream, operation, false);
}

static CUresult launch_host(CUcontext current, CUstream stream, CUhostFn function, void *data)
{
    if (!function)
        return CUDA_ERROR_INVALID_VALUE;
    struct sim_operation *operation = sim_operation_new(OP_HOST);
    if (operation) {
        operation->host.function = function;
        operation->host.data = data;
    }
    return sim_submit(current, stream, operation, false);
}

/* On the stream's thread. */
static void work_until(void *data)
{
    struct sim_pause *pause = data;
    sim_pause_end(*pause);
    free(pause);
}

static bool is_capturing(CUcontext context, CUstream handle)
{
    pthread_mutex_lock(&sim_work_lock);
    CUstream stream = sim_stream_find(context, handle);
    bool capturing = stream && stream->capture;
    pthread_mutex_unlock(&sim_work_lock);
    return capturing;
}

static CUresult work(CUcontext current, CUstream stream, unsigned us, const char *file)
{
    if (file && us)
        return CUDA_ERROR_INVALID_VALUE;
    if (is_capturing(current, stream)) /* it is for one run */
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    struct sim_pause *pause = malloc(sizeof *pause);
    if (!pause)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *pause = (struct sim_pause){us, file ? strdup(file) : NULL};
    CUresult result = file && !pause->file ? CUDA_ERROR_OUT_OF_MEMORY : launch_host(current, stream, work_until, pause);
    if (result) {
        free(pause->file);
        free(pause);
    }
    return result;
}

SIM_FUNCTION(cuSimWork, cuSimWork, 0, NEEDS_CONTEXT, (CUstream stream, unsigned us, const char *file),
             work(call.context, stream, us, file))
SIM_FUNCTION(cuSimFunctionCreate, cuSimFunctionCreate, 0, NEEDS_INIT,
             (CUfunction *function, cuSimKernel kernel, int nparams, const size_t *paramSizes),
             create(function, kernel, nparams, paramSizes))
SIM_FUNCTION(cuLaunchKernel, cuLaunchKernel, 4000, NEEDS_CONTEXT,
             (CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
              unsigned shared, CUstream stream, void **params, void **extra),
             launch(call.context, function, &(CUlaunchConfig){gx, gy, gz, bx, by, bz, shared, stream, NULL, 0}, params, extra))
SIM_FUNCTION(cuLaunchKernelEx, cuLaunchKernelEx, 11060, NEEDS_CONTEXT,
             (const CUlaunchConfig *config, CUfunction function, void **params, void **extra),
             launch(call.context, function, config, params, extra))
SIM_FUNCTION(cuLaunchHostFunc, cuLaunchHostFunc, 10000, NEEDS_CONTEXT, (CUstream stream, CUhostFn function, void *data),
             launch_host(call.context, stream, function, data))
