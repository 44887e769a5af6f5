"""Copies made while the engine serves, so that even the first sleep has little left to copy.

The engine may write while its memory is being copied, so a copy may be torn. What is kept as
the fingerprint of a chunk is therefore computed from the saved bytes themselves, after they
have landed: a suspend then finds the chunk clean only if the device holds just these bytes.

Each step holds the backend's transition lock for a few milliseconds of copying, which is the
most that a transition has to wait. What a transition took away meanwhile is left out.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sleepbackends.ledger import Block
from sleepbackends.reports import StagingReport
from sleepbackends.vmm.copies import Chunk, Copies, HostCopy
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.mover import Work, move
from sleepbackends.vmm.ring import Ring

STEP_CHUNKS = 4
"""How many chunks are copied at a time: 128 MiB, 2.5 ms of an H200's link."""

THREADS = 4
"""How many threads compute fingerprints of saved bytes."""

Hold = Callable[[], AbstractContextManager[list[Block]]]
"""Gives a scope in which no transition takes place, with the blocks that are mapped and are to
be staged."""


@dataclass
class Part:
    """A chunk of a copy, and once it was copied the fingerprint of the saved bytes."""

    copy: HostCopy
    chunk: Chunk
    writes: int = 0
    fingerprint: Future[int] | None = None


class Staging:
    """Copies that are being made beside the engine.

    Parameters
    ----------
    driver : Driver
        Copies.
    ring : Ring
        For what is not saved in pinned memory.
    copies : Copies
        Where to.
    hold : Hold
        Keeps transitions away.
    prepare : callable
        Makes room for the copies of blocks, inside such a scope.
    limit_gib_s : float
        The most to copy in a second.
    """

    def __init__(
        self,
        driver: Driver,
        ring: Ring,
        copies: Copies,
        hold: Hold,
        prepare: Callable[[list[Block]], None],
        limit_gib_s: float,
    ) -> None:
        self._driver = driver
        self._ring = ring
        self._copies = copies
        self._hold = hold
        self._prepare = prepare
        self._limit_bytes_s = limit_gib_s * (1 << 30)
        self._going = threading.Event()
        self._going.set()
        self._cancelled = threading.Event()
        self._counts: Counter[str] = Counter()
        self.ended: Future[StagingReport] = Future()

    @property
    def done(self) -> bool:
        """Whether it has ended, one way or another."""
        return self.ended.done()

    def pause(self) -> None:
        """Copy nothing more until ``proceed``; what is being copied now is finished."""
        self._going.clear()

    def proceed(self) -> None:
        """Go on after ``pause``."""
        self._going.set()

    def cancel(self) -> None:
        """Stop; what was staged so far is kept."""
        self._cancelled.set()
        self._going.set()

    def wait(self, timeout_s: float | None = None) -> StagingReport:
        """Wait until it has ended and tell what was done.

        Raises
        ------
        TimeoutError
            If it has not ended in time; it goes on.
        SleepBackendsError
            If it failed. What was staged before is kept, and nothing else was touched.
        """
        return self.ended.result(timeout_s)

    def start(self) -> Staging:
        """Begin, in a thread of its own."""
        thread = threading.Thread(target=self.run, name="sleepbackends-stage", daemon=True)

        def stop() -> None:
            self.cancel()
            thread.join()

        # At exit the thread must have left the driver before the driver goes.
        atexit.register(stop)
        self.ended.add_done_callback(lambda _: atexit.unregister(stop))
        thread.start()
        return self

    def run(self) -> Staging:
        """Do it all in this thread."""
        started = time.perf_counter()
        try:
            with ThreadPoolExecutor(THREADS, "sleepbackends-stage-hash") as pool:
                self._run(pool)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            self.ended.set_exception(error)
        else:
            seconds = time.perf_counter() - started
            self.ended.set_result(StagingReport(**self._counts, seconds=seconds))
        return self

    def _run(self, pool: ThreadPoolExecutor) -> None:
        with self._hold() as blocks:
            self._prepare(blocks)
            copies = [self._copies[block] for block in blocks]
            todo = [Part(copy, chunk) for copy in copies for chunk in copy.chunks]
        before: Sequence[Part] = ()
        for at in range(0, len(todo), STEP_CHUNKS):
            self._going.wait()
            if self._cancelled.is_set():
                break
            started = time.perf_counter()
            step = todo[at : at + STEP_CHUNKS]
            for part in step:
                part.chunk.saved.wait()  # not with the lock held: pinning takes its time
            copied = self._step(step, pool)
            self._note(before)
            before = copied
            due_s = sum(part.chunk.size_bytes for part in copied) / self._limit_bytes_s
            self._cancelled.wait(max(0.0, started + due_s - time.perf_counter()))
        self._note(before)

    def _step(self, parts: Sequence[Part], pool: ThreadPoolExecutor) -> Sequence[Part]:
        """Copy what the device says has changed, and begin to look at the saved bytes."""
        with self._hold() as blocks:
            there = self._current(parts, blocks)
            dirty = self._dirty(there)
            self._count("skipped_bytes", parts)
            self._count("skipped_bytes", there, -1)
            self._count("clean_bytes", there)
            self._count("clean_bytes", dirty, -1)
            self._copies.make_writable([(part.copy, part.chunk) for part in dirty])
            works = []
            for part in dirty:
                part.chunk.overwrite()
                part.writes = part.chunk.writes
                transfers = part.copy.transfers([part.chunk])
                size_bytes = part.chunk.size_bytes
                works.append(Work(part.copy.extent.device, transfers, size_bytes, part))
            unsettle = self._copies.unsettle
            moved = move(
                self._driver, self._ring, works, "down", on_unsettled=unsettle, use="stage"
            )
            for work in moved:
                saved = work.subject.chunk.saved
                # The bytes stay there for it, whatever becomes of the copy meanwhile.
                work.subject.fingerprint = pool.submit(saved.fingerprinting())
        return dirty

    def _dirty(self, parts: Sequence[Part]) -> list[Part]:
        """Choose the parts that the device holds other bytes of than are saved, for all we know."""
        known: dict[int, list[Part]] = {}
        for part in parts:
            if part.chunk.fingerprint is not None:
                known.setdefault(part.copy.extent.device, []).append(part)
        clean: set[int] = set()
        for device, some in known.items():
            pending = self._driver.fingerprint(device, [p.copy.span(p.chunk) for p in some])
            found = pending.result() if pending else [None] * len(some)
            clean |= {id(p) for p, f in zip(some, found, strict=True) if f == p.chunk.fingerprint}
        return [part for part in parts if id(part) not in clean]

    def _note(self, parts: Sequence[Part]) -> None:
        """Note the fingerprints of chunks that are still as they were copied."""
        found = [part.fingerprint.result() for part in parts if part.fingerprint is not None]
        if not found:
            return
        with self._hold() as blocks:
            there = self._current(parts, blocks)
            good = [part for part in there if part.chunk.writes == part.writes]
            for part, fingerprint in zip(parts, found, strict=True):
                if part in good:
                    part.chunk.fingerprint = fingerprint
        self._count("copied_bytes", good)
        self._count("skipped_bytes", parts)
        self._count("skipped_bytes", good, -1)

    def _current(self, parts: Sequence[Part], blocks: Sequence[Block]) -> list[Part]:
        """Choose the parts whose copies are still the ones of mapped blocks."""
        copies = {id(self._copies[block]) for block in blocks if block in self._copies}
        return [part for part in parts if id(part.copy) in copies]

    def _count(self, name: str, parts: Sequence[Part], sign: int = 1) -> None:
        self._counts[name] += sign * sum(part.chunk.size_bytes for part in parts)
