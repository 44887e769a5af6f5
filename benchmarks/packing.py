"""Measure sleeps that pack next to plain pinned copies and to sleeps that do not, in one run.

Weights are bf16, normally distributed, and every tensor is drawn anew before each suspend, so that
all of them are copied and look as weights do; the same again with random bits, which do not pack.
Each is measured without packing and with it, and in every round as many bytes are copied between
pinned and device memory: that is the link. What was drawn is drawn once more after each resume,
and compared.

    python benchmarks/packing.py --gib 16 --rounds 5 --out packing.json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Literal

from sleepbackends.bench.first_time import do_once
from sleepbackends.bench.machine import describe, machine
from sleepbackends.bench.request import Request
from sleepbackends.bench.tables import machine_text
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends.cumem.driver import CudaDriver
from sleepbackends.cumem.options import CumemOptions
from sleepbackends.reports import ResumeReport

if TYPE_CHECKING:
    import torch

GIB, MIB = 1 << 30, 1 << 20
PLAIN_BYTES = 1 << 30
"""How much memory the plain copies are from and to, again and again."""

Mode = Literal["auto", "off"]
MODES: tuple[Mode, ...] = ("off", "auto")
CONTENTS = ("weights", "random")
CASES = ("first suspend", "suspend", "resume", "suspend, staged", "resume, staged")
AGAINST_LINK = ("suspend", "resume", "resume, staged")
"""The first suspend makes memory ready, and a staged one has nothing to copy."""
LINK = "plain copies"
SPREAD = 0.02
"""The standard deviation of the weights."""


@dataclass(frozen=True)
class Row:
    """One time.

    Parameters
    ----------
    contents : str
        What was in memory.
    packing : str
        The option, or what the link was measured with.
    case : str
        Which call.
    number : int
        Which round.
    seconds : float
        How long it took.
    ratio : float
        Bytes that crossed the link, or are held on the host, for each of the memory's.
    """

    contents: str
    packing: str
    case: str
    number: int
    seconds: float
    ratio: float = 1.0


def synchronize() -> None:
    """Wait for the device."""
    import torch

    torch.cuda.synchronize()


def timed(call: Callable[[], object]) -> float:
    """Return how many seconds a call takes, with the device idle before."""
    synchronize()
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


class Drawn:
    """Tensors that are drawn at random, as often as wanted, and can be drawn again.

    Parameters
    ----------
    backend : CumemBackend
        Where they are allocated.
    contents : str
        ``"weights"`` or ``"random"``.
    count, size_bytes : int
        How many, and how large each is.
    """

    def __init__(self, backend: CumemBackend, contents: str, count: int, size_bytes: int) -> None:
        import torch

        self._contents = contents
        with backend.region("weights"):
            self._tensors = [
                torch.empty(size_bytes // 2, dtype=torch.bfloat16, device="cuda")
                for _ in range(count)
            ]

    def free(self) -> None:
        """Give the memory back."""
        import torch

        self._tensors.clear()
        torch.cuda.empty_cache()

    def draw(self, number: int) -> None:
        """Fill all of them."""
        for index, tensor in enumerate(self._tensors):
            self._fill(tensor, number, index)

    def check(self, number: int) -> None:
        """Compare them with what was drawn.

        Raises
        ------
        SystemExit
            If they are something else.
        """
        import torch

        expected = torch.empty_like(self._tensors[0])
        for index, tensor in enumerate(self._tensors):
            self._fill(expected, number, index)
            if not torch.equal(tensor.view(torch.int16), expected.view(torch.int16)):
                raise SystemExit(f"tensor {index} is not what it was: the figures mean nothing")

    def _fill(self, tensor: torch.Tensor, number: int, index: int) -> None:
        import torch

        source = torch.Generator("cuda").manual_seed(number * 100_003 + index)
        if self._contents == "weights":
            tensor.normal_(0.0, SPREAD, generator=source)
        else:
            tensor.view(torch.int16).random_(-(1 << 15), 1 << 15, generator=source)


class Plain:
    """Copies between pinned and device memory, of as many bytes in all."""

    def __init__(self, size_bytes: int) -> None:
        import torch

        self._count = -(-size_bytes // PLAIN_BYTES)
        self._scale = size_bytes / (self._count * PLAIN_BYTES)
        self._host = torch.ones(PLAIN_BYTES, dtype=torch.uint8).pin_memory()
        self._device = torch.ones(PLAIN_BYTES, dtype=torch.uint8, device="cuda")
        self.seconds(down=True)

    def seconds(self, *, down: bool) -> float:
        """Return how long it takes."""
        import torch

        def copy() -> None:
            source, target = self._device, self._host
            if not down:
                source, target = target, source
            for _ in range(self._count):
                target.copy_(source, non_blocking=True)
            torch.cuda.synchronize()

        return timed(copy) * self._scale


def backend_rows(
    contents: str, mode: Mode, gib: float, tensor_mib: int, rounds: int, plain: Plain
) -> Iterator[Row]:
    """Measure one backend, and the link in each round."""
    backend = CumemBackend(CumemOptions(packing=mode))
    count = max(1, int(gib * 1024) // tensor_mib)
    drawn = Drawn(backend, contents, count, tensor_mib * MIB)
    total_bytes = backend.state().mapped_bytes

    def cycle(number: int, suspend: str, resume: str) -> Iterator[Row]:
        seconds = timed(backend.suspend)
        kept = backend._store.held_bytes / total_bytes
        yield Row(contents, mode, suspend, number, seconds, kept)
        reports: list[ResumeReport] = []
        seconds = timed(lambda: reports.append(backend.resume()))
        yield Row(contents, mode, resume, number, seconds, reports[0].packing_ratio)
        drawn.check(number)

    drawn.draw(0)
    yield from cycle(0, "first suspend", "first resume")
    for number in range(1, rounds + 1):
        drawn.draw(number)
        yield Row(contents, LINK, "suspend", number, plain.seconds(down=True))
        yield from cycle(number, "suspend", "resume")
        yield Row(contents, LINK, "resume", number, plain.seconds(down=False))
    for number in range(rounds + 1, 2 * rounds + 1):
        drawn.draw(number)
        backend.stage(limit_gib_s=1000.0).wait()
        yield from cycle(number, "suspend, staged", "resume, staged")
    drawn.free()
    backend.close()


def measure(gib: float, tensor_mib: int, rounds: int) -> list[Row]:
    """Measure everything."""
    plain = Plain(int(gib * GIB))
    return [
        row
        for contents in CONTENTS
        for mode in MODES
        for row in backend_rows(contents, mode, gib, tensor_mib, rounds, plain)
    ]


def median_of(rows: Sequence[Row], what: str, **wanted: str) -> float | None:
    """Return the median of seconds or ratios of some rows; None if there are none."""
    found = [
        getattr(row, what)
        for row in rows
        if all(getattr(row, name) == value for name, value in wanted.items())
    ]
    return median(found) if found else None


def markdown(rows: Sequence[Row], gib: float) -> str:
    """Make the table, and say what has to be shown."""
    head = ["contents", "call", "packing", "s", "GiB/s", "times the link", "bytes kept or copied"]
    lines = [_line(head), _line(["---"] * len(head))]
    for contents in CONTENTS:
        for case in CASES:
            link = median_of(rows, "seconds", packing=LINK, case=case.partition(",")[0])
            for mode in MODES:
                wanted = {"contents": contents, "packing": mode, "case": case}
                seconds = median_of(rows, "seconds", **wanted)
                ratio = median_of(rows, "ratio", **wanted)
                if seconds is None or ratio is None:
                    continue
                cells = [contents, case, mode, f"{seconds:.4f}", f"{gib / seconds:.1f}"]
                shown = link is not None and case in AGAINST_LINK
                cells.append(f"{link / seconds:.2f}" if shown and link else "")
                lines.append(_line([*cells, f"{ratio:.4f}"]))
    return "\n".join([*lines, "", *_findings(rows, gib)]) + "\n"


def _findings(rows: Sequence[Row], gib: float) -> Iterator[str]:
    for case in ("suspend", "resume"):
        link = median_of(rows, "seconds", packing=LINK, case=case)
        packed, off = (
            median_of(rows, "seconds", contents="weights", packing=mode, case=case)
            for mode in ("auto", "off")
        )
        random, random_off = (
            median_of(rows, "seconds", contents="random", packing=mode, case=case)
            for mode in ("auto", "off")
        )
        if link is None or not (packed and off and random and random_off):
            continue
        yield (
            f"- {case} of {gib:g} GiB of weights: {link / packed:.2f} times the link "
            f"({gib / link:.1f} GiB/s in this run), {off / packed:.2f} times as fast as without "
            f"packing; random bits: {random / random_off - 1:+.1%} with packing."
        )
    kept = [
        median_of(rows, "ratio", contents=contents, packing="auto", case="suspend")
        for contents in CONTENTS
    ]
    if None not in kept:
        yield f"- Host bytes: {kept[0]:.4f} of the weights, {kept[1]:.4f} of random bits."


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(
        prog="python benchmarks/packing.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--gib", type=float, default=16.0, help="how much memory there is")
    parser.add_argument("--tensor-mib", type=int, default=256, help="the size of each tensor")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, help="write everything as JSON")
    chosen = parser.parse_args(arguments)
    if chosen.tensor_mib < 1 or chosen.rounds < 1 or chosen.gib * 1024 < chosen.tensor_mib:
        parser.error("at least one tensor of 1 MiB and one round are needed")
    found = CumemBackend.probe()
    if not found.ok:
        raise SystemExit(f"nothing can be measured here: {found.reason} ({found.hint})")
    request = Request(
        weights_gib=(chosen.gib,), kv_gib=0.0, tensor_mib=(chosen.tensor_mib,), only=()
    )
    facts = machine(describe(), request)
    do_once(int((chosen.gib * 1.25 + 4) * GIB), CudaDriver())
    rows = measure(chosen.gib, chosen.tensor_mib, chosen.rounds)
    print(machine_text(facts, {}))
    print()
    print(markdown(rows, chosen.gib), end="")
    if chosen.out:
        whole = {"machine": facts, "rows": [asdict(row) for row in rows]}
        chosen.out.write_text(json.dumps(whole, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
