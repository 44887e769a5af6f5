"""The host: how fast processors copy its memory, and on which NUMA nodes memory lies."""

from __future__ import annotations

import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

from benchmarks.scaling.spec import GIB, MIB
from sleepbackends.hostmemory import driver as host
from sleepbackends.hostmemory import numa

PIECE_BYTES = 64 * MIB
"""What each thread copies at a time: more than it has caches."""

TIMES = 16


def copy_rates(piece_bytes: int = PIECE_BYTES, times: int = TIMES) -> dict[str, float]:
    """Measure how many GiB the processors of each node copy in a second, and all of them.

    Each thread copies memory that it has touched itself. A byte that is copied is read once
    and written once; what a device copies is either read or written.

    Returns
    -------
    rates : dict
        By the name of a node, and of ``all`` nodes where there are several.
    """
    nodes = {f"node {node}": cpus for node, cpus in numa.nodes().items()}
    if not nodes:
        nodes = {"all": frozenset(os.sched_getaffinity(0))}
    rates = {name: _copy_rate(cpus, piece_bytes, times) for name, cpus in nodes.items()}
    if len(nodes) > 1:
        everywhere = frozenset[int]().union(*nodes.values())
        rates["all"] = _copy_rate(everywhere, piece_bytes, times)
    return rates


def _copy_rate(cpus: Collection[int], piece_bytes: int, times: int) -> float:
    together = Barrier(len(cpus) + 1)
    size_bytes = host.round_up(2 * piece_bytes)

    def work(cpu: int) -> None:
        try:
            numa.run_on([cpu])
            address = host.reserve(size_bytes)
            try:
                host.map_memory(address, size_bytes)
                host.populate(address, size_bytes)
                target = host.view(address, piece_bytes)
                together.wait()
                for _ in range(times):
                    host.copy_into(target, address + piece_bytes)
                together.wait()
            finally:
                host.release(address, size_bytes)
        except BaseException:
            together.abort()
            raise

    with ThreadPoolExecutor(len(cpus)) as pool:
        working = [pool.submit(work, cpu) for cpu in cpus]
        try:
            together.wait()
            started = time.perf_counter()
            together.wait()
            seconds = time.perf_counter() - started
        finally:
            for each in working:
                each.result()
    return len(cpus) * times * piece_bytes / GIB / seconds


def bytes_by_node(
    ranges: Iterable[tuple[int, int]], process: Path = Path("/proc/self")
) -> dict[int, int]:
    """Count on which nodes memory of this process lies.

    Whole mappings are counted, as the kernel tells of no less: one that was joined with what
    lies beside it counts with that.

    Parameters
    ----------
    ranges : iterable of (int, int)
        Address and size of what is asked for.
    process : Path
        What the kernel tells of this process.

    Returns
    -------
    found : dict of int to int
        Bytes by node; empty where the kernel does not tell.
    """
    wanted = list(ranges)
    try:
        lines = (process / "numa_maps").read_text().splitlines()
        ends = dict(_mappings((process / "maps").read_text().splitlines()))
    except OSError:
        return {}
    found: Counter[int] = Counter()
    for line in lines:
        start = int(line.split(maxsplit=1)[0], 16)
        end = ends.get(start, start)
        if any(start < address + size and address < end for address, size in wanted):
            page = re.search(r"kernelpagesize_kB=(\d+)", line)
            for node, pages in re.findall(r"\bN(\d+)=(\d+)", line):
                found[int(node)] += int(pages) * 1024 * (int(page[1]) if page else 4)
    return dict(found)


def _mappings(lines: Iterable[str]) -> Iterable[tuple[int, int]]:
    for line in lines:
        start, _, end = line.split(maxsplit=1)[0].partition("-")
        yield int(start, 16), int(end, 16)
