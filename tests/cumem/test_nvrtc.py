"""Compiling kernels: by an NVRTC of our own making, and by the real one where it is installed."""

# ruff: noqa: N802 - the names are NVRTC's

from __future__ import annotations

import enum
import re
import sys
from typing import Any

import pytest

from sleepbackends.cumem import fingerprint, nvrtc, packing
from sleepbackends.cumem.nvrtc import KernelSource
from sleepbackends.errors import BackendUnavailableError, MechanismError

bindings = pytest.importorskip("cuda.bindings")


class Code(enum.IntEnum):
    SUCCESS = 0
    BUILTINS = 7
    COMPILATION = 6


class FakeNvrtc:
    """Writes down what it is asked to compile; its images name what they are."""

    def __init__(self) -> None:
        self.archs = [75, 90]
        self.code = Code.SUCCESS
        self.log = b""
        self.made: list[Any] = []
        self.destroyed = 0

    def nvrtcVersion(self) -> tuple[Any, ...]:
        return Code.SUCCESS, 13, 3

    def nvrtcGetSupportedArchs(self) -> tuple[Any, ...]:
        return Code.SUCCESS, self.archs

    def nvrtcCreateProgram(self, *arguments: Any) -> tuple[Any, ...]:
        self.made.append(arguments)
        return Code.SUCCESS, len(self.made)

    def nvrtcCompileProgram(self, program: int, count: int, options: list[bytes]) -> tuple[Any]:
        self.options = options
        assert count == len(options)
        return (self.code,)

    def nvrtcDestroyProgram(self, program: int) -> tuple[Any]:
        self.destroyed += 1
        return (Code.SUCCESS,)

    def __getattr__(self, name: str) -> Any:
        """``nvrtcGetCUBIN``, ``nvrtcGetPTXSize``, ``nvrtcGetProgramLog`` and the like."""
        form = name.removeprefix("nvrtcGet").removesuffix("Size")
        text = self.log if form == "ProgramLog" else form.encode()

        def size(program: int) -> tuple[Any, ...]:
            return Code.SUCCESS, len(text)

        def get(program: int, buffer: bytearray) -> tuple[Any]:
            buffer[:] = text
            return (Code.SUCCESS,)

        found = size if name.endswith("Size") else get
        found.__name__ = name
        return found


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeNvrtc:
    fake = FakeNvrtc()
    monkeypatch.setattr(bindings, "nvrtc", fake, raising=False)
    return fake


SOURCE = KernelSource("add", b"text", (("one.h", b"1"), ("two.h", b"2")), ("--std=c++17",))


def test_machine_code_for_what_it_knows(fake: FakeNvrtc) -> None:
    assert nvrtc.version() == "13.3"
    assert nvrtc.compile_for(SOURCE, 90) == b"CUBIN"
    assert fake.made == [(b"text", b"add.cu", 2, [b"1", b"2"], [b"one.h", b"two.h"])]
    assert fake.options == [b"--gpu-architecture=sm_90", b"--std=c++17"]
    assert fake.destroyed == 1


def test_ptx_of_the_newest_before_for_what_it_does_not(fake: FakeNvrtc) -> None:
    assert nvrtc.compile_for(SOURCE, 100) == b"PTX"
    assert fake.options[0] == b"--gpu-architecture=compute_90"
    with pytest.raises(MechanismError, match="no architecture up to 70"):
        nvrtc.compile_for(SOURCE, 70)


def test_what_it_prints_is_in_the_error(fake: FakeNvrtc) -> None:
    fake.code, fake.log = Code.COMPILATION, b"\nadd.cu(1): error: nonsense\nmore\n"
    with pytest.raises(MechanismError, match=r"add for sm_90 failed: COMPILATION: add\.cu\(1\)"):
        nvrtc.compile_for(SOURCE, 90)
    assert fake.destroyed == 1


def test_a_program_that_cannot_be_made(fake: FakeNvrtc, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> tuple[Any, ...]:
        return Code.BUILTINS, None

    monkeypatch.setattr(fake, "nvrtcCreateProgram", refuse)
    with pytest.raises(MechanismError, match="refuse failed: BUILTINS"):
        nvrtc.compile_for(SOURCE, 90)


@pytest.mark.parametrize("error", [RuntimeError("not found\nsearched: here"), OSError("broken")])
def test_a_library_that_is_missing(
    fake: FakeNvrtc, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def missing() -> tuple[Any, ...]:
        raise error

    monkeypatch.setattr(fake, "nvrtcVersion", missing)
    for call in (nvrtc.version, lambda: nvrtc.compile_for(SOURCE, 90)):
        with pytest.raises(BackendUnavailableError, match="NVRTC cannot be loaded") as caught:
            call()
        assert "nvidia-cuda-nvrtc" in caught.value.hint
        assert "searched" not in caught.value.message


def test_bindings_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(bindings, "nvrtc", raising=False)
    monkeypatch.setitem(sys.modules, "cuda.bindings.nvrtc", None)
    with pytest.raises(BackendUnavailableError, match="NVRTC cannot be loaded"):
        nvrtc.version()


@pytest.mark.parametrize("source", [fingerprint.kernel_source(), packing.kernel_source()])
@pytest.mark.parametrize("architecture", [80, 90, 100])
def test_the_real_one_compiles_our_kernels(architecture: int, source: KernelSource) -> None:
    try:
        nvrtc.version()
    except BackendUnavailableError as error:
        pytest.skip(f"needs nvidia-cuda-nvrtc: {error.message}")
    image = nvrtc.compile_for(source, architecture)
    assert image.startswith(b"\x7fELF")
    kernels = re.findall(rb'extern "C" __global__[^(]*\([^)]*\)\s*(\w+)\(', source.text)
    assert kernels
    text = nvrtc.compile_for(source, 9999)
    for name in [*kernels, b"carry"]:
        assert name in image
        assert b".entry " + name in text
    with_errors = source._replace(text=b"no such thing;")
    with pytest.raises(MechanismError, match=rf"{source.name}\.cu\(1\): error"):
        nvrtc.compile_for(with_errors, architecture)
