from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest
from safetensors import SafetensorError

from sleepbackends import StorageError, StorageFullError
from sleepbackends.examples import default_weights as module
from sleepbackends.examples.default_weights import DEFAULT_MODEL, create_weights, default_weights
from sleepbackends.examples.model_config import ModelConfig, read_config

SMALL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    layers=2,
    heads=4,
    kv_heads=2,
    head_dim=8,
)


@pytest.fixture
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DEFAULT_MODEL", SMALL)


def test_the_default_model_is_about_half_a_gibibyte() -> None:
    assert 0.45 < DEFAULT_MODEL.weights_bytes / 2**30 < 0.6


@pytest.mark.usefixtures("_small")
def test_it_is_created_once(tmp_path: Path) -> None:
    created: list[Path] = []
    path = default_weights(tmp_path / "new" / "folder", on_create=created.append)
    written = path.stat().st_ino
    assert default_weights(path.parent, on_create=created.append) == path
    assert created == [path]
    assert path.stat().st_ino == written
    assert read_config(path) == SMALL
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.usefixtures("_small")
def test_a_half_written_file_is_not_used(tmp_path: Path) -> None:
    path = default_weights(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert default_weights(tmp_path) == path
    assert path.read_bytes() == whole, "the same seed gives the same weights"
    create_weights(path, SMALL, seed=1)
    assert path.read_bytes() != whole


@pytest.mark.usefixtures("_small")
def test_several_may_create_it_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        paths = list(pool.map(lambda _: default_weights(tmp_path), range(8)))
    assert len(set(paths)) == 1
    assert list(tmp_path.iterdir()) == paths[:1]
    assert read_config(paths[0]) == SMALL


@pytest.mark.usefixtures("_small")
def test_space_is_checked_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "new"
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(StorageFullError) as caught:
        default_weights(folder)
    assert caught.value.available_bytes == 1 << 20
    assert caught.value.needed_bytes == SMALL.weights_bytes
    assert not folder.exists()


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.safetensors"
    create_weights(path, SMALL)
    whole = path.read_bytes()

    def fail(tensors: object, unfinished: Path, metadata: object) -> None:
        unfinished.write_bytes(b"half")
        raise SafetensorError("I/O error: no space left on device")

    monkeypatch.setattr(module, "save_file", fail)
    with pytest.raises(StorageError, match="no space left"):
        create_weights(path, SMALL, seed=1)
    assert path.read_bytes() == whole
    assert list(tmp_path.iterdir()) == [path]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        create_weights(tmp_path / "file" / "model.safetensors", SMALL)
