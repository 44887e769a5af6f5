"""Contents that a suspend keeps: bytes, addresses, reports, progress, deadlines."""

from __future__ import annotations

from typing import Any

import pytest

from sleepbackends.control import Control, Progress
from sleepbackends.errors import (
    PolicyConflictError,
    TransitionTimeoutError,
    UnsupportedOperationError,
)
from sleepbackends.residency import Residency
from sleepbackends.testing.contract.fixtures import SIZES, ContractFixtures, policies
from sleepbackends.testing.promises import Promise, proves

_KEPT = sum(SIZES["weights"] + SIZES["lora"])
_ALL = sum(map(sum, SIZES.values()))


class OffloadTests(ContractFixtures):
    """What ``supports_offload`` promises."""

    @proves(Promise.BIT_EXACT)
    def test_level_1_keeps_contents(self, backend: Any) -> None:
        """Offloaded bytes come back bit-exact at the same addresses."""
        self.need(backend, "supports_offload")
        contents = self.populate(backend)
        addresses = [memory.address for memory in contents]
        assert backend.suspend(1).changed, "suspend(1) says that nothing changed"
        self.check_residency(
            backend,
            Promise.POLICIES,
            "suspend(1)",
            weights=Residency.OFFLOADED,
            lora=Residency.OFFLOADED,
            kv_cache=Residency.DISCARDED,
        )
        assert backend.resume().changed, "resume() says that nothing changed"
        asleep = backend.state().asleep_tags()
        Promise.NEVER_HALF_AWAKE.check(not asleep, f"after resume() {sorted(asleep)} are asleep")
        if backend.capabilities.preserves_addresses:
            now = [memory.address for memory in contents]
            Promise.ADDRESSES.check(
                now == addresses, f"memory was at {addresses} and came back at {now}"
            )
        self.check_filled(self.of(contents, "kv_cache"))
        self.check(self.of(contents, "weights", "lora"))

    @proves(Promise.BIT_EXACT)
    def test_many_sleeps(self, backend: Any) -> None:
        """What was written between two sleeps is what the second one keeps."""
        self.need(backend, "supports_offload")
        contents = self.populate(backend, "weights", "lora")
        for turn in range(3):
            for memory, data in contents.items():
                # The ends change in each turn, the middle only in some: copies may be reused.
                middle = data[1:-1] if turn % 2 else bytes(reversed(data[1:-1]))
                contents[memory] = bytes([turn]) + middle + bytes([255 - turn])
                memory.write(contents[memory])
            backend.suspend(1)
            backend.resume()
            self.check(contents)

    @proves(Promise.REPORTS)
    def test_reports_say_what_happened(self, backend: Any) -> None:
        """Bytes, tags and what is undefined; before and after are the states there were."""
        self.need(backend, "supports_offload")
        self.assume("one_block_each")
        self.populate(backend)
        awake = backend.state()
        report = backend.suspend(1)
        asleep = backend.state()
        self._check_report(report, backend.name, "suspend", awake, asleep)
        for what, told, expected in (
            ("released", report.released_bytes, _ALL),
            ("copied", report.copied_bytes + report.clean_bytes, _KEPT),
        ):
            assert told == expected, f"{expected} bytes were {what}, the report says {told}"
        assert report.dropped_tags == {"kv_cache"}, f"dropped_tags is {report.dropped_tags}"
        report = backend.resume()
        self._check_report(report, backend.name, "resume", asleep, backend.state())
        assert report.released_bytes == -_ALL, f"resume() released {report.released_bytes} bytes"
        assert report.undefined_tags == {"kv_cache"}, f"undefined_tags is {report.undefined_tags}"

    @staticmethod
    def _check_report(report: Any, name: str, operation: str, before: Any, after: Any) -> None:
        assert report.backend == name, f"the report is of backend {report.backend!r}"
        assert report.operation == operation, f"the report is of a {report.operation!r}"
        assert report.seconds >= 0
        for tag, change in report.tags.items():
            assert change.before == before.tags[tag], f"before: {tag} was {before.tags[tag]}"
            assert change.after == after.tags[tag], f"after: {tag} is {after.tags[tag]}"
        assert set(report.tags) == set(before.tags), f"the report is of tags {sorted(report.tags)}"

    @proves(Promise.CHECKED_FIRST)
    def test_conflicting_requests_are_refused(self, backend: Any) -> None:
        """Dropping what is saved, or saving what is gone, changes nothing and says why."""
        self.need(backend, "supports_offload")
        contents = self.populate(backend, "weights")
        backend.suspend(1)
        state = backend.state()
        with pytest.raises(PolicyConflictError) as caught:
            backend.suspend(2)
        Promise.ERRORS.check(
            caught.value.tags == {"weights"} and caught.value.backend == backend.name,
            f"the error is of {caught.value.backend!r} and of tags {sorted(caught.value.tags)}",
        )
        assert backend.state() == state, "a refused suspend(2) changed the state"
        backend.resume()
        self.check(contents)
        backend.suspend(2)
        with pytest.raises(PolicyConflictError):
            backend.suspend(1)

    @proves(Promise.FLAGS)
    def test_without_offload_level_1_is_refused(self, backend: Any) -> None:
        """A backend that cannot keep contents says so before it drops any."""
        self.need_not(backend, "supports_offload")
        contents = self.populate(backend)
        with pytest.raises(UnsupportedOperationError, match="supports_offload"):
            backend.suspend(1)
        self.check(contents)

    @proves(Promise.UNDEFINED)
    def test_undefined_bytes_survive_a_sleep_as_undefined(self) -> None:
        """An engine may have written to UNDEFINED memory: it is saved, and stays UNDEFINED."""
        with self.opened(policies(kv_cache="offload")) as backend:
            self.need(backend, "supports_offload")
            (memory, *_) = self.populate(backend, "weights")
            backend.suspend(2)
            backend.resume()
            data = b"\x5a" * len(memory.read())
            memory.write(data)
            backend.suspend(1)
            self.check_residency(
                backend, Promise.POLICIES, "suspend(1)", weights=Residency.OFFLOADED
            )
            backend.resume()
            self.check_residency(
                backend, Promise.UNDEFINED, "that and resume()", weights=Residency.UNDEFINED
            )
            self.check({memory: data})

    @proves(Promise.PROGRESS)
    def test_progress_ends_at_the_total(self, backend: Any) -> None:
        """Progress counts every copied byte, once, and a callback that raises is ignored."""
        self.need(backend, "supports_offload")
        self.assume("one_block_each")
        self.populate(backend)
        seen: list[Progress] = []
        backend.suspend(1, control=Control(on_progress=seen.append))
        self._check_progress(seen, "suspend")
        seen.clear()

        def record_and_raise(progress: Progress) -> None:
            seen.append(progress)
            raise RuntimeError("a broken progress bar")

        assert backend.resume(control=Control(on_progress=record_and_raise)).changed
        self._check_progress(seen, "resume")

    @staticmethod
    def _check_progress(seen: list[Progress], operation: str) -> None:
        assert seen, f"{operation} told no progress"
        last = seen[-1]
        assert last[:3] == Progress(operation, _KEPT, _KEPT)[:3], (
            f"{operation} copied {_KEPT} bytes, and its progress ended at {last.done_bytes} of "
            f"{last.total_bytes}"
        )

    @proves(Promise.DEADLINE)
    def test_deadline_rolls_back(self, backend: Any) -> None:
        """A deadline that has passed leaves everything as it was."""
        self.need(backend, "supports_offload")
        contents = self.populate(backend, "weights")
        with pytest.raises(TransitionTimeoutError) as caught:
            backend.suspend(1, control=_Expired())
        Promise.ALL_OR_REPORTED.check(
            not caught.value.report.changed, "a suspend that met its deadline changed something"
        )
        self.check(contents)
        backend.suspend(1)
        with pytest.raises(TransitionTimeoutError):
            backend.resume(control=_Expired())
        self.check_residency(
            backend,
            Promise.NEVER_HALF_AWAKE,
            "a resume that met its deadline",
            weights=Residency.OFFLOADED,
        )
        backend.resume()
        self.check(contents)


class _Expired(Control):
    """A deadline that passes as soon as the copy has begun."""

    def __init__(self) -> None:
        super().__init__(timeout_s=3600.0)

    def remaining_s(self) -> float | None:
        return 0.0 if self.progress.done_bytes else 3600.0
