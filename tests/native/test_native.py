"""The native library under the compiler's checkers, used by many threads at once."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Literal

import pytest

from tests.native.build import LIBRARY, LIBRARY_FLAGS, SOURCES, compile_native
from tests.simulators.cuda import build, environment, find_compiler

EXERCISER = Path(__file__).with_name("exerciser.c")


@pytest.fixture(autouse=True)
def _compiler() -> None:
    if find_compiler() is None:
        pytest.skip("needs a C compiler")


def exercise(
    tmp_path: Path, sanitizer: Literal["address", "thread"] | None, *arguments: str
) -> str:
    flags = ["-O1", "-g", "-Wno-conversion"]
    if sanitizer:
        flags += [f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]
    program = compile_native(tmp_path / "exerciser", flags, EXERCISER)
    driver = build(sanitizer=sanitizer)
    env = environment(driver.parent, devices=2) | {
        "TSAN_OPTIONS": "halt_on_error=1",
    }
    done = subprocess.run(
        [str(program), str(driver), *arguments],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_nothing_is_found(tmp_path: Path, sanitizer: Literal["address", "thread"]) -> None:
    assert exercise(tmp_path, sanitizer) == "done\n"


def test_forks_find_no_held_lock(tmp_path: Path) -> None:
    assert exercise(tmp_path, None, "and fork") == "done\n"


@pytest.mark.parametrize("driver", SOURCES)
def test_it_compiles_without_a_warning(tmp_path: Path, driver: str) -> None:
    library = compile_native(tmp_path / LIBRARY, LIBRARY_FLAGS, sources=SOURCES[driver])
    assert library.stat().st_size > 0
