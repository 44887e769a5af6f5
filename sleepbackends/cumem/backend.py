"""The cumem backend: CUDA virtual memory by tag, through torch or without it."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from sleepbackends.availability import Availability
from sleepbackends.control import Control
from sleepbackends.cumem.adopt import adopt
from sleepbackends.cumem.driver import LIBRARY, CudaDriver
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.cumem.probing import probe
from sleepbackends.cumem.region import CudaRegion
from sleepbackends.cumem.torch_pools import TorchPools
from sleepbackends.errors import RequestError
from sleepbackends.hostmemory.directory import choose_directory
from sleepbackends.policies import Policies
from sleepbackends.reports import DiscardReport, SuspendReport
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm.address_space import AddressSpace, library_path
from sleepbackends.vmm.arena import Arena
from sleepbackends.vmm.backend import VmmBackend
from sleepbackends.vmm.disk import DiskStore
from sleepbackends.vmm.places import Store
from sleepbackends.vmm.shared import SharedStore
from sleepbackends.vmm.shared_arena import SharedArena

__all__ = ["CumemBackend"]


class CumemBackend(VmmBackend[CumemOptions]):
    """Unmaps device memory and maps it again at the same addresses.

    Parameters
    ----------
    options : CumemOptions, optional
        Where saved bytes go, how allocations are laid out, and what is checked.
    settings : BackendSettings, optional
        What is common to all backends.

    Raises
    ------
    BackendUnavailableError
        If the driver, its bindings or the native library are missing.
    StorageError
        If saved bytes are to go to a disk or to be shared, and the directory will not do.
    """

    name = "cumem"

    def __init__(
        self, options: CumemOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        chosen = options or CumemOptions()
        directory = None
        if chosen.tier == "disk":
            directory = choose_directory(chosen.disk_directory, "disk_directory")
        self.cuda = CudaDriver()
        space = AddressSpace(
            library_path("cuda"), LIBRARY, self.cuda, share_below_bytes=chosen.share_below_bytes
        )
        store: Store
        if directory is not None:
            store = DiskStore(directory, chosen.retention)
        elif chosen.share_copies:
            shared = SharedStore(chosen.share_directory)
            store = SharedArena(self.cuda, chosen.host_budget_bytes, shared)
        else:
            store = Arena(self.cuda, chosen.host_budget_bytes, chosen.retention)
        super().__init__(self.cuda, space, store, chosen.verify, chosen, settings)
        self._pools = TorchPools(space)

    @classmethod
    def probe(cls) -> Availability:
        """Tell whether there is a device with virtual memory management, and what it needs.

        Never raises, creates no context, and initialises no driver in a process that has not
        done so: workers can still be forked from it.
        """
        return probe()

    def suspend(
        self,
        level: int = 1,
        *,
        policies: Policies | None = None,
        control: Control | None = None,
    ) -> SuspendReport:
        """Release memory by policy, once no region is open; see ``SleepModeBackend.suspend``.

        Raises
        ------
        BusyError
            A region is still open at the deadline, or in this thread; nothing changed.
        SleepBackendsError
            As for every backend.
        """
        control = control or Control()
        with self._pools.scopes.none("suspend", control):
            return super().suspend(level, policies=policies, control=control)

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        """Release tags, once no region is open; see ``SleepModeBackend.discard``.

        Raises
        ------
        BusyError
            A region is still open at the deadline, or in this thread; nothing changed.
        SleepBackendsError
            As for every backend.
        """
        control = control or Control()
        with self._pools.scopes.none("discard", control):
            return super().discard(tags, control=control)

    def device_name(self, device: int) -> str:
        """Return what torch calls a device."""
        return f"cuda:{device}"

    @contextmanager
    def region(self, tag: str, device: int | None = None) -> Iterator[CudaRegion]:
        """Let what torch allocates in this thread carry the tag, until the scope ends.

        Without torch the region still gives raw memory.

        Parameters
        ----------
        tag : str
            The tag.
        device : int, optional
            Ordinal of the device; torch's current one by default.

        Raises
        ------
        RequestError
            If the tag is not a proper name, or there is no such device.
        ClosedError
            If the backend was closed.
        """
        self._check_open()
        self._check_device(device)
        self.open_tag(tag)
        with ExitStack() as scope:
            torch = _torch_with_cuda()
            if torch is not None:
                device = torch.cuda.current_device() if device is None else device
                scope.enter_context(self._pools.allocating(tag, device))
            yield CudaRegion(self, tag, device or 0)

    def adopt(self, target: Any, tag: str) -> Any:
        """Move existing CUDA tensors into memory of this backend; see ``adopt.adopt``.

        Raises
        ------
        RequestError
            If something cannot be moved; nothing changed.
        DeviceMemoryError
            If there is no room for the copy; nothing changed.
        """
        return adopt(self, self._space, target, tag)

    @contextmanager
    def outside_regions(self) -> Iterator[None]:
        """Let what torch allocates in this thread be torch's own, even in the middle of a region.

        What was freed by the end of the scope is given back to the device. Regions that are
        opened inside count as usual. Without torch there is nothing to do.
        """
        with ExitStack() as scope:
            if _torch_with_cuda() is not None:
                scope.enter_context(self._pools.outside())
            yield

    def keep_free(self, size_bytes: int) -> None:
        """Have allocations fail where they would leave less of a device free than this.

        For whoever shares the device and does not allocate through torch. Waking up takes
        what it needs; 0, as at the beginning, turns the margin off.

        Raises
        ------
        RequestError
            If the size is negative.
        """
        if size_bytes < 0:
            raise RequestError(f"{size_bytes} bytes cannot be kept free")
        self._space.keep_free(size_bytes)

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
        torch = _torch_with_cuda()
        if device is None:
            device = torch.cuda.current_device() if torch is not None else 0
        with self._pools.capturing(tag, device, shared_as) as pool_id:
            yield pool_id

    def allocate(self, tag: str, size_bytes: int, device: int = 0) -> int:
        """Allocate raw device memory and return its address.

        Raises
        ------
        RequestError
            If the size is not positive, or there is no such device.
        DeviceMemoryError
            If there is no room.
        ClosedError
            If the backend was closed.
        """
        self._check_open()
        self._check_device(device)
        if size_bytes <= 0:
            raise RequestError(f"{size_bytes} bytes of device memory cannot be allocated")
        return self._space.allocate(self.open_tag(tag), size_bytes, device)

    def free(self, address: int) -> None:
        """Free raw device memory, in whatever residency it is.

        While a transition is going on, the memory goes at its end. An unknown address is
        ignored.
        """
        self._space.free(address)
        self._follow()

    def is_managed(self, address: int) -> bool:
        """Tell whether an address lies in memory of this backend."""
        return any(e.address <= address < e.address + e.size_bytes for e in self._space.extents())

    def _check_device(self, device: int | None) -> None:
        count = self.cuda.device_count
        if device is not None and not 0 <= device < count:
            raise RequestError(
                f"there is no CUDA device {device}: this process sees {count}",
                hint="count from 0; CUDA_VISIBLE_DEVICES says which are seen",
            )


def _torch_with_cuda() -> Any:
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None
