"""Put tensors over new memory, in place: which bytes move together, and the swap.

Tensors are objects over storages, and several may share one: tied weights, views, a
tensor and its ``detach()``. What is moved is therefore a storage with every tensor over
it. A tensor left behind would go on showing the old memory, so one that shares a storage
and cannot be reached is an error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from sleepbackends.errors import RequestError
from sleepbackends.tensors.finding import Found


class Owned(NamedTuple):
    """Memory that a backend holds already.

    Parameters
    ----------
    start, end : int
        Addresses of its first byte and of the byte after its last.
    tag : str
        Its tag.
    """

    start: int
    end: int
    tag: str


@dataclass
class Span:
    """Bytes that become one allocation, and the tensors over them.

    Parameters
    ----------
    start, end : int
        Addresses of the first byte and of the byte after the last.
    tensors : list of Found
        Every tensor over them.
    """

    start: int
    end: int
    tensors: list[Found]

    @property
    def size_bytes(self) -> int:
        """How many bytes there are."""
        return self.end - self.start

    @property
    def device(self) -> Any:
        """The ``torch.device`` they lie on."""
        return self.tensors[0].tensor.device


def not_yet_owned(found: Sequence[Found], tag: str, owned: Iterable[Owned]) -> list[Found]:
    """List the tensors that do not lie in memory of the backend yet.

    Raises
    ------
    RequestError
        If one belongs to another tag already.
    """
    memory = sorted(owned)
    starts = [each.start for each in memory]
    new = []
    for each in found:
        index = bisect_right(starts, each.start) - 1
        holder = memory[index] if index >= 0 else None
        if holder is None or each.start >= holder.end:
            new.append(each)
        elif holder.tag != tag:
            raise RequestError(
                f"{each.name} belongs to tag {holder.tag!r} already and cannot join {tag!r}",
                hint="adopt a clone(), or keep the first tag",
                tags=[holder.tag, tag],
            )
    return new


def spans(found: Sequence[Found]) -> list[Span]:
    """Group tensors whose bytes belong together: of one storage, or overlapping.

    Raises
    ------
    RequestError
        If tensors overlap in a way that no tensor over new memory can express.
    """
    by_storage: dict[int, list[Found]] = {}
    for each in found:
        by_storage.setdefault(each.storage_id, []).append(each)
    merged: list[Span] = []
    for span in sorted(map(_span_of, by_storage.values()), key=lambda span: span.start):
        # Two storages over the same bytes: both were made from one array.
        if merged and span.start < merged[-1].end:
            merged[-1].end = max(merged[-1].end, span.end)
            merged[-1].tensors += span.tensors
        elif span.size_bytes:
            merged.append(span)
    for span in merged:
        for each in span.tensors:
            if (each.start - span.start) % each.tensor.itemsize:
                raise RequestError(
                    f"{each.name} overlaps other memory without being aligned to it",
                    hint="adopt a clone()",
                )
    return merged


def _span_of(tensors: list[Found]) -> Span:
    filled = [each for each in tensors if each.end > each.start] or tensors[:1]
    start, end = min(each.floor for each in filled), max(each.end for each in filled)
    return Span(start, end, tensors)


def swap(torch: Any, moving: Sequence[Span], storages: Sequence[Any]) -> None:
    """Put the tensors of each span over the storage that holds a copy of its bytes.

    Every tensor stays the same object, with its shape, strides, gradient and place in the
    autograd graph. If this raises, every tensor is over its old storage.
    """
    swapped: list[tuple[Any, Any]] = []
    try:
        for span, storage in zip(moving, storages, strict=True):
            for each in span.tensors:
                # A tensor made for inference can only be given what was made likewise.
                with torch.inference_mode(each.tensor.is_inference()):
                    old, each.tensor.data = each.tensor.data, _alias(torch, each, span, storage)
                swapped.append((each.tensor, old))
    except BaseException:
        for tensor, old in reversed(swapped):
            with torch.inference_mode(tensor.is_inference()):
                tensor.data = old
        raise


def _alias(torch: Any, each: Found, span: Span, storage: Any) -> Any:
    tensor = each.tensor
    # A tensor without elements may lie outside of the span; it then needs no place in it.
    offset_bytes = each.start - span.start if each.end > each.start else 0
    alias = torch.empty(0, dtype=tensor.dtype, device=tensor.device).set_(
        storage, offset_bytes // tensor.itemsize, tensor.shape, tensor.stride()
    )
    if tensor.is_conj():
        alias = alias.conj()
    return torch._neg_view(alias) if tensor.is_neg() else alias
