"""The steps of a transition over extents: how bytes are saved, unmapped and brought back."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial

from sleepbackends.base import BaseBackend, OptionsT
from sleepbackends.control import Control, Progress
from sleepbackends.errors import (
    ContentsLostError,
    DeviceMemoryError,
    NoRoomError,
    SleepBackendsError,
    add_note,
)
from sleepbackends.ledger import Block
from sleepbackends.mechanism import POISON_BYTE, Fill
from sleepbackends.settings import BackendSettings
from sleepbackends.vmm.address_space import AddressSpace, Extent
from sleepbackends.vmm.copies import Choices, Copies
from sleepbackends.vmm.driver import Direction, Driver
from sleepbackends.vmm.fingerprint import Pending, Span
from sleepbackends.vmm.host_copy import Chunk, HostCopy
from sleepbackends.vmm.mover import SubjectT, Work, move
from sleepbackends.vmm.packing.packer import Packer, PackingMode
from sleepbackends.vmm.places import Store
from sleepbackends.vmm.reclaim import Reclaim
from sleepbackends.vmm.ring import Ring
from sleepbackends.vmm.saving import Restored, learn, to_restore, to_save, together
from sleepbackends.vmm.verify import Verify, is_intact
from sleepbackends.vmm.warm_up import WarmUp

_TELLING_BYTES = 64 << 20
"""Copies of less tell little about the link."""


class VmmMechanism(BaseBackend[OptionsT]):
    """Unmaps and maps extents, and saves their bytes in host memory or on a disk.

    The extent of a block is its ``extra``.

    Parameters
    ----------
    driver : Driver
        The device driver.
    space : AddressSpace
        Where memory is allocated.
    store : Store
        Where bytes are saved.
    verify : {"off", "sample", "resume"}
        What a resume checks of the bytes that it restored.
    packing : {"auto", "off"}
        Whether bytes are packed on the device where the driver can.
    options, settings
        As for every backend.
    """

    def __init__(
        self,
        driver: Driver,
        space: AddressSpace,
        store: Store,
        verify: Verify = "off",
        packing: PackingMode = "off",
        options: OptionsT | None = None,
        settings: BackendSettings | None = None,
    ) -> None:
        super().__init__(options, settings)
        self._driver = driver
        self._space = space
        self._store = store
        self._ring = Ring(driver)
        self._verify = verify
        self._packer = Packer(driver, packing, self._largest_chunk_bytes)
        self._copies = Copies(store, self._packer)
        self._certain = False
        self._best_bytes_s = 0.0
        self._packing_ratio: float | None = None
        self._reclaim = Reclaim(driver)
        self._warm_up = WarmUp(driver, packs=packing != "off")
        self._given_up: set[int] = set()
        self._reserved: set[Block] = set()

    @abstractmethod
    def device_name(self, device: int) -> str:
        """Return what torch calls a device."""

    def synchronize(self, blocks: Sequence[Block]) -> None:
        """Wait for everything queued on the devices of these blocks."""
        devices = {_extent(block).device for block in blocks}
        for device in devices:
            self._copies.unsettle(device)
        for device in devices:
            self._settle(device)

    def _settle(self, device: int) -> None:
        self._driver.synchronize(device)
        self._copies.settle(device)
        self._packer.give_back([device], beside=True)

    def _give_slots_back(self) -> None:
        """Give the slots of the transition back, where nothing can still be using them."""
        self._packer.give_back(filter(self._copies.is_settled, self._packer.devices()))

    def _largest_chunk_bytes(self, device: int) -> int:
        extents = [_extent(block) for block in self.ledger.blocks()]
        largest = max([e.size_bytes for e in extents if e.device == device], default=0)
        return min(largest, self._copies.chunk_limit_bytes)

    def check_room_to_save(self, blocks: Sequence[Block]) -> None:
        """Check that the store can hold the bytes of these blocks."""
        try:
            self._copies.check_room(blocks)
        except NoRoomError:
            self._warm_up.wait({_extent(block).device for block in blocks})
            spare, live_ranges = partial(self._spare, blocks), self._space.live_ranges
            self._copies.check_room_packed(blocks, spare, live_ranges)

    def _spare(self, besides: Sequence[Block]) -> list[Block]:
        """List the blocks with a copy that nothing depends on."""
        kept = {block.address for block in besides}
        return [
            block
            for block in self.ledger.blocks()
            if block in self._copies and not block.placement.owed and block.address not in kept
        ]

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Sequence[Block]]:
        """Copy what is allocated in the blocks to the store, but for what is there already."""
        self._certain = False
        try:
            yield from self._save(blocks, control)
        finally:
            self._give_slots_back()

    def _save(self, blocks: Sequence[Block], control: Control) -> Iterator[Sequence[Block]]:
        started = time.perf_counter()
        with control.phase("survey"):
            for device in {_extent(block).device for block in blocks}:
                if self._warm_up.lacks(device, "packing") or not self._packer.get_ready(device):
                    self._packer.do_without(device)
            known = self._prepare(blocks)
        pairs = [(block, self._copies[block]) for block in blocks]
        # All of a block's memory may have been freed since the transition began.
        freed = [block for block, copy in pairs if not copy.chunks]
        if freed:
            yield freed
            pairs = [(block, copy) for block, copy in pairs if copy.chunks]
        always_known, known_at_once = self._verify != "off", self._store.fingerprints_all
        make_writable = self._make_writable(blocks)
        parts = self._fingerprint, self._packer, pairs, known, control, make_writable
        works_to_do = to_save(*parts)
        with closing(self._move(works_to_do, "down")) as works:
            for work in works:
                saved = work.subject
                saved.land(always_known=always_known, known_at_once=known_at_once)
                dirty_bytes = saved.dirty_bytes
                if dirty_bytes:
                    control.advance(dirty_bytes, spared_bytes=saved.spared_bytes)
                if dirty_bytes < saved.size_bytes:
                    control.advance(saved.size_bytes - dirty_bytes, clean=True)
                if saved.blocks:
                    yield saved.blocks
        self._note_rate(control.progress, started)

    def _have_kernels(self, devices: Iterable[int]) -> None:
        self._warm_up.wait(devices)
        for device in devices:
            self._driver.load(device, "fingerprint")
            self._packer.get_ready(device)

    def _fingerprint(self, device: int, spans: Sequence[Span]) -> Pending | None:
        lacks = self._warm_up.lacks(device, "fingerprint")
        return None if lacks else self._driver.fingerprint(device, spans)

    def _note_rate(self, progress: Progress, started: float) -> None:
        copied_bytes = progress.done_bytes - progress.clean_bytes
        if copied_bytes >= _TELLING_BYTES:
            rate = copied_bytes / (time.perf_counter() - started)
            self._best_bytes_s = max(rate, self._best_bytes_s)
        if copied_bytes:
            self._packing_ratio = 1.0 - progress.spared_bytes / copied_bytes

    def _prepare(self, blocks: Sequence[Block], *, at_ease: bool = False) -> Choices:
        spare, live_ranges = partial(self._spare, blocks), self._space.live_ranges
        return self._copies.prepare(blocks, spare, live_ranges, at_ease=at_ease)

    def _make_writable(
        self, blocks: Sequence[Block]
    ) -> Callable[[Sequence[tuple[HostCopy, Chunk, int]]], None]:
        return partial(self._copies.make_writable, spare=partial(self._spare, blocks))

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Sequence[Block]]:
        """Copy saved bytes back.

        Raises
        ------
        ContentsLostError
            After all blocks were copied, if the saved bytes of some are damaged.
        """
        damaged: list[Block] = []
        restored: list[HostCopy] = []
        for device in self._packer.devices():
            # Slots that a suspend has left because they may be in use are not used meanwhile.
            if not self._copies.is_settled(device):
                self._settle(device)
        try:
            works_to_do = to_restore(blocks, self._copies, self._packer)
            with closing(self._move(works_to_do, "up")) as works:
                for work in works:
                    control.advance(work.size_bytes, spared_bytes=work.subject.spared_bytes)
                    bad = self._damaged(work)
                    damaged += bad
                    good = [block for block in work.subject.blocks if block not in bad]
                    if good:
                        restored += [self._copies[block] for block in good]
                        yield good
        finally:
            self._give_slots_back()
        # Not later: as soon as the blocks are awake, whoever uses them may write.
        self._warm_up.memory_is_back(self._is_away)
        if self._store.retains:
            learn(self._fingerprint, restored)
        if not self._store.retains:
            self._ring.trim()
        if damaged:
            raise ContentsLostError(
                f"the saved bytes of {len(damaged)} blocks changed while they slept",
                addresses=[block.address for block in damaged],
                tags={block.tag for block in damaged},
                hint="resume again and reload these tags",
            )

    def _damaged(self, work: Work[Restored]) -> list[Block]:
        """Choose the blocks that were not restored as they were saved."""
        if self._verify == "off" and not work.damaged:
            return []
        copies = [(block, self._copies[block]) for block in work.subject.blocks]
        return [
            block
            for block, copy in copies
            if any(chunk.span.holds(address) for chunk in copy.chunks for address in work.damaged)
            or not is_intact(self._driver, copy, self._verify)
        ]

    def _move(
        self, works: Iterable[Work[SubjectT]], direction: Direction
    ) -> Generator[Work[SubjectT], None, None]:
        return move(
            *(self._driver, self._ring, works, direction, self._all_queued, self._copies.unsettle),
            benches=self._packer.benches,
        )

    def _all_queued(self) -> None:
        self._certain = True

    def saving_is_certain(self) -> bool:
        """Tell whether only the loss of the device can keep the copies from being made."""
        return self._certain

    def unmap(self, block: Block) -> None:
        """Unmap the extent and give its physical memory back."""
        self._unmap([block], [])

    def unmap_all(self, blocks: Sequence[Block], done: list[Block]) -> None:
        """Unmap extents by one call."""
        self._unmap(blocks, done)

    def _unmap(self, blocks: Sequence[Block], done: list[Block]) -> None:
        extents = [_extent(block) for block in blocks]
        devices = {extent.device for extent in extents}
        for device in devices:
            if not self._copies.is_settled(device):
                self._settle(device)
        self._warm_up.memory_goes(devices)
        self._given_up |= devices
        self._space.unmap(extents, lambda count: done.extend(blocks[:count]))

    def batches(self, blocks: Sequence[Block]) -> Iterable[Sequence[Block]]:
        """Cut blocks where a restore does, so that what it waits for is mapped."""
        return together(blocks)

    def end(self) -> None:
        """Have the driver take back what the transition gave up, once it has ended."""
        self._give_slots_back()
        self._reserved.clear()
        self._warm_up.memory_is_back(self._is_away)
        if self._given_up:
            self._reclaim.soon(self._given_up)
            self._given_up.clear()

    def _is_away(self, device: int) -> bool:
        blocks = [block for block in self.ledger.blocks() if _extent(block).device == device]
        return not all(block.placement.mapped or block in self._reserved for block in blocks)

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Take the physical memory of all these extents."""
        self._reclaim.cancel()
        self._packer.give_back(self._packer.devices(beside=True), beside=True)
        extents = [_extent(block) for block in blocks]
        taken: list[Block] = []
        try:
            self._space.create(extents, lambda count: taken.extend(blocks[:count]))
        except BaseException as error:
            try:
                self.unreserve(taken)
            except SleepBackendsError as second:
                add_note(error, f"not everything could be given back yet: {second!r}")
            if isinstance(error, DeviceMemoryError):
                raise self._no_room(blocks, extents[len(taken)].device) from error
            raise
        self._reserved.update(blocks)

    def _no_room(self, blocks: Sequence[Block], device: int) -> DeviceMemoryError:
        # Counted after what this attempt had taken was given back.
        extents = [_extent(block) for block in blocks]
        needed = sum(extent.size_bytes for extent in extents if extent.device == device)
        available = self._driver.free_bytes(device)
        return DeviceMemoryError(
            f"waking up needs {needed} bytes of {self.device_name(device)} and {available} "
            "are available",
            needed_bytes=needed,
            available_bytes=available,
            tags={block.tag for block in blocks},
            hint="let another process give memory back and repeat the call, or set "
            "wait_for_memory_s",
        )

    def unreserve(self, blocks: Sequence[Block]) -> None:
        """Give back physical memory that was not mapped."""
        self._space.release([_extent(block) for block in blocks])

    def map(self, block: Block) -> None:
        """Map the physical memory that was reserved."""
        self._map([block], [])

    def map_all(self, blocks: Sequence[Block], done: list[Block]) -> None:
        """Map the physical memory of extents by one call."""
        self._map(blocks, done)

    def _map(self, blocks: Sequence[Block], done: list[Block]) -> None:
        extents = [_extent(block) for block in blocks]
        self._space.map(extents, lambda count: done.extend(blocks[:count]))

    def fill(self, block: Block, fill: Fill) -> None:
        """Queue filling the extent; the end of the resume waits for it."""
        if fill is not Fill.NONE:
            byte = POISON_BYTE if fill is Fill.POISON else 0
            lane = self._driver.lane(_extent(block).device, "fill")
            lane.fill(block.address, _extent(block).size_bytes, byte)

    def forget(self, block: Block) -> None:
        """Give the block's room in the store back, if it has any."""
        self._copies.drop(block)

    def retire(self, block: Block) -> None:
        """Keep the block's copy for the next save, if its room is retained."""
        self._copies.retire(block)

    def release(self, block: Block) -> None:
        """Extents are freed by their pieces, in the native library; see ``_refresh``."""
        self.forget(block)

    def shut_down(self) -> None:
        """Give the room for saved bytes and the lanes back."""
        self._warm_up.close()
        self._reclaim.close()
        self._packer.give_back(self._packer.devices())
        self._ring.trim()
        self._store.close()
        self._driver.close()


def _extent(block: Block) -> Extent:
    extent: Extent = block.extra
    return extent
