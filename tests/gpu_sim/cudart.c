/* The CUDA runtime API (libcudart) of GPUs that compute nothing.
 *
 * Kernel launches return at once. `cudaMalloc` reserves addresses without memory behind them, counts their bytes, and fails when the
 * device is full, so torch's own allocator reports true sizes. Reading from a device gives zeros; with SIMULATED_CUDA_CONTENTS=1
 * copies move bytes, and what was copied to a device can be read back: after a synchronization, if the copy was asynchronous and the
 * host's memory is page-locked.
 *
 * Environment: SIMULATED_CUDA_DEVICES (1), SIMULATED_CUDA_MEMORY (bytes of each device), SIMULATED_CUDA_CONTENTS,
 * SIMULATED_CUDA_FORBIDDEN (a device on which the creation of a context aborts the process), and SIMULATED_CUDA_LOG=1, which
 * writes each call that changes a device's memory to stderr.
 */
#define _GNU_SOURCE
#include "simulated.h"
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define GIB (1L << 30)
#define CONTEXT_BYTES (GIB / 2)        /* about what a context takes on an H100 */
#define ZERO_LIMIT (64L << 20)         /* larger host buffers are left as they are: torch allocates them fresh, as zeros */
#define MULTIPROCESSORS 132
#define SHARED_MEMORY_PER_BLOCK 232448 /* 227 KiB, by opt-in */

struct device simulated_devices[MAX_DEVICES];
static __thread int current;
static __thread cudaError_t last_error;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static long number_from(const char *name, long otherwise) {
    const char *text = getenv(name);
    return text && *text ? atol(text) : otherwise;
}

static int is_set(const char *name) { return number_from(name, 0) != 0; }

static void log_line(const char *what, int device, long bytes) {
    if (is_set("SIMULATED_CUDA_LOG")) fprintf(stderr, "[simulated cuda] %s device %d bytes %ld\n", what, device, bytes);
}

static cudaError_t fail(cudaError_t error) { return last_error = error; }

int simulated_count(void) { return (int)number_from("SIMULATED_CUDA_DEVICES", 1); }
int simulated_current(void) { return current; }

struct device *simulated_use(int number) {
    struct device *device = &simulated_devices[number];
    if (!device->contexts) {
        if (number == number_from("SIMULATED_CUDA_FORBIDDEN", -1)) abort(); /* Python's fault handler shows where */
        device->contexts = 1;
        log_line("context", number, CONTEXT_BYTES);
    }
    return device;
}

struct device *simulated_here(void) { return simulated_use(current); }

void *simulated_handle(void) {
    static long next = 0x10000;
    return (void *)__atomic_add_fetch(&next, 64, __ATOMIC_RELAXED);
}

int simulated_missing(const char *name) {
    fprintf(stderr, "simulated CUDA: %s is called, but tests/gpu_sim does not simulate it. Add it to its C files.\n", name);
    return cudaErrorNotSupported;
}

long simulated_read(const char *field, int number) {
    const struct device *device = &simulated_devices[number];
#define FIELD(name) if (!strcmp(field, #name)) return device->name
    FIELD(contexts); FIELD(allocated); FIELD(peak); FIELD(mallocs); FIELD(launches); FIELD(syncs); FIELD(uploads); FIELD(downloads);
#undef FIELD
    return -1;
}

/* Devices */

cudaError_t cudaGetDeviceCount(int *count) { *count = simulated_count(); return cudaSuccess; }
cudaError_t cudaGetDevice(int *number) { *number = current; return cudaSuccess; }

cudaError_t cudaSetDevice(int number) {
    if (number < 0 || number >= simulated_count()) return fail(cudaErrorInvalidDevice);
    current = number;
    simulated_here(); /* since CUDA 12, this creates the context */
    return cudaSuccess;
}

static void apply_pending(void);
cudaError_t cudaDeviceSynchronize(void) { simulated_here()->syncs++; apply_pending(); return cudaSuccess; }
cudaError_t cudaDriverGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaRuntimeGetVersion(int *version) { *version = CUDART_VERSION; return cudaSuccess; }
cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) { *can = device != peer; return cudaSuccess; }
cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned flags) { return cudaSuccess; }
cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device) {
    snprintf(id, length, "0000:%02x:00.0", device + 1);
    return cudaSuccess;
}

static long memory_of_device(void) { return number_from("SIMULATED_CUDA_MEMORY", 85028372480L); }

cudaError_t cudaMemGetInfo(size_t *available, size_t *total) {
    *total = memory_of_device();
    *available = *total - CONTEXT_BYTES - simulated_here()->allocated;
    return cudaSuccess;
}

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int number) {
    struct cudaDeviceProp p;
    memset(&p, 0, sizeof p);
    strcpy(p.name, "NVIDIA H100 80GB HBM3 (simulated)");
    for (int i = 0; i < 16; i++) p.uuid.bytes[i] = (char)(16 * number + i);
    p.totalGlobalMem = memory_of_device();
    p.major = 9;
    p.multiProcessorCount = MULTIPROCESSORS;
    p.warpSize = 32;
    p.maxThreadsPerBlock = 1024;
    p.maxThreadsPerMultiProcessor = 2048;
    p.maxBlocksPerMultiProcessor = 32;
    p.regsPerBlock = p.regsPerMultiprocessor = 65536;
    p.sharedMemPerBlock = 48 << 10;
    p.sharedMemPerBlockOptin = SHARED_MEMORY_PER_BLOCK;
    p.sharedMemPerMultiprocessor = SHARED_MEMORY_PER_BLOCK + 1024;
    p.l2CacheSize = 50 << 20;
    p.memoryBusWidth = 5120;
    p.maxGridSize[0] = 0x7fffffff;
    p.maxGridSize[1] = p.maxGridSize[2] = 65535;
    p.maxThreadsDim[0] = p.maxThreadsDim[1] = 1024;
    p.maxThreadsDim[2] = 64;
    p.pciBusID = number + 1;
    p.unifiedAddressing = p.concurrentKernels = p.cooperativeLaunch = 1;
    *properties = p;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor: *value = 9; break;
    case cudaDevAttrMultiProcessorCount: *value = MULTIPROCESSORS; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = SHARED_MEMORY_PER_BLOCK; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = SHARED_MEMORY_PER_BLOCK + 1024; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = 48 << 10; break;
    case cudaDevAttrMaxRegistersPerMultiprocessor: *value = 65536; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = 2048; break;
    case cudaDevAttrMaxThreadsPerBlock: *value = 1024; break;
    case cudaDevAttrMaxGridDimX: *value = 0x7fffffff; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = 65535; break;
    case cudaDevAttrWarpSize: *value = 32; break;
    case cudaDevAttrCooperativeLaunch: *value = 1; break;
    default: *value = 0;
    }
    return cudaSuccess;
}

/* Errors */

cudaError_t cudaGetLastError(void) { cudaError_t error = last_error; last_error = cudaSuccess; return error; }
cudaError_t cudaPeekAtLastError(void) { return last_error; }
const char *cudaGetErrorString(cudaError_t error) {
    switch (error) {
    case cudaSuccess: return "no error";
    case cudaErrorMemoryAllocation: return "out of memory";
    case cudaErrorInvalidDevice: return "invalid device ordinal";
    case cudaErrorInvalidValue: return "invalid argument";
    case cudaErrorNotSupported: return "not simulated by tests/gpu_sim";
    case cudaErrorNotReady: return "device not ready";
    default: return "error of the simulated CUDA runtime";
    }
}
const char *cudaGetErrorName(cudaError_t error) { return cudaGetErrorString(error); }

/* Memory: a list of address ranges, each a file in memory, so that another process can open it. */

struct block { char *start; size_t size, mapped; int device, file, is_imported; struct block *next; };
static struct block *blocks; /* on devices, and pinned ones of the host with device -1 */

static struct block *find(const void *pointer) {
    struct block *block = blocks;
    while (block && !((char *)pointer >= block->start && (char *)pointer < block->start + block->mapped)) block = block->next;
    return block;
}

int simulated_device_of(const void *pointer) {
    pthread_mutex_lock(&lock);
    struct block *block = find(pointer);
    int device = block ? block->device : -1;
    pthread_mutex_unlock(&lock);
    return device;
}

static struct block *map_file(int file, size_t size, int device) {
    size_t mapped = (size + 4095) & ~4095UL;
    void *start = mmap(NULL, mapped, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (start == MAP_FAILED) return NULL;
    struct block *block = calloc(1, sizeof *block);
    *block = (struct block){start, size, mapped, device, file, 0, NULL};
    pthread_mutex_lock(&lock);
    block->next = blocks;
    blocks = block;
    pthread_mutex_unlock(&lock);
    return block;
}

static struct block *map_new(size_t size, int device) {
    int file = memfd_create("simulated-cuda", MFD_CLOEXEC);
    if (file < 0 || ftruncate(file, (size + 4095) & ~4095UL)) return NULL;
    return map_file(file, size, device);
}

/* Copies that were asked for and that no synchronization has waited for, in their order. */

struct pending { char *to; const char *from; char *staged; size_t size; int value; struct pending *next; };
static struct pending *pending, **pending_end = &pending;
static pthread_mutex_t pending_lock = PTHREAD_MUTEX_INITIALIZER;

static void defer(struct pending copy) {
    struct pending *one = malloc(sizeof *one);
    *one = copy;
    pthread_mutex_lock(&pending_lock);
    *pending_end = one;
    pending_end = &one->next;
    pthread_mutex_unlock(&pending_lock);
}

static void apply_pending(void) {
    pthread_mutex_lock(&pending_lock);
    while (pending) {
        struct pending *one = pending;
        if (one->from) memcpy(one->to, one->from, one->size); else memset(one->to, one->value, one->size);
        pending = one->next;
        free(one->staged);
        free(one);
    }
    pending_end = &pending;
    pthread_mutex_unlock(&pending_lock);
}

static cudaError_t unmap(void *pointer) {
    if (!pointer) return cudaSuccess;
    apply_pending();
    pthread_mutex_lock(&lock);
    struct block **at = &blocks;
    while (*at && (*at)->start != (char *)pointer) at = &(*at)->next;
    struct block *block = *at;
    if (block) *at = block->next;
    if (block && block->device >= 0 && !block->is_imported) simulated_devices[block->device].allocated -= block->size;
    pthread_mutex_unlock(&lock);
    if (!block) return fail(cudaErrorInvalidValue);
    if (block->device >= 0) log_line("free", block->device, block->size);
    munmap(block->start, block->mapped);
    close(block->file);
    free(block);
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **pointer, size_t size) {
    struct device *device = simulated_here();
    pthread_mutex_lock(&lock);
    int fits = device->allocated + (long)size + CONTEXT_BYTES <= memory_of_device();
    if (fits) device->allocated += size;
    if (fits && device->allocated > device->peak) device->peak = device->allocated;
    device->mallocs++;
    pthread_mutex_unlock(&lock);
    log_line(fits ? "malloc" : "out of memory", current, size);
    struct block *block = fits ? map_new(size, current) : NULL;
    if (!block) return fail(cudaErrorMemoryAllocation);
    *pointer = block->start;
    return cudaSuccess;
}

cudaError_t cudaFree(void *pointer) { return unmap(pointer); }
cudaError_t cudaMallocAsync(void **pointer, size_t size, cudaStream_t stream) { return cudaMalloc(pointer, size); }
cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream) { return unmap(pointer); }

cudaError_t cudaHostAlloc(void **pointer, size_t size, unsigned flags) {
    simulated_here();
    struct block *block = map_new(size, -1);
    if (!block) return fail(cudaErrorMemoryAllocation);
    *pointer = block->start;
    return cudaSuccess;
}

cudaError_t cudaMallocHost(void **pointer, size_t size) { return cudaHostAlloc(pointer, size, 0); }
cudaError_t cudaFreeHost(void *pointer) { return unmap(pointer); }

struct range { char *start; size_t size; struct range *next; };
static struct range *registered; /* page-locked memory that the program has allocated */

cudaError_t cudaHostRegister(void *pointer, size_t size, unsigned flags) {
    struct range *range = malloc(sizeof *range);
    pthread_mutex_lock(&lock);
    *range = (struct range){pointer, size, registered};
    registered = range;
    pthread_mutex_unlock(&lock);
    return cudaSuccess;
}

cudaError_t cudaHostUnregister(void *pointer) {
    apply_pending();
    pthread_mutex_lock(&lock);
    struct range **at = &registered;
    while (*at && (*at)->start != (char *)pointer) at = &(*at)->next;
    struct range *range = *at;
    if (range) *at = range->next;
    pthread_mutex_unlock(&lock);
    free(range);
    return range ? cudaSuccess : fail(cudaErrorInvalidValue);
}

static int is_pageable(const void *pointer) { /* neither on a device nor page-locked */
    pthread_mutex_lock(&lock);
    struct range *range = registered;
    while (range && !((char *)pointer >= range->start && (char *)pointer < range->start + range->size)) range = range->next;
    int pageable = !range && !find(pointer);
    pthread_mutex_unlock(&lock);
    return pageable;
}

cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer) {
    memset(attributes, 0, sizeof *attributes);
    pthread_mutex_lock(&lock);
    struct block *block = find(pointer);
    int is_known = block != NULL, device = block ? block->device : -1;
    pthread_mutex_unlock(&lock);
    attributes->type = !is_known ? cudaMemoryTypeUnregistered : device < 0 ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = device < 0 ? 0 : device;
    attributes->devicePointer = is_known ? (void *)pointer : NULL;
    attributes->hostPointer = device < 0 ? (void *)pointer : NULL;
    return cudaSuccess;
}

static void copy(void *to, const void *from, size_t size, cudaStream_t stream, int waits) {
    struct device *here = simulated_here();
    int target = simulated_device_of(to), source = simulated_device_of(from);
    if (target >= 0 && source < 0) here->uploads++;
    if (target < 0 && source >= 0) here->downloads++;
    if (waits) here->syncs++;
    if (!is_set("SIMULATED_CUDA_CONTENTS") && target >= 0) return;
    if (is_set("SIMULATED_CUDA_CONTENTS") && !waits && !is_pageable(to)) {
        char *staged = is_pageable(from) ? memcpy(malloc(size), from, size) : NULL; /* by the driver, before the call returns */
        defer((struct pending){to, staged ? staged : from, staged, size, 0, NULL});
        return;
    }
    apply_pending();
    if (is_set("SIMULATED_CUDA_CONTENTS") || source < 0)
        memcpy(to, from, size);
    else if (target < 0 && size <= ZERO_LIMIT)
        memset(to, 0, size);
}

static void set(void *to, int value, size_t size) {
    if (is_set("SIMULATED_CUDA_CONTENTS")) defer((struct pending){to, NULL, NULL, size, value, NULL});
}

cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) { copy(to, from, size, 0, 1); return cudaSuccess; }
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    copy(to, from, size, stream, 0);
    return cudaSuccess;
}
cudaError_t cudaMemcpyPeerAsync(void *to, int target, const void *from, int source, size_t size, cudaStream_t stream) {
    copy(to, from, size, stream, 0);
    return cudaSuccess;
}
cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width, size_t height,
                              enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++) copy((char *)to + row * to_pitch, (char *)from + row * from_pitch, width, stream, 0);
    return cudaSuccess;
}
cudaError_t cudaMemset(void *to, int value, size_t size) { set(to, value, size); return cudaSuccess; }
cudaError_t cudaMemsetAsync(void *to, int value, size_t size, cudaStream_t stream) { set(to, value, size); return cudaSuccess; }
cudaError_t cudaGetSymbolAddress(void **pointer, const void *symbol) { return simulated_missing("cudaGetSymbolAddress"); }
cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *from, size_t size, size_t offset, enum cudaMemcpyKind kind) { return cudaSuccess; }

/* IPC: a handle names this process and the file of the block. The same machine's user may open it while this process lives. */

struct ipc { pid_t process; int file; size_t size; int device; };

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer) {
    apply_pending(); /* as its event would, for which the other process waits */
    pthread_mutex_lock(&lock);
    struct block *block = find(pointer);
    if (block) {
        struct ipc ipc = {getpid(), block->file, block->size, block->device};
        memset(handle, 0, sizeof *handle);
        memcpy(handle, &ipc, sizeof ipc);
    }
    pthread_mutex_unlock(&lock);
    return block ? cudaSuccess : fail(cudaErrorInvalidValue);
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned flags) {
    struct ipc ipc;
    memcpy(&ipc, &handle, sizeof ipc);
    apply_pending();
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", ipc.process, ipc.file);
    int file = open(path, O_RDWR | O_CLOEXEC);
    if (file < 0) return fail(cudaErrorInvalidValue);
    struct block *block = map_file(file, ipc.size, current);
    if (!block) return fail(cudaErrorInvalidValue);
    block->is_imported = 1;
    simulated_here();
    *pointer = block->start;
    return cudaSuccess;
}

cudaError_t cudaIpcCloseMemHandle(void *pointer) { return unmap(pointer); }
cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event) { memset(handle, 0, sizeof *handle); return cudaSuccess; }
cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle) { return cudaEventCreateWithFlags(event, 0); }

/* Streams and events: everything but a pending copy is done when its call returns. Any synchronization waits for all copies. */

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) { *least = 0; *greatest = -5; return cudaSuccess; }
cudaError_t cudaStreamCreate(cudaStream_t *stream) { simulated_here(); *stream = simulated_handle(); return cudaSuccess; }
cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) { return cudaStreamCreate(stream); }
cudaError_t cudaStreamDestroy(cudaStream_t stream) { return cudaSuccess; }
cudaError_t cudaStreamQuery(cudaStream_t stream) { apply_pending(); return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t stream) { simulated_here()->syncs++; apply_pending(); return cudaSuccess; }
cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) { return cudaSuccess; }
cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) { *priority = 0; return cudaSuccess; }
cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id) { *id = (unsigned long long)stream; return cudaSuccess; }
cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    call(stream, cudaSuccess, data);
    return cudaSuccess;
}
cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) { call(data); return cudaSuccess; }
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id, cudaGraph_t *graph,
                                     const cudaGraphNode_t **dependencies, const cudaGraphEdgeData **edges, size_t *count) {
    *status = cudaStreamCaptureStatusNone;
    return cudaSuccess;
}
cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode) { return cudaSuccess; }

struct event { struct timespec time; int waits; }; /* `waits`: recorded after a collective that hangs */

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    simulated_here();
    *event = calloc(1, sizeof(struct event));
    return cudaSuccess;
}
cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
cudaError_t cudaEventDestroy(cudaEvent_t event) { free(event); return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    clock_gettime(CLOCK_MONOTONIC, &((struct event *)event)->time);
    ((struct event *)event)->waits = __atomic_load_n(&simulated_collectives, __ATOMIC_SEQ_CST) > 0;
    return cudaSuccess;
}
cudaError_t cudaEventQuery(cudaEvent_t event) {
    int hangs = ((struct event *)event)->waits && __atomic_load_n(&simulated_collectives, __ATOMIC_SEQ_CST) > 0;
    if (!hangs) apply_pending();
    return hangs ? fail(cudaErrorNotReady) : cudaSuccess;
}
cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) { return cudaEventRecord(event, stream); }
cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    simulated_here()->syncs++;
    while (cudaEventQuery(event) == cudaErrorNotReady) usleep(1000);
    return cudaSuccess;
}
cudaError_t cudaEventElapsedTime(float *milliseconds, cudaEvent_t first, cudaEvent_t last) {
    struct timespec *a = &((struct event *)first)->time, *b = &((struct event *)last)->time;
    *milliseconds = (b->tv_sec - a->tv_sec) * 1e3f + (b->tv_nsec - a->tv_nsec) / 1e6f;
    return cudaSuccess;
}

/* Kernels */

static __thread struct { dim3 grid, block; size_t shared; void *stream; } configuration; /* between <<<...>>> and the launch */

unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, void *stream) {
    configuration.grid = grid, configuration.block = block, configuration.shared = shared, configuration.stream = stream;
    return 0;
}
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = configuration.grid, *block = configuration.block, *shared = configuration.shared;
    *(void **)stream = configuration.stream;
    return cudaSuccess;
}
void **__cudaRegisterFatBinary(void *binary) { static void *handle; return &handle; }
void __cudaRegisterFatBinaryEnd(void **handle) {}
void __cudaUnregisterFatBinary(void **handle) {}
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, void *a, void *b, void *c, void *d, int *e) {}
void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int a, size_t b, int c, int d) {}
cudaError_t __cudaGetKernel(void **kernel, const void *function) { *kernel = (void *)function; return cudaSuccess; }

static cudaError_t launch(void) { simulated_here()->launches++; return cudaSuccess; }
cudaError_t __cudaLaunchKernel(void *kernel, dim3 grid, dim3 block, void **arguments, size_t shared, void *stream) { return launch(); }
cudaError_t cudaLaunchKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return launch(); }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *function, void **arguments) { return launch(); }
cudaError_t cudaLaunchCooperativeKernel(const void *function, dim3 grid, dim3 block, void **arguments, size_t shared, cudaStream_t stream) { return launch(); }

cudaError_t cudaFuncSetAttribute(const void *function, enum cudaFuncAttribute attribute, int value) { return cudaSuccess; }
cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *function) {
    memset(attributes, 0, sizeof *attributes);
    attributes->numRegs = 64;
    attributes->maxThreadsPerBlock = 1024;
    attributes->ptxVersion = attributes->binaryVersion = 90;
    attributes->maxDynamicSharedSizeBytes = 48 << 10;
    return cudaSuccess;
}
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *count, const void *function, int threads, size_t shared) { *count = 2; return cudaSuccess; }
cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *count, const void *function, int threads, size_t shared, unsigned flags) {
    *count = 2;
    return cudaSuccess;
}

/* The driver's functions by name: those of driver.c */

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version, unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *result) {
    *function = simulated_driver_function(name);
    if (result) *result = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags, enum cudaDriverEntryPointQueryResult *result) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, result);
}
