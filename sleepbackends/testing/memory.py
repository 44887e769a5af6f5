"""How the contract suite looks at memory: around the backend, never through it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable


class ObservedMemory(Protocol):
    """One allocation, as its user sees it."""

    address: int
    """Where it starts."""

    def read(self) -> bytes:
        """Return all its bytes."""
        ...

    def write(self, data: bytes) -> None:
        """Overwrite all its bytes."""
        ...

    def free(self) -> None:
        """Drop it, as a user drops a tensor."""
        ...


@runtime_checkable
class RecordingMemory(Protocol):
    """Memory of a device that can record work and run it again, as CUDA captures a graph."""

    def record_copy(self, source: Any) -> Callable[[], None]:
        """Record a copy from other memory into this one, with both addresses in the record.

        Returns what runs it again, as far as both reach.
        """
        ...


class BufferMemory:
    """Memory behind anything that has the buffer interface.

    Parameters
    ----------
    buffer : object
        A writable buffer. This object must hold the only reference to it.
    """

    def __init__(self, buffer: Any) -> None:
        self._view: memoryview | None = memoryview(buffer).cast("B")
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._view))

    def _live(self) -> memoryview:
        if self._view is None:
            raise ValueError("this memory was freed")
        return self._view

    def read(self) -> bytes:
        """Return all its bytes."""
        return self._live().tobytes()

    def write(self, data: bytes) -> None:
        """Overwrite all its bytes."""
        self._live()[:] = data

    def free(self) -> None:
        """Drop it, as a user drops a tensor."""
        self._live().release()
        self._view = None

    def record_copy(self, source: BufferMemory) -> Callable[[], None]:
        """Record a copy from other memory into this; both addresses are part of the record."""
        size_bytes = min(len(self._live()), len(source._live()))
        to, start = self.address, source.address

        def replay() -> None:
            ctypes.memmove(to, start, size_bytes)

        return replay
