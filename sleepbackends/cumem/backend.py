"""The cumem backend: CUDA virtual memory by tag, through torch or without it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from sleepbackends.availability import Availability
from sleepbackends.cumem.accelerator import CUDA
from sleepbackends.cumem.driver import LIBRARY, CudaDriver
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.cumem.probing import probe
from sleepbackends.cumem.torch_pools import CudaPools
from sleepbackends.vmm.address_space import AddressSpace
from sleepbackends.vmm.torch_backend import TorchVmmBackend

__all__ = ["CumemBackend"]


class CumemBackend(TorchVmmBackend[CumemOptions, CudaDriver, CudaPools]):
    """Unmaps CUDA device memory and maps it again at the same addresses; see its base class."""

    name = "cumem"
    accelerator = CUDA
    native = "cuda"
    driver_library = LIBRARY
    options_type = CumemOptions

    def _open_driver(self) -> CudaDriver:
        return CudaDriver()

    def _make_pools(self, space: AddressSpace) -> CudaPools:
        return CudaPools(space)

    @property
    def cuda(self) -> CudaDriver:
        """The driver."""
        return self.driver

    @classmethod
    def probe(cls) -> Availability:
        """Tell whether there is a device with virtual memory management, and what it needs.

        Never raises, creates no context, and initialises no driver in a process that has not
        done so: workers can still be forked from it.
        """
        return probe()

    @contextmanager
    def graph_pool(
        self, tag: str, device: int | None = None, *, shared_as: tuple[int, int] | None = None
    ) -> Iterator[tuple[int, int]]:
        """Give a pool for capturing CUDA graphs, whose memory carries the tag.

        Parameters
        ----------
        tag : str
            The tag.
        device : int, optional
            Ordinal of the device; torch's current one by default.
        shared_as : tuple of int, optional
            A pool's id, of torch's or one that was given here: as long as a graph lives that
            was captured for the same id, tag and device, the same pool is given, so that
            these graphs share memory.

        Yields
        ------
        pool_id : tuple of int
            For ``torch.cuda.graph(graph, pool=pool_id)``, inside the scope.

        Raises
        ------
        UnsupportedOperationError
            If torch is missing or was built without CUDA.
        RequestError
            If the tag is not a proper name, or there is no such device.
        ClosedError
            If the backend was closed.
        """
        self._check_open()
        self._check_device(device)
        self.open_tag(tag)
        torch = self.accelerator.torch_if_there()
        if device is None:
            device = self._current(torch) if torch is not None else 0
        with self._pools.capturing(tag, device, shared_as) as pool_id:
            yield pool_id
