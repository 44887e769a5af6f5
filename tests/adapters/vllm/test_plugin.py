"""When the plugin takes part in vLLM, and that it leaves it alone otherwise."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest

from sleepbackends.adapters.vllm import plugin
from sleepbackends.adapters.vllm.allocator import installed
from sleepbackends.adapters.vllm.versions import SUPPORTED
from sleepbackends.registry import Registry
from tests.adapters.vllm.conftest import WITH_OPTION
from tests.adapters.vllm.engine import prepare, start_worker, vllm_config
from tests.adapters.vllm.released import ReleasedVllm
from tests.simulators.pool_torch import PoolTorch


def names() -> set[str]:
    from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

    return set(SleepModeBackendFactory._registry)


def constructor() -> Any:
    from vllm.v1.worker.worker_base import WorkerBase

    return WorkerBase.__init__


def hooked(torch: PoolTorch, **model: Any) -> bool:
    """Whether a worker would take our memory."""
    worker = start_worker_only(torch, **model)
    return "init_device" in vars(worker)


def start_worker_only(torch: PoolTorch, **model: Any) -> Any:
    import vllm.v1.worker.worker_base as module

    wrapper = module.WorkerWrapperBase
    init_device, wrapper.init_device = wrapper.init_device, lambda _: None
    try:
        return start_worker(torch, **model).worker
    finally:
        wrapper.init_device = init_device


def test_vllm_finds_it() -> None:
    (found,) = [e for e in entry_points(group="vllm.general_plugins") if e.name == "sleepbackends"]
    assert found.load() is plugin.register


def test_importing_it_is_cheap() -> None:
    code = (
        "import sys; import sleepbackends.adapters.vllm.plugin; "
        "print({'torch', 'numpy', 'cuda', 'pydantic', 'pluggy', 'vllm'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_unchosen_it_changes_no_more_than_it_must(vllm: ReleasedVllm, torch: PoolTorch) -> None:
    prepare(vllm)
    before = constructor()
    known = names()
    plugin.register()
    if vllm.version in WITH_OPTION:
        ours = {f"sleepbackends-{name}" for name in Registry.load().specs}
        assert names() - known == {"sleepbackends"} | ours
        assert "sleepbackends-cumem" in ours
    else:
        assert names() == known
        assert constructor() is before
    assert not hooked(torch)
    assert "vllm.device_allocator.cumem" not in sys.modules


@pytest.mark.parametrize("value", ["1", "force", " FORCE "])
def test_the_environment_chooses_it(
    vllm: ReleasedVllm,
    torch: PoolTorch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str,
) -> None:
    prepare(vllm)
    monkeypatch.setenv("SLEEPBACKENDS_VLLM", value)
    for _ in range(2):
        plugin.register()
    assert not caplog.records
    assert hooked(torch)
    assert not hooked(torch, enable_sleep_mode=False)
    assert not hooked(torch, sleep_mode_backend="another")
    placed = constructor()
    plugin.register()
    assert constructor() is placed
    assert installed() is None
    assert "vllm.device_allocator.cumem" not in sys.modules, "not before there is a device"


def test_a_worker_without_a_model_is_none_of_its_business(
    vllm: ReleasedVllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(vllm)
    monkeypatch.setenv("SLEEPBACKENDS_VLLM", "1")
    plugin.register()
    from vllm.v1.worker.worker_base import WorkerBase

    config = vllm_config()
    config.model_config = None
    worker = WorkerBase(config, 0, 0, "")
    assert "init_device" not in vars(worker)
    assert not caplog.records


@pytest.mark.parametrize("version", WITH_OPTION, indirect=True)
def test_an_option_chooses_it(vllm: ReleasedVllm, torch: PoolTorch) -> None:
    prepare(vllm)
    plugin.register()
    for name in ("sleepbackends", "sleepbackends-cumem"):
        assert hooked(torch, sleep_mode_backend=name)
    assert not hooked(torch, sleep_mode_backend="sleepbackendscumem")


def test_naming_the_plugin_chooses_it_where_there_is_no_option(
    vllm: ReleasedVllm, torch: PoolTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(vllm)
    monkeypatch.setenv("VLLM_PLUGINS", "other, sleepbackends")
    plugin.register()
    assert hooked(torch) is (vllm.version not in WITH_OPTION)


def test_it_can_be_switched_off(
    vllm: ReleasedVllm, torch: PoolTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(vllm)
    before = constructor(), names()
    monkeypatch.setenv("SLEEPBACKENDS_VLLM", "0")
    monkeypatch.setenv("VLLM_PLUGINS", "sleepbackends")
    plugin.register()
    assert (constructor(), names()) == before


def test_an_unknown_release_is_not_hooked(
    vllm: ReleasedVllm,
    torch: PoolTorch,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    prepare(vllm)
    before = constructor()
    monkeypatch.setenv("SLEEPBACKENDS_VLLM", "1")
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "9.9.9")
    plugin.register()
    (warning,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert all(version in warning.getMessage() for version in SUPPORTED)
    assert "SLEEPBACKENDS_VLLM=force" in warning.getMessage()
    assert constructor() is before
    # Named all the same, ours stands for vLLM's own.
    from vllm.device_allocator.sleep_mode_backend import CuMemBackend, SleepModeBackendFactory

    backend: Any = SleepModeBackendFactory.get_backend_class("sleepbackends")()
    assert isinstance(backend._vllm_s, CuMemBackend)
    assert backend.state() == "RUNNING"
    assert backend.preserves_communicators() is CuMemBackend.preserves_communicators()


def test_an_unknown_release_can_be_forced(
    vllm: ReleasedVllm, torch: PoolTorch, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare(vllm)
    monkeypatch.setenv("SLEEPBACKENDS_VLLM", "force")
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "9.9.9")
    plugin.register()
    assert hooked(torch)


@pytest.mark.parametrize("version", ["0.26.0"], indirect=True)
def test_a_release_without_backends_is_left_alone(
    vllm: ReleasedVllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    vllm.stand_in("vllm", __version__="0.1.0", __path__=[])
    plugin.register()
    assert len(caplog.records) == 1


@pytest.mark.parametrize("value", ["yes", "2", "cumem"])
def test_a_misspelt_variable_is_said_and_stops_nothing(
    vllm: ReleasedVllm,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    value: str,
) -> None:
    prepare(vllm)
    before = constructor()
    monkeypatch.setenv("SLEEPBACKENDS_VLLM", value)
    plugin.register()
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"SLEEPBACKENDS_VLLM={value!r} means nothing" in caplog.text
    assert constructor() is before


def test_a_vllm_that_is_not_as_it_was_still_starts(
    vllm: ReleasedVllm, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    prepare(vllm)
    monkeypatch.setenv("SLEEPBACKENDS_VLLM", "1")
    monkeypatch.delattr(sys.modules["vllm.v1.worker.worker_base"], "WorkerBase")
    plugin.register()
    assert "leaves vLLM alone" in caplog.text
