/* In place of nvcc's header, which the CUDA wheels leave out: what CUDA's API headers need of it for a C compiler. */
#pragma once
#define CUDARTAPI
#define CUDARTAPI_CDECL
#define CUDA_CB
#define __host__
#define __device__
#define __device_builtin__
#define __device_builtin_texture_type__
#define __device_builtin_surface_type__
#define __cudart_builtin__
#define __inline__ inline
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __builtin_align__(bytes) __align__(bytes)
#define __no_return__ __attribute__((noreturn))
#define __specialization_static
