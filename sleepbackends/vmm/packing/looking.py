"""What packed bytes stand for, found out on the device while they are still in their slots.

Somebody may write to memory while it is being packed. What was saved is what comes out when it is
unpacked again, and not what the memory held before or holds now.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.fingerprint import Span
from sleepbackends.vmm.packing.bench import Bench
from sleepbackends.vmm.packing.layout import HEADER_BYTES, Header
from sleepbackends.vmm.packing.transfer import Down
from sleepbackends.vmm.packing.unpacking import fingerprint_of_packed


def fingerprints_of_packed(
    driver: Driver, device: int, bench: Bench, transfers: Sequence[Down]
) -> list[int | None]:
    """Return the fingerprint of what each transfer has saved; None where that is of no use.

    Parameters
    ----------
    driver : Driver
        Of the device.
    device : int
        Its ordinal.
    bench : Bench
        Its slots, with half of them as scratch.
    transfers : sequence of Down
        No more than the bench has slots. They have landed, and nothing was packed since.

    Raises
    ------
    MechanismError
        If the device failed. It may still be using the bench.
    """
    lane, count = bench.lane, len(transfers)
    headers = (ctypes.c_ubyte * (HEADER_BYTES * count))()
    spans = [
        Span(scratch, transfer.span.size_bytes)
        for scratch, transfer in zip(bench.scratch, transfers, strict=False)
    ]
    for number, (transfer, span) in enumerate(zip(transfers, spans, strict=True)):
        place = ctypes.addressof(headers) + number * HEADER_BYTES
        lane.to_host(place, transfer.slot_address, HEADER_BYTES)
        packed = Span(transfer.slot_address, transfer.saved.size_bytes)
        bench.packing.unpack(lane, packed, span)
    lane.wait()
    whole = [_is_whole(memoryview(headers)[number * HEADER_BYTES :]) for number in range(count)]
    pending = driver.fingerprint(device, spans)
    if pending is not None:
        found = zip(pending.result(), whole, strict=True)
        return [fingerprint if is_whole else None for fingerprint, is_whole in found]
    return [
        fingerprint_of_packed(transfer.saved, transfer.span.size_bytes) if is_whole else None
        for transfer, is_whole in zip(transfers, whole, strict=True)
    ]


def _is_whole(packed: memoryview) -> bool:
    header = Header.read(packed)
    return header is not None and header.is_whole
