from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sleepbackends.errors import UnsupportedOperationError
from sleepbackends.interpreter import python_command


def test_it_finds_what_this_process_finds_and_nothing_of_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "it's \\ there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "tp_module.py").write_text(
            f"import sys\nassert __name__ == '__main__'\nprint({folder.name!r}, sys.argv[1:])\n"
        )
    (here / "runpy.py").write_text("raise SystemExit('of the working directory')")
    monkeypatch.setattr(sys, "path", [str(there), there, *sys.path])
    done = subprocess.run(
        python_command("tp_module", "a b", "-c"),
        cwd=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == (f"{there.name} ['a b', '-c']\n", "")


@pytest.mark.parametrize("executable", [None, ""])
def test_without_an_executable(monkeypatch: pytest.MonkeyPatch, executable: str | None) -> None:
    monkeypatch.setattr(sys, "executable", executable)
    with pytest.raises(UnsupportedOperationError, match="no Python that could run tp_module"):
        python_command("tp_module")


def test_a_frozen_program_is_not_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "frozen", True, raising=False)
    with pytest.raises(UnsupportedOperationError, match="no Python"):
        python_command("tp_module")
