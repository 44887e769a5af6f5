"""Steps are replaced one over the other, and put back in turn."""

from __future__ import annotations

import pytest

from sleepbackends import MechanismError
from sleepbackends.testing import FaultInjector, SimulatedBackend, hold_step
from sleepbackends.testing.faults import steps_of


class Wrapper:
    """Has no steps of its own."""

    def __init__(self, inner: object) -> None:
        self.inner = inner


def test_a_replaced_step_is_put_back_as_it_was(sleep_backend: SimulatedBackend) -> None:
    with sleep_backend.region("weights") as region:
        region.buffer(10)
    with FaultInjector(sleep_backend, {"save": [0]}):
        with FaultInjector(sleep_backend, {}), hold_step(sleep_backend, "save") as held:
            held.let_go()
        with pytest.raises(MechanismError, match="save was told to fail"):
            sleep_backend.suspend(1)
    assert sleep_backend.suspend(1).changed
    assert not {"save", "map"} & vars(sleep_backend).keys()


def test_the_steps_of_a_wrapper_are_those_of_what_it_wraps(
    sleep_backend: SimulatedBackend,
) -> None:
    assert steps_of(Wrapper(Wrapper(sleep_backend))) is sleep_backend
    assert FaultInjector(Wrapper(sleep_backend), {}).backend is sleep_backend


def test_without_steps_nothing_can_be_injected() -> None:
    assert steps_of(Wrapper(None)) is None
    with pytest.raises(ValueError, match="Wrapper does not stand on BaseBackend"):
        FaultInjector(Wrapper(object()), {})


def test_a_step_that_there_is_not_is_refused(sleep_backend: SimulatedBackend) -> None:
    with pytest.raises(ValueError, match=r"no such steps: \['sav'\]"):
        FaultInjector(sleep_backend, {"sav": [0]})
