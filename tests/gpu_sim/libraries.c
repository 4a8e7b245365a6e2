/* The calls of cuBLAS and NCCL that return something. The helper adds an empty function for every other one of these libraries.
 *
 * Collectives finish at once and leave their buffers as they are. With SIMULATED_NCCL_HANGS=1 they end only when the communicator
 * is aborted, as they do on a GPU when another rank has died.
 */
#include "simulated.h"
#include <stdlib.h>
#include <string.h>

static int launch(void) { simulated_here()->launches++; return 0; }

/* cuBLAS */

int cublasCreate_v2(void **handle) { *handle = simulated_handle(); return 0; }
int cublasGetVersion_v2(void *handle, int *version) { *version = 130000; return 0; }
size_t cublasLtGetVersion(void) { return 130000; }
const char *cublasGetStatusString(int status) { return "status of the simulated cuBLAS"; }
const char *cublasGetStatusName(int status) { return cublasGetStatusString(status); }
int cublasGetMathMode(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGetPointerMode_v2(void *handle, int *mode) { *mode = 0; return 0; }
int cublasGemmEx(void) { return launch(); }
int cublasSgemm_v2(void) { return launch(); }
int cublasGemmStridedBatchedEx(void) { return launch(); }
int cublasSgemmStridedBatched(void) { return launch(); }

int cublasLtCreate(void **handle) { *handle = simulated_handle(); return 0; }
int cublasLtMatmulDescCreate(void **description, int compute, int scale) { *description = simulated_handle(); return 0; }
int cublasLtMatrixLayoutCreate(void **layout, int type, unsigned long rows, unsigned long columns, long stride) { *layout = simulated_handle(); return 0; }
int cublasLtMatmulPreferenceCreate(void **preference) { *preference = simulated_handle(); return 0; }
int cublasLtMatmulAlgoGetHeuristic(void *handle, void *operation, void *a, void *b, void *c, void *d, void *preference, int wanted,
                                   void *results, int *found) { *found = 1; return 0; }
int cublasLtMatmul(void) { return launch(); }

/* cuDNN is switched off, in torch itself: `torch.backends.cudnn.enabled` and `torch.backends.cuda.cudnn_sdp_enabled()` are False,
 * so attention goes to torch's flash attention and a convolution to torch's own kernels. */
char _ZNK2at7Context16userEnabledCuDNNEv(const void *context) { return 0; }
char _ZNK2at7Context19userEnabledCuDNNSDPEv(const void *context) { return 0; }

/* NCCL: a communicator knows its rank, size and device. */

struct communicator { int rank, size, device, is_aborted; };

int ncclGetVersion(int *version) { *version = 22800; return 0; }
const char *ncclGetErrorString(int error) { return error ? "error of the simulated NCCL" : "no error"; }
const char *ncclGetLastError(void *communicator) { return ""; }
int ncclGetUniqueId(void *id) { memset(id, 1, 128); return 0; }

int ncclCommInitRankConfig(struct communicator **made, int size, struct { char bytes[128]; } id, int rank, void *config) {
    *made = calloc(1, sizeof **made);
    **made = (struct communicator){rank, size, simulated_current(), 0};
    simulated_here();
    return 0;
}
int ncclCommInitRank(struct communicator **made, int size, struct { char bytes[128]; } id, int rank) {
    *made = calloc(1, sizeof **made);
    **made = (struct communicator){rank, size, simulated_current(), 0};
    simulated_here();
    return 0;
}
int ncclCommUserRank(struct communicator *communicator, int *rank) { *rank = communicator->rank; return 0; }
int ncclCommCount(struct communicator *communicator, int *size) { *size = communicator->size; return 0; }
int ncclCommCuDevice(struct communicator *communicator, int *device) { *device = communicator->device; return 0; }
int ncclCommGetAsyncError(struct communicator *communicator, int *error) { *error = 0; return 0; }

int simulated_collectives; /* that have begun and not ended; events recorded meanwhile are not ready */

static int collective(void) {
    launch();
    const char *hangs = getenv("SIMULATED_NCCL_HANGS");
    if (hangs && atoi(hangs)) __atomic_add_fetch(&simulated_collectives, 1, __ATOMIC_SEQ_CST);
    return 0;
}
int ncclCommAbort(struct communicator *communicator) { __atomic_store_n(&simulated_collectives, 0, __ATOMIC_SEQ_CST); return 0; }
int ncclAllReduce(void) { return collective(); }
int ncclAllGather(void) { return collective(); }
int ncclReduceScatter(void) { return collective(); }
int ncclBroadcast(void) { return collective(); }
int ncclBcast(void) { return collective(); }
int ncclReduce(void) { return collective(); }
int ncclSend(void) { return collective(); }
int ncclRecv(void) { return collective(); }
