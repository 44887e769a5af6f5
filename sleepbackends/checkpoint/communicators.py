"""NCCL communicators around a checkpoint: found, torn down before it, built again after it.

A process with a live NCCL communicator is checkpointed without complaint and cannot be restored:
it is lost (measured with driver 580, NVLS off). So one that is found is a reason to refuse.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

from sleepbackends.errors import UnsupportedOperationError

__all__ = ["NcclCommunicators"]

Mode = Literal["destroy", "suspend", "auto"]

_SUSPEND_MEMORY = 1
"""``NCCL_SUSPEND_MEM`` of nccl.h."""

_LIBRARY = re.compile(r"(/\S*libnccl\.so\S*)")


def live_communicators() -> list[str]:
    """List torch's process groups of this process that have an NCCL communicator.

    One comes into being with the first collective. Those of other libraries, and of other
    processes, cannot be seen.
    """
    distributed: Any = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return []
    return [name for name, _ in _groups(distributed)]


def _groups(distributed: Any) -> list[tuple[str, Any]]:
    world = distributed.distributed_c10d._world
    return [
        (str(world.pg_names.get(group, "?")), group)
        for group, (backend, _) in world.pg_map.items()
        if "nccl" in str(backend).lower() and _has_communicator(group)
    ]


def _has_communicator(group: Any) -> bool:
    """Tell whether a group has a communicator already; where torch does not tell, it counts."""
    import torch

    backend = group._get_backend(torch.device("cuda"))
    ask = getattr(backend, "_is_initialized", None)
    return True if ask is None else bool(ask())


@dataclass
class _Formed:
    """What a process group was made of."""

    rank: int
    size: int
    backend: str
    store: Any
    subgroups: list[tuple[list[int], str]]


class NcclCommunicators:
    """Tears NCCL communicators of ``torch.distributed`` down and builds them again.

    Its ``teardown`` and ``rebuild`` are the hooks ``teardown_communicators`` and
    ``rebuild_communicators`` of an engine. All ranks have to call each at the same time.

    Parameters
    ----------
    mode : {"destroy", "suspend", "auto"}
        ``destroy`` ends all process groups and makes them again: every reference to one is
        stale afterwards, and so are captured graphs with collectives. ``suspend`` suspends the
        communicators in place with ``ncclCommSuspend``, which needs NCCL 2.29.7; whether the
        driver restores such a process has not been verified. ``auto`` suspends where NCCL can.
    backend : object, optional
        A checkpoint backend, or one that has such a part, that is to accept communicators
        which this object has suspended.
    on_rebuilt : callable, optional
        Called with the new process groups by their ranks, the whole one among them, after they
        were made again.
    timeout_s : float
        How long ranks wait for each other.

    Raises
    ------
    UnsupportedOperationError
        If ``suspend`` was asked for and NCCL or torch cannot.
    """

    def __init__(
        self,
        mode: Mode = "destroy",
        *,
        backend: Any = None,
        on_rebuilt: Callable[[dict[tuple[int, ...], Any]], object] | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        library = _nccl() if mode != "destroy" else None
        if mode == "suspend" and library is None:
            raise UnsupportedOperationError(
                "this NCCL has no ncclCommSuspend, or is not loaded",
                hint="use mode='destroy', or NCCL 2.29.7 and newer",
                operation="suspend",
            )
        self._library = library
        self._on_rebuilt = on_rebuilt
        self._timeout_s = timeout_s
        self._formed: _Formed | None = None
        self._suspended: list[ctypes.c_void_p] = []
        self._round = 0
        part: Any = getattr(backend, "inner", backend)
        if part is not None:
            part.communicators = self.live

    @property
    def mode(self) -> Mode:
        """What it does: ``"destroy"`` or ``"suspend"``."""
        return "destroy" if self._library is None else "suspend"

    def live(self) -> list[str]:
        """List the process groups that a checkpoint would not survive."""
        return [] if self._suspended else live_communicators()

    def teardown(self) -> None:
        """Get all communicators of this process out of the way; nothing without any.

        Raises
        ------
        Exception
            What torch or NCCL raises; called again it does what is left.
        """
        if not live_communicators() or self._suspended:
            return
        import torch

        torch.cuda.synchronize()
        if self._library is not None:
            self._suspend(torch.distributed)
        else:
            self._destroy(torch.distributed)

    def rebuild(self) -> None:
        """Bring back what ``teardown`` took away; nothing if it took nothing.

        Raises
        ------
        Exception
            What torch or NCCL raises; called again it does what is left.
        """
        while self._suspended:
            self._call("ncclCommResume", self._suspended[-1])
            self._suspended.pop()
        if self._formed is not None:
            import torch

            self._form(torch.distributed, self._formed)
            self._formed = None

    def _destroy(self, distributed: Any) -> None:
        world = distributed.distributed_c10d
        whole = world._get_default_group()
        self._formed = formed = _Formed(
            distributed.get_rank(),
            distributed.get_world_size(),
            str(distributed.get_backend_config(whole)),
            world._get_default_store(),
            [
                (distributed.get_process_group_ranks(group), backend)
                for group, (backend, _) in world._world.pg_map.items()
                if group is not whole
            ],
        )
        distributed.destroy_process_group()
        # Nobody may be suspended while a peer still needs it to let go of the communicator.
        self._meet(formed)

    def _form(self, distributed: Any, formed: _Formed) -> None:
        self._round += 1
        # The names of the first time are taken in the store.
        store = distributed.PrefixStore(f"sleepbackends-{self._round}", formed.store)
        distributed.init_process_group(
            formed.backend,
            store=store,
            rank=formed.rank,
            world_size=formed.size,
            timeout=timedelta(seconds=self._timeout_s),
        )
        whole = distributed.distributed_c10d._get_default_group()
        made = {tuple(range(formed.size)): whole}
        for ranks, backend in formed.subgroups:
            made[tuple(ranks)] = distributed.new_group(ranks, backend=backend)
        if self._on_rebuilt is not None:
            self._on_rebuilt(made)

    def _meet(self, formed: _Formed) -> None:
        key = f"sleepbackends-met-{self._round}"
        if formed.store.add(key, 1) == formed.size:
            formed.store.set(f"{key}-all", "1")
        formed.store.wait([f"{key}-all"], timedelta(seconds=self._timeout_s))

    def _suspend(self, distributed: Any) -> None:
        import torch

        device = torch.device("cuda", torch.cuda.current_device())
        communicators = []
        for _, group in _groups(distributed):
            pointer = group._get_backend(device)._comm_ptr()
            if pointer:
                communicators.append(ctypes.c_void_p(pointer))
        distributed.barrier()
        torch.cuda.synchronize()
        for communicator in communicators:
            self._call("ncclCommSuspend", communicator, _SUSPEND_MEMORY)
            self._suspended.append(communicator)

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise UnsupportedOperationError(
                f"NCCL answers {name} with error {code}",
                hint="use mode='destroy'",
                operation="suspend",
            )


def _nccl() -> ctypes.CDLL | None:
    """Find the NCCL that is loaded in this process, if it can suspend communicators."""
    try:
        found = _LIBRARY.search(Path("/proc/self/maps").read_text())
        library = ctypes.CDLL(found[1]) if found else None
    except OSError:
        return None
    able = hasattr(library, "ncclCommSuspend") and hasattr(library, "ncclCommResume")
    return library if able else None
