"""Checks of saved and restored bytes, for those who ask for them.

A saved copy gets a checksum as soon as it has landed and is checked against it before it is
used: host memory must not have changed meanwhile. What was restored is read back from the
device and compared with the saved copy.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

import xxhash

from sleepbackends.errors import ContentsLostError, MechanismError
from sleepbackends.hostmemory import driver as host
from sleepbackends.ledger import Block
from sleepbackends.vmm.driver import Lane
from sleepbackends.vmm.mover import Saved

_STEP_BYTES = 16 << 20


def checksum(saved: Saved) -> int:
    """Compute the checksum of a saved copy."""
    digest = xxhash.xxh3_128()
    for address, size_bytes in saved.slot.pieces():
        digest.update(host.view(address, size_bytes))
    return digest.intdigest()


def check_saved(blocks: Iterable[tuple[Block, Saved]]) -> None:
    """Compare saved copies with their checksums.

    Raises
    ------
    ContentsLostError
        If some differ; ``addresses`` names their blocks.
    """
    damaged = [block for block, saved in blocks if checksum(saved) != saved.checksum]
    if damaged:
        raise ContentsLostError(
            f"the saved bytes of {len(damaged)} blocks changed while they slept",
            addresses=[block.address for block in damaged],
            tags={block.tag for block in damaged},
            hint="resume again and reload these tags",
        )


def check_restored(lane: Lane, block: Block, saved: Saved) -> None:
    """Read a block back from the device and compare it with its saved copy.

    Raises
    ------
    MechanismError
        If they differ. The saved copy is good: the resume can be repeated.
    """
    for address, saved_at, size_bytes in saved.copies(block.address):
        for skip in range(0, size_bytes, _STEP_BYTES):
            step = min(_STEP_BYTES, size_bytes - skip)
            found = (ctypes.c_char * step)()
            lane.to_host(ctypes.addressof(found), address + skip, step)
            lane.wait()
            if memoryview(found).cast("B") != host.view(saved_at + skip, step):
                raise MechanismError(
                    f"the device holds other bytes than were restored, near {address + skip:#x}",
                    tags=[block.tag],
                    hint="repeat the resume; if it fails again, the device or its link is faulty",
                )
