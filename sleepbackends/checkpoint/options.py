"""Options of the checkpoint backend."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class CheckpointOptions(BaseModel):
    """Which processes are checkpointed, by whom, and how long each step may take."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    helper: bool = True
    """Whether a process of its own calls the driver. Without it this process checkpoints itself:
    nothing has to be started, but if its interpreter gets stuck while it is asleep, only
    ``sleepbackends resume --pid`` wakes it."""

    processes: tuple[int, ...] = ()
    """Other processes that sleep and wake together with this one, such as the other ranks of an
    engine on this machine. They need CUDA contexts of their own and no backend."""

    include_self: bool = True
    """Whether this process is one of those that sleep."""

    lock_timeout_s: float = Field(default=10.0, gt=0)
    """How long work that was submitted to the device may take to end, before a suspend gives up
    with everything running. The deadline of the call counts too."""

    on_owner_exit: Literal["keep", "resume"] = "keep"
    """What the helper does when this process ends while others are asleep: leave them asleep, or
    wake them."""

    device_margin_bytes: int = Field(default=256 << 20, ge=0)
    """How much more than what the processes held has to be free on a device before they are
    restored: a restore that runs out of memory cannot be repeated."""

    runtime_directory: Path | None = None
    """Where the socket, the journal and the locks are; by default the user's runtime directory.
    ``sleepbackends resume`` has to be told if it is another one."""

    gpu_map: dict[str, str] = Field(default_factory=dict)
    """Experimental: restore what was on one GPU on another of the same kind, UUID to UUID. GPUs
    that are not named stay where they are."""

    @model_validator(mode="after")
    def _has_a_target(self) -> CheckpointOptions:
        if not self.include_self and not self.processes:
            raise ValueError("include_self=False needs processes")
        if not self.helper and (self.processes or not self.include_self):
            raise ValueError("without a helper this process can checkpoint only itself")
        if any(pid <= 0 for pid in self.processes):
            raise ValueError("processes are numbers greater than 0")
        return self
