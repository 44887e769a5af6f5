"""A new package from the template, checked before the first file is written."""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import sleepbackends
from sleepbackends.errors import RequestError
from sleepbackends.plugins import AUTO
from sleepbackends.protocol import API_VERSION
from sleepbackends.registry import Registry

FILES = {
    "README.md": "README.md",
    "pyproject.toml": "pyproject.toml",
    ".gitignore": "gitignore",
    ".github/workflows/test.yml": "test.yml",
    "{package}/__init__.py": "init.py",
    "{package}/plugin.py": "plugin.py",
    "{package}/options.py": "options.py",
    "{package}/driver.py": "driver.py",
    "{package}/memory.py": "memory.py",
    "{package}/backend.py": "backend.py",
    "{package}/contract.py": "contract.py",
    "{package}/py.typed": "py.typed",
    "tests/test_contract.py": "test_contract.py",
    "tests/test_backend.py": "test_backend.py",
}
"""What is written, and the template of each, which ends in ``.template``."""

_NAME = re.compile(r"[a-z][a-z0-9]*([_-][a-z0-9]+)*")
_LEFT_OVER = re.compile(r"\{\{\w+\}\}")


@dataclass(frozen=True)
class NewPackage:
    """The names in a new package.

    Parameters
    ----------
    name : str
        The name of the backend and of the distribution.

    Raises
    ------
    RequestError
        If it cannot be both, or is taken here.
    """

    name: str

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name) or self.name == AUTO:
            raise RequestError(
                f"{self.name!r} cannot be the name of a backend and of a package",
                hint="use lower-case letters and digits, in words joined by '-', such as acme-gpu",
            )
        taken = self.package in sys.stdlib_module_names or keyword.iskeyword(self.package)
        if taken or importlib.util.find_spec(self.package):
            raise RequestError(
                f"there is a Python module {self.package!r} already",
                hint=f"choose another name, such as sleep-{self.name}",
            )

    @property
    def package(self) -> str:
        """The name of the Python package."""
        return self.name.replace("-", "_")

    @property
    def stem(self) -> str:
        """What the names of its classes begin with."""
        return "".join(word.capitalize() for word in self.package.split("_"))

    @property
    def backend_class(self) -> str:
        """The name of its backend class."""
        return self.stem if self.stem.lower().endswith("backend") else f"{self.stem}Backend"

    def files(self) -> dict[str, str]:
        """Return the text of each file, by its path inside the package's folder."""
        major, minor, *_ = sleepbackends.__version__.split(".")
        words = {
            "name": self.name,
            "package": self.package,
            "stem": self.stem,
            "backend_class": self.backend_class,
            "api_version": str(API_VERSION),
            "version": f"{major}.{minor}",
        }
        return {
            path.format(package=self.package): _filled(template, words)
            for path, template in FILES.items()
        }

    def write(self, folder: Path, registry: Registry | None = None) -> list[Path]:
        """Write the package into a folder that is new or empty; return the files.

        Raises
        ------
        RequestError
            If a backend of that name is installed, or the folder holds something or cannot be
            written to. Nothing was written, unless the disk fails half-way.
        """
        registry = registry or Registry.load()
        if self.name in registry.specs:
            raise RequestError(
                f"a backend {self.name!r} is installed already, by "
                f"{registry.specs[self.name].source}",
                hint="choose another name",
            )
        texts = self.files()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if any(folder.iterdir()):
                raise RequestError(
                    f"{folder} is not empty", hint="name another folder with --directory"
                )
            for path, text in texts.items():
                (folder / path).parent.mkdir(parents=True, exist_ok=True)
                (folder / path).write_text(text, encoding="utf-8")
        except OSError as error:
            raise RequestError(
                f"{folder} cannot be written: {error.strerror}: {error.filename}",
                hint="name another folder with --directory",
            ) from error
        return [folder / path for path in texts]


def _filled(template: str, words: dict[str, str]) -> str:
    place = files("sleepbackends.scaffold").joinpath("template", f"{template}.template")
    text = place.read_text(encoding="utf-8")
    for word, value in words.items():
        text = text.replace("{{" + word + "}}", value)
    if left := _LEFT_OVER.search(text):
        raise RequestError(f"the template {template} asks for {left[0]}, which there is not")
    return text
