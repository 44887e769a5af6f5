"""The simulated driver's controls: settings, faults, counters and reports."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any, SupportsInt, TypeVar

from tests.simulators.cuda import reports
from tests.simulators.cuda.reports import (
    DeviceUsage,
    HandleReport,
    MappingReport,
    ProcessUsage,
    RangeReport,
)

_UNLIMITED = 2**64 - 1
_Row = TypeVar("_Row", bound=ctypes.Structure)

# Without these a 64-bit argument would be cut to an int.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "sim_reset": (None, ()),
    "sim_set_devices": (ctypes.c_int, (ctypes.c_int,)),
    "sim_set_total": (ctypes.c_int, (ctypes.c_int, ctypes.c_uint64)),
    "sim_set_budget": (ctypes.c_int, (ctypes.c_int, ctypes.c_uint64)),
    "sim_set_granularity": (ctypes.c_int, (ctypes.c_int, ctypes.c_uint64)),
    "sim_set_attribute": (ctypes.c_int, (ctypes.c_int, ctypes.c_int, ctypes.c_int)),
    "sim_set_stale_byte": (ctypes.c_int, (ctypes.c_int,)),
    "sim_set_copy_rate": (ctypes.c_int, (ctypes.c_uint64,)),
    "sim_set_on_demand": (ctypes.c_int, (ctypes.c_int,)),
    "sim_set_pinned_limit": (ctypes.c_int, (ctypes.c_uint64,)),
    "sim_set_capturing": (ctypes.c_int, (ctypes.c_int,)),
    "sim_fail": (
        ctypes.c_int,
        (ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int),
    ),
    "sim_clear_faults": (None, ()),
    "sim_pending_faults": (ctypes.c_uint64, ()),
    "sim_calls": (ctypes.c_int64, (ctypes.c_char_p,)),
    "sim_violation_name": (ctypes.c_char_p, (ctypes.c_int,)),
    "sim_violations": (ctypes.c_uint64, (ctypes.c_int,)),
    "sim_device_usage": (ctypes.c_int, (ctypes.c_int, ctypes.c_void_p)),
    "sim_process_usage": (None, (ctypes.c_void_p,)),
    "sim_handles": (ctypes.c_size_t, (ctypes.c_void_p, ctypes.c_size_t)),
    "sim_mappings": (ctypes.c_size_t, (ctypes.c_void_p, ctypes.c_size_t)),
    "sim_reservations": (ctypes.c_size_t, (ctypes.c_void_p, ctypes.c_size_t)),
    "sim_pinned": (ctypes.c_size_t, (ctypes.c_void_p, ctypes.c_size_t)),
}


class Simulator:
    """The simulated driver that is loaded in this process, seen from the side of a test.

    Parameters
    ----------
    library
        The simulated ``libcuda.so.1``; loading it twice gives the same driver.

    Notes
    -----
    A setter that gets a device or a value which does not fit raises ``ValueError`` and changes
    nothing. Settings hold until `reset`.
    """

    def __init__(self, library: Path) -> None:
        self.path = library
        self._library = ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
        for name, (result, arguments) in _SIGNATURES.items():
            function = getattr(self._library, name)
            function.restype, function.argtypes = result, arguments

    def reset(self) -> None:
        """Free everything and go back to before ``cuInit``, with default settings.

        Queued work is dropped. No other thread may be in the driver.
        """
        self._library.sim_reset()

    def set_devices(self, count: int) -> None:
        """Have so many devices, 0 to 16. Only before ``cuInit``."""
        self._set("sim_set_devices", count)

    def set_total_bytes(self, total_bytes: int, device: int = 0) -> None:
        """Give a device so much memory. The default is 8 GiB."""
        self._set("sim_set_total", device, total_bytes)

    def set_budget_bytes(self, budget_bytes: int | None, device: int = 0) -> None:
        """Let so much of a device be in use, by all processes together. None: all of it."""
        self._set("sim_set_budget", device, _UNLIMITED if budget_bytes is None else budget_bytes)

    def set_granularity_bytes(self, granularity_bytes: int, device: int = 0) -> None:
        """Make sizes and addresses of a device multiples of a power of two, 64 KiB at least."""
        self._set("sim_set_granularity", device, granularity_bytes)

    def set_attribute(self, attribute: SupportsInt, value: int, device: int = 0) -> None:
        """Answer a ``CUdevice_attribute`` with a value. Without VMM support, no handles."""
        self._set("sim_set_attribute", device, int(attribute), value)

    def set_stale_byte(self, byte: int | None) -> None:
        """Fill new memory with a byte, 0xD7 by default. None: zeros, which cost no host memory."""
        self._set("sim_set_stale_byte", -1 if byte is None else byte)

    def set_copy_rate(self, bytes_per_s: int | None) -> None:
        """Slow every stream's copies down to a rate. None: as fast as the host is."""
        self._set("sim_set_copy_rate", bytes_per_s or 0)

    def set_on_demand(self, on: bool) -> None:
        """Run queued work only as far as somebody waits for it, or asks about it."""
        self._set("sim_set_on_demand", int(on))

    def set_capturing(self, on: bool) -> None:
        """Have some other thread capture a graph, in the mode that is the default."""
        self._set("sim_set_capturing", int(on))

    def set_pinned_limit_bytes(self, limit_bytes: int | None) -> None:
        """Refuse to pin more host memory than this. None: no limit."""
        self._set("sim_set_pinned_limit", _UNLIMITED if limit_bytes is None else limit_bytes)

    def fail(self, function: str, error: SupportsInt, nth: int = 1, times: int | None = 1) -> None:
        """Let calls of a function fail without doing anything.

        Parameters
        ----------
        function
            Its name without a version, as ``cuMemCreate``; or ``queuedCopy`` or
            ``queuedKernel``, the moment in which queued work runs, where a fault breaks the
            context as on a real device.
        error
            The ``CUresult``.
        nth
            The first call that fails, counted from now: 1 is the next.
        times
            How many calls fail from there on. None: all.

        Raises
        ------
        ValueError
            There is no such function, or a count below 1, or no error.
        """
        count = _UNLIMITED if times is None else times
        self._set("sim_fail", function.encode(), nth, count, int(error))

    def clear_faults(self) -> None:
        """Forget all injected faults."""
        self._library.sim_clear_faults()

    def pending_faults(self) -> int:
        """Return how many injected faults have calls left to fail."""
        return int(self._library.sim_pending_faults())

    def calls(self, function: str) -> int:
        """Return how often a function was called since the reset, refused calls included.

        Raises
        ------
        ValueError
            There is no such function.
        """
        count = int(self._library.sim_calls(function.encode()))
        if count < 0:
            msg = f"the simulated driver has no function {function!r}"
            raise ValueError(msg)
        return count

    def violations(self) -> dict[str, int]:
        """Return what was done that a real driver may not forgive: kind to count, none of 0.

        Kinds: ``double_release`` and ``unknown_handle`` (answered with an error too),
        ``unmap_in_use`` (queued work needs the range), ``unmap_nothing`` (answered with success),
        ``queued_copy_faulted`` (the device memory of a copy or a kernel was gone when it ran),
        ``host_released_in_use``, ``host_bytes_gone`` (the host memory of a copy),
        ``call_in_callback``, ``unload_in_use`` (a module with a launch in a queue) and
        ``capture_lost`` (a call that others' captures forbid; answered with an error too).
        """
        found: dict[str, int] = {}
        kind = 0
        while name := self._library.sim_violation_name(kind):
            if count := int(self._library.sim_violations(kind)):
                found[name.decode()] = count
            kind += 1
        return found

    def device_usage(self, device: int = 0) -> DeviceUsage:
        """Return what is in use of a device."""
        row = reports.DeviceUsageRow()
        self._set("sim_device_usage", device, ctypes.byref(row))
        return DeviceUsage(**_values(row))

    def process_usage(self) -> ProcessUsage:
        """Return what this process holds in the driver."""
        row = reports.ProcessUsageRow()
        self._library.sim_process_usage(ctypes.byref(row))
        return ProcessUsage(**_values(row))

    def handles(self, live_only: bool = True) -> list[HandleReport]:
        """List physical allocations in order of creation, on request the freed ones too."""
        rows = _rows(self._library.sim_handles, reports.HandleRow)
        found = [HandleReport(**{**_values(row), "live": bool(row.live)}) for row in rows]
        return [handle for handle in found if handle.live or not live_only]

    def mappings(self) -> list[MappingReport]:
        """List mapped ranges by address."""
        rows = _rows(self._library.sim_mappings, reports.MappingRow)
        return [MappingReport(**{**_values(row), "access": tuple(row.access)}) for row in rows]

    def reservations(self) -> list[RangeReport]:
        """List reserved address ranges by address."""
        rows = _rows(self._library.sim_reservations, reports.RangeRow)
        return [RangeReport(**_values(row)) for row in rows]

    def pinned_ranges(self) -> list[RangeReport]:
        """List registered and allocated host memory by address."""
        rows = _rows(self._library.sim_pinned, reports.RangeRow)
        return [RangeReport(**_values(row)) for row in rows]

    def _set(self, name: str, *arguments: object) -> None:
        if getattr(self._library, name)(*arguments):
            msg = f"{name}{arguments}: the simulated driver refuses these values, or does so now"
            raise ValueError(msg)


def _values(row: ctypes.Structure) -> dict[str, Any]:
    return {field[0]: getattr(row, field[0]) for field in row._fields_}


def _rows(function: Callable[..., int], row: type[_Row]) -> list[_Row]:
    count = function(None, 0)
    while True:
        buffer = (row * count)()
        found = function(buffer, count)
        if found <= count:  # else another thread made more of them meanwhile
            return list(buffer[:found])
        count = found
