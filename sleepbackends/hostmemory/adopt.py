"""Move tensors that exist already into blocks of a backend, in place.

Tensors are objects over storages, and several may share one: tied weights, views, a
tensor and its ``detach()``. What is moved is therefore a storage with every tensor over
it. A tensor left behind would go on showing the old memory, so one that shares a storage
and cannot be reached is an error.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from sleepbackends.errors import RequestError
from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.arrays import import_optional
from sleepbackends.hostmemory.tensors import Found, passed, siblings

if TYPE_CHECKING:
    from sleepbackends.hostmemory.backend import HostMemoryBackend


def adopt(backend: HostMemoryBackend[Any], target: Any, tag: str) -> Any:
    """Move a tensor, a module or several into memory of the backend; return the target.

    Every tensor stays the same object, with its shape, strides, gradient and place in the
    autograd graph. Tied weights stay tied and views stay views. Of a module, its
    parameters, its buffers, their gradients, and plain tensor attributes that share their
    memory are moved. What the backend holds under this tag already is left alone.

    Not seen, and left showing the old memory: numpy arrays over the same bytes.

    Parameters
    ----------
    backend : HostMemoryBackend
        Where the memory comes from; needs room for a second copy while it moves.
    target : torch.Tensor, torch.nn.Module, or a list or tuple of them
        What to move; dense CPU tensors.
    tag : str
        The tag of the memory.

    Raises
    ------
    RequestError
        If the tag is not a proper name, or if a tensor cannot be moved, belongs to another
        tag, or shares its memory with a tensor that was not passed.
    HostMemoryError
        If there is no room.
    UnsupportedOperationError
        If torch is not installed.

    Notes
    -----
    Guarantee: if it raises, nothing changed.
    """
    torch = import_optional("torch")
    # Subclasses may intercept what is done to them here.
    with torch._C.DisableTorchFunctionSubclass():
        found = _not_yet_owned(backend, passed(torch, target), tag)
        spans = _spans([*found, *siblings(torch, target, found)])
        backend.check_room(sum(driver.round_up(span.size_bytes) for span in spans))
        backend.open_tag(tag)
        storages: list[Any] = []
        try:
            storages.extend(_copied(torch, backend, span, tag) for span in spans)
            _swap(torch, spans, storages)
        except BaseException:
            # The traceback keeps this frame alive, and with it the new memory.
            storages.clear()
            raise
    return target


@dataclass
class _Span:
    """Bytes that become one block, and the tensors over them."""

    start: int
    end: int
    tensors: list[Found]

    @property
    def size_bytes(self) -> int:
        return self.end - self.start


def _not_yet_owned(
    backend: HostMemoryBackend[Any], found: Sequence[Found], tag: str
) -> list[Found]:
    blocks = sorted(backend.ledger.blocks(), key=lambda block: block.address)
    starts = [block.address for block in blocks]
    new = []
    for each in found:
        index = bisect_right(starts, each.start) - 1
        block = blocks[index] if index >= 0 else None
        if block is None or each.start >= block.address + block.size_bytes:
            new.append(each)
        elif block.tag != tag:
            raise RequestError(
                f"{each.name} belongs to tag {block.tag!r} already and cannot join {tag!r}",
                hint="adopt a clone(), or keep the first tag",
                tags=[block.tag, tag],
            )
    return new


def _spans(found: Sequence[Found]) -> list[_Span]:
    """Group tensors whose bytes belong together: of one storage, or overlapping."""
    by_storage: dict[int, list[Found]] = {}
    for each in found:
        by_storage.setdefault(each.storage_id, []).append(each)
    spans: list[_Span] = []
    for span in sorted(map(_span_of, by_storage.values()), key=lambda span: span.start):
        # Two storages over the same bytes: both were made from one array.
        if spans and span.start < spans[-1].end:
            spans[-1].end = max(spans[-1].end, span.end)
            spans[-1].tensors += span.tensors
        elif span.size_bytes:
            spans.append(span)
    for span in spans:
        for each in span.tensors:
            if (each.start - span.start) % each.tensor.itemsize:
                raise RequestError(
                    f"{each.name} overlaps other memory without being aligned to it",
                    hint="adopt a clone()",
                )
    return spans


def _span_of(tensors: list[Found]) -> _Span:
    filled = [each for each in tensors if each.end > each.start] or tensors[:1]
    start, end = min(each.floor for each in filled), max(each.end for each in filled)
    return _Span(start, end, tensors)


def _copied(torch: Any, backend: HostMemoryBackend[Any], span: _Span, tag: str) -> Any:
    write = partial(driver.copy_into, from_address=span.start)
    buffer = backend.allocate(tag, span.size_bytes, write)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def _swap(torch: Any, spans: Sequence[_Span], storages: Sequence[Any]) -> None:
    swapped: list[tuple[Any, Any]] = []
    try:
        for span, storage in zip(spans, storages, strict=True):
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


def _alias(torch: Any, each: Found, span: _Span, storage: Any) -> Any:
    tensor = each.tensor
    # A tensor without elements may lie outside of the span; it then needs no place in it.
    offset_bytes = each.start - span.start if each.end > each.start else 0
    alias = torch.empty(0, dtype=tensor.dtype, device="cpu").set_(
        storage, offset_bytes // tensor.itemsize, tensor.shape, tensor.stride()
    )
    if tensor.is_conj():
        alias = alias.conj()
    return torch._neg_view(alias) if tensor.is_neg() else alias
