"""The public surface changes on purpose only."""

from __future__ import annotations

import difflib
import subprocess
import sys
from pathlib import Path

from tests import public_surface


def test_the_public_surface_is_what_was_written_down() -> None:
    before = public_surface.FROZEN.read_text(encoding="utf-8").splitlines()
    now = public_surface.text().splitlines()
    difference = [
        line
        for line in difflib.unified_diff(before, now, "written down", "now", n=0, lineterm="")
        if not line.startswith("@@")
    ]
    assert not difference, "\n".join(
        [
            "the public surface has changed:",
            *difference,
            "",
            "a line that goes or changes may break somebody: see Compatibility in CONTRIBUTING.md.",
            "If it is meant: python -m tests.public_surface --write",
        ]
    )


def test_it_is_told_without_being_written() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.public_surface"],
        cwd=Path(__file__).parents[1],
        check=True,
        capture_output=True,
        text=True,
    )
    assert done.stdout == public_surface.text()


def test_a_change_shows() -> None:
    """Each kind of thing has a line that would change with it."""
    lines = public_surface.text()
    for line in (
        "sleepbackends.API_VERSION: int = 1\n",
        "  OFFLOAD = 'offload'\n",
        "  supports_offload: bool\n",
        "  size_bytes: int (required)\n",
        "  timeout_s: 300.0\n",
        (
            "  suspend(self, level: int = 1, *, policies: Policies | None = None, "
            "control: Control | None = None) -> SuspendReport\n"
        ),
        "  message: str (property)\n",
        "class sleepbackends.UnknownTagError(RequestError)\n",
        "sleepbackends.hostmemory.driver.reserve(size_bytes: int) -> int\n",
        "  test_level_1_keeps_contents(self, backend: Any) -> None\n",
        "fixture sleepbackends.testing.pytest_plugin.sleep_device\n",
        "$ sleepbackends new --directory NAME\n",
    ):
        assert line in lines, line
