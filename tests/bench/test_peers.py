from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from sleepbackends.bench.peers import PACKAGES, missing, open_allocator, version
from sleepbackends.bench.rows import OURS, PEERS
from sleepbackends.errors import RequestError

INSTALLED = """
import sys
from sleepbackends.bench.peers import missing, version
print([missing(peer, None) for peer in ("vllm", "tms", "tms_retain")], version("tms", None))
assert not {"vllm", "torch_memory_saver", "torch"} & set(sys.modules)
"""


def test_peers_of_a_folder(folder: Path) -> None:
    assert all(missing(peer, folder) == "" for peer in (OURS, *PEERS))
    assert (version("tms", folder), version("vllm", folder)) == ("1.2.3", "unknown")
    needed = folder / "vllm" / PACKAGES["vllm"].needed
    needed.rmdir()
    assert missing("vllm", folder) == f"{needed} is not there"


def test_peers_that_are_installed_are_found_without_importing_them(folder: Path) -> None:
    for package in ("vllm/vllm", "tms/torch_memory_saver"):
        (folder / package / "__init__.py").write_text("raise ImportError('imported')")
    sources = Path(__file__).parents[2]
    paths = [str(folder / "vllm"), str(folder / "tms"), str(sources)]
    code = f"import sys; sys.path[:0] = {paths!r}\n{INSTALLED}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("['', '', ''] 1.2.3\n", "")


def test_peers_that_are_not_installed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder that happens to have the name is no package."""
    monkeypatch.setattr(sys, "path", [str(folder / "tms")])
    assert missing("tms", None) == "torch_memory_saver is not installed, nor --peers given"
    assert missing("vllm", None) == "vllm is not installed, nor --peers given"
    assert version("vllm", None) == "unknown"
    assert missing(OURS, None) == ""


def test_what_cannot_be_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [])
    with pytest.raises(RequestError, match=r"no peer .known: sleepbackends, vllm"):
        open_allocator("nobody", folder)
    with pytest.raises(RequestError, match="vllm cannot be measured: vllm is not installed"):
        open_allocator("vllm", None)
