"""``sleepbackends verify cumem`` on the GPU."""

from __future__ import annotations

from pathlib import Path

from tests.verify.as_a_user import promises_not_tried


def test_cumem_keeps_its_promises(tmp_path: Path) -> None:
    assert promises_not_tried("cumem", 20, tmp_path) == []
