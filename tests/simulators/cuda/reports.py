"""What the simulated driver says about itself, as plain values."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

MAX_DEVICES = 16


@dataclass(frozen=True)
class DeviceUsage:
    """The memory of one device. Bytes unless the name says otherwise."""

    total_bytes: int
    budget_bytes: int
    """How much of it may be in use, by all processes together."""
    free_bytes: int
    """What ``cuMemGetInfo`` calls free: what all processes that share the device leave."""
    used_bytes: int
    """By this process."""
    live_handles: int
    """Physical allocations that hold memory: referenced, or still mapped."""
    live_mappings: int
    context_references: int


@dataclass(frozen=True)
class ProcessUsage:
    """What this process holds in the driver, on all devices."""

    reserved_bytes: int
    """Address space."""
    reservations: int
    pinned_bytes: int
    """Host memory, registered or allocated by the driver."""
    pinned_ranges: int
    pageable_copy_bytes: int
    """How much was copied from or to host memory that was not pinned."""
    live_streams: int
    live_events: int
    queued_operations: int
    live_modules: int


@dataclass(frozen=True)
class HandleReport:
    """One physical allocation, from its creation to the reset."""

    number: int
    """The ``CUmemGenericAllocationHandle``."""
    size_bytes: int
    device: int
    references: int
    mappings: int
    takes: int
    """How often it was created or retained; every take wants one release."""
    releases: int
    """Calls of ``cuMemRelease`` with it, the refused ones too."""
    live: bool


@dataclass(frozen=True)
class MappingReport:
    """One mapped range."""

    address: int
    size_bytes: int
    handle: int
    device: int
    """Whose memory it is."""
    access: tuple[int, ...]
    """By device: 0 none, 1 read, 3 read and write."""


@dataclass(frozen=True)
class RangeReport:
    """A range of addresses."""

    address: int
    size_bytes: int


class DeviceUsageRow(ctypes.Structure):
    """``struct device_usage`` of control.c."""

    _fields_ = [(name, ctypes.c_uint64) for name in DeviceUsage.__dataclass_fields__]


class ProcessUsageRow(ctypes.Structure):
    """``struct process_usage`` of control.c."""

    _fields_ = [(name, ctypes.c_uint64) for name in ProcessUsage.__dataclass_fields__]


class HandleRow(ctypes.Structure):
    """``struct handle_row`` of control.c."""

    _fields_ = [(name, ctypes.c_uint64) for name in HandleReport.__dataclass_fields__]


class MappingRow(ctypes.Structure):
    """``struct mapping_row`` of control.c."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("address", "size_bytes", "handle", "device")),
        ("access", ctypes.c_uint64 * MAX_DEVICES),
    ]


class RangeRow(ctypes.Structure):
    """``struct range_row`` of control.c."""

    _fields_ = [(name, ctypes.c_uint64) for name in RangeReport.__dataclass_fields__]
