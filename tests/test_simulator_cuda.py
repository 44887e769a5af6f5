"""The simulated CUDA driver through the real bindings: devices, contexts, faults, reset."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.simulators.cuda import Simulator, build, environment, find_compiler, loaded_or_skip
from tests.simulators.cuda.driving import MIB, UNIT_BYTES, Driven, elsewhere, read

STALE = bytes([0xD7])
NEED_A_CONTEXT = [
    ("cuMemGetInfo",),
    ("cuMemAddressReserve", UNIT_BYTES, 0, 0, 0),
    ("cuMemUnmap", UNIT_BYTES, UNIT_BYTES),
    ("cuMemRelease", 1),
    ("cuMemAlloc", 1),
    ("cuCtxSynchronize",),
    ("cuCtxGetDevice",),
    ("cuStreamCreate", 0),
    ("cuStreamSynchronize", 0),
    ("cuEventCreate", 0),
    ("cuMemHostAlloc", 1, 0),
]


class TestBuilding:
    def test_it_is_done_once(self, simulator: Simulator) -> None:
        before = simulator.path.stat().st_mtime_ns
        assert build() == simulator.path
        assert simulator.path.stat().st_mtime_ns == before

    def test_without_a_compiler_tests_are_skipped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        with pytest.raises(pytest.skip.Exception, match="needs a C compiler"):
            loaded_or_skip()
        with pytest.raises(RuntimeError, match="no C compiler"):
            build()

    def test_a_compiler_that_fails_is_heard(
        self, simulator: Simulator, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "cc").write_text("#!/bin/sh\necho no such thing >&2\nexit 1\n")
        (tmp_path / "cc").chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        with pytest.raises(RuntimeError, match="no such thing"):
            build(tmp_path)

    def test_another_driver_is_left_alone(self, simulator: Simulator, tmp_path: Path) -> None:
        other, soname = tmp_path / "libcuda.so.1", "-Wl,-soname,libcuda.so.1"
        command = [find_compiler() or "", "-shared", soname, "-o", str(other), "-xc", "/dev/null"]
        subprocess.run(command, check=True)
        code = f"""if True:
            import ctypes
            from tests.simulators.cuda import load
            from pathlib import Path
            ctypes.CDLL({str(other)!r})
            try:
                load(Path({str(simulator.path)!r}))
            except RuntimeError as error:
                print(error)
        """
        env = environment(tmp_path) | {"PYTHONPATH": str(Path(__file__).parents[1])}
        output = subprocess.check_output([sys.executable, "-c", code], env=env, text=True)
        assert output.startswith("another libcuda.so.1 is loaded")

    def test_a_subprocess_gets_its_environment(self, simulator: Simulator) -> None:
        code = "from cuda.bindings import driver as d; d.cuInit(0); print(d.cuDeviceGetCount()[1])"
        env = environment(simulator.path.parent, devices=5)
        assert subprocess.check_output([sys.executable, "-c", code], env=env) == b"5\n"


class TestDevices:
    def test_the_bindings_find_it(self, simulator: Simulator) -> None:
        cuda = Driven(None)
        assert cuda.call("cuDriverGetVersion") == 13000
        assert cuda.refusal("cuDeviceGetCount") == "NOT_INITIALIZED"
        simulator.set_devices(3)
        cuda.call("cuInit", 0)
        assert cuda.call("cuDeviceGetCount") == 3
        with pytest.raises(ValueError, match="sim_set_devices"):
            simulator.set_devices(2)

    def test_without_devices(self, simulator: Simulator) -> None:
        simulator.set_devices(0)
        assert Driven(None).refusal("cuInit", 0) == "NO_DEVICE"

    def test_what_devices_say_of_themselves(self, simulator: Simulator) -> None:
        simulator.set_devices(2)
        simulator.set_total_bytes(64 * MIB, device=1)
        cuda = Driven()
        attribute = cuda.bindings.CUdevice_attribute
        names = {
            "VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED": 1,
            "GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED": 1,
            "COMPUTE_CAPABILITY_MAJOR": 9,
            "MULTIPROCESSOR_COUNT": 132,
            "INTEGRATED": 0,
            "PCI_BUS_ID": 0x11,
        }
        for name, value in names.items():
            number = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            assert cuda.call("cuDeviceGetAttribute", number, 1) == value
        uuids = [bytes(cuda.call("cuDeviceGetUuid", device).bytes) for device in (0, 1)]
        assert uuids[0] != uuids[1]
        assert cuda.call("cuDeviceGetPCIBusId", 13, 1).startswith(b"0000:11:00.0")
        assert cuda.call("cuDeviceGetName", 32, 0).startswith(b"Simulated GPU")
        assert [cuda.call("cuDeviceTotalMem", device) for device in (0, 1)] == [8 << 30, 64 * MIB]
        assert cuda.refusal("cuDeviceGet", 2) == "INVALID_DEVICE"
        name = cuda.call("cuGetErrorName", cuda.bindings.CUresult.CUDA_ERROR_OUT_OF_MEMORY)
        assert name == b"CUDA_ERROR_OUT_OF_MEMORY"

    def test_a_device_without_virtual_memory(self, simulator: Simulator, cuda: Driven) -> None:
        simulator.set_attribute(102, 0)
        assert cuda.refusal("cuMemCreate", UNIT_BYTES, cuda.prop(), 0) == "NOT_SUPPORTED"


class TestContexts:
    @pytest.mark.parametrize("call", NEED_A_CONTEXT, ids=lambda call: str(call[0]))
    def test_a_thread_has_none_at_first(self, cuda: Driven, call: tuple[str | int, ...]) -> None:
        found: list[str] = []
        function, *arguments = call
        thread = threading.Thread(
            target=lambda: found.append(cuda.refusal(str(function), *arguments))
        )
        thread.start()
        thread.join()
        assert found == ["INVALID_CONTEXT"]

    def test_current_contexts_are_a_stack(self, simulator: Simulator) -> None:
        simulator.set_devices(2)
        cuda = Driven(2)
        cuda.call("cuCtxPushCurrent", cuda.contexts[1])
        assert int(cuda.call("cuCtxGetDevice")) == 1
        assert int(cuda.call("cuCtxPopCurrent")) == int(cuda.contexts[1])
        assert int(cuda.call("cuCtxGetDevice")) == 0
        cuda.call("cuCtxSetCurrent", 0)
        assert int(cuda.call("cuCtxGetCurrent")) == 0
        assert cuda.refusal("cuCtxPopCurrent") == "INVALID_CONTEXT"

    def test_the_last_release_ends_it(self, cuda: Driven) -> None:
        cuda.call("cuDevicePrimaryCtxRetain", 0)
        cuda.call("cuMemAlloc", 1)
        cuda.call("cuDevicePrimaryCtxRelease", 0)
        assert cuda.call("cuDevicePrimaryCtxGetState", 0)[1] == 1
        cuda.call("cuDevicePrimaryCtxRelease", 0)
        assert cuda.call("cuDevicePrimaryCtxGetState", 0)[1] == 0
        assert cuda.refusal("cuMemGetInfo") == "CONTEXT_IS_DESTROYED"
        assert cuda.refusal("cuDevicePrimaryCtxRelease", 0) == "INVALID_CONTEXT"
        cuda.call("cuDevicePrimaryCtxRetain", 0)
        assert cuda.free_bytes() == 8 << 30

    def test_a_fork_has_no_driver(self, simulator: Simulator) -> None:
        body = "if os.fork() == 0: os._exit(cuda.refusal('cuMemGetInfo') != 'NOT_INITIALIZED')"
        child = elsewhere(f"{body}\nprint(os.wait()[1])")
        assert child.communicate()[0] == "0\n"


class TestFaults:
    def test_several_at_once(self, simulator: Simulator, cuda: Driven) -> None:
        simulator.fail("cuMemCreate", cuda.error("OUT_OF_MEMORY"), nth=2)
        simulator.fail("cuMemUnmap", cuda.error("UNKNOWN"), times=2)
        assert simulator.pending_faults() == 2
        block = cuda.block()
        assert cuda.refusal("cuMemCreate", UNIT_BYTES, cuda.prop(), 0) == "OUT_OF_MEMORY"
        for _ in range(2):
            assert cuda.refusal("cuMemUnmap", block.address, UNIT_BYTES) == "UNKNOWN"
            assert read(block.address) == STALE * 4
        assert simulator.pending_faults() == 0
        cuda.drop(block)
        assert simulator.calls("cuMemCreate") == 2
        assert simulator.calls("cuMemUnmap") == 3

    def test_for_good_until_cleared(self, simulator: Simulator, cuda: Driven) -> None:
        simulator.fail("cuMemHostAlloc", cuda.error("OPERATING_SYSTEM"), times=None)
        for _ in range(3):
            assert cuda.refusal("cuMemHostAlloc", 1, 0) == "OPERATING_SYSTEM"
        simulator.clear_faults()
        cuda.call("cuMemHostAlloc", 1, 0)

    def test_wrong_ones_are_refused(self, simulator: Simulator) -> None:
        for function, error, nth in [("cuMemMake", 2, 1), ("cuMemMap", 0, 1), ("cuMemMap", 2, 0)]:
            with pytest.raises(ValueError, match="sim_fail"):
                simulator.fail(function, error, nth)
        with pytest.raises(ValueError, match="cuMemMake"):
            simulator.calls("cuMemMake")

    def test_reset_forgets_everything(self, simulator: Simulator, cuda: Driven) -> None:
        block = cuda.block()
        cuda.call("cuMemHostAlloc", 1, 0)
        cuda.stream()
        simulator.fail("cuInit", 1)
        simulator.reset()
        assert simulator.calls("cuMemCreate") == simulator.pending_faults() == 0
        assert not simulator.reservations()
        assert not simulator.mappings()
        assert not simulator.pinned_ranges()
        assert cuda.refusal("cuMemGetInfo") == "NOT_INITIALIZED"
        cuda.call("cuInit", 0)
        assert cuda.refusal("cuCtxGetDevice") == "INVALID_CONTEXT"
        cuda = Driven()
        assert simulator.process_usage().live_streams == 0
        assert cuda.refusal("cuMemRelease", block.handle) == "INVALID_VALUE"
        assert simulator.violations() == {"unknown_handle": 1}
