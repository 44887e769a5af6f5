"""The states of a process in the driver's checkpoint interface, and three that it has no word for.

The values are the driver's own, in lower case; see "CUDA Checkpointing" in the CUDA driver
interface, ``CUprocessState``.
"""

from __future__ import annotations

from enum import Enum


class ProcessState(str, Enum):
    """What the driver says of a process, or why it says nothing."""

    RUNNING = "running"
    LOCKED = "locked"
    """Its calls into the driver wait."""
    CHECKPOINTED = "checkpointed"
    """Its memory is in the host's and it holds nothing on any device. Killing it is safe."""
    FAILED = "failed"
    """It cannot be restored."""
    CHECKPOINTING = "checkpointing"
    RESTORING = "restoring"
    WITHOUT_CUDA = "without_cuda"
    """It has no CUDA context."""
    GONE = "gone"
    """It has ended."""
    SILENT = "silent"
    """The driver does not answer for it, or with an error."""

    @property
    def can_be_woken(self) -> bool:
        """Whether the steps of a resume lead from here to running."""
        return self in (ProcessState.RUNNING, ProcessState.LOCKED, ProcessState.CHECKPOINTED)

    @property
    def is_asleep(self) -> bool:
        """Whether calls of the process into the driver wait."""
        return self in (ProcessState.LOCKED, ProcessState.CHECKPOINTED)


BY_NUMBER = tuple(ProcessState)[:6]
"""In the order of ``CUprocessState``, whose names older bindings do not all have."""
