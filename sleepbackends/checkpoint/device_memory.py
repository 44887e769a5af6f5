"""How much of each device is in use, by whom, without a context: NVIDIA's management library.

It comes with the driver and is called through ``ctypes``, as a process that is asleep, or that
only wakes others, has no context to ask the driver itself.
"""

from __future__ import annotations

import ctypes
import json
import sys
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from typing import Any

from sleepbackends.errors import BackendUnavailableError

LIBRARY = "libnvidia-ml.so.1"

_INSUFFICIENT_SIZE = 7
_TEXT_BYTES = 96
_UNKNOWN_BYTES = (1 << 64) - 1


class _Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_ulonglong) for name in ("total", "free", "used")]


class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


@dataclass(frozen=True)
class DeviceMemory:
    """One device at one moment.

    Parameters
    ----------
    free_bytes, used_bytes : int
        By all processes together.
    processes : dict of int to int
        Bytes by process number, as far as this machine tells: in a container the numbers may
        be those of the host, or missing.
    is_partitioned : bool
        Whether the device is split into instances (MIG).
    """

    free_bytes: int
    used_bytes: int
    processes: dict[int, int] = field(default_factory=dict)
    is_partitioned: bool = False


class DeviceMonitor:
    """Asks the management library.

    Raises
    ------
    BackendUnavailableError
        If it is missing or cannot be used.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL(LIBRARY)
            self._call("nvmlInit_v2")
        except (OSError, AttributeError) as error:
            raise BackendUnavailableError(
                f"NVIDIA's management library cannot be used: {error}",
                hint="it is part of the driver; a container needs the capability 'utility' "
                "(NVIDIA_DRIVER_CAPABILITIES)",
            ) from error
        self._handles = self._find_devices()

    @property
    def devices(self) -> list[str]:
        """The UUIDs of all devices."""
        return list(self._handles)

    @property
    def partitioned(self) -> list[str]:
        """The UUIDs of those that are split into instances (MIG)."""
        return [uuid for uuid, handle in self._handles.items() if self._is_partitioned(handle)]

    def driver_version(self) -> tuple[int, ...]:
        """Return the version of the NVIDIA driver, such as (580, 159, 4)."""
        text = self._text(lambda out, size: self._call("nvmlSystemGetDriverVersion", out, size))
        return tuple(int(part) for part in text.split(".") if part.isdecimal())

    def measure(self, devices: Collection[str]) -> dict[str, DeviceMemory]:
        """Measure some devices; those that are not there are left out.

        An instance of a device (MIG) has an identifier of its own, which is none of a device's.
        """
        return {
            uuid: self._measure(self._handles[uuid]) for uuid in devices if uuid in self._handles
        }

    def _find_devices(self) -> dict[str, ctypes.c_void_p]:
        count = ctypes.c_uint()
        self._call("nvmlDeviceGetCount_v2", ctypes.byref(count))
        found = {}
        for index in range(count.value):
            handle = ctypes.c_void_p()
            # One that this process may not use is counted all the same.
            if not self._library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                found[self._uuid(handle)] = handle
        return found

    def _uuid(self, handle: ctypes.c_void_p) -> str:
        return self._text(lambda out, size: self._call("nvmlDeviceGetUUID", handle, out, size))

    def _measure(self, handle: ctypes.c_void_p) -> DeviceMemory:
        memory = _Memory()
        self._call("nvmlDeviceGetMemoryInfo", handle, ctypes.byref(memory))
        partitioned = self._is_partitioned(handle)
        return DeviceMemory(memory.free, memory.used, self._processes(handle), partitioned)

    def _is_partitioned(self, handle: ctypes.c_void_p) -> bool:
        current, pending = ctypes.c_uint(), ctypes.c_uint()
        code = self._library.nvmlDeviceGetMigMode(
            handle, ctypes.byref(current), ctypes.byref(pending)
        )
        return code == 0 and current.value == 1

    def _processes(self, handle: ctypes.c_void_p) -> dict[int, int]:
        room = 64
        while True:
            rows, count = (_Process * room)(), ctypes.c_uint(room)
            code = self._library.nvmlDeviceGetComputeRunningProcesses_v3(
                handle, ctypes.byref(count), rows
            )
            if code == _INSUFFICIENT_SIZE:
                room *= 4
                continue
            if code:
                return {}
            # A container's restrictions show as a size that is not available.
            return {r.pid: r.used for r in rows[: count.value] if r.used != _UNKNOWN_BYTES}

    def _text(self, call: Callable[[Any, int], None]) -> str:
        buffer = ctypes.create_string_buffer(_TEXT_BYTES)
        call(buffer, _TEXT_BYTES)
        return buffer.value.decode()

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise BackendUnavailableError(
                f"NVIDIA's management library answers {name} with error {code}",
                hint="see whether nvidia-smi works",
            )


def torch_reserved_bytes() -> int:
    """Return what torch's allocator holds in this process, if torch was imported."""
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return 0
    return sum(torch.cuda.memory_reserved(n) for n in range(torch.cuda.device_count()))


def main(devices: Collection[str]) -> None:
    """Be a process that measures for another one: write a ``Measured`` as a line of JSON."""
    answer: dict[str, Any]
    try:
        found = DeviceMonitor().measure(devices)
        answer = {"devices": {uuid: asdict(memory) for uuid, memory in found.items()}}
    except BackendUnavailableError as error:
        answer = {"problem": error.message, "hint": error.hint}
    sys.stdout.write(json.dumps(answer) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
