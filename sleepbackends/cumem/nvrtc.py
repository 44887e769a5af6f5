"""NVRTC, NVIDIA's compiler as a library: one kernel for one architecture, without a GPU.

It comes with every CUDA build of torch, and as ``nvidia-cuda-nvrtc``; it may be missing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from sleepbackends.errors import BackendUnavailableError, MechanismError


class KernelSource(NamedTuple):
    """What a kernel is compiled from.

    Parameters
    ----------
    name : str
        Of the kernel; no two sources share one.
    text : bytes
        The CUDA C++ source.
    headers : tuple of (str, bytes)
        What it includes, by the names it uses.
    options : tuple of str
        For the compiler, beside the architecture.
    """

    name: str
    text: bytes
    headers: tuple[tuple[str, bytes], ...] = ()
    options: tuple[str, ...] = ()


def version() -> str:
    """Return the version of NVRTC.

    Raises
    ------
    BackendUnavailableError
        If it cannot be loaded.
    """
    try:
        from cuda.bindings import nvrtc

        code, major, minor = nvrtc.nvrtcVersion()
    # The bindings look for the library at the first call.
    except (ImportError, OSError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise BackendUnavailableError(
            f"NVRTC cannot be loaded: {reason}",
            hint="pip install nvidia-cuda-nvrtc, of the driver's major version",
        ) from error
    _check(code, "asking NVRTC for its version")
    return f"{major}.{minor}"


def compile_for(source: KernelSource, architecture: int) -> bytes:
    """Compile a kernel and return what the driver loads.

    Parameters
    ----------
    source : KernelSource
        What to compile.
    architecture : int
        The device's compute capability, as 90 for 9.0. For one that this NVRTC does not know the
        result is for the driver to translate (PTX), else it is machine code (CUBIN).

    Raises
    ------
    BackendUnavailableError
        If NVRTC cannot be loaded.
    MechanismError
        If it fails; the message holds the first line of what it printed.
    """
    version()
    from cuda.bindings import nvrtc

    known = _call(nvrtc.nvrtcGetSupportedArchs)
    if architecture in known:
        return _compile(nvrtc, source, f"sm_{architecture}", "CUBIN")
    older = [each for each in known if each < architecture]
    if not older:
        raise MechanismError(
            f"NVRTC {version()} knows no architecture up to {architecture}: {known}",
            hint="install an older nvidia-cuda-nvrtc",
        )
    return _compile(nvrtc, source, f"compute_{max(older)}", "PTX")


def _compile(nvrtc: Any, source: KernelSource, target: str, form: str) -> bytes:
    names = [name.encode() for name, _ in source.headers]
    texts = [text for _, text in source.headers]
    file_name = f"{source.name}.cu".encode()
    program = _call(nvrtc.nvrtcCreateProgram, source.text, file_name, len(names), texts, names)
    try:
        options = [f"--gpu-architecture={target}".encode(), *map(str.encode, source.options)]
        (code,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
        if code:
            log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            _check(code, f"compiling {source.name} for {target}", log.decode(errors="replace"))
        return _text(
            getattr(nvrtc, f"nvrtcGet{form}Size"), getattr(nvrtc, f"nvrtcGet{form}"), program
        )
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _text(size_of: Callable[..., Any], get: Callable[..., Any], program: Any) -> bytes:
    text = bytearray(_call(size_of, program))
    _call(get, program, text)
    return bytes(text)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    code, *results = function(*args)
    _check(code, function.__name__)
    return results[0] if results else None


def _check(code: Any, what: str, log: str = "") -> None:
    if code:
        printed = next((line for line in log.splitlines() if line.strip()), "")
        raise MechanismError(
            f"{what} failed: {code.name}{': ' if printed else ''}{printed}",
            hint="install another nvidia-cuda-nvrtc",
        )
