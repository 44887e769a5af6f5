"""What each answer of the CUDA driver means to us: the only map from its codes to our errors."""

from __future__ import annotations

from sleepbackends.errors import (
    DeviceMemoryError,
    MechanismError,
    SleepBackendsError,
)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


NO_ROOM = frozenset({"OUT_OF_MEMORY"})
"""The device, or what the driver itself needs, has no room; another process may give some back."""

LOST = _names(
    "DEINITIALIZED ECC_UNCORRECTABLE NVLINK_UNCORRECTABLE CONTAINED ILLEGAL_ADDRESS LAUNCH_TIMEOUT "
    "CONTEXT_IS_DESTROYED ASSERT HARDWARE_STACK_ERROR ILLEGAL_INSTRUCTION MISALIGNED_ADDRESS "
    "INVALID_ADDRESS_SPACE INVALID_PC LAUNCH_FAILED TENSOR_MEMORY_LEAK MPS_RPC_FAILURE "
    "MPS_CLIENT_TERMINATED EXTERNAL_DEVICE"
)
"""The context or the device is gone, with what was in its memory; later calls fail the same way."""

UNABLE = _names(
    "NOT_INITIALIZED STUB_LIBRARY CALL_REQUIRES_NEWER_DRIVER NO_DEVICE INVALID_DEVICE "
    "DEVICE_NOT_LICENSED INSUFFICIENT_LOADER_VERSION NOT_SUPPORTED SYSTEM_DRIVER_MISMATCH "
    "COMPAT_NOT_SUPPORTED_ON_DEVICE"
)
"""This process, its driver or its device cannot do it, however often it is asked."""

REFUSED = _names(
    "INVALID_VALUE PROFILER_DISABLED PROFILER_NOT_INITIALIZED PROFILER_ALREADY_STARTED "
    "PROFILER_ALREADY_STOPPED DEVICE_UNAVAILABLE MULTICAST_RESOURCE_FULL INVALID_IMAGE "
    "INVALID_CONTEXT CONTEXT_ALREADY_CURRENT MAP_FAILED UNMAP_FAILED ARRAY_IS_MAPPED "
    "ALREADY_MAPPED NO_BINARY_FOR_GPU ALREADY_ACQUIRED NOT_MAPPED NOT_MAPPED_AS_ARRAY "
    "NOT_MAPPED_AS_POINTER UNSUPPORTED_LIMIT CONTEXT_ALREADY_IN_USE PEER_ACCESS_UNSUPPORTED "
    "INVALID_PTX INVALID_GRAPHICS_CONTEXT JIT_COMPILER_NOT_FOUND UNSUPPORTED_PTX_VERSION "
    "JIT_COMPILATION_DISABLED UNSUPPORTED_EXEC_AFFINITY UNSUPPORTED_DEVSIDE_SYNC INVALID_SOURCE "
    "FILE_NOT_FOUND SHARED_OBJECT_SYMBOL_NOT_FOUND SHARED_OBJECT_INIT_FAILED OPERATING_SYSTEM "
    "INVALID_HANDLE ILLEGAL_STATE LOSSY_QUERY NOT_FOUND NOT_READY LAUNCH_OUT_OF_RESOURCES "
    "LAUNCH_INCOMPATIBLE_TEXTURING PEER_ACCESS_ALREADY_ENABLED PEER_ACCESS_NOT_ENABLED "
    "PRIMARY_CONTEXT_ACTIVE TOO_MANY_PEERS HOST_MEMORY_ALREADY_REGISTERED "
    "HOST_MEMORY_NOT_REGISTERED COOPERATIVE_LAUNCH_TOO_LARGE NOT_PERMITTED SYSTEM_NOT_READY "
    "MPS_CONNECTION_FAILED MPS_SERVER_NOT_READY MPS_MAX_CLIENTS_REACHED "
    "MPS_MAX_CONNECTIONS_REACHED CDP_NOT_SUPPORTED CDP_VERSION_MISMATCH "
    "STREAM_CAPTURE_UNSUPPORTED STREAM_CAPTURE_INVALIDATED STREAM_CAPTURE_MERGE "
    "STREAM_CAPTURE_UNMATCHED STREAM_CAPTURE_UNJOINED STREAM_CAPTURE_ISOLATION "
    "STREAM_CAPTURE_IMPLICIT CAPTURED_EVENT STREAM_CAPTURE_WRONG_THREAD TIMEOUT "
    "GRAPH_EXEC_UPDATE_FAILURE INVALID_CLUSTER_SIZE FUNCTION_NOT_LOADED INVALID_RESOURCE_TYPE "
    "INVALID_RESOURCE_CONFIGURATION KEY_ROTATION STREAM_DETACHED GRAPH_RECAPTURE_FAILURE "
    "FABRIC_NOT_READY UNKNOWN"
)
"""The call did nothing and the context lives on. A code newer than these lists counts as one."""

_HINTS = {
    LOST: "the CUDA context is lost; restart the process",
    UNABLE: "sleepbackends doctor says what this machine has; a forked process has no CUDA",
}


def error_of(
    name: str, what: str, *, needed_bytes: int = 0, available_bytes: int | None = None
) -> SleepBackendsError:
    """Make the error that an answer of the driver stands for.

    Parameters
    ----------
    name : str
        What the driver calls it, with or without ``CUDA_ERROR_``.
    what : str
        What was being done.
    needed_bytes : int
        For errors about room: what the call asked for.
    available_bytes : int, optional
        For errors about room: what there was.
    """
    short = name.removeprefix("CUDA_ERROR_")
    if short in NO_ROOM:
        available = "" if available_bytes is None else f", {available_bytes} available"
        return DeviceMemoryError(
            f"{what} failed: {needed_bytes} bytes of device memory needed{available}",
            needed_bytes=needed_bytes,
            available_bytes=available_bytes or 0,
            hint="let another process give memory back and repeat the call, or set "
            "wait_for_memory_s",
        )
    hint = next((text for names, text in _HINTS.items() if short in names), "repeat the call")
    return MechanismError(
        f"{what} failed: {name}", hint=hint, recoverable=short not in LOST | UNABLE
    )
