"""The simulated driver's controls: settings, faults, counters and reports."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

_UNLIMITED = 2**64 - 1

VIOLATIONS = (
    "unknown_handle",
    "unmap_in_use",
    "unmap_nothing",
    "destroy_mapped",
    "work_faulted",
    "host_released_in_use",
    "destroyed_in_use",
    "wait_for_nothing",
    "other_context",
)
"""In the order of ``sim.h``."""

_U64, _TEXT, _INT = ctypes.c_uint64, ctypes.c_char_p, ctypes.c_int
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "ze_sim_reset": (None, ()),
    "ze_sim_set": (_INT, (_TEXT, _INT, _U64)),
    "ze_sim_fail": (_INT, (_TEXT, _U64, _U64, ctypes.c_uint32)),
    "ze_sim_clear_faults": (None, ()),
    "ze_sim_calls": (_U64, (_TEXT,)),
    "ze_sim_violations": (_U64, (_INT,)),
    "ze_sim_usage": (_U64, (_TEXT, _INT)),
    "ze_sim_mapping": (ctypes.c_void_p, (ctypes.c_size_t,)),
    "ze_sim_engine_write": (None, (_INT, ctypes.c_void_p, ctypes.c_size_t, _INT)),
    "ze_sim_engine_wait": (None, (_INT,)),
    "ze_sim_read": (_INT, (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)),
}


class Simulator:
    """The simulated driver that the loader has loaded, seen from the side of a test.

    Parameters
    ----------
    library
        What the loader loaded; loading it twice gives the same driver.
    """

    def __init__(self, library: Path) -> None:
        self.path = library
        self.library = ctypes.CDLL(str(library))
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self.library, name)
            function.restype, function.argtypes = result, arguments

    def reset(self) -> None:
        """Free everything, go back to the default settings, and have no devices."""
        self.library.ze_sim_reset()

    def set(self, name: str, value: int, device: int = 0) -> None:
        """Change a setting until the reset; the names are in ``control.c``.

        Raises
        ------
        ValueError
            There is no such setting.
        """
        if not self.library.ze_sim_set(name.encode(), device, value):
            raise ValueError(name)

    def fail(self, function: str, error: int, nth: int = 1, times: int | None = 1) -> None:
        """Let calls of a function fail without doing anything, counted from now.

        ``queuedCopy`` is the moment in which queued work runs; that breaks the device.
        """
        count = _UNLIMITED if times is None else times
        assert self.library.ze_sim_fail(function.encode(), nth, count, error)

    def clear_faults(self) -> None:
        """Forget all injected faults."""
        self.library.ze_sim_clear_faults()

    def calls(self, function: str) -> int:
        """Return how often a function was called since the reset."""
        return int(self.library.ze_sim_calls(function.encode()))

    def violations(self) -> dict[str, int]:
        """Return what was done that a real driver may not forgive: kind to count, none of 0."""
        counts = {name: self.library.ze_sim_violations(i) for i, name in enumerate(VIOLATIONS)}
        return {name: count for name, count in counts.items() if count}

    def usage(self, name: str, device: int = 0) -> int:
        """Return a figure: ``used_bytes`` of a device, or of the process ``handles``, ``lists``,
        ``pools``, ``events``, ``contexts``, ``imported_bytes``, ``reserved_bytes`` or ``queued``.
        """
        found = int(self.library.ze_sim_usage(name.encode(), device))
        assert found != _UNLIMITED, name
        return found

    def mappings(self) -> list[int]:
        """List where physical memory is mapped."""
        found: list[int] = []
        while (address := self.library.ze_sim_mapping(len(found))) is not None:
            found.append(address)
        return sorted(found)

    def engine_write(self, address: int, size_bytes: int, byte: int, device: int = 0) -> None:
        """Queue a kernel of somebody else that writes a byte everywhere."""
        self.library.ze_sim_engine_write(device, address, size_bytes, byte)

    def engine_wait(self, device: int = 0) -> None:
        """Wait for somebody else's kernels."""
        self.library.ze_sim_engine_wait(device)

    @property
    def engine_wait_pointer(self) -> int:
        """Address of what waits for somebody else's kernels."""
        return ctypes.cast(self.library.ze_sim_engine_wait, ctypes.c_void_p).value or 0

    def read(self, address: int, size_bytes: int) -> bytes | None:
        """Return device memory, seen behind the driver's back; None if it is not mapped."""
        data = ctypes.create_string_buffer(size_bytes)
        there = self.library.ze_sim_read(data, address, size_bytes)
        return data.raw if there else None
