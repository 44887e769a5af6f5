"""Pools of torch on Intel GPUs."""

from __future__ import annotations

import os
import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from sleepbackends.errors import UnsupportedOperationError
from sleepbackends.vmm.torch_pools import TorchPools
from sleepbackends.xpu.accelerator import XPU

OLDEST_TORCH = (2, 11)
"""The first release that has ``torch.xpu.MemPool``."""

_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_XPU_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments\s*:\s*true", re.IGNORECASE)


class XpuPools(TorchPools):
    """Scopes in which torch allocates from an address space, where this torch can do that."""

    accelerator = XPU

    def _settings(self, torch: Any) -> AbstractContextManager[None]:
        numbers = tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))
        if numbers < OLDEST_TORCH:
            raise UnsupportedOperationError(
                f"torch {torch.__version__} has no memory pools for XPU",
                hint="install torch 2.11 or newer for XPU",
            )
        for name in _VARIABLES:
            if _EXPANDABLE.search(os.environ.get(name, "")):
                raise UnsupportedOperationError(
                    f"with expandable segments torch asks no allocator but its own ({name})",
                    hint=f"take expandable_segments out of {name}",
                )
        return nullcontext()
