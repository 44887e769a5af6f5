"""NCCL communicators: found, torn down, built again. Gloo stands in where there is no GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed

from sleepbackends.checkpoint import communicators
from sleepbackends.checkpoint.communicators import NcclCommunicators, live_communicators
from sleepbackends.errors import UnsupportedOperationError

dist: Any = torch.distributed


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """This process as the only rank of a group, whose backend counts as NCCL."""

    def groups(distributed: Any) -> list[tuple[str, Any]]:
        world = distributed.distributed_c10d._world
        return [(world.pg_names[group], group) for group in world.pg_map]

    monkeypatch.setattr(communicators, "_groups", groups)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_without_any() -> None:
    assert live_communicators() == []
    hooks = NcclCommunicators()
    hooks.teardown()
    hooks.rebuild()
    assert hooks.mode == "destroy"
    assert NcclCommunicators("auto").mode == "destroy", "no NCCL is loaded"
    with pytest.raises(UnsupportedOperationError, match="ncclCommSuspend"):
        NcclCommunicators("suspend")


def test_gloo_is_none(tmp_path: Path) -> None:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert live_communicators() == []
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("backend", "initialised", "found"),
    [
        ("nccl", True, True),
        ("nccl", False, False),
        ("nccl", None, True),
        ("cpu:gloo,cuda:nccl", True, True),
        ("gloo", True, False),
    ],
)
def test_which_groups_count(backend: str, initialised: bool | None, found: bool) -> None:
    """One that was never used has no communicator; where torch does not tell, it counts."""
    asked = SimpleNamespace()
    if initialised is not None:
        asked._is_initialized = lambda: initialised

    class Group:
        def _get_backend(self, device: torch.device) -> Any:
            assert device.type == "cuda"
            return asked

    group = Group()
    world = SimpleNamespace(pg_map={group: (backend, None)}, pg_names={group: "tp"})
    distributed = SimpleNamespace(distributed_c10d=SimpleNamespace(_world=world))
    assert bool(communicators._groups(distributed)) is found


def test_groups_are_destroyed_and_made_again(group: None) -> None:
    subgroup = dist.new_group([0])
    made: list[dict[tuple[int, ...], Any]] = []
    hooks = NcclCommunicators(on_rebuilt=made.append)
    for _ in range(3):
        assert len(live_communicators()) == 2
        hooks.teardown()
        assert not dist.is_initialized()
        assert hooks.live() == []
        hooks.teardown()
        hooks.rebuild()
        hooks.rebuild()
        value = torch.ones(1)
        dist.all_reduce(value)
        assert value.item() == 1
    assert len(made) == 3
    assert made[-1].keys() == {(0,)}
    assert made[-1][0,] is not subgroup


class Nccl:
    """A library whose calls are counted, and fail as told."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self.code = 0

    def ncclCommSuspend(self, communicator: ctypes.c_void_p, flags: int) -> int:  # noqa: N802 - NCCL's
        assert flags == 1
        self.calls.append(("suspend", communicator.value or 0))
        return self.code

    def ncclCommResume(self, communicator: ctypes.c_void_p) -> int:  # noqa: N802 - NCCL's
        self.calls.append(("resume", communicator.value or 0))
        return self.code


def test_communicators_are_suspended_in_place(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    library = Nccl()
    monkeypatch.setattr(communicators, "_nccl", lambda: library)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    backends = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(_comm_ptr=lambda: 0x1234))
    monkeypatch.setattr(communicators, "_groups", lambda _: [("tp", backends)])
    backend = SimpleNamespace(communicators=None)
    hooks = NcclCommunicators("auto", backend=SimpleNamespace(inner=backend))
    assert hooks.mode == "suspend"
    assert backend.communicators is not None
    assert backend.communicators() == ["tp"]
    hooks.teardown()
    assert backend.communicators() == [], "suspended, so a checkpoint may be tried"
    assert dist.is_initialized()
    library.code = 3
    with pytest.raises(UnsupportedOperationError, match="ncclCommResume with error 3"):
        hooks.rebuild()
    assert backend.communicators() == []
    library.code = 0
    hooks.rebuild()
    assert library.calls == [("suspend", 0x1234), ("resume", 0x1234), ("resume", 0x1234)]
    assert backend.communicators() == ["tp"]
