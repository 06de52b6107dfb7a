/*
 * Streams: each has a thread that runs its operations in order. An operation
 * waits for its dependencies, which are points in other streams; the legacy
 * stream and events are made of those.
 */
#include <search.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

/* Broadcast, under sim_work_lock, whenever an operation is done, and when work may be submitted again. */
static pthread_cond_t progress = PTHREAD_COND_INITIALIZER;
static uint64_t last_ticket;
/* How many calls that stop all launches are under way, and how many threads wait for them. */
static unsigned stops, stopped;

static int compare_pointers(const void *a, const void *b)
{
    return (a > b) - (a < b);
}

bool sim_set_add(void **set, const void *object)
{
    return tsearch(object, set, compare_pointers) != NULL;
}

bool sim_set_has(void *const *set, const void *object)
{
    return tfind(object, set, compare_pointers) != NULL;
}

bool sim_set_remove(void **set, const void *object)
{
    return tdelete(object, set, compare_pointers) != NULL;
}

struct sim_operation *sim_operation_new(enum sim_operation_kind kind)
{
    struct sim_operation *operation = calloc(1, sizeof *operation);
    if (operation)
        operation->kind = kind;
    return operation;
}

struct sim_operation *sim_operation_copy(const struct sim_operation *operation)
{
    struct sim_operation *copy = malloc(sizeof *copy);
    if (!copy)
        return NULL;
    *copy = *operation;
    copy->next = NULL;
    copy->dependencies = NULL;
    copy->num_dependencies = 0;
    if (copy->kind == OP_KERNEL) {
        copy->kernel.params = sim_kernel_params_copy(copy->kernel.function, operation->kernel.params);
        if (!copy->kernel.params) {
            free(copy);
            return NULL;
        }
    }
    return copy;
}

void sim_operation_free(struct sim_operation *operation)
{
    for (unsigned i = 0; i < operation->num_dependencies; i++)
        sim_stream_put(operation->dependencies[i].stream);
    free(operation->dependencies);
    if (operation->kind == OP_KERNEL)
        free(operation->kernel.params);
    if (operation->kind == OP_RECORD)
        sim_event_put(operation->record.event);
    free(operation);
}

bool sim_dependency_add(struct sim_operation *operation, CUstream stream, uint64_t sequence)
{
    if (stream->completed >= sequence)
        return true;
    unsigned count = operation->num_dependencies;
    struct sim_dependency *grown = realloc(operation->dependencies, (count + 1) * sizeof *grown);
    if (!grown)
        return false;
    operation->dependencies = grown;
    grown[count] = (struct sim_dependency){stream, sequence};
    stream->refs++;
    operation->num_dependencies++;
    return true;
}

void sim_stream_put(CUstream stream)
{
    if (--stream->refs)
        return;
    pthread_cond_destroy(&stream->wake);
    free(stream);
}

static bool is_ready(const struct sim_operation *operation)
{
    for (unsigned i = 0; i < operation->num_dependencies; i++)
        if (operation->dependencies[i].stream->completed < operation->dependencies[i].sequence)
            return false;
    return true;
}

/* An address that lost its mapping or rights since the call was accepted. */
static bool is_illegal(CUcontext context, uint64_t address, uint64_t size, bool write)
{
    enum sim_reach reach = sim_reach(context, address, size, write);
    return reach == REACH_UNMAPPED || reach == REACH_NO_ACCESS;
}

/* On the stream's thread, without locks. */
static void run(CUcontext context, const struct sim_operation *operation)
{
    CUresult result = CUDA_SUCCESS;
    sim_in_callback = true;
    switch (operation->kind) {
    case OP_NOTHING:
    case OP_RECORD:
        break;
    case OP_KERNEL:
        sim_kernel_run(operation->kernel.function, operation->kernel.params);
        break;
    case OP_COPY:
        if (is_illegal(context, operation->copy.from, operation->copy.size, false)
            || is_illegal(context, operation->copy.to, operation->copy.size, true))
            result = CUDA_ERROR_ILLEGAL_ADDRESS;
        else
            memmove((void *)operation->copy.to, (const void *)operation->copy.from, operation->copy.size);
        break;
    case OP_SET:
        if (is_illegal(context, operation->set.to, operation->set.size, true))
            result = CUDA_ERROR_ILLEGAL_ADDRESS;
        else
            memset((void *)operation->set.to, operation->set.value, operation->set.size);
        break;
    case OP_HOST:
        operation->host.function(operation->host.data);
        break;
    }
    sim_in_callback = false;
    if (result)
        atomic_store(&context->error, result);
}

/* Callers hold sim_work_lock. */
static void unlink_stream(CUstream stream)
{
    CUstream *link = &stream->context->streams;
    while (*link != stream)
        link = &(*link)->next;
    *link = stream->next;
}

/* A stream's thread. It outlives cuStreamDestroy until the last operation is done. */
static void *work(void *argument)
{
    CUstream stream = argument;
    pthread_mutex_lock(&sim_work_lock);
    for (;;) {
        while (!stream->first && !stream->destroyed)
            pthread_cond_wait(&stream->wake, &sim_work_lock);
        struct sim_operation *operation = stream->first;
        if (!operation)
            break;
        while (!is_ready(operation))
            pthread_cond_wait(&progress, &sim_work_lock);
        pthread_mutex_unlock(&sim_work_lock);
        /* After an error a context does nothing more. */
        if (!atomic_load(&stream->context->error))
            run(stream->context, operation);
        pthread_mutex_lock(&sim_work_lock);
        if (operation->kind == OP_RECORD)
            sim_event_reached(operation->record.event, operation->sequence);
        stream->first = operation->next;
        if (!stream->first)
            stream->last = &stream->first;
        stream->completed = operation->sequence;
        sim_operation_free(operation);
        pthread_cond_broadcast(&progress);
    }
    unlink_stream(stream);
    if (stream->capture)
        sim_graph_free(stream->capture);
    sim_stream_put(stream);
    pthread_mutex_unlock(&sim_work_lock);
    return NULL;
}

/* With all signals blocked: they are the program's business. */
static bool start_thread(CUstream stream)
{
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool started = pthread_create(&thread, NULL, work, stream) == 0;
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (started)
        pthread_detach(thread);
    return started;
}

/* Callers hold sim_work_lock, so the thread starts when the stream is in its list. */
static CUstream create_stream(CUcontext context, unsigned flags)
{
    CUstream stream = calloc(1, sizeof *stream);
    if (!stream)
        return NULL;
    stream->context = context;
    stream->flags = flags;
    stream->refs = 1;
    stream->last = &stream->first;
    pthread_cond_init(&stream->wake, NULL);
    if (!start_thread(stream)) {
        sim_stream_put(stream);
        return NULL;
    }
    stream->next = context->streams;
    context->streams = stream;
    return stream;
}

static bool is_legacy(CUstream handle)
{
    /* 1 and 2 are the driver's names for the legacy and the per-thread stream; the legacy order serves for both. */
    return (uintptr_t)handle <= 2;
}

CUstream sim_stream_find(CUcontext context, CUstream handle)
{
    if (is_legacy(handle)) {
        if (!context->null_stream)
            context->null_stream = create_stream(context, CU_STREAM_DEFAULT);
        return context->null_stream;
    }
    for (int i = 0; i < sim_config.visible; i++)
        for (CUstream stream = sim_contexts[i].streams; stream; stream = stream->next)
            if (stream == handle && !stream->destroyed)
                return stream;
    return NULL;
}

CUcontext sim_stream_context(CUcontext context, CUstream handle)
{
    pthread_mutex_lock(&sim_work_lock);
    CUstream stream = sim_stream_find(context, handle);
    CUcontext found = stream ? stream->context : NULL;
    pthread_mutex_unlock(&sim_work_lock);
    return found;
}

static bool is_blocking(CUstream stream)
{
    return !(stream->flags & CU_STREAM_NON_BLOCKING);
}

/* Orders the legacy stream and the blocking streams. Callers hold sim_work_lock. */
static CUresult order_legacy(CUstream stream, struct sim_operation *operation)
{
    CUcontext context = stream->context;
    if (!is_blocking(stream))
        return CUDA_SUCCESS;
    if (stream != context->null_stream) {
        CUstream legacy = context->null_stream;
        return !legacy || sim_dependency_add(operation, legacy, legacy->submitted) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    for (CUstream other = context->streams; other; other = other->next) {
        if (other == stream || !is_blocking(other))
            continue;
        if (other->capture) {
            other->capture_invalid = true;
            return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        if (!sim_dependency_add(operation, other, other->submitted))
            return CUDA_ERROR_OUT_OF_MEMORY;
    }
    return CUDA_SUCCESS;
}

CUresult sim_enqueue(CUstream stream, struct sim_operation *operation)
{
    if (stream->capture) {
        if (stream->capture_invalid) {
            sim_operation_free(operation);
            return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
        }
        *stream->capture->last = operation;
        stream->capture->last = &operation->next;
        return CUDA_SUCCESS;
    }
    CUresult result = order_legacy(stream, operation);
    if (result) {
        sim_operation_free(operation);
        return result;
    }
    operation->sequence = ++stream->submitted;
    operation->ticket = ++last_ticket;
    *stream->last = operation;
    stream->last = &operation->next;
    pthread_cond_signal(&stream->wake);
    return CUDA_SUCCESS;
}

void sim_wait(CUstream stream, uint64_t sequence)
{
    stream->refs++;
    while (stream->completed < sequence)
        pthread_cond_wait(&progress, &sim_work_lock);
    sim_stream_put(stream);
}

void sim_await_turn(void)
{
    stopped++;
    while (stops)
        pthread_cond_wait(&progress, &sim_work_lock);
    if (!--stopped)
        pthread_cond_broadcast(&progress);
}

CUresult sim_submit(CUcontext context, CUstream handle, struct sim_operation *operation, bool wait)
{
    if (!operation)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&sim_work_lock);
    sim_await_turn();
    CUstream stream = sim_stream_find(context, handle);
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    if (!stream) {
        sim_operation_free(operation);
    } else {
        result = sim_enqueue(stream, operation);
        if (!result && wait && !stream->capture) {
            CUcontext of = stream->context;
            sim_wait(stream, stream->submitted);
            result = atomic_load(&of->error);
        }
    }
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

static bool has_before(CUcontext context, uint64_t ticket)
{
    for (CUstream stream = context->streams; stream; stream = stream->next)
        if (stream->first && stream->first->ticket <= ticket)
            return true;
    return false;
}

void sim_synchronize(CUcontext context)
{
    pthread_mutex_lock(&sim_work_lock);
    uint64_t ticket = last_ticket;
    while (has_before(context, ticket))
        pthread_cond_wait(&progress, &sim_work_lock);
    pthread_mutex_unlock(&sim_work_lock);
}

void sim_stop_launches(bool until_idle)
{
    pthread_mutex_lock(&sim_work_lock);
    while (stopped && !stops) /* after those who waited for the call before */
        pthread_cond_wait(&progress, &sim_work_lock);
    stops++;
    uint64_t ticket = last_ticket;
    for (int i = 0; until_idle && i < sim_config.visible; i++)
        while (has_before(&sim_contexts[i], ticket))
            pthread_cond_wait(&progress, &sim_work_lock);
    pthread_mutex_unlock(&sim_work_lock);
}

void sim_resume_launches(void)
{
    pthread_mutex_lock(&sim_work_lock);
    stops--;
    pthread_cond_broadcast(&progress);
    pthread_mutex_unlock(&sim_work_lock);
}

/* How strictly this thread respects captures: cuThreadExchangeStreamCaptureMode. */
static __thread CUstreamCaptureMode thread_capture_mode = CU_STREAM_CAPTURE_MODE_GLOBAL;

static bool forbids(CUstream stream)
{
    if (!stream->capture || stream->capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED
        || thread_capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    bool own = pthread_equal(stream->capture_thread, pthread_self());
    return own
        || (stream->capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL
            && thread_capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

static CUresult exchange_capture_mode(CUstreamCaptureMode *mode)
{
    if (!mode || *mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode before = thread_capture_mode;
    thread_capture_mode = *mode;
    *mode = before;
    return CUDA_SUCCESS;
}
SIM_FUNCTION(cuThreadExchangeStreamCaptureMode, cuThreadExchangeStreamCaptureMode, 10010, NEEDS_INIT,
             (CUstreamCaptureMode *mode), (exchange_capture_mode(mode)))

CUresult sim_capture_refusal(void)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&sim_work_lock);
    for (int i = 0; i < sim_config.visible; i++)
        for (CUstream stream = sim_contexts[i].streams; stream; stream = stream->next)
            if (forbids(stream)) {
                stream->capture_invalid = true;
                result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
            }
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

static CUresult create(CUcontext context, CUstream *out, unsigned flags)
{
    if (!out || flags & ~(unsigned)CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&sim_work_lock);
    CUstream stream = create_stream(context, flags);
    pthread_mutex_unlock(&sim_work_lock);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *out = stream;
    return CUDA_SUCCESS;
}

static CUresult destroy(CUcontext context, CUstream handle)
{
    CUresult result = CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&sim_work_lock);
    CUstream stream = is_legacy(handle) ? NULL : sim_stream_find(context, handle);
    if (stream) {
        if (stream->capture)
            sim_graph_free(stream->capture);
        stream->capture = NULL;
        stream->destroyed = true;
        pthread_cond_signal(&stream->wake);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

/* Finds a stream for a call that would observe it. Callers hold sim_work_lock. */
static CUresult observe(CUcontext context, CUstream handle, CUstream *stream)
{
    *stream = sim_stream_find(context, handle);
    if (!*stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!(*stream)->capture)
        return CUDA_SUCCESS;
    (*stream)->capture_invalid = true;
    return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}

static CUresult synchronize(CUcontext context, CUstream handle)
{
    CUstream stream;
    CUresult result = sim_capture_refusal();
    if (result)
        return result;
    if (is_legacy(handle))
        return sim_submit(context, handle, sim_operation_new(OP_NOTHING), true);
    pthread_mutex_lock(&sim_work_lock);
    result = observe(context, handle, &stream);
    if (!result) {
        CUcontext of = stream->context;
        sim_wait(stream, stream->submitted);
        result = atomic_load(&of->error);
    }
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

/* The legacy stream is idle when the blocking streams are. */
static bool is_idle(CUstream stream)
{
    if (stream->first || stream != stream->context->null_stream)
        return !stream->first;
    for (CUstream other = stream->context->streams; other; other = other->next)
        if (is_blocking(other) && other->first)
            return false;
    return true;
}

static CUresult query(CUcontext context, CUstream handle)
{
    CUstream stream;
    CUresult result = sim_capture_refusal();
    if (result)
        return result;
    pthread_mutex_lock(&sim_work_lock);
    result = observe(context, handle, &stream);
    if (!result)
        result = is_idle(stream) ? atomic_load(&stream->context->error) : CUDA_ERROR_NOT_READY;
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

SIM_FUNCTION(cuStreamCreate, cuStreamCreate, 2000, NEEDS_CONTEXT, (CUstream *stream, unsigned flags),
             create(call.context, stream, flags))
SIM_FUNCTION(cuStreamDestroy, cuStreamDestroy_v2, 4000, NEEDS_CONTEXT, (CUstream stream), destroy(call.context, stream))
SIM_FUNCTION(cuStreamSynchronize, cuStreamSynchronize, 2000, NEEDS_CONTEXT, (CUstream stream),
             synchronize(call.context, stream))
SIM_FUNCTION(cuStreamQuery, cuStreamQuery, 2000, NEEDS_CONTEXT, (CUstream stream), query(call.context, stream))
