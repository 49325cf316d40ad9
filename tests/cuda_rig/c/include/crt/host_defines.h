/* The runtime's headers ask for this file of the CUDA toolkit, which PyTorch's packages don't bring:
   the marks that a host's compiler may ignore. */

#ifndef RIG_HOST_DEFINES_H
#define RIG_HOST_DEFINES_H

#define __host__
#define __device__
#define __global__
#define __shared__
#define __constant__
#define __managed__
#define __device_builtin__
#define __device_builtin_surface_type__
#define __device_builtin_texture_type__
#define __cudart_builtin__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __no_return__ __attribute__((noreturn))
#define __align__(size) __attribute__((aligned(size)))
#define __builtin_align__(size) __align__(size)
#define CUDARTAPI
#define CUDARTAPI_CDECL

#endif
