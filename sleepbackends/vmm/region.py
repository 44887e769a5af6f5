"""A region on a device: what is allocated in it carries its tag."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sleepbackends.errors import RequestError, WeightsFileError

if TYPE_CHECKING:
    from sleepbackends.vmm.torch_backend import AnyTorchVmmBackend


class DeviceMemory:
    """Raw device memory, for engines that do without torch.

    Parameters
    ----------
    backend : AnyTorchVmmBackend
        Owns it.
    address : int
        Where it starts.
    size_bytes : int
        How many bytes were asked for.
    device : int
        Ordinal of the device.
    """

    def __init__(
        self, backend: AnyTorchVmmBackend, address: int, size_bytes: int, device: int
    ) -> None:
        self.address = address
        self.size_bytes = size_bytes
        self._device = device
        self._backend = backend

    def read(self) -> bytes:
        """Copy all bytes to the host.

        Raises
        ------
        MechanismError
            If the memory is asleep or was freed.
        """
        data: bytes = self._backend.driver.read(self.address, self.size_bytes, self._device)
        return data

    def write(self, data: bytes) -> None:
        """Overwrite all bytes.

        Raises
        ------
        RequestError
            If the number of bytes is another.
        MechanismError
            If the memory is asleep or was freed.
        """
        if len(data) != self.size_bytes:
            raise RequestError(f"{len(data)} bytes do not fit into {self.size_bytes}")
        self._backend.driver.write(self.address, data, self._device)

    def free(self) -> None:
        """Give it back, in whatever residency it is."""
        self._backend.free(self.address)


class DeviceRegion:
    """Allocates under one tag on one device.

    Anything torch allocates in the scope, in the thread that opened it, carries the tag; the
    methods here are a convenience.

    Parameters
    ----------
    backend : AnyTorchVmmBackend
        Where the memory comes from.
    tag : str
        The tag of everything allocated here.
    device : int
        Ordinal of the device.
    """

    def __init__(self, backend: AnyTorchVmmBackend, tag: str, device: int) -> None:
        self.tag = tag
        self.device = device
        self._backend = backend

    def buffer(self, size_bytes: int) -> DeviceMemory:
        """Allocate raw memory; its contents are undefined.

        Raises
        ------
        RequestError
            If the size is not positive.
        DeviceMemoryError
            If there is no room.
        """
        address = self._backend.allocate(self.tag, size_bytes, self.device)
        return DeviceMemory(self._backend, address, size_bytes, self.device)

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """Allocate a tensor of undefined contents.

        Raises
        ------
        torch.OutOfMemoryError
            If there is no room.
        """
        return self._torch().empty(shape, dtype=dtype, device=self._device_name())

    def zeros(self, shape: int | Sequence[int], dtype: Any) -> Any:
        """Allocate a tensor of zeros.

        Raises
        ------
        torch.OutOfMemoryError
            If there is no room.
        """
        return self._torch().zeros(shape, dtype=dtype, device=self._device_name())

    def from_safetensors(self, path: str | os.PathLike[str]) -> dict[str, Any]:
        """Load a safetensors file to the device.

        Returns
        -------
        dict of str to torch.Tensor
            By their names in the file.

        Raises
        ------
        WeightsFileError
            If the file is missing or damaged; nothing was allocated.
        torch.OutOfMemoryError
            If there is no room.
        """
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            tensors: dict[str, Any] = load_file(Path(path), device=self._device_name())
        except (OSError, SafetensorError) as error:
            raise WeightsFileError(
                f"weights file {os.fspath(path)!r} cannot be read: {error}",
                hint="give the path of a complete safetensors file",
            ) from error
        return tensors

    def _torch(self) -> Any:
        return self._backend.accelerator.import_torch()

    def _device_name(self) -> str:
        return self._backend.device_name(self.device)
