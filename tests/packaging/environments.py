"""The distributions of this working tree, and virtual environments that have one of them."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13")
"""Those that the package says it runs on."""


class Distributions(NamedTuple):
    """What is published."""

    sdist: Path
    wheel: Path


def index_problem(folder: Path) -> str:
    """Say why pip cannot fetch what a build needs; nothing if it can."""
    fetch = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder)]
    done = subprocess.run(
        [*fetch, "hatchling"], env=environ(), capture_output=True, text=True, check=False
    )
    return done.stderr.strip().splitlines()[-1] if done.returncode else ""


def build(folder: Path) -> Distributions:
    """Build the sdist, and the wheel from it, so that the sdist has to be complete."""
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT)
    (sdist,) = folder.glob("*.tar.gz")
    (wheel,) = folder.glob("*.whl")
    return Distributions(sdist, wheel)


@cache
def interpreter(version: str) -> Path | None:
    """Find a Python of a version on this machine."""
    if version == "{}.{}".format(*sys.version_info):
        return Path(sys.executable)
    on_path = shutil.which(f"python{version}")
    candidates = [Path(on_path)] if on_path else []
    candidates += sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    for candidate in candidates:
        asked = [str(candidate), "-c", "import sys; print('{}.{}'.format(*sys.version_info))"]
        done = subprocess.run(asked, capture_output=True, text=True, check=False)
        if done.stdout.strip() == version:
            return candidate
    return None


def environ(**more: str) -> dict[str, str]:
    """Return the environment without what would lead to this working tree."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "VIRTUAL_ENV", "PIP_CONSTRAINT")
        and not name.startswith(("SLEEPBACKENDS_", "PYTEST_"))
    }
    return {**kept, "COLUMNS": "200", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **more}


def run(*command: str | Path, **kwargs: object) -> subprocess.CompletedProcess[str]:
    """Run a command that has to succeed."""
    done = subprocess.run(  # type: ignore[call-overload]
        [str(word) for word in command],
        **{"env": environ(), "capture_output": True, "text": True, "check": False, **kwargs},
    )
    said = f"{command} exited with {done.returncode}:\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    assert done.returncode == 0, said
    return done  # type: ignore[no-any-return]


class Environment:
    """A virtual environment of its own.

    Parameters
    ----------
    folder : Path
        Where to make it.
    python : Path
        The Python it is for.
    """

    def __init__(self, folder: Path, python: Path = Path(sys.executable)) -> None:
        run(python, "-m", "venv", folder)
        self.bin = folder / "bin"
        (self.packages,) = folder.glob("lib/python*/site-packages")

    def run(self, program: str, *arguments: str | Path) -> str:
        """Run a program of the environment, away from this working tree; return its output."""
        return run(self.bin / program, *arguments, cwd=self.bin.parent).stdout

    def install(self, *what: str | Path) -> None:
        """Have pip install something."""
        self.run("python", "-m", "pip", "install", "--quiet", *what)

    def listed(self) -> set[tuple[str, str]]:
        """Return the distributions that are installed, with their versions."""
        told = json.loads(self.run("python", "-m", "pip", "list", "--format", "json"))
        return {(each["name"], each["version"]) for each in told}

    def installed_bytes(self) -> int:
        """Return how much is installed besides pip, without what Python compiles itself."""
        files = (path for path in self.packages.rglob("*") if path.is_file())
        return sum(
            path.stat().st_size
            for path in files
            if path.suffix != ".pyc"
            and not re.match(
                r"pip|setuptools|pkg_resources|_distutils", path.relative_to(self.packages).parts[0]
            )
        )
