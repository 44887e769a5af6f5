"""Fingerprints through torch on an Intel GPU; there is no kernel of ours for it."""

from __future__ import annotations

from typing import Any

from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.torch_fingerprint import TorchFingerprints
from sleepbackends.xpu.accelerator import XPU


class XpuFingerprints(TorchFingerprints):
    """Fingerprints of the memory of one of torch's XPU devices; see its base class."""

    accelerator = XPU

    def _over(self, span: Span) -> Any:
        torch = self._torch
        size, device = span.size_bytes, torch.device(self._name)
        # As torch itself makes tensors over the memory of its graphs. The storage owns nothing.
        storage = torch._C._construct_storage_from_data_pointer(span.address, device, size)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage, 0, (size,), (1,))
