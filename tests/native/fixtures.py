"""A simulated driver and a native library for each test, as if the process had just begun."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sleepbackends.vmm import address_space
from tests.native.build import LIBRARY, LIBRARY_FLAGS, compile_native
from tests.simulators.cuda import Simulator, loaded_or_skip

KIB = 1 << 10
GRANULE_BYTES = 64 * KIB
DEVICES = 2


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loaded_or_skip()
    return compile_native(tmp_path_factory.mktemp("native") / LIBRARY, LIBRARY_FLAGS)


@pytest.fixture
def simulator(
    native_library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Simulator]:
    simulator = loaded_or_skip()
    simulator.reset()
    simulator.set_devices(DEVICES)
    for device in range(DEVICES):
        simulator.set_granularity_bytes(GRANULE_BYTES, device)
    # The library remembers contexts and extents of this process: a copy is another library.
    folder = tmp_path / "native"
    folder.mkdir()
    shutil.copy(native_library, folder)
    monkeypatch.setattr(address_space, "_FOLDER", folder)
    yield simulator
    violations = simulator.violations()
    simulator.reset()
    assert not violations, "the driver was misused"
