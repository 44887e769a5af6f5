"""One rank of ``benchmarks.scale``, in whatever process it is: its memory, and what it is told."""

from __future__ import annotations

import importlib.util
import os
import signal
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from benchmarks.scaling.host import bytes_by_node
from benchmarks.scaling.links import Link, Span, open_link, timed
from benchmarks.scaling.spec import GIB, Spec
from sleepbackends.bench.weights import Weights
from sleepbackends.config import SleepConfig
from sleepbackends.errors import ContentsLostError
from sleepbackends.hostmemory import numa
from sleepbackends.selection import open_backend
from sleepbackends.testing import FaultInjector

LAST = -1
"""A call of a step, counted from the end of what a suspend unmaps."""


class Contents(Protocol):
    """Weights whose every byte can be changed and checked."""

    def change(self, round_: int) -> None:
        """Change every byte."""
        ...

    def check(self) -> None:
        """Compare every byte with what was written; raises ``ContentsLostError``."""
        ...


class RawWeights:
    """Weights in raw memory of a region, for backends without torch on a device.

    Parameters
    ----------
    region : Region or DeviceRegion
        Where they are allocated.
    count, size_bytes : int
        How many there are, of which size.
    rank : int
        What their bytes depend on besides their number.
    """

    def __init__(self, region: Any, count: int, size_bytes: int, rank: int) -> None:
        self._memory = [region.buffer(size_bytes) for _ in range(count)]
        self._rank = rank
        self._round = 0
        self.change(0)

    def _bytes(self, number: int, size_bytes: int) -> bytes:
        return bytes([(17 * number + 31 * self._rank + 61 * self._round) % 255 + 1]) * size_bytes

    def change(self, round_: int) -> None:
        """Write other bytes."""
        self._round = round_
        for number, memory in enumerate(self._memory):
            if isinstance(memory, memoryview):
                memory[:] = self._bytes(number, len(memory))
            else:
                memory.write(self._bytes(number, memory.size_bytes))

    def check(self) -> None:
        """Compare all bytes."""
        for number, memory in enumerate(self._memory):
            found = memory.tobytes() if isinstance(memory, memoryview) else memory.read()
            if found != self._bytes(number, len(found)):
                raise ContentsLostError(f"weight {number} of rank {self._rank} is not what it was")


def make_backend(spec: Spec) -> Any:
    """Create the backend of one rank, as a user would."""
    return open_backend(SleepConfig(backend=spec.backend)).backend


def has_torch_device() -> bool:
    """Tell whether torch can be used on a GPU here."""
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return torch.cuda.is_available()


class Worker:
    """The memory of one rank.

    Parameters
    ----------
    spec : Spec
        How much there is of it.
    rank : int
        Its number.
    device : int
        Its GPU in this process.
    backend : Any
        Where the memory comes from.
    owns_backend : bool
        Whether it speaks for the backend, which others may use too.
    """

    def __init__(
        self, spec: Spec, rank: int, device: int, backend: Any, *, owns_backend: bool = True
    ) -> None:
        self.backend = backend
        self._spec = spec
        self._rank = rank
        self._device = device
        self._owns_backend = owns_backend
        self._weights: Contents | None = None
        self._cache: list[Any] = []
        self._faults: FaultInjector | None = None
        self._link: Link | None = None

    def do(self, what: str, *arguments: Any) -> Any:
        """Do what one of the methods says."""
        return getattr(self, what)(*arguments)

    # The machine

    def facts(self) -> dict[str, Any]:
        """Tell where this rank is."""
        found: dict[str, Any] = {"rank": self._rank, "pid": os.getpid()}
        if self._spec.on_gpus:
            from sleepbackends.cumem.driver import CudaDriver

            driver = CudaDriver()
            found["gpu"] = driver.pci_address(self._device)
            found["gpu_node"] = numa.node_of(found["gpu"])
            driver.close()
        return found

    def link(self, step: str) -> Span:
        """Open the link, do a step, or close it."""
        if self._link is None:
            self._link = open_link(self._spec, self._device)
        span = timed(getattr(self._link, step)) if step != "open" else (0.0, 0.0)
        if step == "close":
            self._link = None
        return span

    def arena(self) -> dict[int, int]:
        """Tell how many bytes of the pinned memory lie on which NUMA node."""
        store = getattr(getattr(self.backend, "outer", self.backend), "_store", None)
        segments = list(getattr(store, "_segments", [])) if self._owns_backend else []
        return bytes_by_node((segment.address, segment.size_bytes) for segment in segments)

    # The memory

    def load(self) -> None:
        """Allocate and fill."""
        spec = self._spec
        on_device = spec.on_gpus and has_torch_device()
        region = self.backend.region
        place = (self._device,) if spec.on_gpus else ()
        if on_device:
            weights = Weights(spec.tensor_bytes, f"cuda:{self._device}")
            with region("weights", *place):
                weights.allocate(spec.tensors)
            weights.fill()
            self._weights = weights
        else:
            with region("weights", *place) as opened:
                self._weights = RawWeights(opened, spec.tensors, spec.tensor_bytes, self._rank)
        left = int(spec.kv_gib * GIB)
        with region("kv_cache", *place) as opened:
            while left > 0:
                self._cache.append(opened.buffer(min(left, GIB)))
                left -= GIB
        self._settle()

    def change(self, round_: int) -> None:
        """Change every byte of the weights."""
        self._contents.change(round_)
        self._settle()

    def check(self) -> None:
        """Compare every byte of the weights with what was written."""
        self._contents.check()

    @property
    def _contents(self) -> Contents:
        if self._weights is None:
            raise ContentsLostError("nothing was loaded yet")
        return self._weights

    def _settle(self) -> None:
        if self._spec.on_gpus and has_torch_device():
            import torch

            torch.cuda.synchronize(self._device)

    def stage(self) -> bool:
        """Copy ahead, as fast as it goes, and wait; tell whether the backend can."""
        if not self.backend.capabilities.supports_staging:
            return False
        if self._owns_backend:
            self.backend.stage(background=False, limit_gib_s=1000.0).wait()
        return True

    # Faults

    def break_at(self, faults: Mapping[str, Sequence[int]]) -> int:
        """Make steps fail from now on, or none; return how often they did since the last time."""
        fired = 0
        if self._faults is not None:
            self._faults.__exit__(None, None, None)
            fired, self._faults = self._faults.fired, None
        if faults:
            blocks = sum(tag.blocks for tag in self.backend.state().tags.values())
            calls = {s: [n if n >= 0 else blocks + n for n in each] for s, each in faults.items()}
            self._faults = FaultInjector(self.backend, calls)
            self._faults.__enter__()
        return fired

    def die_at_save(self) -> None:
        """Have this process end in the middle of the next suspend."""
        self.backend.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
