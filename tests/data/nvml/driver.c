/* The few functions of libnvidia-ml and libcuda that duoka needs, for a machine with three GPUs:
   0 is slow, 1 is fast and joined to 0 by four NVLinks, 2 fell off the bus. CUDA counts the fast
   one first. The layouts are those of nvml.h and cuda.h. tests/test_detection.py builds it, so that
   NVIDIA's own bindings are called and not only a stand-in for them. */
#include <stdio.h>
#include <string.h>

typedef unsigned int u32;
typedef unsigned long long u64;
typedef int *gpu;

enum { NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15, MISMATCH = 25, INVALID = 2 };
static int gpus[] = {0, 1};

typedef struct { char legacy[16]; u32 domain, bus, device, id, subsystem; char bus_id[32]; } pci_info;
typedef struct { u32 version; u64 total, reserved, free, used; } memory_v2;
typedef struct { u32 pid; u64 used; u32 gpu_instance, compute_instance; } process_info;
typedef struct {
    u32 field, scope; long long timestamp, latency; int type, result;
    union { double real; u32 number; u64 long_number; } value;
} field_value;

int nvmlInitWithFlags(u32 flags) { return 0; }
int nvmlShutdown(void) { return 0; }
const char *nvmlErrorString(int result) { return "an error"; }
int nvmlDeviceGetCount_v2(u32 *count) { *count = 3; return 0; }
int nvmlDeviceGetHandleByIndex_v2(u32 index, gpu *handle) {
    if (index == 2) return GPU_IS_LOST;
    *handle = &gpus[index];
    return 0;
}
int nvmlDeviceGetName(gpu handle, char *name, u32 length) {
    strcpy(name, *handle ? "NVIDIA GeForce RTX 3090" : "NVIDIA GeForce GTX 1080 Ti");
    return 0;
}
int nvmlDeviceGetUUID(gpu handle, char *uuid, u32 length) {
    strcpy(uuid, *handle ? "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6"
                         : "GPU-00000000-0000-0000-0000-0000000000ff");
    return 0;
}
int nvmlDeviceGetPciInfo_v3(gpu handle, pci_info *info) {
    memset(info, 0, sizeof *info);
    sprintf(info->bus_id, "00000000:%02x:00.0", *handle ? 0x41 : 0x1a);
    return 0;
}
int nvmlDeviceGetMemoryInfo_v2(gpu handle, memory_v2 *memory) {
    if (memory->version != 0x02000028) return MISMATCH;
    memory->total = 24ull << 30;
    memory->reserved = 300ull << 20;
    memory->used = 1ull << 30;
    memory->free = memory->total - memory->reserved - memory->used;
    return 0;
}
int nvmlDeviceGetMigMode(gpu handle, u32 *now, u32 *pending) { return NOT_SUPPORTED; }
int nvmlDeviceGetCudaComputeCapability(gpu handle, int *major, int *minor) {
    *major = 8; *minor = 6;
    return 0;
}
int nvmlDeviceGetCurrPcieLinkGeneration(gpu handle, u32 *value) { *value = 1; return 0; }
int nvmlDeviceGetMaxPcieLinkGeneration(gpu handle, u32 *value) { *value = 4; return 0; }
int nvmlDeviceGetCurrPcieLinkWidth(gpu handle, u32 *value) { *value = 16; return 0; }
int nvmlDeviceGetMaxPcieLinkWidth(gpu handle, u32 *value) { *value = 16; return 0; }
int nvmlDeviceGetNvLinkState(gpu handle, u32 link, int *active) {
    if (link >= 4) return INVALID;
    *active = 1;
    return 0;
}
int nvmlDeviceGetNvLinkVersion(gpu handle, u32 link, u32 *version) { *version = 5; return 0; }
int nvmlDeviceGetNvLinkRemoteDeviceType(gpu handle, u32 link, int *type) { *type = 0; return 0; }
int nvmlDeviceGetNvLinkRemotePciInfo_v2(gpu handle, u32 link, pci_info *info) {
    memset(info, 0, sizeof *info);
    sprintf(info->bus_id, "00000000:%02X:00.0", *handle ? 0x1a : 0x41);
    return 0;
}
int nvmlDeviceGetFieldValues(gpu handle, int count, field_value *fields) {
    for (int i = 0; i < count; i++) {
        if (fields[i].field != 90) return INVALID;
        fields[i].type = 1; fields[i].result = 0; fields[i].value.number = 14062;
    }
    return 0;
}
int nvmlDeviceGetComputeRunningProcesses_v3(gpu handle, u32 *count, process_info *found) {
    int fits = found != NULL && *count >= 1;
    *count = 1;
    if (!fits) return INSUFFICIENT_SIZE;
    found[0].pid = 4242;
    found[0].used = *handle ? 900ull << 20 : ~0ull;
    return 0;
}
int nvmlSystemGetProcessName(u32 pid, char *name, u32 length) {
    strcpy(name, "/usr/bin/\xffpython");
    return 0;
}
int nvmlSystemGetDriverVersion(char *version, u32 length) { strcpy(version, "570.1"); return 0; }
int nvmlSystemGetCudaDriverVersion(int *version) { *version = 12080; return 0; }

static int started;
int cuInit(u32 flags) { started = 1; return 0; }
int cuDeviceGetCount(int *count) {
    if (!started) return 3;
    *count = 2;
    return 0;
}
int cuDeviceGet(int *device, int ordinal) { *device = ordinal; return 0; }
int cuDeviceGetUuid_v2(unsigned char *uuid, int device) {
    static const unsigned char fast[16] = {0x89, 0x32, 0xf9, 0x37, 0xd7, 0x2c, 0x41, 0x06,
                                           0xc1, 0x2f, 0x20, 0xbd, 0x9f, 0xae, 0xd9, 0xf6};
    static const unsigned char slow[16] = {[15] = 0xff};
    memcpy(uuid, device ? slow : fast, 16);
    return 0;
}
