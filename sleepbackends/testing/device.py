"""A device made of byte arrays: a budget, stale bytes, calls that fail, are slow or hang."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from sleepbackends.errors import DeviceMemoryError

CALLS = ("map", "unmap", "read", "write", "synchronize")
"""What a driver of the device can be asked for, and be told to fail at."""

_PATIENCE_S = 60.0


class InjectedFault(Exception):
    """What a step or a call raises when it was told to fail."""


class HeldCall:
    """A call that waits inside the device until it is let go."""

    def __init__(self) -> None:
        self._entered = threading.Event()
        self._let_go = threading.Event()

    def wait_until_entered(self, timeout_s: float = _PATIENCE_S) -> bool:
        """Wait until somebody is inside the call, and tell whether that was in time."""
        return self._entered.wait(timeout_s)

    def let_go(self) -> None:
        """Let the call, and those after it, go on."""
        self._let_go.set()

    def enter(self) -> None:
        """Wait inside, as the call that is held."""
        self._entered.set()
        self._let_go.wait(_PATIENCE_S)


class SimulatedDevice:
    """Device memory of which everything can be seen, and go wrong.

    Several backends may share one, as processes share a GPU: they compete for its budget.
    Touching what is not mapped raises, as a device would fault.

    Parameters
    ----------
    budget_bytes : int
        How much may be mapped at once; may be changed at any time, as a neighbour would.
    stale_byte : int
        What memory that was just mapped is full of.

    Attributes
    ----------
    mapped : dict of int to bytearray
        What is mapped, by address.
    calls : Counter
        How often each of ``CALLS`` was made.
    """

    def __init__(self, budget_bytes: int = 1 << 40, stale_byte: int = 0xEE) -> None:
        self.budget_bytes = budget_bytes
        self.stale_byte = stale_byte
        self.mapped: dict[int, bytearray] = {}
        self.calls: Counter[str] = Counter()
        self._faults: dict[str, tuple[frozenset[int], Callable[[str], Exception]]] = {}
        self._delays_s: dict[str, float] = {}
        self._held: dict[str, HeldCall] = {}
        self._next_address = 1 << 20
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes of the budget in use."""
        return sum(map(len, list(self.mapped.values())))

    # What a test does to it

    def fail(
        self,
        call: str,
        at: Collection[int] = (0,),
        make_error: Callable[[str], Exception] = InjectedFault,
    ) -> None:
        """Make some of the next calls raise before they have done anything.

        Parameters
        ----------
        call : str
            One of ``CALLS``.
        at : collection of int
            Which ones, counted from 0, from now on. None of them: what was told before is
            forgotten.
        make_error : callable
            Makes the exception from a message.

        Raises
        ------
        ValueError
            If there is no such call.
        """
        start = self.calls[_known(call)]
        self._faults[call] = (frozenset(start + number for number in at), make_error)

    def slow(self, call: str, seconds: float) -> None:
        """Make each such call take so long.

        Raises
        ------
        ValueError
            If there is no such call.
        """
        self._delays_s[_known(call)] = seconds

    @contextmanager
    def hold(self, call: str) -> Iterator[HeldCall]:
        """Make such calls wait inside the device until they are let go, or the block ends.

        Raises
        ------
        ValueError
            If there is no such call.
        """
        held = self._held[_known(call)] = HeldCall()
        try:
            yield held
        finally:
            del self._held[call]
            held.let_go()

    def memory(self, address: int) -> bytearray:
        """Return what is mapped at an address, for its user to read and write.

        Raises
        ------
        RuntimeError
            If nothing is.
        """
        if address not in self.mapped:
            raise RuntimeError(f"illegal access to unmapped memory at {address:#x}")
        return self.mapped[address]

    # What a driver calls

    def reserve_range(self, size_bytes: int) -> int:
        """Take an address range that nobody had before and return where it starts."""
        with self._lock:
            address = self._next_address
            self._next_address += max(size_bytes, 1)
        return address

    def check_room(self, needed_bytes: int) -> None:
        """Check that so much more can be mapped.

        Raises
        ------
        DeviceMemoryError
            If it cannot.
        """
        available = self.budget_bytes - self.used_bytes
        if needed_bytes > available:
            raise DeviceMemoryError(
                f"{needed_bytes} bytes needed, {available} available",
                hint="let a neighbour give memory back",
                needed_bytes=needed_bytes,
                available_bytes=available,
            )

    def map(self, address: int, size_bytes: int) -> None:
        """Put memory with stale bytes behind a range.

        Raises
        ------
        DeviceMemoryError
            If the budget is used up; nothing was mapped.
        RuntimeError
            If it is mapped already.
        """
        self._called("map")
        if address in self.mapped:
            raise RuntimeError(f"{address:#x} is mapped already")
        self.check_room(size_bytes)
        self.mapped[address] = bytearray([self.stale_byte]) * size_bytes

    def unmap(self, address: int) -> None:
        """Give the memory behind a range back.

        Raises
        ------
        RuntimeError
            If there is none.
        """
        self._called("unmap")
        self.memory(address)
        del self.mapped[address]

    def read(self, address: int) -> bytes:
        """Copy out what is mapped at an address.

        Raises
        ------
        RuntimeError
            If nothing is.
        """
        self._called("read")
        return bytes(self.memory(address))

    def write(self, address: int, data: bytes) -> None:
        """Copy bytes to where memory is mapped.

        Raises
        ------
        RuntimeError
            If there is none.
        """
        self._called("write")
        self.memory(address)[:] = data

    def synchronize(self) -> None:
        """Wait for what was queued; there is never anything."""
        self._called("synchronize")

    def _called(self, call: str) -> None:
        number = self.calls[call]
        self.calls[call] += 1
        if call in self._held:
            self._held[call].enter()
        if call in self._delays_s:
            time.sleep(self._delays_s[call])
        at, make_error = self._faults.get(call, (frozenset(), InjectedFault))
        if number in at:
            raise make_error(f"{call} was told to fail at call {number}")


def _known(call: str) -> str:
    if call not in CALLS:
        raise ValueError(f"the device has no call {call!r}; known: {CALLS}")
    return call
