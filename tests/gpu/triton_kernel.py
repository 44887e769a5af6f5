"""A Triton kernel, which has to be in a file."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]  # Triton has no types
def _add_one(given: Any, made: Any, count: Any, BLOCK: tl.constexpr) -> None:  # noqa: N803 - Triton's way
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = places < count
    tl.store(made + places, tl.load(given + places, mask=inside) + 1, mask=inside)


def add_one(given: torch.Tensor) -> torch.Tensor:
    """Add one to each element."""
    made = torch.empty_like(given)
    count = given.numel()
    _add_one[(triton.cdiv(count, 1024),)](given, made, count, BLOCK=1024)
    return made
