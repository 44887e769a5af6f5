"""The command line as a module."""

from __future__ import annotations

import subprocess
import sys

import sleepbackends


def test_it_is_the_command_line() -> None:
    command = [sys.executable, "-m", "sleepbackends", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == f"sleepbackends {sleepbackends.__version__}\n"
