"""A new package, from its name to a backend that keeps every promise."""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sleepbackends.cli import app
from sleepbackends.errors import RequestError
from sleepbackends.hookspecs import BackendSpec
from sleepbackends.plugins import LoadedPlugins, RegisteredBackend, Source
from sleepbackends.registry import Registry
from sleepbackends.scaffold.package import FILES, NewPackage

MAIN = "from sleepbackends.cli import main; main()"


def run(*command: str | Path, cwd: Path) -> str:
    """Run a command that has to succeed."""
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a new environment that has what this one has; nothing is downloaded."""
    folder = tmp_path_factory.mktemp("machine") / "venv"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    site = Path(run(python, "-c", where, cwd=folder).strip())
    # As a directory of its own kind, so that editable installs in it are found as well.
    ours = sysconfig.get_path("purelib")
    (site / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    return python


@pytest.fixture(scope="module")
def machine(python: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Follow the three commands of the README as far as the last; return where that was."""
    here = tmp_path_factory.mktemp("here")
    run(python, "-c", MAIN, "new", "mybackend", cwd=here)
    pip = ["-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--no-build-isolation"]
    run(python, *pip, "./mybackend", cwd=here)
    return here


def test_a_new_package_is_verified_at_once(python: Path, machine: Path) -> None:
    run(python, "-c", MAIN, "verify", "mybackend", "--out", "report.json", cwd=machine)
    report: dict[str, Any] = json.loads((machine / "report.json").read_text())
    assert report["verdict"] == "kept"
    assert report["about"]["from"] == "mybackend 0.1.0"
    assert report["backend"] == "mybackend"
    why = {each["message"] for each in report["results"] if each["outcome"] == "skipped"}
    assert why == {
        "mybackend: supports_staging is False",
        "mybackend: supports_offload is True",
        "mybackend: supports_selective_release is True",
        "mybackend: supports_selective_resume is True",
        "Memory has no record_copy()",
    }, "nothing else is left out"


def test_its_own_tests_pass(python: Path, machine: Path) -> None:
    """Beside the suite, which was just run; that is only collected."""
    folder = machine / "mybackend"
    options = ["-q", "-p", "no:cacheprovider", "tests"]
    assert "3 passed" in run(
        python, "-m", "pytest", *options, "-k", "not TestMybackend", cwd=folder
    )
    assert "test_suspend[save]" in run(
        python, "-m", "pytest", *options, "--collect-only", cwd=folder
    )


def test_it_is_tidy_and_typed(tmp_path: Path) -> None:
    """With a name that is longer, and has a hyphen."""
    NewPackage("acme-gpu-sleep").write(tmp_path)
    for check in (["ruff", "check", "."], ["ruff", "format", "--check", "."], ["mypy"]):
        run(sys.executable, "-m", *check, cwd=tmp_path)


@pytest.mark.parametrize(
    ("name", "package", "stem", "backend"),
    [
        ("mybackend", "mybackend", "Mybackend", "Mybackend"),
        ("acme-gpu", "acme_gpu", "AcmeGpu", "AcmeGpuBackend"),
        ("x_2", "x_2", "X2", "X2Backend"),
    ],
)
def test_names(name: str, package: str, stem: str, backend: str) -> None:
    new = NewPackage(name)
    assert (new.package, new.stem, new.backend_class) == (package, stem, backend)
    texts = new.files()
    assert f"class {backend}(BaseBackend[{stem}Options])" in texts[f"{package}/backend.py"]
    assert f'{name} = "{package}.plugin"' in texts["pyproject.toml"]
    assert "${{ matrix.python }}" in texts[".github/workflows/test.yml"]
    assert len(texts) == len(FILES)


@pytest.mark.parametrize("name", ["", "auto", "My", "2x", "a--b", "a b", "-a", "a+b", "é", "../a"])
def test_names_that_cannot_be(name: str) -> None:
    with pytest.raises(RequestError, match="cannot be the name"):
        NewPackage(name)


@pytest.mark.parametrize("name", ["json", "class", "pydantic"])
def test_names_of_modules_that_there_are(name: str) -> None:
    with pytest.raises(RequestError, match=f"a Python module '{name}' already"):
        NewPackage(name)


def test_a_backend_that_is_installed_is_not_written_again(tmp_path: Path) -> None:
    spec = RegisteredBackend(BackendSpec("acme", "a:B", 1), Source("acme-sleep", "2.3"))
    registry = Registry(LoadedPlugins({"acme": spec}))
    with pytest.raises(RequestError, match=r"installed already, by acme-sleep 2\.3"):
        NewPackage("acme").write(tmp_path / "acme", registry)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_something_in_it_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    done = CliRunner().invoke(app, ["new", "acme", "--directory", str(tmp_path)])
    assert done.exit_code == 2
    assert "is not empty" in done.stderr
    assert [each.name for each in tmp_path.iterdir()] == ["mine"]


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = CliRunner().invoke(app, ["new", "acme", "--directory", str(tmp_path / "file" / "x")])
    assert done.exit_code == 2
    assert "cannot be written" in done.stderr


def test_what_to_do_next_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(app, ["new", "acme"])
    assert done.exit_code == 0
    assert (
        "pip install --editable './acme' 'sleepbackends[testing]'\nsleepbackends verify acme\n"
        in done.stdout
    )
    assert (tmp_path / "acme" / "acme" / "backend.py").exists()
