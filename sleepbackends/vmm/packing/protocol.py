"""What packs the memory of one device, and nothing more."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from sleepbackends.vmm.driver import Lane
    from sleepbackends.vmm.fingerprint import Span
    from sleepbackends.vmm.packing.layout import Choice, Layout

ResultT_co = TypeVar("ResultT_co", covariant=True)


class Pending(Protocol[ResultT_co]):
    """Something that a device is computing."""

    def result(self) -> ResultT_co:
        """Wait for it, letting other threads run; the same when asked again.

        Raises
        ------
        MechanismError
            If it could not be computed. The memory is as it was.
        ClosedError
            If the driver was closed before.
        """
        ...


class Slots(Protocol):
    """Room for packed bytes in device memory that nobody else uses."""

    @property
    def addresses(self) -> Sequence[int]:
        """Where each begins, a multiple of 16; empty once closed."""
        ...

    @property
    def size_bytes(self) -> int:
        """How large each is, at least as asked."""
        ...

    def close(self) -> bool:
        """Give the memory back, which nothing on the device may use any more.

        Tells whether that worked. A failure is logged, and closing again goes on where it was.
        """
        ...


class Packing(Protocol):
    """Packs and unpacks the memory of one device, by its driver.

    Work is queued; the calls return at once. What is surveyed, counted or packed is only read.
    All of it has to be mapped until the work is done: a span that is not ends the device's
    context.
    """

    def survey(self, spans: Sequence[Span]) -> Pending[list[Choice | None]]:
        """Queue looking at a sample of each span, on the lane for hashing.

        At most a sixteenth of the bytes and 2 MiB a span are read.

        Returns
        -------
        Pending of list of Choice or None
            The best way to pack each span; None if none saves 10 %, or if it is none that can
            be packed: it does not begin at a multiple of 16 or has more than 4 GiB.

        Raises
        ------
        DeviceMemoryError, MechanismError
            If that cannot be queued; nothing is under way.
        """
        ...

    def count(self, spans: Sequence[Span], layouts: Sequence[Layout]) -> Pending[list[int]]:
        """Queue counting the escapes of spans, each in its layout, on the lane for hashing.

        As long as nobody writes to a span, this is what packing it will find.

        Raises
        ------
        RequestError
            If a span cannot be packed.
        DeviceMemoryError, MechanismError
            If that cannot be queued; nothing is under way.
        """
        ...

    def pack(
        self, lane: Lane, span: Span, layout: Layout, target: int, capacity_bytes: int
    ) -> None:
        """Queue packing a span into device memory.

        Nothing is ever written behind ``capacity_bytes``. Where somebody wrote to the span
        since its escapes were counted there may be more than there is room for. The header of
        the packed bytes says so (``Header.is_whole``). What was packed is then of no use.

        Parameters
        ----------
        lane : Lane
            Of this device.
        span : Span
            What to pack; at a multiple of 16.
        layout : Layout
            How.
        target : int
            Where to, a multiple of 16.
        capacity_bytes : int
            How much room there is; at least ``layout.packed_bytes(span.size_bytes, 0)``.

        Raises
        ------
        RequestError
            If that cannot be; nothing was queued.
        MechanismError
            If the driver refuses. Some of the target may be written.
        """
        ...

    def unpack(self, lane: Lane, source: Span, span: Span) -> None:
        """Queue unpacking into device memory.

        Nothing outside of ``source`` is read, and nothing outside of ``span`` written, whatever
        the packed bytes are. Bytes that cannot be what such a span was packed to leave it as it
        is: whoever does not know that they are good looks at their header first.

        Parameters
        ----------
        lane : Lane
            Of this device.
        source : Span
            The packed bytes; at a multiple of 16. What is behind them does not matter.
        span : Span
            Where to, of exactly the size that was packed; at a multiple of 16.

        Raises
        ------
        RequestError
            If that cannot be; nothing was queued.
        MechanismError
            If the driver refuses. Nothing was written.
        """
        ...

    def slots(self, count: int, size_bytes: int) -> Slots:
        """Take device memory for so many packed spans, of so many bytes each.

        Raises
        ------
        DeviceMemoryError
            If there is not enough; nothing is held.
        MechanismError
            If the driver failed otherwise; nothing is held.
        """
        ...
