"""What the figures were measured with."""

from __future__ import annotations

import logging
import os
import platform
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from sleepbackends.bench import peers
from sleepbackends.bench.request import Request
from sleepbackends.errors import HostMemoryError
from sleepbackends.host_limits import host_memory
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm.driver import Driver

logger = logging.getLogger(__name__)

GIB = 1 << 30
CHUNK_BYTES = 256 << 20


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


def touch_host_memory(size_bytes: int, driver: Driver | None = None) -> int:
    """Have the machine give this much memory once; return how much it was.

    In a virtual machine memory may take longer when it is touched for the first time, and
    several times as long when it is registered for the first time: that would be counted
    against whoever needs it first. With a driver, it is registered as well, as far as that is
    allowed.
    """
    size_bytes = host.round_up(min(size_bytes, host_memory().available_bytes * 3 // 4))
    address = host.reserve(size_bytes)
    try:
        host.map_memory(address, size_bytes)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for at in range(0, size_bytes, CHUNK_BYTES):
                pool.submit(host.populate, address + at, min(CHUNK_BYTES, size_bytes - at))
        if driver is not None:
            _register(driver, address, size_bytes)
    finally:
        host.release(address, size_bytes)
    return size_bytes


def _register(driver: Driver, address: int, size_bytes: int) -> None:
    registered = []
    try:
        for at in range(address, address + size_bytes, CHUNK_BYTES):
            driver.pin(at, min(CHUNK_BYTES, address + size_bytes - at))
            registered.append(at)
    except HostMemoryError as error:
        logger.info("not all host memory was registered before: %s", error.message)
    finally:
        for at in registered:
            driver.unpin(at)
