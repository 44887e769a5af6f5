"""Fingerprints through torch on a CUDA device, where the kernel cannot be had."""

from __future__ import annotations

from typing import Any

from sleepbackends.cumem.accelerator import CUDA
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.torch_fingerprint import TorchFingerprints as TorchFingerprintsOfDevice


class TorchFingerprints(TorchFingerprintsOfDevice):
    """Fingerprints of one CUDA device's memory; see its base class."""

    accelerator = CUDA

    def _over(self, span: Span) -> Any:
        return self._torch.as_tensor(_DeviceBytes(span), device=self._name)


class _DeviceBytes:
    """Memory as torch understands it; read, though torch wants to hear that it may be written."""

    def __init__(self, span: Span) -> None:
        self.__cuda_array_interface__ = {
            "shape": (span.size_bytes,),
            "typestr": "|u1",
            "data": (span.address, False),
            "strides": None,
            "version": 3,
        }
