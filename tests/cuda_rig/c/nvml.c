/* NVML: all GPUs, whatever CUDA_VISIBLE_DEVICES says. Its types are declared here as nvml.h has
   them, which PyTorch's packages don't bring. */

#include "rig.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

enum {
    OK = 0,
    INVALID_ARGUMENT = 2,
    NOT_SUPPORTED = 3,
    NOT_FOUND = 6,
    INSUFFICIENT_SIZE = 7,
    GPU_IS_LOST = 15,
};
enum { NEIGHBOUR = 4242 };

typedef struct {
    char legacy_id[16];
    unsigned domain, bus, device, device_id, subsystem_id;
    char id[32];
} Pci;

typedef struct {
    unsigned version;
    unsigned long long total, reserved, free, used;
} Memory;

typedef struct {
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
} Process;

/* The first version, which PyTorch's out-of-memory message asks for. */
typedef struct {
    unsigned pid;
    unsigned long long used;
} ShortProcess;

typedef struct {
    unsigned version;
    unsigned char cluster_uuid[16];
    unsigned status, clique_id;
    unsigned char state;
    unsigned health_mask;
} FabricInfo;

static unsigned
index_of(const Gpu *gpu)
{
    return (unsigned)(gpu - rig_gpus);
}

EXPORT int
nvmlInit_v2(void)
{
    rig_begin();
    return OK;
}

/* The name that PyTorch looks up. */
EXPORT int
nvmlInit(void)
{
    return nvmlInit_v2();
}

EXPORT int
nvmlInitWithFlags(unsigned)
{
    return nvmlInit_v2();
}

EXPORT int
nvmlShutdown(void)
{
    return OK;
}

EXPORT const char *
nvmlErrorString(int)
{
    return "an error of the CUDA rig's NVML";
}

EXPORT int
nvmlSystemGetDriverVersion(char *version, unsigned room)
{
    snprintf(version, room, "580.0");
    return OK;
}

EXPORT int
nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    *version = CUDA_VERSION;
    return OK;
}

EXPORT int
nvmlSystemGetProcessName(unsigned, char *name, unsigned room)
{
    snprintf(name, room, "python");
    return OK;
}

EXPORT int
nvmlDeviceGetCount_v2(unsigned *count)
{
    *count = (unsigned)rig_num_gpus;
    return OK;
}

EXPORT int
nvmlDeviceGetHandleByIndex_v2(unsigned index, Gpu **device)
{
    if (index >= (unsigned)rig_num_gpus)
        return INVALID_ARGUMENT;
    *device = &rig_gpus[index];
    return rig_is_lost(*device) ? GPU_IS_LOST : OK;
}

EXPORT int
nvmlDeviceGetUUID(Gpu *gpu, char *uuid, unsigned room)
{
    char text[40];
    rig_write_uuid(gpu, text);
    snprintf(uuid, room, "GPU-%s", text);
    return OK;
}

EXPORT int
nvmlDeviceGetHandleByUUID(const char *uuid, Gpu **device)
{
    for (int i = 0; i < rig_num_gpus; i++) {
        char text[48];
        nvmlDeviceGetUUID(&rig_gpus[i], text, sizeof text);
        if (!strcmp(text, uuid)) {
            *device = &rig_gpus[i];
            return OK;
        }
    }
    return NOT_FOUND;
}

EXPORT int
nvmlDeviceGetPciInfo_v3(Gpu *gpu, Pci *pci)
{
    *pci = (Pci){.bus = FIRST_BUS + index_of(gpu)};
    snprintf(pci->id, sizeof pci->id, "00000000:%02X:00.0", pci->bus);
    return OK;
}

EXPORT int
nvmlDeviceGetHandleByPciBusId_v2(const char *id, Gpu **device)
{
    for (int i = 0; i < rig_num_gpus; i++) {
        Pci pci;
        nvmlDeviceGetPciInfo_v3(&rig_gpus[i], &pci);
        if (!strcmp(pci.id, id)) {
            *device = &rig_gpus[i];
            return OK;
        }
    }
    return NOT_FOUND;
}

EXPORT int
nvmlDeviceGetIndex(Gpu *gpu, unsigned *index)
{
    *index = index_of(gpu);
    return OK;
}

EXPORT int
nvmlDeviceGetName(Gpu *gpu, char *name, unsigned room)
{
    snprintf(name, room, "%s", gpu->name);
    return OK;
}

EXPORT int
nvmlDeviceGetCudaComputeCapability(Gpu *gpu, int *major, int *minor)
{
    *major = gpu->major;
    *minor = gpu->minor;
    return OK;
}

EXPORT int
nvmlDeviceGetComputeMode(Gpu *, int *mode)
{
    *mode = 0;
    return OK;
}

/* Whether two GPUs reach each other's memory: OK, or why not. */
EXPORT int
nvmlDeviceGetP2PStatus(Gpu *, Gpu *, int, int *status)
{
    *status = rig_settings.has_peers ? 0 : 1; /* NVML_P2P_STATUS_CHIPSET_NOT_SUPPORTED */
    return OK;
}

EXPORT int
nvmlDeviceGetMemoryInfo_v2(Gpu *gpu, Memory *memory)
{
    memory->total = gpu->capacity;
    memory->reserved = 0;
    memory->used = gpu->used;
    memory->free = gpu->capacity - gpu->used;
    return OK;
}

/* The older structure: total, free, used. */
EXPORT int
nvmlDeviceGetMemoryInfo(Gpu *gpu, unsigned long long *memory)
{
    memory[0] = gpu->capacity;
    memory[1] = gpu->capacity - gpu->used;
    memory[2] = gpu->used;
    return OK;
}

EXPORT int
nvmlDeviceGetMaxPcieLinkGeneration(Gpu *, unsigned *generation)
{
    *generation = 4;
    return OK;
}

EXPORT int
nvmlDeviceGetCurrPcieLinkGeneration(Gpu *gpu, unsigned *generation)
{
    return nvmlDeviceGetMaxPcieLinkGeneration(gpu, generation);
}

EXPORT int
nvmlDeviceGetMaxPcieLinkWidth(Gpu *, unsigned *width)
{
    *width = 16;
    return OK;
}

EXPORT int
nvmlDeviceGetCurrPcieLinkWidth(Gpu *gpu, unsigned *width)
{
    return nvmlDeviceGetMaxPcieLinkWidth(gpu, width);
}

/* This process, on each GPU where it has a context, and the one that RIG_NEIGHBOUR plants. */
EXPORT int
nvmlDeviceGetComputeRunningProcesses_v3(Gpu *gpu, unsigned *count, Process *processes)
{
    unsigned room = *count;
    *count = (unsigned)(gpu->has_context + !!gpu->neighbour);
    if (!*count)
        return OK;
    if (room < *count || !processes)
        return INSUFFICIENT_SIZE;
    if (gpu->neighbour)
        *processes++ = (Process){NEIGHBOUR, gpu->neighbour, ~0u, ~0u};
    if (gpu->has_context)
        *processes = (Process){(unsigned)getpid(), gpu->used - gpu->neighbour, ~0u, ~0u};
    return OK;
}

EXPORT int
nvmlDeviceGetComputeRunningProcesses(Gpu *gpu, unsigned *count, ShortProcess *processes)
{
    Process all[2];
    int status = nvmlDeviceGetComputeRunningProcesses_v3(gpu, count, processes ? all : NULL);
    for (unsigned i = 0; status == OK && i < *count; i++)
        processes[i] = (ShortProcess){all[i].pid, all[i].used};
    return status;
}

EXPORT int
nvmlDeviceGetGraphicsRunningProcesses_v3(Gpu *, unsigned *count, Process *)
{
    *count = 0;
    return OK;
}

/* Of no fabric: NVML_GPU_FABRIC_STATE_NOT_SUPPORTED. */
EXPORT int
nvmlDeviceGetGpuFabricInfoV(Gpu *, FabricInfo *info)
{
    *info = (FabricInfo){.version = info->version};
    return OK;
}

/* What GeForce cards lack. PyTorch wants the names to be there. */
#define LACKS(name) \
    EXPORT int      \
    name(void)      \
    {               \
        return NOT_SUPPORTED; \
    }

LACKS(nvmlDeviceGetMigMode)
LACKS(nvmlDeviceGetFieldValues)
LACKS(nvmlDeviceGetNvLinkState)
LACKS(nvmlDeviceGetNvLinkVersion)
LACKS(nvmlDeviceGetNvLinkRemoteDeviceType)
LACKS(nvmlDeviceGetNvLinkRemotePciInfo_v2)
