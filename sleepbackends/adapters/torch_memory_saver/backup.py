"""What is kept of paused memory: which wishes can be met, and reading it."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Literal

from sleepbackends.errors import PolicyConflictError, RequestError, UnsupportedOperationError
from sleepbackends.residency import Residency

if TYPE_CHECKING:
    import torch

    from sleepbackends.cumem.backend import CumemBackend

CpuBackupBackend = Literal["mmap", "pinned"]


def check_backup(
    cpu_backup: bool, disk_backup: bool, cpu_backup_backend: CpuBackupBackend | None
) -> None:
    """Refuse what cannot be kept, or not that way.

    Raises
    ------
    RequestError
        If the arguments contradict one another, or are not known.
    UnsupportedOperationError
        If contents are to be kept on disk.
    """
    if cpu_backup and disk_backup:
        raise RequestError(
            "enable_cpu_backup and enable_disk_backup exclude one another",
            hint="leave enable_disk_backup out",
        )
    if disk_backup:
        raise no_disk("enable_disk_backup is not supported")
    if cpu_backup_backend not in (None, "mmap", "pinned"):
        raise RequestError(
            f"there is no cpu_backup_backend {cpu_backup_backend!r}",
            hint="'mmap' and 'pinned' are known",
        )
    if cpu_backup_backend and not cpu_backup:
        raise RequestError(
            f"cpu_backup_backend={cpu_backup_backend!r} asks for no CPU backup",
            hint="pass enable_cpu_backup=True too",
        )


def no_disk(message: str) -> UnsupportedOperationError:
    """Return the error of whoever asks for a disk."""
    return UnsupportedOperationError(
        message, hint="enable_cpu_backup=True keeps contents in host memory"
    )


def read_backup(backend: CumemBackend, x: torch.Tensor, zero_copy: bool) -> torch.Tensor | None:
    """Return the saved contents of a paused tensor; see ``TorchMemorySaver.get_cpu_backup``.

    Raises
    ------
    RequestError
        If it is no contiguous CUDA tensor, or was not allocated yet when its tag was paused.
    PolicyConflictError
        If its contents are gone.
    """
    if not x.is_cuda or not x.is_contiguous():
        raise RequestError(
            f"{'a tensor on ' + str(x.device) if not x.is_cuda else 'a strided tensor'} "
            "has no CPU backup",
            hint="pass a contiguous CUDA tensor",
        )
    residency = backend.residency_at(x.data_ptr()) if x.nbytes else None
    if residency is Residency.DISCARDED:
        raise PolicyConflictError(
            "the tensor was paused without a CPU backup, its contents are gone",
            hint="allocate it in region(enable_cpu_backup=True)",
        )
    if residency is not Residency.OFFLOADED:
        return None
    return _as_tensor(backend.host_copy(x.data_ptr(), x.nbytes), x, zero_copy)


def _as_tensor(saved: memoryview, like: torch.Tensor, zero_copy: bool) -> torch.Tensor:
    import torch

    if not zero_copy:
        return torch.frombuffer(bytearray(saved), dtype=like.dtype).view(like.shape)
    with warnings.catch_warnings():
        # torch has no read-only tensors, and says so.
        warnings.simplefilter("ignore", UserWarning)
        return torch.frombuffer(saved, dtype=like.dtype).view(like.shape)
