"""The interface is that of the released package, and has the names that its users use."""

from __future__ import annotations

import hashlib
import inspect
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import sleepbackends.adapters.torch_memory_saver as ours

VERSION = "0.0.10"
PLATFORM = "manylinux2014_x86_64"
WHEEL = f"torch_memory_saver-{VERSION}-cp39-abi3-{PLATFORM}.whl"
SHA256 = "786e18755a9af255ae692b0e19a62ff06861dbf55a19fa8545e62a100ab5a28f"

EXTRA = {"backend"}
"""What only ours has."""


@pytest.fixture(scope="module")
def wheel(pytestconfig: pytest.Config) -> Path:
    """The released wheel, fetched once; the index may not be reachable."""
    assert pytestconfig.cache is not None
    path = pytestconfig.cache.mkdir("wheels") / WHEEL
    if not path.exists():
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pip", "download", f"torch_memory_saver=={VERSION}"),
                *("--no-deps", "--only-binary", ":all:", "--dest", str(path.parent)),
                *("--platform", PLATFORM, "--abi", "abi3", "--python-version", "39"),
                *("--implementation", "cp", "--disable-pip-version-check", "--no-input"),
                *("--retries", "0", "--timeout", "10"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        if not path.exists():
            lines = done.stderr.strip().splitlines() or ["pip said nothing"]
            pytest.skip(f"torch_memory_saver {VERSION} cannot be fetched: {lines[-1]}")
    assert hashlib.sha256(path.read_bytes()).hexdigest() == SHA256, f"{path} is another wheel"
    return path


@pytest.fixture
def theirs(wheel: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The package of the wheel; its native parts are loaded at its first use, so not here."""
    before = {name: m for name, m in sys.modules.items() if is_theirs(name)}
    for name in before:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.syspath_prepend(str(wheel))
    yield import_module("torch_memory_saver")
    for name in list(filter(is_theirs, sys.modules)):
        del sys.modules[name]


def is_theirs(name: str) -> bool:
    return name.split(".")[0] == "torch_memory_saver"


def public(owner: object) -> set[str]:
    return {name for name in dir(owner) if not name.startswith("_")}


def parameters(function: Any) -> list[tuple[str, Any, Any]]:
    found = inspect.signature(function).parameters.values()
    return [(each.name, each.kind, each.default) for each in found]


def test_the_package_has_the_same_names(theirs: ModuleType) -> None:
    exported = {name for name in public(theirs) if not inspect.ismodule(getattr(theirs, name))}
    assert exported == set(ours.__all__)
    assert parameters(ours.configure_subprocess) == parameters(theirs.configure_subprocess)
    assert type(theirs.torch_memory_saver) is theirs.TorchMemorySaver


def test_the_object_has_the_same_attributes(theirs: ModuleType) -> None:
    assert public(ours.TorchMemorySaver) - EXTRA == public(theirs.TorchMemorySaver)


def test_attributes_can_be_set_alike(theirs: ModuleType) -> None:
    for name in public(theirs.TorchMemorySaver):
        attribute = getattr(theirs.TorchMemorySaver, name)
        if isinstance(attribute, property):
            mine = getattr(ours.TorchMemorySaver, name)
            assert isinstance(mine, property)
            assert (mine.fset is None) is (attribute.fset is None), name


def test_methods_take_the_same(theirs: ModuleType) -> None:
    methods = [
        name
        for name in public(theirs.TorchMemorySaver)
        if inspect.isfunction(getattr(theirs.TorchMemorySaver, name))
    ]
    assert {"region", "cuda_graph", "pause", "resume", "get_cpu_backup"} <= set(methods)
    for name in methods:
        mine, other = (getattr(m.TorchMemorySaver, name) for m in (ours, theirs))
        assert parameters(mine) == parameters(other), name


def test_one_can_be_made_without_arguments(theirs: ModuleType) -> None:
    assert not inspect.signature(theirs.TorchMemorySaver).parameters
    for each in inspect.signature(ours.TorchMemorySaver).parameters.values():
        assert each.default is None


def test_values_are_the_same_before_the_first_use(theirs: ModuleType) -> None:
    mine, other = ours.TorchMemorySaver(), theirs.TorchMemorySaver()
    assert mine.enabled is other.enabled is True
    assert mine._impl is other._impl is None


def test_calls_as_engines_make_them_fit() -> None:
    """As SGLang, slime, miles, AReaL and lightllm call it."""
    saver: Any = ours.TorchMemorySaver
    for name, arguments, named in (
        ("region", (), {"tag": "weights", "enable_cpu_backup": True}),
        ("region", ("kv_cache",), {}),
        ("cuda_graph", (), {"cuda_graph": 0, "pool": None, "stream": None, "tag": "cuda_graph"}),
        ("cuda_graph", (0,), {"pool": None}),
        ("pause", (), {"tag": "weights"}),
        ("pause", (), {}),
        ("resume", ("kv_cache",), {}),
        ("disable", (), {}),
        ("get_cpu_backup", (0,), {"zero_copy": True}),
    ):
        inspect.signature(getattr(saver, name)).bind(None, *arguments, **named)
    for name in ("enabled", "hook_mode", "memory_margin_bytes", "retain_cpu_backup", "_impl"):
        assert hasattr(saver, name)
