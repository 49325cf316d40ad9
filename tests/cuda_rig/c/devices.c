/* What the GPUs are: their properties by compute capability, and which of them reach each other. */

#include "rig.h"

#include <stdio.h>
#include <string.h>

/* The figures of a multiprocessor: CUDA C++ Programming Guide, table "Technical Specifications per
   Compute Capability". */
int
rig_shared_bytes(const Gpu *gpu)
{
    if (gpu->major == 7)
        return (gpu->minor == 5 ? 64 : 96) * (int)KIB;
    if (gpu->major == 8 && gpu->minor == 0)
        return 164 * (int)KIB;
    if (gpu->major == 8 || gpu->major == 12)
        return 100 * (int)KIB;
    return 228 * (int)KIB;
}

int
rig_resident_threads(const Gpu *gpu)
{
    if (gpu->major == 7 && gpu->minor == 5)
        return 1024;
    if ((gpu->major == 8 && gpu->minor) || gpu->major == 12)
        return 1536;
    return 2048;
}

int
rig_resident_blocks(const Gpu *gpu)
{
    if (gpu->major == 8 && gpu->minor == 9)
        return 24;
    return (gpu->major == 8 && gpu->minor) || (gpu->major == 7 && gpu->minor == 5) ? 16 : 32;
}

static int
is_there(int ordinal)
{
    rig_begin();
    return ordinal >= 0 && ordinal < rig_num_visible;
}

EXPORT cudaError_t
cudaGetDeviceCount(int *count)
{
    rig_begin();
    *count = rig_num_visible;
    return rig_num_visible ? cudaSuccess : rig_fail(cudaErrorNoDevice);
}

EXPORT cudaError_t
cudaGetDevice(int *ordinal)
{
    *ordinal = rig_current;
    return cudaSuccess;
}

/* Since CUDA 12 this makes a context. */
EXPORT cudaError_t
cudaSetDevice(int ordinal)
{
    if (!is_there(ordinal))
        return rig_fail(cudaErrorInvalidDevice);
    rig_current = ordinal;
    rig_here();
    return cudaSuccess;
}

EXPORT cudaError_t
cudaGetDeviceProperties(struct cudaDeviceProp *out, int ordinal)
{
    if (!is_there(ordinal))
        return rig_fail(cudaErrorInvalidDevice);
    const Gpu *gpu = rig_visible(ordinal);
    *out = (struct cudaDeviceProp){
        .totalGlobalMem = gpu->capacity,
        .major = gpu->major,
        .minor = gpu->minor,
        .multiProcessorCount = gpu->num_processors,
        .maxThreadsPerMultiProcessor = rig_resident_threads(gpu),
        .maxBlocksPerMultiProcessor = rig_resident_blocks(gpu),
        .sharedMemPerBlock = 48 * KIB,
        .sharedMemPerMultiprocessor = (size_t)rig_shared_bytes(gpu),
        .sharedMemPerBlockOptin = (size_t)rig_shared_bytes(gpu) - KIB,
        .reservedSharedMemPerBlock = KIB,
        .regsPerBlock = 65536,
        .regsPerMultiprocessor = 65536,
        .warpSize = 32,
        .memPitch = 0x7fffffff,
        .maxThreadsPerBlock = 1024,
        .maxThreadsDim = {1024, 1024, 64},
        .maxGridSize = {0x7fffffff, 65535, 65535},
        .totalConstMem = 65536,
        .textureAlignment = 512,
        .texturePitchAlignment = 32,
        .canMapHostMemory = 1,
        .concurrentKernels = 1,
        .unifiedAddressing = 1,
        .streamPrioritiesSupported = 1,
        .managedMemory = 1,
        .concurrentManagedAccess = 1,
        .cooperativeLaunch = 1,
        .clusterLaunch = gpu->major >= 9,
        .globalL1CacheSupported = 1,
        .localL1CacheSupported = 1,
        .hostRegisterSupported = 1,
        .memoryPoolsSupported = 1,
        .canUseHostPointerForRegisteredMem = 1,
        .computePreemptionSupported = 1,
        .asyncEngineCount = 2,
        .memoryBusWidth = 384,
        .l2CacheSize = 6 * (int)MIB,
        .pciBusID = FIRST_BUS + rig_physical(ordinal),
    };
    memcpy(out->name, gpu->name, sizeof gpu->name);
    memcpy(&out->uuid, gpu->uuid, sizeof gpu->uuid);
    return cudaSuccess;
}

EXPORT cudaError_t
cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int ordinal)
{
    struct cudaDeviceProp all;
    cudaError_t error = cudaGetDeviceProperties(&all, ordinal);
    if (error != cudaSuccess)
        return error;
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = all.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = all.minor; break;
    case cudaDevAttrMultiProcessorCount: *value = all.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = all.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = all.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = all.maxThreadsPerBlock; break;
    case cudaDevAttrMaxBlockDimX: *value = all.maxThreadsDim[0]; break;
    case cudaDevAttrMaxBlockDimY: *value = all.maxThreadsDim[1]; break;
    case cudaDevAttrMaxBlockDimZ: *value = all.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = all.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: *value = all.maxGridSize[1]; break;
    case cudaDevAttrMaxGridDimZ: *value = all.maxGridSize[2]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = (int)all.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = (int)all.sharedMemPerBlockOptin; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor:
        *value = (int)all.sharedMemPerMultiprocessor;
        break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = KIB; break;
    case cudaDevAttrMaxRegistersPerBlock: *value = all.regsPerBlock; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = all.regsPerMultiprocessor; break;
    case cudaDevAttrWarpSize: *value = all.warpSize; break;
    case cudaDevAttrMaxPitch: *value = (int)all.memPitch; break;
    case cudaDevAttrTextureAlignment: *value = (int)all.textureAlignment; break;
    case cudaDevAttrL2CacheSize: *value = all.l2CacheSize; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = all.memoryBusWidth; break;
    case cudaDevAttrClockRate: *value = 1695000; break;
    case cudaDevAttrMemoryClockRate: *value = 9751000; break;
    case cudaDevAttrPciBusId: *value = all.pciBusID; break;
    case cudaDevAttrUnifiedAddressing:
    case cudaDevAttrCooperativeLaunch:
    case cudaDevAttrConcurrentKernels:
    case cudaDevAttrStreamPrioritiesSupported:
    case cudaDevAttrCanMapHostMemory:
    case cudaDevAttrManagedMemory:
    case cudaDevAttrHostRegisterSupported:
    case cudaDevAttrMemoryPoolsSupported: *value = 1; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

EXPORT cudaError_t
cudaDeviceGetPCIBusId(char *text, int room, int ordinal)
{
    if (!is_there(ordinal))
        return rig_fail(cudaErrorInvalidDevice);
    snprintf(text, (size_t)room, "00000000:%02X:00.0", FIRST_BUS + rig_physical(ordinal));
    return cudaSuccess;
}

EXPORT cudaError_t
cudaDeviceCanAccessPeer(int *can, int ordinal, int peer)
{
    if (!is_there(ordinal) || !is_there(peer))
        return rig_fail(cudaErrorInvalidDevice);
    *can = rig_settings.has_peers && ordinal != peer;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaDeviceEnablePeerAccess(int peer, unsigned)
{
    Gpu *gpu = rig_here();
    if (!rig_settings.has_peers)
        return rig_fail(cudaErrorPeerAccessUnsupported);
    if (gpu->peers >> peer & 1)
        return rig_fail(cudaErrorPeerAccessAlreadyEnabled);
    gpu->peers |= 1u << peer;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaDriverGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaRuntimeGetVersion(int *version)
{
    *version = CUDART_VERSION;
    return cudaSuccess;
}

EXPORT cudaError_t
cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int ordinal)
{
    *pool = (cudaMemPool_t)rig_visible(ordinal);
    return cudaSuccess;
}
