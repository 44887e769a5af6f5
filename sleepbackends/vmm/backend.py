"""The mechanism of backends over a device's virtual memory, above the driver.

A block of the ledger is an extent of the address space, with the bytes that were asked for
in it as its size. Extents come and go while torch allocates and frees, so the ledger is
brought up to date whenever a transition begins and ends, and whenever somebody looks.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence

from sleepbackends.base import BaseBackend, OptionsT
from sleepbackends.capabilities import IN_PROCESS
from sleepbackends.control import Control
from sleepbackends.errors import DeviceMemoryError, SleepBackendsError, add_note
from sleepbackends.ledger import Block
from sleepbackends.mechanism import POISON_BYTE, Fill
from sleepbackends.settings import BackendSettings
from sleepbackends.state import BackendState
from sleepbackends.vmm.address_space import AddressSpace, Extent
from sleepbackends.vmm.arena import Arena
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.mover import Direction, Saved, move
from sleepbackends.vmm.verify import check_restored, check_saved, checksum


class VmmBackend(BaseBackend[OptionsT]):
    """Unmaps and maps extents, and saves their bytes in pinned host memory.

    Parameters
    ----------
    driver : Driver
        The device driver.
    space : AddressSpace
        Where memory is allocated.
    arena : Arena
        Where bytes are saved.
    verify : bool
        Whether saved and restored bytes are checked.
    options, settings
        As for every backend.
    """

    capabilities = IN_PROCESS

    def __init__(
        self,
        driver: Driver,
        space: AddressSpace,
        arena: Arena,
        verify: bool = False,
        options: OptionsT | None = None,
        settings: BackendSettings | None = None,
    ) -> None:
        super().__init__(options, settings)
        self._driver = driver
        self._space = space
        self._arena = arena
        self._verify = verify
        self._saved: dict[int, Saved] = {}
        self._certain = False
        self._followed = -1
        # Devices on which work of ours may still be under way, and the host memory that it may
        # still use although it was given back.
        self._unsettled: set[int] = set()
        self._held_back: list[Saved] = []

    # The ledger follows the address space

    def begin(self) -> None:
        """Hold the address space still and bring the ledger up to date."""
        self._space.begin()
        self._refresh()

    def end(self) -> None:
        """Let the address space go on, and account for what was freed meanwhile."""
        self._space.end()
        self._refresh()

    def state(self) -> BackendState:
        """Return what is where; never waits and changes nothing."""
        self._follow()
        return super().state()

    def trim(self) -> int:
        """Give pinned host memory back that holds nothing now, whatever the policy; return bytes.

        The next suspend has to make it ready again, which costs more than the copy.
        """
        self._follow()
        return self._arena.trim()

    def _follow(self) -> None:
        """Bring the ledger up to date, unless a transition is going on: that does it itself."""
        if self._lock.try_acquire():
            try:
                self._refresh()
            finally:
                self._lock.release()

    def _refresh(self) -> None:
        changes = self._space.changes()
        if changes == self._followed:
            return
        # One without live bytes could not be deleted yet; it belongs to nobody.
        extents = {e.address: e for e in self._space.extents() if e.live_bytes}
        for block in self.ledger.blocks():
            extent = extents.get(block.address)
            if extent is None or extent.id != block.extra.id:
                self.forget(block)
                self.ledger.remove(block)
                continue
            del extents[block.address]
            if extent != block.extra:
                block.size_bytes, block.extra = extent.live_bytes, extent
                self.ledger.add(block)
        for extent in extents.values():
            device = self.device_name(extent.device)
            self.ledger.add(
                Block(extent.address, extent.live_bytes, extent.tag, device=device, extra=extent)
            )
        self._followed = changes

    @abstractmethod
    def device_name(self, device: int) -> str:
        """Return what torch calls a device."""

    # The mechanism

    def synchronize(self, blocks: Sequence[Block]) -> None:
        """Wait for everything queued on the devices of these blocks."""
        devices = {_extent(block).device for block in blocks}
        self._unsettled |= devices
        for device in devices:
            self._settle(device)

    def _settle(self, device: int) -> None:
        self._driver.synchronize(device)
        self._unsettled.remove(device)
        held_back, self._held_back = self._held_back, []
        for saved in held_back:
            self._give_back(saved)

    def _give_back(self, saved: Saved) -> None:
        if saved.device in self._unsettled:
            self._held_back.append(saved)
        else:
            self._arena.give_back(saved.slot)

    def check_room_to_save(self, blocks: Sequence[Block]) -> None:
        """Check that the arena can hold the bytes of these blocks."""
        self._arena.check_room(sum(block.size_bytes for block in blocks))

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        """Copy what is allocated in the blocks to the arena."""
        self._certain = False
        ranges = [self._space.live_ranges(_extent(block).id) for block in blocks]
        slots = self._arena.take([sum(size for _, size in each) for each in ranges])
        for block, live, slot in zip(blocks, ranges, slots, strict=True):
            self._saved[block.address] = Saved(_extent(block).device, live, slot)
        for block in self._move(blocks, "down", control):
            if self._verify:
                saved = self._saved[block.address]
                saved.checksum = checksum(saved)
            yield block

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        """Copy saved bytes back."""
        if self._verify:
            blocks = list(blocks)
            check_saved([(block, self._saved[block.address]) for block in blocks])
        for block in self._move(blocks, "up", control):
            if self._verify:
                lane = self._driver.lane(_extent(block).device, "copy")
                check_restored(lane, block, self._saved[block.address])
            yield block

    def _move(
        self, blocks: Iterable[Block], direction: Direction, control: Control
    ) -> Iterator[Block]:
        pairs = ((block, self._saved[block.address]) for block in blocks)
        return move(
            *(self._driver, pairs, direction, control, self._all_queued, self._unsettled.add)
        )

    def _all_queued(self) -> None:
        self._certain = True

    def saving_is_certain(self) -> bool:
        """Tell whether all copies are queued: only the loss of the device can stop them."""
        return self._certain

    def unmap(self, block: Block) -> None:
        """Unmap the extent and give its physical memory back."""
        if _extent(block).device in self._unsettled:
            self._settle(_extent(block).device)
        self._space.unmap(_extent(block).id)

    def reserve(self, blocks: Sequence[Block]) -> None:
        """Take the physical memory of all these extents."""
        taken: list[Block] = []
        try:
            for block in blocks:
                taken.append(block)
                self._space.create(_extent(block).id, device=_extent(block).device)
        except BaseException as error:
            try:
                self.unreserve(taken)
            except SleepBackendsError as second:
                add_note(error, f"not everything could be given back yet: {second!r}")
            if isinstance(error, DeviceMemoryError):
                raise self._no_room(blocks, _extent(taken[-1]).device) from error
            raise

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
        for block in blocks:
            self._space.release(_extent(block).id)

    def map(self, block: Block) -> None:
        """Map the physical memory that was reserved."""
        self._space.map(_extent(block).id)

    def fill(self, block: Block, fill: Fill) -> None:
        """Queue filling the extent; the end of the resume waits for it."""
        if fill is not Fill.NONE:
            byte = POISON_BYTE if fill is Fill.POISON else 0
            lane = self._driver.lane(_extent(block).device, "fill")
            lane.fill(block.address, _extent(block).size_bytes, byte)

    def forget(self, block: Block) -> None:
        """Give the block's room in the arena back, if it has any."""
        saved = self._saved.pop(block.address, None)
        if saved is not None:
            self._give_back(saved)

    def release(self, block: Block) -> None:
        """Extents are freed by their pieces, in the native library; see ``_refresh``."""
        self.forget(block)

    def shut_down(self) -> None:
        """Give the pinned memory and the lanes back."""
        self._arena.close()
        self._driver.close()


def _extent(block: Block) -> Extent:
    extent: Extent = block.extra
    return extent
