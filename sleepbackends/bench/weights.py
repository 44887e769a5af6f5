"""Weights whose every byte can be changed, and checked afterwards."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sleepbackends.errors import ContentsLostError

if TYPE_CHECKING:
    import torch

MIB = 1 << 20

CHUNK_BYTES = 32 * MIB
CHUNKS_PER_CHANGE = 100
"""One chunk in so many is changed where 1 % is."""


class Weights:
    """Tensors of one size on one device.

    Parameters
    ----------
    size_bytes : int
        The size of each tensor.
    device : str
        What torch calls their device.
    """

    def __init__(self, size_bytes: int, device: str = "cuda:0") -> None:
        import torch

        # Bytes depend on their place, so that bytes in the wrong place are seen.
        pattern = torch.arange(size_bytes // 4, dtype=torch.int32, device=device)
        self._pattern = pattern.mul_(-1640531527)
        self._mask = self._chunk_mask = 0
        self.tensors: list[torch.Tensor] = []

    def allocate(self, count: int) -> None:
        """Allocate so many tensors; to be called in a region."""
        import torch

        self.tensors = [torch.empty_like(self._pattern) for _ in range(count)]

    def fill(self) -> None:
        """Write the first contents."""
        import torch

        for index, tensor in enumerate(self.tensors):
            torch.bitwise_xor(self._pattern, self._key(index), out=tensor)

    def change(self, round_: int) -> None:
        """Change every byte."""
        mask = _mask(round_)
        for tensor in self.tensors:
            tensor.bitwise_xor_(mask)
        self._mask ^= mask

    def change_some(self, round_: int) -> None:
        """Change the first chunk of one tensor, or all of a smaller one, in every 100 chunks."""
        mask = _mask(round_)
        for index in self._changing():
            self.tensors[index][: CHUNK_BYTES // 4].bitwise_xor_(mask)
        self._chunk_mask ^= mask

    def _changing(self) -> set[int]:
        tensor_bytes = self._pattern.nbytes
        total_bytes = tensor_bytes * len(self.tensors)
        step = CHUNK_BYTES * CHUNKS_PER_CHANGE
        return {number * step // tensor_bytes for number in range(max(1, total_bytes // step))}

    def check(self) -> None:
        """Compare every byte with what was written.

        Raises
        ------
        ContentsLostError
            If one differs.
        """
        import torch

        changing = self._changing()
        for index, tensor in enumerate(self.tensors):
            expected = self._pattern ^ self._key(index)
            if index in changing:
                expected[: CHUNK_BYTES // 4].bitwise_xor_(self._chunk_mask)
            if not torch.equal(tensor, expected):
                raise ContentsLostError(
                    f"weight tensor {index} of {len(self.tensors)} is not what it was",
                    hint="the figures of this allocator mean nothing",
                )

    def _key(self, index: int) -> int:
        return (index * 0x9E3779B1 & 0x7FFFFFFF) ^ self._mask


def _mask(round_: int) -> int:
    return 0x01010101 * (round_ % 126 + 1)
