"""A Triton kernel, which has to be in a file."""

from __future__ import annotations

import torch
import triton
import triton.language as tl


# Triton has no types, and evaluates annotations as part of the kernel.
@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _add_one(given, made, count, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def, unused-ignore]  # noqa: N803
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(made + places, tl.load(given + places, mask=inside) + 1, mask=inside)


def add_one(given: torch.Tensor) -> torch.Tensor:
    """Add one to each element."""
    made = torch.empty_like(given)
    count = given.numel()
    _add_one[(triton.cdiv(count, 1024),)](given, made, count, BLOCK=1024)
    return made
