"""What is said between a process and those that act for it: lines of JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from sleepbackends.checkpoint.device_memory import DeviceMemory
from sleepbackends.checkpoint.states import ProcessState

LINE_BYTES = 64 << 10
"""No line is longer."""

Operation = Literal["suspend", "resume", "state", "measure", "ping", "end"]
"""The last has no reply: the helper ends, whatever its owner does afterwards."""

FROM_OTHERS: frozenset[str] = frozenset({"resume", "state", "ping"})
"""What a process that connects to the socket may ask for."""

Kind = Literal["", "failed", "refused", "busy", "no_room", "unusable", "garbage"]


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Process(_Message):
    """A process by number and time of start."""

    pid: int = Field(gt=0)
    started: int = Field(gt=0)


class Request(_Message):
    """What a helper is asked to do."""

    id: int
    op: Operation
    targets: tuple[Process, ...] = ()
    """Which processes; none for those of the journal."""
    devices: tuple[str, ...] = ()
    """UUIDs of the devices that they use."""
    lock_timeout_s: float = Field(default=10.0, gt=0)
    wait_s: float = Field(default=0.0, ge=0)
    """How long to wait for others that suspend or resume on the same devices."""
    margin_bytes: int = Field(default=0, ge=0)
    pairs: tuple[tuple[str, str], ...] = ()
    force: bool = False
    """Wake what can be woken although some are lost, or what they need is not known."""


class Reply(_Message):
    """What became of a request."""

    id: int
    ok: bool
    kind: Kind = ""
    error: str = ""
    hint: str = ""
    step: str = ""
    changed: bool = True
    answers: dict[int, str] = {}
    undo: dict[int, str] = {}
    states: dict[int, ProcessState] = {}
    needed_bytes: int = 0
    available_bytes: int = 0
    holders: tuple[str, ...] = ()
    used_bytes: int = 0
    """By the processes on all devices, or by everybody where this machine does not tell them
    apart; the answer to ``measure``."""
    apart: bool = True
    """Whether it does."""
    partitioned: tuple[str, ...] = ()
    """Devices that are split into instances; the answer to ``measure``."""


class Hello(_Message):
    """The first line of a helper."""

    helper: int
    """Its process number."""
    problem: str = ""
    """Why it can do nothing; it ends then."""
    hint: str = ""


class Measured(_Message):
    """What a process that measures devices found; see ``device_memory.main``."""

    devices: dict[str, DeviceMemory] = {}
    problem: str = ""
    """Why it could not."""
    hint: str = ""
