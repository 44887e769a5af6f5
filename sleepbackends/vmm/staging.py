"""Copies made while the engine serves, so that even the first sleep has little left to copy.

The engine may write while its memory is being copied, so a copy may be torn. What is kept as
the fingerprint of a chunk is therefore computed from the saved bytes themselves, after they
have landed: a suspend then finds the chunk clean only if the device holds just these bytes. Where
they are packed, the device unpacks them once more for that.

Each step holds the backend's transition lock for a few milliseconds of copying, which is the
most that a transition has to wait. What a transition took away meanwhile is left out.

The engine's Python waits while this thread's runs: a step takes the lock once, looks at nothing
but its own chunks, and wakes few threads.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass

from sleepbackends.errors import HostMemoryError
from sleepbackends.ledger import Block
from sleepbackends.reports import StagingReport
from sleepbackends.vmm.copies import Copies
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.host_copy import Chunk, HostCopy
from sleepbackends.vmm.mover import AnyTransfer, Work, move
from sleepbackends.vmm.packing.looking import fingerprints_of_packed
from sleepbackends.vmm.packing.packer import Packer
from sleepbackends.vmm.packing.transfer import Down, Packed
from sleepbackends.vmm.ring import Ring
from sleepbackends.vmm.saving import choose, saved_bytes

STEP_BYTES = 64 << 20
"""How much is copied at a time: 1.2 ms of an H200's link, which the engine's own launches and
results do not get past meanwhile."""

STEP_CHUNKS = 64
"""The most chunks of it: small ones take longer than their bytes."""

THREADS = 2
"""How many threads compute fingerprints of saved bytes, each as fast as memory lets it."""

Hold = Callable[[], AbstractContextManager[None]]
"""Gives a scope in which no transition takes place."""


@dataclass(slots=True)
class Part:
    """A chunk of a copy, and what becomes of it.

    Parameters
    ----------
    block : Block
        Whose chunk it is.
    copy : HostCopy
        Where the block is saved.
    chunk : Chunk
        Which part of it.
    writes : int
        How often the saved bytes had been written to once they were copied.
    packed : Packed, optional
        How it is packed, if it is.
    down : Down, optional
        Its copy, then.
    compute : callable, optional
        Tells the fingerprint of the bytes that were copied, which stay there until it has.
    fingerprint : int or None
        What it told.
    """

    block: Block
    copy: HostCopy
    chunk: Chunk
    writes: int = 0
    packed: Packed | None = None
    down: Down | None = None
    compute: Callable[[], int] | None = None
    fingerprint: int | None = None

    @property
    def saved_bytes(self) -> int:
        """How many bytes of it are copied."""
        return saved_bytes(self.chunk, self.packed)


class Staging:
    """Copies that are being made beside the engine.

    Parameters
    ----------
    driver : Driver
        Copies.
    ring : Ring
        For what is not saved in pinned memory.
    packer : Packer
        Packs.
    copies : Copies
        Where to.
    hold : Hold
        Keeps transitions away.
    blocks : callable
        Lists what is to be staged and is mapped, inside such a scope.
    have_kernels : callable
        Has the kernels of devices there that will be needed.
    prepare : callable
        Makes room for the copies of blocks, inside such a scope.
    limit_gib_s : float
        The most to copy in a second.
    """

    def __init__(
        self,
        driver: Driver,
        ring: Ring,
        packer: Packer,
        copies: Copies,
        hold: Hold,
        blocks: Callable[[], list[Block]],
        have_kernels: Callable[[set[int]], object],
        prepare: Callable[[list[Block]], object],
        limit_gib_s: float,
    ) -> None:
        self._driver = driver
        self._ring = ring
        self._packer = packer
        self._copies = copies
        self._hold = hold
        self._blocks = blocks
        self._have_kernels = have_kernels
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
            with (
                self._driver.aside(),
                ThreadPoolExecutor(THREADS, "sleepbackends-stage-hash") as pool,
            ):
                self._run(pool)
        except BaseException as error:  # noqa: BLE001 - whoever waits gets it
            self.ended.set_exception(error)
        else:
            seconds = time.perf_counter() - started
            self.ended.set_result(StagingReport(**self._counts, seconds=seconds))
        return self

    def _run(self, pool: ThreadPoolExecutor) -> None:
        with self._hold():
            devices = {block.extra.device for block in self._blocks()}
        self._have_kernels(devices)
        try:
            self._stage(pool)
        finally:
            self._give_slots_back()

    def _stage(self, pool: ThreadPoolExecutor) -> None:
        with self._hold():
            blocks = self._blocks()
            self._prepare(blocks)
            pairs = [(block, self._copies[block]) for block in blocks]
        copied: Sequence[Part] = ()
        for step in _steps(pairs):
            if not self._going.is_set():
                self._give_slots_back()
                self._going.wait()
            if self._cancelled.is_set():
                break
            started = time.perf_counter()
            for part in step:
                self._wait_for_room(part)
            copied = self._step(step, copied)
            shares = [copied[i::THREADS] for i in range(min(THREADS, len(copied)))]
            hashing = [pool.submit(_hash, share) for share in shares]
            due_s = _size(copied) / self._limit_bytes_s
            self._cancelled.wait(max(0.0, started + due_s - time.perf_counter()))
            self._wait_for(hashing)
        if copied:
            with self._hold():
                self._note(copied)

    def _wait_for_room(self, part: Part) -> None:
        """Wait for the room of a part, not with the lock held: pinning takes its time."""
        try:
            part.chunk.saved.wait()
        except HostMemoryError:
            with self._hold():
                if self._is_current(part):
                    raise
            # A transition has given it back, and the part is left out.

    def _give_slots_back(self) -> None:
        if not self._packer.beside:
            return
        with self._hold():
            devices = filter(self._copies.is_settled, self._packer.devices(beside=True))
            self._packer.give_back(devices, beside=True)

    def _wait_for(self, hashing: Sequence[Future[None]]) -> None:
        for each in hashing:
            each.result()

    def _step(self, parts: Sequence[Part], before: Sequence[Part]) -> Sequence[Part]:
        """Note what is known of the step before; copy what the device says has changed."""
        with self._hold():
            self._note(before)
            there = [part for part in parts if self._is_current(part)]
            dirty = self._dirty(there)
            self._counts["skipped_bytes"] += _size(parts) - _size(there)
            self._counts["clean_bytes"] += _size(there) - _size(dirty)
            self._choose(dirty)
            self._copies.make_writable([(p.copy, p.chunk, p.saved_bytes) for p in dirty])
            for some in self._rounds(dirty):
                self._copy(some)
            for part in dirty:
                if part.packed is None:
                    # The bytes stay there for it, whatever becomes of the copy meanwhile.
                    part.compute = part.chunk.saved.fingerprinting()
        return dirty

    def _choose(self, parts: Sequence[Part]) -> None:
        """Find out how parts are packed, which holds for as long as nobody writes to them."""
        for device, some in _by_device(parts).items():
            chunks = [part.chunk for part in some]
            choices = choose(self._packer, device, chunks, {}, beside=True)
            spans = [chunk.span for chunk in chunks]
            found = self._packer.measure(device, spans, choices, beside=True)
            for part, packed in zip(some, found, strict=True):
                part.packed = packed

    def _rounds(self, parts: Sequence[Part]) -> Iterator[list[Part]]:
        """Cut parts so that what is packed together stays in its slots."""
        benches = self._packer.beside.values()
        most = min([bench.count for bench in benches if bench is not None], default=1)
        some: list[Part] = []
        left = most
        for part in parts:
            if part.packed is not None:
                if not left:
                    yield some
                    some, left = [], most
                left -= 1
            some.append(part)
        yield some

    def _copy(self, parts: Sequence[Part]) -> None:
        """Copy parts, and find out what those stand for that are packed."""
        unsettle = self._copies.unsettle
        for _ in move(
            *(self._driver, self._ring, map(_work, parts), "down"),
            on_unsettled=unsettle,
            use="stage",
            benches=self._packer.beside,
        ):
            pass
        for device, some in _by_device(parts).items():
            bench = self._packer.beside.get(device)
            packed = [(part, part.down) for part in some if part.down is not None]
            if bench is None or not packed:
                continue
            downs = [down for _, down in packed]
            try:
                found = fingerprints_of_packed(self._driver, device, bench, downs)
            except BaseException:
                unsettle(device)
                raise
            for (part, _), fingerprint in zip(packed, found, strict=True):
                part.fingerprint = fingerprint

    def _dirty(self, parts: Sequence[Part]) -> list[Part]:
        """Choose the parts that the device holds other bytes of than are saved, for all we know."""
        known = [part for part in parts if part.chunk.fingerprint is not None]
        clean: set[int] = set()
        for device, some in _by_device(known).items():
            pending = self._driver.fingerprint(device, [p.chunk.span for p in some])
            found = pending.result() if pending else [None] * len(some)
            clean |= {id(p) for p, f in zip(some, found, strict=True) if f == p.chunk.fingerprint}
        return [part for part in parts if id(part) not in clean]

    def _note(self, parts: Sequence[Part]) -> None:
        """Note the fingerprints of chunks that are still as they were copied."""
        for part in parts:
            good = self._is_current(part) and part.chunk.writes == part.writes
            # Without one it was written to while it was being packed, and nothing is saved.
            good &= part.fingerprint is not None
            if good:
                part.chunk.fingerprint = part.fingerprint
                self._counts["spared_bytes"] += part.chunk.size_bytes - part.saved_bytes
            self._counts["copied_bytes" if good else "skipped_bytes"] += part.chunk.size_bytes

    def _is_current(self, part: Part) -> bool:
        """Tell whether the part's copy is still the one of a mapped block."""
        place = part.block.placement
        return place.mapped and not place.owed and self._copies.holds(part.copy)


def _steps(pairs: Iterable[tuple[Block, HostCopy]]) -> Iterator[Sequence[Part]]:
    step: list[Part] = []
    left_bytes = STEP_BYTES
    for block, copy in pairs:
        for chunk in copy.chunks:
            step.append(Part(block, copy, chunk))
            left_bytes -= chunk.size_bytes
            if left_bytes <= 0 or len(step) == STEP_CHUNKS:
                yield step
                step, left_bytes = [], STEP_BYTES
    if step:
        yield step


def _work(part: Part) -> Work[Part]:
    chunk = part.chunk
    chunk.overwrite(part.saved_bytes)
    part.writes = chunk.writes
    transfers: Iterable[AnyTransfer] = chunk.transfers()
    if part.packed is not None:
        part.down = Down(chunk.span, chunk.saved, part.packed.layout)
        transfers = [part.down]
    return Work(part.copy.extent.device, transfers, chunk.size_bytes, part)


def _by_device(parts: Iterable[Part]) -> dict[int, list[Part]]:
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(part.copy.extent.device, []).append(part)
    return found


def _hash(parts: Sequence[Part]) -> None:
    for part in parts:
        if part.compute is not None:
            part.fingerprint, part.compute = part.compute(), None


def _size(parts: Sequence[Part]) -> int:
    return sum([part.chunk.size_bytes for part in parts])
