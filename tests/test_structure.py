"""The architecture, as tests: import cost, layers, module sizes, the public surface."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

import sleepbackends

PACKAGE = Path(sleepbackends.__file__).parent
MODULES = sorted(PACKAGE.rglob("*.py"))

# Who may import whom: a module may import from its own layer and from those above it in
# this list; folders not named here belong to the last layer.
LAYERS = [
    {"errors", "availability", "capabilities", "deprecation"},
    {"cuda_bindings"},
    {"policies", "residency", "state", "control"},
    {"ledger", "lock", "reports", "mechanism", "settings", "protocol", "transactions", "failures"},
    {"base", "composite", "engine", "hookspecs", "host_limits", "interpreter", "leases"},
    {"sleep_state", "fallback", "obligations", "plan", "engine_state", "service", "staging"},
    {"observers", "transition"},
    {"tensors"},
    {"hostmemory"},
    {"vmm"},
    {"host", "cumem", "xpu", "checkpoint"},
    {"plugins", "registry", "config", "selection"},
    {"orchestrator", "ranks"},
    {"aio", "calls", "metrics"},
    {"server"},
    {"testing", "pages"},
    {"examples", "demo", "bench", "verify", "scaffold"},
    {"cli"},
    {"adapters", "__main__"},
]
BACKENDS = {"host", "cumem", "xpu", "checkpoint"}


def layer_of(name: str) -> int:
    return next(i for i, names in enumerate(LAYERS) if name in names)


def imported(path: Path) -> set[str]:
    """First-level parts of this package that a module imports, however late."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module]
            if node.module == "sleepbackends":
                names = [f"sleepbackends.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {name.split(".")[1] for name in names if name.startswith("sleepbackends.")}
    return {name for name in found if any(name in names for names in LAYERS)}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_down_only(path: Path) -> None:
    part = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if part == "__init__":
        return
    above = {name for name in imported(path) if layer_of(name) > layer_of(part)}
    assert not above, f"{part} imports {above}, which stand above it"
    if part in BACKENDS:
        assert not imported(path) & (BACKENDS - {part}), "backends do not import each other"


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_modules_hold_one_concept(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= 400
    assert ast.get_docstring(ast.parse(path.read_text())), "a module says what it is for"


def test_every_name_in_all_exists_and_is_sorted() -> None:
    names = [name for name in sleepbackends.__all__ if name != "__version__"]
    assert names == sorted(names, key=lambda n: (not n.isupper(), n[0].islower(), n))
    for name in sleepbackends.__all__:
        assert getattr(sleepbackends, name) is not None
    assert set(dir(sleepbackends)) == set(sleepbackends.__all__)
    with pytest.raises(AttributeError):
        sleepbackends.nothing_of_this_name  # noqa: B018 - the access is the test


def run(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *args], capture_output=True, text=True, check=True)


@pytest.mark.parametrize("statement", ["import sleepbackends", "import sleepbackends.cli"])
def test_importing_loads_neither_torch_nor_a_driver(statement: str) -> None:
    code = f"import sys, json\n{statement}\nprint(json.dumps(sorted(sys.modules)))"
    modules = set(json.loads(run("-c", code).stdout))
    assert not {"torch", "numpy", "cuda", "safetensors"} & modules


def test_importing_is_quick() -> None:
    """Under 150 ms, as Python itself measures it, in the best of a few tries."""
    best_us = min(
        int(re.findall(r"\|\s*(\d+) \| sleepbackends$", line)[0])
        for _ in range(5)
        for line in [run("-X", "importtime", "-c", "import sleepbackends").stderr.splitlines()[-1]]
    )
    assert best_us < 150_000


GUARANTEED = ["suspend", "resume", "discard", "mark_valid"]


@pytest.mark.parametrize("verb", GUARANTEED)
def test_every_verb_states_its_guarantee(verb: str) -> None:
    for owner in (sleepbackends.SleepModeBackend, sleepbackends.BaseBackend):
        text = getattr(owner, verb).__doc__
        assert "Raises\n" in text
        assert "Guarantee:" in text
