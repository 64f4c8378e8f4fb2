// cuBLAS over the stand-in for CUDA: the product of matrices of float64, which programs of tests and examples need.
#include <cuda_runtime_api.h>
#include <library_types.h>

#include <functional>

#define STANDIN extern "C" __attribute__((visibility("default")))

namespace {
struct Handle {
    cudaStream_t stream = nullptr;
    int pointers = 0, math = 0;  // 0: alpha and beta are on the host
};
void run(void *work) {
    auto function = static_cast<std::function<void()> *>(work);
    (*function)();
    delete function;
}
}  // namespace

STANDIN int cublasCreate_v2(Handle **found) { return *found = new Handle, 0; }
STANDIN int cublasDestroy_v2(Handle *handle) {
    delete handle;
    return 0;
}
STANDIN int cublasGetVersion_v2(Handle *, int *found) { return *found = 120900, 0; }
STANDIN int cublasSetStream_v2(Handle *handle, cudaStream_t stream) { return handle->stream = stream, 0; }
STANDIN int cublasGetStream_v2(Handle *handle, cudaStream_t *found) { return *found = handle->stream, 0; }
STANDIN int cublasSetPointerMode_v2(Handle *handle, int mode) { return handle->pointers = mode, 0; }
STANDIN int cublasGetPointerMode_v2(Handle *handle, int *found) { return *found = handle->pointers, 0; }
STANDIN int cublasSetMathMode(Handle *handle, int mode) { return handle->math = mode, 0; }
STANDIN int cublasGetMathMode(Handle *handle, int *found) { return *found = handle->math, 0; }

// C = alpha op(A) op(B) + beta C, where columns stand one behind the other.
STANDIN int cublasGemmEx(Handle *handle, int over_a, int over_b, int m, int n, int k, const double *alpha, const double *a, int type_a,
                         int lda, const double *b, int type_b, int ldb, const double *beta, double *c, int type_c, int ldc, int, int) {
    if (handle->pointers || type_a != CUDA_R_64F || type_b != CUDA_R_64F || type_c != CUDA_R_64F) return 15;  // not supported
    double by = *alpha, kept = *beta;
    auto work = new std::function<void()>([=] {
        for (int column = 0; column < n; column++)
            for (int row = 0; row < m; row++) {
                double sum = 0;
                for (int at = 0; at < k; at++)
                    sum += (over_a ? a[at + row * long(lda)] : a[row + at * long(lda)]) *
                           (over_b ? b[column + at * long(ldb)] : b[at + column * long(ldb)]);
                double &into = c[row + column * long(ldc)];
                into = by * sum + (kept ? kept * into : 0);
            }
    });
    return cudaLaunchHostFunc(handle->stream, run, work) ? 13 : 0;  // execution failed
}
