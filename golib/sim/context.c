/* Primary contexts, and each thread's stack of current ones. */
#include "internal.h"

enum { STACK_DEPTH = 32 };

struct CUctx_st sim_contexts[SIM_MAX_DEVICES];
static _Thread_local CUcontext stack[STACK_DEPTH];
static _Thread_local int depth;

static bool is_context(CUcontext context)
{
    for (int i = 0; i < sim_config.visible; i++)
        if (context == &sim_contexts[i])
            return true;
    return false;
}

static bool is_live(CUcontext context)
{
    pthread_mutex_lock(&sim_work_lock);
    bool live = context->refs > 0;
    pthread_mutex_unlock(&sim_work_lock);
    return live;
}

CUresult sim_current_context(CUcontext *context)
{
    if (!depth || !stack[depth - 1])
        return CUDA_ERROR_INVALID_CONTEXT;
    *context = stack[depth - 1];
    if (!is_live(*context))
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    return atomic_load(&(*context)->error);
}

static CUresult retain(CUcontext *context, CUdevice device)
{
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= sim_config.visible)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&sim_work_lock);
    *context = &sim_contexts[device];
    (*context)->refs++;
    pthread_mutex_unlock(&sim_work_lock);
    return CUDA_SUCCESS;
}

/* The last release ends the context's streams and frees its memory; the next retain starts without the error. */
static CUresult release(CUdevice device)
{
    if (device < 0 || device >= sim_config.visible)
        return CUDA_ERROR_INVALID_DEVICE;
    CUcontext context = &sim_contexts[device];
    pthread_mutex_lock(&sim_work_lock);
    bool held = context->refs > 0;
    bool last = held && --context->refs == 0;
    pthread_mutex_unlock(&sim_work_lock);
    if (!held)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (last) {
        sim_synchronize(context);
        pthread_mutex_lock(&sim_work_lock);
        for (CUstream stream = context->streams; stream; stream = stream->next) {
            stream->destroyed = true;
            pthread_cond_signal(&stream->wake);
        }
        context->null_stream = NULL;
        atomic_store(&context->error, CUDA_SUCCESS);
        atomic_store(&context->peers, 0);
        pthread_mutex_unlock(&sim_work_lock);
        sim_memory_free_all(context);
    }
    return CUDA_SUCCESS;
}

static CUresult get_state(CUdevice device, unsigned *flags, int *active)
{
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    if (device < 0 || device >= sim_config.visible)
        return CUDA_ERROR_INVALID_DEVICE;
    *flags = 0;
    *active = is_live(&sim_contexts[device]);
    return CUDA_SUCCESS;
}

static CUresult get_current(CUcontext *context)
{
    if (!context)
        return CUDA_ERROR_INVALID_VALUE;
    *context = depth ? stack[depth - 1] : NULL;
    return CUDA_SUCCESS;
}

static CUresult set_current(CUcontext context)
{
    if (context && (!is_context(context) || !is_live(context)))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!depth)
        depth = 1;
    stack[depth - 1] = context;
    if (!context)
        depth--;
    return CUDA_SUCCESS;
}

static CUresult push(CUcontext context)
{
    if (!context || !is_context(context) || !is_live(context))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (depth == STACK_DEPTH)
        return CUDA_ERROR_INVALID_VALUE;
    stack[depth++] = context;
    return CUDA_SUCCESS;
}

static CUresult pop(CUcontext *context)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    CUcontext top = stack[--depth];
    if (context)
        *context = top;
    return CUDA_SUCCESS;
}

static CUresult get_device(CUcontext current, CUdevice *device)
{
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = current->device;
    return CUDA_SUCCESS;
}

/* No capture allows this one, not even a relaxed one. */
static CUresult synchronize(CUcontext context)
{
    pthread_mutex_lock(&sim_work_lock);
    bool capturing = false;
    for (CUstream stream = context->streams; stream; stream = stream->next)
        if (stream->capture) {
            stream->capture_invalid = true;
            capturing = true;
        }
    pthread_mutex_unlock(&sim_work_lock);
    if (capturing)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    CUresult refusal = sim_capture_refusal();
    if (refusal)
        return refusal;
    sim_synchronize(context);
    return atomic_load(&context->error);
}

static CUresult enable_peer(CUcontext current, CUcontext peer, unsigned flags)
{
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (!peer || !is_context(peer) || peer == current || !is_live(peer))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!sim_config.p2p)
        return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
    unsigned bit = 1u << peer->device;
    return atomic_fetch_or(&current->peers, bit) & bit ? CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED : CUDA_SUCCESS;
}

static CUresult disable_peer(CUcontext current, CUcontext peer)
{
    if (!peer || !is_context(peer))
        return CUDA_ERROR_INVALID_CONTEXT;
    unsigned bit = 1u << peer->device;
    return atomic_fetch_and(&current->peers, ~bit) & bit ? CUDA_SUCCESS : CUDA_ERROR_PEER_ACCESS_NOT_ENABLED;
}

SIM_FUNCTION(cuDevicePrimaryCtxRetain, cuDevicePrimaryCtxRetain, 7000, NEEDS_INIT, (CUcontext *context, CUdevice device),
             retain(context, device))
SIM_FUNCTION(cuDevicePrimaryCtxRelease, cuDevicePrimaryCtxRelease_v2, 11000, NEEDS_INIT, (CUdevice device), release(device))
SIM_FUNCTION(cuDevicePrimaryCtxGetState, cuDevicePrimaryCtxGetState, 7000, NEEDS_INIT,
             (CUdevice device, unsigned *flags, int *active), get_state(device, flags, active))
SIM_FUNCTION(cuCtxGetCurrent, cuCtxGetCurrent, 4000, NEEDS_INIT, (CUcontext *context), get_current(context))
SIM_FUNCTION(cuCtxSetCurrent, cuCtxSetCurrent, 4000, NEEDS_INIT, (CUcontext context), set_current(context))
SIM_FUNCTION(cuCtxPushCurrent, cuCtxPushCurrent_v2, 4000, NEEDS_INIT, (CUcontext context), push(context))
SIM_FUNCTION(cuCtxPopCurrent, cuCtxPopCurrent_v2, 4000, NEEDS_INIT, (CUcontext *context), pop(context))
SIM_FUNCTION(cuCtxGetDevice, cuCtxGetDevice, 2000, NEEDS_CONTEXT, (CUdevice *device), get_device(call.context, device))
SIM_FUNCTION(cuCtxSynchronize, cuCtxSynchronize, 2000, NEEDS_CONTEXT, (void), synchronize(call.context))
SIM_FUNCTION(cuCtxEnablePeerAccess, cuCtxEnablePeerAccess, 4000, NEEDS_CONTEXT, (CUcontext peer, unsigned flags),
             enable_peer(call.context, peer, flags))
SIM_FUNCTION(cuCtxDisablePeerAccess, cuCtxDisablePeerAccess, 4000, NEEDS_CONTEXT, (CUcontext peer),
             disable_peer(call.context, peer))
