/* The driver's interface: contexts, and memory whose addresses are reserved first and backed later,
   as PyTorch's expandable segments use it. */

#include "rig.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

static CUresult
not_supported(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

EXPORT cudaError_t
cudaGetDriverEntryPointByVersion(const char *name, void **entry, unsigned, unsigned long long,
                                 enum cudaDriverEntryPointQueryResult *status)
{
    char newer[128];
    snprintf(newer, sizeof newer, "%s_v2", name);
    *entry = dlsym(RTLD_DEFAULT, newer);
    if (!*entry)
        *entry = dlsym(RTLD_DEFAULT, name);
    if (!*entry) {
        rig_log("driver entry point %s isn't there", name);
        *entry = (void *)not_supported;
    }
    if (status)
        *status = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}

EXPORT CUresult
cuInit(unsigned)
{
    rig_begin();
    if (!rig_num_visible)
        return CUDA_ERROR_NO_DEVICE;
    rig_has_started = 1;
    rig_log("driver started");
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuDriverGetVersion(int *version)
{
    *version = CUDA_VERSION;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuDeviceGetCount(int *count)
{
    rig_begin();
    if (!rig_has_started)
        return CUDA_ERROR_NOT_INITIALIZED;
    *count = rig_num_visible;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuDeviceGet(CUdevice *device, int ordinal)
{
    if (ordinal < 0 || ordinal >= rig_num_visible)
        return CUDA_ERROR_INVALID_DEVICE;
    *device = ordinal;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuDeviceGetName(char *name, int room, CUdevice device)
{
    snprintf(name, (size_t)room, "%s", rig_visible(device)->name);
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    memcpy(uuid, rig_visible(device)->uuid, sizeof *uuid);
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuDeviceTotalMem_v2(size_t *size, CUdevice device)
{
    *size = rig_visible(device)->capacity;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    cudaError_t error = cudaDeviceGetAttribute(value, (enum cudaDeviceAttr)attribute, device);
    return error == cudaSuccess ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult
cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active)
{
    rig_begin();
    *flags = 0;
    *active = rig_visible(device)->has_context;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device)
{
    *context = (CUcontext)rig_visible(device);
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuCtxGetCurrent(CUcontext *context)
{
    Gpu *gpu = rig_visible(rig_current);
    *context = gpu->has_context ? (CUcontext)gpu : NULL;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuCtxSetCurrent(CUcontext context)
{
    for (int i = 0; i < rig_num_visible; i++) {
        if ((CUcontext)rig_visible(i) == context)
            rig_current = i;
    }
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuCtxGetDevice(CUdevice *device)
{
    *device = rig_current;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuGetErrorString(CUresult error, const char **text)
{
    *text = error ? "an error of the CUDA rig's driver" : "no error";
    return CUDA_SUCCESS;
}

/* How a kernel of Hopper's reads a tensor. */
EXPORT CUresult
cuTensorMapEncodeTiled(CUtensorMap *, CUtensorMapDataType, cuuint32_t, void *, const cuuint64_t *,
                       const cuuint64_t *, const cuuint32_t *, const cuuint32_t *,
                       CUtensorMapInterleave, CUtensorMapSwizzle, CUtensorMapL2promotion,
                       CUtensorMapFloatOOBfill)
{
    return CUDA_SUCCESS;
}

/* ── Addresses here, memory there ─────────────────────────────────────────────────────────────── */

typedef struct {
    size_t size;
    int device;
} Backing;

EXPORT CUresult
cuMemGetAllocationGranularity(size_t *size, const CUmemAllocationProp *,
                              CUmemAllocationGranularity_flags)
{
    *size = PAGE;
    return CUDA_SUCCESS;
}

/* Addresses behind all that were reserved before, in the arena's upper half, while there are any:
   then PyTorch's segments lie in the order in which it made them. The lock is held. */
static int
take_behind(Gpu *gpu, size_t size, uintptr_t *from)
{
    static uintptr_t nexts[MAX_GPUS];
    uintptr_t *next = &nexts[gpu - rig_gpus], arena = (uintptr_t)gpu->arena;
    if (*next < arena + ARENA / 2 || *next >= arena + ARENA)
        *next = arena + ARENA / 2;
    if (gpu->num_ranges == MAX_RANGES || arena + ARENA - SYMBOLS - *next < size)
        return rig_take_addresses(gpu, size, from);
    int at = gpu->num_ranges++;
    for (; at > 0 && gpu->ranges[at - 1].address > *next; at--)
        gpu->ranges[at] = gpu->ranges[at - 1];
    gpu->ranges[at] = (Range){*next, size};
    *from = *next;
    *next += size;
    return 1;
}

EXPORT CUresult
cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t, CUdeviceptr, unsigned long long)
{
    Gpu *gpu = rig_here();
    uintptr_t from;
    pthread_mutex_lock(&rig_lock);
    int fits = take_behind(gpu, rig_in_pages(size), &from);
    pthread_mutex_unlock(&rig_lock);
    if (!fits)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *address = from;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuMemAddressFree(CUdeviceptr address, size_t)
{
    int ordinal = rig_owner((void *)address);
    if (ordinal < 0)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&rig_lock);
    size_t size = rig_drop_addresses(rig_visible(ordinal), address);
    pthread_mutex_unlock(&rig_lock);
    return size ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

EXPORT CUresult
cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
            unsigned long long)
{
    int device = properties->location.id;
    pthread_mutex_lock(&rig_lock);
    int fits = rig_take_memory(rig_visible(device), size);
    pthread_mutex_unlock(&rig_lock);
    rig_log("back cuda:%d %zu%s", device, size, fits ? "" : " refused");
    if (!fits)
        return CUDA_ERROR_OUT_OF_MEMORY;
    Backing *made = malloc(sizeof *made);
    *made = (Backing){size, device};
    *handle = (CUmemGenericAllocationHandle)(uintptr_t)made;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuMemRelease(CUmemGenericAllocationHandle handle)
{
    Backing *backing = (Backing *)(uintptr_t)handle;
    pthread_mutex_lock(&rig_lock);
    rig_visible(backing->device)->used -= backing->size;
    pthread_mutex_unlock(&rig_lock);
    free(backing);
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuMemMap(CUdeviceptr, size_t, size_t, CUmemGenericAllocationHandle, unsigned long long)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuMemUnmap(CUdeviceptr address, size_t size)
{
    madvise((void *)address, size, MADV_DONTNEED);
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuMemSetAccess(CUdeviceptr, size_t, const CUmemAccessDesc *, size_t)
{
    return CUDA_SUCCESS;
}
