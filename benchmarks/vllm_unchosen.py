"""Compare a vLLM in which sleepbackends is installed and not chosen with one in which it is not.

With sleep mode on and nothing of ours chosen, and with ours chosen and sleep mode off. In each
pair the tokens, whose allocator it is, and what torch and the device count at every step have to
be the same. A small model with random weights, each case in a process of its own.

    python -m benchmarks.vllm_unchosen
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import vllm_engine
from benchmarks.vllm_engine import GIB, MIB
from benchmarks.vllm_processes import Found, Notes, Turns, leave, take_turn

ABSENT, UNCHOSEN = "absent", "unchosen"
ABSENT_OFF, CHOSEN_OFF = "absent-off", "chosen-off"
CASES: dict[str, dict[str, str | None]] = {
    ABSENT: {"SLEEPBACKENDS_VLLM": None, "VLLM_PLUGINS": None},
    UNCHOSEN: {"SLEEPBACKENDS_VLLM": None, "VLLM_PLUGINS": None},
    ABSENT_OFF: {"SLEEPBACKENDS_VLLM": None, "VLLM_PLUGINS": None},
    CHOSEN_OFF: {"SLEEPBACKENDS_VLLM": "1", "VLLM_PLUGINS": None},
}
PAIRS = {
    "sleep mode on, nothing of ours chosen": (ABSENT, UNCHOSEN),
    "ours chosen, sleep mode off": (ABSENT_OFF, CHOSEN_OFF),
}
SHAPE, KV_BYTES = "small", GIB
SLACK_BYTES = 16 * MIB
"""What the device's free memory may differ by; what torch counts may not differ at all."""

TIMEOUT_S = 120.0


def hide_plugin() -> None:
    """Have nobody in this process find our entry points."""
    found: Any = metadata.entry_points

    def others(**selected: Any) -> metadata.EntryPoints:
        return metadata.EntryPoints(e for e in found(**selected) if e.name != "sleepbackends")

    metadata.entry_points = others  # type: ignore[assignment]


def snapshot(before_bytes: int) -> dict[str, int]:
    """Tell what torch counts, and how much less the device has free than before."""
    import torch

    counted = torch.cuda.memory_stats()
    names = ["allocated_bytes.all.current", "reserved_bytes.all.current", "segment.all.current"]
    return {
        **{name: counted.get(name, 0) for name in names},
        "device_bytes": before_bytes - vllm_engine.free_bytes(),
    }


def work(case: str, results: Path) -> None:
    """Be one of the processes."""
    notes = Notes(results)
    if case in (ABSENT, ABSENT_OFF):
        hide_plugin()
    take_turn()
    sleeps = case in (ABSENT, UNCHOSEN)
    before = vllm_engine.free_bytes()
    llm = vllm_engine.start(SHAPE, KV_BYTES, graphs=False, sleep_mode=sleeps)
    steps = {"loaded": snapshot(before)}
    tokens = [vllm_engine.generate(llm)]
    steps["served"] = snapshot(before)
    if sleeps:
        llm.sleep(level=1)
        steps["asleep"] = snapshot(before)
        llm.wake_up()
        tokens.append(vllm_engine.generate(llm))
        steps["awake"] = snapshot(before)
    loaded = "sleepbackends.adapters.vllm.plugin" in sys.modules
    notes.note(plugin=loaded, allocator=vllm_engine.allocator(), tokens=tokens, steps=steps)
    leave()


def measure(timeout_s: float = TIMEOUT_S) -> dict[str, Found]:
    """Run all processes, one after another."""
    with (
        tempfile.TemporaryDirectory() as folder,
        Turns("benchmarks.vllm_unchosen", CASES, [], Path(folder)) as turns,
    ):
        return {case: turns.run(case, timeout_s) for case in CASES}


def differences(found: Mapping[str, Found]) -> list[str]:
    """Say in what the cases of a pair differ; nothing if they are alike."""
    problems = [f"{case}: {each.problem}" for case, each in found.items() if each.problem]
    if problems:
        return problems
    facts = {case: each.facts for case, each in found.items()}
    for case, fact in facts.items():
        if fact["plugin"] is not (case in (UNCHOSEN, CHOSEN_OFF)):
            problems.append(f"{case}: the plugin was {'' if fact['plugin'] else 'not '}loaded")
    for title, (absent, here) in PAIRS.items():
        problems += [
            f"{title}: other {name}"
            for name in ("tokens", "allocator")
            if facts[absent][name] != facts[here][name]
        ]
        for step, counted in facts[absent]["steps"].items():
            for name, value in counted.items():
                other = facts[here]["steps"][step][name]
                if abs(value - other) > (SLACK_BYTES if name == "device_bytes" else 0):
                    problems.append(f"{title}, {step}: {name} is {other} instead of {value}")
    return problems


def markdown(found: Mapping[str, Found]) -> str:
    """Make a table of what was counted, in bytes."""
    lines = ["| | step | counted | not installed | installed |", "|---" * 5 + "|"]
    for title, (absent, here) in PAIRS.items():
        there, others = (found[case].facts.get("steps", {}) for case in (absent, here))
        for step in there:
            for name, value in there[step].items():
                other = others.get(step, {}).get(name, "not seen")
                lines.append(f"| {title} | {step} | {name} | {value} | {other} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return 1 if there is a difference, 2 without vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_unchosen",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of each process")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.work:
        case, results = chosen.work
        work(case, Path(results))
        return 0
    if find_spec("vllm") is None:
        print("vLLM is not installed here", file=sys.stderr)
        return 2
    found = measure(chosen.timeout_s)
    print(markdown(found))
    problems = differences(found)
    for problem in problems:
        print(f"\n{problem}")
    for case, each in found.items():
        if each.problem:
            print(f"\n{case}, end of its log:\n{each.end_of_log}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
