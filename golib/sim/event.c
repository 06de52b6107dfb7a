/* Events: points in streams. */
#include <stdlib.h>
#include <time.h>

#include "internal.h"

struct CUevent_st {
    CUcontext context;
    unsigned flags;
    unsigned refs; /* the program's and those of operations that will record it */
    CUstream stream; /* of the last record; NULL: never recorded */
    uint64_t sequence;
    uint64_t time_ns; /* when the last record was reached */
    const void *capture; /* the graph that captured the last record */
};

static void *events;

static CUevent find(CUevent event)
{
    return event && sim_set_has(&events, event) ? event : NULL;
}

void sim_event_put(CUevent event)
{
    if (--event->refs)
        return;
    if (event->stream)
        sim_stream_put(event->stream);
    free(event);
}

/* Called on the stream's thread. */
void sim_event_reached(CUevent event, uint64_t sequence)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    if (event->sequence == sequence)
        event->time_ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static CUresult create(CUcontext context, CUevent *out, unsigned flags)
{
    if (!out || flags & ~7u)
        return CUDA_ERROR_INVALID_VALUE;
    CUevent event = calloc(1, sizeof *event);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->context = context;
    event->flags = flags;
    event->refs = 1;
    pthread_mutex_lock(&sim_work_lock);
    bool added = sim_set_add(&events, event);
    pthread_mutex_unlock(&sim_work_lock);
    if (!added) {
        free(event);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = event;
    return CUDA_SUCCESS;
}

static CUresult destroy(CUevent event)
{
    pthread_mutex_lock(&sim_work_lock);
    bool found = find(event);
    if (found) {
        sim_set_remove(&events, event);
        sim_event_put(event);
    }
    pthread_mutex_unlock(&sim_work_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE;
}

/* Callers hold sim_work_lock. */
static CUresult record_locked(CUcontext context, CUevent event, CUstream handle)
{
    CUstream stream = sim_stream_find(context, handle);
    if (!find(event) || !stream || stream->context != event->context)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        event->capture = stream->capture;
        return stream->capture_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_SUCCESS;
    }
    struct sim_operation *operation = sim_operation_new(OP_RECORD);
    if (!operation)
        return CUDA_ERROR_OUT_OF_MEMORY;
    operation->record.event = event;
    event->refs++;
    CUresult result = sim_enqueue(stream, operation);
    if (result)
        return result;
    if (event->stream)
        sim_stream_put(event->stream);
    stream->refs++;
    event->stream = stream;
    event->sequence = stream->submitted;
    event->capture = NULL;
    return CUDA_SUCCESS;
}

static CUresult record(CUcontext context, CUevent event, CUstream handle)
{
    pthread_mutex_lock(&sim_work_lock);
    CUresult result = record_locked(context, event, handle);
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

/* For calls that look at an event, which no capture of the event allows. Callers hold no lock. */
static CUresult observe(CUevent event)
{
    pthread_mutex_lock(&sim_work_lock);
    CUresult result = !find(event) ? CUDA_ERROR_INVALID_HANDLE : event->capture ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
    CUstream stream = result == CUDA_ERROR_CAPTURED_EVENT ? sim_capturing_stream(event->capture) : NULL;
    if (stream)
        stream->capture_invalid = true;
    pthread_mutex_unlock(&sim_work_lock);
    return result ? result : sim_capture_refusal();
}

static bool is_pending(CUevent event)
{
    return event->stream && event->stream->completed < event->sequence;
}

static CUresult query(CUevent event)
{
    CUresult result = observe(event);
    if (result)
        return result;
    pthread_mutex_lock(&sim_work_lock);
    if (!find(event))
        result = CUDA_ERROR_INVALID_HANDLE;
    else
        result = is_pending(event) ? CUDA_ERROR_NOT_READY : atomic_load(&event->context->error);
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

static CUresult synchronize(CUevent event)
{
    CUresult result = observe(event);
    if (result)
        return result;
    pthread_mutex_lock(&sim_work_lock);
    if (!find(event)) {
        result = CUDA_ERROR_INVALID_HANDLE;
    } else {
        CUcontext context = event->context;
        if (is_pending(event))
            sim_wait(event->stream, event->sequence);
        result = atomic_load(&context->error);
    }
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

static CUresult elapsed(float *milliseconds, CUevent start, CUevent end)
{
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sim_work_lock);
    if (!find(start) || !find(end) || (start->flags | end->flags) & CU_EVENT_DISABLE_TIMING || !start->stream || !end->stream)
        result = CUDA_ERROR_INVALID_HANDLE;
    else if (is_pending(start) || is_pending(end))
        result = CUDA_ERROR_NOT_READY;
    else
        *milliseconds = (float)((double)(int64_t)(end->time_ns - start->time_ns) / 1e6);
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

/* Callers hold sim_work_lock. */
static CUresult wait_locked(CUcontext context, CUstream handle, CUevent event)
{
    CUstream stream = sim_stream_find(context, handle);
    if (!stream || !find(event))
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream->capture) {
        if (event->capture == stream->capture)
            return CUDA_SUCCESS;
        stream->capture_invalid = true;
        return CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
    }
    /* The real driver would draw this stream into the capture; here a capture is of one stream. */
    if (event->capture)
        return sim_capturing_stream(event->capture) ? CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED : CUDA_ERROR_CAPTURED_EVENT;
    if (!is_pending(event))
        return CUDA_SUCCESS;
    struct sim_operation *operation = sim_operation_new(OP_NOTHING);
    if (!operation)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (!sim_dependency_add(operation, event->stream, event->sequence)) {
        sim_operation_free(operation);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return sim_enqueue(stream, operation);
}

static CUresult wait(CUcontext context, CUstream handle, CUevent event, unsigned flags)
{
    if (flags & ~1u)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_work_lock);
    CUresult result = wait_locked(context, handle, event);
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

SIM_FUNCTION(cuEventCreate, cuEventCreate, 2000, NEEDS_CONTEXT, (CUevent *event, unsigned flags),
             create(call.context, event, flags))
SIM_FUNCTION(cuEventDestroy, cuEventDestroy_v2, 4000, NEEDS_CONTEXT, (CUevent event), destroy(event))
SIM_FUNCTION(cuEventRecord, cuEventRecord, 2000, NEEDS_CONTEXT, (CUevent event, CUstream stream),
             record(call.context, event, stream))
SIM_FUNCTION(cuEventQuery, cuEventQuery, 2000, NEEDS_CONTEXT, (CUevent event), query(event))
SIM_FUNCTION(cuEventSynchronize, cuEventSynchronize, 2000, NEEDS_CONTEXT, (CUevent event), synchronize(event))
SIM_FUNCTION(cuEventElapsedTime, cuEventElapsedTime, 2000, NEEDS_CONTEXT, (float *milliseconds, CUevent start, CUevent end),
             elapsed(milliseconds, start, end))
SIM_FUNCTION(cuEventElapsedTime, cuEventElapsedTime_v2, 12080, NEEDS_CONTEXT,
             (float *milliseconds, CUevent start, CUevent end), elapsed(milliseconds, start, end))
SIM_FUNCTION(cuStreamWaitEvent, cuStreamWaitEvent, 3020, NEEDS_CONTEXT, (CUstream stream, CUevent event, unsigned flags),
             wait(call.context, stream, event, flags))
