/* Every entry point of the driver: X(name a caller asks for, CUDA version since, symbol).
 *
 * One list, because name resolution, call counters and injected faults must agree on it.
 */
#ifndef SIM_CALLS_H
#define SIM_CALLS_H

#define CALLS(X)                                                      \
    X(cuInit, 2000, cuInit)                                           \
    X(cuDriverGetVersion, 2020, cuDriverGetVersion)                   \
    X(cuGetProcAddress, 11030, cuGetProcAddress)                      \
    X(cuGetExportTable, 3000, cuGetExportTable)                       \
    X(cuGetErrorName, 6000, cuGetErrorName)                           \
    X(cuGetErrorString, 6000, cuGetErrorString)                       \
    X(cuDeviceGetCount, 2000, cuDeviceGetCount)                       \
    X(cuDeviceGet, 2000, cuDeviceGet)                                 \
    X(cuDeviceGetName, 2000, cuDeviceGetName)                         \
    X(cuDeviceGetUuid, 9020, cuDeviceGetUuid_v2)                      \
    X(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)               \
    X(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId)                 \
    X(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)                    \
    X(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)       \
    X(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease_v2)  \
    X(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState)   \
    X(cuCtxSetCurrent, 4000, cuCtxSetCurrent)                         \
    X(cuCtxGetCurrent, 4000, cuCtxGetCurrent)                         \
    X(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)                    \
    X(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)                      \
    X(cuCtxGetDevice, 2000, cuCtxGetDevice)                           \
    X(cuCtxSynchronize, 2000, cuCtxSynchronize)                       \
    X(cuThreadExchangeStreamCaptureMode, 10010, cuThreadExchangeStreamCaptureMode) \
    X(cuMemGetInfo, 3020, cuMemGetInfo_v2)                            \
    X(cuMemGetAllocationGranularity, 10020, cuMemGetAllocationGranularity) \
    X(cuMemAddressReserve, 10020, cuMemAddressReserve)                \
    X(cuMemAddressFree, 10020, cuMemAddressFree)                      \
    X(cuMemCreate, 10020, cuMemCreate)                                \
    X(cuMemRelease, 10020, cuMemRelease)                              \
    X(cuMemRetainAllocationHandle, 11000, cuMemRetainAllocationHandle) \
    X(cuMemMap, 10020, cuMemMap)                                      \
    X(cuMemUnmap, 10020, cuMemUnmap)                                  \
    X(cuMemSetAccess, 10020, cuMemSetAccess)                          \
    X(cuMemGetAccess, 10020, cuMemGetAccess)                          \
    X(cuMemAlloc, 3020, cuMemAlloc_v2)                                \
    X(cuMemFree, 3020, cuMemFree_v2)                                  \
    X(cuPointerGetAttribute, 4000, cuPointerGetAttribute)             \
    X(cuPointerGetAttributes, 7000, cuPointerGetAttributes)           \
    X(cuMemHostAlloc, 2020, cuMemHostAlloc)                           \
    X(cuMemFreeHost, 2000, cuMemFreeHost)                             \
    X(cuMemHostRegister, 4000, cuMemHostRegister_v2)                  \
    X(cuMemHostUnregister, 4000, cuMemHostUnregister)                 \
    X(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2)  \
    X(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2)                            \
    X(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)                            \
    X(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2)                            \
    X(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2)                  \
    X(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)                  \
    X(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2)                  \
    X(cuMemcpyAsync, 4000, cuMemcpyAsync)                             \
    X(cuMemcpyBatchAsync, 12080, cuMemcpyBatchAsync)                  \
    X(cuMemsetD8, 3020, cuMemsetD8_v2)                                \
    X(cuMemsetD32, 3020, cuMemsetD32_v2)                              \
    X(cuMemsetD8Async, 3020, cuMemsetD8Async)                         \
    X(cuMemsetD32Async, 3020, cuMemsetD32Async)                       \
    X(cuStreamCreate, 2000, cuStreamCreate)                           \
    X(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority)   \
    X(cuStreamDestroy, 4000, cuStreamDestroy_v2)                      \
    X(cuStreamSynchronize, 2000, cuStreamSynchronize)                 \
    X(cuStreamQuery, 2000, cuStreamQuery)                             \
    X(cuStreamWaitEvent, 3020, cuStreamWaitEvent)                     \
    X(cuEventCreate, 2000, cuEventCreate)                             \
    X(cuEventDestroy, 4000, cuEventDestroy_v2)                        \
    X(cuEventRecord, 2000, cuEventRecord)                             \
    X(cuEventQuery, 2000, cuEventQuery)                               \
    X(cuEventSynchronize, 2000, cuEventSynchronize)                   \
    X(cuEventElapsedTime, 2000, cuEventElapsedTime)                   \
    X(cuLaunchHostFunc, 10000, cuLaunchHostFunc)                      \
    X(cuModuleLoadData, 2000, cuModuleLoadData)                       \
    X(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx)                   \
    X(cuModuleUnload, 2000, cuModuleUnload)                           \
    X(cuModuleGetFunction, 2000, cuModuleGetFunction)                 \
    X(cuLaunchKernel, 4000, cuLaunchKernel)                           \
    X(cuCheckpointProcessLock, 12080, cuCheckpointProcessLock)        \
    X(cuCheckpointProcessCheckpoint, 12080, cuCheckpointProcessCheckpoint) \
    X(cuCheckpointProcessRestore, 12080, cuCheckpointProcessRestore)  \
    X(cuCheckpointProcessUnlock, 12080, cuCheckpointProcessUnlock)    \
    X(cuCheckpointProcessGetState, 12080, cuCheckpointProcessGetState) \
    X(cuCheckpointProcessGetRestoreThreadId, 12080, cuCheckpointProcessGetRestoreThreadId)

/* Forms that a caller who asks for a newer version gets under the same name. */
#define LATER_FORMS(X)                                  \
    X(cuGetProcAddress, 12000, cuGetProcAddress_v2)     \
    X(cuCtxGetDevice, 13000, cuCtxGetDevice_v2)         \
    X(cuCtxSynchronize, 13000, cuCtxSynchronize_v2)     \
    X(cuMemcpyBatchAsync, 13000, cuMemcpyBatchAsync_v2)

#define CALL_NUMBER(name, since, symbol) CALL_##name,
enum call {
    CALLS(CALL_NUMBER)
    /* No entry points: the moments a queued copy or kernel runs, so that tests can make it fail. */
    CALL_queuedCopy,
    CALL_queuedKernel,
    CALL_COUNT
};
#undef CALL_NUMBER

#endif
