/* Streams and events. All work is done at once; with RIG_LAG an event is over only after so many
   further launches or copies, so that who relies on the end without waiting for it is caught. */

#include "rig.h"

#include <stdlib.h>
#include <time.h>

typedef struct {
    int priority;
    unsigned flags;
} Stream;

typedef struct {
    int is_recorded;
    uint64_t tick;
    struct timespec at;
} Event;

static uint64_t now;      /* launches and copies begun */
static uint64_t finished; /* all up to here is known to be over */

void
rig_tick(void)
{
    rig_befall(__atomic_add_fetch(&now, 1, __ATOMIC_SEQ_CST));
}

uint64_t
rig_now(void)
{
    return __atomic_load_n(&now, __ATOMIC_SEQ_CST);
}

static void
finish_until(uint64_t tick)
{
    pthread_mutex_lock(&rig_lock);
    if (tick > finished)
        finished = tick;
    pthread_mutex_unlock(&rig_lock);
}

void
rig_finish(void)
{
    finish_until(__atomic_load_n(&now, __ATOMIC_SEQ_CST));
}

static int
is_over(uint64_t tick)
{
    return tick <= finished || __atomic_load_n(&now, __ATOMIC_SEQ_CST) >= tick + rig_settings.lag;
}

/* 0, 1 and 2 are the default streams: legacy and per thread. */
static const Stream *
named(cudaStream_t stream)
{
    static const Stream standard;
    return (uintptr_t)stream > 2 ? (const Stream *)stream : &standard;
}

EXPORT cudaError_t
cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority)
{
    rig_here();
    Stream *made = calloc(1, sizeof *made);
    *made = (Stream){priority, flags};
    *stream = (cudaStream_t)made;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags)
{
    return cudaStreamCreateWithPriority(stream, flags, 0);
}

EXPORT cudaError_t
cudaStreamCreate(cudaStream_t *stream)
{
    return cudaStreamCreateWithPriority(stream, 0, 0);
}

EXPORT cudaError_t
cudaStreamDestroy(cudaStream_t stream)
{
    free(stream);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    *priority = named(stream)->priority;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamGetFlags(cudaStream_t stream, unsigned *flags)
{
    *flags = named(stream)->flags;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    *least = 0;
    *greatest = -5;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamQuery(cudaStream_t)
{
    return is_over(now) ? cudaSuccess : rig_fail(cudaErrorNotReady);
}

EXPORT cudaError_t
cudaStreamSynchronize(cudaStream_t)
{
    rig_here();
    rig_log("wait for a stream");
    rig_finish();
    return cudaSuccess;
}

EXPORT cudaError_t
cudaDeviceSynchronize(void)
{
    rig_here();
    rig_log("wait for a device");
    rig_finish();
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamWaitEvent(cudaStream_t, cudaEvent_t, unsigned)
{
    return cudaSuccess;
}

EXPORT cudaError_t
cudaLaunchHostFunc(cudaStream_t, cudaHostFn_t call, void *data)
{
    call(data);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned)
{
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamIsCapturing(cudaStream_t, enum cudaStreamCaptureStatus *status)
{
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamGetCaptureInfo(cudaStream_t, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                         cudaGraph_t *, const cudaGraphNode_t **, const cudaGraphEdgeData **,
                         size_t *count)
{
    *status = cudaStreamCaptureStatusNone;
    if (id)
        *id = 0;
    if (count)
        *count = 0;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *)
{
    return cudaSuccess;
}

EXPORT cudaError_t
cudaEventCreateWithFlags(cudaEvent_t *event, unsigned)
{
    rig_here();
    *event = (cudaEvent_t)calloc(1, sizeof(Event));
    return cudaSuccess;
}

EXPORT cudaError_t
cudaEventCreate(cudaEvent_t *event)
{
    return cudaEventCreateWithFlags(event, 0);
}

EXPORT cudaError_t
cudaEventDestroy(cudaEvent_t event)
{
    free(event);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t)
{
    rig_here();
    Event *recorded = (Event *)event;
    recorded->is_recorded = 1;
    recorded->tick = __atomic_load_n(&now, __ATOMIC_SEQ_CST);
    clock_gettime(CLOCK_MONOTONIC, &recorded->at);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned)
{
    return cudaEventRecord(event, stream);
}

EXPORT cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    const Event *asked = (const Event *)event;
    int over = !asked->is_recorded || is_over(asked->tick);
    return over ? cudaSuccess : rig_fail(cudaErrorNotReady);
}

EXPORT cudaError_t
cudaEventSynchronize(cudaEvent_t event)
{
    rig_log("wait for an event");
    finish_until(((const Event *)event)->tick);
    return cudaSuccess;
}

/* The host's time: the rig knows of no other. */
EXPORT cudaError_t
cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to)
{
    const struct timespec *start = &((const Event *)from)->at, *end = &((const Event *)to)->at;
    double seconds = (double)(end->tv_sec - start->tv_sec);
    seconds += 1e-9 * (double)(end->tv_nsec - start->tv_nsec);
    *milliseconds = (float)(1e3 * seconds);
    return cudaSuccess;
}
