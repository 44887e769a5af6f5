"""Whether a backend over a device's virtual memory works on the device that is here.

``python -m sleepbackends.testing.selfcheck xpu`` runs the contract suite, a cycle of suspend and
resume, and a small benchmark, and prints one block to paste into an issue. For people who have a
device that the developers do not have.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import os
import platform
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from sleepbackends.availability import Availability
from sleepbackends.errors import SleepBackendsError
from sleepbackends.interpreter import python_command
from sleepbackends.registry import Registry
from sleepbackends.settings import BackendSettings
from sleepbackends.testing import checked_backend

GIB = 1 << 30
ROUNDS = 3
TIMEOUT_S = 1800.0
PIECE_BYTES = 64 << 20

_PACKAGES = ("sleepbackends", "torch", "intel-sycl-rt", "cuda-bindings")


def main(arguments: Sequence[str]) -> int:
    """Check what the arguments say, and print the block; returns 0 if everything is well.

    Parameters
    ----------
    arguments : sequence of str
        As of a command line.
    """
    asked = _parser().parse_args(arguments)
    registry = Registry.load()
    answer = registry.probe(asked.backend)
    lines = [*_machine(), f"{asked.backend}: {_said(answer)}"]
    well = answer.ok
    if well:
        checks: list[tuple[str, Callable[[], Iterator[str]]]] = [
            ("contract", lambda: _contract(asked.backend, asked.sequences)),
            ("cycle", lambda: _cycle(registry, asked.backend, asked.size_mib << 20)),
        ]
        for name, check in checks:
            lines.append(f"-- {name}")
            try:
                lines += check()
            except Exception as error:  # noqa: BLE001 - whatever happens is what is reported
                well = False
                lines.append(f"FAILED: {type(error).__name__}: {error}")
                lines += [f"  hint: {hint}" for hint in [getattr(error, "hint", "")] if hint]
    verdict = "something is wrong: please report this block" if answer.ok else "nothing was checked"
    lines.append("everything is well" if well else verdict)
    sys.stdout.write("\n".join(["```text", *lines, "```", ""]))
    return 0 if well else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n\n")[0] if __doc__ else "")
    parser.add_argument("backend", help="the name of the backend, as cumem or xpu")
    parser.add_argument("--size-mib", type=int, default=1024, help="the memory of the cycle")
    parser.add_argument("--sequences", type=int, default=200, help="how many random sequences")
    return parser


def _machine() -> Iterator[str]:
    yield f"{platform.system()} {platform.release()}, Python {platform.python_version()}"
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


def _said(answer: Availability) -> str:
    if answer.ok:
        return answer.reason
    return f"not usable: {answer.reason}; {answer.hint}"


def _contract(backend: str, sequences: int) -> Iterator[str]:
    """Run the contract suite in a process, as a device that is lost would end this one's use."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        module = Path(checked_backend.__file__)
        options = [
            "-q",
            "--tb=line",
            "-p",
            "no:cacheprovider",
            "-c",
            os.devnull,
            f"--rootdir={folder}",
        ]
        done = subprocess.run(  # noqa: S603 - runs pytest on a module of ours
            [*python_command("pytest", *options, f"--junitxml={report}", str(module))],
            env={
                **os.environ,
                checked_backend.NAME_VARIABLE: backend,
                checked_backend.SEQUENCES_VARIABLE: str(sequences),
            },
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
            check=False,
        )
        if not report.exists():
            said = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise RuntimeError(f"pytest ended with {done.returncode}: {''.join(said)}")
        suite = ET.parse(report).getroot()[0]  # noqa: S314 - written by our own process
    count = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
    yield ", ".join(f"{number} {name}" for name, number in count.items())
    if done.returncode:
        failed = [
            f"{case.get('name')}: {problem.get('message', '')}"
            for case in suite.iter("testcase")
            for problem in case
            if problem.tag in ("failure", "error")
        ]
        raise RuntimeError("; ".join(failed) or f"pytest ended with {done.returncode}")


def _cycle(registry: Registry, name: str, size_bytes: int) -> Iterator[str]:
    """Suspend and resume memory with known bytes, and see what the device has meanwhile."""
    backend: Any = registry.create(name, {}, BackendSettings())
    try:
        with backend.region("weights") as region:
            sizes = [PIECE_BYTES] * (size_bytes // PIECE_BYTES)
            pieces = [region.buffer(size) for size in sizes or [size_bytes]]
        for number, piece in enumerate(pieces):
            piece.write(_pattern(number, piece.size_bytes))
        for turn in range(ROUNDS):
            yield from _turn(backend, sum(piece.size_bytes for piece in pieces), turn)
        wrong = [
            number
            for number, piece in enumerate(pieces)
            if piece.read() != _pattern(number, piece.size_bytes)
        ]
        if wrong:
            raise RuntimeError(f"{len(wrong)} of {len(pieces)} pieces hold other bytes: {wrong}")
        yield f"all bytes of {len(pieces)} pieces are as they were"
    finally:
        with contextlib.suppress(SleepBackendsError):
            backend.close()


def _turn(backend: Any, size_bytes: int, turn: int) -> Iterator[str]:
    awake = backend.driver.free_bytes(0)
    down_s, report = _timed(lambda: backend.suspend(1))
    asleep = backend.driver.free_bytes(0)
    up_s, _ = _timed(backend.resume)
    yield (
        f"{turn}: suspend {down_s:.3f} s, {_rate(report.copied_bytes, down_s)}, "
        f"resume {up_s:.3f} s, {_rate(size_bytes, up_s)}, "
        f"{asleep - awake} bytes more were free between"
    )
    if asleep - awake < size_bytes // 2:
        raise RuntimeError(f"only {asleep - awake} of {size_bytes} bytes were given back")


def _rate(size_bytes: int, seconds: float) -> str:
    return f"{size_bytes / GIB:.2f} GiB at {size_bytes / GIB / max(seconds, 1e-9):.1f} GiB/s"


def _timed(call: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = call()
    return time.perf_counter() - started, result


def _pattern(number: int, size_bytes: int) -> bytes:
    """Return bytes in which no two pieces and no two shifts are equal."""
    unit = b"".join((number * 1000003 + i).to_bytes(8, "little") for i in range(1021))
    return (unit * (size_bytes // len(unit) + 1))[:size_bytes]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
