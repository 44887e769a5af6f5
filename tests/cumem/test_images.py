"""Compiled kernels on disk: used again, never trusted, never needed."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from sleepbackends.cumem import images as module
from sleepbackends.cumem import nvrtc
from sleepbackends.cumem.images import Images
from sleepbackends.cumem.nvrtc import KernelSource
from sleepbackends.errors import BackendUnavailableError, MechanismError

SOURCE = KernelSource("add", b"text", (("one.h", b"1"),), ("--std=c++17",))


class Compiler:
    """An NVRTC that counts; without a version it is not there."""

    def __init__(self) -> None:
        self.installed: str | None = "13.3"
        self.compiled: list[tuple[KernelSource, int]] = []

    def version(self) -> str:
        if self.installed is None:
            raise BackendUnavailableError("not there")
        return self.installed

    def compile_for(self, source: KernelSource, architecture: int) -> bytes:
        self.version()
        self.compiled.append((source, architecture))
        return b"image of %s %d" % (source.text, architecture)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> Compiler:
    compiler = Compiler()
    monkeypatch.setattr(nvrtc, "version", compiler.version)
    monkeypatch.setattr(nvrtc, "compile_for", compiler.compile_for)
    return compiler


@pytest.fixture
def images(tmp_path: Path, compiler: Compiler) -> Images:
    return Images(SOURCE, tmp_path / "some" / "where")


def test_what_was_compiled_is_there_the_next_time(images: Images, compiler: Compiler) -> None:
    assert images.cached(90) is None
    image = images.compiled(90)
    assert image == b"image of text 90"
    assert images.cached(90) == image
    assert compiler.compiled == [(SOURCE, 90)]


@pytest.mark.parametrize(
    "other",
    [
        SOURCE._replace(name="sub"),
        SOURCE._replace(text=b"other"),
        SOURCE._replace(headers=(("one.h", b"2"),)),
        SOURCE._replace(headers=(("two.h", b"1"),)),
        SOURCE._replace(headers=()),
        SOURCE._replace(options=()),
    ],
)
def test_another_source_has_another_image(images: Images, other: KernelSource) -> None:
    path = images.path(90, "13.3")
    images.compiled(90)
    assert Images(other, path.parent).cached(90) is None


def test_so_have_another_architecture_and_another_compiler(
    images: Images, compiler: Compiler
) -> None:
    images.compiled(90)
    assert images.cached(100) is None
    compiler.installed = "13.4"
    assert images.cached(90) is None


def test_without_a_compiler_what_any_other_made_does(images: Images, compiler: Compiler) -> None:
    images.keep(b"of 12.9", 90, "12.9")
    images.path(90, "12.8").write_bytes(b"damaged")
    compiler.installed = None
    assert images.cached(90) == b"of 12.9"
    assert images.cached(100) is None
    with pytest.raises(BackendUnavailableError):
        images.compiled(100)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-1] + bytes([data[-1] ^ 1]),
        lambda data: bytes([data[0] ^ 1]) + data[1:],
        lambda data: data[:-1],
        lambda data: data[:32],
        lambda data: data[:5],
        lambda data: b"",
    ],
)
def test_a_damaged_image_is_compiled_again(
    images: Images, damage: Callable[[bytes], bytes]
) -> None:
    image, path = images.compiled(90), images.path(90, "13.3")
    path.write_bytes(damage(path.read_bytes()))
    assert images.cached(90) is None
    assert images.compiled(90) == image
    assert images.cached(90) == image


def test_one_that_cannot_be_read_is_as_good_as_none(images: Images) -> None:
    path = images.path(90, "13.3")
    path.mkdir(parents=True)
    assert images.cached(90) is None
    assert images.compiled(90) == b"image of text 90", "it cannot be kept there, but it is had"


def test_a_directory_that_cannot_be_written_costs_the_keeping_alone(
    tmp_path: Path, compiler: Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    images = Images(SOURCE, tmp_path / "file" / "kernels")
    with caplog.at_level(logging.DEBUG, module.__name__):
        assert images.compiled(90) == b"image of text 90"
    assert images.cached(90) is None
    assert [record.levelname for record in caplog.records if "is not kept" in record.message] == [
        "DEBUG"
    ]


def test_a_write_that_fails_leaves_what_was_there(
    images: Images, monkeypatch: pytest.MonkeyPatch
) -> None:
    images.keep(b"first", 90, "13.3")
    seen = []

    def refuse(source: str, target: Path) -> None:
        seen.append((Path(source).parent, Path(source).read_bytes()[32:]))
        raise OSError("no")

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refuse)
        images.keep(b"second", 90, "13.3")
    path = images.path(90, "13.3")
    assert seen == [(path.parent, b"second")], "complete, and beside the file it replaces"
    assert images.cached(90) == b"first"
    assert list(path.parent.iterdir()) == [path], "nothing half-written is left"


def test_a_compiler_that_fails_is_heard(
    images: Images, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> bytes:
        raise MechanismError("it failed")

    monkeypatch.setattr(nvrtc, "compile_for", fail)
    with pytest.raises(MechanismError, match="it failed"):
        images.compiled(90)
    assert not images.path(90, "13.3").parent.exists()


def test_by_default_it_is_in_the_cache_of_the_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert Images(SOURCE).path(90, "13.3").parent == tmp_path / "sleepbackends" / "kernels"
