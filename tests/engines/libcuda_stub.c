/* A stand-in for the NVIDIA driver library on machines without one, for tests of the kvikio engine.
 *
 * kvikio resolves these symbols before any I/O, also for host buffers. Pointer queries answer "not a CUDA
 * pointer" or "not initialised", so that every buffer counts as host memory; everything else answers "not initialised".
 *
 * Build: cc -shared -fPIC -Wl,-soname,libcuda.so.1 -o libcuda.so.1 libcuda_stub.c
 */

enum { SUCCESS = 0, INVALID_VALUE = 1, NOT_INITIALIZED = 3 };

#define NO(name) \
    int name(void) { return NOT_INITIALIZED; }

int cuInit(unsigned flags) { (void)flags; return SUCCESS; }

int cuDriverGetVersion(int *version) { *version = 12080; return SUCCESS; }

int cuPointerGetAttribute(void *out, int attribute, unsigned long long pointer)
{
    (void)out; (void)attribute; (void)pointer;
    return INVALID_VALUE;
}

int cuGetErrorName(int error, const char **text) { (void)error; *text = "STAND_IN"; return SUCCESS; }

int cuGetErrorString(int error, const char **text) { (void)error; *text = "stand-in driver"; return SUCCESS; }

NO(cuPointerGetAttributes)
NO(cuDeviceGet) NO(cuDeviceGetCount) NO(cuDeviceGetAttribute)
NO(cuDevicePrimaryCtxRetain) NO(cuDevicePrimaryCtxRelease_v2)
NO(cuCtxCreate_v2) NO(cuCtxDestroy_v2) NO(cuCtxGetCurrent) NO(cuCtxGetDevice) NO(cuCtxGetStreamPriorityRange)
NO(cuCtxPushCurrent_v2) NO(cuCtxPopCurrent_v2)
NO(cuMemHostAlloc) NO(cuMemFreeHost) NO(cuMemHostRegister_v2) NO(cuMemHostUnregister) NO(cuMemGetAddressRange_v2)
NO(cuMemcpyHtoDAsync_v2) NO(cuMemcpyDtoHAsync_v2) NO(cuMemcpyAsync) NO(cuMemcpyBatchAsync) NO(cuMemcpyBatchAsync_v2)
NO(cuStreamCreate) NO(cuStreamDestroy_v2) NO(cuStreamSynchronize) NO(cuStreamGetCtx)
NO(cuEventCreate) NO(cuEventDestroy_v2) NO(cuEventRecord) NO(cuEventSynchronize) NO(cuEventQuery)
NO(cuLaunchHostFunc)
