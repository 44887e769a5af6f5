from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sleepbackends.plugins import FailureKind, LoadedPlugins, PluginFailure, Source, load_plugins

HEADER = "from sleepbackends.hookspecs import BackendSpec, hookimpl\n"
HOOK = HEADER + "@hookimpl\ndef sleepbackends_register_backends():\n    "

Write = Callable[..., str]


def offering(*names: str) -> str:
    """Write the source of a plugin that offers backends of these names."""
    specs = ", ".join(f"BackendSpec({name!r}, 'nowhere:Backend', 1)" for name in names)
    return f"{HOOK}return [{specs}]\n"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def write(site: Path) -> Write:
    """Put a real distribution on ``sys.path``: a module and its dist-info."""

    def write(
        name: str, source: str, entry_point: str = "plugin", target: str = "", version: str = "1.0"
    ) -> str:
        module = name.replace("-", "_").lower()
        (site / f"{module}.py").write_text(source)
        info = site / f"{module}-{version}.dist-info"
        info.mkdir()
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (info / "METADATA").write_text(metadata)
        points = f"[sleepbackends]\n{entry_point} = {target or module}\n"
        (info / "entry_points.txt").write_text(points)
        return module

    return write


def load(**environ: str) -> LoadedPlugins:
    return load_plugins(environ, builtins=())


def failure_of(loaded: LoadedPlugins, distribution: str) -> PluginFailure:
    (failure,) = [f for f in loaded.failures if f.source.distribution == distribution]
    return failure


def test_good_plugin_is_registered_with_its_origin(write: Write) -> None:
    write("tp-good", offering("one", "two"), version="3.1")
    loaded = load()
    for name in ("one", "two"):
        assert loaded.backends[name].spec.name == name
        assert loaded.backends[name].source == Source("tp-good", "3.1")
    assert not [f for f in loaded.failures if f.source.distribution == "tp-good"]


BROKEN = {
    "raises on import": ("raise OSError('no libcuda')", FailureKind.IMPORT, "OSError: no libcuda"),
    "exits on import": ("raise SystemExit(3)", FailureKind.IMPORT, "SystemExit: 3"),
    "imports what is absent": ("import tp_absent", FailureKind.IMPORT, "No module named"),
    "hook raises": (HOOK + "raise ValueError('x')", FailureKind.HOOK, "ValueError: x"),
    "hook exits": (HOOK + "raise SystemExit", FailureKind.HOOK, "SystemExit"),
    "misspelt hook": (
        offering("tpx").replace("register_backends", "register_backend"),
        FailureKind.HOOK,
        "unknown hook 'sleepbackends_register_backend'",
    ),
    "no hook": ("x = 1", FailureKind.HOOK, "implements no hook"),
    "hook with arguments": (offering("tpx").replace("()", "(x)"), FailureKind.HOOK, "x"),
    "returns None": (HOOK + "return None", FailureKind.RESULT, "returned None"),
    "returns a string": (HOOK + "return 'tpx'", FailureKind.RESULT, "returned 'tpx'"),
    "returns numbers": (HOOK + "return [1, 2]", FailureKind.RESULT, "a list with 1"),
    "returns one spec": (
        HOOK + "return BackendSpec('tpx', 'a:B', 1)",
        FailureKind.RESULT,
        "return a list",
    ),
    "iterates into an error": (HOOK + "return (1 / 0 for _ in 'x')", FailureKind.RESULT, "Zero"),
    "same name twice": (offering("tpx", "tpx"), FailureKind.NAME, "'tpx'"),
}
SPECS = {
    "'auto', 'a:B', 1": "name is 'auto'",
    "'Upper', 'a:B', 1": "name is 'Upper'",
    "'', 'a:B', 1": "name is ''",
    "7, 'a:B', 1": "name is 7",
    "'tpx', 'no colon', 1": "target is 'no colon'",
    "'tpx', int, 1": "target is <class 'int'>",
    "'tpx', 'a:B', '1'": "api_version is '1'",
    "'tpx', 'a:B', True": "api_version is True",
    "'tpx', 'a:B', 1, 'model'": "options_model is 'model'",
    "'tpx', 'a:B', 1, None, 5": "summary is 5",
    "'tpx', 'a:B', 1, None, '', 0.5": "auto_priority is 0.5",
}
BROKEN |= {
    f"BackendSpec({arguments})": (
        f"{HOOK}return [BackendSpec({arguments})]",
        FailureKind.RESULT,
        said,
    )
    for arguments, said in SPECS.items()
}


@pytest.mark.parametrize(("source", "kind", "said"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_plugin_is_recorded_and_costs_nobody_else_anything(
    write: Write, source: str, kind: FailureKind, said: str
) -> None:
    write("tp-a", offering("before"))
    write("tp-m", source, entry_point="broken")
    write("tp-z", offering("after"))
    loaded = load()
    failure = failure_of(loaded, "tp-m")
    assert failure.kind is kind
    assert said in failure.error
    assert (failure.source, failure.entry_point) == (Source("tp-m", "1.0"), "broken")
    assert {"before", "after"} <= loaded.backends.keys()
    assert "tpx" not in loaded.backends


def test_entry_point_to_a_class_is_refused_with_the_reason(write: Write) -> None:
    source = HEADER + "class Plugin:\n    @hookimpl\n    def sleepbackends_register_backends(self):"
    write("tp-class", source + "\n        return []\n", target="tp_class:Plugin")
    assert "not a class" in failure_of(load(), "tp-class").error


def test_interrupting_the_user_is_not_a_plugin_failure(write: Write) -> None:
    write("tp-interrupt", "raise KeyboardInterrupt")
    with pytest.raises(KeyboardInterrupt):
        load()


def test_equal_entry_point_names_of_two_distributions_both_load(write: Write) -> None:
    write("tp-a", offering("one"), entry_point="same")
    write("tp-b", offering("two"), entry_point="same")
    assert {"one", "two"} <= load().backends.keys()


def test_clash_keeps_the_earlier_and_names_both(write: Write) -> None:
    write("tp-b", offering("other", "taken"))
    write("tp-a", offering("taken"))
    loaded = load()
    assert loaded.backends["taken"].source.distribution == "tp-a"
    failure = failure_of(loaded, "tp-b")
    assert failure.kind is FailureKind.NAME
    assert "tp-a 1.0" in failure.error
    assert "tp-b 1.0" in failure.error
    assert "other" not in loaded.backends, "a plugin is taken whole or not at all"


def test_builtin_cannot_be_shadowed(write: Write, site: Path) -> None:
    (site / "tp_builtin.py").write_text(offering("host"))
    write("AAA", offering("host"))
    loaded = load_plugins({}, builtins=["tp_builtin"])
    assert loaded.backends["host"].source.distribution == "sleepbackends"
    failure = failure_of(loaded, "AAA")
    assert failure.kind is FailureKind.NAME
    assert "'host'" in failure.error
    assert str(loaded.backends["host"].source) in failure.error


def test_missing_builtin_is_a_failure_like_any_other() -> None:
    loaded = load_plugins({}, entry_points=(), builtins=["tp_absent.plugin"])
    (failure,) = loaded.failures
    assert failure.kind is FailureKind.IMPORT
    assert failure.entry_point == "tp_absent.plugin"


def test_plugins_load_in_a_fixed_order(write: Write) -> None:
    for name in ("tp-c", "tp-a", "tp-b"):
        write(name, offering(name[-1]))
    assert [name for name in load().backends if name in "abc"] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "switch", ["off-name", " x, OFF_NAME ,", "tp-off", "TP.Off", "other,tp_off", "*"]
)
def test_disabled_plugin_is_listed_and_never_imported(write: Write, switch: str) -> None:
    write("tp-off", "raise RuntimeError('imported')", entry_point="off-name")
    write("tp-on", offering("on"))
    loaded = load(SLEEPBACKENDS_DISABLE_PLUGINS=switch)
    assert ("tp-off", "off-name") in [
        (plugin.source.distribution, plugin.entry_point) for plugin in loaded.disabled
    ]
    assert "tp-off" not in [f.source.distribution for f in loaded.failures]
    assert ("on" in loaded.backends) == (switch != "*")


@pytest.mark.parametrize("switch", ["*", "sleepbackends", "tp_builtin"])
def test_builtin_cannot_be_disabled(site: Path, switch: str) -> None:
    (site / "tp_builtin.py").write_text(offering("host"))
    environ = {"SLEEPBACKENDS_DISABLE_PLUGINS": switch}
    loaded = load_plugins(environ, builtins=["tp_builtin"])
    assert "host" in loaded.backends


@pytest.mark.parametrize(
    "garbled", [b"[sleepbackends]\nno equals sign\n", b"[sleepbackends]\n\xff = x\n"]
)
def test_garbled_metadata_costs_nobody_else_anything(
    write: Write, site: Path, garbled: bytes
) -> None:
    write("tp-a", offering("fine"))
    write("tp-garbled", "")
    (site / "tp_garbled-1.0.dist-info" / "entry_points.txt").write_bytes(garbled)
    loaded = load()
    assert failure_of(loaded, "tp-garbled").kind is FailureKind.IMPORT
    assert "fine" in loaded.backends


def test_distribution_without_a_name_is_a_failure(write: Write, site: Path) -> None:
    write("tp-bare", offering("bare"))
    (site / "tp_bare-1.0.dist-info" / "METADATA").unlink()
    loaded = load()
    assert "it has no name" in failure_of(loaded, "unknown").error
    assert "bare" not in loaded.backends


def test_the_first_of_two_installed_versions_is_the_one_in_use(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("tp-twice", offering("older"))
    newer = tmp_path / "newer" / "tp_twice-2.0.dist-info"
    newer.mkdir(parents=True)
    (newer / "METADATA").write_text("Metadata-Version: 2.1\nName: tp-twice\nVersion: 2.0\n")
    monkeypatch.syspath_prepend(str(newer.parent))
    assert "older" not in load().backends


def test_installed_plugins_are_found_by_a_new_process_without_heavy_imports(
    write: Write, site: Path
) -> None:
    write("tp-good", offering("sub-good"))
    write("tp-exit", "import sys; sys.exit('gone')")
    script = (
        "import json, sys\n"
        "from sleepbackends.registry import Registry\n"
        "registry = Registry.load()\n"
        "heavy = {'torch', 'numpy'} & set(sys.modules)\n"
        "failed = [f.source.distribution for f in registry.failures]\n"
        "print(json.dumps([sorted(registry.specs), failed, sorted(heavy)]))\n"
    )
    environ = {**os.environ, "PYTHONPATH": str(site)}
    run = subprocess.run(
        [sys.executable, "-c", script],
        env=environ,
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=True,
    )
    names, failed, heavy = json.loads(run.stdout)
    assert "sub-good" in names
    assert "tp-exit" in failed
    assert heavy == []
