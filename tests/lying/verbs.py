"""Lies of the calls: what a verb does, answers or reports is not so."""

from __future__ import annotations

from collections.abc import Collection
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.errors import MechanismError, SleepBackendsError, UnknownTagError
from sleepbackends.ledger import Ledger
from sleepbackends.lock import TransitionLock
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.reports import DiscardReport, ResumeReport, SuspendReport
from sleepbackends.residency import Move
from sleepbackends.state import BackendState
from sleepbackends.testing import SimulatedBackend, SimulatedOptions
from sleepbackends.testing.simulated import ALL, SimulatedMemory, SimulatedRegion


class MarksBeforeActing(SimulatedBackend):
    """Says that it sleeps as soon as it is told to, whatever comes of it."""

    sleeping = False

    def suspend(self, level: int = 1, **kwargs: Any) -> SuspendReport:
        self.sleeping = True
        return super().suspend(level, **kwargs)

    def resume(self, tags: Collection[str] | None = None, **kwargs: Any) -> ResumeReport:
        self.sleeping = False
        return super().resume(tags, **kwargs)

    def state(self) -> BackendState:
        real = super().state()
        if not self.sleeping:
            return real
        return BackendState(
            {
                name: replace(
                    tag, resident_bytes=0, offloaded_bytes=tag.total_bytes - tag.discarded_bytes
                )
                for name, tag in real.tags.items()
            }
        )


class ForgetsATag(SimulatedBackend):
    """Leaves every tag alone that it has no policy for."""

    def suspend(
        self,
        level: int = 1,
        *,
        policies: Policies | None = None,
        control: Control | None = None,
    ) -> SuspendReport:
        known = policies or self.settings.policies
        keep = {"lora": TagPolicy(Policy.KEEP, Policy.KEEP)}
        return super().suspend(
            level, policies=Policies({**known.declared, **keep}), control=control
        )


class IgnoresTheLevel(SimulatedBackend):
    """Keeps weights at every level."""

    def suspend(self, level: int = 1, **kwargs: Any) -> SuspendReport:
        return super().suspend(min(level, 1), **kwargs)


class DiscardsNothing(SimulatedBackend):
    """Answers a discard, and does nothing."""

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        return DiscardReport(backend=self.name, operation="discard", changed=True)


class ResumesHalf(SimulatedBackend):
    """Wakes the first tag, and says that it is done."""

    def resume(self, tags: Collection[str] | None = None, **kwargs: Any) -> ResumeReport:
        asleep = sorted(self.state().asleep_tags())
        return super().resume(asleep[-1:] if tags is None else tags, **kwargs)


class LeavesSomethingAwake(SimulatedBackend):
    """Wakes as much as it can before it fails."""

    def resume(self, tags: Collection[str] | None = None, **kwargs: Any) -> ResumeReport:
        try:
            return super().resume(tags, **kwargs)
        except MechanismError as error:
            for block in self.ledger.blocks(["kv_cache"]):
                if not block.placement.mapped:
                    self.device.map(block.address, block.size_bytes)
                    self.ledger.apply(Move.RESUME, block)
            # The report at least is true.
            now = {
                name: replace(change, after=self.state().tags[name])
                for name, change in error.report.tags.items()
            }
            error.report = replace(error.report, tags=now)
            raise


class WakesEverything(SimulatedBackend):
    """Claims that it can resume some tags, and resumes all."""

    def resume(self, tags: Collection[str] | None = None, **kwargs: Any) -> ResumeReport:
        report = super().resume(tags, **kwargs)
        super().resume(None)
        return report


class _NeverBumps(Ledger):
    def bump_epochs(self, blocks: Any) -> None:
        self._touch()


class NeverBumpsTheEpoch(SimulatedBackend):
    """Drops contents, and caches of them stay valid."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ledger = _NeverBumps()


class BumpsEveryEpoch(SimulatedBackend):
    """Counts every sleep as a loss."""

    def suspend(self, level: int = 1, **kwargs: Any) -> SuspendReport:
        report = super().suspend(level, **kwargs)
        kept = [block for block in self.ledger.blocks() if block.placement.owed]
        self.ledger.bump_epochs(kept)
        return report


class CallsUndefinedValid(SimulatedBackend):
    """Takes what was dropped for valid as soon as it is mapped."""

    def resume(self, tags: Collection[str] | None = None, **kwargs: Any) -> ResumeReport:
        report = super().resume(tags, **kwargs)
        self.mark_valid(self.state().undefined_tags())
        return report


class BlocksInState(SimulatedBackend):
    """Waits for the transition before it tells what is where."""

    def state(self) -> BackendState:
        with self._lock.hold("state", Control()):
            return super().state()


class _NoLock(TransitionLock):
    @contextmanager
    def hold(self, operation: str, control: Control) -> Any:
        yield


class NotThreadSafe(SimulatedBackend):
    """Lets everybody in at once."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._lock = _NoLock()


class ChangesOnARefusal(SimulatedBackend):
    """Drops the tags that it knows before it complains of those that it does not."""

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        try:
            return super().discard(tags, control=control)
        except UnknownTagError as error:
            super().discard(set(tags) & set(error.known))
            raise


class AcceptsUnknownTags(SimulatedBackend):
    """Takes any tag, and does nothing about those that it does not know."""

    def resume(self, tags: Collection[str] | None = None, **kwargs: Any) -> ResumeReport:
        if tags is not None and not isinstance(tags, str):
            tags = set(tags) & set(self.state().tags)
        return super().resume(tags, **kwargs)


class SwallowsFaults(SimulatedBackend):
    """Says that all is well."""

    def suspend(self, level: int = 1, **kwargs: Any) -> SuspendReport:
        try:
            return super().suspend(level, **kwargs)
        except MechanismError:
            return SuspendReport(backend=self.name, operation="suspend", changed=True)


class LetsErrorsOfOthersThrough(SimulatedBackend):
    """Raises whatever the driver raised."""

    def suspend(self, level: int = 1, **kwargs: Any) -> SuspendReport:
        try:
            return super().suspend(level, **kwargs)
        except MechanismError as error:
            raise OSError("the driver said 700") from error


class ErrorsThatCannotBeSent(SimulatedBackend):
    """Puts an open file, or worse, into its errors."""

    def resume(self, tags: Collection[str] | None = None, **kwargs: Any) -> ResumeReport:
        try:
            return super().resume(tags, **kwargs)
        except SleepBackendsError as error:
            error.report = self._lock
            raise


class ReportsTooMuch(SimulatedBackend):
    """Counts padding as copied."""

    def suspend(self, level: int = 1, **kwargs: Any) -> SuspendReport:
        report = super().suspend(level, **kwargs)
        return replace(report, copied_bytes=-(-report.copied_bytes // 4096) * 4096)


class AlwaysChanged(SimulatedBackend):
    """Says of every call that it changed something."""

    def suspend(self, level: int = 1, **kwargs: Any) -> SuspendReport:
        return replace(super().suspend(level, **kwargs), changed=True)


class _MovingMemory(SimulatedMemory):
    @property
    def address(self) -> int:
        backend: Any = self._backend
        return self.at + int(backend.resumes) * (1 << 30)

    @address.setter
    def address(self, at: int) -> None:
        self.at = at

    def read(self) -> bytes:
        return bytes(self._backend.device.memory(self.at))

    def write(self, data: bytes) -> None:
        self._backend.device.memory(self.at)[:] = data

    def free(self) -> None:
        self._backend.free(self.at)


class _MovingRegion(SimulatedRegion):
    def buffer(self, size_bytes: int) -> SimulatedMemory:
        return _MovingMemory(self._backend, super().buffer(size_bytes).address)


class MovesAddresses(SimulatedBackend):
    """Claims ``preserves_addresses``, and wakes memory at another one."""

    resumes = 0

    def resume(self, tags: Collection[str] | None = None, **kwargs: Any) -> ResumeReport:
        report = super().resume(tags, **kwargs)
        self.resumes += report.changed
        return report

    @contextmanager
    def region(self, tag: str) -> Any:
        yield _MovingRegion(self, self.open_tag(tag))


class CallsGraphsLost(SimulatedBackend):
    """Changes its mind about what survives once it has slept."""

    def suspend(self, level: int = 1, **kwargs: Any) -> SuspendReport:
        self.capabilities = replace(self.capabilities, preserves_compiled_artifacts=False)
        return super().suspend(level, **kwargs)


class DeniesAndDoes(SimulatedBackend):
    """Says that it cannot release selectively, and drops the tags when it is asked to."""

    def __init__(self, _: object, settings: Any) -> None:
        super().__init__(SimulatedOptions(replace(ALL, supports_selective_release=False)), settings)

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        self.capabilities = ALL
        try:
            return super().discard(tags, control=control)
        finally:
            self.capabilities = replace(ALL, supports_selective_release=False)


class ClaimsToOffload(SimulatedBackend):
    """Claims ``supports_offload``, and refuses."""

    def suspend(self, level: int = 1, **kwargs: Any) -> SuspendReport:
        claimed = self.capabilities
        self.capabilities = Capabilities(owns_allocations=True)
        try:
            return super().suspend(level, **kwargs)
        finally:
            self.capabilities = claimed


class TakesMemoryAwayWhenClosed(SimulatedBackend):
    """Unmaps what is still in use."""

    def shut_down(self) -> None:
        for block in self.ledger.blocks():
            self.device.mapped.pop(block.address, None)


class GivesUpAtOnce(SimulatedBackend):
    """Does not wait for a neighbour's memory."""

    def __init__(self, options: Any, settings: Any) -> None:
        super().__init__(options, replace(settings, wait_for_memory_s=0.0))


_LEDGER: dict[str, Ledger] = {}


class SharesItsLedger(SimulatedBackend):
    """Keeps its blocks in one place for all backends of a test."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.ledger = _LEDGER.setdefault("all", Ledger())

    def close(self) -> None:
        super().close()
        _LEDGER.clear()


class FreesWhenItLikes(SimulatedBackend):
    """Waits for the transition before it frees."""

    def free(self, address: int) -> None:
        with self._lock.hold("free", Control()):
            super().free(address)
        super().free(address)


class AnotherVersion(SimulatedBackend):
    """Was written for a contract that there is not."""

    api_version = 999
