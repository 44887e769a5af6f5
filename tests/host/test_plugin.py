from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from sleepbackends.host import plugin
from sleepbackends.host.backend import HostBackend
from sleepbackends.host.options import HostOptions
from sleepbackends.protocol import API_VERSION


def test_the_plugin_names_what_exists() -> None:
    [spec] = plugin.sleepbackends_register_backends()
    assert (spec.name, spec.api_version, spec.auto_priority) == ("host", API_VERSION, 0)
    assert spec.target == f"{HostBackend.__module__}:{HostBackend.__qualname__}"
    assert spec.options_model == f"{HostOptions.__module__}:{HostOptions.__qualname__}"


def test_the_plugin_loads_nothing_heavy() -> None:
    code = "import sys, sleepbackends.host.plugin; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout
    assert not {b"torch", b"numpy", b"xxhash", b"pydantic"} & set(loaded.split())


@pytest.mark.parametrize(
    "wrong", [{"chunk_bytes": 0}, {"chunk_bytes": 70_000}, {"threads": 0}, {"spool": "x"}]
)
def test_wrong_options_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        HostOptions(**wrong)
