"""Run a backend that was written for vLLM's ``SleepModeBackend`` in our orchestrator."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from sleepbackends.adapters.vllm.memory import KV_CACHE, WEIGHTS
from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.errors import (
    BackendUnavailableError,
    ClosedError,
    PolicyConflictError,
    RequestError,
    SleepBackendsError,
    UnsupportedOperationError,
)
from sleepbackends.failures import reporting
from sleepbackends.ledger import Block, Ledger
from sleepbackends.lock import TransitionLock
from sleepbackends.policies import Policies, Policy, check_level
from sleepbackends.protocol import API_VERSION
from sleepbackends.reports import DiscardReport, ResumeReport, SuspendReport, compare
from sleepbackends.residency import Move, moved
from sleepbackends.state import BackendState, check_tags

__all__ = ["Known", "VllmBackendAdapter"]

_FLAGS = (
    "preserves_communicators",
    "preserves_compiled_artifacts",
    "preserves_graphs_with_communicators",
    "supports_durable_storage",
)


@dataclass(frozen=True)
class Known:
    """What the author of a backend knows of it and vLLM's interface cannot say.

    Parameters
    ----------
    supports_selective_resume : bool
        ``resume(tags)`` brings back the named tags alone.
    releases_device_context : bool
        A suspend gives the device context back.
    sizes_bytes : mapping of str to int
        How much memory ``weights`` and ``kv_cache`` take up. A tag that is not listed counts
        as one byte, so that it shows where it is, though not how much it is.
    """

    supports_selective_resume: bool = False
    releases_device_context: bool = False
    sizes_bytes: Mapping[str, int] | None = None


class VllmBackendAdapter:
    """Our protocol over an object with vLLM's ``suspend``, ``resume`` and ``discard``.

    What is where is known as far as vLLM's interface promises it: a suspend keeps the weights
    at level 1, drops them at level 2 and drops the KV cache at both. Capabilities are what the
    object says, what it implements, and what ``Known`` adds; nothing else is assumed, but that
    addresses survive, which vLLM relies on.

    vLLM's interface promises nothing about a call that failed. After a failed suspend or
    discard everything it was to release therefore counts as asleep, so that nobody uses it
    before a resume has succeeded.

    Parameters
    ----------
    backend : object
        The backend.
    known : Known, optional
        What else is known of it.
    name : str, optional
        Its name in reports; that of its class by default.

    Raises
    ------
    BackendUnavailableError
        If it says that it is not supported here.
    RequestError
        If it lacks ``suspend`` or ``resume``.
    """

    api_version = API_VERSION

    def __init__(self, backend: Any, known: Known | None = None, *, name: str = "") -> None:
        known = known or Known()
        self.name = name or type(backend).__name__
        missing = [verb for verb in ("suspend", "resume") if not _callable(backend, verb)]
        if missing:
            raise RequestError(
                f"{self.name} has no {' and no '.join(missing)}",
                hint="give an object with the methods of vLLM's SleepModeBackend",
            )
        if _callable(backend, "is_supported") and not backend.is_supported():
            raise BackendUnavailableError(
                f"{self.name} says that it is not supported here",
                hint="choose another backend",
                backend=self.name,
            )
        self.capabilities = Capabilities(
            supports_selective_release=_implements(backend, "discard"),
            supports_selective_resume=known.supports_selective_resume,
            supports_offload=True,
            preserves_addresses=True,
            releases_device_context=known.releases_device_context,
            **{
                flag: _callable(backend, flag) and bool(getattr(backend, flag)()) for flag in _FLAGS
            },
        )
        self._backend = backend
        self._lock = TransitionLock()
        self._ledger = Ledger()
        self._closed = False
        sizes = known.sizes_bytes or {}
        # There are no addresses to tell; these only tell the two apart.
        self._blocks = {
            tag: Block(address, sizes.get(tag, 1), tag, device="")
            for address, tag in enumerate((WEIGHTS, KV_CACHE))
        }
        for block in self._blocks.values():
            self._ledger.add(block)

    def suspend(
        self, level: int = 1, *, policies: Policies | None = None, control: Control | None = None
    ) -> SuspendReport:
        """Release everything; see ``SleepModeBackend.suspend``.

        Raises
        ------
        InvalidLevelError, PolicyConflictError, UnsupportedOperationError
            Refused; nothing changed. The policies ask for something that vLLM's interface
            does not promise: resident memory, or a KV cache that is kept.
        MechanismError
            It failed; everything counts as asleep.
        """
        policy = {tag: (policies or Policies()).at(tag, check_level(level)) for tag in self._blocks}
        with self._transition("suspend", control) as before:
            if level:
                self._check_promised(policy)
            moves = {
                block: Move.OFFLOAD if policy[tag] is Policy.OFFLOAD else Move.DISCARD
                for tag, block in self._blocks.items()
                if level
            }
            # vLLM's level says what becomes of the weights.
            theirs = 1 if policy[WEIGHTS] is Policy.OFFLOAD else 2
            seconds, changed = self._release(moves, lambda: self._backend.suspend(theirs))
            return SuspendReport(
                backend=self.name,
                operation="suspend",
                changed=changed,
                tags=compare(before, self.state(), policy),
                seconds=seconds,
                level=level,
            )

    def resume(
        self, tags: Collection[str] | None = None, *, control: Control | None = None
    ) -> ResumeReport:
        """Bring memory back; see ``SleepModeBackend.resume``.

        Raises
        ------
        UnknownTagError, UnsupportedOperationError
            Refused; nothing changed.
        MechanismError
            It failed; everything counts as asleep as before, and the call can be repeated.
        """
        with self._transition("resume", control) as before:
            wanted = frozenset(self._blocks) if tags is None else self._check(tags, "resume")
            asleep = before.asleep_tags()
            waking = asleep & wanted
            if waking and waking != asleep and not self.capabilities.supports_selective_resume:
                raise UnsupportedOperationError(
                    f"{self.name} may not be able to resume {sorted(waking)} alone: "
                    "supports_selective_resume is False",
                    hint="resume everything, or say that it can: Known(...)",
                    tags=asleep - waking,
                )
            started = time.perf_counter()
            if waking:
                self._backend.resume(None if waking == asleep else sorted(waking))
                self._ledger.apply(Move.RESUME, *(self._blocks[tag] for tag in waking))
            return ResumeReport(
                backend=self.name,
                operation="resume",
                changed=bool(waking),
                tags=compare(before, self.state(), dict.fromkeys(wanted)),
                seconds=time.perf_counter() - started,
                undefined_tags=self.state().undefined_tags() & wanted,
            )

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        """Release the named tags; see ``SleepModeBackend.discard``.

        Raises
        ------
        UnknownTagError, UnsupportedOperationError, PolicyConflictError
            Refused; nothing changed.
        MechanismError
            It failed; the named tags count as asleep.
        """
        with self._transition("discard", control) as before:
            wanted = self._check(tags, "discard")
            if not self.capabilities.supports_selective_release:
                raise UnsupportedOperationError(
                    f"{self.name} has no discard: supports_selective_release is False",
                    hint="let an orchestrator choose a fallback: release(tags)",
                    tags=wanted,
                )
            moves = {self._blocks[tag]: Move.DISCARD for tag in wanted}
            mapped = tuple(sorted(tag for tag in wanted if before.tags[tag].mapped_bytes))
            seconds, changed = self._release(moves, lambda: self._backend.discard(mapped))
            return DiscardReport(
                backend=self.name,
                operation="discard",
                changed=changed,
                tags=compare(before, self.state(), dict.fromkeys(wanted, Policy.DISCARD)),
                seconds=seconds,
            )

    def mark_valid(self, tags: Collection[str]) -> None:
        """Declare that contents were loaded again; see ``SleepModeBackend.mark_valid``.

        Raises
        ------
        UnknownTagError, PolicyConflictError
            A tag is unknown or asleep; nothing changed.
        """
        with self._transition("mark_valid", None):
            blocks = [self._blocks[tag] for tag in self._check(tags, "mark_valid")]
            self._ledger.apply(Move.VALIDATE, *filter(partial(_changes, Move.VALIDATE), blocks))

    def state(self) -> BackendState:
        """Return what is where, as far as vLLM's interface promises it; never waits."""
        return self._ledger.state()

    def close(self) -> None:
        """Let go of the backend, which vLLM's interface knows no end of. May be repeated."""
        with self._lock.hold("close", Control()):
            self._closed = True

    def _release(
        self, moves: Mapping[Block, Move], call: Callable[[], object]
    ) -> tuple[float, bool]:
        """Make a call that releases blocks, and record that they are asleep however it ends."""
        changing = {block: move for block, move in moves.items() if _changes(move, block)}
        started = time.perf_counter()
        if changing:
            try:
                call()
            finally:
                for block, move in changing.items():
                    self._ledger.apply(move, block)
                self._ledger.bump_epochs(b for b, move in changing.items() if move is Move.DISCARD)
        return time.perf_counter() - started, bool(changing)

    def _check_promised(self, policy: Mapping[str, Policy]) -> None:
        kept = sorted(tag for tag, asked in policy.items() if asked is Policy.KEEP)
        if kept:
            raise PolicyConflictError(
                f"{self.name} releases everything and cannot keep {kept} resident",
                hint="change the policy of these tags",
                tags=kept,
            )
        if policy[KV_CACHE] is Policy.OFFLOAD:
            raise UnsupportedOperationError(
                f"vLLM's interface does not promise that {self.name} keeps the KV cache",
                hint=f"give {KV_CACHE!r} the policy 'discard'",
                tags=[KV_CACHE],
            )

    def _check(self, tags: Collection[str], operation: str) -> frozenset[str]:
        return check_tags(tags, self._blocks, operation)

    @contextmanager
    def _transition(self, operation: str, control: Control | None) -> Iterator[BackendState]:
        control = control or Control()
        try:
            with self._lock.hold(operation, control):
                before = self._ledger.state()
                with reporting(self.name, operation, self._ledger, before):
                    if self._closed:
                        raise ClosedError(f"{self.name!r} was closed", hint="create a new adapter")
                    # The call itself cannot be interrupted.
                    control.check(operation)
                    yield before
        except SleepBackendsError as error:
            error.backend = error.backend or self.name
            error.operation = error.operation or operation
            raise


def _changes(move: Move, block: Block) -> bool:
    """Tell whether a move changes where a block is, or raise naming its tag."""
    try:
        return moved(move, block.placement) != block.placement
    except PolicyConflictError as error:
        raise PolicyConflictError(
            f"tag {block.tag!r}: {error.message}", hint=error.hint, tags=[block.tag]
        ) from None


def _callable(backend: Any, name: str) -> bool:
    return callable(getattr(backend, name, None))


def _implements(backend: Any, verb: str) -> bool:
    """Tell whether a verb is the backend's own, not the interface's, which only raises."""
    for cls in type(backend).__mro__:
        if verb in vars(cls):
            abstract = getattr(vars(cls).get("suspend"), "__isabstractmethod__", False)
            return not abstract
    return False
