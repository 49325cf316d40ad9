/* Device memory: capacity is counted in pages, and addresses are had from an arena for each GPU.

   Nobody writes there but copies, fills and values(): kernels don't. So a model of any size
   fits. What nobody wrote reads as zeros, also where an earlier tensor lay. */

#include "graphs.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

/* ── Addresses ────────────────────────────────────────────────────────────────────────────────── */

static void *
reserve(size_t size)
{
    void *start = mmap(NULL, size, PROT_READ | PROT_WRITE,
                       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == MAP_FAILED) {
        perror("cuda_rig: no addresses for a GPU (is `ulimit -v` set?)");
        abort();
    }
    return start;
}

/* The current GPU, with a context from now on. */
Gpu *
rig_here(void)
{
    rig_begin();
    Gpu *gpu = rig_visible(rig_current);
    pthread_mutex_lock(&rig_lock);
    if (!gpu->has_context) {
        char *start = reserve(ARENA + PAGE);
        madvise(start, ARENA + PAGE, MADV_NOHUGEPAGE);
        gpu->arena = (char *)(((uintptr_t)start + PAGE - 1) / PAGE * PAGE);
        gpu->written = reserve(ARENA / PAGE);
        gpu->ranges = reserve(MAX_RANGES * sizeof *gpu->ranges);
        gpu->used += gpu->context_bytes;
        gpu->has_context = 1;
        rig_has_started = 1;
    }
    pthread_mutex_unlock(&rig_lock);
    return gpu;
}

/* CUDA's number of the GPU that an address belongs to; -1 where none. */
int
rig_owner(const void *pointer)
{
    for (int i = 0; i < rig_num_visible; i++) {
        const Gpu *gpu = rig_visible(i);
        if (gpu->arena && (uintptr_t)pointer - (uintptr_t)gpu->arena < ARENA)
            return i;
    }
    return -1;
}

size_t
rig_in_pages(size_t size)
{
    return (size + PAGE - 1) / PAGE * PAGE;
}

/* The first gap that is large enough; the lock is held. */
int
rig_take_addresses(Gpu *gpu, size_t size, uintptr_t *address)
{
    if (gpu->num_ranges == MAX_RANGES)
        return 0;
    uintptr_t from = (uintptr_t)gpu->arena, end = from + ARENA - SYMBOLS;
    int at = 0;
    for (; at < gpu->num_ranges; at++) {
        if (gpu->ranges[at].address - from >= size)
            break;
        from = gpu->ranges[at].address + gpu->ranges[at].size;
    }
    if (end - from < size)
        return 0;
    memmove(gpu->ranges + at + 1, gpu->ranges + at,
            (size_t)(gpu->num_ranges++ - at) * sizeof *gpu->ranges);
    gpu->ranges[at] = (Range){from, size};
    *address = from;
    return 1;
}

/* The size of what began there; 0 where nothing did. The lock is held. */
size_t
rig_drop_addresses(Gpu *gpu, uintptr_t address)
{
    for (int i = 0; i < gpu->num_ranges; i++) {
        if (gpu->ranges[i].address != address)
            continue;
        size_t size = gpu->ranges[i].size;
        memmove(gpu->ranges + i, gpu->ranges + i + 1,
                (size_t)(--gpu->num_ranges - i) * sizeof *gpu->ranges);
        rig_clear(gpu, address, size);
        return size;
    }
    return 0;
}

/* ── What lies there ──────────────────────────────────────────────────────────────────────────── */

/* Let a range read as zeros again, as far as something was written to it. */
void
rig_clear(Gpu *gpu, uintptr_t from, size_t size)
{
    for (uintptr_t end = from + size, next; from < end; from = next) {
        next = from / PAGE * PAGE + PAGE;
        if (next > end)
            next = end;
        uint8_t *written = &gpu->written[(from - (uintptr_t)gpu->arena) / PAGE];
        if (!*written)
            continue;
        if (next - from == PAGE)
            *written = 0;
        /* Whole pages of the host are given back, so that they take no memory. */
        uintptr_t low = (from + HOST_PAGE - 1) & ~(HOST_PAGE - 1), high = next & ~(HOST_PAGE - 1);
        if (low >= high) {
            memset((void *)from, 0, next - from);
            continue;
        }
        memset((void *)from, 0, low - from);
        madvise((void *)low, high - low, MADV_DONTNEED);
        memset((void *)high, 0, next - high);
    }
}

void
rig_mark(const void *pointer, size_t size)
{
    int ordinal = rig_owner(pointer);
    if (ordinal < 0 || !size)
        return;
    Gpu *gpu = rig_visible(ordinal);
    size_t from = (uintptr_t)pointer - (uintptr_t)gpu->arena;
    memset(gpu->written + from / PAGE, 1, (from + size - 1) / PAGE - from / PAGE + 1);
}

/* The CPU wrote there itself: small.py. */
EXPORT void
rig_wrote(const void *pointer, size_t size)
{
    rig_mark(pointer, size);
}

/* PyTorch's allocator gave a block to a tensor: torch_blocks.cpp. What an earlier tensor left there
   must not be read, since no kernel will write over it. */
EXPORT void
rig_block_taken(void *pointer, size_t size)
{
    int ordinal = rig_owner(pointer);
    if (ordinal >= 0)
        rig_clear(rig_visible(ordinal), (uintptr_t)pointer, size);
}

/* Ask PyTorch's allocator to tell of its blocks, once, when it first takes memory. */
static void
listen_to_torch(void)
{
    static int has_begun;
    Dl_info self;
    char path[4096];
    if (__atomic_exchange_n(&has_begun, 1, __ATOMIC_SEQ_CST) || !dladdr(rig_gpus, &self))
        return;
    const char *slash = strrchr(self.dli_fname, '/');
    int length = slash ? (int)(slash - self.dli_fname + 1) : 0;
    snprintf(path, sizeof path, "%.*slibtorch_blocks.so", length, self.dli_fname);
    void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void (*attach)(void) = library ? (void (*)(void))dlsym(library, "rig_attach") : NULL;
    if (attach)
        attach();
    else
        fprintf(stderr, "cuda_rig: tensors may show what others left in memory: %s\n", dlerror());
}

/* ── cudaMalloc and its kin ───────────────────────────────────────────────────────────────────── */

/* Count memory against the capacity; the lock is held. */
int
rig_take_memory(Gpu *gpu, size_t size)
{
    if (gpu->used + size > gpu->capacity)
        return 0;
    gpu->used += size;
    return 1;
}

EXPORT cudaError_t
cudaMalloc(void **pointer, size_t size)
{
    Gpu *gpu = rig_here();
    uintptr_t address = 0;
    *pointer = NULL;
    cudaError_t error = rig_refuse_unsafe();
    if (error != cudaSuccess || !size)
        return error;
    listen_to_torch();
    size = rig_in_pages(size);
    pthread_mutex_lock(&rig_lock);
    int fits = rig_take_memory(gpu, size);
    if (fits && !rig_take_addresses(gpu, size, &address)) {
        gpu->used -= size;
        fits = 0;
    }
    pthread_mutex_unlock(&rig_lock);
    rig_log("malloc cuda:%d %zu%s", rig_current, size, fits ? "" : " refused");
    *pointer = (void *)address;
    return fits ? cudaSuccess : rig_fail(cudaErrorMemoryAllocation);
}

EXPORT cudaError_t
cudaFree(void *pointer)
{
    rig_begin();
    if (!pointer) {
        rig_here();
        return cudaSuccess;
    }
    int ordinal = rig_owner(pointer);
    if (ordinal < 0)
        return rig_fail(cudaErrorInvalidValue);
    cudaError_t error = rig_refuse_unsafe();
    if (error != cudaSuccess)
        return error;
    Gpu *gpu = rig_visible(ordinal);
    pthread_mutex_lock(&rig_lock);
    size_t size = rig_drop_addresses(gpu, (uintptr_t)pointer);
    gpu->used -= size;
    pthread_mutex_unlock(&rig_lock);
    if (!size)
        return rig_fail(cudaErrorInvalidValue);
    rig_finish(); /* cudaFree waits for all that was begun */
    rig_log("free cuda:%d %zu", ordinal, size);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaMallocAsync(void **pointer, size_t size, cudaStream_t)
{
    return cudaMalloc(pointer, size);
}

EXPORT cudaError_t
cudaFreeAsync(void *pointer, cudaStream_t)
{
    return cudaFree(pointer);
}

EXPORT cudaError_t
cudaMemGetInfo(size_t *available, size_t *total)
{
    const Gpu *gpu = rig_here();
    *available = gpu->capacity - gpu->used;
    *total = gpu->capacity;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    rig_begin();
    memset(attributes, 0, sizeof *attributes);
    int ordinal = rig_owner(pointer);
    if (ordinal >= 0) {
        attributes->type = cudaMemoryTypeDevice;
        attributes->device = ordinal;
        attributes->devicePointer = (void *)pointer;
    } else if (rig_is_pinned(pointer)) {
        attributes->type = cudaMemoryTypeHost;
        attributes->device = rig_current;
        attributes->devicePointer = attributes->hostPointer = (void *)pointer;
    } else {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = cudaInvalidDeviceId;
        attributes->hostPointer = (void *)pointer;
    }
    return cudaSuccess;
}

/* A __device__ variable has a place of its own on each GPU. */
EXPORT cudaError_t
cudaGetSymbolAddress(void **pointer, const void *)
{
    static const size_t room = 64 * KIB;
    Gpu *gpu = rig_here();
    pthread_mutex_lock(&rig_lock);
    if (gpu->symbol_bytes + room > SYMBOLS)
        gpu->symbol_bytes = 0;
    *pointer = gpu->arena + ARENA - SYMBOLS + gpu->symbol_bytes;
    gpu->symbol_bytes += room;
    pthread_mutex_unlock(&rig_lock);
    return cudaSuccess;
}
