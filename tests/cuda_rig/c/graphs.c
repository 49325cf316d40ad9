/* Graphs: their nodes, and the launch of all of them by one call. Kernels compute nothing in a graph
   either; copies and fills are executed anew at each launch, over what their addresses hold then. */

#include "graphs.h"

#include <stdlib.h>
#include <string.h>

/* What a launch executes: the nodes that the graph had when it was instantiated. */
typedef struct {
    Graph *graph;
    size_t count, bytes;
    Gpu *gpu;
} Instance;

static __thread int is_deferred; /* launches leave their nodes to rig_run_nodes */
static __thread const Instance *deferred;

/* ── Sets of nodes ────────────────────────────────────────────────────────────────────────────── */

void
rig_add_to_set(NodeSet *set, Node *node)
{
    for (size_t i = 0; i < set->count; i++) {
        if (set->nodes[i] == node)
            return;
    }
    set->nodes = realloc(set->nodes, (set->count + 1) * sizeof *set->nodes);
    set->nodes[set->count++] = node;
}

void
rig_clear_set(NodeSet *set)
{
    free(set->nodes);
    *set = (NodeSet){NULL, 0};
}

void
rig_copy_set(NodeSet *set, const NodeSet *from)
{
    for (size_t i = 0; i < from->count; i++)
        rig_add_to_set(set, from->nodes[i]);
}

/* ── Graphs and nodes ─────────────────────────────────────────────────────────────────────────── */

Graph *
rig_make_graph(uint64_t id)
{
    Graph *graph = calloc(1, sizeof *graph);
    graph->id = id;
    graph->references = 1;
    return graph;
}

Node *
rig_add_node(Graph *graph, Work work, const NodeSet *needs)
{
    if (graph->count == graph->capacity) {
        graph->capacity = graph->capacity ? 2 * graph->capacity : 64;
        graph->nodes = realloc(graph->nodes, graph->capacity * sizeof *graph->nodes);
    }
    Node *node = calloc(1, sizeof *node);
    node->work = work;
    rig_copy_set(&node->needs, needs);
    return graph->nodes[graph->count++] = node;
}

void
rig_drop_graph(Graph *graph)
{
    if (__atomic_sub_fetch(&graph->references, 1, __ATOMIC_SEQ_CST))
        return;
    for (size_t i = 0; i < graph->count; i++) {
        if (graph->nodes[i]->work.kind == NODE_GRAPH)
            rig_drop_graph(graph->nodes[i]->work.graph);
        rig_clear_set(&graph->nodes[i]->needs);
        free(graph->nodes[i]);
    }
    free(graph->nodes);
    free(graph);
}

EXPORT cudaError_t
cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    const Graph *asked = (const Graph *)graph;
    if (nodes)
        memcpy(nodes, asked->nodes, (*count < asked->count ? *count : asked->count) * sizeof *nodes);
    else
        *count = asked->count;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *needs, cudaGraphEdgeData *edges,
                             size_t *count)
{
    const NodeSet *all = &((const Node *)node)->needs;
    size_t most = needs && *count < all->count ? *count : all->count;
    if (needs && most)
        memcpy(needs, all->nodes, most * sizeof *needs);
    if (edges)
        memset(edges, 0, most * sizeof *edges);
    *count = most;
    return cudaSuccess;
}

/* An empty node; the rig knows no other that is added by itself. */
EXPORT cudaError_t
cudaGraphAddNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *needs,
                 const cudaGraphEdgeData *, size_t count, struct cudaGraphNodeParams *parameters)
{
    if (parameters->type != cudaGraphNodeTypeEmpty)
        return rig_fail(cudaErrorNotSupported);
    const NodeSet all = {(Node **)needs, count};
    *node = (cudaGraphNode_t)rig_add_node((Graph *)graph, (Work){.kind = NODE_EMPTY}, &all);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaGraphDestroy(cudaGraph_t graph)
{
    rig_drop_graph((Graph *)graph);
    return cudaSuccess;
}

/* ── Instances ────────────────────────────────────────────────────────────────────────────────── */

EXPORT cudaError_t
cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long)
{
    Gpu *gpu = rig_here();
    Graph *source = (Graph *)graph;
    size_t size = rig_in_pages(source->count * rig_settings.node_bytes);
    pthread_mutex_lock(&rig_lock);
    int fits = rig_take_memory(gpu, size);
    pthread_mutex_unlock(&rig_lock);
    rig_log("graph cuda:%d %zu nodes, %zu bytes%s", rig_current, source->count, size,
            fits ? "" : " refused");
    if (!fits)
        return rig_fail(cudaErrorMemoryAllocation);
    Instance *instance = malloc(sizeof *instance);
    *instance = (Instance){source, source->count, size, gpu};
    __atomic_add_fetch(&source->references, 1, __ATOMIC_SEQ_CST);
    *made = (cudaGraphExec_t)instance;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaGraphInstantiate(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags)
{
    return cudaGraphInstantiateWithFlags(made, graph, flags);
}

EXPORT cudaError_t
cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    Instance *instance = (Instance *)exec;
    pthread_mutex_lock(&rig_lock);
    instance->gpu->used -= instance->bytes;
    pthread_mutex_unlock(&rig_lock);
    rig_drop_graph(instance->graph);
    free(instance);
    return cudaSuccess;
}

/* ── Launches ─────────────────────────────────────────────────────────────────────────────────── */

static cudaError_t
run(const Graph *graph, size_t from, size_t to)
{
    cudaError_t error = cudaSuccess;
    for (size_t i = from; i < to && error == cudaSuccess; i++) {
        const Work *work = &graph->nodes[i]->work;
        if (work->kind == NODE_COPY)
            error = rig_run_copy(work);
        else if (work->kind == NODE_FILL)
            rig_run_fill(work);
        else if (work->kind == NODE_HOST)
            work->call(work->data);
        else if (work->kind == NODE_EVENT)
            rig_mark_event((Event *)work->event);
        else if (work->kind == NODE_GRAPH)
            error = run(work->graph, 0, work->size);
    }
    return error;
}

EXPORT cudaError_t
cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    const Gpu *gpu = rig_here();
    const Instance *instance = (const Instance *)exec;
    Graph *graph = instance->graph;
    const Work child = {.kind = NODE_GRAPH, .graph = graph, .size = instance->count};
    cudaError_t error;
    deferred = NULL;
    if (rig_record(stream, child, &error)) {
        if (error == cudaSuccess)
            __atomic_add_fetch(&graph->references, 1, __ATOMIC_SEQ_CST);
        return error;
    }
    rig_tick();
    if (rig_is_lost(gpu))
        return rig_fail(cudaErrorUnknown);
    rig_log("launch cuda:%d graph of %zu nodes", rig_current, instance->count);
    if (is_deferred) {
        deferred = instance;
        return cudaSuccess;
    }
    error = run(graph, 0, instance->count);
    return error == cudaSuccess ? error : rig_fail(error);
}

/* ── For values(): captured.py executes the nodes between its own operations ──────────────────── */

/* Leave the nodes of this thread's next launches to rig_run_nodes, or no longer. */
EXPORT void
rig_defer(int defers)
{
    is_deferred = defers;
}

/* The capture of the graph that this thread launched last without its nodes; 0 for none. */
EXPORT uint64_t
rig_deferred(size_t *count)
{
    *count = deferred ? deferred->count : 0;
    return deferred ? deferred->graph->id : 0;
}

EXPORT cudaError_t
rig_run_nodes(size_t from, size_t to)
{
    return run(deferred->graph, from, to);
}
