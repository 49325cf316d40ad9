/* Kernels that Triton compiles at run time: its launcher asks the driver, not the runtime. */

#include "graphs.h"

EXPORT CUresult
cuModuleLoadData(CUmodule *module, const void *image)
{
    *module = (CUmodule)image;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuModuleGetFunction(CUfunction *function, CUmodule module, const char *)
{
    *function = (CUfunction)module;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction)
{
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuFuncSetAttribute(CUfunction, CUfunction_attribute, int)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuFuncSetCacheConfig(CUfunction, CUfunc_cache)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuPointerGetAttribute(void *value, CUpointer_attribute, CUdeviceptr pointer)
{
    *(CUdeviceptr *)value = pointer;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuCtxGetLimit(size_t *value, CUlimit)
{
    *value = 0;
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuCtxSetLimit(CUlimit, size_t)
{
    return CUDA_SUCCESS;
}

EXPORT CUresult
cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction, void **, void **)
{
    rig_here();
    cudaError_t error;
    if (rig_record((cudaStream_t)config->hStream, (Work){.kind = NODE_KERNEL}, &error)) {
        rig_log("capture cuda:%d Triton's %u", rig_current, config->gridDimX);
        return (CUresult)error; /* the driver's numbers are the same */
    }
    rig_tick();
    rig_log("launch cuda:%d Triton's %u", rig_current, config->gridDimX);
    return CUDA_SUCCESS;
}
