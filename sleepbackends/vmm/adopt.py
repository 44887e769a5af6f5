"""Move a device's tensors that exist already into memory of a backend, in place."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any

from sleepbackends.control import Control
from sleepbackends.errors import DeviceMemoryError
from sleepbackends.tensors.finding import passed, siblings
from sleepbackends.tensors.moving import Owned, Span, not_yet_owned, spans, swap
from sleepbackends.vmm.address_space import AddressSpace

if TYPE_CHECKING:
    from sleepbackends.vmm.torch_backend import AnyTorchVmmBackend


def adopt(backend: AnyTorchVmmBackend, space: AddressSpace, target: Any, tag: str) -> Any:
    """Move a tensor, a module or several into memory of the backend; return the target.

    Every tensor stays the same object on its device, with its shape, strides, gradient and
    place in the autograd graph. Tied weights stay tied and views stay views. Of a module,
    its parameters, its buffers, their gradients, and plain tensor attributes that share
    their memory are moved. What the backend holds under this tag already is left alone.

    Not seen, and left showing the old memory: graphs that were captured before, and whoever
    was given the address.

    Parameters
    ----------
    backend : AnyTorchVmmBackend
        Where the memory comes from; needs room for a second copy while it moves.
    space : AddressSpace
        That backend's, which knows whose memory is whose.
    target : torch.Tensor, torch.nn.Module, or a list or tuple of them
        What to move; dense tensors of any device of the backend's.
    tag : str
        The tag of the memory.

    Raises
    ------
    RequestError
        If the tag is not a proper name, or if a tensor cannot be moved, belongs to another
        tag, or shares its memory with a tensor that was not passed.
    DeviceMemoryError
        If there is no room.
    ClosedError
        If the backend was closed.
    UnsupportedOperationError
        If torch is missing or was built without such devices.

    Notes
    -----
    Guarantee: if it raises, nothing changed but that the tag may be known.
    """
    accelerator = backend.accelerator
    torch = accelerator.import_torch()
    # Subclasses may intercept what is done to them here.
    with torch._C.DisableTorchFunctionSubclass():
        owned = [Owned(e.address, e.address + e.size_bytes, e.tag) for e in space.extents()]
        found = not_yet_owned(passed(torch, target, accelerator.kind), tag, owned)
        moving = spans([*found, *siblings(torch, target, found)])
        moving.sort(key=_device_index)
        backend.open_tag(tag)
        # A suspend would take the new memory away before anything shows that it is in use.
        with backend._lock.hold("adopt", Control()):
            backend._check_open()
            _move(torch, backend, moving, tag)
    return target


def _move(torch: Any, backend: AnyTorchVmmBackend, moving: Sequence[Span], tag: str) -> None:
    devices = sorted({_device_index(span) for span in moving})
    storages: list[Any] = []
    of_kind = backend.accelerator.of(torch)
    _synchronize(of_kind, devices)
    try:
        for device, group in groupby(moving, _device_index):
            with backend.region(tag, device):
                storages.extend(_copied(torch, span) for span in group)
        swap(torch, moving, storages)
        # The old memory goes back to torch, which may hand it out on another stream.
        _synchronize(of_kind, devices)
    except BaseException as error:
        # The traceback keeps this frame alive, and with it the new memory.
        storages.clear()
        of_kind.empty_cache()
        if isinstance(error, torch.OutOfMemoryError):
            raise _no_room(backend, moving) from error
        raise


def _copied(torch: Any, span: Span) -> Any:
    copy = torch.empty(span.size_bytes, dtype=torch.uint8, device=span.device)
    for storage in {each.storage_id: each.storage for each in span.tensors}.values():
        storage_start = storage.data_ptr()
        start = max(span.start, storage_start)
        size_bytes = min(span.end, storage_start + storage.nbytes()) - start
        if size_bytes <= 0:
            continue
        old = torch.empty(0, dtype=torch.uint8, device=span.device)
        old.set_(storage, start - storage_start, (size_bytes,), (1,))
        copy[start - span.start :][:size_bytes].copy_(old)
    return copy.untyped_storage()


def _synchronize(of_kind: Any, devices: Sequence[int]) -> None:
    for device in devices:
        of_kind.synchronize(device)


def _device_index(span: Span) -> int:
    index: int = span.device.index
    return index


def _no_room(backend: AnyTorchVmmBackend, moving: Sequence[Span]) -> DeviceMemoryError:
    needed = sum(span.size_bytes for span in moving)
    devices = {_device_index(span) for span in moving}
    available = sum(backend.driver.free_bytes(device) for device in devices)
    return DeviceMemoryError(
        f"moving needs {needed} bytes of device memory for a second copy, {available} available",
        needed_bytes=needed,
        available_bytes=available,
        hint="adopt a part of the module at a time, or load it inside a region",
    )
