/* cuBLAS, cuDNN, cuSPARSE, cuSOLVER, NCCL: their handles and versions, and what PyTorch reads from
   them. Their computing functions are stubs (build.py), which count as launches in the stream that
   their first argument, a handle, was given. The libraries' enumerations are ints here, and 0 is
   success in all of them. */

#include "graphs.h"

#include <stdlib.h>
#include <string.h>

#define CREATES(name)    \
    EXPORT int           \
    name(void **object)  \
    {                    \
        *object = calloc(1, 256); \
        return 0;        \
    }

#define DESTROYS(name)   \
    EXPORT int           \
    name(void *object)   \
    {                    \
        free(object);    \
        return 0;        \
    }

enum { NOT_INITIALIZED = 1, EXECUTION_FAILED = 13, MAX_HANDLES = 1 << 10 };

typedef struct {
    const void *handle;
    cudaStream_t stream;
} Handle;

static Handle handles[MAX_HANDLES];
static int num_handles;

/* The stream of a handle, to be read or set; NULL where the handle is unknown. The lock is held. */
static cudaStream_t *
find_stream(const void *handle)
{
    for (int i = 0; i < num_handles; i++) {
        if (handles[i].handle == handle)
            return &handles[i].stream;
    }
    return NULL;
}

static cudaStream_t
stream_of(const void *handle)
{
    pthread_mutex_lock(&rig_lock);
    const cudaStream_t *found = find_stream(handle);
    cudaStream_t stream = found ? *found : cudaStreamLegacy;
    pthread_mutex_unlock(&rig_lock);
    return stream;
}

/* A handle takes memory when it is made, which a capture may not allow. */
#define CREATES_HANDLE(name)                       \
    EXPORT int                                     \
    name(void **object)                            \
    {                                              \
        if (rig_refuse_unsafe() != cudaSuccess)    \
            return NOT_INITIALIZED;                \
        *object = calloc(1, 256);                  \
        return 0;                                  \
    }

#define DESTROYS_HANDLE(name)                      \
    EXPORT int                                     \
    name(void *object)                             \
    {                                              \
        pthread_mutex_lock(&rig_lock);             \
        cudaStream_t *found = find_stream(object); \
        if (found)                                 \
            *(Handle *)((char *)found - offsetof(Handle, stream)) = handles[--num_handles]; \
        pthread_mutex_unlock(&rig_lock);           \
        free(object);                              \
        return 0;                                  \
    }

#define SETS_STREAM(name)                          \
    EXPORT int                                     \
    name(void *handle, cudaStream_t stream)        \
    {                                              \
        rig_log("stub %s", #name);                 \
        set_stream(handle, stream);                \
        return 0;                                  \
    }

static void
set_stream(const void *handle, cudaStream_t stream)
{
    pthread_mutex_lock(&rig_lock);
    cudaStream_t *found = find_stream(handle);
    if (found)
        *found = stream;
    else if (num_handles < MAX_HANDLES)
        handles[num_handles++] = (Handle){handle, stream};
    pthread_mutex_unlock(&rig_lock);
}

CREATES_HANDLE(cublasCreate_v2)
DESTROYS_HANDLE(cublasDestroy_v2)
SETS_STREAM(cublasSetStream_v2)
CREATES(cublasLtCreate)
DESTROYS(cublasLtDestroy)
CREATES_HANDLE(cudnnCreate)
DESTROYS_HANDLE(cudnnDestroy)
SETS_STREAM(cudnnSetStream)
CREATES_HANDLE(cusparseCreate)
DESTROYS_HANDLE(cusparseDestroy)
SETS_STREAM(cusparseSetStream)
CREATES_HANDLE(cusolverDnCreate)
DESTROYS_HANDLE(cusolverDnDestroy)
SETS_STREAM(cusolverDnSetStream)
CREATES(cublasLtMatmulPreferenceCreate)
DESTROYS(cublasLtMatmulPreferenceDestroy)
DESTROYS(cublasLtMatmulDescDestroy)
DESTROYS(cublasLtMatrixLayoutDestroy)

EXPORT int
cublasLtMatmulDescCreate(void **object, int, int)
{
    *object = calloc(1, 256);
    return 0;
}

EXPORT int
cublasLtMatrixLayoutCreate(void **object, int, uint64_t, uint64_t, int64_t)
{
    *object = calloc(1, 256);
    return 0;
}

/* One algorithm, which needs no workspace: PyTorch takes as much as it offers, whatever is asked. */
EXPORT int
cublasLtMatmulAlgoGetHeuristic(void *, void *, void *, void *, void *, void *, void *, int,
                               void *result, int *count)
{
    memset(result, 0, 96); /* a cublasLtMatmulHeuristicResult_t */
    *count = 1;
    return 0;
}

EXPORT int
cublasGetVersion_v2(void *, int *version)
{
    *version = 130101;
    return 0;
}

EXPORT size_t
cublasLtGetVersion(void)
{
    return 130101;
}

EXPORT int
cublasGetPointerMode_v2(void *, int *mode)
{
    *mode = 0;
    return 0;
}

EXPORT int
cublasGetMathMode(void *, int *mode)
{
    *mode = 0;
    return 0;
}

EXPORT const char *
cublasGetStatusString(int)
{
    return "a status of the CUDA rig's cuBLAS";
}

EXPORT size_t
cudnnGetVersion(void)
{
    return 92000;
}

EXPORT size_t
cudnnGetCudartVersion(void)
{
    return CUDART_VERSION;
}

/* Kinds 0, 1, 2: major, minor, patch. */
EXPORT int
cudnnGetProperty(int kind, int *value)
{
    static const int version[] = {9, 20, 0};
    *value = kind >= 0 && kind < 3 ? version[kind] : 0;
    return 0;
}

EXPORT const char *
cudnnGetErrorString(int)
{
    return "a status of the CUDA rig's cuDNN";
}

EXPORT void
cudnnGetLastErrorString(char *text, size_t room)
{
    if (room)
        *text = 0;
}

EXPORT int
ncclGetVersion(int *version)
{
    *version = 22907;
    return 0;
}

/* Count a call of a library as a launch in a stream. Return 0 for success. */
static int
launch(const char *name, cudaStream_t stream)
{
    rig_here();
    cudaError_t error;
    if (rig_record(stream, (Work){.kind = NODE_KERNEL}, &error)) {
        if (error == cudaSuccess)
            rig_log("capture %s", name);
        return error == cudaSuccess ? 0 : EXECUTION_FAILED;
    }
    rig_log("stub %s", name);
    rig_tick();
    return 0;
}

/* cuBLASLt takes the stream as an argument, the last one. */
EXPORT int
cublasLtMatmul(void *, void *, const void *, const void *, void *, const void *, void *,
               const void *, const void *, void *, void *, void *, const void *, void *, size_t,
               cudaStream_t stream)
{
    return launch("cublasLtMatmul", stream);
}

/* What every stub calls. */
EXPORT int
rig_stub(const char *name, const void *handle, int computes)
{
    if (computes)
        return launch(name, stream_of(handle));
    rig_log("stub %s", name);
    return 0;
}
