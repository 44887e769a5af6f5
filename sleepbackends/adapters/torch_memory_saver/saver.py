"""The object that torch_memory_saver's users know."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from sleepbackends.adapters.torch_memory_saver.backup import (
    CpuBackupBackend,
    check_backup,
    no_disk,
    read_backup,
)
from sleepbackends.adapters.torch_memory_saver.tags import PausePolicies, backend_tag, is_selected
from sleepbackends.errors import (
    ClosedError,
    ConfigurationError,
    PolicyConflictError,
    RequestError,
    UnsupportedOperationError,
)
from sleepbackends.reports import ResumeReport, SuspendReport, TransitionReport

if TYPE_CHECKING:
    import torch

    from sleepbackends.cumem.backend import CumemBackend
    from sleepbackends.cumem.options import CumemOptions
    from sleepbackends.settings import BackendSettings
    from sleepbackends.vmm.region import DeviceRegion

logger = logging.getLogger(__name__)

HookMode = Literal["preload", "torch"]
ReportT = TypeVar("ReportT", bound=TransitionReport)

_TRUE = {"1", "true", "TRUE", "yes", "YES"}


class TorchMemorySaver:
    """Regions whose memory can be paused and resumed by tag, at the same addresses.

    Creating one loads neither torch nor a driver; the backend is made at the first use. Each
    has a backend and tags of its own. One that was not used yet can be pickled and survives a
    fork; one that was used does neither, as CUDA does not.

    Parameters
    ----------
    options : CumemOptions, optional
        Of the backend.
    settings : BackendSettings, optional
        Of the backend; its policies have no say here.
    """

    _impl: None = None
    """Whoever asks for it wants to switch the preloaded library off, and there is none."""

    def __init__(
        self, options: CumemOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        self._options = options
        self._settings = settings
        self._backend: CumemBackend | None = None
        self._hook_mode: HookMode = "preload"
        self._margin_bytes = 0
        self._retain = os.environ.get("TMS_RETAIN_CPU_BACKUP") in _TRUE
        self._lock = threading.Lock()

    @property
    def backend(self) -> CumemBackend:
        """What holds the memory, for everything that this interface has no word for.

        Raises
        ------
        BackendUnavailableError
            If there is no CUDA device, or something that the backend needs is missing.
        ConfigurationError
            If the environment asks for memory outside of regions to be paused too.
        """
        with self._lock:
            if self._backend is None:
                self._backend = self._made()
            return self._backend

    @contextlib.contextmanager
    def region(
        self,
        tag: str = "default",
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[DeviceRegion]:
        """Let what torch allocates in this thread on its current device be pausable.

        Regions nest, and the innermost counts. No pause begins while one is open, in whatever
        thread.

        Parameters
        ----------
        tag : str
            What ``pause`` and ``resume`` select by.
        enable_cpu_backup : bool
            Whether a pause keeps the contents.
        enable_disk_backup : bool
            Not supported.
        cpu_backup_backend : {"mmap", "pinned"}, optional
            Makes no difference: host memory is pinned, and given back as that of "mmap" is.

        Yields
        ------
        region : DeviceRegion
            Allocates in the region without torch, too.

        Raises
        ------
        RequestError
            If the arguments contradict one another.
        UnsupportedOperationError
            If ``enable_disk_backup`` is set.
        """
        check_backup(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        with self.backend.region(backend_tag(tag, enable_cpu_backup)) as region:
            yield region

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: torch.cuda.CUDAGraph,
        pool: tuple[int, int] | None = None,
        stream: torch.cuda.Stream | None = None,
        capture_error_mode: str = "global",
        tag: str = "default",
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Capture a graph as ``torch.cuda.graph`` does, with memory that can be paused.

        Parameters
        ----------
        cuda_graph, stream, capture_error_mode
            As for ``torch.cuda.graph``.
        pool : tuple of int, optional
            Graphs that are captured here with the same one share memory, in a pool that
            stands for it.
        tag, enable_cpu_backup, cpu_backup_backend
            As for ``region``.

        Raises
        ------
        RequestError
            If the arguments contradict one another.
        UnsupportedOperationError
            If torch is missing or was built without CUDA.
        """
        check_backup(enable_cpu_backup, False, cpu_backup_backend)
        name = backend_tag(tag, enable_cpu_backup)
        own_pool: Any
        with self.backend.graph_pool(name, shared_as=pool) as own_pool:
            import torch

            with torch.cuda.graph(
                cuda_graph, pool=own_pool, stream=stream, capture_error_mode=capture_error_mode
            ):
                yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Let what torch allocates in this thread be its own, also in the middle of a region.

        What was freed by the end of the scope is given back to the device.
        """
        with self.backend.outside_regions():
            yield

    def pause(self, tag: str | None = None) -> SuspendReport:
        """Give the memory of a tag back, or that of all tags; what is paused already stays so.

        Nothing happens if no memory is allocated there.

        Raises
        ------
        PolicyConflictError
            If all of it was paused already; nothing changed.
        BusyError
            If a region is open in this thread; nothing changed.
        HostMemoryError
            If there is no room for what is to be kept; nothing changed.
        SleepBackendsError
            As ``SleepModeBackend.suspend`` raises it.

        Notes
        -----
        Guarantee: if it raises, nothing that is to be kept is lost, and the call can be made
        again.
        """
        report = self.backend.suspend(1, policies=PausePolicies(tag=tag))
        return _effective(report, tag, "pause", "it is paused already")

    def resume(self, tag: str | None = None) -> ResumeReport:
        """Take the memory of a tag again, or that of all tags, at the same addresses.

        Memory without a CPU backup comes back zeroed. Nothing happens if no memory is
        allocated there.

        Raises
        ------
        PolicyConflictError
            If none of it was paused; nothing changed.
        DeviceMemoryError
            If there is no room; everything is still paused.
        SleepBackendsError
            As ``SleepModeBackend.resume`` raises it.

        Notes
        -----
        Guarantee: if it raises, everything it was to resume is still paused, what was saved
        is still saved, and the call can be made again.
        """
        backend = self.backend
        selected = [known for known in backend.state().tags if is_selected(known, tag)]
        report = _effective(backend.resume(selected), tag, "resume", "none of it is paused")
        if report.changed and not self._retain:
            # Unpinning takes longer than the copy, and nobody needs to wait for it.
            threading.Thread(target=_give_back, args=[backend], name="sleepbackends-trim").start()
        return report

    def get_cpu_backup(self, x: torch.Tensor, zero_copy: bool = False) -> torch.Tensor | None:
        """Return the saved contents of a paused tensor, on the CPU.

        Parameters
        ----------
        x : torch.Tensor
            A contiguous CUDA tensor.
        zero_copy : bool
            Whether to return the saved bytes themselves where they lie in one piece: they
            must not be written to, and hold something else once their tag was resumed.

        Returns
        -------
        torch.Tensor or None
            None where nothing is paused: ``x`` itself holds its contents.

        Raises
        ------
        RequestError
            If it is another kind of tensor, or was not allocated yet when its tag was paused.
        PolicyConflictError
            If its memory was paused without a CPU backup: its contents are gone.
        """
        return read_backup(self.backend, x, zero_copy)

    def set_disk_backup_dir(self, path: str) -> None:
        """Refuse: contents are saved in host memory alone.

        Raises
        ------
        UnsupportedOperationError
            Always.
        """
        raise no_disk(f"nothing is saved in {path!r}")

    @property
    def enabled(self) -> bool:
        """True, as in torch_memory_saver."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """How torch_memory_saver gets hold of allocations; here it makes no difference.

        Raises
        ------
        RequestError
            When it is set to something that torch_memory_saver does not know.
        """
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in ("preload", "torch"):
            raise RequestError(
                f"there is no hook mode {hook_mode!r}", hint="'preload' and 'torch' are known"
            )
        logger.info("hook_mode makes no difference: torch's pools ask our allocator")
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """What allocations in regions leave free of a device, or fail; 0 at the beginning.

        Raises
        ------
        RequestError
            When it is set to a negative number.
        """
        return self._margin_bytes

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        if value < 0:
            raise RequestError(f"a margin of {value} bytes is not possible", hint="0 for none")
        with self._lock:
            if self._backend is not None:
                self._backend.keep_free(value)
            self._margin_bytes = value

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether a resume keeps the pinned memory, and what it holds, for the next pause.

        Kept, the next pause copies only what changed; not kept, it is given back in the
        background. False, unless the variable ``TMS_RETAIN_CPU_BACKUP`` says otherwise.
        """
        return self._retain

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._retain = value

    def _made(self) -> CumemBackend:
        if os.environ.get("TMS_INIT_ENABLE") in _TRUE:
            raise ConfigurationError(
                "TMS_INIT_ENABLE asks for all memory of the process to be paused, and only "
                "memory allocated in regions can be",
                hint="unset it, and allocate in region() what is to be paused",
            )
        from sleepbackends.cumem.backend import CumemBackend

        backend = CumemBackend(self._options, self._settings)
        if self._margin_bytes:
            backend.keep_free(self._margin_bytes)
        return backend

    def __getstate__(self) -> dict[str, Any]:
        if self._backend is not None:
            raise UnsupportedOperationError(
                "memory of a device cannot be pickled, and this TorchMemorySaver holds some",
                hint="create one in each process",
            )
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Do nothing: no library has to be preloaded into processes that are started in the scope."""
    yield


def _effective(report: ReportT, tag: str | None, verb: str, so_already: str) -> ReportT:
    """Return the report of a call that did something or had nothing to do it to."""
    selected = [change for known, change in report.tags.items() if is_selected(known, tag)]
    name = f"tag {tag!r}" if tag else "any tag"
    if report.changed:
        return report
    if any(change.before.blocks for change in selected):
        raise PolicyConflictError(
            f"{verb}: there is nothing to {verb} of {name}, {so_already}",
            hint="pause what is in use, and resume what is paused",
            operation=verb,
            tags=[tag] if tag else (),
        )
    logger.info("%s: nothing is allocated under %s", verb, name)
    return report


def _give_back(backend: CumemBackend) -> None:
    with contextlib.suppress(ClosedError):
        backend.trim()
