/* Copies and fills: small ones are executed, large ones are only a tick of the clock. */

#include "rig.h"

#include <string.h>

static cudaError_t
copy(void *to, const void *from, size_t size)
{
    rig_here();
    if (!size)
        return cudaSuccess;
    int target = rig_owner(to), source = rig_owner(from);
    if (target < 0 && source < 0) {
        memcpy(to, from, size);
        return cudaSuccess;
    }
    rig_tick();
    if (rig_is_logging()) {
        int is_pageable = (source < 0 && !rig_is_pinned(from)) || (target < 0 && !rig_is_pinned(to));
        rig_log("copy %d to %d, %zu bytes%s", source, target, size, is_pageable ? ", pageable" : "");
    }
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

static cudaError_t
fill(void *to, int value, size_t size)
{
    rig_here();
    int target = rig_owner(to);
    if (target < 0)
        return rig_fail(cudaErrorInvalidValue);
    rig_tick();
    if (!value) {
        rig_clear(rig_visible(target), (uintptr_t)to, size);
    } else if (size <= rig_settings.copy_limit) {
        memset(to, value, size);
        rig_mark(to, size);
    }
    return cudaSuccess;
}

EXPORT cudaError_t
cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind, cudaStream_t)
{
    return copy(to, from, size);
}

EXPORT cudaError_t
cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind)
{
    cudaError_t error = copy(to, from, size);
    rig_log("wait for a copy");
    rig_finish();
    return error;
}

EXPORT cudaError_t
cudaMemcpyPeerAsync(void *to, int, const void *from, int, size_t size, cudaStream_t)
{
    return copy(to, from, size);
}

EXPORT cudaError_t
cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                  size_t height, enum cudaMemcpyKind, cudaStream_t)
{
    for (size_t row = 0; row < height; row++)
        copy((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return cudaSuccess;
}

/* A __device__ variable is read by kernels alone. */
EXPORT cudaError_t
cudaMemcpyToSymbol(const void *, const void *, size_t, size_t, enum cudaMemcpyKind)
{
    rig_here();
    return cudaSuccess;
}

EXPORT cudaError_t
cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t)
{
    return fill(to, value, size);
}

EXPORT cudaError_t
cudaMemset(void *to, int value, size_t size)
{
    return fill(to, value, size);
}
