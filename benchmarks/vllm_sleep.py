"""Compare sleep and wake-up of a vLLM engine over vLLM's own allocator and over ours.

Each in a process of its own: vLLM's own, ours, ours after everything was staged, and ours with
packing off. Three times ``sleep(1)`` and ``wake_up()`` with nothing changed between; the tokens
and the bits of all weights have to be what they were. vLLM 0.26.0 or newer has to be installed
beside this package.

    python -m benchmarks.vllm_sleep --out vllm.json                # Llama 8B, dummy weights
    python -m benchmarks.vllm_sleep --model-shape small            # a quick trial
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import psutil

from benchmarks import vllm_engine
from benchmarks.vllm_engine import GIB, MIB
from benchmarks.vllm_processes import Found, Notes, Turns, leave, take_turn

VLLM, OURS, STAGED, UNPACKED = "vllm", "sleepbackends", "staged", "packing off"
CASES: dict[str, dict[str, str | None]] = {
    VLLM: {"SLEEPBACKENDS_VLLM": "0"},
    OURS: {"SLEEPBACKENDS_VLLM": "1", "SLEEPBACKENDS_BACKEND": "cumem"},
    STAGED: {"SLEEPBACKENDS_VLLM": "1", "SLEEPBACKENDS_BACKEND": "cumem"},
    UNPACKED: {
        "SLEEPBACKENDS_VLLM": "1",
        "SLEEPBACKENDS_BACKEND": "cumem",
        "SLEEPBACKENDS_OPTIONS__PACKING": "off",
    },
}
PACKED_WAKES_BY = 1.2
"""How many times faster a wake-up has to be with packing than without."""
CYCLES = 3
TIMEOUT_S = 180.0
TOUCH_GIB = {"small": 4, "8b": 36}
"""Host memory that is used once before: vLLM's pinned copies are rounded up to powers of two."""


class Figure(NamedTuple):
    """One row of the table.

    Parameters
    ----------
    title, unit : str
        What it is.
    of : callable
        Takes the cycles of a process and returns the value; None if there is none.
    promised : mapping of str to float
        At least how many times as good as vLLM's own it has to be, by case.
    """

    title: str
    unit: str
    of: Callable[[Sequence[Mapping[str, Any]]], float]
    promised: Mapping[str, float] = {}
    more_is_better: bool = False

    def ratio(self, value: float, own: float) -> float:
        """Tell how many times as good as vLLM's own a value is."""
        return value / own if self.more_is_better else own / value


FIGURES = [
    Figure("first sleep", "s", lambda c: c[0]["sleep_s"], {OURS: 5, STAGED: 100}),
    Figure("later sleep, nothing changed", "s", lambda c: _later(c, "sleep_s"), {OURS: 5}),
    Figure("first wake-up", "s", lambda c: c[0]["wake_s"], {OURS: 1}),
    Figure("later wake-up", "s", lambda c: _later(c, "wake_s"), {OURS: 1}),
    Figure(
        "GPU memory free while asleep",
        "MiB",
        lambda c: min(cycle["asleep_free_bytes"] for cycle in c) / MIB,
        {OURS: 1, STAGED: 1},
        more_is_better=True,
    ),
    Figure(
        "host memory taken while asleep",
        "GiB",
        lambda c: max(cycle["host_taken_bytes"] for cycle in c) / GIB,
    ),
]


def _later(cycles: Sequence[Mapping[str, Any]], name: str) -> float:
    return float(median(cycle[name] for cycle in cycles[1:]))


def _timed(call: Callable[[], object]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def work(case: str, results: Path, shape: str, kv_bytes: int) -> None:
    """Be one of the processes."""
    notes = Notes(results)
    take_turn()
    llm = vllm_engine.start(shape, kv_bytes)
    expected, sums = vllm_engine.generate(llm), vllm_engine.sum_weights(llm)
    notes.note(allocator=vllm_engine.allocator(), **vllm_engine.facts())
    # After vLLM has loaded, because it takes host memory for other things too.
    host_before = psutil.virtual_memory().available
    if case == STAGED:
        from sleepbackends.adapters.vllm.allocator import installed

        ours = installed()
        if ours is None:
            raise SystemExit("sleepbackends does not own this worker's memory, see the log")
        notes.note(stage_s=_timed(ours.memory.orchestrator.stage(["weights"]).wait))
    for number in range(CYCLES):
        awake_free = vllm_engine.free_bytes()
        sleep_s = _timed(lambda: llm.sleep(level=1))
        asleep_free = vllm_engine.free_bytes()
        host_taken = host_before - psutil.virtual_memory().available
        wake_s = _timed(llm.wake_up)
        notes.note(
            cycle=number,
            sleep_s=sleep_s,
            wake_s=wake_s,
            awake_free_bytes=awake_free,
            asleep_free_bytes=asleep_free,
            host_taken_bytes=host_taken,
            tokens_equal=vllm_engine.generate(llm) == expected,
            weights_equal=vllm_engine.sum_weights(llm) == sums,
        )
    leave()


def judge(case: str, found: Found) -> str:
    """Say what is wrong with what a process found; nothing if it can be compared."""
    facts, cycles = found.facts, _cycles(found)
    wanted = VLLM if case == VLLM else OURS
    if facts.get("allocator", wanted) != wanted:
        return f"it used the allocator of {facts['allocator']}"
    if found.problem:
        return found.problem
    if len(cycles) < CYCLES:
        return f"{len(cycles)} of {CYCLES} cycles"
    changed = [n for n in ("tokens", "weights") if not all(c[f"{n}_equal"] for c in cycles)]
    return f"other {' and '.join(changed)} after a wake-up" if changed else ""


def _cycles(found: Found) -> list[dict[str, Any]]:
    return [row for row in found.rows if "cycle" in row]


def measure(shape: str, kv_bytes: int, timeout_s: float = TIMEOUT_S) -> dict[str, Found]:
    """Run all processes, one after another."""
    arguments = ["--model-shape", shape, "--kv-gib", str(kv_bytes / GIB)]
    with (
        tempfile.TemporaryDirectory() as folder,
        Turns("benchmarks.vllm_sleep", CASES, arguments, Path(folder)) as turns,
    ):
        return {case: turns.run(case, timeout_s) for case in CASES}


def compare(found: Mapping[str, Found], promised: bool) -> tuple[list[str], bool]:
    """Make the table.

    Parameters
    ----------
    found : mapping of str to Found
        By case.
    promised : bool
        Whether what is promised of an 8B model is to be judged as well.

    Returns
    -------
    lines : list of str
        Markdown.
    right : bool
        Whether everything ran, was right, and kept what is promised.
    """
    problems = {case: judge(case, each) for case, each in found.items()}
    right = not any(problems.values())
    heads = ("sleepbackends", "staged before", "packing off")
    lines = [f"| | vLLM's own | {' | '.join(f'{head} | as good' for head in heads)} |"]
    lines.append("|---" * 8 + "|")
    for figure in FIGURES:
        values = {c: figure.of(_cycles(f)) for c, f in found.items() if not problems[c]}
        cells = [_value(figure, values.get(VLLM))]
        for case in (OURS, STAGED, UNPACKED):
            cells.append(_value(figure, values.get(case)))
            if case not in values or VLLM not in values or figure.unit == "GiB":
                cells.append("")
                continue
            ratio = figure.ratio(values[case], values[VLLM])
            least = figure.promised.get(case, 0) if promised else 0
            kept = ratio >= least
            right = right and kept
            wanted = f", promised {least:g}" if least else ""
            cells.append(f"{ratio:.4g} times{wanted}{'' if kept else ', NOT kept'}")
        lines.append(f"| {figure.title} | {' | '.join(cells)} |")
    lines += [f"\n{case}: {problem}" for case, problem in problems.items() if problem]
    if not (problems[OURS] or problems[UNPACKED]):
        unpacked, packed = (_later(_cycles(found[case]), "wake_s") for case in (UNPACKED, OURS))
        kept = not promised or unpacked / packed >= PACKED_WAKES_BY
        right = right and kept
        wanted = f", promised {PACKED_WAKES_BY:g}" if promised else ""
        lines.append(
            f"\nA later wake-up is {unpacked / packed:.4g} times faster with packing than "
            f"without{wanted}{'' if kept else ', NOT kept'}."
        )
    staged_s = found[STAGED].facts.get("stage_s") if STAGED in found else None
    if staged_s is not None:
        lines.append(f"\nStaging took {staged_s:.2f} s, beside an engine that could serve.")
    return lines, right


def _value(figure: Figure, value: float | None) -> str:
    if value is None:
        return "failed"
    return f"{value:.0f} MiB" if figure.unit == "MiB" else f"{value:.4g} {figure.unit}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if something failed or a promise is not kept, 2 without vLLM."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_sleep",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model-shape", choices=vllm_engine.SHAPES, default="8b")
    parser.add_argument("--kv-gib", type=float, default=16.0, help="size of the KV cache")
    parser.add_argument("--timeout-s", type=float, default=TIMEOUT_S, help="of each process")
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    parser.add_argument("--work", nargs=2, help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    kv_bytes = int(chosen.kv_gib * GIB)
    if chosen.work:
        case, results = chosen.work
        work(case, Path(results), chosen.model_shape, kv_bytes)
        return 0
    if find_spec("vllm") is None:
        print("vLLM is not installed here", file=sys.stderr)
        return 2
    from sleepbackends.bench.host_memory import touch_host_memory

    touch_host_memory(TOUCH_GIB[chosen.model_shape] * GIB)
    found = measure(chosen.model_shape, kv_bytes, chosen.timeout_s)
    lines, right = compare(found, promised=chosen.model_shape == "8b")
    facts = found[VLLM].facts
    print(f"vLLM {facts.get('vllm')}, torch {facts.get('torch')}, {facts.get('gpu')}\n")
    print("\n".join(lines))
    for case, each in found.items():
        if judge(case, each):
            print(f"\n{case}, end of its log:\n{each.end_of_log}", file=sys.stderr)
    if chosen.out:
        said = {case: {"rows": f.rows, "problem": judge(case, f)} for case, f in found.items()}
        whole = {"shape": chosen.model_shape, "kv_bytes": kv_bytes, "found": said}
        chosen.out.write_text(json.dumps(whole, indent=1), encoding="utf-8")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
