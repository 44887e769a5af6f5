"""The allocators that are compared, behind one interface.

The peers are those installed beside this package, or used from a folder in which their
packages were unpacked without the rest of what they depend on: ``vllm/`` to be put on the
path for ``vllm.device_allocator``, ``tms/`` for ``torch_memory_saver``.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from sleepbackends.bench.rows import OURS
from sleepbackends.errors import RequestError
from sleepbackends.mechanism import Fill
from sleepbackends.settings import BackendSettings


class _Package(NamedTuple):
    """Where a peer is."""

    name: str
    """What is imported and installed."""
    folder: str
    """What is put on the path, in the folder of the peers."""
    needed: str
    """What has to be in that."""


_VLLM = _Package("vllm", "vllm", "vllm/device_allocator")
_TMS = _Package("torch_memory_saver", "tms", "torch_memory_saver")

PACKAGES = {"vllm": _VLLM, "tms": _TMS, "tms_retain": _TMS}
"""The package of each peer."""


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
    folder : Path, optional
        The folder of the peers, unless it is installed.
    """

    exits_cleanly = False

    def __init__(self, folder: Path | None) -> None:
        _put_on_path(_VLLM, folder)
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
    folder : Path, optional
        The folder of the peers, unless it is installed.
    retain : bool
        Whether it keeps its host memory between cycles.
    """

    exits_cleanly = False

    def __init__(self, folder: Path | None, retain: bool) -> None:
        _put_on_path(_TMS, folder)
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


def _put_on_path(package: _Package, folder: Path | None) -> None:
    if folder is not None:
        sys.path.insert(0, str(folder / package.folder))


def missing(peer: str, folder: Path | None) -> str:
    """Say why a peer cannot be measured, or nothing; imports nothing of it.

    Parameters
    ----------
    peer : str
        As in ``Row``.
    folder : Path, optional
        The folder of the peers; without it, they have to be installed.
    """
    package = PACKAGES.get(peer)
    if package is None:
        return ""
    if folder is not None:
        path = folder / package.folder / package.needed
        return "" if path.is_dir() else f"{path} is not there"
    found = find_spec(package.name)
    # Any folder of that name would be found as well, but has no origin.
    return "" if found and found.origin else f"{package.name} is not installed, nor --peers given"


def version(peer: str, folder: Path | None) -> str:
    """Return the version of a peer by its metadata, or ``unknown``."""
    package = PACKAGES[peer]
    path = sys.path if folder is None else [str(folder / package.folder)]
    found = metadata.distributions(name=package.name, path=path)
    return next((distribution.version for distribution in found), "unknown")


def open_allocator(peer: str, folder: Path | None, fill: str = "none") -> Allocator:
    """Create the allocator of a peer.

    Raises
    ------
    RequestError
        If there is no such peer, or it cannot be found.
    """
    why = missing(peer, folder)
    if why:
        raise RequestError(
            f"{peer} cannot be measured: {why}", hint="install it, or name the folder of peers"
        )
    if peer == OURS:
        return Ours(fill)
    if peer == "vllm":
        return Vllm(folder)
    if peer in ("tms", "tms_retain"):
        return TorchMemorySaver(folder, retain=peer == "tms_retain")
    raise RequestError(
        f"{peer!r} is no peer", hint=f"known: {', '.join((OURS, 'vllm', 'tms', 'tms_retain'))}"
    )
