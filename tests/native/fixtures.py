"""A simulated driver and native libraries for each test, as if the process had just begun."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from sleepbackends.cumem import fingerprint, nvrtc, packing
from sleepbackends.cumem.images import Images
from sleepbackends.errors import BackendUnavailableError
from sleepbackends.vmm import address_space, reclaim
from sleepbackends.vmm.warm_up import WarmUp
from tests.native.build import (
    HOST_LIBRARY,
    LIBRARY,
    LIBRARY_FLAGS,
    compile_host,
    compile_native,
)
from tests.simulators.cuda import Simulator, loaded_or_skip

KIB = 1 << 10
GRANULE_BYTES = 64 * KIB
DEVICES = 2
ARCHITECTURE = 90
"""Of the simulated devices."""


@pytest.fixture(scope="session")
def native_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    loaded_or_skip()
    folder = tmp_path_factory.mktemp("native")
    compile_host(folder / HOST_LIBRARY)
    return compile_native(folder / LIBRARY, LIBRARY_FLAGS)


@pytest.fixture
def kernel_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Images:
    """A user's cache of this test alone, with images in it that the simulated driver loads.

    Those of the fingerprint are returned.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try:
        version = nvrtc.version()
    except BackendUnavailableError:
        version = "0.0"
    images = [Images(each.kernel_source()) for each in (fingerprint, packing)]
    for each in images:
        each.keep(b"any image", ARCHITECTURE, version)
    return images[0]


@pytest.fixture
def no_fingerprints(kernel_images: Images, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver without kernels: all is copied as it is, and no memory is held for them."""

    def missing() -> str:
        raise BackendUnavailableError("no NVRTC in this test")

    monkeypatch.setattr(nvrtc, "version", missing)
    shutil.rmtree(kernel_images.path(ARCHITECTURE, "").parent)


@pytest.fixture
def simulator(
    native_library: Path,
    kernel_images: Images,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    (folder / HOST_LIBRARY).symlink_to(native_library.with_name(HOST_LIBRARY))
    monkeypatch.setattr(address_space, "_FOLDER", folder)
    # Many tests count what is held on a device, or calls; those of these have them again.
    monkeypatch.setattr(reclaim, "DELAY_S", 3600.0)
    monkeypatch.setattr(WarmUp, "begin", lambda _, device: None)
    yield simulator
    violations = simulator.violations()
    simulator.reset()
    assert not violations, "the driver was misused"
