"""The checkpoint backend: a process, or several, as one block that sleeps as a whole."""

from __future__ import annotations

import gc
import itertools
import os
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from sleepbackends.availability import Availability
from sleepbackends.base import BaseBackend
from sleepbackends.capabilities import Capabilities
from sleepbackends.checkpoint import durable, targets
from sleepbackends.checkpoint.caller import Caller
from sleepbackends.checkpoint.communicators import live_communicators
from sleepbackends.checkpoint.device_memory import torch_reserved_bytes
from sleepbackends.checkpoint.driver import CheckpointDriver, Pairs
from sleepbackends.checkpoint.failures import describe, error_of
from sleepbackends.checkpoint.messages import Process, Reply, Request
from sleepbackends.checkpoint.options import CheckpointOptions
from sleepbackends.checkpoint.probing import probe
from sleepbackends.checkpoint.room import check_host_memory
from sleepbackends.checkpoint.runtime import RuntimeDirectory
from sleepbackends.checkpoint.states import ProcessState
from sleepbackends.checkpoint.targets import Target
from sleepbackends.control import Control
from sleepbackends.errors import (
    BackendUnavailableError,
    BusyError,
    CheckpointRefusedError,
    PolicyConflictError,
)
from sleepbackends.ledger import Block
from sleepbackends.mechanism import Fill
from sleepbackends.policies import Policies, Policy, check_level
from sleepbackends.reports import SuspendReport
from sleepbackends.residency import Move
from sleepbackends.settings import BackendSettings

TAG = "process"
"""The one tag: all that the processes hold on devices, whatever it is."""


class CheckpointBackend(BaseBackend[CheckpointOptions]):
    """Gives back all that a process holds on its devices, context included, and takes it again.

    All or nothing: there is one tag, ``process``, with one block. While it is asleep, calls of
    the process into CUDA wait, and Python goes on. Do not drop CUDA objects meanwhile: a call
    that waits with the GIL held stops the interpreter until another process asks for the resume.
    Python's cyclic garbage collector is off for that time.

    Parameters
    ----------
    options : CheckpointOptions, optional
        Which processes, and who does it.
    settings : BackendSettings, optional
        What is common to all backends.

    Raises
    ------
    BackendUnavailableError
        If this machine cannot checkpoint processes.
    CheckpointRefusedError
        If one of the processes does not exist or is a thread.
    StorageError
        If the runtime directory cannot be used.
    """

    name = "checkpoint"
    capabilities = Capabilities(
        supports_offload=True,
        preserves_addresses=True,
        preserves_compiled_artifacts=True,
        releases_device_context=True,
    )

    def __init__(
        self, options: CheckpointOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        chosen = options or CheckpointOptions()
        available = self.probe()
        if not available:
            raise BackendUnavailableError(available.reason, hint=available.hint)
        super().__init__(chosen, settings)
        self.chosen = chosen
        self._directory = RuntimeDirectory(chosen.runtime_directory)
        self._driver = CheckpointDriver()
        self._attach()
        self._numbers = itertools.count(1)
        self._devices: tuple[str, ...] = ()
        self._instances: tuple[str, ...] = ()
        self._lock_timeout_s = chosen.lock_timeout_s
        self._wait_s = 0.0
        self._asleep: bool | None = None
        self._collects = False
        self.communicators: Callable[[], Collection[str]] = live_communicators
        """Tells which communicators of this process are live; see ``NcclCommunicators``."""
        self.durability = durable.probe()
        """Whether what is asleep can be saved to a directory, and if not, why."""
        self.capabilities = replace(
            type(self).capabilities, supports_durable_storage=self.durability.ok
        )
        self._block = Block(0, 1, TAG, device="cuda")
        self.ledger.add(self._block)
        # Its start takes seconds, which nobody should wait for at the first sleep.
        self._caller.start()

    def _attach(self) -> None:
        """Find the processes, this one by the time when it started or was restored."""
        owner = Target.of(os.getpid())
        own = [owner.pid] if self.chosen.include_self else []
        self.targets = tuple(map(Target.of, dict.fromkeys([*own, *self.chosen.processes])))
        self._caller = Caller(owner, self._directory, self._driver, self.chosen)
        # Runs when the interpreter ends as well, before the libraries clean up.
        self._leave = weakref.finalize(self, self._caller.leave)

    @classmethod
    def probe(cls) -> Availability:
        """Tell whether this machine can checkpoint processes; never raises."""
        return probe()

    def check_suspend(self) -> None:
        """Check that the processes would survive a suspend now, without touching them.

        Raises
        ------
        CheckpointRefusedError
            If one is a process that cannot be checkpointed, or has live communicators.
        """
        for target in self.targets:
            targets.check(target)
        if not self.chosen.include_self:
            return
        if not self._driver.devices_in_use():
            raise CheckpointRefusedError(
                "this process has no CUDA context, so there is nothing to give back",
                hint="use the device first, or leave this process out: include_self=False",
            )
        if live := sorted(self.communicators()):
            raise CheckpointRefusedError(
                f"this process has live NCCL communicators ({', '.join(live)}): the checkpoint "
                "would succeed and the restore could not, so the process would be lost",
                hint="give the engine the hooks of NcclCommunicators, or destroy them first",
            )

    def suspend(
        self,
        level: int = 1,
        *,
        policies: Policies | None = None,
        control: Control | None = None,
    ) -> SuspendReport:
        """Checkpoint the processes; see ``SleepModeBackend.suspend``.

        At either level everything is kept: a process cannot drop a part of what it holds.

        Raises
        ------
        PolicyConflictError
            The policy of the tag ``process`` is ``discard``; nothing changed.
        CheckpointRefusedError, HostMemoryError, BusyError
            Nothing changed.
        LockTimeoutError
            The work on the devices did not end in time; everything runs on.
        CheckpointError
            It failed and was undone.
        ProcessLostError
            It failed and could not be undone; ``states`` says which process is lost.
        """
        check_level(level)
        chosen, control = policies or self.settings.policies, control or Control()
        if chosen.at(TAG, level) is Policy.DISCARD:
            raise PolicyConflictError(
                f"the contents of a process cannot be dropped: tag {TAG!r} has the policy "
                "'discard'",
                hint="use 'offload' or 'keep'",
                tags=[TAG],
                backend=self.name,
                operation="suspend",
            )
        self._set_limits(control)
        return super().suspend(level, policies=policies, control=control)

    def resume(self, tags: Collection[str] | None = None, *, control: Control | None = None) -> Any:
        """Restore the processes and see that they run; see ``SleepModeBackend.resume``.

        Raises
        ------
        DeviceMemoryError
            Not enough memory is free on a device; everything is still asleep.
        BusyError
            Another process suspends or resumes on these devices; everything is still asleep.
        CheckpointError
            They were restored but not unlocked; the call can be repeated.
        ProcessLostError
            One cannot be restored, now or later; ``states`` says which.
        """
        control = control or Control()
        self._set_limits(control)
        return super().resume(tags, control=control)

    @property
    def helper_pid(self) -> int | None:
        """The process number of the helper, if there is one now."""
        return self._caller.helper_pid

    def process_states(self) -> dict[int, ProcessState]:
        """Ask the driver for the state of each process.

        Raises
        ------
        HelperError
            If the helper does not answer.
        """
        with self._locked("process_states", Control()):
            return dict(self._ask("state").states)

    def save_to(self, directory: Path) -> durable.Saved:
        """Write the sleeping process to a directory, from which it can be restored; experimental.

        Returns twice: in this process, and in the one that ``sleepbackends restore DIRECTORY``
        makes of the directory, both asleep. Whoever saves a process that is to go on elsewhere
        ends it after the first return.

        Raises
        ------
        UnsupportedOperationError
            If ``durability`` says no.
        PolicyConflictError
            If the process is awake.
        StorageError
            If it could not be saved; the process is as before.
        """
        with self._locked("save", Control()):
            durable.check_savable(self.durability, asleep=not self._block.placement.mapped)
            # A child of this process would have to be saved with it.
            self._caller.stop()
            saved = durable.save(Path(directory), self.targets, self._devices)
            if saved.restored:
                self._leave.detach()
                self._attach()
            return saved

    # The mechanism: what the base calls, one step each

    def begin(self) -> None:
        """See what is so: somebody else may have woken the processes, and memory comes and goes."""
        # Asked of the helper first: this process itself would wait for ever if it is asleep.
        states = self._ask("state").states
        running = set(states.values()) == {ProcessState.RUNNING}
        if running and not self._block.placement.mapped:
            self._note_awake()
            self.ledger.apply(Move.RESUME, self._block)
        if not self._block.placement.mapped:
            return
        if any(state.is_asleep for state in states.values()):
            raise BusyError(
                f"somebody else has put these processes to sleep: {describe(states)}",
                hint="have them resume first: sleepbackends resume --pid PID",
                holders=["another process"],
            )
        self._measure()

    def end(self) -> None:
        """Record where a failed step has left the processes."""
        asleep, self._asleep = self._asleep, None
        if asleep and self._block.placement.mapped:
            self.ledger.apply(Move.OFFLOAD, self._block)

    def check_room_to_save(self, blocks: Sequence[Block]) -> None:
        """Refuse what would not survive, and check the host's memory."""
        if blocks and self._instances:
            raise CheckpointRefusedError(
                f"{', '.join(self._instances)} is split into instances (MIG), which cannot be "
                "checkpointed",
                hint="use a whole GPU",
            )
        if blocks:
            self.check_suspend()
            check_host_memory(self._block.size_bytes)

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        """Count the bytes; the driver saves and releases them in one step."""
        for block in blocks:
            control.advance(block.size_bytes)
            yield block

    def unmap(self, block: Block) -> None:
        """Lock and checkpoint the processes."""
        # Destructors of CUDA objects call the driver with the GIL held, which must not wait.
        gc.collect()
        self._collects = gc.isenabled()
        gc.disable()
        try:
            self._change("suspend")
        except BaseException:
            if not self._asleep:
                self._note_awake()
            raise

    def map(self, block: Block) -> None:
        """Restore and unlock the processes, and see that they run."""
        self._change("resume")
        self._note_awake()

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        """Count the bytes; the driver restores them when it maps."""
        control.commit()  # what is being restored cannot be stopped half-way
        for block in blocks:
            control.advance(block.size_bytes)
            yield block

    def fill(self, block: Block, fill: Fill) -> None:
        """Do nothing: everything is always kept."""

    def forget(self, block: Block) -> None:
        """Do nothing: the driver keeps the saved bytes in the processes."""

    def release(self, block: Block) -> None:
        """Do nothing: the block is the process."""

    def shut_down(self) -> None:
        """Wake the processes if they can be woken, and end the helper."""
        self._leave()
        self._note_awake()

    # Asking

    def _set_limits(self, control: Control) -> None:
        left_s = control.remaining_s()
        limit_s = self.chosen.lock_timeout_s
        self._lock_timeout_s = limit_s if left_s is None else max(0.001, min(limit_s, left_s))
        self._wait_s = limit_s if left_s is None else left_s

    def _measure(self) -> None:
        """Ask how much the processes hold, and on which devices."""
        own = self._driver.devices_in_use() if self.chosen.include_self else []
        # Which devices others use cannot be asked, so all of them are held and measured.
        self._devices = tuple(self._caller.devices() if self.chosen.processes else own)
        reply = self._ask("measure")
        self._instances = reply.partitioned
        size_bytes, reserved_bytes = reply.used_bytes, torch_reserved_bytes()
        if not reply.apart and reserved_bytes and len(self.targets) == 1:
            # What torch counts may be unmapped, and what all use is others' as well.
            size_bytes = min(size_bytes, reserved_bytes)
        self._block.size_bytes = max(size_bytes, 1)
        self.ledger.add(self._block)

    def _ask(self, op: str) -> Reply:
        reply = self._caller.ask(self._request(op))
        if not reply.ok:
            raise error_of(op, reply)
        return reply

    def _change(self, op: str) -> None:
        reply = self._caller.change(self._request(op), self._block.size_bytes, self._notice)
        if not reply.ok:
            self._notice(reply.states)
            raise error_of(op, reply)

    def _notice(self, states: Mapping[int, ProcessState]) -> None:
        self._asleep = any(state.is_asleep for state in states.values())

    def _request(self, op: str) -> Request:
        return Request.model_validate(
            {
                "id": next(self._numbers),
                "op": op,
                "targets": [Process(pid=t.pid, started=t.started) for t in self.targets],
                "devices": self._devices,
                "lock_timeout_s": self._lock_timeout_s,
                "wait_s": self._wait_s,
                "margin_bytes": self.chosen.device_margin_bytes,
                "pairs": self._pairs() if op == "resume" else (),
            }
        )

    def _pairs(self) -> Pairs:
        """Name every device: the driver wants a map to be complete."""
        if not self.chosen.gpu_map:
            return ()
        return [(d, self.chosen.gpu_map.get(d, d)) for d in self._caller.devices()]

    def _note_awake(self) -> None:
        if self._collects:
            gc.enable()
        self._collects = False
