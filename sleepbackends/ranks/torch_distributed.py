"""A group over the processes of a torch process group, with a gloo group on the side."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from sleepbackends.control import Control
from sleepbackends.errors import (
    RequestError,
    SleepBackendsError,
    TransitionTimeoutError,
    UnsupportedOperationError,
)
from sleepbackends.protocol import SleepModeBackend
from sleepbackends.ranks.group import RankGroup
from sleepbackends.ranks.merging import merged_states, named
from sleepbackends.ranks.messages import Peer, Request
from sleepbackends.ranks.rank import Rank
from sleepbackends.ranks.remote import Coordinator, Outcome, RemoteRank
from sleepbackends.state import BackendState

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

T = TypeVar("T")

_NEVER = timedelta(days=3650)


class TorchDistributedGroup(RankGroup):
    """One rank in each process of a torch process group; rank 0 coordinates.

    Every process of that group makes one, at the same place of its program. Messages go over a
    gloo group of the same processes that is made here, so that the engine's own may be of any
    kind. Close the group before ``destroy_process_group``.

    Driver style: rank 0 has the orchestrator; the other ranks answer from a thread, and call
    ``serve`` if they have nothing else to do. SPMD style: every rank has an orchestrator and
    makes the same calls with the same arguments; each gets the report of all. Calls that
    differ are refused everywhere. Progress and cancellation are rank 0's.

    Parameters
    ----------
    backend : SleepModeBackend
        This process's rank.
    group : ProcessGroup, optional
        The engine's; by default that of all processes.
    style : {"driver", "spmd"}
        Who calls the verbs.
    timeout_s, grace_s : float
        See ``RankGroup``.

    Raises
    ------
    RequestError
        If torch.distributed was not initialised.
    RankLostError, TransitionTimeoutError
        If a rank does not come.
    """

    def __init__(
        self,
        backend: SleepModeBackend,
        group: ProcessGroup | None = None,
        *,
        style: Literal["driver", "spmd"] = "driver",
        timeout_s: float = 600.0,
        grace_s: float = 10.0,
    ) -> None:
        from torch import distributed

        if not distributed.is_initialized():
            raise RequestError(
                "there is no process group",
                hint="call torch.distributed.init_process_group() first, or use InProcessGroup",
            )
        if style not in ("driver", "spmd"):
            raise RequestError(f"there is no style {style!r}", hint="use 'driver' or 'spmd'")
        members = distributed.get_process_group_ranks(group or distributed.group.WORLD)
        side = distributed.new_group(
            members, timeout=_NEVER, backend="gloo", use_local_synchronization=True
        )
        self.backend = backend
        self.rank = distributed.get_rank(group)
        self._spmd = style == "spmd"
        self._changed = threading.Condition()
        self._remotes: dict[int, RemoteRank] = {}
        self._coordinator: Coordinator | None = None
        local = Rank(backend)
        if self.rank:
            self._coordinator = Coordinator(side, members[0], local)
        else:
            self._remotes = {
                number: RemoteRank(side, member, self._changed)
                for number, member in enumerate(members)
                if number
            }
        # Nobody but rank 0 asks the others; elsewhere only their numbers are known.
        everybody: dict[int, Peer] = dict.fromkeys(range(len(members)), local)
        super().__init__({**everybody, **self._remotes}, timeout_s=timeout_s, grace_s=grace_s)

    def serve(self) -> None:
        """Wait until rank 0 closes the group; for ranks that have nothing else to do.

        Raises
        ------
        RequestError
            On rank 0.
        RankLostError
            If rank 0 has gone. What it had begun is undone; the backend can be used.
        """
        if self._coordinator is None:
            raise RequestError("rank 0 commands", hint="call serve() on the other ranks")
        self._coordinator.wait(self._grace_s)

    def state(self) -> BackendState:
        """Return what was heard last of every rank that lives, added up; never waits.

        On a rank 0 in driver style, its own part is what is so now. In SPMD style nothing is,
        so that all ranks decide alike.
        """
        state = super().state()
        if self._spmd or self._coordinator is not None:
            return state
        return merged_states({**state.ranks, self.rank: self.backend.state()})

    # Coming to a verb together

    def _together(self, request: Request, control: Control, run: Callable[[], T]) -> T:
        if self._coordinator is not None:
            return cast("T", self._follow(self._coordinator, request, control))
        if not self._spmd:
            return run()
        try:
            self._await_calls(request, control)
            result = run()
        except SleepBackendsError as error:
            self._tell(None, error)
            raise
        self._tell(result, None)
        return result

    def _follow(self, coordinator: Coordinator, request: Request, control: Control) -> Any:
        if not self._spmd:
            raise UnsupportedOperationError(
                f"rank 0 commands this group, and this is rank {self.rank}",
                hint="call serve() here, or make the group with style='spmd' everywhere",
            )
        remaining_s = control.remaining_s()
        limit_s = self._timeout_s if remaining_s is None else min(remaining_s, self._timeout_s)
        # Rank 0 tells of a deadline that has passed only after all have undone what they did.
        outcome = coordinator.call(request, limit_s + 2 * self._grace_s)
        self._note(outcome)
        if outcome.error is not None:
            raise outcome.error
        return outcome.result

    def _await_calls(self, request: Request, control: Control) -> None:
        """Wait on rank 0 until the others have come to the same verb."""
        others = {n: remote for n, remote in self._remotes.items() if n in self._peers}

        def absent() -> list[int]:
            return [n for n, r in others.items() if r.call is None and r.gone is None]

        with self._changed:
            control.wait(
                lambda seconds: self._changed.wait_for(lambda: not absent(), seconds),
                request.operation,
            )
            missing = absent()
            calls = {n: remote.call for n, remote in others.items() if remote.call is not None}
        if missing:
            raise TransitionTimeoutError(
                f"{named(missing)} did not come to {request.operation}",
                hint="in SPMD style every rank makes the same calls",
            )
        different = {n: call.request for n, call in calls.items() if call.request != request}
        if different:
            raise RequestError(
                f"rank 0 calls {request}, but others call {different}",
                hint="in SPMD style every rank makes the same calls with the same arguments",
            )

    def _tell(self, result: Any, error: SleepBackendsError | None) -> None:
        for remote in self._remotes.values():
            remote.tell(lambda number: self._as_outcome(number, result, error))

    def _as_outcome(
        self, number: int, result: Any = None, error: SleepBackendsError | None = None
    ) -> Outcome:
        return Outcome(
            number=number,
            result=result,
            error=error,
            capabilities=self.capabilities,
            states=self._known,
            gone=self._gone,
        )

    def _note(self, outcome: Outcome) -> None:
        self.capabilities = outcome.capabilities
        self._known, self._gone = outcome.states, outcome.gone

    # Beginning and end

    def _meet(self) -> None:
        if self._coordinator is not None:
            self._note(self._coordinator.outcome(0, self._timeout_s + self._grace_s, "the meeting"))
            return
        super()._meet()
        for remote in self._remotes.values():
            remote.introduce(self._as_outcome(0))

    def _own_peers(self) -> dict[int, Peer]:
        # In SPMD style each rank closes its own, when it has come to that.
        alone = self._spmd or self._coordinator is not None
        return {self.rank: self._peers[self.rank]} if alone else super()._own_peers()

    def _leave(self) -> None:
        if self._coordinator is not None:
            self._coordinator.leave(self._grace_s)
        for remote in self._remotes.values():
            remote.leave()
        for remote in self._remotes.values():
            remote.join(self._grace_s)
