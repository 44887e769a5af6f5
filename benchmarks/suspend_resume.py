"""Compare suspend and resume with the peers' allocators and with plain pinned copies.

In one run on one GPU: the link by plain copies first, then each allocator in a process of
its own on the same workload: weights that a suspend keeps, a KV cache that it drops.

    python -m benchmarks.suspend_resume --peers DIR --out benchmarks/results/NAME.json

With ``--devices 2``, ours and plain copies alone, on one device and on two at once. DIR
holds ``vllm/`` and ``tms/``; see ``benchmarks.peers``. Tables are printed as Markdown.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import psutil

from benchmarks.peers import missing, version
from benchmarks.tables import IN_TURN, OURS, PEERS, PLAIN_COPY, Row, link_rates, markdown
from benchmarks.workload import Spec
from sleepbackends.host_limits import host_memory
from sleepbackends.hostmemory import driver as host

GIB = 1 << 30
ROOT = Path(__file__).resolve().parents[1]
CHUNK_BYTES = 256 << 20


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.suspend_resume",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--weights-gib", type=float, default=16.0, help="on each device")
    parser.add_argument("--kv-gib", type=float, default=32.0)
    parser.add_argument("--tensor-mib", type=float, nargs="+", default=[256.0, 20.0, 1.0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--devices", type=int, choices=(1, 2), default=1)
    parser.add_argument("--peers", type=Path, help="the folder with the peers' packages")
    parser.add_argument(
        "--only", nargs="+", choices=(OURS, *PEERS), default=[*PEERS, OURS], help="what to measure"
    )
    parser.add_argument("--timeout-s", type=float, default=300.0, help="of each process")
    parser.add_argument("--vllm-version", help="where the folder does not tell it")
    parser.add_argument("--out", type=Path, help="write everything to this file, as JSON")
    parser.add_argument("--markdown", type=Path, help="also write the tables to this file")
    chosen = parser.parse_args(arguments)
    if chosen.rounds < 2:
        parser.error("--rounds must be 2 or more: the first suspend is a case of its own")
    return chosen


def specs(chosen: argparse.Namespace) -> list[Spec]:
    """List what is to be measured, in order."""
    folder = str(chosen.peers) if chosen.peers else None
    common = {"weights_gib": chosen.weights_gib, "rounds": chosen.rounds}
    found = [Spec(PLAIN_COPY, **common, devices=chosen.devices)]
    if chosen.devices == 2:
        sizes = chosen.tensor_mib[:1]
        return found + [Spec(OURS, **common, tensor_mib=size, devices=2) for size in sizes]
    common["kv_gib"] = chosen.kv_gib
    peers = [(peer, "none") for peer in PEERS] + [(OURS, "none"), (OURS, "zero")]
    in_turn = Spec(IN_TURN, kv_gib=chosen.kv_gib, rounds=chosen.rounds, folder=folder)
    found += [in_turn] * ({OURS, "tms"} <= set(chosen.only))
    return found + [
        Spec(peer, **common, tensor_mib=size, fill=fill, folder=folder)
        for size in chosen.tensor_mib
        for peer, fill in peers
        if peer in chosen.only
    ]


def run(spec: Spec, timeout_s: float) -> tuple[list[dict[str, Any]], str]:
    """Measure in a process of its own; return what it wrote, and what went wrong if anything."""
    with tempfile.TemporaryDirectory() as scratch:
        output = Path(scratch) / "rows"
        command = [sys.executable, "-m", "benchmarks.workload", spec.to_json(), str(output)]
        problem = ""
        try:
            done = subprocess.run(  # noqa: S603 - runs a module beside this one
                command, cwd=ROOT, timeout=timeout_s, capture_output=True, text=True, check=False
            )
        except subprocess.TimeoutExpired:
            problem = f"not done after {timeout_s:g} s"
        else:
            if done.returncode:
                last = done.stderr.strip().splitlines()[-1:] or ["no message"]
                problem = f"exit code {done.returncode}: {last[0]}"
        lines = output.read_text().splitlines() if output.exists() else []
    return [json.loads(line) for line in lines], problem


def touch_host_memory(size_bytes: int) -> int:
    """Have the machine give this much memory once; return how much it was.

    The memory of a virtual machine may grow as it is touched for the first time, which
    would be counted against whoever needs it first.
    """
    size_bytes = host.round_up(min(size_bytes, host_memory().available_bytes * 3 // 4))
    address = host.reserve(size_bytes)
    try:
        host.map_memory(address, size_bytes)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            for at in range(0, size_bytes, CHUNK_BYTES):
                pool.submit(host.populate, address + at, min(CHUNK_BYTES, size_bytes - at))
    finally:
        host.release(address, size_bytes)
    return size_bytes


def driver_version() -> str:
    """Return the version of the NVIDIA driver, as the kernel tells it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return "unknown"
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", text)
    return found[0] if found else "unknown"


def machine(described: dict[str, Any], chosen: argparse.Namespace) -> dict[str, Any]:
    """Tell what the figures were measured with."""
    facts = {
        **described,
        "driver": driver_version(),
        "python": platform.python_version(),
        "linux": platform.release(),
        "cpus": os.cpu_count(),
        "host_gib": round(psutil.virtual_memory().total / GIB),
        "date": datetime.now(timezone.utc).date().isoformat(),
    }
    if chosen.peers:
        facts["vllm"] = chosen.vllm_version or version("vllm", chosen.peers)
        facts["torch_memory_saver"] = version("tms", chosen.peers)
    return facts


def measure(chosen: argparse.Namespace) -> dict[str, Any]:
    """Measure everything that was asked for and can be measured.

    Raises
    ------
    SystemExit
        If there is no GPU.
    """
    described, problem = run(Spec("describe"), chosen.timeout_s)
    problem = problem or described[0].get("problem", "")
    if problem:
        raise SystemExit(f"nothing can be measured here: {problem}")
    if described[0]["gpu_count"] < chosen.devices:
        raise SystemExit(f"--devices {chosen.devices}: there is one CUDA device")
    touch_host_memory(int((2 * chosen.weights_gib * chosen.devices + 8) * GIB))
    rows: list[Row] = []
    skipped: dict[str, str] = {}
    for spec in specs(chosen):
        name = f"{spec.peer}, {spec.tensor_mib:g} MiB, fill {spec.fill}"
        why = missing(spec.peer, chosen.peers)
        if why:
            skipped[spec.peer] = why
            continue
        print(f"measuring {name}", file=sys.stderr, flush=True)
        found, problem = run(spec, chosen.timeout_s)
        rows += [Row(**row) for row in found]
        if problem:
            skipped[name] = problem
    return {
        "machine": machine(described[0], chosen),
        "link": link_rates(rows),
        "skipped": skipped,
        "rows": [row.to_json() for row in rows],
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 1 if ours, or a plain copy, failed."""
    chosen = parse(arguments)
    result = measure(chosen)
    if chosen.out:
        chosen.out.parent.mkdir(parents=True, exist_ok=True)
        chosen.out.write_text(json.dumps(result, indent=1) + "\n")
    tables = markdown(result)
    print(tables)
    if chosen.markdown:
        chosen.markdown.write_text(tables)
    return int(any(name.startswith((OURS, PLAIN_COPY)) for name in result["skipped"]))


if __name__ == "__main__":
    sys.exit(main())
