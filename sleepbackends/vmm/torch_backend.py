"""Backends over a device's virtual memory and torch's pools: regions, adoption, raw memory."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Generic, TypeAlias, TypeVar

from sleepbackends.control import Control
from sleepbackends.errors import RequestError
from sleepbackends.policies import Policies
from sleepbackends.reports import DiscardReport, SuspendReport
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm.accelerator import Accelerator
from sleepbackends.vmm.address_space import AddressSpace, library_path
from sleepbackends.vmm.adopt import adopt
from sleepbackends.vmm.backend import VmmBackend
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.options import VmmOptions
from sleepbackends.vmm.region import DeviceRegion
from sleepbackends.vmm.stores import choose_store
from sleepbackends.vmm.torch_pools import TorchPools

VmmOptionsT = TypeVar("VmmOptionsT", bound=VmmOptions)
DriverT = TypeVar("DriverT", bound=Driver)
PoolsT = TypeVar("PoolsT", bound=TorchPools)


class TorchVmmBackend(VmmBackend[VmmOptionsT], Generic[VmmOptionsT, DriverT, PoolsT]):
    """Unmaps device memory and maps it again at the same addresses.

    Parameters
    ----------
    options : VmmOptions, optional
        Where saved bytes go, how allocations are laid out, and what is checked.
    settings : BackendSettings, optional
        What is common to all backends.

    Raises
    ------
    BackendUnavailableError
        If the driver or the native library cannot be used.
    StorageError
        If saved bytes are to go to a disk or to be shared, and the directory will not do.
    """

    accelerator: Accelerator
    """The kind of device."""

    native: str
    """The name of the native library."""

    driver_library: str
    """What the native library hands to ``dlopen``."""

    options_type: type[VmmOptionsT]
    """What the options are made of."""

    def __init__(
        self, options: VmmOptionsT | None = None, settings: BackendSettings | None = None
    ) -> None:
        options = options or self.options_type()
        open_store = choose_store(options)
        self.driver = self._open_driver()
        library, share_below_bytes = library_path(self.native), options.share_below_bytes
        space = AddressSpace(library, self.driver_library, self.driver, share_below_bytes)
        store = open_store(self.driver)
        super().__init__(
            *(self.driver, space, store, options.verify, options.packing, options, settings)
        )
        self._pools = self._make_pools(space)

    @abstractmethod
    def _open_driver(self) -> DriverT:
        """Return the driver of this process."""

    @abstractmethod
    def _make_pools(self, space: AddressSpace) -> PoolsT:
        """Return the pools that torch allocates from."""

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
        return self.accelerator.device_name(device)

    @contextmanager
    def region(self, tag: str, device: int | None = None) -> Iterator[DeviceRegion]:
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
            torch = self.accelerator.torch_if_there()
            if torch is not None:
                device = self._current(torch) if device is None else device
                scope.enter_context(self._pools.allocating(tag, device))
            self._warm_up.begin(device or 0)
            yield DeviceRegion(self, tag, device or 0)

    def adopt(self, target: Any, tag: str) -> Any:
        """Move existing tensors of the device into memory of this backend; see ``adopt.adopt``.

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
            if self.accelerator.torch_if_there() is not None:
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
        self._warm_up.begin(device)
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
        count = self.driver.device_count
        if device is not None and not 0 <= device < count:
            raise RequestError(
                f"there is no {self.accelerator.title} device {device}: this process sees {count}",
                hint=self.accelerator.visible_hint,
            )

    def _current(self, torch: Any) -> int:
        device: int = self.accelerator.of(torch).current_device()
        return device


AnyTorchVmmBackend: TypeAlias = TorchVmmBackend[Any, Any, Any]
