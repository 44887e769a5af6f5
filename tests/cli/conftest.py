from __future__ import annotations

import sys

import pytest


@pytest.fixture(params=["with rich", "without rich"])
def either_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the test twice; the second time rich cannot be imported."""
    if request.param == "without rich":
        for name in {"rich", "sleepbackends.cli.rich_terminal", *sys.modules}:
            if name.partition(".")[0] == "rich" or name.endswith(".rich_terminal"):
                monkeypatch.setitem(sys.modules, name, None)
        monkeypatch.delattr("sleepbackends.cli.rich_terminal", raising=False)
