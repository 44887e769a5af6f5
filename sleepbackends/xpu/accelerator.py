"""Intel GPUs as torch knows them."""

from __future__ import annotations

from sleepbackends.vmm.accelerator import Accelerator

XPU = Accelerator("xpu", "XPU", "count from 0; ZE_AFFINITY_MASK says which are seen")
