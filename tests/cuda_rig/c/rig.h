/* A CUDA without GPUs, on which PyTorch's own CUDA build runs.

   The devices have memory, streams, events and errors, and compute nothing. One library answers as
   runtime, driver, NVML, cuBLAS and cuDNN, because they share this state; it is put before the real
   ones with LD_PRELOAD. What of them isn't defined in these files is a stub that stubs.py writes.

   Every function that a CUDA library has keeps that library's name and is EXPORTed; what is shared
   between these files begins with rig_. */

#ifndef RIG_H
#define RIG_H

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))
#define KIB ((size_t)1 << 10)
#define MIB ((size_t)1 << 20)
#define GIB ((size_t)1 << 30)
#define HOST_PAGE (4 * KIB)
#define PAGE (2 * MIB)      /* what a GPU's memory is handed out in */
#define ARENA (2048 * GIB)  /* addresses of one GPU; nothing lies behind them until they are touched */
#define SYMBOLS (4 * MIB)   /* at the arena's end: __device__ variables, which aren't counted */
#define FIRST_BUS 0x1a      /* PCI bus of the first GPU */

enum { MAX_GPUS = 16, MAX_RANGES = 1 << 16 };

typedef struct {
    uintptr_t address;
    size_t size;
} Range;

typedef struct {
    size_t capacity, used, context_bytes, neighbour; /* another process has so much of `used` */
    int major, minor, num_processors;
    char name[64];
    uint8_t uuid[16];
    int has_context;
    char *arena;
    uint8_t *written; /* for each PAGE of the arena: whether anything but zeros may lie there */
    Range *ranges;    /* addresses in use, in order */
    int num_ranges;
    size_t symbol_bytes;
    uint32_t peers;   /* a bit for each GPU whose memory this one may reach */
} Gpu;

typedef struct {
    size_t copy_limit; /* copies up to this size are executed */
    int has_peers;
    uint64_t lag;      /* an event is over after so many further launches */
    size_t node_bytes; /* what an instantiated graph takes of its GPU for each node */
} Settings;

extern Gpu rig_gpus[MAX_GPUS];
extern int rig_num_gpus, rig_num_visible, rig_has_started;
extern Settings rig_settings;
extern pthread_mutex_t rig_lock;
extern __thread int rig_current;

/* settings.c */
void rig_begin(void);
void rig_log(const char *format, ...) __attribute__((format(printf, 1, 2)));
int rig_is_logging(void);
int rig_physical(int ordinal);
Gpu *rig_visible(int ordinal);
void rig_write_uuid(const Gpu *gpu, char *text);

/* memory.c */
Gpu *rig_here(void);
int rig_owner(const void *pointer);
size_t rig_in_pages(size_t size);
int rig_take_addresses(Gpu *gpu, size_t size, uintptr_t *address);
size_t rig_drop_addresses(Gpu *gpu, uintptr_t address);
int rig_take_memory(Gpu *gpu, size_t size);
void rig_clear(Gpu *gpu, uintptr_t from, size_t size);
void rig_mark(const void *pointer, size_t size);

/* pinned.c, devices.c, errors.c */
int rig_is_pinned(const void *pointer);
int rig_shared_bytes(const Gpu *gpu);
int rig_resident_threads(const Gpu *gpu);
int rig_resident_blocks(const Gpu *gpu);
cudaError_t rig_fail(cudaError_t error);

/* streams.c: a clock that counts launches and copies */
void rig_tick(void);
void rig_finish(void);
uint64_t rig_now(void);

/* defects.c */
void rig_read_defects(void);
void rig_befall(uint64_t now);
int rig_is_lost(const Gpu *gpu);
int rig_spoil(int source, int target, void *to, size_t size);

#endif
