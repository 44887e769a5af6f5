"""Put a vLLM engine through what vLLM's own allocator cannot stand, over that and over ours.

First the model loads while a thread asks torch for statistics. Then a sleeping engine is woken
while another process holds the memory, and again when it has let go. A small model with random
weights, each allocator in processes of its own. What happens to vLLM's own is recorded; ours has
to be right.

    python -m benchmarks.vllm_faults --out faults.json
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks import vllm_engine
from benchmarks.neighbour import let_go, neighbour
from benchmarks.vllm_engine import GIB, MIB
from benchmarks.vllm_processes import Found, Notes, Turns, leave, take_turn

VLLM, OURS = "vllm", "sleepbackends"
POLLED, ROOM = "vllm-polled", "vllm-room"
OWN: dict[str, str | None] = {"SLEEPBACKENDS_VLLM": "0"}
CASES: dict[str, dict[str, str | None]] = {
    OURS: {"SLEEPBACKENDS_VLLM": "1", "SLEEPBACKENDS_BACKEND": "cumem"},
    ROOM: OWN,
    POLLED: OWN,
}
"""vLLM's own needs two: what it does first it may not survive."""

SHAPE, KV_BYTES = "small", 6 * GIB
LEFT_BYTES = GIB
"""What the neighbour leaves, at least; with what it does not need it may be twice that."""

HANG_S = 20.0
POLL_S = 0.0002
TIMEOUT_S = 120.0


def load_polled(notes: Notes, hang_s: float) -> Any:
    """Start an engine while a thread calls ``torch.cuda.memory_stats()`` in a loop.

    A process in which nothing of Python runs any more is ended by ``faulthandler``, whose
    thread needs no interpreter, with the stacks of all threads in the log.
    """
    import torch
    from vllm.v1.worker.gpu_worker import Worker

    loaded = threading.Event()
    calls = 0

    def poll() -> None:
        nonlocal calls
        # Without a pause it would keep the interpreter from the thread that loads.
        while not loaded.wait(POLL_S):
            torch.cuda.memory_stats()
            calls += 1

    thread = threading.Thread(target=poll, daemon=True)
    load_model = Worker.load_model

    def load_model_polled(worker: Any, *args: Any, **kwargs: Any) -> Any:
        faulthandler.dump_traceback_later(hang_s, exit=True)
        thread.start()
        try:
            return load_model(worker, *args, **kwargs)
        finally:
            faulthandler.cancel_dump_traceback_later()
            loaded.set()
            thread.join()

    Worker.load_model = load_model_polled
    llm = vllm_engine.start(SHAPE, KV_BYTES, graphs=False)
    notes.note(calls=calls)
    return llm


def wake_without_room(llm: Any, notes: Notes) -> None:
    """Wake a sleeping engine while another process holds the memory, then when it has let go."""
    expected = vllm_engine.generate(llm)
    llm.sleep(level=1)
    asleep_free = vllm_engine.free_bytes()
    with neighbour(LEFT_BYTES) as process:
        before = vllm_engine.free_bytes()
        notes.note(first_wake=outcome(llm.wake_up), taken_bytes=before - vllm_engine.free_bytes())
        notes.note(asleep_after=bool(llm.llm_engine.is_sleeping()))
        let_go(process)
    notes.note(missing_bytes=asleep_free - vllm_engine.free_bytes())
    notes.note(later_wake=outcome(llm.wake_up))
    notes.note(awake_after=not llm.llm_engine.is_sleeping())
    if not llm.llm_engine.is_sleeping():
        notes.note(tokens_equal=vllm_engine.generate(llm) == expected)


def outcome(call: Callable[[], object]) -> str:
    """Return ``works``, or what the call raised."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - whatever vLLM raises is what is recorded
        return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
    return "works"


def work(case: str, results: Path, hang_s: float) -> None:
    """Be one of the processes."""
    notes = Notes(results)
    take_turn()
    if case == ROOM:
        llm = vllm_engine.start(SHAPE, KV_BYTES, graphs=False)
    else:
        llm = load_polled(notes, hang_s)
    notes.note(allocator=vllm_engine.allocator(), **vllm_engine.facts())
    if case != POLLED:
        wake_without_room(llm, notes)
    notes.note(ended=True)
    leave()


def measure(
    cases: Sequence[str] = tuple(CASES), hang_s: float = HANG_S, timeout_s: float = TIMEOUT_S
) -> dict[str, Found]:
    """Run these processes, one after another."""
    chosen = {case: CASES[case] for case in cases}
    arguments = ["--hang-s", str(hang_s)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Turns("benchmarks.vllm_faults", chosen, arguments, Path(folder)) as turns,
    ):
        return {case: turns.run(case, timeout_s) for case in chosen}


def wrong(found: Found) -> list[str]:
    """Say what of ours is not as it has to be."""
    facts = found.facts
    checks = {
        "it is not our allocator": facts.get("allocator") == OURS,
        "it does not load": facts.get("calls", 0) > 0,
        "a wake-up without room raises nothing": facts.get("first_wake", "works") != "works",
        "it keeps memory after that": abs(facts.get("taken_bytes", GIB)) < 64 * MIB,
        "it does not call itself asleep after that": facts.get("asleep_after") is True,
        "a later wake-up fails": facts.get("later_wake") == "works",
        "it is not awake after that": facts.get("awake_after") is True,
        "other tokens": facts.get("tokens_equal") is True,
        found.problem or "it did not end": not found.problem and "ended" in facts,
    }
    return [what for what, holds in checks.items() if not holds]


def markdown(found: Mapping[str, Found]) -> str:
    """Make the table."""
    own = found.get(ROOM, Found()).facts
    ours = found.get(OURS, Found()).facts
    lines = ["| | vLLM's own | sleepbackends |", "|---|---|---|"]
    polled = " | ".join(_polled(found.get(case, Found())) for case in (POLLED, OURS))
    lines.append(f"| loads while a thread calls `torch.cuda.memory_stats()` | {polled} |")
    for title, of in _ROWS.items():
        cells = [of(side).replace("|", " ") for side in (own, ours)]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _polled(found: Found) -> str:
    if found.hung:
        return "hangs"
    calls = found.facts.get("calls")
    return f"loads, {calls} calls" if calls else found.problem or "not seen"


def _said(name: str) -> Callable[[Mapping[str, Any]], str]:
    said = {True: "yes", False: "no", None: "not seen"}

    def cell(facts: Mapping[str, Any]) -> str:
        value = facts.get(name)
        return str(value) if isinstance(value, str) else said[value]

    return cell


def _mib(name: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda facts: f"{facts[name] / MIB:.0f} MiB" if name in facts else "not seen"


_ROWS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "`wake_up()` without room": _said("first_wake"),
    "memory taken by that": _mib("taken_bytes"),
    "the engine calls itself asleep then": _said("asleep_after"),
    "memory missing once the neighbour is gone": _mib("missing_bytes"),
    "`wake_up()` again, with room": _said("later_wake"),
    "the engine is awake then": _said("awake_after"),
    "tokens equal": _said("tokens_equal"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; return 1 if something of ours is wrong, 2 without vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_faults",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--hang-s", type=float, default=HANG_S, help="what counts as hanging")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of each process")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.work:
        case, results = chosen.work
        work(case, Path(results), chosen.hang_s)
        return 0
    if find_spec("vllm") is None:
        print("vLLM is not installed here", file=sys.stderr)
        return 2
    found = measure(hang_s=chosen.hang_s, timeout_s=chosen.timeout_s)
    facts = found[OURS].facts
    print(f"vLLM {facts.get('vllm')}, torch {facts.get('torch')}, {facts.get('gpu')}\n")
    print(markdown(found))
    problems = wrong(found[OURS])
    for problem in problems:
        print(f"\nsleepbackends: {problem}")
    for case, each in found.items():
        if each.problem:
            print(f"\n{case}: {each.problem}, end of its log:\n{each.end_of_log}", file=sys.stderr)
    if chosen.out:
        said = {c: {"rows": f.rows, "problem": f.problem, "log": f.log} for c, f in found.items()}
        chosen.out.write_text(json.dumps(said, indent=1), encoding="utf-8")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
