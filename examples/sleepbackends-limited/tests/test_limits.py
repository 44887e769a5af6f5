"""Limits, statistics, and composition by configuration."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from sleepbackends import (
    BackendUnavailableError,
    DeviceMemoryError,
    HostMemoryError,
    InvalidLevelError,
    InvalidOptionsError,
    Orchestrator,
    ReleaseStrategy,
    UnknownBackendError,
    UnknownTagError,
)
from sleepbackends.host.backend import HostBackend

from sleepbackends_limited.backend import LimitedBackend
from sleepbackends_limited.statistics import Counted, Statistics

KIB = 1024

Open = Callable[..., Orchestrator]


@pytest.fixture
def open_limited() -> Iterator[Open]:
    opened: list[Orchestrator] = []

    def open_limited(**options: Any) -> Orchestrator:
        opened.append(Orchestrator.create({"backend": "limited", "options": options}))
        return opened[-1]

    yield open_limited
    for orchestrator in opened:
        orchestrator.close()


def allocate(orchestrator: Orchestrator, **sizes: int) -> list[memoryview]:
    backend: Any = orchestrator.backend
    buffers = []
    for tag, size in sizes.items():
        with backend.region(tag) as region:
            buffers.append(region.buffer(size))
        buffers[-1][:] = b"x" * size
    return buffers


def test_a_sleep_that_would_keep_too_much_is_refused(open_limited: Open) -> None:
    orchestrator = open_limited(max_saved_bytes=10 * KIB)
    buffers = allocate(orchestrator, weights=8 * KIB, lora=4 * KIB, kv_cache=64 * KIB)
    before = orchestrator.state()
    with pytest.raises(HostMemoryError, match="would keep 12288 bytes, and 10240 may") as caught:
        orchestrator.sleep(1)
    assert caught.value.backend == "limited"
    assert (caught.value.needed_bytes, caught.value.available_bytes) == (12 * KIB, 10 * KIB)
    assert orchestrator.state() == before
    assert orchestrator.sleep(2).released_bytes == 76 * KIB, "at level 2 weights are not kept"
    assert orchestrator.wake_up().changed
    assert buffers[1] == b"x" * (4 * KIB)


def test_what_is_kept_already_counts(open_limited: Open) -> None:
    orchestrator = open_limited(max_saved_bytes=10 * KIB)
    buffers = allocate(orchestrator, weights=8 * KIB)
    backend = orchestrator.backend
    backend.suspend(1)
    buffers += allocate(orchestrator, lora=4 * KIB)
    with pytest.raises(HostMemoryError):
        backend.suspend(1)
    backend.resume()
    assert len(buffers) == 2


def test_a_wake_up_that_would_take_too_much_is_refused(open_limited: Open) -> None:
    orchestrator = open_limited(max_mapped_bytes=10 * KIB)
    buffers = allocate(orchestrator, weights=8 * KIB, lora=4 * KIB)
    backend = orchestrator.backend
    backend.suspend(1)
    asleep = backend.state()
    with pytest.raises(DeviceMemoryError, match="12288 bytes would be mapped, and 10240 may"):
        backend.resume()
    assert backend.state() == asleep
    backend.resume(["weights"])
    with pytest.raises(DeviceMemoryError):
        backend.resume(["lora"])
    assert not backend.resume(["weights"]).changed, "what takes nothing is not refused"
    assert len(buffers) == 2


def test_bad_requests_are_answered_by_the_wrapped_backend(open_limited: Open) -> None:
    orchestrator = open_limited(max_saved_bytes=0, max_mapped_bytes=0)
    buffers = allocate(orchestrator, kv_cache=KIB)
    backend: Any = orchestrator.backend
    with pytest.raises(InvalidLevelError):
        backend.suspend(7)
    with pytest.raises(UnknownTagError) as caught:
        backend.resume(["typo"])
    assert caught.value.backend == "limited"
    assert buffers


def test_calls_are_counted(open_limited: Open) -> None:
    orchestrator = open_limited(max_saved_bytes=8 * KIB)
    buffers = allocate(orchestrator, weights=8 * KIB, kv_cache=KIB)
    backend: Any = orchestrator.backend
    for _ in range(2):
        orchestrator.sleep(1)
        orchestrator.wake_up()
    buffers += allocate(orchestrator, lora=KIB)
    with pytest.raises(HostMemoryError):
        orchestrator.sleep(1)
    suspended, resumed = backend.statistics.of("suspend"), backend.statistics.of("resume")
    assert (suspended.calls, suspended.failures) == (3, 1)
    assert (suspended.released_bytes, suspended.copied_bytes) == (18 * KIB, 16 * KIB)
    assert (resumed.calls, resumed.failures, resumed.copied_bytes) == (2, 0, 16 * KIB)
    assert suspended.seconds > 0
    assert Statistics().of("suspend") == Counted()


def test_it_can_do_what_the_wrapped_backend_can(open_limited: Open) -> None:
    orchestrator = open_limited(inner="host")
    assert orchestrator.capabilities == HostBackend.capabilities
    buffers = allocate(orchestrator, weights=KIB, kv_cache=KIB)
    report = orchestrator.release_kv_cache()
    assert report.strategy is ReleaseStrategy.SELECTIVE
    backend: Any = orchestrator.backend
    assert backend.adopt == backend.inner.adopt
    assert buffers


def test_limits_around_limits(open_limited: Open) -> None:
    orchestrator = open_limited(
        inner="limited",
        inner_options={"max_saved_bytes": KIB},
        max_saved_bytes=10 * KIB,
    )
    buffers = allocate(orchestrator, weights=2 * KIB)
    with pytest.raises(HostMemoryError, match="1024 may be kept"):
        orchestrator.sleep(1)
    assert buffers


def test_the_options_of_the_wrapped_backend_are_checked_by_its_own_model() -> None:
    for options, error, named in (
        ({"inner": "nobody"}, UnknownBackendError, "nobody"),
        ({"inner_options": {"threads": "many"}}, InvalidOptionsError, "threads"),
        ({"max_saved_bytes": -1}, InvalidOptionsError, "max_saved_bytes"),
        ({"limit": 1}, InvalidOptionsError, "limit"),
    ):
        with pytest.raises(error, match=named):
            Orchestrator.create({"backend": "limited", "options": options})


def test_a_wrapped_backend_that_cannot_work_here_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from sleepbackends import Availability

    monkeypatch.setattr(HostBackend, "probe", lambda: Availability(False, "no memory", ""))
    with pytest.raises(BackendUnavailableError, match="'host' cannot be used here: no memory"):
        LimitedBackend()


def test_what_neither_has_is_an_attribute_error(open_limited: Open) -> None:
    backend: Any = open_limited().backend
    with pytest.raises(AttributeError, match="nothing_of_this_name"):
        backend.nothing_of_this_name  # noqa: B018 - the access is the test
    with pytest.raises(AttributeError, match="_private"):
        backend._private  # noqa: B018 - the access is the test
