/* The host's memory that a driver knows of: allocated by it, or registered with it. */

#include "graphs.h"

#include <sys/mman.h>

enum { MAX_PINNED = 1 << 14 };

static Range pinned[MAX_PINNED];
static int num_pinned;

static size_t
in_host_pages(size_t size)
{
    return (size + HOST_PAGE - 1) / HOST_PAGE * HOST_PAGE;
}

/* The first range that touches another; -1 where none does. The lock is held. */
static int
overlapping(uintptr_t from, size_t size)
{
    for (int i = 0; i < num_pinned; i++) {
        if (from < pinned[i].address + pinned[i].size && pinned[i].address < from + size)
            return i;
    }
    return -1;
}

int
rig_is_pinned(const void *pointer)
{
    pthread_mutex_lock(&rig_lock);
    int at = overlapping((uintptr_t)pointer, 1);
    pthread_mutex_unlock(&rig_lock);
    return at >= 0;
}

static cudaError_t
add(void *pointer, size_t size)
{
    cudaError_t error = cudaSuccess;
    pthread_mutex_lock(&rig_lock);
    if (overlapping((uintptr_t)pointer, size) >= 0)
        error = cudaErrorHostMemoryAlreadyRegistered;
    else if (num_pinned == MAX_PINNED)
        error = cudaErrorMemoryAllocation;
    else
        pinned[num_pinned++] = (Range){(uintptr_t)pointer, size};
    pthread_mutex_unlock(&rig_lock);
    return error == cudaSuccess ? error : rig_fail(error);
}

/* The size of what began there; 0 where nothing did. */
static size_t
drop(void *pointer)
{
    size_t size = 0;
    pthread_mutex_lock(&rig_lock);
    int at = overlapping((uintptr_t)pointer, 1);
    if (at >= 0 && pinned[at].address == (uintptr_t)pointer) {
        size = pinned[at].size;
        pinned[at] = pinned[--num_pinned];
    }
    pthread_mutex_unlock(&rig_lock);
    return size;
}

EXPORT cudaError_t
cudaHostAlloc(void **pointer, size_t size, unsigned)
{
    rig_begin();
    cudaError_t error = rig_refuse_unsafe();
    if (error != cudaSuccess)
        return error;
    size_t whole = in_host_pages(size ? size : 1);
    *pointer = mmap(NULL, whole, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (*pointer == MAP_FAILED)
        return rig_fail(cudaErrorMemoryAllocation);
    rig_log("host alloc %zu", size);
    return add(*pointer, whole);
}

EXPORT cudaError_t
cudaFreeHost(void *pointer)
{
    cudaError_t error = rig_refuse_unsafe();
    if (!pointer || error != cudaSuccess)
        return error;
    size_t size = drop(pointer);
    if (!size)
        return rig_fail(cudaErrorInvalidValue);
    munmap(pointer, size);
    return cudaSuccess;
}

/* Of the page that a pointer points into. */
static uintptr_t
first_byte(const void *pointer)
{
    return (uintptr_t)pointer / HOST_PAGE * HOST_PAGE;
}

EXPORT cudaError_t
cudaHostRegister(void *pointer, size_t size, unsigned)
{
    rig_begin();
    cudaError_t error = rig_refuse_unsafe();
    if (error != cudaSuccess)
        return error;
    rig_log("host register %zu", size);
    if (!pointer || !size)
        return rig_fail(cudaErrorInvalidValue);
    /* The driver locks whole pages, each for one registration only. */
    uintptr_t from = first_byte(pointer), end = (uintptr_t)pointer + size;
    return add((void *)from, in_host_pages(end - from));
}

EXPORT cudaError_t
cudaHostUnregister(void *pointer)
{
    cudaError_t error = rig_refuse_unsafe();
    if (error != cudaSuccess)
        return error;
    return drop((void *)first_byte(pointer)) ? cudaSuccess : rig_fail(cudaErrorHostMemoryNotRegistered);
}
