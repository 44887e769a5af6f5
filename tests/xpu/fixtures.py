"""A simulated driver and native libraries for each test, as if the process had just begun."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.errors import UnsupportedOperationError
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm import address_space
from sleepbackends.vmm.accelerator import Accelerator
from sleepbackends.vmm.region import DeviceMemory
from sleepbackends.xpu.backend import XpuBackend
from sleepbackends.xpu.options import XpuOptions
from tests.native.build import (
    FOLDER,
    HOST_LIBRARY,
    HOST_SOURCES,
    LEVEL_ZERO_LIBRARY,
    LIBRARY_FLAGS,
    STRICT,
)
from tests.simulators.compiling import DEFAULT_DIRECTORY, compile_c
from tests.simulators.level_zero import Simulator, load
from tests.xpu.mutations import chosen, native_sources

DEVICES = 2
PAGE_BYTES = 64 << 10
LARGE_PAGE_BYTES = 2 << 20
DEVICE_LOST, OUT_OF_DEVICE_MEMORY, UNSUPPORTED_FEATURE = 0x70000001, 0x70000003, 0x78000003
INVALID_ARGUMENT, UNKNOWN = 0x78000004, 0x7FFFFFFE

Make = Callable[..., XpuBackend]


@pytest.fixture(scope="session")
def level_zero_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sources = native_sources(chosen(), tmp_path_factory.mktemp("sources"))
    flags = [*LIBRARY_FLAGS, *STRICT, f"-I{FOLDER}", "-ldl"]
    return compile_c(DEFAULT_DIRECTORY, LEVEL_ZERO_LIBRARY, sources, flags, [FOLDER / "driver.h"])


@pytest.fixture(scope="session")
def host_library() -> Path:
    headers = [FOLDER / "fingerprint.h"]
    flags = [*LIBRARY_FLAGS, "-O3"]
    return compile_c(DEFAULT_DIRECTORY, HOST_LIBRARY, HOST_SOURCES, flags, headers)


@pytest.fixture
def simulator(
    level_zero_library: Path,
    host_library: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Simulator]:
    simulator = load()
    monkeypatch.setenv("ZES_ENABLE_SYSMAN", "1")  # as it was when the loader was loaded
    monkeypatch.setattr(Accelerator, "import_torch", _no_torch)
    simulator.reset()
    simulator.set("devices", DEVICES)
    # The library remembers handles and extents of this process: a copy is another library.
    folder = tmp_path / "native"
    folder.mkdir()
    shutil.copy(level_zero_library, folder)
    (folder / HOST_LIBRARY).symlink_to(host_library)
    monkeypatch.setattr(address_space, "_FOLDER", folder)
    yield simulator
    violations = simulator.violations()
    simulator.reset()
    assert not violations, "the driver was misused"


def _no_torch(accelerator: Accelerator) -> Any:
    raise UnsupportedOperationError("torch is not installed")


@pytest.fixture
def make(simulator: Simulator) -> Iterator[Make]:
    made = []

    def make(settings: BackendSettings | None = None, **options: Any) -> XpuBackend:
        made.append(XpuBackend(XpuOptions.model_validate(options), settings))
        return made[-1]

    yield make
    for backend in made:
        backend.close()
    check_nothing_is_held(simulator)


def check_nothing_is_held(simulator: Simulator) -> None:
    """Check what a closed backend must have given back."""
    for name in ("imported_bytes", "queued", "lists", "events", "pools"):
        assert simulator.usage(name) == 0, name


def filled(
    backend: XpuBackend, tag: str, size_bytes: int, byte: int, device: int = 0
) -> DeviceMemory:
    """Allocate memory full of a byte."""
    with backend.region(tag, device) as region:
        memory = region.buffer(size_bytes)
    memory.write(bytes([byte]) * size_bytes)
    return memory


def holds(memory: DeviceMemory, byte: int) -> bool:
    """Tell whether memory is full of a byte."""
    return memory.read() == bytes([byte]) * memory.size_bytes
