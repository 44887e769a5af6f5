"""The sdist and the wheel: complete, well described, and free of anything else."""

from __future__ import annotations

import re
import sys
import tarfile
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest

import sleepbackends
from tests.packaging.environments import PYTHONS, ROOT, Distributions, run

NAME = f"sleepbackends-{sleepbackends.__version__}"


@pytest.fixture(scope="module")
def in_sdist(distributions: Distributions) -> set[str]:
    with tarfile.open(distributions.sdist) as sdist:
        return {name.removeprefix(f"{NAME}/") for name in sdist.getnames()}


@pytest.fixture(scope="module")
def in_wheel(distributions: Distributions) -> set[str]:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        return set(wheel.namelist())


@pytest.fixture(scope="module")
def metadata(distributions: Distributions) -> Message:
    with zipfile.ZipFile(distributions.wheel) as wheel:
        return Parser().parsestr(wheel.read(f"{NAME}.dist-info/METADATA").decode())


def test_both_are_accepted_by_the_index(distributions: Distributions) -> None:
    said = run(sys.executable, "-m", "twine", "--no-color", "check", "--strict", *distributions)
    assert said.stdout.count("PASSED") == 2


def test_the_wheel_has_every_file_of_the_package_and_nothing_else(in_wheel: set[str]) -> None:
    files = [path for path in (ROOT / "sleepbackends").rglob("*") if path.is_file()]
    kept = {
        path.relative_to(ROOT).as_posix()
        for path in files
        if "__pycache__" not in path.parts and path.suffix != ".so"
    }
    own = {name for name in in_wheel if ".dist-info/" not in name and not name.endswith(".so")}
    assert own == kept


def test_the_wheel_has_the_libraries_types_and_licence(in_wheel: set[str]) -> None:
    assert "sleepbackends/py.typed" in in_wheel
    assert f"{NAME}.dist-info/licenses/LICENSE" in in_wheel
    built = {Path(name).name for name in in_wheel if name.endswith(".so")}
    assert built == {f"libsleepbackends_{name}.so" for name in ("cuda", "host", "level_zero")}


def test_the_sdist_is_enough_to_run_the_tests(in_sdist: set[str]) -> None:
    needed = {"Makefile", "constraints.txt", "hatch_build.py", "mkdocs.yml", "pyproject.toml"}
    assert needed <= in_sdist
    for folder in (".ci", "sleepbackends", "tests", "docs", "examples", "benchmarks"):
        assert any(name.startswith(f"{folder}/") for name in in_sdist)


def test_the_sdist_has_what_the_readme_links_to(in_sdist: set[str]) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert any(name == target or name.startswith(f"{target}/") for name in in_sdist), target


def test_the_sdist_has_nothing_that_was_only_lying_around(in_sdist: set[str]) -> None:
    for name in in_sdist:
        assert not name.endswith((".so", ".pyc", ".whl")), name


def test_the_metadata_says_what_a_user_looks_for(metadata: Message) -> None:
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert metadata["Requires-Python"] == f">={PYTHONS[0]}"
    stated = [c.split(" :: ")[-1] for c in metadata.get_all("Classifier", [])]
    assert [version for version in stated if version in PYTHONS] == list(PYTHONS)
    extras = {"torch", "cuda", "server", "rich", "testing"}
    assert set(metadata.get_all("Provides-Extra", [])) >= extras
