"""Find the tensors that have to move together, and refuse those that cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from sleepbackends.errors import RequestError

ALIGNMENT_BYTES = {"cpu": 64, "cuda": 512, "xpu": 512}
"""What torch aligns memory of a device to; a moved tensor keeps its place relative to that."""


@dataclass(frozen=True)
class Found:
    """A tensor to move, and where it lies now.

    Parameters
    ----------
    name : str
        What to call it in a message.
    tensor : torch.Tensor
        The tensor.
    storage : torch.UntypedStorage
        What it lies in.
    """

    name: str
    tensor: Any = field(repr=False)
    storage: Any = field(repr=False)

    @property
    def storage_id(self) -> int:
        """What tells storages apart."""
        identity: int = self.storage._cdata
        return identity

    @property
    def start(self) -> int:
        """The address of its first element."""
        tensor = self.tensor
        address: int = self.storage.data_ptr() + tensor.storage_offset() * tensor.itemsize
        return address

    @property
    def end(self) -> int:
        """The address after its last element; ``start`` if it has none."""
        tensor = self.tensor
        if tensor.numel() == 0:
            return self.start
        steps = zip(tensor.shape, tensor.stride(), strict=True)
        last: int = sum((size - 1) * stride for size, stride in steps)
        itemsize: int = tensor.itemsize
        return self.start + (last + 1) * itemsize

    @property
    def floor(self) -> int:
        """Where a block for it may start: aligned, and inside its storage."""
        if self.start == self.end:
            return self.end
        storage_start: int = self.storage.data_ptr()
        return self.start - (self.start - storage_start) % ALIGNMENT_BYTES[self.tensor.device.type]


def passed(torch: Any, target: Any, device_type: str) -> list[Found]:
    """List the distinct tensors of a target and their gradients.

    Parameters
    ----------
    torch : module
        The imported torch.
    target : torch.Tensor, torch.nn.Module, or a list or tuple of them
        Where to look.
    device_type : {"cpu", "cuda", "xpu"}
        Where all of them have to lie.

    Raises
    ------
    RequestError
        If the target or a tensor in it is of a kind that cannot be moved.
    """
    found: dict[int, Found] = {}
    for name, tensor in _named(torch, target):
        found.setdefault(id(tensor), _check(torch, name, tensor, device_type))
        if (tensor.is_leaf or tensor.retains_grad) and tensor.grad is not None:
            name = f"{name}.grad"
            found.setdefault(id(tensor.grad), _check(torch, name, tensor.grad, device_type))
    return list(found.values())


def siblings(torch: Any, target: Any, found: Iterable[Found]) -> list[Found]:
    """List the other tensors over the same storages that can be reached.

    These are plain attributes of the target's modules, and the tensors that views are
    views of, where those show nothing that was not passed.

    Raises
    ------
    RequestError
        If a passed tensor is a view of one that was not passed and shows more, or if
        something that cannot be reached shares a storage.
    """
    known = {id(each.tensor): each for each in found}
    moving = {each.storage_id for each in known.values()}
    added = {}
    for name, tensor in _attributes(torch, target):
        if id(tensor) not in known and _storage_id(tensor) in moving:
            added[id(tensor)] = Found(name, tensor, tensor.untyped_storage())
    everything = {**known, **added}
    for each in list(everything.values()):
        base = each.tensor._base
        if base is not None and id(base) not in everything:
            hidden = Found(f"the base of {each.name}", base, each.storage)
            _check_shows_nothing_more(hidden, each, everything.values())
            added[id(base)] = everything[id(base)] = hidden
    _check_no_strangers(torch, everything.values())
    return list(added.values())


def _named(torch: Any, target: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(target, torch.Tensor):
        yield "the tensor", target
    elif isinstance(target, torch.nn.Module):
        yield from target.named_parameters()
        yield from target.named_buffers()
    elif isinstance(target, (list, tuple)):
        for index, each in enumerate(target):
            for name, tensor in _named(torch, each):
                yield f"[{index}] {name}", tensor
    else:
        raise RequestError(
            f"{type(target).__name__} cannot be adopted",
            hint="pass a tensor, a module, or a list of them; copy anything else into memory "
            "made by region.empty(shape, dtype)",
        )


def _attributes(torch: Any, target: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(target, (list, tuple)):
        for each in target:
            yield from _attributes(torch, each)
    elif isinstance(target, torch.nn.Module):
        for path, module in target.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    yield f"{path}.{name}".lstrip("."), value


def _check(torch: Any, name: str, tensor: Any, device_type: str) -> Found:
    kind = _unmovable(torch, tensor, device_type)
    if kind:
        raise RequestError(
            f"{name} ({type(tensor).__name__}) cannot be moved: it is {kind}",
            hint=f"adopt takes dense tensors in ordinary {device_type.upper()} memory",
        )
    return Found(name, tensor, tensor.untyped_storage())


def _unmovable(torch: Any, tensor: Any, device_type: str) -> str:
    """Say what stands in the way of moving a tensor, or nothing."""
    if tensor.device.type != device_type:
        return f"on device {tensor.device}"
    if tensor.layout != torch.strided or tensor.is_nested:
        return f"not dense ({tensor.layout})"
    if tensor.is_quantized:
        return "quantized"
    if torch.nn.parameter.is_lazy(tensor):
        return "not initialized yet"
    if type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        return "a wrapper around other tensors"
    storage_id = _storage_id(tensor)
    if storage_id is None or (tensor.numel() and not tensor.data_ptr()):
        return "without memory of its own"
    # Torch says so of every CUDA tensor, shared or not.
    if device_type == "cpu" and tensor.is_shared():
        return "in memory shared with other processes"
    return ""


def _storage_id(tensor: Any) -> int | None:
    try:
        identity: int = tensor.untyped_storage()._cdata
    except (RuntimeError, NotImplementedError, ValueError):
        # Without a storage, as seen through a function transform.
        return None
    return identity


def _check_shows_nothing_more(hidden: Found, view: Found, known: Iterable[Found]) -> None:
    same = [each for each in known if each.storage_id == hidden.storage_id]
    if hidden.start < min(each.start for each in same) or hidden.end > max(
        each.end for each in same
    ):
        raise RequestError(
            f"{view.name} is a view of a larger tensor that was not passed and would stop "
            "being one",
            hint="pass that tensor too: adopt([base, view], tag), or adopt a clone()",
        )


def _check_no_strangers(torch: Any, known: Iterable[Found]) -> None:
    # Not public, and the only count there is; without it a stranger goes unseen.
    count_users = getattr(torch._C, "_storage_Use_Count", None)
    if count_users is None:
        return
    users = Counter(each.storage_id for each in known)
    # The storage objects held here count too; how much is torch's business.
    alone = torch.empty(1, device="cpu").untyped_storage()
    held = count_users(alone._cdata)
    for each in known:
        strangers = count_users(each.storage_id) - users[each.storage_id] - held
        if strangers > 0:
            raise RequestError(
                f"{each.name} shares its memory with {strangers} tensor(s) that were not "
                "passed and would go on showing the old memory",
                hint="pass all of them, adopt([a, b], tag), or drop them first: a state_dict, "
                "a detach() or a graph saved for backward counts",
            )
