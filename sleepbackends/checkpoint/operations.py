"""Suspend and resume processes with what belongs to it: locks, journal, room on the devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from sleepbackends.checkpoint import targets as targets_of
from sleepbackends.checkpoint.device_memory import DeviceMemory, DeviceMonitor
from sleepbackends.checkpoint.driver import CheckpointDriver
from sleepbackends.checkpoint.group import Driver, Group, Outcome
from sleepbackends.checkpoint.measuring import Monitor, OutsideMonitor
from sleepbackends.checkpoint.messages import Reply, Request
from sleepbackends.checkpoint.runtime import Entry, RuntimeDirectory
from sleepbackends.checkpoint.states import ProcessState
from sleepbackends.checkpoint.targets import Target
from sleepbackends.errors import (
    BackendUnavailableError,
    BusyError,
    CheckpointRefusedError,
    DeviceMemoryError,
    SleepBackendsError,
    StorageError,
)

_KINDS = {
    CheckpointRefusedError: "refused",
    BusyError: "busy",
    DeviceMemoryError: "no_room",
    StorageError: "unusable",
    BackendUnavailableError: "unusable",
}


class Operations:
    """Answers requests, one at a time, in whichever process it is.

    Parameters
    ----------
    owner : Target
        On whose behalf: the journal's entry is kept under its number.
    directory : RuntimeDirectory
        Where the journal and the locks are.
    driver : Driver, optional
        Made when it is needed.
    monitor : Monitor, optional
        Measures devices; by default one that does so while this process is asleep, too.
    """

    def __init__(
        self,
        owner: Target,
        directory: RuntimeDirectory,
        driver: Driver | None = None,
        monitor: Monitor | None = None,
    ) -> None:
        self._owner = owner
        self._directory = directory
        self._driver = driver
        self._monitor = monitor or OutsideMonitor()

    @classmethod
    def elsewhere(cls, owner: Target, path: Path | None) -> Operations:
        """Make one in a process that has no context of its own, and initialise the driver.

        Raises
        ------
        BackendUnavailableError
            If the driver or the management library cannot be used.
        """
        driver = CheckpointDriver()
        if answer := driver.initialise():
            raise BackendUnavailableError(
                f"the CUDA driver cannot be initialised: {answer}",
                hint="sleepbackends doctor says what this machine has",
            )
        return cls(owner, RuntimeDirectory(path), driver, DeviceMonitor())

    def answer(self, request: Request) -> Reply:
        """Do what is asked for. Never raises an error of this package: it becomes the reply."""
        try:
            return self._answer(request)
        except SleepBackendsError as error:
            kind = next((k for known, k in _KINDS.items() if isinstance(error, known)), "failed")
            return Reply.model_validate(
                {
                    "id": request.id,
                    "ok": False,
                    "kind": kind,
                    "changed": False,
                    "error": error.message,
                    "hint": error.hint,
                    "holders": getattr(error, "holders", ()),
                    "needed_bytes": getattr(error, "needed_bytes", 0),
                    "available_bytes": getattr(error, "available_bytes", 0),
                }
            )

    def _answer(self, request: Request) -> Reply:
        if request.op == "ping":
            return Reply(id=request.id, ok=True)
        targets = [Target(process.pid, process.started) for process in request.targets]
        entry = self._directory.entry_of(self._owner.pid)
        if not targets and entry is not None:
            targets = list(entry.targets)
        group = Group(self._need_driver(), targets)
        if request.op == "state":
            return Reply(id=request.id, ok=True, states=group.states())
        if request.op == "measure":
            return self._measure(request, targets)
        devices = request.devices or tuple(entry.device_bytes if entry else ())
        with self._directory.devices_held(devices, request.wait_s):
            if request.op == "suspend":
                outcome = self._suspend(request, group, targets)
            else:
                outcome = self._resume(request, group, targets, entry)
        return Reply(
            id=request.id,
            ok=outcome.ok,
            kind="" if outcome.ok else "failed",
            step=outcome.step,
            changed=outcome.changed,
            answers=dict(outcome.answers),
            undo=dict(outcome.undo),
            states=dict(outcome.states),
        )

    def _measure(self, request: Request, targets: Sequence[Target]) -> Reply:
        found = self._monitor.measure(request.devices)
        told = {pid for memory in found.values() for pid in memory.processes}
        apart = not told.isdisjoint(target.pid for target in targets)
        by_all = (memory.used_bytes for memory in found.values())
        # What is no device's identifier is an instance's.
        partitioned = (d for d in request.devices if d not in found or found[d].is_partitioned)
        return Reply(
            id=request.id,
            ok=True,
            used_bytes=sum(_used_bytes(found, targets).values() if apart else by_all),
            apart=apart,
            partitioned=tuple(partitioned),
        )

    def _suspend(self, request: Request, group: Group, targets: Sequence[Target]) -> Outcome:
        for target in targets:
            targets_of.check(target)
        before = self._monitor.measure(request.devices)
        needed = _used_bytes(before, targets)
        free = {uuid: memory.free_bytes for uuid, memory in before.items()}
        self._note("suspend", targets, needed, free)
        outcome = group.suspend(request.lock_timeout_s)
        if outcome.ok:
            self._note("asleep", targets, self._freed(needed, free))
        elif set(outcome.states.values()) == {ProcessState.RUNNING}:
            self._directory.erase(self._owner.pid)
        return outcome

    def _resume(
        self, request: Request, group: Group, targets: Sequence[Target], entry: Entry | None
    ) -> Outcome:
        states = group.states()
        if ProcessState.CHECKPOINTED in states.values():
            if entry is not None:
                needed: Mapping[str, int] = entry.device_bytes
                if entry.operation == "suspend":  # whoever did that could not finish the entry
                    needed = self._freed(needed, entry.free_bytes)
                self._check_room(needed, request)
                self._note("resume", targets, needed)
            elif not request.force:
                raise CheckpointRefusedError(
                    "nothing tells how much device memory these processes need, and a restore "
                    "that runs out of it cannot be repeated",
                    hint="name the right runtime directory, or free the devices and use force",
                )
        outcome = group.resume(request.pairs, without_lost=request.force)
        if outcome.ok:
            self._directory.erase(self._owner.pid)
        return outcome

    def _freed(self, used: Mapping[str, int], free: Mapping[str, int]) -> dict[str, int]:
        """Tell what the processes held on each device, now that they hold nothing.

        Neighbours come and go meanwhile, and not every machine tells what each process used:
        the larger of the two figures counts.
        """
        now = self._monitor.measure(free)
        freed = {uuid: memory.free_bytes - free[uuid] for uuid, memory in now.items()}
        return {uuid: max(size, used.get(uuid, 0), 0) for uuid, size in freed.items()}

    def _check_room(self, held: Mapping[str, int], request: Request) -> None:
        moved = dict(request.pairs)
        needed = {moved.get(uuid, uuid): size for uuid, size in held.items() if size}
        for uuid, memory in self._monitor.measure(needed).items():
            wanted = needed[uuid] + request.margin_bytes
            if memory.free_bytes < wanted:
                raise DeviceMemoryError(
                    f"waking up needs {wanted} bytes of {uuid} and {memory.free_bytes} are free; "
                    "a restore that runs out of memory cannot be repeated, so it was not tried",
                    hint="let another process give memory back and repeat the call, or set "
                    "wait_for_memory_s",
                    needed_bytes=wanted,
                    available_bytes=memory.free_bytes,
                )

    def _note(
        self,
        operation: str,
        targets: Sequence[Target],
        device_bytes: Mapping[str, int],
        free_bytes: Mapping[str, int] | None = None,
    ) -> None:
        known = dict(device_bytes), self._owner, dict(free_bytes or {})
        self._directory.write(Entry(operation, tuple(targets), *known))

    def _need_driver(self) -> Driver:
        self._driver = self._driver or CheckpointDriver()
        return self._driver


def _used_bytes(found: Mapping[str, DeviceMemory], targets: Sequence[Target]) -> dict[str, int]:
    """Tell how much of each device these processes use, as far as the machine tells."""
    pids = {target.pid for target in targets}
    return {
        uuid: sum(size for pid, size in memory.processes.items() if pid in pids)
        for uuid, memory in found.items()
    }
