"""CUDA devices as torch knows them."""

from __future__ import annotations

from sleepbackends.vmm.accelerator import Accelerator

CUDA = Accelerator("cuda", "CUDA", "count from 0; CUDA_VISIBLE_DEVICES says which are seen")
