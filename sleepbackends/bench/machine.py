"""What the figures were measured with."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Mapping
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from sleepbackends.bench import peers
from sleepbackends.bench.request import Request

GIB = 1 << 30


def describe() -> dict[str, Any]:
    """Tell what the device is, or under ``problem`` why nothing can be measured.

    It initialises CUDA in this process.
    """
    hint = "pip install 'sleepbackends[torch]', of a build with CUDA"
    try:
        import torch
    except ImportError as error:
        return {"problem": f"torch cannot be imported: {error}", "hint": hint}
    if not torch.cuda.is_available():
        return {"problem": "torch sees no CUDA device", "hint": hint}
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "gpu_gib": round(properties.total_memory / GIB, 1),
        "gpu_count": torch.cuda.device_count(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "cuda_bindings": _version("cuda-bindings"),
        "sleepbackends": _version("sleepbackends"),
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def machine(described: Mapping[str, Any], request: Request) -> dict[str, Any]:
    """Tell everything that the figures depend on."""
    facts = {
        **described,
        "driver": _driver_version(),
        "python": platform.python_version(),
        "linux": platform.release(),
        "cpus": os.cpu_count(),
        "host_gib": round(psutil.virtual_memory().total / GIB),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    if not peers.missing("vllm", request.peers):
        facts["vllm"] = request.vllm_version or peers.version("vllm", request.peers)
    if not peers.missing("tms", request.peers):
        facts["torch_memory_saver"] = peers.version("tms", request.peers)
    return facts


def _driver_version() -> str:
    """Return the version of the NVIDIA driver, as the kernel tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"
