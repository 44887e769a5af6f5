"""Contents may be dropped while the rest is still being saved, and what that rules out."""

from __future__ import annotations

import pytest

from sleepbackends import Control, MechanismError, Residency, TransitionTimeoutError
from sleepbackends.testing import FaultInjector, SimulatedBackend

SIZE = 1000


class Certain(SimulatedBackend):
    """Has queued every copy as soon as the first block is saved."""

    def saving_is_certain(self) -> bool:
        return bool(self.saved)


class PassedAfterTheFirstBlock(Control):
    def __init__(self) -> None:
        super().__init__(timeout_s=3600.0)

    def remaining_s(self) -> float | None:
        return 0.0 if self.progress.done_bytes > SIZE else 3600.0


def filled(backend: SimulatedBackend) -> SimulatedBackend:
    for tag in ("weights", "weights", "kv_cache"):
        with backend.region(tag) as region:
            region.buffer(SIZE).write(b"x" * SIZE)
    return backend


def test_a_deadline_does_not_stop_what_cannot_be_undone() -> None:
    backend = filled(Certain())
    assert backend.suspend(1, control=PassedAfterTheFirstBlock()).changed
    assert backend.mapped_bytes == 0
    strict = filled(SimulatedBackend())
    with pytest.raises(TransitionTimeoutError) as caught:
        strict.suspend(1, control=PassedAfterTheFirstBlock())
    assert not caught.value.report.changed
    assert strict.mapped_bytes == 3 * SIZE


def test_the_deadline_counts_again_in_the_next_operation() -> None:
    backend = filled(Certain())
    control = PassedAfterTheFirstBlock()
    backend.suspend(1, control=control)
    with pytest.raises(TransitionTimeoutError):
        backend.resume(control=control)
    assert backend.mapped_bytes == 0


def test_a_fault_after_the_drop_says_what_is_where_and_can_be_finished() -> None:
    backend = filled(Certain())
    with FaultInjector(backend, {"save": [1]}), pytest.raises(MechanismError) as caught:
        backend.suspend(1)
    tags = caught.value.report.tags
    assert tags["kv_cache"].after.residencies == {Residency.DISCARDED}
    assert tags["weights"].after.residencies == {Residency.OFFLOADED, Residency.RESIDENT}
    assert len(backend.saved) == 1, "the copy of a block that stayed mapped is dropped"
    backend.suspend(1)
    backend.resume()
    assert all(bytes(data) in (b"x" * SIZE, bytes(SIZE)) for data in backend.mapped.values())
    assert backend.state().tags["weights"].resident_bytes == 2 * SIZE
