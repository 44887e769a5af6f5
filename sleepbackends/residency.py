"""Where the bytes of a block are, and the one table of moves between those places."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple

from sleepbackends.errors import PolicyConflictError


class Residency(str, Enum):
    """Where the bytes of a block are."""

    RESIDENT = "resident"
    """Mapped, bytes valid."""
    OFFLOADED = "offloaded"
    """Not mapped, bytes safe elsewhere."""
    DISCARDED = "discarded"
    """Not mapped, bytes gone."""
    UNDEFINED = "undefined"
    """Mapped again, bytes not refilled yet."""


class Move(str, Enum):
    """Something that happens to one block."""

    OFFLOAD = "offload"
    DISCARD = "discard"
    RESUME = "resume"
    VALIDATE = "validate"
    """The bytes were refilled: they mean something again."""
    LOSE = "lose"
    """The saved bytes turned out to be damaged."""


class Placement(NamedTuple):
    """The facts about a block's bytes from which its residency is derived.

    Parameters
    ----------
    mapped : bool
        Memory is behind the address.
    owed : bool
        A saved copy holds the contents and has not been restored yet.
    defined : bool
        The contents, here or saved, mean something.
    stranded : bool
        Mapped only because undoing a failed resume failed too: neither restored nor filled.
    """

    mapped: bool = True
    owed: bool = False
    defined: bool = True
    stranded: bool = False

    @property
    def residency(self) -> Residency:
        """The residency these facts amount to."""
        if not self.mapped:
            return Residency.OFFLOADED if self.owed else Residency.DISCARDED
        valid = self.defined and not self.stranded
        return Residency.RESIDENT if valid else Residency.UNDEFINED

    def asleep(self) -> Placement:
        """Return where the block would be without memory behind it."""
        return self._replace(mapped=False, stranded=False)


R, M = Residency, Move

TRANSITIONS: dict[tuple[Move, Residency], Residency] = {
    (M.OFFLOAD, R.RESIDENT): R.OFFLOADED,
    (M.OFFLOAD, R.UNDEFINED): R.OFFLOADED,
    (M.DISCARD, R.RESIDENT): R.DISCARDED,
    (M.DISCARD, R.UNDEFINED): R.DISCARDED,
    (M.RESUME, R.OFFLOADED): R.RESIDENT,
    (M.RESUME, R.DISCARDED): R.UNDEFINED,
    (M.VALIDATE, R.UNDEFINED): R.RESIDENT,
    (M.LOSE, R.OFFLOADED): R.DISCARDED,
}
"""Every legal move. Undefined bytes are saved like any others, because only the engine
knows whether it has written to them since; they come back UNDEFINED, not RESIDENT."""

REPEATS: frozenset[tuple[Move, Residency]] = frozenset(
    {
        (M.OFFLOAD, R.OFFLOADED),
        (M.DISCARD, R.DISCARDED),
        (M.RESUME, R.RESIDENT),
        (M.RESUME, R.UNDEFINED),
        (M.VALIDATE, R.RESIDENT),
    }
)
"""Moves that ask for what is already so: nothing happens, and the report says so."""


_WHY_NOT = {
    (M.DISCARD, R.OFFLOADED): "cannot discard what is offloaded: the saved bytes would be lost",
    (M.OFFLOAD, R.DISCARDED): "cannot save what is discarded: the bytes are gone",
    (M.VALIDATE, R.OFFLOADED): "cannot mark valid what is offloaded: it is not restored",
    (M.VALIDATE, R.DISCARDED): "cannot mark valid what is discarded: it is not mapped",
}


@cache  # asked of every block, and there are few answers
def moved(move: Move, placement: Placement) -> Placement:
    """Return where a block is after a move; unchanged where the move repeats what is so.

    A stranded block counts as what it would be without memory, except that putting it back
    to sleep is not a repeat.

    Raises
    ------
    PolicyConflictError
        If the move is neither in ``TRANSITIONS`` nor a repeat: discarding what a policy
        saved, saving what is gone, or validating what is not there.
    """
    place = placement.asleep() if placement.stranded else placement
    residency = place.residency
    if (move, residency) in REPEATS:
        return place
    if (move, residency) not in TRANSITIONS:
        raise PolicyConflictError(
            _WHY_NOT.get((move, residency), f"cannot {move.value} what is {residency.value}"),
            hint="resume it first, then ask again",
        )
    if move is Move.OFFLOAD:
        return Placement(mapped=False, owed=True, defined=placement.defined)
    if move is Move.DISCARD:
        return Placement(mapped=False, owed=False, defined=False)
    if move is Move.LOSE:
        return placement._replace(owed=False, defined=False)
    return Placement(defined=placement.defined or move is Move.VALIDATE)
