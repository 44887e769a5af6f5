"""A kind of device as torch knows it: the names under which its parts are found there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from sleepbackends.errors import UnsupportedOperationError


@dataclass(frozen=True)
class Accelerator:
    """What torch calls one kind of device.

    Parameters
    ----------
    kind : {"cuda", "xpu"}
        The type of ``torch.device``, and of everything that is named after it.
    title : str
        What people call it.
    visible_hint : str
        How to find out which devices of it a process sees.
    """

    kind: Literal["cuda", "xpu"]
    title: str
    visible_hint: str

    def device_name(self, device: int) -> str:
        """Return what torch calls a device."""
        return f"{self.kind}:{device}"

    def import_torch(self) -> Any:
        """Import torch with devices of this kind.

        Raises
        ------
        UnsupportedOperationError
            If it is missing or was built without them.
        """
        try:
            import torch
        except ImportError as error:
            raise UnsupportedOperationError(
                "torch is not installed", hint="pip install 'sleepbackends[torch]'"
            ) from error
        if not self.of(torch).is_available():
            raise UnsupportedOperationError(
                f"torch sees no {self.title} device", hint=f"install a {self.title} build of torch"
            )
        return torch

    def torch_if_there(self) -> Any:
        """Import torch with devices of this kind; None without."""
        try:
            return self.import_torch()
        except UnsupportedOperationError:
            return None

    def of(self, torch: Any) -> Any:
        """Return the module for this kind of device, as ``torch.cuda``."""
        return getattr(torch, self.kind)

    def internal(self, torch: Any, name: str) -> Any:
        """Return a function of torch's C library that exists for each kind of device."""
        return getattr(torch._C, f"_{self.kind}_{name}")
