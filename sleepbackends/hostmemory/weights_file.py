"""A safetensors file: checked as a whole first, then read tensor by tensor into place."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from sleepbackends.errors import RequestError, WeightsFileError
from sleepbackends.hostmemory.arrays import Layout, import_optional, layout_of
from sleepbackends.hostmemory.files import read_into

_DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "U16": "uint16",
    "I16": "int16",
    "U32": "uint32",
    "I32": "int32",
    "U64": "uint64",
    "I64": "int64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
    "F64": "float64",
    "C64": "complex64",
}
"""Names of the format, and what torch and numpy call the same."""


@dataclass(frozen=True)
class Entry:
    """One tensor of the file.

    Parameters
    ----------
    name : str
        Its name.
    layout : Layout
        Its shape and dtype.
    offset : int
        Where its bytes start in the file.
    """

    name: str
    layout: Layout
    offset: int


class WeightsFile:
    """A safetensors file that was found to be sound, open for reading.

    Parameters
    ----------
    path : Path
        The file.
    framework : {"torch", "numpy"}
        What its tensors are to become.

    Raises
    ------
    WeightsFileError
        If the file is missing, damaged, or holds a dtype that the framework has not.
    """

    def __init__(self, path: Path, framework: str) -> None:
        if framework not in ("torch", "numpy"):
            raise RequestError(f"unknown framework {framework!r}", hint="'torch' or 'numpy'")
        self.path = path
        library = import_optional(framework)
        self._check_format()
        try:
            self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise self._error(f"cannot be opened: {error.strerror}") from error
        try:
            self.entries = self._read_entries(framework, library)
        except BaseException:
            os.close(self._fd)
            raise

    def __enter__(self) -> WeightsFile:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def reader_of(self, entry: Entry) -> Callable[[memoryview], None]:
        """Return what reads an entry's bytes into the memory made for it."""
        return partial(self._read, entry)

    def _read(self, entry: Entry, into: memoryview) -> None:
        try:
            got = read_into(self._fd, into, entry.offset)
        except OSError as error:
            raise self._error(f"cannot be read: {error.strerror}") from error
        if got < len(into):
            raise self._error(f"ended inside tensor {entry.name!r} while it was read")

    def _check_format(self) -> None:
        # Header, offsets and length are checked by the format's own library; the bytes are
        # read without it, because it would map the file and copy through the mapping.
        safetensors = import_optional("safetensors")
        try:
            with safetensors.safe_open(os.fspath(self.path), framework="numpy"):
                pass
        except (OSError, safetensors.SafetensorError) as error:
            what = getattr(error, "strerror", None) or error
            raise self._error(f"is missing or not a sound safetensors file: {what}") from error

    def _read_entries(self, framework: str, library: Any) -> list[Entry]:
        try:
            header_bytes = int.from_bytes(os.pread(self._fd, 8, 0), "little")
            size_bytes = os.fstat(self._fd).st_size
            header = json.loads(os.pread(self._fd, min(header_bytes, size_bytes), 8))
            described = [
                (name, about["dtype"], about["shape"], about["data_offsets"][0])
                for name, about in header.items()
                if name != "__metadata__"
            ]
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            # It was sound a moment ago.
            raise self._error("is being changed by somebody else") from error
        return [
            Entry(
                name, self._layout(name, dtype, shape, framework, library), start + 8 + header_bytes
            )
            for name, dtype, shape, start in described
        ]

    def _layout(self, name: str, dtype: str, shape: Any, framework: str, library: Any) -> Layout:
        known = _DTYPES.get(dtype, "")
        try:
            return layout_of(shape, getattr(library, known) if framework == "torch" else known)
        except (AttributeError, RequestError):
            raise self._error(
                f"holds tensor {name!r} of dtype {dtype}, which {framework} has not",
                hint="read it with framework='torch'" if framework == "numpy" else "",
            ) from None

    def _error(self, what: str, hint: str = "") -> WeightsFileError:
        return WeightsFileError(
            f"weights file {os.fspath(self.path)!r} {what}",
            hint=hint or "check the path, or download or export the file again",
        )
