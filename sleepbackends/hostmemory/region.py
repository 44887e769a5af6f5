"""A region: the scope in which memory is allocated under one tag."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from sleepbackends.errors import RequestError
from sleepbackends.hostmemory import weights_file
from sleepbackends.hostmemory.arrays import Layout, Shape, layout_of

if TYPE_CHECKING:
    from sleepbackends.hostmemory.backend import HostMemoryBackend


class Region:
    """Allocates arrays under one tag.

    What it returns stays valid after the scope has ended: a block is freed when the last
    array, tensor or view over it is gone. Its address never changes.

    Parameters
    ----------
    backend : HostMemoryBackend
        Where the memory comes from.
    tag : str
        The tag of everything allocated here.
    """

    def __init__(self, backend: HostMemoryBackend[Any], tag: str) -> None:
        self.tag = tag
        self._backend = backend
        self._ended = False

    def end(self) -> None:
        """Refuse further allocations."""
        self._ended = True

    def buffer(self, size_bytes: int) -> memoryview:
        """Allocate zeroed bytes.

        Parameters
        ----------
        size_bytes : int
            How many.

        Returns
        -------
        memoryview
            Writable bytes, shape ``(size_bytes,)``.

        Raises
        ------
        RequestError
            If the size is negative or the region has ended.
        HostMemoryError
            If there is no room.
        """
        self._check_open()
        if size_bytes < 0:
            raise RequestError(f"a buffer of {size_bytes} bytes cannot be")
        if size_bytes == 0:
            return memoryview(bytearray())
        self._backend.check_room(size_bytes)
        return memoryview(self._backend.allocate(self.tag, size_bytes)).cast("B")

    def empty(self, shape: Shape, dtype: Any) -> Any:
        """Allocate an array or tensor; it holds zeros, because fresh memory does.

        Parameters
        ----------
        shape : int or sequence of int
            Elements along each axis. Without elements, no memory is taken.
        dtype : torch.dtype or anything numpy.dtype understands
            A ``torch.dtype`` gives a tensor on the CPU, anything else a numpy array.

        Returns
        -------
        torch.Tensor or numpy.ndarray
            Contiguous, of that shape and dtype.

        Raises
        ------
        RequestError
            If the shape or the dtype cannot be, or the region has ended.
        HostMemoryError
            If there is no room.
        UnsupportedOperationError
            If numpy is needed and not installed.
        """
        self._check_open()
        layout = layout_of(shape, dtype)
        self._backend.check_room(layout.size_bytes)
        return self._array(layout)

    def zeros(self, shape: Shape, dtype: Any) -> Any:
        """Allocate an array or tensor of zeros; see ``empty``.

        Raises
        ------
        RequestError, HostMemoryError, UnsupportedOperationError
            As ``empty``.
        """
        return self.empty(shape, dtype)

    def from_safetensors(
        self, path: str | os.PathLike[str], framework: Literal["torch", "numpy"] = "torch"
    ) -> dict[str, Any]:
        """Read a safetensors file straight into memory of this region, a block a tensor.

        Parameters
        ----------
        path : path-like
            The file.
        framework : {"torch", "numpy"}
            What the tensors become.

        Returns
        -------
        dict of str to torch.Tensor or numpy.ndarray
            By their names in the file.

        Raises
        ------
        WeightsFileError
            If the file is missing, damaged, or holds a dtype that the framework has not.
        RequestError
            If there is no such framework, or the region has ended.
        HostMemoryError
            If there is no room for all of it.
        UnsupportedOperationError
            If the framework or safetensors is not installed.

        Notes
        -----
        Guarantee: if it raises, nothing stays allocated.
        """
        self._check_open()
        tensors: dict[str, Any] = {}
        with weights_file.WeightsFile(Path(path), framework) as file:
            self._backend.check_room(sum(entry.layout.size_bytes for entry in file.entries))
            try:
                for entry in file.entries:
                    tensors[entry.name] = self._array(entry.layout, file.reader_of(entry))
            except BaseException:
                # The traceback keeps this frame alive, and with it what it refers to.
                tensors.clear()
                raise
        return tensors

    def _array(self, layout: Layout, write: Callable[[memoryview], None] | None = None) -> Any:
        if layout.size_bytes == 0:
            return layout.without_memory()
        return layout.over(self._backend.allocate(self.tag, layout.size_bytes, write))

    def _check_open(self) -> None:
        if self._ended:
            raise RequestError(
                f"the region of tag {self.tag!r} has ended",
                hint=f"allocate inside its 'with' block, or open another: region({self.tag!r})",
            )
