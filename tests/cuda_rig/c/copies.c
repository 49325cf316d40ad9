/* Copies and fills: small ones are executed, large ones are only a tick of the clock. In a capturing
   stream they become nodes, executed when the graph is launched. */

#include "graphs.h"

#include <string.h>

static int
is_pageable(const void *pointer, int owner)
{
    return owner < 0 && !rig_is_pinned(pointer);
}

/* Carry bytes from one place to another, at least one of them on a GPU. */
static cudaError_t
carry(void *to, const void *from, size_t size)
{
    int target = rig_owner(to), source = rig_owner(from);
    if ((target >= 0 && rig_is_lost(rig_visible(target))) ||
        (source >= 0 && rig_is_lost(rig_visible(source))))
        return rig_fail(cudaErrorUnknown);
    if (rig_spoil(source, target, to, size))
        return cudaSuccess;
    if (size <= rig_settings.copy_limit) {
        memmove(to, from, size);
        rig_mark(to, size);
    }
    return cudaSuccess;
}

/* Record a copy, or refuse it: pageable memory may be gone when the graph is launched. Return 1 if
   there is nothing to execute. */
static int
is_captured(cudaStream_t stream, Work copy, cudaError_t *error)
{
    if (!rig_is_capturing())
        return 0;
    int target = rig_owner(copy.to), source = rig_owner(copy.from);
    if (is_pageable(copy.from, source) || is_pageable(copy.to, target)) {
        *error = rig_refuse_in_stream(stream);
        return *error != cudaSuccess;
    }
    if (!rig_record(stream, copy, error))
        return 0;
    if (*error == cudaSuccess)
        rig_log("capture copy %d to %d, %zu bytes", source, target, copy.size * copy.rows);
    return 1;
}

static cudaError_t
copy(void *to, const void *from, size_t size, cudaStream_t stream)
{
    rig_here();
    if (!size)
        return cudaSuccess;
    const Work work = {.kind = NODE_COPY, .to = to, .from = from, .size = size, .rows = 1};
    cudaError_t error;
    if (is_captured(stream, work, &error))
        return error;
    int target = rig_owner(to), source = rig_owner(from);
    if (target < 0 && source < 0) {
        memcpy(to, from, size);
        return cudaSuccess;
    }
    rig_tick();
    if (rig_is_logging()) {
        int is_slow = is_pageable(from, source) || is_pageable(to, target);
        rig_log("copy %d to %d, %zu bytes%s", source, target, size, is_slow ? ", pageable" : "");
    }
    return carry(to, from, size);
}

/* Fill memory of a GPU, as far as fills are executed. */
static void
set(void *to, int value, size_t size)
{
    if (!value) {
        rig_clear(rig_visible(rig_owner(to)), (uintptr_t)to, size);
    } else if (size <= rig_settings.copy_limit) {
        memset(to, value, size);
        rig_mark(to, size);
    }
}

static cudaError_t
fill(void *to, int value, size_t size, cudaStream_t stream)
{
    rig_here();
    if (rig_owner(to) < 0)
        return rig_fail(cudaErrorInvalidValue);
    const Work work = {.kind = NODE_FILL, .to = to, .value = value, .size = size};
    cudaError_t error;
    if (rig_record(stream, work, &error))
        return error;
    rig_tick();
    set(to, value, size);
    return cudaSuccess;
}

/* The source and the target must be there still: a graph has kept nothing but their addresses. */
cudaError_t
rig_run_copy(const Work *work)
{
    if (is_pageable(work->from, rig_owner(work->from)) ||
        is_pageable(work->to, rig_owner(work->to)))
        return cudaErrorIllegalAddress;
    cudaError_t error = cudaSuccess;
    for (size_t row = 0; row < work->rows && error == cudaSuccess; row++)
        error = carry((char *)work->to + row * work->to_pitch,
                      (const char *)work->from + row * work->from_pitch, work->size);
    return error;
}

void
rig_run_fill(const Work *work)
{
    set(work->to, work->value, work->size);
}

EXPORT cudaError_t
cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind, cudaStream_t stream)
{
    return copy(to, from, size, stream);
}

EXPORT cudaError_t
cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind)
{
    cudaError_t error = rig_refuse_synchronous();
    if (error == cudaSuccess)
        error = copy(to, from, size, cudaStreamLegacy);
    if (error != cudaSuccess)
        return error;
    rig_log("wait for a copy");
    rig_finish();
    return cudaSuccess;
}

EXPORT cudaError_t
cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t stream)
{
    return copy(to, from, size, stream);
}

EXPORT cudaError_t
cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                  size_t height, enum cudaMemcpyKind, cudaStream_t stream)
{
    const Work work = {
        .kind = NODE_COPY, .to = to, .from = from, .size = width, .rows = height,
        .to_pitch = to_pitch, .from_pitch = from_pitch,
    };
    cudaError_t error;
    if (is_captured(stream, work, &error))
        return error;
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width, stream);
    return cudaSuccess;
}

/* A __device__ variable is read by kernels alone. */
EXPORT cudaError_t
cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, enum cudaMemcpyKind)
{
    rig_here();
    return rig_refuse_synchronous();
}

EXPORT cudaError_t
cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream)
{
    return fill(to, value, size, stream);
}

EXPORT cudaError_t
cudaMemset(void *to, int value, size_t size)
{
    cudaError_t error = rig_refuse_synchronous();
    return error == cudaSuccess ? fill(to, value, size, cudaStreamLegacy) : error;
}
