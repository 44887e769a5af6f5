"""Suspend, resume and discard as transactions over a mechanism: order, undo, bookkeeping.

Each function is called with the transition lock held and with requests that were checked.
Nothing is recorded in the ledger before it has happened.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from itertools import zip_longest

from sleepbackends.control import Control, Stage
from sleepbackends.errors import ContentsLostError, MechanismError, NoRoomError, add_note
from sleepbackends.ledger import Block, Ledger
from sleepbackends.mechanism import Fill, Mechanism
from sleepbackends.residency import Move

_POLL_S = 0.02


def suspend(
    mechanism: Mechanism,
    ledger: Ledger,
    offload: Sequence[Block],
    drop: Sequence[Block],
    control: Control,
) -> None:
    """Save and unmap some blocks, then drop others.

    Whatever must be kept is safe, or certain to be, before anything is lost. A failure
    before the first block was dropped brings back what was already unmapped, so nothing
    has changed; a failure after that leaves each block where the ledger says it is.
    """
    # A stranded block is mapped but its saved copy is still owed.
    unsaved = _in_turn([block for block in offload if not block.placement.owed])
    control.start("suspend", _size(unsaved))
    with control.phase("synchronize"):
        mechanism.synchronize([*offload, *drop])
    mechanism.check_room_to_save(unsaved)
    control.agree(Stage.CHECKED)
    moved: list[Block] = []
    dropped: list[Block] = []
    try:
        stranded = [block for block in offload if block.placement.owed]
        for batch in mechanism.batches(stranded):
            _offload(mechanism, ledger, batch, moved, control)
        # Closed here, not whenever the traceback lets go of it: copies may be under way.
        with closing(_save(mechanism, ledger, unsaved, moved, control)) as saved:
            for _ in saved:
                if drop and not dropped and mechanism.saving_is_certain():
                    control.agree(Stage.UNDOABLE)
                    control.commit()
                    _drop(mechanism, ledger, drop, dropped, control)
        if not dropped:
            control.agree(Stage.UNDOABLE)
            _drop(mechanism, ledger, drop, dropped, control)
    except BaseException as error:
        if not dropped:
            _bring_back(mechanism, ledger, moved, error)
        for block in unsaved:
            if not block.placement.owed:
                mechanism.retire(block)
        raise


def discard(
    mechanism: Mechanism, ledger: Ledger, blocks: Sequence[Block], control: Control
) -> None:
    """Unmap blocks and forget their bytes.

    A failure leaves the blocks dealt with before it DISCARDED and the others as they were.
    """
    control.start("discard", 0)
    with control.phase("synchronize"):
        mechanism.synchronize(blocks)
    control.agree(Stage.UNDOABLE)
    _drop(mechanism, ledger, blocks, [], control)


def resume(
    mechanism: Mechanism,
    ledger: Ledger,
    blocks: Sequence[Block],
    fill: Fill,
    wait_for_memory_s: float,
    control: Control,
) -> None:
    """Map blocks again, restore what was saved, fill the rest.

    All memory is taken before the first copy, and nothing is recorded or forgotten before
    the last copy has succeeded. After a failure everything is asleep as before.
    """
    give_up = time.monotonic() + wait_for_memory_s
    while True:
        try:
            _resume_once(mechanism, ledger, blocks, fill, control)
            return
        except NoRoomError as error:
            if time.monotonic() >= give_up:
                if wait_for_memory_s:
                    add_note(error, f"waited {wait_for_memory_s} s for memory")
                raise
            control.check("waiting for memory")
            time.sleep(min(_POLL_S, control.remaining_s() or _POLL_S))


def _save(
    mechanism: Mechanism,
    ledger: Ledger,
    blocks: Sequence[Block],
    moved: list[Block],
    control: Control,
) -> Generator[None, None, None]:
    """Save and unmap, with a pause whenever some blocks are."""
    if not blocks:
        return
    saved = mechanism.save(blocks, control)
    waiting = set(blocks)
    try:
        while (batch := _next(saved, "save", control)) is not None:
            _settle(waiting, batch, "save")
            _offload(mechanism, ledger, batch, moved, control)
            yield
    finally:
        _close(saved)
    if waiting:
        raise MechanismError(f"save ended with {len(waiting)} of {len(blocks)} blocks not saved")


def _next(
    steps: Iterator[Block | Sequence[Block]], phase: str, control: Control
) -> Sequence[Block] | None:
    with control.phase(phase):
        found = next(steps, None)
    return [found] if isinstance(found, Block) else found


def _offload(
    mechanism: Mechanism,
    ledger: Ledger,
    batch: Sequence[Block],
    moved: list[Block],
    control: Control,
) -> None:
    with control.phase("unmap"):
        _unmap(mechanism, ledger, Move.OFFLOAD, batch, moved)


def _unmap(
    mechanism: Mechanism, ledger: Ledger, move: Move, batch: Sequence[Block], gone: list[Block]
) -> None:
    done: list[Block] = []
    try:
        mechanism.unmap_all(batch, done)
    finally:
        ledger.apply(move, *done)
        gone += done


def _drop(
    mechanism: Mechanism,
    ledger: Ledger,
    blocks: Sequence[Block],
    dropped: list[Block],
    control: Control,
) -> None:
    try:
        with control.phase("drop"):
            for batch in mechanism.batches(blocks):
                _unmap(mechanism, ledger, Move.DISCARD, batch, dropped)
    finally:
        ledger.bump_epochs(dropped)


def _bring_back(
    mechanism: Mechanism, ledger: Ledger, moved: Sequence[Block], error: BaseException
) -> None:
    try:
        if moved:
            _resume_once(mechanism, ledger, moved, Fill.NONE, Control())
    except Exception as second:  # noqa: BLE001 - the first error is raised, this one is its note
        add_note(error, f"could not be undone, the saved bytes are kept: {second!r}")


def _resume_once(
    mechanism: Mechanism,
    ledger: Ledger,
    blocks: Sequence[Block],
    fill: Fill,
    control: Control,
) -> None:
    owed = _in_turn([block for block in blocks if block.placement.owed])
    empty = [block for block in blocks if not block.placement.owed]
    unmapped = [block for block in (*owed, *empty) if not block.placement.mapped]
    control.start("resume", _size(owed))
    with control.phase("reserve"):
        mechanism.reserve(unmapped)
    mapped: list[Block] = []
    try:
        control.agree(Stage.CHECKED)
        ready = _mapping(mechanism, owed, empty, fill, mapped, control)
        _restore(mechanism, ready, owed, control)
        for _ in ready:
            pass  # to map what the restore had no reason to ask for
        with control.phase("synchronize"):
            mechanism.synchronize(blocks)
        control.agree(Stage.UNDOABLE)
    except BaseException as error:
        _undo_resume(mechanism, ledger, unmapped, mapped, error)
        raise
    ledger.apply(Move.RESUME, *blocks)
    for block in owed:
        mechanism.retire(block)


def _mapping(
    mechanism: Mechanism,
    owed: Sequence[Block],
    empty: Sequence[Block],
    fill: Fill,
    mapped: list[Block],
    control: Control,
) -> Iterator[Block]:
    """Map batch by batch, so that what restores the first goes on beside the rest."""
    for batch in mechanism.batches(owed):
        with control.phase("map"):
            _map(mechanism, batch, mapped)
        yield from batch
    with control.phase("map"):
        for batch in mechanism.batches(empty):
            _map(mechanism, batch, mapped)
            for block in batch:
                mechanism.fill(block, fill)


def _map(mechanism: Mechanism, batch: Sequence[Block], mapped: list[Block]) -> None:
    asleep = [block for block in batch if not block.placement.mapped]
    if asleep:
        mechanism.map_all(asleep, mapped)


def _restore(
    mechanism: Mechanism, ready: Iterable[Block], blocks: Sequence[Block], control: Control
) -> None:
    if not blocks:
        return
    restored = mechanism.restore(ready, control)
    waiting = set(blocks)
    try:
        while (batch := _next(restored, "restore", control)) is not None:
            _settle(waiting, batch, "restore")
    finally:
        _close(restored)
    if waiting:
        raise MechanismError(
            f"restore ended with {len(waiting)} of {len(blocks)} blocks not restored"
        )


def _undo_resume(
    mechanism: Mechanism,
    ledger: Ledger,
    reserved: Sequence[Block],
    mapped: Sequence[Block],
    error: BaseException,
) -> None:
    # Copies that were queued into these blocks must have ended before their memory goes.
    waited = _attempt(error, "synchronize", lambda: mechanism.synchronize(mapped))
    for block in reversed(mapped):
        if not waited or not _attempt(error, "unmap", partial(mechanism.unmap, block)):
            ledger.strand(block)
    _attempt(error, "unreserve", lambda: mechanism.unreserve(reserved[len(mapped) :]))
    if isinstance(error, ContentsLostError):
        lost = [block for block in map(ledger.get, error.addresses) if block is not None]
        for block in lost:
            ledger.apply(Move.LOSE, block)
            mechanism.forget(block)
        ledger.bump_epochs(lost)


def _attempt(error: BaseException, step: str, call: Callable[[], None]) -> bool:
    try:
        call()
    except Exception as second:  # noqa: BLE001 - the first error is raised, this one is its note
        add_note(error, f"{step} failed while undoing: {second!r}")
        return False
    return True


def _settle(waiting: set[Block], batch: Sequence[Block], step: str) -> None:
    before = len(waiting)
    waiting.difference_update(batch)
    if before - len(waiting) != len(batch):
        raise MechanismError(f"{step} yielded a block twice or one that was not asked for")


def _close(steps: object) -> None:
    close = getattr(steps, "close", None)
    if close is not None:
        close()


def _in_turn(blocks: Iterable[Block]) -> list[Block]:
    """Order blocks so that the devices take turns and every link has work."""
    by_device: dict[str, list[Block]] = {}
    for block in blocks:
        by_device.setdefault(block.device, []).append(block)
    turns = zip_longest(*by_device.values())
    return [block for turn in turns for block in turn if block is not None]


def _size(blocks: Iterable[Block]) -> int:
    return sum(block.size_bytes for block in blocks)
