from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.cli import app
from sleepbackends.cli.command import CommandGroup
from sleepbackends.cli.output import format_bytes, json_option
from sleepbackends.errors import NoUsableBackendError, SleepBackendsError, UnknownTagError
from sleepbackends.hookspecs import BackendSpec
from sleepbackends.plugins import (
    DisabledPlugin,
    FailureKind,
    LoadedPlugins,
    PluginFailure,
    RegisteredBackend,
    Source,
)
from sleepbackends.protocol import API_VERSION
from sleepbackends.registry import Registry

pytestmark = pytest.mark.usefixtures("either_way")


class Absent:
    name = "absent"
    api_version = API_VERSION
    capabilities = Capabilities(supports_offload=True)

    @classmethod
    def probe(cls) -> Availability:
        return Availability(False, "no [device]", "plug one in")

    def verb(self, *args: object, **kwargs: object) -> None: ...

    suspend = resume = discard = state = mark_valid = close = verb


@pytest.fixture
def plugins(monkeypatch: pytest.MonkeyPatch) -> LoadedPlugins:
    """Make the commands see these plugins instead of the installed ones."""
    specs = [
        BackendSpec("absent", f"{__name__}:Absent", API_VERSION, None, "Needs a device.", 3),
        BackendSpec("broken", "tp_absent:Backend", API_VERSION),
    ]
    source = Source("tp-dist", "1.5")
    loaded = LoadedPlugins(
        {spec.name: RegisteredBackend(spec, source) for spec in specs},
        [PluginFailure(Source("tp-bad", "0.1"), "bad", "OSError: [no] lib", FailureKind.IMPORT)],
        [DisabledPlugin(Source("tp-off", "0.2"), "off")],
    )
    monkeypatch.setattr(Registry, "load", lambda: Registry(loaded))
    return loaded


def run(*arguments: str, application: click.Group = app) -> Any:
    return CliRunner().invoke(application, list(arguments))


def test_json_tells_everything(plugins: LoadedPlugins) -> None:
    result = run("backends", "--json")
    assert result.exit_code == 0, "a broken plugin is information, not an error"
    told = json.loads(result.stdout)
    absent, broken = told["backends"]
    assert absent.pop("capabilities")["supports_offload"] is True
    assert absent == {
        "name": "absent",
        "summary": "Needs a device.",
        "source": {"distribution": "tp-dist", "version": "1.5"},
        "api_version": API_VERSION,
        "auto_priority": 3,
        "available": False,
        "reason": "no [device]",
        "hint": "plug one in",
    }
    assert (broken["available"], broken["capabilities"]) == (False, None)
    assert "tp_absent" in broken["reason"]
    assert told["failed"] == [
        {
            "source": {"distribution": "tp-bad", "version": "0.1"},
            "entry_point": "bad",
            "error": "OSError: [no] lib",
            "kind": "import",
        }
    ]
    assert told["disabled"] == [
        {"source": {"distribution": "tp-off", "version": "0.2"}, "entry_point": "off"}
    ]


def test_text_shows_the_same(plugins: LoadedPlugins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    result = run("backends")
    assert result.exit_code == 0
    for part in (
        "absent",
        "Needs a device.",
        "tp-dist 1.5",
        "not usable: no [device]",
        "plug one in",
        "supports_offload",
        "unknown",
        "failed: bad of tp-bad 0.1: OSError: [no] lib",
        "disabled: off of tp-off 0.2",
    ):
        assert part in result.stdout


def test_without_any_backend_it_says_so(
    plugins: LoadedPlugins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Registry, "load", lambda: Registry(LoadedPlugins()))
    assert "no backend is registered" in run("backends").stdout
    assert json.loads(run("backends", "--json").stdout)["backends"] == []


def failing(error: BaseException) -> click.Group:
    """Build an application like ours with one command, which raises."""

    def fail(as_json: bool) -> None:
        raise error

    application = CommandGroup()
    application.command("fail")(json_option(fail))
    return application


ERROR = UnknownTagError(
    "no tag 'x'\nat all [sic]", hint="name another", known=["b", "a"], tags={"x"}
)


def test_an_error_is_one_line_on_standard_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        failing(ERROR)(["fail"])
    assert ended.value.code == 2
    written = capsys.readouterr()
    assert written.out == ""
    assert written.err == "error: no tag 'x' at all [sic] (name another)\n"


def test_an_error_with_json_is_an_object() -> None:
    result = run("fail", "--json", application=failing(ERROR))
    assert result.exit_code == 2
    error = json.loads(result.stdout)["error"]
    assert error["type"] == "UnknownTagError"
    assert error["message"] == "no tag 'x'\nat all [sic]"
    assert error["hint"] == "name another"
    assert error["known"] == ["a", "b"]
    assert error["tags"] == ["x"]
    assert error["recoverable"] is True
    assert "report" not in error


def test_an_error_with_json_keeps_what_its_type_adds() -> None:
    error = NoUsableBackendError("none", attempts={"host": "no memory"})
    result = run("fail", "--json", application=failing(error))
    assert json.loads(result.stdout)["error"]["attempts"] == {"host": "no memory"}


def test_an_error_without_hint_has_no_parentheses(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        failing(SleepBackendsError("simply broken"))(["fail"])
    assert capsys.readouterr().err == "error: simply broken\n"


def test_an_interrupt_ends_quietly_as_shells_expect() -> None:
    result = run("fail", application=failing(KeyboardInterrupt()))
    assert (result.exit_code, result.output) == (130, "")


def test_foreign_errors_are_not_hidden() -> None:
    result = run("fail", application=failing(ZeroDivisionError("ours")))
    assert isinstance(result.exception, ZeroDivisionError)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 bytes"),
        (1023, "1,023 bytes"),
        (1024, "1.0 KiB"),
        (1536, "1.5 KiB"),
        (3 << 30, "3.0 GiB"),
        (5000 << 50, "5,000.0 PiB"),
    ],
)
def test_sizes_are_binary(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


def test_version() -> None:
    result = run("--version")
    assert result.exit_code == 0
    assert result.stdout.startswith("sleepbackends ")


def test_help_needs_no_heavy_import_and_a_broken_plugin_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "tp_exits.py").write_text("raise SystemExit(9)")
    info = tmp_path / "tp_exits-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tp-exits\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[sleepbackends]\nexits = tp_exits\n")
    script = (
        "import sys\n"
        "from sleepbackends.cli import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        "heavy = {'torch', 'numpy'} & set(sys.modules) if '--help' in sys.argv else set()\n"
        "sys.exit(code or len(heavy))\n"
    )
    for arguments, expected in ((["--help"], "doctor"), (["backends", "--json"], "tp-exits")):
        done = subprocess.run(
            [sys.executable, "-c", script, *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            cwd=Path(__file__).parents[2],
            capture_output=True,
            text=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert expected in done.stdout
