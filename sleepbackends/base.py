"""The base every backend stands on: verbs, checks, lock, ledger and guarantees.

A subclass gives ``name``, ``capabilities``, ``probe()`` and the steps of
``sleepbackends.mechanism.Mechanism``. What the contract promises is implemented here, so
that every backend keeps it.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Generic, TypeVar

from sleepbackends import transactions
from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.errors import (
    ClosedError,
    PolicyConflictError,
    RequestError,
    SleepBackendsError,
    UnsupportedOperationError,
)
from sleepbackends.failures import reporting
from sleepbackends.ledger import Block, Ledger
from sleepbackends.lock import TransitionLock
from sleepbackends.mechanism import Mechanism
from sleepbackends.policies import Policies, Policy, check_level
from sleepbackends.protocol import API_VERSION
from sleepbackends.reports import DiscardReport, ResumeReport, SuspendReport, compare
from sleepbackends.residency import Move, moved
from sleepbackends.settings import BackendSettings
from sleepbackends.state import BackendState, check_tags

logger = logging.getLogger(__name__)

OptionsT = TypeVar("OptionsT")


class BaseBackend(Mechanism, Generic[OptionsT]):
    """A sleep-mode backend, complete but for its mechanism.

    Parameters
    ----------
    options : object, optional
        The backend's own options, validated by its options model.
    settings : BackendSettings, optional
        Policies and what else is common to all backends.
    """

    name: str
    api_version: int = API_VERSION
    capabilities: Capabilities = Capabilities()

    def __init__(
        self, options: OptionsT | None = None, settings: BackendSettings | None = None
    ) -> None:
        self.options = options
        self.settings = settings or BackendSettings()
        self.ledger = Ledger()
        self._lock = TransitionLock()
        self._to_free: deque[int] = deque()
        self._closed = False

    @classmethod
    @abstractmethod
    def probe(cls) -> Availability:
        """Tell whether the backend can work on this machine, without side effects.

        Never raises.
        """

    # The verbs

    def suspend(
        self,
        level: int = 1,
        *,
        policies: Policies | None = None,
        control: Control | None = None,
    ) -> SuspendReport:
        """Release memory following each tag's policy; see ``SleepModeBackend.suspend``.

        Raises
        ------
        RequestError, UnsupportedOperationError, NoRoomError
            Nothing changed.
        TransitionTimeoutError, MechanismError
            It failed half-way.

        Notes
        -----
        Guarantee: if it raises, either nothing changed, or ``error.report`` says exactly
        which tags are where; no bytes that a policy keeps are lost.
        """
        check_level(level)
        policies = policies or self.settings.policies
        with self._transition("suspend", control) as (control, before):
            wanted = {tag: policies.at(tag, level) for tag in before.tags}
            offload = self._asked(Move.OFFLOAD, _tags_with(wanted, Policy.OFFLOAD))
            drop = self._asked(Move.DISCARD, _tags_with(wanted, Policy.DISCARD))
            if offload and not self.capabilities.supports_offload:
                raise self._unsupported(
                    "suspend",
                    "supports_offload",
                    "sleep at level 2, or give these tags the policy 'discard' or 'keep'",
                    {block.tag for block in offload},
                )
            started = time.perf_counter()
            if offload or drop:
                transactions.suspend(self, self.ledger, offload, drop, control)
            else:
                control.start("suspend", 0)
            return SuspendReport(
                backend=self.name,
                operation="suspend",
                level=level,
                changed=bool(offload or drop),
                tags=compare(before, self.ledger.state(), wanted),
                copied_bytes=control.progress.done_bytes - control.progress.clean_bytes,
                clean_bytes=control.progress.clean_bytes,
                spared_bytes=control.progress.spared_bytes,
                seconds=time.perf_counter() - started,
                phases=control.phases,
            )

    def resume(
        self, tags: Collection[str] | None = None, *, control: Control | None = None
    ) -> ResumeReport:
        """Map again at the same addresses and restore; see ``SleepModeBackend.resume``.

        Raises
        ------
        UnknownTagError, UnsupportedOperationError, NoRoomError
            Nothing changed.
        ContentsLostError, TransitionTimeoutError, MechanismError
            It failed half-way and was undone.

        Notes
        -----
        Guarantee: if it raises, everything it was to wake is still asleep, saved bytes
        are still saved, and the call can be repeated.
        """
        with self._transition("resume", control) as (control, before):
            known = before.tags
            wanted = frozenset(known) if tags is None else check_tags(tags, known, "resume")
            blocks = self._asked(Move.RESUME, wanted)
            left = before.asleep_tags() - wanted
            if blocks and left and not self.capabilities.supports_selective_resume:
                raise self._unsupported(
                    "resume",
                    "supports_selective_resume",
                    "resume everything: resume() without tags",
                    left,
                )
            started = time.perf_counter()
            if blocks:
                transactions.resume(
                    self,
                    self.ledger,
                    blocks,
                    self.settings.fill,
                    self.settings.wait_for_memory_s,
                    control,
                )
            else:
                control.start("resume", 0)
            after = self.ledger.state()
            return ResumeReport(
                backend=self.name,
                operation="resume",
                changed=bool(blocks),
                tags=compare(before, after, dict.fromkeys(wanted)),
                copied_bytes=control.progress.done_bytes,
                spared_bytes=control.progress.spared_bytes,
                seconds=time.perf_counter() - started,
                phases=control.phases,
                undefined_tags=after.undefined_tags() & wanted,
            )

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        """Release the named tags and forget their bytes; see ``SleepModeBackend.discard``.

        Raises
        ------
        UnknownTagError, UnsupportedOperationError, PolicyConflictError
            Nothing changed.
        MechanismError
            It failed half-way.

        Notes
        -----
        Guarantee: if it raises, either nothing changed, or ``error.report`` says exactly
        which tags are where.
        """
        with self._transition("discard", control) as (control, before):
            wanted = check_tags(tags, before.tags, "discard")
            if not self.capabilities.supports_selective_release:
                raise self._unsupported(
                    "discard",
                    "supports_selective_release",
                    "suspend everything, or let an orchestrator choose a fallback: release(tags)",
                    wanted,
                )
            self.settings.policies.check_releasable(wanted)
            blocks = self._asked(Move.DISCARD, wanted)
            started = time.perf_counter()
            if blocks:
                transactions.discard(self, self.ledger, blocks, control)
            else:
                control.start("discard", 0)
            return DiscardReport(
                backend=self.name,
                operation="discard",
                changed=bool(blocks),
                tags=compare(before, self.ledger.state(), dict.fromkeys(wanted, Policy.DISCARD)),
                seconds=time.perf_counter() - started,
                phases=control.phases,
            )

    def mark_valid(self, tags: Collection[str]) -> None:
        """Declare that the bytes of UNDEFINED memory were refilled.

        Raises
        ------
        UnknownTagError, PolicyConflictError
            A tag is unknown or not mapped.

        Notes
        -----
        Guarantee: if it raises, nothing changed.
        """
        with self._transition("mark_valid", None) as (_, before):
            wanted = check_tags(tags, before.tags, "mark_valid")
            self.ledger.apply(Move.VALIDATE, *self._asked(Move.VALIDATE, wanted))

    def state(self) -> BackendState:
        """Return what is where; never waits and changes nothing."""
        return self.ledger.state()

    def close(self) -> None:
        """Give back what the backend holds for itself; saved bytes are dropped.

        Memory that is mapped stays valid for whoever still refers to it. Waits for a
        transition that is going on. Repeating the call does nothing.
        """
        try:
            with self._lock.hold("close", Control()):
                if self._closed:
                    return
                self._closed = True
                for block in self.ledger.blocks():
                    if block.placement.owed:
                        self.ledger.apply(Move.LOSE, block)
                    self.forget(block)
                self.shut_down()
        finally:
            self._free_pending()

    # For subclasses that own allocations

    def open_tag(self, tag: str) -> str:
        """Make a tag known, so that memory can be allocated under it; return it.

        Raises
        ------
        RequestError
            If it is not a non-empty string of printable characters without spaces.
        """
        if not tag.isprintable() or not tag or " " in tag:
            raise RequestError(
                f"{tag!r} cannot be a tag",
                hint="use a short name such as 'weights' or 'kv_cache'",
                backend=self.name,
            )
        if tag not in self.ledger.tags():
            with self._locked("open a tag", Control()):
                self.ledger.register_tag(tag)
        return tag

    def enter(self, make: Callable[[], Block]) -> Block:
        """Allocate a block under the transition lock and enter it in the ledger.

        Raises
        ------
        ClosedError
            If the backend was closed.
        """
        with self._locked("allocate", Control()):
            block = make()
            self.ledger.add(block)
            return block

    def free(self, address: int) -> None:
        """Give a block back for good, in whatever residency it is.

        Safe in any thread and inside a finalizer: it never waits. While a transition is
        going on the block is freed at its end. An unknown address is ignored.
        """
        self._to_free.append(address)
        self._free_pending()

    def _free_pending(self) -> None:
        # Checked again after each release: a free that found the lock taken relies on it.
        while self._to_free and self._lock.try_acquire():
            try:
                self._free_now()
            finally:
                self._lock.release()

    def _free_now(self) -> None:
        while self._to_free:
            block = self.ledger.get(self._to_free.popleft())
            if block is None:
                continue
            self.ledger.remove(block)
            try:
                self.release(block)
            except Exception:
                logger.exception("%s: freeing %d bytes failed", self.name, block.size_bytes)

    # Helpers of the verbs

    @contextmanager
    def _transition(
        self, operation: str, control: Control | None
    ) -> Iterator[tuple[Control, BackendState]]:
        """Serialise, and see that what is raised says who, what and where."""
        control = control or Control()
        with self._locked(operation, control):
            before = self.ledger.state()
            with reporting(self.name, operation, self.ledger, before):
                yield control, before

    @contextmanager
    def _locked(self, operation: str, control: Control) -> Iterator[None]:
        """Hold the lock of an open backend, with the ledger up to date."""
        try:
            with self._lock.hold(operation, control):
                self._check_open()
                self._free_now()
                try:
                    self.begin()
                    yield
                finally:
                    self.end()
        except SleepBackendsError as error:
            error.backend = error.backend or self.name
            error.operation = error.operation or operation
            raise
        finally:
            self._free_pending()

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"backend {self.name!r} was closed", hint="create a new one")

    def _asked(self, move: Move, tags: Collection[str]) -> list[Block]:
        """List the blocks that the move would change, or raise naming the tag in the way."""
        blocks = []
        for block in self.ledger.blocks(tags):
            try:
                if moved(move, block.placement) != block.placement:
                    blocks.append(block)
            except PolicyConflictError as error:
                raise PolicyConflictError(
                    f"tag {block.tag!r}: {error.message}",
                    hint=f"resume([{block.tag!r}]) first, then ask again",
                    tags=[block.tag],
                ) from None
        return blocks

    def _unsupported(
        self, operation: str, flag: str, hint: str, tags: Collection[str]
    ) -> UnsupportedOperationError:
        return UnsupportedOperationError(
            f"backend {self.name!r} cannot do this {operation}: {flag} is False",
            hint=hint,
            tags=tags,
        )


def _tags_with(wanted: Mapping[str, Policy], policy: Policy) -> set[str]:
    return {tag for tag, asked in wanted.items() if asked is policy}
