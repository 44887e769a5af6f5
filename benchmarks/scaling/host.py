"""The host: how fast processors copy its memory, and on which NUMA nodes memory lies."""

from __future__ import annotations

import logging
import math
import os
import re
import time
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from threading import Barrier

from benchmarks.scaling.spec import GIB, MIB
from sleepbackends.errors import HostMemoryError
from sleepbackends.host_limits import host_memory
from sleepbackends.hostmemory import driver as host
from sleepbackends.hostmemory import numa
from sleepbackends.vmm.driver import Driver

logger = logging.getLogger(__name__)

PIECE_BYTES = 64 * MIB
"""What each thread copies at a time: more than it has caches."""

TIMES = 16

STEP_BYTES = GIB
LEFT_BYTES = 2 * GIB
"""What is left to others while memory is touched for the first time."""

GROWTH_S = 10.0
"""How long memory may take to grow once it is short."""

POLL_S = 0.1


def touch_memory(size_bytes: int, until: float = math.inf, driver: Driver | None = None) -> int:
    """Have the machine give this much memory once; return how much it gave.

    The memory of a virtual machine may be small at first and grow as it is used. What is not
    there yet cannot be asked for, and would be counted against whoever needs it first. So would
    registering it for the first time.

    Parameters
    ----------
    size_bytes : int
        How much is wanted.
    until : float
        When to stop, by ``time.monotonic``.
    driver : Driver, optional
        Registers it, as far as that is allowed.
    """
    found = 0
    with ExitStack() as stack:
        pool = stack.enter_context(ThreadPoolExecutor(os.cpu_count()))
        try:
            while found < size_bytes and _comes(until):
                step_bytes = host.round_up(min(STEP_BYTES, size_bytes - found))
                address = host.reserve(step_bytes)
                stack.callback(host.release, address, step_bytes)
                host.map_memory(address, step_bytes)
                pieces = range(0, step_bytes, PIECE_BYTES)
                ends = [(address + at, min(PIECE_BYTES, step_bytes - at)) for at in pieces]
                list(pool.map(host.populate, *zip(*ends, strict=True)))
                found += step_bytes
                if driver is not None and not _pinned(driver, address, step_bytes, stack):
                    driver = None
        except HostMemoryError as error:
            logger.info("there is no more host memory: %s", error.message)
    return found


def _pinned(driver: Driver, address: int, size_bytes: int, stack: ExitStack) -> bool:
    """Register memory until a stack is closed; tell whether that is allowed."""
    try:
        driver.pin(address, size_bytes)
    except HostMemoryError as error:
        logger.info("not all host memory was registered before: %s", error.message)
        return False
    stack.callback(driver.unpin, address)
    return True


def _comes(until: float) -> bool:
    """Wait until there is memory for a step; tell whether there is."""
    until = min(until, time.monotonic() + GROWTH_S)
    while time.monotonic() < until:
        if host_memory().available_bytes >= STEP_BYTES + LEFT_BYTES:
            return True
        time.sleep(POLL_S)
    return False


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
