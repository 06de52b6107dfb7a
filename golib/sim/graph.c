/* Stream capture and graphs: the operations of one stream, to be replayed in order. */
#include <stdlib.h>

#include "internal.h"

enum { CAPTURE_NONE, CAPTURE_ACTIVE, CAPTURE_INVALIDATED };

struct CUgraphExec_st {
    struct CUgraph_st graph;
};

static void *graphs, *executables;

static void free_operations(struct CUgraph_st *graph)
{
    while (graph->first) {
        struct sim_operation *operation = graph->first;
        graph->first = operation->next;
        sim_operation_free(operation);
    }
}

void sim_graph_free(CUgraph graph)
{
    free_operations(graph);
    free(graph);
}

CUstream sim_capturing_stream(const void *graph)
{
    for (int i = 0; i < sim_config.visible; i++)
        for (CUstream stream = sim_contexts[i].streams; stream; stream = stream->next)
            if (stream->capture && stream->capture == graph)
                return stream;
    return NULL;
}

/* Callers of the functions named "locked" hold sim_work_lock. */
static CUresult begin_locked(CUcontext context, CUstream handle, int mode)
{
    if (mode < CU_STREAM_CAPTURE_MODE_GLOBAL || mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstream stream = sim_stream_find(context, handle);
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (stream == stream->context->null_stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    if (stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    CUgraph graph = calloc(1, sizeof *graph);
    if (!graph)
        return CUDA_ERROR_OUT_OF_MEMORY;
    static cuuint64_t captures;
    graph->last = &graph->first;
    graph->capture = ++captures;
    stream->capture = graph;
    stream->capture_invalid = false;
    stream->capture_mode = (CUstreamCaptureMode)mode;
    stream->capture_thread = pthread_self();
    return CUDA_SUCCESS;
}

static CUresult end_locked(CUcontext context, CUstream handle, CUgraph *out)
{
    CUstream stream = sim_stream_find(context, handle);
    if (!stream || !out)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    if (!stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->capture_mode != CU_STREAM_CAPTURE_MODE_RELAXED && !pthread_equal(stream->capture_thread, pthread_self()))
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    CUgraph graph = stream->capture;
    stream->capture = NULL;
    *out = NULL;
    if (stream->capture_invalid || !sim_set_add(&graphs, graph)) {
        sim_graph_free(graph);
        return stream->capture_invalid ? CUDA_ERROR_STREAM_CAPTURE_INVALIDATED : CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = graph;
    return CUDA_SUCCESS;
}

static CUresult status_locked(CUcontext context, CUstream handle, int *status)
{
    CUstream stream = sim_stream_find(context, handle);
    if (!stream || !status)
        return stream ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_HANDLE;
    *status = !stream->capture ? CAPTURE_NONE : stream->capture_invalid ? CAPTURE_INVALIDATED : CAPTURE_ACTIVE;
    return CUDA_SUCCESS;
}

/* What is captured next depends on what was captured last, since a capture is of one stream. */
static CUresult info_locked(CUcontext context, CUstream handle, int *status, cuuint64_t *id, CUgraph *graph,
                            const void ***dependencies, size_t *count)
{
    CUresult result = status_locked(context, handle, status);
    CUstream stream = result ? NULL : sim_stream_find(context, handle);
    if (!stream || !stream->capture)
        return result;
    CUgraph capture = stream->capture;
    capture->tail = NULL;
    for (const struct sim_operation *operation = capture->first; operation; operation = operation->next)
        capture->tail = operation;
    if (id)
        *id = capture->capture;
    if (graph)
        *graph = capture;
    if (dependencies)
        *dependencies = &capture->tail;
    if (count)
        *count = capture->tail != NULL;
    return CUDA_SUCCESS;
}

/* How many nodes there are; nodes themselves are not modelled. */
static CUresult count_locked(CUgraph graph, const void *nodes, size_t *count)
{
    if (!count || !sim_set_has(&graphs, graph))
        return CUDA_ERROR_INVALID_VALUE;
    if (nodes)
        return CUDA_ERROR_NOT_SUPPORTED;
    *count = 0;
    for (const struct sim_operation *operation = graph->first; operation; operation = operation->next)
        ++*count;
    return CUDA_SUCCESS;
}

static bool copy_operations(struct CUgraph_st *to, const struct CUgraph_st *from)
{
    to->first = NULL;
    to->last = &to->first;
    for (const struct sim_operation *operation = from->first; operation; operation = operation->next) {
        struct sim_operation *copy = sim_operation_copy(operation);
        if (!copy) {
            free_operations(to);
            return false;
        }
        *to->last = copy;
        to->last = &copy->next;
    }
    return true;
}

static CUresult instantiate_locked(CUgraphExec *out, CUgraph graph)
{
    if (!out || !sim_set_has(&graphs, graph))
        return CUDA_ERROR_INVALID_VALUE;
    CUgraphExec executable = calloc(1, sizeof *executable);
    if (!executable || !copy_operations(&executable->graph, graph)) {
        free(executable);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    if (!sim_set_add(&executables, executable)) {
        free_operations(&executable->graph);
        free(executable);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = executable;
    return CUDA_SUCCESS;
}

/* All or nothing is submitted, unless the stream itself refuses. */
static CUresult launch_locked(CUcontext context, CUgraphExec executable, CUstream handle)
{
    CUstream stream = sim_stream_find(context, handle);
    struct CUgraph_st copy;
    if (!stream)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!sim_set_has(&executables, executable))
        return CUDA_ERROR_INVALID_VALUE;
    if (!copy_operations(&copy, &executable->graph))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = CUDA_SUCCESS;
    while (copy.first && !result) {
        struct sim_operation *operation = copy.first;
        copy.first = operation->next;
        operation->next = NULL;
        result = sim_enqueue(stream, operation);
    }
    free_operations(&copy);
    return result;
}

static CUresult destroy_locked(CUgraph graph)
{
    if (!graph || !sim_set_remove(&graphs, graph))
        return CUDA_ERROR_INVALID_VALUE;
    sim_graph_free(graph);
    return CUDA_SUCCESS;
}

static CUresult destroy_executable_locked(CUgraphExec executable)
{
    if (!executable || !sim_set_remove(&executables, executable))
        return CUDA_ERROR_INVALID_VALUE;
    free_operations(&executable->graph);
    free(executable);
    return CUDA_SUCCESS;
}

static void lock(void)
{
    pthread_mutex_lock(&sim_work_lock);
}

static CUresult unlock(CUresult result)
{
    pthread_mutex_unlock(&sim_work_lock);
    return result;
}

SIM_FUNCTION(cuStreamBeginCapture, cuStreamBeginCapture_v2, 10010, NEEDS_CONTEXT, (CUstream stream, CUstreamCaptureMode mode),
             (lock(), unlock(begin_locked(call.context, stream, (int)mode))))
SIM_FUNCTION(cuStreamEndCapture, cuStreamEndCapture, 10000, NEEDS_CONTEXT, (CUstream stream, CUgraph *graph),
             (lock(), unlock(end_locked(call.context, stream, graph))))
SIM_FUNCTION(cuStreamIsCapturing, cuStreamIsCapturing, 10000, NEEDS_CONTEXT, (CUstream stream, int *status),
             (lock(), unlock(status_locked(call.context, stream, status))))
SIM_FUNCTION(cuStreamGetCaptureInfo, cuStreamGetCaptureInfo_v3, 12030, NEEDS_CONTEXT,
             (CUstream stream, int *status, cuuint64_t *id, CUgraph *graph, const void ***dependencies, const void **edges,
              size_t *count),
             edges ? CUDA_ERROR_NOT_SUPPORTED
                   : (lock(), unlock(info_locked(call.context, stream, status, id, graph, dependencies, count))))
SIM_FUNCTION(cuGraphGetNodes, cuGraphGetNodes, 10000, NEEDS_INIT, (CUgraph graph, void *nodes, size_t *count),
             (lock(), unlock(count_locked(graph, nodes, count))))
SIM_FUNCTION(cuGraphInstantiateWithFlags, cuGraphInstantiateWithFlags, 11040, NEEDS_CONTEXT,
             (CUgraphExec *executable, CUgraph graph, unsigned long long flags),
             (lock(), (void)flags, unlock(instantiate_locked(executable, graph))))
SIM_FUNCTION(cuGraphLaunch, cuGraphLaunch, 10000, NEEDS_CONTEXT, (CUgraphExec executable, CUstream stream),
             (lock(), sim_await_turn(), unlock(launch_locked(call.context, executable, stream))))
SIM_FUNCTION(cuGraphExecDestroy, cuGraphExecDestroy, 10000, NEEDS_INIT, (CUgraphExec executable),
             (lock(), unlock(destroy_executable_locked(executable))))
SIM_FUNCTION(cuGraphDestroy, cuGraphDestroy, 10000, NEEDS_INIT, (CUgraph graph), (lock(), unlock(destroy_locked(graph))))
