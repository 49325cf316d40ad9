/* cuBLAS, cuDNN, cuSPARSE, cuSOLVER, NCCL: their handles and versions, and what PyTorch reads from
   them. Their computing functions are stubs (stubs.py), which count as launches. The libraries'
   enumerations are ints here, and 0 is success in all of them. */

#include "rig.h"

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

CREATES(cublasCreate_v2)
DESTROYS(cublasDestroy_v2)
CREATES(cublasLtCreate)
DESTROYS(cublasLtDestroy)
CREATES(cudnnCreate)
DESTROYS(cudnnDestroy)
CREATES(cusparseCreate)
DESTROYS(cusparseDestroy)
CREATES(cusolverDnCreate)
DESTROYS(cusolverDnDestroy)
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

/* What every stub calls. */
EXPORT void
rig_stub(const char *name, int computes)
{
    rig_log("stub %s", name);
    if (computes) {
        rig_here();
        rig_tick();
    }
}
