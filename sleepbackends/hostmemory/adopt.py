"""Move tensors that exist already into blocks of a backend, in place."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from sleepbackends.hostmemory import driver
from sleepbackends.hostmemory.arrays import import_optional
from sleepbackends.tensors.finding import passed, siblings
from sleepbackends.tensors.moving import Owned, Span, not_yet_owned, spans, swap

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
        owned = [Owned(b.address, b.address + b.size_bytes, b.tag) for b in backend.ledger.blocks()]
        found = not_yet_owned(passed(torch, target, "cpu"), tag, owned)
        moving = spans([*found, *siblings(torch, target, found)])
        backend.check_room(sum(driver.round_up(span.size_bytes) for span in moving))
        backend.open_tag(tag)
        storages: list[Any] = []
        try:
            storages.extend(_copied(torch, backend, span, tag) for span in moving)
            swap(torch, moving, storages)
        except BaseException:
            # The traceback keeps this frame alive, and with it the new memory.
            storages.clear()
            raise
    return target


def _copied(torch: Any, backend: HostMemoryBackend[Any], span: Span, tag: str) -> Any:
    write = partial(driver.copy_into, from_address=span.start)
    buffer = backend.allocate(tag, span.size_bytes, write)
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()
