"""The map from the driver's answers to our errors covers all of them, each once."""

from __future__ import annotations

import pytest

from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.cumem.errors import LOST, NO_ROOM, REFUSED, UNABLE, error_of
from sleepbackends.errors import DeviceMemoryError, MechanismError
from tests.simulators.cuda import Simulator

CLASSES = (NO_ROOM, LOST, UNABLE, REFUSED)


def codes() -> list[str]:
    driver = pytest.importorskip("cuda.bindings.driver")
    return [
        code.name.removeprefix("CUDA_ERROR_")
        for code in driver.CUresult
        if code.name != "CUDA_SUCCESS"
    ]


def test_every_code_is_in_exactly_one_class() -> None:
    for name in codes():
        assert sum(name in names for names in CLASSES) == 1, name


def test_no_name_is_in_two_classes() -> None:
    assert sum(map(len, CLASSES)) == len(frozenset().union(*CLASSES))


def test_every_code_makes_an_error_that_says_what_next() -> None:
    for name in codes():
        error = error_of(f"CUDA_ERROR_{name}", "copying", needed_bytes=8, available_bytes=3)
        assert error.hint
        assert "copying" in error.message
        assert error.recoverable == (name not in LOST | UNABLE)
        if name in NO_ROOM:
            assert isinstance(error, DeviceMemoryError)
            assert (error.needed_bytes, error.available_bytes) == (8, 3)
            assert "8 bytes" in error.message
        else:
            assert isinstance(error, MechanismError)
            assert name in error.message


def test_codes_of_the_native_library(simulator: Simulator) -> None:
    driver = CudaDriver()
    driver.check(0, "nothing")
    for code in range(-6, 0):
        with pytest.raises(MechanismError, match="mapping failed"):
            driver.check(code, "mapping")
    with pytest.raises(DeviceMemoryError) as caught:
        driver.check(2, "allocating", needed_bytes=7, device=1)
    assert caught.value.available_bytes == simulator.device_usage(1).free_bytes
    with pytest.raises(MechanismError, match="ILLEGAL_ADDRESS") as lost:
        driver.check(700, "mapping")
    assert not lost.value.recoverable


def test_a_code_newer_than_the_bindings(simulator: Simulator) -> None:
    with pytest.raises(MechanismError, match="CUDA error 98765"):
        CudaDriver().check(98765, "mapping")
