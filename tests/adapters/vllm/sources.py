"""A few source files out of the released packages of vLLM, which are hundreds of megabytes.

Nothing of them is kept in this repository. They are read out of the wheel on the package index,
over range requests, into a cache outside of the tree, and each must be what it was when the
adapter was written. Without the index, tests that need them are skipped and say so. A release
that is not pinned can be tried with ``SLEEPBACKENDS_TEST_VLLM``; see ``conftest.py``.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
import urllib.request
import zipfile
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Any

import platformdirs

from tests.adapters.vllm.pins import PINS

_TIMEOUT_S = 20
_BUFFER_BYTES = 256 << 10


class UnavailableError(Exception):
    """The files are neither in the cache nor to be had."""


def released(version: str) -> Path:
    """Return a folder that holds the pinned files of a release, as laid out in its wheel.

    Raises
    ------
    UnavailableError
        If they are not in the cache and the index does not answer.
    """
    found = _pinned()[version] if version in PINS else _once(version)
    if isinstance(found, UnavailableError):
        raise found
    return found


@cache
def _pinned() -> dict[str, Path | UnavailableError]:
    """Look for all releases at once: most of the time is spent waiting for the index."""
    with ThreadPoolExecutor(len(PINS)) as pool:
        return dict(zip(PINS, pool.map(_once, PINS), strict=True))


@cache
def _once(version: str) -> Path | UnavailableError:
    """Look once in a session, so that a silent network costs its time-out once."""
    folder = _cache() / f"vllm-{version}"
    missing = [name for name in _names(version) if not _is_right(folder / name, version, name)]
    if missing:
        try:
            _fetch(version, missing, folder)
        except (OSError, ValueError, KeyError, subprocess.SubprocessError) as error:
            return UnavailableError(
                f"the sources of vLLM {version} cannot be read from the package index: {error}"
            )
    return folder


def _cache() -> Path:
    chosen = os.environ.get("SLEEPBACKENDS_TEST_SOURCES")
    return Path(chosen) if chosen else platformdirs.user_cache_path("sleepbackends") / "sources"


def _names(version: str) -> list[str]:
    return list(PINS.get(version) or list(PINS.values())[-1])


def _is_right(path: Path, version: str, name: str) -> bool:
    return path.is_file() and _is_pinned(path.read_bytes(), version, name)


def _is_pinned(data: bytes, version: str, name: str) -> bool:
    return version not in PINS or hashlib.sha256(data).hexdigest() == PINS[version][name]


def _fetch(version: str, names: list[str], folder: Path) -> None:
    with (
        io.BufferedReader(_RemoteFile(_wheel_url(version)), _BUFFER_BYTES) as remote,
        zipfile.ZipFile(remote) as wheel,
    ):
        for name in names:
            if version not in PINS and name not in wheel.namelist():
                continue
            data = wheel.read(name)
            if not _is_pinned(data, version, name):
                raise AssertionError(f"{name} of vLLM {version} is not what was pinned")
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            partial = path.with_suffix(f".{os.getpid()}")
            partial.write_bytes(data)
            partial.replace(path)


def _wheel_url(version: str) -> str:
    """Ask pip, which knows the index in use, where the wheel is; it fetches metadata only."""
    major, minor = map(int, installed_version("pip").split(".")[:2])
    if (major, minor) < (23, 2):
        raise ValueError("pip before 23.2 would download the whole wheel")
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--no-deps"]
    command += ["--ignore-installed", "--only-binary=:all:", "--python-version=3.12"]
    command += ["--platform=manylinux_2_28_x86_64", "--target=unused", "--report=-"]
    command += ["--retries=1", "--timeout=5"]
    answer = subprocess.run(
        [*command, f"vllm=={version}"], capture_output=True, timeout=_TIMEOUT_S, check=False
    )
    if answer.returncode:
        raise ValueError("pip does not find its wheel")
    (found,) = json.loads(answer.stdout)["install"]
    url: str = found["download_info"]["url"]
    return url


class _RemoteFile(io.RawIOBase):
    """A file on a server that answers range requests."""

    def __init__(self, url: str) -> None:
        if not url.startswith("https://"):
            raise ValueError(f"not a file on a server: {url}")
        self._url = url
        self._position = 0
        with self._open(method="HEAD") as answer:
            self._size = int(answer.headers["Content-Length"])

    def _open(self, method: str = "GET", **headers: str) -> Any:
        request = urllib.request.Request(self._url, headers=headers, method=method)  # noqa: S310
        return urllib.request.urlopen(request, timeout=_TIMEOUT_S)  # noqa: S310 - it is https

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}[whence]
        self._position = start + offset
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        wanted = min(len(buffer), self._size - self._position)
        if wanted <= 0:
            return 0
        last = self._position + wanted - 1
        with self._open(Range=f"bytes={self._position}-{last}") as answer:
            data = answer.read(wanted)
        if len(data) != wanted:
            raise OSError("the server does not answer range requests")
        buffer[:wanted] = data
        self._position += wanted
        return wanted
