from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from click.testing import CliRunner

from sleepbackends.cli import app
from sleepbackends.config import TOKEN_VARIABLE
from tests.server.calling import TOKEN

pytestmark = pytest.mark.usefixtures("either_way")

MAIN = "from sleepbackends.cli import main; main()"
ENGINE = """
from sleepbackends import Orchestrator, load_config
from sleepbackends.testing import SimulatedBackend

class Closing(SimulatedBackend):
    def close(self):
        super().close()
        print("closed", flush=True)

def make():
    backend = Closing()
    for tag in ("weights", "kv_cache"):
        with backend.region(tag) as region:
            region.buffer(1000)
    return Orchestrator(backend, config=load_config())

number = 7
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "served_engine.py").write_text(ENGINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    return tmp_path


@contextmanager
def serving(*args: str, **environment: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The command in a process, and what it says where it serves."""
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, "serve", "served_engine:make", *args],
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        found = re.fullmatch(r"serving simulated on (\S+)\n", line)
        assert found, line + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


def http(at: str) -> httpx.Client:
    if at.startswith("unix:"):
        transport = httpx.HTTPTransport(uds=at.removeprefix("unix:"))
        return httpx.Client(transport=transport, base_url="http://localhost")
    return httpx.Client(base_url=at, trust_env=False)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_it_serves_on_a_unix_socket_and_closes_the_engine(
    folder: Path, stop: signal.Signals
) -> None:
    with serving("--uds", "control.sock") as (process, at), http(at) as client:
        assert client.post("/sleep?level=1").json()["to"] == "weights_offloaded"
        with client.stream("GET", "/events", headers={"Last-Event-ID": "0"}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            lines = response.iter_lines()
            data = next(line for line in lines if line.startswith("data: "))
            assert json.loads(data.removeprefix("data: "))["operation"] == "sleep"
            process.send_signal(stop)
            began = time.monotonic()
            assert not any(lines), "the stream ends, and is not waited for"
            assert time.monotonic() - began < 4
        stdout, stderr = process.communicate(timeout=30)
        assert (process.returncode, stdout, stderr) == (0, "closed\n", "")
    assert not (folder / "control.sock").exists()


def test_it_serves_on_loopback_with_a_token(folder: Path) -> None:
    """The variable is none of the configuration, which the engine of the test loads."""
    with serving("--port", "0", **{TOKEN_VARIABLE: TOKEN}) as (_, at), http(at) as client:
        assert at.startswith("http://127.0.0.1:")
        assert client.get("/state").status_code == 401
        response = client.get("/state", headers={"Authorization": f"Bearer {TOKEN}"})
        assert response.json()["serving"]


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (["served_engine"], "MODULE:ATTRIBUTE"),
        (["no_such_module_at_all:make"], "cannot be imported"),
        (["served_engine:missing"], "cannot be imported"),
        (["served_engine:number"], "is a int, not an Orchestrator"),
        (["served_engine:make", "--host", "0.0.0.0"], "no token is set"),  # noqa: S104
        (["served_engine:make", "--host", "no host"], "has no address"),
        (["served_engine:make", "--token-file", "missing"], "cannot be read"),
        (["served_engine:make", "--uds", "missing/socket"], "cannot listen"),
    ],
)
def test_what_cannot_be_served_is_said(
    folder: Path, args: list[str], says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "served_engine", raising=False)
    result = CliRunner().invoke(app, ["serve", "--port", "0", *args])
    assert result.exit_code == 2
    assert says in " ".join(result.stderr.split())


def test_the_token_is_no_option() -> None:
    """What is on the command line can be read by every user of the machine."""
    text = CliRunner().invoke(app, ["serve", "--help"], terminal_width=200).output
    assert "--token-file" in text
    assert not re.search(r"--token\b(?!-file)", text)


def test_without_the_server_packages_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in [name for name in sys.modules if name.startswith("sleepbackends.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "fastapi", None)
    result = CliRunner().invoke(app, ["serve", "a:b"])
    assert result.exit_code == 2
    assert "sleepbackends[server]" in " ".join(result.stderr.split())
