from __future__ import annotations

import ctypes
import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from sleepbackends.cli import app
from sleepbackends.hostmemory import driver as host
from sleepbackends.vmm.shared import SharedStore

pytestmark = pytest.mark.usefixtures("either_way")


def run(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["host-copies", *arguments])
    assert result.exit_code == code
    return result.output


def document(*arguments: str, code: int = 0) -> Any:
    return json.loads(run(*arguments, "--json", code=code))


def offered(store: SharedStore, data: bytes) -> int:
    buffer = ctypes.create_string_buffer(data, len(data))
    shared = store.offer(ctypes.addressof(buffer), len(data), 1)
    assert shared is not None
    return shared.address


def test_used_and_unused_copies(tmp_path: Path) -> None:
    where = ("--directory", str(tmp_path))
    assert document(*where)["copies"] == []
    assert list(tmp_path.iterdir()) == [], "looking makes no directory"
    store = SharedStore(tmp_path)
    store.open()
    used, unused = offered(store, b"x" * 5000), offered(store, b"y" * 3000)
    host.release(unused, host.round_up(3000))
    found = document(*where)
    assert sorted((c["size_bytes"], c["in_use"]) for c in found["copies"]) == [
        (3000, False),
        (5000, True),
    ]
    assert (found["total_bytes"], found["removed_bytes"]) == (8000, 0)
    assert "2 copies" in run(*where)
    cleaned = document(*where, "--clean")
    assert (cleaned["total_bytes"], cleaned["removed_bytes"]) == (5000, 3000)
    host.release(used, host.round_up(5000))
    assert "4.9 KiB removed" in run(*where, "--clean")
    assert document(*where)["copies"] == []


def test_a_directory_of_others_is_an_error(tmp_path: Path) -> None:
    SharedStore(tmp_path).directory.mkdir()
    SharedStore(tmp_path).directory.chmod(0o755)
    answer = document("--directory", str(tmp_path), "--clean", code=2)
    assert answer["error"]["type"] == "StorageError"
