"""Checks of restored bytes, for those who ask for them.

Each chunk has a fingerprint of the bytes that were saved. What was restored is fingerprinted
on the device, or read back where the device cannot; where that differs, the saved copy is
looked at, to tell a damaged copy from bytes that did not arrive.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from typing import Literal

from sleepbackends.errors import ContentsLostError, MechanismError
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.fingerprint import Span, host_fingerprint
from sleepbackends.vmm.host_copy import Chunk, HostCopy
from sleepbackends.vmm.packing.unpacking import fingerprint_of_packed

Verify = Literal["off", "sample", "resume"]
"""What a resume checks: nothing, one chunk in ``SAMPLE`` and at least one of each block, or
everything."""

SAMPLE = 16


def fingerprint_of_saved(chunk: Chunk) -> int:
    """Return the fingerprint of a chunk by its saved bytes, as the host finds it.

    Raises
    ------
    ContentsLostError
        If they are packed, and known to be damaged.
    """
    if chunk.is_packed:
        return fingerprint_of_packed(chunk.saved, chunk.size_bytes)
    return chunk.saved.fingerprinting()()


def is_intact(driver: Driver, copy: HostCopy, verify: Verify) -> bool:
    """Tell whether a block's saved bytes are what was saved, and have been restored.

    Raises
    ------
    MechanismError
        If the device holds other bytes although the saved copy is good: the resume can be
        repeated.
    """
    if verify == "off":
        return True
    chunks = [chunk for chunk in _chosen(copy, verify) if chunk.fingerprint is not None]
    found = _on_device(driver, copy.extent.device, [chunk.span for chunk in chunks])
    for chunk, fingerprint in zip(chunks, found, strict=True):
        if fingerprint == chunk.fingerprint:
            continue
        if not _is_good(chunk):
            return False
        raise MechanismError(
            f"the device holds other bytes than were restored, near {chunk.span.address:#x}",
            tags=[copy.extent.tag],
            hint="repeat the resume; if it fails again, the device or its link is faulty",
        )
    return True


def _is_good(chunk: Chunk) -> bool:
    try:
        return fingerprint_of_saved(chunk) == chunk.fingerprint
    except ContentsLostError:
        return False


def _chosen(copy: HostCopy, verify: Verify) -> Sequence[Chunk]:
    if verify == "resume":
        return copy.chunks
    if verify == "sample" and copy.chunks:
        first = random.randrange(min(SAMPLE, len(copy.chunks)))  # noqa: S311 - no secret
        return copy.chunks[first::SAMPLE]
    return ()


def _on_device(driver: Driver, device: int, spans: Sequence[Span]) -> list[int]:
    pending = driver.fingerprint(device, spans) if spans else None
    if pending is not None:
        return pending.result()
    return [_read_back(driver, device, span) for span in spans]


def _read_back(driver: Driver, device: int, span: Span) -> int:
    found = (ctypes.c_char * span.size_bytes)()
    lane = driver.lane(device, "copy")
    lane.to_host(ctypes.addressof(found), span.address, span.size_bytes)
    lane.wait()
    return host_fingerprint(ctypes.addressof(found), span.size_bytes)
