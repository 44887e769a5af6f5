"""A short way to drive the real ``cuda.bindings`` in tests of the simulated driver."""

from __future__ import annotations

import ctypes
import importlib
import mmap
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.simulators.cuda.build import SOURCES, build
from tests.simulators.cuda.loading import environment

MIB = 1 << 20
UNIT_BYTES = 2 * MIB
"""The granularity of the simulated devices."""


@dataclass(frozen=True)
class Block:
    """Physical memory mapped at an address of its own."""

    address: int
    size_bytes: int
    handle: int


class Driven:
    """``cuda.bindings.driver``, with results checked or handed out as names.

    Parameters
    ----------
    devices
        Whose primary contexts to retain. The first one's is made current. None: nothing is
        initialised.
    """

    def __init__(self, devices: int | None = 1) -> None:
        self.bindings: Any = importlib.import_module("cuda.bindings.driver")
        self.contexts: list[Any] = []
        if devices:
            self.call("cuInit", 0)
            self.contexts = [self.call("cuDevicePrimaryCtxRetain", d) for d in range(devices)]
            self.call("cuCtxSetCurrent", self.contexts[0])

    def error(self, name: str) -> int:
        """Return an error by its name without ``CUDA_ERROR_``."""
        return int(getattr(self.bindings.CUresult, f"CUDA_ERROR_{name}"))

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function and return what it gives out: nothing, a value or several.

        Raises
        ------
        AssertionError
            It answers an error.
        """
        result, *values = getattr(self.bindings, function)(*arguments)
        assert int(result) == 0, f"{function}: {result!r}"
        return values[0] if len(values) == 1 else tuple(values) or None

    def refusal(self, function: str, *arguments: Any) -> str:
        """Call a function and return the name of its error, or ``SUCCESS``."""
        result = getattr(self.bindings, function)(*arguments)[0]
        return str(result.name).removeprefix("CUDA_ERROR_").removeprefix("CUDA_")

    def prop(self, device: int = 0) -> Any:
        """Describe physical memory of a device."""
        prop = self.bindings.CUmemAllocationProp()
        prop.type = self.bindings.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.location.type = self.bindings.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        prop.location.id = device
        return prop

    def access(self, device: int = 0, flags: str = "READWRITE") -> Any:
        """Describe a device's access: ``NONE``, ``READ`` or ``READWRITE``."""
        access = self.bindings.CUmemAccessDesc()
        access.location = self.prop(device).location
        access.flags = getattr(self.bindings.CUmemAccess_flags, f"CU_MEM_ACCESS_FLAGS_PROT_{flags}")
        return access

    def reserve(self, size_bytes: int = UNIT_BYTES) -> int:
        """Reserve addresses."""
        return int(self.call("cuMemAddressReserve", size_bytes, 0, 0, 0))

    def create(self, size_bytes: int = UNIT_BYTES, device: int = 0) -> int:
        """Create physical memory."""
        return int(self.call("cuMemCreate", size_bytes, self.prop(device), 0))

    def map_at(self, address: int, handle: int, size_bytes: int = UNIT_BYTES) -> None:
        """Map physical memory and let its device, number 0, use it."""
        self.call("cuMemMap", address, size_bytes, 0, handle, 0)
        self.call("cuMemSetAccess", address, size_bytes, [self.access()], 1)

    def block(self, size_bytes: int = UNIT_BYTES, device: int = 0) -> Block:
        """Map new physical memory of a device at new addresses, usable by it."""
        block = Block(self.reserve(size_bytes), size_bytes, self.create(size_bytes, device))
        self.call("cuMemMap", block.address, size_bytes, 0, block.handle, 0)
        self.call("cuMemSetAccess", block.address, size_bytes, [self.access(device)], 1)
        return block

    def drop(self, block: Block) -> None:
        """Take a block apart."""
        self.call("cuMemUnmap", block.address, block.size_bytes)
        self.call("cuMemRelease", block.handle)
        self.call("cuMemAddressFree", block.address, block.size_bytes)

    def stream(self, blocking: bool = False) -> Any:
        """Create a stream, by default one that does not wait for the default stream."""
        return self.call("cuStreamCreate", 0 if blocking else 1)

    def free_bytes(self) -> int:
        """Return the free memory of the current device."""
        return int(self.call("cuMemGetInfo")[0])


class HostBuffer:
    """Host memory at whole pages, which a test can also take away.

    Parameters
    ----------
    size_bytes
        How much.
    byte
        What it is full of.
    """

    def __init__(self, size_bytes: int = UNIT_BYTES, byte: int = 0) -> None:
        self._memory = mmap.mmap(-1, size_bytes)
        self.size_bytes = size_bytes
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        self.fill(byte)

    def fill(self, byte: int) -> None:
        """Overwrite all of it."""
        ctypes.memset(self.address, byte, self.size_bytes)

    def is_all(self, byte: int) -> bool:
        """Tell whether it holds nothing but a byte."""
        return ctypes.string_at(self.address, self.size_bytes) == bytes([byte]) * self.size_bytes


def read(address: int, size_bytes: int = 4) -> bytes:
    """Return bytes as the CPU sees them."""
    return ctypes.string_at(address, size_bytes)


def write(address: int, data: bytes) -> None:
    """Overwrite bytes as the CPU does."""
    ctypes.memmove(address, data, len(data))


def elsewhere(
    body: str, total_bytes: int | None = None, shared: Path | None = None
) -> subprocess.Popen[str]:
    """Run code in another process that has the simulated driver.

    The code finds all names of this module, ``os``, and ``cuda``, a `Driven`.
    """
    code = f"from {__name__} import *\nimport os\ncuda = Driven()\n{body}"
    env = environment(build().parent, total_bytes=total_bytes, shared=shared)
    env["PYTHONPATH"] = str(SOURCES.parents[2])
    # Python 3.12 and later warn of forks in a process with threads, which is what is tested.
    command = [sys.executable, "-W", "ignore", "-c", code]
    return subprocess.Popen(command, env=env, stdin=-1, stdout=-1, text=True)
