"""The content fingerprint as an expression of torch, for where the kernel cannot be had.

The same function as ``sleepbackends.vmm.fingerprint`` says, in 64-bit integers that wrap around.
It moves each byte about twenty times, which still leaves it faster than a copy to the host.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

from sleepbackends.errors import MechanismError
from sleepbackends.vmm.accelerator import Accelerator
from sleepbackends.vmm.fingerprint import (
    MIX_1,
    MIX_2,
    PLACE,
    START,
    Pending,
    Span,
    finish,
)

logger = logging.getLogger(__name__)

PIECE_BYTES = 16 << 20
"""What is hashed in one step, with twice as much temporary memory."""

_LOW_HALF = 0xFFFFFFFF


def torch_fingerprint(tensor: Any) -> int:
    """Compute the fingerprint of a tensor's bytes, on its device, and wait for it.

    Parameters
    ----------
    tensor : torch.Tensor
        Bytes (uint8), one dimension, contiguous; at any address.
    """
    s1, s2 = _sums(tensor).tolist()
    return finish(s1, s2, tensor.numel())


def _sums(tensor: Any) -> Any:
    """Return the two sums over a tensor of bytes as a tensor of its device."""
    sums = tensor.new_zeros(2, dtype=_torch().int64)
    for start in range(0, tensor.numel(), PIECE_BYTES):
        words = _words(tensor[start : start + PIECE_BYTES])
        _add(sums, words, start // 8)
    return sums


def _words(piece: Any) -> Any:
    torch = _torch()
    missing = -piece.numel() % 8
    if missing:
        piece = torch.cat([piece, piece.new_zeros(missing)])
    elif piece.data_ptr() % 8 or piece.storage_offset() % 8:
        piece = piece.clone()
    return piece.view(torch.int64)


def _add(sums: Any, words: Any, first: int) -> None:
    torch = _torch()
    u = torch.arange(first, first + words.numel(), dtype=torch.int64, device=words.device)
    u.mul_(_signed(PLACE)).add_(_signed(START)).bitwise_xor_(words).mul_(_signed(MIX_1))
    # The shift is one of signed numbers: the mask takes away what it drags in.
    u.bitwise_xor_((u >> 32).bitwise_and_(_LOW_HALF)).mul_(_signed(MIX_2))
    high = (u >> 32).bitwise_and_(_LOW_HALF)
    sums[0] += u.sum()
    sums[1] += high.mul_(u.bitwise_and_(_LOW_HALF)).sum()


def _signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _torch() -> Any:
    import torch

    return torch


class TorchFingerprints(ABC):
    """Fingerprints of one device's memory, computed on a stream of their own.

    Parameters
    ----------
    device : int
        Ordinal of the device.

    Raises
    ------
    UnsupportedOperationError
        If torch is missing or sees no such device.
    """

    accelerator: Accelerator
    """The kind of device."""

    def __init__(self, device: int) -> None:
        self._torch = self.accelerator.import_torch()
        self._of_kind = self.accelerator.of(self._torch)
        self._stream = self._of_kind.Stream(device)
        self._name = self.accelerator.device_name(device)

    def prepare(self, span_count: int) -> bool:
        """Do nothing: torch allocates as it goes."""
        return True

    def queue(self, spans: Sequence[Span]) -> Pending | None:
        """Queue fingerprints; None if torch cannot, as for lack of memory."""
        try:
            with self._of_kind.stream(self._stream):
                sums = [_sums(self._bytes(span)) for span in spans]
                return _Queued(spans, sums, self._stream.record_event())
        except RuntimeError as error:
            logger.debug("torch computes no fingerprints now: %s", error)
            return None

    def _bytes(self, span: Span) -> Any:
        if span.size_bytes:
            return self._over(span)
        return self._torch.empty(0, dtype=self._torch.uint8, device=self._name)

    @abstractmethod
    def _over(self, span: Span) -> Any:
        """Return a tensor of bytes over memory of the device; it is only read."""

    def close(self) -> None:  # noqa: B027 - nothing is right for every device
        """Do nothing: the stream is torch's."""


class _Queued:
    """Sums that torch is computing."""

    def __init__(self, spans: Sequence[Span], sums: Sequence[Any], event: Any) -> None:
        self._sizes = [span.size_bytes for span in spans]
        self._sums = sums
        self._event = event

    def result(self) -> list[int]:
        """Wait for the fingerprints and return them.

        Raises
        ------
        MechanismError
            If they could not be computed.
        """
        try:
            self._event.synchronize()
            pairs = [each.tolist() for each in self._sums]
        except RuntimeError as error:
            raise MechanismError(
                f"hashing failed: {error}", hint="the device may be lost"
            ) from error
        return [finish(s1, s2, size) for (s1, s2), size in zip(pairs, self._sizes, strict=True)]
