"""What torch allocates in a region, whose kernels are waited for, and whose context is used."""

from __future__ import annotations

import ctypes
import platform
from typing import Any

import pytest

from sleepbackends.errors import BackendUnavailableError, UnsupportedOperationError
from sleepbackends.xpu import sycl
from sleepbackends.xpu.driver import XpuDriver
from tests.simulators.level_zero import Simulator
from tests.xpu.fixtures import LARGE_PAGE_BYTES, Make, filled, holds
from tests.xpu.stand_in import _WAIT, XpuTorch


def test_what_torch_allocates_carries_the_tag(
    simulator: Simulator, torch: XpuTorch, make: Make
) -> None:
    backend = make()
    with backend.region("weights"):
        tensor = torch.empty(LARGE_PAGE_BYTES)
    assert torch.empty(100).address == 0, "outside of a region torch allocates for itself"
    backend.driver.write(tensor.address, b"\x05" * LARGE_PAGE_BYTES, 0)
    address = tensor.address
    backend.suspend(1)
    assert simulator.usage("used_bytes") == 0
    backend.resume()
    assert simulator.read(address, LARGE_PAGE_BYTES) == b"\x05" * LARGE_PAGE_BYTES
    assert backend.state().tags["weights"].resident_bytes == LARGE_PAGE_BYTES
    del tensor
    assert backend.state().tags["weights"].blocks == 0
    assert simulator.usage("reserved_bytes") == 0


def test_memory_is_made_in_torchs_context(
    simulator: Simulator, torch: XpuTorch, make: Make
) -> None:
    backend = make()
    assert {backend.driver.device(d).context for d in (0, 1)} == {torch.context}
    assert simulator.usage("contexts") == 1


def test_more_than_there_is_makes_torch_raise_its_own_error(
    simulator: Simulator, torch: XpuTorch, make: Make
) -> None:
    simulator.set("total_bytes", LARGE_PAGE_BYTES)
    with make().region("weights"), pytest.raises(torch.OutOfMemoryError):
        torch.empty(2 * LARGE_PAGE_BYTES)


# A kernel that was queued before belongs to what is saved, and needs its memory until it ran


def test_a_suspend_waits_for_kernels(simulator: Simulator, torch: XpuTorch, make: Make) -> None:
    backend = make()
    memory = filled(backend, "weights", 5000, 1)
    simulator.engine_write(memory.address, 5000, 7)
    backend.suspend(1)
    assert simulator.usage("queued") == 0
    backend.resume()
    assert holds(memory, 7)


def test_a_discard_waits_for_kernels(simulator: Simulator, torch: XpuTorch, make: Make) -> None:
    backend = make()
    memory = filled(backend, "kv_cache", 5000, 1, device=1)
    simulator.engine_write(memory.address, 5000, 7, device=1)
    backend.discard(["kv_cache"])
    assert 1 in torch.synchronized


def test_freeing_waits_for_kernels_without_python(
    simulator: Simulator, torch: XpuTorch, make: Make
) -> None:
    backend = make()
    with backend.region("weights"):
        tensor = torch.empty(5000)
    simulator.engine_write(tensor.address, 5000, 7)
    torch.synchronized.clear()
    del tensor
    assert simulator.usage("queued") == 0, "the free waited"
    assert torch.synchronized == [], "and did not ask Python"
    assert simulator.usage("handles") == 0


def test_a_device_that_is_lost_while_it_is_waited_for(
    simulator: Simulator, torch: XpuTorch, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    memory = filled(backend, "weights", 5000, 1)

    def lost(device: int) -> None:
        raise RuntimeError("level_zero backend failed with error: 20 (UR_RESULT_ERROR_DEVICE_LOST)")

    with monkeypatch.context() as patch:
        patch.setattr(torch.xpu, "synchronize", lost)
        with pytest.raises(Exception, match="DEVICE_LOST") as caught:
            backend.suspend(1)
    assert not caught.value.recoverable  # type: ignore[attr-defined]
    assert holds(memory, 1)


# Unchanged memory


def test_unchanged_memory_is_not_copied_again(torch: XpuTorch, make: Make) -> None:
    backend = make(share_below_bytes=0)
    same, changed = filled(backend, "weights", 5000, 1), filled(backend, "weights", 6000, 2)
    assert backend.suspend(1).copied_bytes == 11000
    backend.resume()
    changed.write(bytes([3]) * 6000)
    assert backend.suspend(1).copied_bytes == 6000
    backend.resume()
    assert holds(same, 1)
    assert holds(changed, 3)


def test_without_torch_everything_is_copied(make: Make) -> None:
    backend = make()
    memory = filled(backend, "weights", 5000, 1)
    assert not backend.capabilities.supports_staging
    for _ in range(2):
        assert backend.suspend(1).copied_bytes == 5000
        backend.resume()
    assert holds(memory, 1)


# Handles


def test_the_two_ways_must_agree(torch: XpuTorch, simulator: Simulator) -> None:
    torch.queues[1].context += 8
    with pytest.raises(BackendUnavailableError, match=r"do not belong.*together") as caught:
        XpuDriver(torch)
    assert "xpu:1" in caught.value.message


def test_a_torch_on_another_runtime(torch: XpuTorch) -> None:
    torch.queues[0].backend = 1  # OpenCL
    with pytest.raises(BackendUnavailableError, match="not those of Level Zero") as caught:
        XpuDriver(torch)
    assert "ONEAPI_DEVICE_SELECTOR" in caught.value.hint


@pytest.mark.parametrize("name", ["C10", "SYCL"])
def test_a_torch_without_its_libraries(
    torch: XpuTorch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    absent: Any = "libabsent.so" if name == "C10" else ("libabsent.so.9", "libabsent.so.8")
    monkeypatch.setattr(sycl, name, absent)
    with pytest.raises(BackendUnavailableError, match=r"has not loaded libabsent"):
        XpuDriver(torch)


@pytest.mark.parametrize("name", ["_WAIT", "_NATIVE_CONTEXT", "_DEVICE_OF_QUEUE"])
def test_a_library_without_a_function(
    torch: XpuTorch, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(sycl, name, "_ZN6absentEv")
    with pytest.raises(BackendUnavailableError, match="_ZN6absentEv"):
        XpuDriver(torch)


def test_a_device_of_torchs_that_level_zero_does_not_list(
    torch: XpuTorch, simulator: Simulator
) -> None:
    stranger = torch.handles[1] + 8
    torch.queues[1].device = stranger
    wait = ctypes.cast(simulator.engine_wait_pointer, _WAIT)
    torch.tell_torch(1, torch.context, stranger, wait)
    with pytest.raises(BackendUnavailableError, match="xpu:1 is no device that Level Zero lists"):
        XpuDriver(torch)


def test_another_processor(torch: XpuTorch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    with pytest.raises(BackendUnavailableError, match="riscv64"):
        XpuDriver(torch)


def test_memory_that_was_made_before_torch_came(
    simulator: Simulator, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = make()
    memory = filled(backend, "weights", 5000, 1)
    torch = XpuTorch(simulator)
    with pytest.raises(BackendUnavailableError, match="other handles") as caught:
        XpuDriver(torch)
    assert "import torch before" in caught.value.hint
    memory.free()
    XpuDriver(torch)


# What cannot be


def test_a_torch_that_is_too_old(torch: XpuTorch, make: Make) -> None:
    torch.__version__ = "2.10.1+xpu"
    backend = make()
    with pytest.raises(UnsupportedOperationError, match=r"2\.10\.1"), backend.region("weights"):
        pytest.fail("a region was opened")
    torch.__version__ = "3.0.0"
    with backend.region("weights"):
        pass


def test_expandable_segments(torch: XpuTorch, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", "max_split_size_mb:64,expandable_segments:True")
    backend = make()
    with (
        pytest.raises(UnsupportedOperationError, match="PYTORCH_ALLOC_CONF"),
        backend.region("weights"),
    ):
        pytest.fail("a region was opened")


def test_graph_pools_are_not_there(make: Make) -> None:
    assert not hasattr(make(), "graph_pool"), "graphs on XPU were never tried"
