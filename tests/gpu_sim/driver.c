/* The CUDA driver API (libcuda) as torch, inductor and Triton call it. Modules load, launches return at once. */
#define _GNU_SOURCE
#include "simulated.h"
#include <cuda.h>
#include <dlfcn.h>
#include <string.h>

static CUcontext context_of(int device) { return (CUcontext)(0x7000L + device); }

static CUresult unknown(void) {
    simulated_missing("a function of the CUDA driver that is not in the header cuda.h");
    return CUDA_ERROR_NOT_SUPPORTED;
}
void *simulated_driver_function(const char *name) {
    void *function = dlsym(RTLD_DEFAULT, name);
    return function ? function : unknown;
}
CUresult cuGetProcAddress_v2(const char *name, void **function, int version, cuuint64_t flags, CUdriverProcAddressQueryResult *result) {
    *function = simulated_driver_function(name);
    if (result) *result = CU_GET_PROC_ADDRESS_SUCCESS;
    return CUDA_SUCCESS;
}
CUresult cuLogsRegisterCallback(CUlogsCallback callback, void *data, CUlogsCallbackHandle *handle) { return CUDA_SUCCESS; }
CUresult cuLogsUnregisterCallback(CUlogsCallbackHandle handle) { return CUDA_SUCCESS; }

CUresult cuInit(unsigned flags) { return CUDA_SUCCESS; }
CUresult cuDriverGetVersion(int *version) { *version = CUDA_VERSION; return CUDA_SUCCESS; }
CUresult cuGetErrorString(CUresult error, const char **text) { *text = error ? "error of the simulated CUDA driver" : "no error"; return CUDA_SUCCESS; }
CUresult cuGetErrorName(CUresult error, const char **text) { return cuGetErrorString(error, text); }
CUresult cuDeviceGetCount(int *count) { *count = simulated_count(); return CUDA_SUCCESS; }
CUresult cuDeviceGet(CUdevice *device, int number) { *device = number; return CUDA_SUCCESS; }

CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    switch (attribute) {
    case CU_DEVICE_ATTRIBUTE_CLOCK_RATE: *value = 1980000; return CUDA_SUCCESS; /* kHz */
    case CU_DEVICE_ATTRIBUTE_MEMORY_CLOCK_RATE: *value = 2619000; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_GLOBAL_MEMORY_BUS_WIDTH: *value = 5120; return CUDA_SUCCESS;
    case CU_DEVICE_ATTRIBUTE_MAX_REGISTERS_PER_BLOCK: *value = 65536; return CUDA_SUCCESS;
    default: { /* the runtime has the same numbers for its attributes */
        extern int cudaDeviceGetAttribute(int *, int, int);
        return cudaDeviceGetAttribute(value, attribute, device);
    }
    }
}

CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0;
    *active = (int)simulated_devices[device].contexts;
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    simulated_use(device);
    *context = context_of(device);
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = simulated_devices[simulated_current()].contexts ? context_of(simulated_current()) : NULL;
    return CUDA_SUCCESS;
}
CUresult cuCtxSetCurrent(CUcontext context) { return CUDA_SUCCESS; }
CUresult cuCtxGetDevice(CUdevice *device) { *device = simulated_current(); return CUDA_SUCCESS; }
CUresult cuCtxGetLimit(size_t *value, CUlimit limit) { *value = 0; return CUDA_SUCCESS; }
CUresult cuCtxSetLimit(CUlimit limit, size_t value) { return CUDA_SUCCESS; }

CUresult cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer) {
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL) *(int *)data = simulated_device_of((void *)pointer);
    else *(CUdeviceptr *)data = pointer;
    return CUDA_SUCCESS;
}

CUresult cuModuleLoad(CUmodule *module, const char *path) { simulated_here(); *module = simulated_handle(); return CUDA_SUCCESS; }
CUresult cuModuleLoadData(CUmodule *module, const void *image) { return cuModuleLoad(module, ""); }
CUresult cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned count, CUjit_option *options, void **values) { return cuModuleLoad(module, ""); }
CUresult cuModuleUnload(CUmodule module) { return CUDA_SUCCESS; }
CUresult cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name) { *function = simulated_handle(); return CUDA_SUCCESS; }
CUresult cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *options, void **values, unsigned count,
                           CUlibraryOption *library_options, void **library_values, unsigned library_count) {
    *library = simulated_handle();
    return CUDA_SUCCESS;
}
CUresult cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name) { *kernel = simulated_handle(); return CUDA_SUCCESS; }

CUresult cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction function) {
    *value = attribute == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attribute == CU_FUNC_ATTRIBUTE_NUM_REGS ? 64 : 0;
    return CUDA_SUCCESS;
}
CUresult cuFuncSetAttribute(CUfunction function, CUfunction_attribute attribute, int value) { return CUDA_SUCCESS; }
CUresult cuFuncSetCacheConfig(CUfunction function, CUfunc_cache config) { return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int *count, CUfunction function, int threads, size_t shared) { *count = 2; return CUDA_SUCCESS; }
CUresult cuOccupancyMaxActiveClusters(int *count, CUfunction function, const CUlaunchConfig *config) { *count = 2; return CUDA_SUCCESS; }
CUresult cuTensorMapEncodeTiled(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank, void *address, const cuuint64_t *dim,
                                const cuuint64_t *strides, const cuuint32_t *box, const cuuint32_t *element_strides,
                                CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion,
                                CUtensorMapFloatOOBfill fill) { return CUDA_SUCCESS; }
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus *status) { *status = CU_STREAM_CAPTURE_STATUS_NONE; return CUDA_SUCCESS; }
CUresult cuStreamGetCtx(CUstream stream, CUcontext *context) { return cuCtxGetCurrent(context); }

static CUresult launch(void) { simulated_here()->launches++; return CUDA_SUCCESS; }
CUresult cuLaunchKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared,
                        CUstream stream, void **arguments, void **extra) { return launch(); }
CUresult cuLaunchKernelEx(const CUlaunchConfig *config, CUfunction function, void **arguments, void **extra) { return launch(); }
CUresult cuLaunchCooperativeKernel(CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                   unsigned shared, CUstream stream, void **arguments) { return launch(); }
