/* Streams and events. All work is done at once, except what is captured (capture.c); with RIG_LAG an
   event is over only after so many further launches or copies, so that who relies on the end without
   waiting for it is caught. */

#include "graphs.h"

#include <stdlib.h>

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
    *made = (Stream){.priority = priority, .flags = flags, .device = rig_current};
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
    rig_leave_capture(stream);
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
cudaStreamQuery(cudaStream_t stream)
{
    cudaError_t error = rig_refuse_in_stream(stream);
    if (error != cudaSuccess)
        return error;
    return is_over(now) ? cudaSuccess : rig_fail(cudaErrorNotReady);
}

EXPORT cudaError_t
cudaStreamSynchronize(cudaStream_t stream)
{
    rig_here();
    cudaError_t error = rig_refuse_in_stream(stream);
    if (error != cudaSuccess)
        return error;
    rig_log("wait for a stream");
    rig_finish();
    return cudaSuccess;
}

EXPORT cudaError_t
cudaDeviceSynchronize(void)
{
    rig_here();
    cudaError_t error = rig_refuse_on_device();
    if (error != cudaSuccess)
        return error;
    rig_log("wait for a device");
    rig_finish();
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned)
{
    return rig_join(stream, (Event *)event);
}

EXPORT cudaError_t
cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data)
{
    cudaError_t error;
    if (rig_record(stream, (Work){.kind = NODE_HOST, .call = call, .data = data}, &error))
        return error;
    call(data);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned)
{
    cudaError_t error = rig_refuse_in_stream(stream);
    if (error != cudaSuccess)
        return error;
    call(stream, cudaSuccess, data);
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
    rig_clear_set(&((Event *)event)->needs);
    free(event);
    return cudaSuccess;
}

/* Everything begun so far is what the event stands for. */
void
rig_mark_event(Event *event)
{
    event->is_recorded = 1;
    event->tick = __atomic_load_n(&now, __ATOMIC_SEQ_CST);
    clock_gettime(CLOCK_MONOTONIC, &event->at);
}

EXPORT cudaError_t
cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags)
{
    cudaError_t error;
    rig_here();
    if (!rig_record_event(stream, (Event *)event, flags, &error))
        rig_mark_event((Event *)event);
    return error;
}

EXPORT cudaError_t
cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    return cudaEventRecordWithFlags(event, stream, 0);
}

static cudaError_t
refuse_event(const Event *event)
{
    cudaError_t error = rig_refuse_of_event(event);
    return error == cudaSuccess ? rig_refuse_unsafe() : error;
}

EXPORT cudaError_t
cudaEventQuery(cudaEvent_t event)
{
    const Event *asked = (const Event *)event;
    cudaError_t error = refuse_event(asked);
    if (error != cudaSuccess)
        return error;
    int over = !asked->is_recorded || is_over(asked->tick);
    return over ? cudaSuccess : rig_fail(cudaErrorNotReady);
}

EXPORT cudaError_t
cudaEventSynchronize(cudaEvent_t event)
{
    cudaError_t error = refuse_event((const Event *)event);
    if (error != cudaSuccess)
        return error;
    rig_log("wait for an event");
    finish_until(((const Event *)event)->tick);
    return cudaSuccess;
}

/* The host's time: the rig knows of no other. */
EXPORT cudaError_t
cudaEventElapsedTime(float *milliseconds, cudaEvent_t from, cudaEvent_t to)
{
    if (((const Event *)from)->capture || ((const Event *)to)->capture)
        return rig_fail(cudaErrorCapturedEvent);
    const struct timespec *start = &((const Event *)from)->at, *end = &((const Event *)to)->at;
    double seconds = (double)(end->tv_sec - start->tv_sec);
    seconds += 1e-9 * (double)(end->tv_nsec - start->tv_nsec);
    *milliseconds = (float)(1e3 * seconds);
    return cudaSuccess;
}
