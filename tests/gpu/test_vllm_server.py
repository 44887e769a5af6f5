"""What README says to a user of vLLM, typed in: a server, two calls of curl."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from urllib.error import URLError
from urllib.request import Request, urlopen

import pytest

from .helpers import GIB, free_device_bytes
from .vllm_model import obstacle, save_model, save_tokenizer

README = Path(__file__).parents[2] / "README.md"
KV_BYTES = 3 * GIB
START_S = 180.0

pytestmark = [
    pytest.mark.skipif(bool(obstacle()), reason=obstacle()),
    pytest.mark.timeout(2 * START_S),
]


def commands() -> list[str]:
    """List the lines of the section's first block, without what is for another release."""
    (section,) = re.findall(r"^## With vLLM$(.*?)^## ", README.read_text(), re.M | re.S)
    (block, *_) = re.findall(r"```console\n(.*?)```", section, re.S)
    lines = [line.partition("#") for line in block.splitlines()]
    release = re.compile(r"^\s*\d+\.\d+\.\d+$")
    return [
        line.strip()
        for line, _, comment in lines
        if not release.match(comment) or comment.strip() == version("vllm")
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    save_model(folder)
    save_tokenizer(folder)
    return folder


@pytest.fixture
def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
    return number


def complete(port: int) -> str:
    asked = {"prompt": "t5 t70 t300 t9", "max_tokens": 24, "temperature": 0, "ignore_eos": True}
    request = Request(
        f"http://127.0.0.1:{port}/v1/completions",
        json.dumps(asked).encode(),
        {"Content-Type": "application/json"},
    )
    with urlopen(request, timeout=60) as reply:  # noqa: S310 - its own server
        text: str = json.load(reply)["choices"][0]["text"]
        return text


def wait_until_it_serves(port: int, server: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + START_S
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}/health", timeout=5):
                return
        except (URLError, OSError):
            assert server.poll() is None, "the server ended"
            assert time.monotonic() < give_up, "the server does not serve"
            time.sleep(0.5)


def test_a_server_sleeps_and_serves_again(folder: Path, port: int, tmp_path: Path) -> None:
    serve, sleep, wake_up = commands()
    path = os.environ["PATH"]
    if shutil.which("vllm") is None:  # unpacked without its scripts
        script = tmp_path / "vllm"
        script.write_text(f'#!/bin/sh\nexec {sys.executable} -m vllm.entrypoints.cli.main "$@"\n')
        script.chmod(0o755)
        path = f"{tmp_path}:{path}"
    serve = serve.replace("MODEL", str(folder))
    serve += (
        f" --port {port} --max-model-len 256 --kv-cache-memory-bytes {KV_BYTES} --enforce-eager"
    )
    log = tmp_path / "log"
    env = {**os.environ, "PATH": path, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    with (
        log.open("wb") as out,
        subprocess.Popen(
            ["/bin/sh", "-c", f"exec env {serve}"],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=env,
        ) as server,
    ):
        try:
            wait_until_it_serves(port, server)
            said = complete(port)
            awake = free_device_bytes()
            curl(sleep, port)
            assert free_device_bytes() - awake > 0.95 * KV_BYTES
            curl(wake_up, port)
            assert complete(port) == said
        except BaseException as error:
            error.args = (*error.args, log.read_text(errors="replace")[-6000:])
            raise
        finally:
            server.terminate()
    assert "sleepbackends owns this worker's memory, by the backend 'cumem'" in log.read_text()


def curl(command: str, port: int) -> None:
    command = command.replace("localhost:8000", f"127.0.0.1:{port}")
    subprocess.run(["/bin/sh", "-c", f"{command} --fail --silent --show-error"], check=True)
