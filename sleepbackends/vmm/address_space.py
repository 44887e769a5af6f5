"""The device address space of one backend: a typed view of the native library.

The library allocates and frees for torch without entering Python; see the head of
``sleepbackends/_native/address_space.c``. Calls made here let other Python threads run.
"""

from __future__ import annotations

import ctypes
import threading
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sleepbackends.errors import BackendUnavailableError
from sleepbackends.vmm.driver import Driver

_FOLDER = Path(__file__).parents[1] / "_native"

SHARE_BELOW_BYTES = 64 << 20
"""Requests of this size cost nothing noticeable on their own."""

_CREATE, _RELEASE, _MAP, _UNMAP = range(4)

Reached = Callable[[int], object]
"""Is told for how many of some extents a step was done, all of them or not."""


def _ignore(count: int) -> None:
    pass


class _Info(ctypes.Structure):
    _fields_ = (
        ("id", ctypes.c_uint64),
        ("generation", ctypes.c_uint64),
        ("address", ctypes.c_ulonglong),
        ("size", ctypes.c_size_t),
        ("live", ctypes.c_size_t),
        ("device", ctypes.c_int),
        ("tag", ctypes.c_int),
    )


class _Piece(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_size_t), ("size", ctypes.c_size_t))


@dataclass(frozen=True)
class Extent:
    """One reserved range with one physical handle; all of it sleeps and wakes together.

    Parameters
    ----------
    id : int
        Never used again after the extent is gone.
    generation : int
        Changes with every piece that is allocated or freed in it.
    address, size_bytes : int
        The range, whole allocation granules.
    live_bytes : int
        Bytes that were asked for in it and are not freed; 0 if it could not be deleted.
    device : int
        Ordinal of the device.
    tag : str
        The tag of all its pieces.
    """

    id: int
    generation: int
    address: int
    size_bytes: int
    live_bytes: int
    device: int
    tag: str


def library_path(name: str) -> Path:
    """Return where a native library of this package is installed.

    Raises
    ------
    BackendUnavailableError
        If the package was installed without it.
    """
    path = _FOLDER / f"libsleepbackends_{name}.so"
    if not path.is_file():
        raise BackendUnavailableError(
            f"the native library {path.name} was not built with this installation",
            hint="install a C compiler and reinstall sleepbackends, or install its wheel",
        )
    return path


class AddressSpace:
    """Extents by tag and device; allocation in C, everything else from here.

    Parameters
    ----------
    library : Path
        The native library.
    driver_library : str
        What the native library hands to ``dlopen``.
    driver : Driver
        Turns codes into errors.
    share_below_bytes : int
        Smaller requests of one tag share extents; 0 gives each request one of its own.

    Raises
    ------
    BackendUnavailableError
        If the driver cannot be loaded.
    """

    def __init__(
        self,
        library: Path,
        driver_library: str,
        driver: Driver,
        share_below_bytes: int = SHARE_BELOW_BYTES,
    ) -> None:
        self._native = _declare(ctypes.CDLL(str(library)))
        self._driver = driver
        code = self._native.sb_init(driver_library.encode())
        if code:
            raise BackendUnavailableError(
                f"{driver_library} cannot be used: code {code}",
                hint="sleepbackends doctor says what this machine has",
            )
        self._space = int(self._native.sb_new_space(share_below_bytes))
        driver.check(min(self._space, 0), "making an address space")
        self._tags: list[str] = []
        self._tags_lock = threading.Lock()

    @property
    def alloc_pointer(self) -> int:
        """Address of ``void *alloc(ssize_t, int, stream)``, for torch."""
        return _address(self._native.sb_alloc)

    @property
    def free_pointer(self) -> int:
        """Address of ``void free(void *, ssize_t, int, stream)``, for torch."""
        return _address(self._native.sb_free)

    @contextmanager
    def allocating(self, tag: str) -> Iterator[None]:
        """Let what this thread allocates carry the tag; nests."""
        space, number = ctypes.c_int(), ctypes.c_int()
        self._native.sb_current_tag(ctypes.byref(space), ctypes.byref(number))
        self._native.sb_enter_tag(self._space, self._number(tag))
        try:
            yield
        finally:
            self._native.sb_enter_tag(space, number)

    def _number(self, tag: str) -> int:
        with self._tags_lock:
            if tag not in self._tags:
                self._tags.append(tag)
            return self._tags.index(tag)

    def allocate(self, tag: str, size_bytes: int, device: int) -> int:
        """Allocate without torch; return the address.

        Raises
        ------
        DeviceMemoryError
            If there is no room.
        MechanismError
            If the driver failed otherwise.
        """
        with self.allocating(tag):
            address = self._native.sb_alloc(size_bytes, device, None)
            if not address:
                code = self._native.sb_last_error()
                self._driver.check(code, "allocating", needed_bytes=size_bytes, device=device)
        return int(address)

    def free(self, address: int) -> None:
        """Free what was allocated; legal in every residency, waits for running kernels."""
        self._native.sb_free(address, 0, 0, None)

    def keep_free(self, size_bytes: int) -> None:
        """Have allocations fail where they would leave less of a device free.

        Waking up takes what it needs; 0 turns the margin off.
        """
        self._native.sb_keep_free(self._space, size_bytes)

    def begin(self) -> None:
        """Keep the extents there are from going and from gaining pieces until ``end``."""
        self._native.sb_begin(self._space)

    def end(self) -> None:
        """Let extents go again, and give back what was freed, or could not be, meanwhile."""
        self._native.sb_end(self._space)

    def changes(self) -> int:
        """Return a number that is another one whenever extents came, went or changed."""
        return int(self._native.sb_changes())

    def extents(self) -> list[Extent]:
        """List the extents, in order of address."""
        capacity = 256
        while True:
            infos = (_Info * capacity)()
            count = self._native.sb_extents(self._space, infos, capacity)
            if count <= capacity:
                break
            capacity = count
        return [
            Extent(i.id, i.generation, i.address, i.size, i.live, i.device, self._tags[i.tag])
            for i in infos[:count]
        ]

    def live_ranges(self, extent_id: int) -> list[tuple[int, int]]:
        """List offset and size of what was asked for in an extent, neighbours merged."""
        capacity = 64
        while True:
            pieces = (_Piece * capacity)()
            count = self._native.sb_pieces(extent_id, pieces, capacity)
            if count < 0:
                return []
            if count <= capacity:
                return [(piece.offset, piece.size) for piece in pieces[:count]]
            capacity = count

    def create(self, extents: Sequence[Extent], reached: Reached = _ignore) -> None:
        """Take the physical memory of those extents that have none.

        Raises
        ------
        DeviceMemoryError
            If there is no room.
        """
        self._do(_CREATE, "taking memory", extents, reached)

    def release(self, extents: Sequence[Extent], reached: Reached = _ignore) -> None:
        """Give back what ``create`` took; nothing where there is none.

        Raises
        ------
        MechanismError
            If the driver refuses; ``end`` tries again.
        """
        self._do(_RELEASE, "giving memory back", extents, reached)

    def map(self, extents: Sequence[Extent], reached: Reached = _ignore) -> None:
        """Map the physical memory that ``create`` took.

        Raises
        ------
        MechanismError
            If the driver refuses; the extent it failed at is not usable and keeps its physical
            memory.
        """
        self._do(_MAP, "mapping", extents, reached)

    def unmap(self, extents: Sequence[Extent], reached: Reached = _ignore) -> None:
        """Unmap extents and give their physical memory back, at the latest at ``end``.

        Raises
        ------
        MechanismError
            If the driver refuses; the extent it failed at is still mapped.
        """
        self._do(_UNMAP, "unmapping", extents, reached)

    def _do(self, step: int, what: str, extents: Sequence[Extent], reached: Reached) -> None:
        """Do a step in one call, until it fails for one."""
        ids = array("Q", [extent.id for extent in extents])
        done = ctypes.c_size_t()
        try:
            code = self._native.sb_steps(ids.buffer_info()[0], len(ids), step, ctypes.byref(done))
        finally:
            reached(done.value)
        if code:
            self._driver.check(code, what, device=extents[done.value].device)


def _address(function: Any) -> int:
    address = ctypes.cast(function, ctypes.c_void_p).value
    return int(address or 0)


def _declare(native: ctypes.CDLL) -> Any:
    pointer, size, number = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    signatures: dict[str, tuple[Any, tuple[Any, ...]]] = {
        "sb_init": (number, (ctypes.c_char_p,)),
        "sb_new_space": (number, (size,)),
        "sb_alloc": (pointer, (ctypes.c_ssize_t, number, pointer)),
        "sb_free": (None, (pointer, ctypes.c_ssize_t, number, pointer)),
        "sb_enter_tag": (None, (number, number)),
        "sb_current_tag": (None, (pointer, pointer)),
        "sb_last_error": (number, ()),
        "sb_keep_free": (None, (number, size)),
        "sb_begin": (None, (number,)),
        "sb_end": (None, (number,)),
        "sb_changes": (ctypes.c_uint64, ()),
        "sb_extents": (size, (number, pointer, size)),
        "sb_pieces": (ctypes.c_long, (ctypes.c_uint64, pointer, size)),
        "sb_steps": (number, (pointer, size, number, pointer)),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(native, name)
        function.restype = result
        function.argtypes = arguments
    return native
