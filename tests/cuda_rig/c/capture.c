/* Stream capture: work in a capturing stream becomes nodes of a graph, and what CUDA refuses
   meanwhile is refused with CUDA's errors.

   A capture begins in one stream, its origin. Another stream joins when it waits for an event that
   was recorded in a stream of the capture, and has to be joined back by an event that the origin
   waits for. Each stream has a frontier: the nodes that its next node needs. An operation that isn't
   allowed invalidates the capture: all that follows fails with cudaErrorStreamCaptureInvalidated,
   until cudaStreamEndCapture says so, too, and gives no graph.

   Source: CUDA C++ Programming Guide, "CUDA Graphs: Prohibited and Unhandled Operations", and the
   reference of cudaThreadExchangeStreamCaptureMode. */

#include "graphs.h"

#include <stdlib.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Capture *active; /* captures that have begun and not ended */
static uint64_t num_captures;
static __thread enum cudaStreamCaptureMode thread_mode; /* global, unless it is exchanged */

/* ── Streams and their captures ───────────────────────────────────────────────────────────────── */

/* The default streams have no state: the legacy one never captures. */
static Stream *
capturing(cudaStream_t stream)
{
    Stream *named = (uintptr_t)stream > 2 ? (Stream *)stream : NULL;
    return named && named->capture ? named : NULL;
}

static int
is_legacy(cudaStream_t stream)
{
    return (uintptr_t)stream <= 1;
}

/* A capture on this GPU in a stream that the legacy stream would wait for. */
static Capture *
blocking_capture(void)
{
    for (Capture *capture = active; capture; capture = capture->next) {
        for (const Stream *stream = capture->streams; stream; stream = stream->next) {
            if (stream->device == rig_current && !(stream->flags & cudaStreamNonBlocking))
                return capture;
        }
    }
    return NULL;
}

static void
adopt(Capture *capture, Stream *stream)
{
    stream->capture = capture;
    stream->next = capture->streams;
    capture->streams = stream;
}

static void
release_streams(Capture *capture)
{
    for (Stream *stream = capture->streams, *next; stream; stream = next) {
        next = stream->next;
        stream->capture = NULL;
        stream->next = NULL;
        rig_clear_set(&stream->frontier);
    }
    capture->streams = NULL;
}

static cudaError_t
invalidate(Capture *capture, cudaError_t error)
{
    capture->is_invalid = 1;
    rig_log("capture invalidated: %s", cudaGetErrorName(error));
    return error;
}

/* True if a capture goes on, in whatever stream and thread. */
int
rig_is_capturing(void)
{
    return __atomic_load_n(&active, __ATOMIC_SEQ_CST) != NULL;
}

/* Set CUDA's last error where there is one. */
static cudaError_t
answer(cudaError_t error)
{
    return error == cudaSuccess ? error : rig_fail(error);
}

/* ── Work in streams ──────────────────────────────────────────────────────────────────────────── */

/* The error of work in the legacy stream, or in a capture that has become invalid. */
static cudaError_t
fault_of(cudaStream_t stream)
{
    Capture *blocking = is_legacy(stream) ? blocking_capture() : NULL;
    if (blocking)
        return invalidate(blocking, cudaErrorStreamCaptureImplicit);
    const Stream *captured = capturing(stream);
    return captured && captured->capture->is_invalid ? cudaErrorStreamCaptureInvalidated : cudaSuccess;
}

/* Record work where its stream is capturing. Return 1 if it was recorded or refused, so that there
   is nothing to execute; `outcome` is then what the call returns. */
int
rig_record(cudaStream_t stream, Work work, cudaError_t *outcome)
{
    *outcome = cudaSuccess;
    if (!rig_is_capturing())
        return 0;
    pthread_mutex_lock(&lock);
    *outcome = fault_of(stream);
    Stream *captured = capturing(stream);
    if (captured && *outcome == cudaSuccess) {
        Node *node = rig_add_node(captured->capture->graph, work, &captured->frontier);
        rig_clear_set(&captured->frontier);
        rig_add_to_set(&captured->frontier, node);
    }
    pthread_mutex_unlock(&lock);
    answer(*outcome);
    return captured || *outcome != cudaSuccess;
}

/* Record an event in a capturing stream: it stands for the stream's frontier. */
int
rig_record_event(cudaStream_t stream, Event *event, unsigned flags, cudaError_t *outcome)
{
    if (flags & cudaEventRecordExternal) {
        const Work work = {.kind = NODE_EVENT, .event = (cudaEvent_t)event};
        return rig_record(stream, work, outcome);
    }
    pthread_mutex_lock(&lock);
    *outcome = fault_of(stream);
    const Stream *captured = capturing(stream);
    if (*outcome == cudaSuccess) {
        rig_clear_set(&event->needs);
        event->capture = captured ? captured->capture : NULL;
        if (captured) {
            rig_copy_set(&event->needs, &captured->frontier);
            event->is_recorded = 1;
        }
    }
    pthread_mutex_unlock(&lock);
    answer(*outcome);
    return captured || *outcome != cudaSuccess;
}

/* Let a stream wait for an event, and join the event's capture if it belongs to one. */
static cudaError_t
join(cudaStream_t stream, const Event *event)
{
    const Stream *captured = capturing(stream);
    Capture *source = event->capture, *target = captured ? captured->capture : NULL;
    if (target && target->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    if (!event->is_recorded || (!source && !target))
        return cudaSuccess;
    if (!source)
        return invalidate(target, cudaErrorStreamCaptureIsolation);
    if (!source->is_active)
        return target ? invalidate(target, cudaErrorCapturedEvent) : cudaErrorCapturedEvent;
    if (source->is_invalid)
        return cudaErrorStreamCaptureInvalidated;
    if (target && target != source) {
        invalidate(source, cudaErrorStreamCaptureMerge);
        return invalidate(target, cudaErrorStreamCaptureMerge);
    }
    if ((uintptr_t)stream <= 2)
        return invalidate(source, cudaErrorStreamCaptureImplicit);
    Stream *joined = (Stream *)stream;
    if (!target)
        adopt(source, joined);
    for (size_t i = 0; i < event->needs.count; i++)
        rig_add_to_set(&joined->frontier, event->needs.nodes[i]);
    return cudaSuccess;
}

cudaError_t
rig_join(cudaStream_t stream, Event *event)
{
    pthread_mutex_lock(&lock);
    cudaError_t error = join(stream, event);
    pthread_mutex_unlock(&lock);
    return answer(error);
}

/* ── What is refused during a capture ─────────────────────────────────────────────────────────── */

/* Refuse calls that may disturb a capture, as allocations do, unless the thread's mode allows them:
   in global mode no thread may make them while a global capture goes on, and in no mode but relaxed
   a thread that captures. */
cudaError_t
rig_refuse_unsafe(void)
{
    cudaError_t error = cudaSuccess;
    if (thread_mode == cudaStreamCaptureModeRelaxed || !rig_is_capturing())
        return error;
    pthread_mutex_lock(&lock);
    for (Capture *capture = active; capture; capture = capture->next) {
        int is_own = pthread_equal(capture->thread, pthread_self());
        int prohibits = is_own ? capture->mode != cudaStreamCaptureModeRelaxed
                               : thread_mode == cudaStreamCaptureModeGlobal &&
                                     capture->mode == cudaStreamCaptureModeGlobal;
        if (prohibits)
            error = invalidate(capture, cudaErrorStreamCaptureUnsupported);
    }
    pthread_mutex_unlock(&lock);
    return answer(error);
}

/* Refuse what no capturing stream can do: to be waited for, or asked whether it is done. */
cudaError_t
rig_refuse_in_stream(cudaStream_t stream)
{
    if (!rig_is_capturing())
        return cudaSuccess;
    pthread_mutex_lock(&lock);
    cudaError_t error = fault_of(stream);
    const Stream *captured = capturing(stream);
    if (captured && error == cudaSuccess)
        error = invalidate(captured->capture, cudaErrorStreamCaptureUnsupported);
    pthread_mutex_unlock(&lock);
    return answer(error);
}

/* Refuse to wait for a GPU that has a capturing stream, whatever the mode. */
cudaError_t
rig_refuse_on_device(void)
{
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    for (Capture *capture = active; capture; capture = capture->next) {
        for (const Stream *stream = capture->streams; stream; stream = stream->next) {
            if (stream->device == rig_current) {
                error = invalidate(capture, cudaErrorStreamCaptureUnsupported);
                break;
            }
        }
    }
    pthread_mutex_unlock(&lock);
    return answer(error);
}

/* Refuse calls that use the legacy stream and wait for it. */
cudaError_t
rig_refuse_synchronous(void)
{
    cudaError_t error = rig_refuse_in_stream(cudaStreamLegacy);
    return error == cudaSuccess ? rig_refuse_unsafe() : error;
}

/* Refuse to query or to wait for an event that a capturing stream recorded last. */
cudaError_t
rig_refuse_of_event(const Event *event)
{
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&lock);
    if (event->capture) {
        error = cudaErrorCapturedEvent;
        if (event->capture->is_active)
            invalidate(event->capture, error);
    }
    pthread_mutex_unlock(&lock);
    return answer(error);
}

EXPORT cudaError_t
cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    enum cudaStreamCaptureMode former = thread_mode;
    thread_mode = *mode;
    *mode = former;
    return cudaSuccess;
}

/* ── Begin and end ────────────────────────────────────────────────────────────────────────────── */

EXPORT cudaError_t
cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    rig_here();
    if ((uintptr_t)stream <= 2)
        return rig_fail(cudaErrorStreamCaptureUnsupported);
    if (capturing(stream))
        return rig_fail(cudaErrorIllegalState);
    Capture *capture = calloc(1, sizeof *capture);
    pthread_mutex_lock(&lock);
    *capture = (Capture){
        .id = ++num_captures,
        .mode = mode,
        .thread = pthread_self(),
        .is_active = 1,
        .origin = (Stream *)stream,
        .graph = rig_make_graph(num_captures),
        .next = active,
    };
    adopt(capture, capture->origin);
    __atomic_store_n(&active, capture, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

/* True if every node is one that the origin's stream waits for, by however many steps. */
static int
is_all_joined(Capture *capture)
{
    Graph *graph = capture->graph;
    const NodeSet *last = &capture->origin->frontier;
    for (size_t i = 0; i < last->count; i++)
        last->nodes[i]->is_joined = 1;
    for (size_t i = graph->count; i--;) {
        const Node *node = graph->nodes[i];
        if (!node->is_joined)
            return 0;
        for (size_t j = 0; j < node->needs.count; j++)
            node->needs.nodes[j]->is_joined = 1;
    }
    return 1;
}

/* End a capture in its own stream and thread; its graph is valid where no error is returned. */
static cudaError_t
finish(Capture *capture)
{
    cudaError_t error = cudaSuccess;
    if (capture->is_invalid)
        error = cudaErrorStreamCaptureInvalidated;
    else if (!is_all_joined(capture))
        error = cudaErrorStreamCaptureUnjoined;
    release_streams(capture);
    capture->is_active = 0;
    for (Capture **at = &active; *at; at = &(*at)->next) {
        if (*at == capture) {
            __atomic_store_n(at, capture->next, __ATOMIC_SEQ_CST);
            break;
        }
    }
    return error;
}

EXPORT cudaError_t
cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    *graph = NULL;
    pthread_mutex_lock(&lock);
    const Stream *captured = capturing(stream);
    Capture *capture = captured ? captured->capture : NULL;
    cudaError_t error;
    if (!capture) {
        error = cudaErrorIllegalState;
    } else if (captured != capture->origin) {
        error = invalidate(capture, cudaErrorStreamCaptureUnmatched);
    } else if (capture->mode != cudaStreamCaptureModeRelaxed &&
               !pthread_equal(capture->thread, pthread_self())) {
        error = invalidate(capture, cudaErrorStreamCaptureWrongThread);
    } else {
        error = finish(capture);
        if (error == cudaSuccess)
            *graph = (cudaGraph_t)capture->graph;
        else
            rig_drop_graph(capture->graph);
        capture->graph = NULL;
    }
    pthread_mutex_unlock(&lock);
    return answer(error);
}

/* Take a stream that is destroyed out of its capture, which it invalidates; without its origin a
   capture is over. */
void
rig_leave_capture(cudaStream_t stream)
{
    pthread_mutex_lock(&lock);
    Stream *captured = capturing(stream);
    Capture *capture = captured ? captured->capture : NULL;
    if (capture) {
        invalidate(capture, cudaErrorStreamCaptureUnsupported);
        if (captured == capture->origin) {
            finish(capture);
            rig_drop_graph(capture->graph);
            capture->graph = NULL;
        } else {
            Stream **at = &capture->streams;
            while (*at != captured)
                at = &(*at)->next;
            *at = captured->next;
            rig_clear_set(&captured->frontier);
        }
    }
    pthread_mutex_unlock(&lock);
}

/* ── What a stream says of its capture ────────────────────────────────────────────────────────── */

EXPORT cudaError_t
cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status,
                         unsigned long long *id, cudaGraph_t *graph, const cudaGraphNode_t **needs,
                         const cudaGraphEdgeData **edges, size_t *count)
{
    pthread_mutex_lock(&lock);
    cudaError_t error = cudaSuccess;
    if (is_legacy(stream) && blocking_capture())
        error = cudaErrorStreamCaptureImplicit; /* the capture goes on */
    const Stream *captured = capturing(stream);
    *status = cudaStreamCaptureStatusNone;
    if (captured)
        *status = captured->capture->is_invalid ? cudaStreamCaptureStatusInvalidated
                                                : cudaStreamCaptureStatusActive;
    if (id)
        *id = captured ? captured->capture->id : 0;
    if (graph)
        *graph = captured ? (cudaGraph_t)captured->capture->graph : NULL;
    if (needs)
        *needs = captured ? (const cudaGraphNode_t *)captured->frontier.nodes : NULL;
    if (edges)
        *edges = NULL;
    if (count)
        *count = captured ? captured->frontier.count : 0;
    pthread_mutex_unlock(&lock);
    return answer(error);
}

EXPORT cudaError_t
cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    return cudaStreamGetCaptureInfo(stream, status, NULL, NULL, NULL, NULL, NULL);
}

EXPORT cudaError_t
cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *needs,
                                    const cudaGraphEdgeData *, size_t count, unsigned flags)
{
    pthread_mutex_lock(&lock);
    Stream *captured = capturing(stream);
    if (captured && flags & cudaStreamSetCaptureDependencies)
        rig_clear_set(&captured->frontier);
    for (size_t i = 0; captured && i < count; i++)
        rig_add_to_set(&captured->frontier, (Node *)needs[i]);
    pthread_mutex_unlock(&lock);
    return answer(captured ? cudaSuccess : cudaErrorIllegalState);
}

/* The capture of a stream, 0 for none, and how many nodes it has: captured.py. */
EXPORT uint64_t
rig_capture(cudaStream_t stream, size_t *count)
{
    pthread_mutex_lock(&lock);
    const Stream *captured = capturing(stream);
    uint64_t id = captured ? captured->capture->id : 0;
    *count = captured ? captured->capture->graph->count : 0;
    pthread_mutex_unlock(&lock);
    return id;
}
