"""The allocators that are compared, behind one interface.

The peers are used from a folder in which their packages were unpacked without the rest of
what they depend on: ``vllm/`` to be put on the path for ``vllm.device_allocator``, ``tms/``
for ``torch_memory_saver``. One process uses one of them.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from sleepbackends.mechanism import Fill
from sleepbackends.settings import BackendSettings

PACKAGES = {
    "vllm": Path("vllm", "vllm", "device_allocator"),
    "tms": Path("tms", "torch_memory_saver"),
    "tms_retain": Path("tms", "torch_memory_saver"),
    "in_turn": Path("tms", "torch_memory_saver"),
}
"""Where each peer has to be, below the folder of the peers."""


class Allocator(ABC):
    """Memory by tag, ``weights`` kept by a suspend and ``kv_cache`` dropped."""

    exits_cleanly = True
    """Whether the interpreter can shut down while memory is in use."""

    @abstractmethod
    def region(self, tag: str) -> AbstractContextManager[Any]:
        """Open a scope in which torch allocates under a tag."""

    @abstractmethod
    def suspend(self) -> object:
        """Save the weights and give everything back."""

    @abstractmethod
    def resume(self) -> object:
        """Take everything again and restore the weights."""

    @abstractmethod
    def discard_kv(self) -> object:
        """Give the KV cache back and forget it."""

    @abstractmethod
    def resume_kv(self) -> object:
        """Take memory for the KV cache again."""


class Ours(Allocator):
    """The cumem backend, through an orchestrator.

    Parameters
    ----------
    fill : str
        What discarded memory is filled with when it comes back.
    """

    def __init__(self, fill: str) -> None:
        from sleepbackends import Orchestrator
        from sleepbackends.cumem.backend import CumemBackend

        self._backend = CumemBackend(settings=BackendSettings(fill=Fill(fill)))
        self._orchestrator = Orchestrator(self._backend)

    def region(self, tag: str) -> AbstractContextManager[Any]:
        """Open a region."""
        return self._backend.region(tag)

    def suspend(self) -> object:
        """Sleep at level 1."""
        return self._orchestrator.sleep(1)

    def resume(self) -> object:
        """Wake up."""
        return self._orchestrator.wake_up()

    def discard_kv(self) -> object:
        """Release the KV cache."""
        return self._orchestrator.release_kv_cache()

    def resume_kv(self) -> object:
        """Wake up, with nothing asleep but the KV cache."""
        return self._orchestrator.wake_up()


class Vllm(Allocator):
    """The device allocator of vLLM.

    Parameters
    ----------
    folder : Path
        The folder of the peers.
    """

    exits_cleanly = False

    def __init__(self, folder: Path) -> None:
        sys.path.insert(0, str(folder / "vllm"))
        from vllm.device_allocator.cumem import (  # type: ignore[import-not-found,unused-ignore]
            CuMemAllocator,
        )

        self._allocator: Any = CuMemAllocator.get_instance()

    def region(self, tag: str) -> AbstractContextManager[Any]:
        """Open a pool."""
        pool: AbstractContextManager[Any] = self._allocator.use_memory_pool(tag)
        return pool

    def suspend(self) -> object:
        """Sleep, keeping the weights."""
        return self._allocator.sleep(("weights",))

    def resume(self) -> object:
        """Wake up."""
        return self._allocator.wake_up()

    def discard_kv(self) -> object:
        """Discard the KV cache."""
        return self._allocator.discard(("kv_cache",))

    def resume_kv(self) -> object:
        """Wake the KV cache up."""
        return self._allocator.wake_up(["kv_cache"])


class TorchMemorySaver(Allocator):
    """torch_memory_saver, hooked into torch's pools.

    Parameters
    ----------
    folder : Path
        The folder of the peers.
    retain : bool
        Whether it keeps its host memory between cycles.
    """

    exits_cleanly = False

    def __init__(self, folder: Path, retain: bool) -> None:
        sys.path.insert(0, str(folder / "tms"))
        from torch_memory_saver import (  # type: ignore[import-not-found,unused-ignore]
            torch_memory_saver,
        )

        self._saver: Any = torch_memory_saver
        self._saver.hook_mode = "torch"
        if retain:
            self._saver.retain_cpu_backup = True

    def region(self, tag: str) -> AbstractContextManager[Any]:
        """Open a region, with a copy on the host for weights."""
        scope: AbstractContextManager[Any] = self._saver.region(
            tag=tag, enable_cpu_backup=tag == "weights"
        )
        return scope

    def suspend(self) -> object:
        """Pause everything."""
        return self._saver.pause()

    def resume(self) -> object:
        """Resume everything."""
        return self._saver.resume()

    def discard_kv(self) -> object:
        """Pause the KV cache, which has no copy."""
        return self._saver.pause("kv_cache")

    def resume_kv(self) -> object:
        """Resume the KV cache."""
        return self._saver.resume("kv_cache")


def missing(peer: str, folder: Path | None) -> str:
    """Say why a peer cannot be measured, or nothing."""
    if peer not in PACKAGES:
        return ""
    if folder is None:
        return "no folder of peers was given (--peers)"
    path = folder / PACKAGES[peer]
    return "" if path.is_dir() else f"{path} is not there"


def version(peer: str, folder: Path) -> str:
    """Return the version of an unpacked peer by its metadata, or ``unknown``."""
    package, name = {"vllm": ("vllm", "vllm"), "tms": ("tms", "torch_memory_saver")}[peer]
    found = sorted((folder / package).glob(f"{name}-*.dist-info"))
    return found[-1].name.removesuffix(".dist-info").partition("-")[2] if found else "unknown"


def open_allocator(peer: str, folder: Path | None, fill: str = "none") -> Allocator:
    """Create the allocator of a peer.

    Raises
    ------
    ValueError
        If there is no such peer, or its package is not in the folder.
    """
    why = missing(peer, folder)
    if why:
        raise ValueError(f"{peer} cannot be measured: {why}")
    if peer == "sleepbackends":
        return Ours(fill)
    if peer == "vllm":
        return Vllm(folder or Path())
    if peer in ("tms", "tms_retain"):
        return TorchMemorySaver(folder or Path(), retain=peer == "tms_retain")
    raise ValueError(f"{peer!r} is no peer; known: sleepbackends, {', '.join(PACKAGES)}")
