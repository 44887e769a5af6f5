"""What each answer of Level Zero means to us: the only map from its codes to our errors.

The names and numbers are those of ``ze_result_t``
(https://oneapi-src.github.io/level-zero-spec/level-zero/latest/core/api.html#ze-result-t).
"""

from __future__ import annotations

from sleepbackends.errors import SleepBackendsError
from sleepbackends.vmm.driver_errors import Answers

SUCCESS, NOT_READY = 0, 1
UNINITIALIZED = 0x78000001
OUT_OF_DEVICE_MEMORY = 0x70000003

NAMES = {
    NOT_READY: "NOT_READY",
    0x70000001: "DEVICE_LOST",
    0x70000002: "OUT_OF_HOST_MEMORY",
    OUT_OF_DEVICE_MEMORY: "OUT_OF_DEVICE_MEMORY",
    0x70000004: "MODULE_BUILD_FAILURE",
    0x70000005: "MODULE_LINK_FAILURE",
    0x70000006: "DEVICE_REQUIRES_RESET",
    0x70000007: "DEVICE_IN_LOW_POWER_STATE",
    0x70010000: "INSUFFICIENT_PERMISSIONS",
    0x70010001: "NOT_AVAILABLE",
    0x70020000: "DEPENDENCY_UNAVAILABLE",
    UNINITIALIZED: "UNINITIALIZED",
    0x78000002: "UNSUPPORTED_VERSION",
    0x78000003: "UNSUPPORTED_FEATURE",
    0x78000004: "INVALID_ARGUMENT",
    0x78000005: "INVALID_NULL_HANDLE",
    0x78000006: "HANDLE_OBJECT_IN_USE",
    0x78000007: "INVALID_NULL_POINTER",
    0x78000008: "INVALID_SIZE",
    0x78000009: "UNSUPPORTED_SIZE",
    0x7800000A: "UNSUPPORTED_ALIGNMENT",
    0x7800000B: "INVALID_SYNCHRONIZATION_OBJECT",
    0x7800000C: "INVALID_ENUMERATION",
    0x7800000D: "UNSUPPORTED_ENUMERATION",
    0x7FFFFFFE: "UNKNOWN",
}
"""What is answered by the calls we make; a code that is not here is shown as a number."""

_ANSWERS = Answers(
    no_room={"OUT_OF_DEVICE_MEMORY", "OUT_OF_HOST_MEMORY"},
    lost={"DEVICE_LOST", "DEVICE_REQUIRES_RESET"},
    unable={
        *("UNINITIALIZED", "DEPENDENCY_UNAVAILABLE", "INSUFFICIENT_PERMISSIONS", "NOT_AVAILABLE"),
        *("UNSUPPORTED_VERSION", "UNSUPPORTED_FEATURE"),
    },
    lost_hint="the device is lost; restart the process. An exhausted device may say so too "
    "(https://github.com/pytorch/pytorch/issues/177714)",
    unable_hint="update the Intel GPU driver, and see that this process may use its devices",
    prefix="ZE_RESULT_ERROR_",
)


def name_of(code: int) -> str:
    """Return what Level Zero calls a code."""
    return NAMES.get(code, f"code {code:#x}")


def error_of(
    code: int, what: str, *, needed_bytes: int = 0, available_bytes: int | None = None
) -> SleepBackendsError:
    """Make the error that a code stands for; see ``Answers.error``."""
    return _ANSWERS.error(
        name_of(code), what, needed_bytes=needed_bytes, available_bytes=available_bytes
    )
