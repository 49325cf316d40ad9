/* Kernels: which were compiled in, and that they are started. None is run. */

#include "graphs.h"

#include <stdlib.h>

typedef struct {
    const void *function;
    const char *name;
} Kernel;

typedef struct {
    dim3 grid, block;
    size_t shared_bytes;
    void *stream;
} Configuration;

static Kernel *kernels;
static size_t num_kernels, kernel_room;
static int is_sorted;
static __thread Configuration pushed[8];
static __thread int num_pushed;

/* ── What a library registers when it is loaded ───────────────────────────────────────────────── */

EXPORT void **
__cudaRegisterFatBinary(void *)
{
    return calloc(1, sizeof(void *));
}

EXPORT void
__cudaRegisterFatBinaryEnd(void **)
{
}

EXPORT void
__cudaUnregisterFatBinary(void **)
{
}

EXPORT char
__cudaInitModule(void **)
{
    return 1;
}

EXPORT void
__cudaRegisterVar(void **, char *, char *, const char *, int, size_t, int, int)
{
}

EXPORT void
__cudaRegisterFunction(void **, const char *function, char *, const char *name, int, void *, void *,
                       void *, void *, int *)
{
    pthread_mutex_lock(&rig_lock);
    if (num_kernels == kernel_room) {
        kernel_room = kernel_room ? 2 * kernel_room : 1 << 16;
        kernels = realloc(kernels, kernel_room * sizeof *kernels);
    }
    kernels[num_kernels++] = (Kernel){function, name};
    is_sorted = 0;
    pthread_mutex_unlock(&rig_lock);
}

/* ── Launches ─────────────────────────────────────────────────────────────────────────────────── */

static int
by_function(const void *first, const void *second)
{
    const void *one = ((const Kernel *)first)->function, *other = ((const Kernel *)second)->function;
    return one < other ? -1 : one > other;
}

static const char *
name_of(const void *function)
{
    pthread_mutex_lock(&rig_lock);
    if (!is_sorted)
        qsort(kernels, num_kernels, sizeof *kernels, by_function);
    is_sorted = 1;
    const Kernel key = {function, NULL};
    const Kernel *found = bsearch(&key, kernels, num_kernels, sizeof *kernels, by_function);
    pthread_mutex_unlock(&rig_lock);
    return found ? found->name : "?";
}

/* A grid or block that CUDA refuses is refused; an empty one is the usual mistake. */
static cudaError_t
launch(const void *function, dim3 grid, dim3 block, cudaStream_t stream)
{
    const Gpu *gpu = rig_here();
    size_t threads = (size_t)block.x * block.y * block.z;
    int is_valid = grid.x && grid.y && grid.z && threads && threads <= 1024 && grid.y <= 65535 &&
                   grid.z <= 65535;
    cudaError_t error;
    if (is_valid && rig_record(stream, (Work){.kind = NODE_KERNEL}, &error)) {
        if (rig_is_logging() && error == cudaSuccess)
            rig_log("capture cuda:%d %s", rig_current, name_of(function));
        return error;
    }
    rig_tick();
    if (rig_is_lost(gpu))
        return rig_fail(cudaErrorUnknown);
    if (rig_is_logging())
        rig_log("launch cuda:%d %s", rig_current, name_of(function));
    return is_valid ? cudaSuccess : rig_fail(cudaErrorInvalidConfiguration);
}

EXPORT cudaError_t
cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **, size_t, cudaStream_t stream)
{
    return launch(function, grid, block, stream);
}

EXPORT cudaError_t
cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **, size_t,
                            cudaStream_t stream)
{
    return launch(function, grid, block, stream);
}

EXPORT cudaError_t
cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **)
{
    return launch(function, config->gridDim, config->blockDim, config->stream);
}

EXPORT cudaError_t
__cudaGetKernel(cudaKernel_t *kernel, const void *function)
{
    *kernel = (cudaKernel_t)function;
    return cudaSuccess;
}

EXPORT cudaError_t
__cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **, size_t,
                   cudaStream_t stream)
{
    return launch(kernel, grid, block, stream);
}

/* `kernel<<<…>>>()` pushes what stands between the brackets; the kernel's own stub takes it. */
EXPORT unsigned
__cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared_bytes, void *stream)
{
    if (num_pushed == sizeof pushed / sizeof *pushed)
        return 1;
    pushed[num_pushed++] = (Configuration){grid, block, shared_bytes, stream};
    return 0;
}

EXPORT cudaError_t
__cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared_bytes, void *stream)
{
    if (!num_pushed)
        return rig_fail(cudaErrorInvalidConfiguration);
    const Configuration *top = &pushed[--num_pushed];
    *grid = top->grid;
    *block = top->block;
    *shared_bytes = top->shared_bytes;
    *(void **)stream = top->stream;
    return cudaSuccess;
}

/* ── What a kernel is asked about ─────────────────────────────────────────────────────────────── */

EXPORT cudaError_t
cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *)
{
    const Gpu *gpu = rig_here();
    /* PyTorch's wheels bring no code for 8.7 and 8.9: that of 8.6 runs there. */
    int code = gpu->major == 8 && gpu->minor > 6 ? 86 : 10 * gpu->major + gpu->minor;
    *attributes = (struct cudaFuncAttributes){
        .maxThreadsPerBlock = 1024,
        .numRegs = 32,
        .binaryVersion = code,
        .ptxVersion = code,
        .maxDynamicSharedSizeBytes = rig_shared_bytes(gpu) - (int)KIB,
    };
    return cudaSuccess;
}

EXPORT cudaError_t
cudaFuncSetAttribute(const void *, enum cudaFuncAttribute attribute, int value)
{
    int most = rig_shared_bytes(rig_here()) - (int)KIB;
    if (attribute == cudaFuncAttributeMaxDynamicSharedMemorySize && value > most)
        return rig_fail(cudaErrorInvalidValue);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaKernelSetAttributeForDevice(cudaKernel_t, enum cudaFuncAttribute, int, int)
{
    return cudaSuccess;
}

EXPORT cudaError_t
cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *, int threads,
                                                       size_t shared_bytes, unsigned)
{
    const Gpu *gpu = rig_here();
    int by_threads = threads > 0 ? rig_resident_threads(gpu) / threads : 0;
    int by_shared = (int)((size_t)rig_shared_bytes(gpu) / (shared_bytes + KIB));
    int most = rig_resident_blocks(gpu);
    most = by_threads < most ? by_threads : most;
    *count = shared_bytes && by_shared < most ? by_shared : most;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int threads,
                                              size_t shared_bytes)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(count, function, threads,
                                                                  shared_bytes, 0);
}
