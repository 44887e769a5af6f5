"""Shapes and dtypes of torch and numpy, worked out before anything is allocated.

Neither library is imported unless it is used.
"""

from __future__ import annotations

import importlib
import math
import operator
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sleepbackends.errors import RequestError, UnsupportedOperationError

Shape = int | Sequence[int]


@dataclass(frozen=True)
class Layout:
    """An array to be: its shape, its dtype, and how it is put over a buffer.

    Parameters
    ----------
    shape : tuple of int
        Elements along each axis.
    itemsize_bytes : int
        Bytes of one element.
    over : callable
        Makes the array over a writable buffer of ``size_bytes``.
    without_memory : callable
        Makes the array where it has no elements.
    """

    shape: tuple[int, ...]
    itemsize_bytes: int
    over: Callable[[Any], Any]
    without_memory: Callable[[], Any]

    @property
    def size_bytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize_bytes


def layout_of(shape: Shape, dtype: Any) -> Layout:
    """Work out an array: a ``torch.dtype`` gives a tensor, anything else a numpy array.

    Raises
    ------
    RequestError
        If the shape or the dtype cannot be.
    UnsupportedOperationError
        If numpy is needed and not installed.
    """
    sizes = _sizes(shape)
    # There is no torch dtype where torch was not imported.
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(dtype, torch.dtype):
        return _torch_layout(torch, sizes, dtype)
    return _numpy_layout(sizes, dtype)


def import_optional(name: str) -> Any:
    """Import torch or numpy.

    Raises
    ------
    UnsupportedOperationError
        If it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UnsupportedOperationError(
            f"{name} cannot be imported: {error}", hint="pip install 'sleepbackends[torch]'"
        ) from error


def _sizes(shape: Shape) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, shape if isinstance(shape, Sequence) else (shape,)))
    except TypeError:
        raise RequestError(
            f"{shape!r} is not a shape", hint="pass an int or a sequence of ints"
        ) from None
    if any(size < 0 for size in sizes):
        raise RequestError(f"shape {sizes} has a negative size", hint="sizes start at 0")
    return sizes


def _torch_layout(torch: Any, shape: tuple[int, ...], dtype: Any) -> Layout:
    if str(dtype).startswith(("torch.qint", "torch.quint")):
        raise RequestError(
            f"{dtype} cannot be put over plain memory",
            hint="allocate the integers and keep scale and zero point beside them",
        )
    return Layout(
        shape,
        dtype.itemsize,
        over=lambda buffer: torch.frombuffer(buffer, dtype=dtype).view(shape),
        without_memory=lambda: torch.empty(shape, dtype=dtype, device="cpu"),
    )


def _numpy_layout(shape: tuple[int, ...], dtype: Any) -> Layout:
    numpy = import_optional("numpy")
    try:
        wanted = numpy.dtype(dtype)
    except TypeError as error:
        raise RequestError(
            f"{dtype!r} is not a dtype: {error}", hint="pass a torch.dtype or a numpy dtype"
        ) from None
    if wanted.hasobject:
        raise RequestError(
            f"dtype {wanted} holds Python objects, which are pointers and cannot be saved",
            hint="use a dtype of plain values",
        )
    return Layout(
        shape,
        wanted.itemsize,
        over=lambda buffer: numpy.frombuffer(buffer, dtype=wanted).reshape(shape),
        without_memory=lambda: numpy.empty(shape, dtype=wanted),
    )
