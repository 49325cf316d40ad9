/* CUDA graphs: what is captured from streams (capture.c), and launched as one (graphs.c). */

#ifndef RIG_GRAPHS_H
#define RIG_GRAPHS_H

#include "rig.h"

#include <time.h>

typedef struct Graph Graph;
typedef struct Capture Capture;

typedef enum {
    NODE_KERNEL, /* a kernel, or a call of a computing library */
    NODE_COPY,
    NODE_FILL,
    NODE_HOST,
    NODE_EVENT,
    NODE_GRAPH,
    NODE_EMPTY,
} NodeKind;

/* The work of one node: what a call would have done in its stream. */
typedef struct {
    NodeKind kind;
    void *to;
    const void *from;
    size_t size, rows, to_pitch, from_pitch; /* of each row, where a copy has several */
    int value;
    cudaHostFn_t call;
    void *data;
    cudaEvent_t event;
    Graph *graph;
} Work;

typedef struct Node Node;

typedef struct {
    Node **nodes;
    size_t count;
} NodeSet;

struct Node {
    Work work;
    NodeSet needs;
    int is_joined; /* the origin's stream waits for it: set when the capture ends */
};

/* Nodes in the order in which they were captured: each after those that it needs. */
struct Graph {
    uint64_t id; /* of its capture */
    int references;
    Node **nodes;
    size_t count, capacity;
};

typedef struct Stream {
    int priority;
    unsigned flags;
    int device;
    Capture *capture;    /* NULL where work is executed */
    NodeSet frontier;    /* the nodes that the stream's next one needs */
    struct Stream *next; /* of the same capture */
} Stream;

/* A capture is kept when it is over: events remember theirs. */
struct Capture {
    uint64_t id;
    enum cudaStreamCaptureMode mode;
    pthread_t thread;
    int is_active, is_invalid;
    Stream *streams; /* the origin is the last */
    Stream *origin;
    Graph *graph;
    Capture *next;
};

typedef struct {
    int is_recorded;
    uint64_t tick;
    struct timespec at;
    Capture *capture; /* NULL where it was recorded in a stream that executes */
    NodeSet needs;
} Event;

/* capture.c */
int rig_is_capturing(void);
int rig_record(cudaStream_t stream, Work work, cudaError_t *outcome);
cudaError_t rig_refuse_unsafe(void);
cudaError_t rig_refuse_in_stream(cudaStream_t stream);
cudaError_t rig_refuse_on_device(void);
cudaError_t rig_refuse_synchronous(void);
cudaError_t rig_refuse_of_event(const Event *event);
int rig_record_event(cudaStream_t stream, Event *event, unsigned flags, cudaError_t *outcome);
cudaError_t rig_join(cudaStream_t stream, Event *event);
void rig_leave_capture(cudaStream_t stream);

/* graphs.c */
Graph *rig_make_graph(uint64_t id);
Node *rig_add_node(Graph *graph, Work work, const NodeSet *needs);
void rig_drop_graph(Graph *graph);
void rig_add_to_set(NodeSet *set, Node *node);
void rig_copy_set(NodeSet *set, const NodeSet *from);
void rig_clear_set(NodeSet *set);

/* copies.c: what a node does when its graph is launched */
cudaError_t rig_run_copy(const Work *work);
void rig_run_fill(const Work *work);

/* streams.c */
void rig_mark_event(Event *event);

#endif
