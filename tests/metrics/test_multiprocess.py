"""Several processes, one scrape: the multiprocess mode of prometheus_client."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# The mode is chosen when prometheus_client is imported, so that each part is a process.
WORKER = """
import os, sys
from sleepbackends.metrics import Metrics
from tests.gated import make
engine, verb = sys.argv[1:]
orchestrator, backend, hooks = make()
metrics = Metrics()
metrics.observe(orchestrator, engine=engine)
getattr(orchestrator, verb)()
print(os.getpid())
"""
SCRAPER = """
import sys
from prometheus_client import generate_latest, multiprocess
from sleepbackends.metrics import Metrics
for pid in sys.argv[1:]:
    multiprocess.mark_process_dead(int(pid))
print(generate_latest(Metrics().registry).decode())
"""


def run(code: str, directory: Path, *args: str) -> str:
    environment = {**os.environ, "PROMETHEUS_MULTIPROC_DIR": str(directory)}
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code, *args],
        capture_output=True, text=True, check=False, cwd=root, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


def samples(text: str, name: str) -> dict[str, float]:
    return {
        line[len(name) : line.rindex(" ")]: float(line.rsplit(" ", 1)[1])
        for line in text.splitlines()
        if line.startswith(name + "{")
    }


def sleep_states(text: str, engine: str) -> dict[str, float]:
    return {
        labels.split('sleep_state="')[1].split('"')[0]: value
        for labels, value in samples(text, "sleepbackends_engine_sleep_state").items()
        if f'engine="{engine}"' in labels
    }


def test_one_scrape_has_all_processes_and_one_state_for_each_engine(tmp_path: Path) -> None:
    run(WORKER, tmp_path, "a", "sleep")
    released = run(WORKER, tmp_path, "b", "release_kv_cache").strip()
    run(WORKER, tmp_path, "c", "wake_up")  # two ranks of one engine, one of them asleep
    run(WORKER, tmp_path, "c", "sleep")
    text = run(SCRAPER, tmp_path)
    ones = {
        engine: [state for state, value in sleep_states(text, engine).items() if value]
        for engine in "abc"
    }
    assert ones == {
        "a": ["weights_offloaded"], "b": ["kv_cache_released"], "c": ["weights_offloaded"],
    }  # fmt: skip
    assert all(len(sleep_states(text, engine)) == 4 for engine in "abc")
    assert "sleep_state_code" not in text
    assert "pid=" not in text
    serving = samples(text, "sleepbackends_engine_serving")
    assert serving == {'{engine="a"}': 0, '{engine="b"}': 0, '{engine="c"}': 0}
    counted = samples(text, "sleepbackends_transition_seconds_count")
    assert counted['{engine="c",operation="sleep",outcome="changed"}'] == 1
    offloaded = samples(text, "sleepbackends_tag_bytes")
    assert offloaded['{engine="c",residency="offloaded",tag="weights"}'] == 1000
    assert offloaded['{engine="c",residency="resident",tag="weights"}'] == 1000

    text = run(SCRAPER, tmp_path, released)
    assert sleep_states(text, "b") == {}, "a process that is gone has no state"
    assert any(
        'engine="b"' in labels for labels in samples(text, "sleepbackends_transition_seconds_count")
    ), "what it did is still counted"


def test_its_own_engines_are_brought_up_to_date_by_a_scrape(tmp_path: Path) -> None:
    code = """
from prometheus_client import generate_latest
from sleepbackends.metrics import Metrics
from tests.gated import make
orchestrator, backend, _ = make()
metrics = Metrics()
metrics.observe(orchestrator)
with backend.region("lora") as region:
    region.buffer(7)
print(generate_latest(metrics.registry).decode())
"""
    name = "sleepbackends_tag_bytes"
    exported = samples(run(code, tmp_path), name)
    assert exported['{engine="0",residency="resident",tag="lora"}'] == 1007


def test_a_directory_that_is_not_there_is_an_error_with_a_hint(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="create the directory PROMETHEUS_MULTIPROC_DIR"):
        run(SCRAPER, tmp_path / "missing")
