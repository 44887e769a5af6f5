"""Suspend and resume one or many processes together, and undo what fails half-way.

All are locked in parallel, because the work of one may wait for another's; only when all are
locked is the first checkpointed; only when all are restored is the first unlocked, so that none
runs on against one that is lost. What is undone is decided by asking for the states, never from
what was asked for. A restore that failed is never tried again.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol, TypeVar

from sleepbackends.checkpoint.driver import Pairs
from sleepbackends.checkpoint.states import ProcessState
from sleepbackends.checkpoint.targets import Target

STATE_TIMEOUT_S = 5.0
"""After which a process counts as one of which nothing is known."""

_POLL_S = 0.02
_GONE = "the process has ended"
_S = ProcessState
_T = TypeVar("_T")


class Driver(Protocol):
    """What is asked of ``CheckpointDriver`` here."""

    def lock(self, pid: int, timeout_s: float) -> str:
        """Close the calls of a process."""
        ...

    def checkpoint(self, pid: int) -> str:
        """Release what it holds."""
        ...

    def restore(self, pid: int, pairs: Pairs = ()) -> str:
        """Take it again."""
        ...

    def unlock(self, pid: int) -> str:
        """Open its calls."""
        ...

    def state(self, pid: int) -> ProcessState:
        """Tell its state."""
        ...


@dataclass(frozen=True)
class Outcome:
    """How it went, and where each process is now.

    Parameters
    ----------
    ok : bool
        Whether all are where they were to be.
    step : str
        The step that failed; empty if none did.
    answers : mapping of int to str
        The driver's answers to it that were not success, by process number.
    undo : mapping of int to str
        The same, to what was to undo a suspend that failed.
    states : mapping of int to ProcessState
        Where each process is, by its own account.
    changed : bool
        Whether anything had to be done at all.
    """

    ok: bool
    step: str = ""
    answers: Mapping[int, str] = field(default_factory=dict)
    undo: Mapping[int, str] = field(default_factory=dict)
    states: Mapping[int, ProcessState] = field(default_factory=dict)
    changed: bool = True


class Group:
    """Processes that sleep and wake together.

    Parameters
    ----------
    driver : Driver
        Who does it.
    targets : sequence of Target
        The processes.
    """

    def __init__(self, driver: Driver, targets: Sequence[Target]) -> None:
        self._driver = driver
        self._targets = {target.pid: target for target in targets}

    def states(self) -> dict[int, ProcessState]:
        """Ask for the states, for as long as ``STATE_TIMEOUT_S`` at most."""
        return self._all(self._driver.state, self._targets, _S.GONE, _S.SILENT, STATE_TIMEOUT_S)

    def suspend(self, lock_timeout_s: float) -> Outcome:
        """Lock all, then checkpoint all; if one cannot be, all run on or it is said who is lost."""
        states = self.states()
        if set(states.values()) != {_S.RUNNING}:
            return Outcome(False, "state", states=states, changed=False)
        answers = self._step(partial(self._lock, lock_timeout_s), states)
        if answers:
            return self._undone("lock", answers)
        answers = self._step(self._driver.checkpoint, states)
        if answers:
            return self._undone("checkpoint", answers)
        return self._arrived(_S.CHECKPOINTED)

    def resume(self, pairs: Pairs = (), *, without_lost: bool = False) -> Outcome:
        """Restore all that sleep; when all are restored, unlock all.

        Parameters
        ----------
        pairs : sequence of tuple of str
            Which devices to restore on others, all of them named.
        without_lost : bool
            Wake the others although some cannot be woken.
        """
        states = self.states()
        if set(states.values()) == {_S.RUNNING}:
            return Outcome(True, states=states, changed=False)
        lost = {pid for pid, state in states.items() if not state.can_be_woken}
        if lost and not without_lost:
            return Outcome(False, "state", states=states, changed=False)
        asleep = [pid for pid, state in states.items() if state is _S.CHECKPOINTED]
        answers = self._step(partial(self._driver.restore, pairs=pairs), asleep)
        if pairs and set(answers.values()) == {"INVALID_VALUE"}:
            # Nothing was taken: the map does not fit, as where devices are hidden.
            answers = self._step(self._driver.restore, answers)
        if answers and not without_lost:
            return Outcome(False, "restore", answers, states=self.states())
        locked = [pid for pid, state in self.states().items() if state is _S.LOCKED]
        unlocked = self._step(self._driver.unlock, locked)
        if unlocked:
            return Outcome(False, "unlock", unlocked, states=self.states())
        if answers:
            return Outcome(False, "restore", answers, states=self.states())
        return self._arrived(_S.RUNNING, besides=lost)

    def _undone(self, step: str, answers: dict[int, str]) -> Outcome:
        """Bring all back to running after a failed suspend, unless one cannot be."""
        states = self.states()
        if not all(state.can_be_woken for state in states.values()):
            return Outcome(False, step, answers, states=states)
        undone = self.resume()
        return Outcome(False, step, answers, undone.answers, undone.states)

    def _arrived(self, wanted: ProcessState, besides: Collection[int] = ()) -> Outcome:
        states = self.states()
        there = all(state is wanted for pid, state in states.items() if pid not in besides)
        return Outcome(there, "" if there else "state", states=states)

    def _lock(self, timeout_s: float, pid: int) -> str:
        return self._driver.lock(pid, timeout_s)

    def _step(self, call: Callable[[int], str], pids: Collection[int]) -> dict[int, str]:
        """Make a call for each process at once; return the answers that were not success."""
        answers = self._all(call, pids, _GONE, "")
        return {pid: answer for pid, answer in answers.items() if answer}

    def _all(
        self,
        call: Callable[[int], _T],
        pids: Collection[int],
        if_gone: _T,
        if_silent: _T,
        timeout_s: float | None = None,
    ) -> dict[int, _T]:
        """Make a call for each process at once, and do not wait for those that ended.

        A call about a process that dies meanwhile may never return. It is left alone, in a
        thread that ends with the program.
        """
        waiting = {pid for pid in pids if self._targets[pid].is_alive()}
        found = dict.fromkeys(pids, if_gone)
        if waiting == {os.getpid()}:
            return {**found, os.getpid(): call(os.getpid())}
        done: queue.SimpleQueue[tuple[int, _T]] = queue.SimpleQueue()
        for pid in waiting:
            threading.Thread(target=_put, args=(done, pid, call), daemon=True).start()
        polls = 0
        while waiting:
            try:
                pid, answer = done.get(timeout=_POLL_S)
            except queue.Empty:
                polls += 1
                waiting = {pid for pid in waiting if self._targets[pid].is_alive()}
                if timeout_s is not None and polls * _POLL_S >= timeout_s:
                    found.update(dict.fromkeys(waiting, if_silent))
                    break
            else:
                # What the driver says of one that died meanwhile can be anything.
                found[pid] = answer if self._targets[pid].is_alive() else if_gone
                waiting.discard(pid)
        return found


def _put(done: queue.SimpleQueue[tuple[int, _T]], pid: int, call: Callable[[int], _T]) -> None:
    done.put((pid, call(pid)))
