"""Work of ours on a device: an immediate command list in which one thing follows another.

Commands of a list may overlap, and those of older drivers know no flag against it, so a barrier
follows each. The host sees by events that it has come so far.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from sleepbackends.errors import ClosedError, SleepBackendsError
from sleepbackends.xpu.errors import NOT_READY, SUCCESS, error_of
from sleepbackends.xpu.loader import FOR_EVER, EventDesc, EventPoolDesc

if TYPE_CHECKING:
    from sleepbackends.vmm.driver import Direction, Event
    from sleepbackends.xpu.devices import Device
    from sleepbackends.xpu.driver import XpuDriver
    from sleepbackends.xpu.loader import Loader

logger = logging.getLogger(__name__)

POOL_EVENTS = 64
"""How many events are made at a time."""

_HOST_VISIBLE = 1
_FOR_HOST = 4

_PATTERNS = (ctypes.c_uint8 * 256)(*range(256))
"""Every byte, for drivers that read what to fill with only when they fill."""


class Events:
    """The events of one device: made a pool at a time, and used again.

    Parameters
    ----------
    ze : Loader
        The loader.
    device : Device
        Whose they are.
    """

    def __init__(self, ze: Loader, device: Device) -> None:
        self._ze = ze
        self._device = device
        self._lock = threading.Lock()
        self._free = deque[int]()
        self._pools: dict[int, list[int]] = {}
        self._closed = False

    def take(self) -> int:
        """Return an event that nobody waits for and nothing will signal but the caller's work.

        Raises
        ------
        DeviceMemoryError, MechanismError
            If the driver refuses.
        """
        self.check_open()
        with self._lock:
            for _ in range(len(self._free)):
                event = self._free[0]
                # Else of work that was dropped unread and is still under way.
                if self._ze.code("zeEventQueryStatus", event) == SUCCESS:
                    self._ze.call("zeEventHostReset", event)
                    self._free.popleft()
                    return event
                self._free.rotate(-1)
            return self._make()

    def _make(self) -> int:
        pool, events = next(
            ((p, events) for p, events in self._pools.items() if len(events) < POOL_EVENTS),
            (0, []),
        )
        if not pool:
            desc = EventPoolDesc(flags=_HOST_VISIBLE, count=POOL_EVENTS)
            device = ctypes.byref(ctypes.c_void_p(self._device.handle))
            pool = self._ze.handle(
                "zeEventPoolCreate", self._device.context, ctypes.byref(desc), 1, device
            )
            self._pools[pool] = events
        desc_of_event = EventDesc(index=len(events), signal=_FOR_HOST)
        events.append(self._ze.handle("zeEventCreate", pool, ctypes.byref(desc_of_event)))
        return events[-1]

    def give_back(self, event: int) -> None:
        """Let an event be used again, once what signals it has been done."""
        self._free.append(event)

    def check_open(self) -> None:
        """Check that the events were not destroyed.

        Raises
        ------
        ClosedError
            If they were.
        """
        if self._closed:
            raise ClosedError("the event was closed with its backend", hint="create a new one")

    def close(self) -> None:
        """Destroy them all, which nothing may wait for or signal any more; a failure is logged."""
        with self._lock:
            self._closed = True
            pools, self._pools = self._pools, {}
            self._free.clear()
            try:
                for pool, events in pools.items():
                    for event in events:
                        self._ze.call("zeEventDestroy", event)
                    self._ze.call("zeEventPoolDestroy", pool)
            except SleepBackendsError:
                logger.exception("events of %s stay", self._device.name)


class XpuEvent:
    """A point of a lane."""

    def __init__(self, ze: Loader, events: Events, handle: int, doing: str) -> None:
        self._ze = ze
        self._events = events
        self._handle = handle
        self._doing = doing

    def done(self) -> bool:
        """Tell whether the work before it has finished."""
        self._events.check_open()
        code = self._ze.code("zeEventQueryStatus", self._handle)
        if code not in (SUCCESS, NOT_READY):
            raise error_of(code, self._doing)
        return code == SUCCESS

    def wait(self) -> None:
        """Wait until the work before it has finished."""
        self._events.check_open()
        self._ze.call("zeEventHostSynchronize", self._handle, FOR_EVER, what=self._doing)

    def __del__(self) -> None:
        self._events.give_back(self._handle)


class XpuLane:
    """One command list of one device, and nobody else's.

    Parameters
    ----------
    driver : XpuDriver
        Knows what host memory the device reaches at full speed.
    events : Events
        Of the device.
    command_list : int
        The handle.
    doing : str
        What it is for, in messages.
    """

    def __init__(self, driver: XpuDriver, events: Events, command_list: int, doing: str) -> None:
        self._driver = driver
        self._ze = driver.ze
        self._events = events
        self._list: int | None = command_list
        self._doing = doing
        # Several threads share a lane, and a command list is for one at a time.
        self._lock = threading.Lock()

    def to_host(self, host: int, address: int, size_bytes: int) -> None:
        """Queue a copy from the device; made when this returns if the host memory is not pinned."""
        self._copy(host, address, size_bytes)
        self._wait_unless_pinned(host, size_bytes)

    def to_device(self, address: int, host: int, size_bytes: int) -> None:
        """Queue a copy to the device; made when this returns if the host memory is not pinned."""
        self._copy(address, host, size_bytes)
        self._wait_unless_pinned(host, size_bytes)

    def copy_all(self, direction: Direction, copies: Iterable[tuple[int, int, int]]) -> None:
        """Queue copies of device address, host address and size, one after another."""
        for address, host, size_bytes in copies:
            if direction == "down":
                self.to_host(host, address, size_bytes)
            else:
                self.to_device(address, host, size_bytes)

    def _copy(self, target: int, source: int, size_bytes: int) -> None:
        if size_bytes:
            self._queue("zeCommandListAppendMemoryCopy", target, source, size_bytes)

    def _wait_unless_pinned(self, host: int, size_bytes: int) -> None:
        if not self._driver.is_pinned(host, size_bytes):
            self.wait()

    def fill(self, address: int, size_bytes: int, byte: int) -> None:
        """Queue setting every byte."""
        pattern = ctypes.addressof(_PATTERNS) + byte
        if size_bytes:
            self._queue("zeCommandListAppendMemoryFill", address, pattern, 1, size_bytes)

    def _queue(self, name: str, *arguments: int) -> None:
        with self._lock:
            command_list = self._open()
            self._ze.call(name, command_list, *arguments, None, 0, None)
            self._ze.call("zeCommandListAppendBarrier", command_list, None, 0, None)

    def _open(self) -> int:
        if self._list is None:
            raise ClosedError("the lane was closed with its backend", hint="create a new one")
        return self._list

    def event(self) -> XpuEvent:
        """Mark this point of the lane."""
        with self._lock:
            command_list = self._open()
            handle = self._events.take()
            try:
                self._ze.call("zeCommandListAppendBarrier", command_list, handle, 0, None)
            except SleepBackendsError:
                # Nothing will signal it; what is taken next has to have been.
                self._ze.code("zeEventHostSignal", handle)
                self._events.give_back(handle)
                raise
            return XpuEvent(self._ze, self._events, handle, self._doing)

    def wait_for(self, event: Event) -> None:
        """Wait for an event, so that whatever is queued from now on begins after it.

        The device could do that, but an event that was given up may signal for others by then.
        """
        event.wait()

    def wait(self) -> None:
        """Wait for everything queued so far."""
        if self._list is not None:  # else closed while idle
            self.event().wait()

    def close(self) -> None:
        """Destroy the list, which must be idle; a failure is logged."""
        with self._lock:
            command_list, self._list = self._list, None
        try:
            self._ze.call("zeCommandListDestroy", command_list)
        except SleepBackendsError:
            logger.exception("a command list for %s stays", self._doing)
