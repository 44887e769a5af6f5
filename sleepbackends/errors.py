"""The errors of this package, as one tree.

::

    SleepBackendsError
    ├── ConfigurationError (ValueError)     the configuration cannot be used
    │   ├── UnknownBackendError             no backend of that name; ``known``
    │   └── InvalidOptionsError             the backend's own options are wrong
    ├── PluginError                         a plugin broke a rule of the registry
    │   └── IncompatibleBackendError        written for another interface version
    ├── BackendUnavailableError             known, but not usable on this machine
    ├── NoUsableBackendError                nothing usable; ``attempts``
    ├── RequestError (ValueError)           refused before anything changed
    │   ├── UnknownTagError                 no such tag; ``known``
    │   ├── InvalidLevelError               no such sleep level
    │   ├── PolicyConflictError             the request contradicts a policy or a residency
    │   └── CheckpointRefusedError          this process would not survive a checkpoint
    ├── UnsupportedOperationError           the backend lacks the ability
    ├── ClosedError                         used after ``close()``
    ├── BusyError                           somebody else holds the memory; ``holders``
    ├── SuspendedError                      memory was needed while it is asleep
    ├── TransitionTimeoutError (TimeoutError)
    ├── TransitionCancelledError            ``Control.cancel()`` was called in time
    ├── NoRoomError (MemoryError)           ``needed_bytes``, ``available_bytes``
    │   ├── HostMemoryError
    │   ├── DeviceMemoryError
    │   └── StorageFullError
    ├── StorageError                        a place for saved bytes cannot be used
    ├── WeightsFileError                    a weights file is missing or damaged
    ├── MechanismError                      a driver or system call failed
    │   └── CheckpointError                 a step of checkpointing a process; ``states``
    │       ├── LockTimeoutError            its work did not end in time (also a timeout)
    │       ├── HelperError                 the helper process died or did not answer
    │       └── ProcessLostError            a process cannot run on
    ├── ContentsLostError                   saved bytes are damaged; never used
    ├── RankLostError                       the process of a rank has gone; ``ranks``
    └── HookError                           an engine hook raised; the engine is FAULTED

Every error carries ``backend``, ``operation``, ``tags``, ``recoverable``, ``hint``
and, where a transition had begun, ``report``. All of them survive pickling. What
happened while cleaning up after an error is attached to it as a note.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any


class SleepBackendsError(Exception):
    """Base of every error this package raises.

    Parameters
    ----------
    message : str
        What went wrong, with the names and numbers involved.
    hint : str, optional
        What to do next.
    backend, operation : str, optional
        Filled in by the base backend where the raiser does not know them.
    tags : collection of str, optional
        The tags concerned.
    recoverable : bool, optional
        Whether the same call can succeed later without rebuilding anything.
        Defaults to the class attribute.
    report : object, optional
        What had been done when the error struck: a ``TransitionReport``.
    """

    recoverable: bool = True

    def __init__(
        self,
        message: str,
        *,
        hint: str = "",
        backend: str | None = None,
        operation: str | None = None,
        tags: Collection[str] = (),
        recoverable: bool | None = None,
        report: Any = None,
    ) -> None:
        super().__init__(message)
        self.hint = hint
        self.backend = backend
        self.operation = operation
        self.tags = frozenset(tags)
        self.report = report
        if recoverable is not None:
            self.recoverable = recoverable

    @property
    def message(self) -> str:
        """The message without the hint."""
        return str(self.args[0])

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})" if self.hint else self.message


class ConfigurationError(SleepBackendsError, ValueError):
    """The configuration cannot be used; nothing was created."""

    recoverable = False


class UnknownBackendError(ConfigurationError):
    """No backend of that name is registered."""

    def __init__(self, message: str, *, known: Collection[str] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.known = tuple(sorted(known))


class InvalidOptionsError(ConfigurationError):
    """The options given to a backend do not fit its options model."""


class PluginError(SleepBackendsError):
    """A plugin could not be loaded or broke a rule of the registry."""

    recoverable = False


class IncompatibleBackendError(PluginError):
    """A backend was written for another version of the interface."""


class BackendUnavailableError(SleepBackendsError):
    """The backend is known but its probe says it cannot work on this machine."""

    recoverable = False


class NoUsableBackendError(SleepBackendsError):
    """No backend can be used; ``attempts`` maps each name to the reason."""

    recoverable = False

    def __init__(
        self, message: str, *, attempts: Mapping[str, str] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(message, **kwargs)
        self.attempts = dict(attempts or {})


class RequestError(SleepBackendsError, ValueError):
    """The request was refused before anything changed."""


class UnknownTagError(RequestError):
    """A tag was named under which nothing was ever allocated."""

    def __init__(self, message: str, *, known: Collection[str] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.known = tuple(sorted(known))


class InvalidLevelError(RequestError):
    """A sleep level other than 0, 1 or 2."""


class PolicyConflictError(RequestError):
    """The request contradicts a tag's policy or what already happened to the tag."""


class CheckpointRefusedError(RequestError):
    """A process cannot be checkpointed, or would not survive it; nothing was touched."""


class UnsupportedOperationError(SleepBackendsError):
    """The backend has no such ability; its capabilities say so beforehand."""

    recoverable = False


class ClosedError(SleepBackendsError):
    """The backend or orchestrator was closed."""

    recoverable = False


class BusyError(SleepBackendsError):
    """Another transition or a user of the memory is in the way; ``holders`` names it."""

    def __init__(self, message: str, *, holders: Collection[str] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.holders = tuple(holders)


class SuspendedError(SleepBackendsError):
    """Memory that is asleep, undefined or about to sleep was asked for."""


class TransitionTimeoutError(SleepBackendsError, TimeoutError):
    """A transition met its deadline and was rolled back as far as ``report`` says."""


class TransitionCancelledError(SleepBackendsError):
    """A transition was cancelled; it had not begun, or was rolled back as ``report`` says."""


class NoRoomError(SleepBackendsError, MemoryError):
    """Not enough room; everything is as it was before the call."""

    def __init__(
        self, message: str, *, needed_bytes: int = 0, available_bytes: int = 0, **kwargs: Any
    ) -> None:
        super().__init__(message, **kwargs)
        self.needed_bytes = needed_bytes
        self.available_bytes = available_bytes


class HostMemoryError(NoRoomError):
    """Not enough host memory, by the kernel's count or the control group's."""


class DeviceMemoryError(NoRoomError):
    """Not enough memory on the device."""


class StorageFullError(NoRoomError):
    """Not enough space where saved bytes are to be written."""


class StorageError(SleepBackendsError):
    """A place for saved bytes cannot be used."""


class WeightsFileError(SleepBackendsError):
    """A weights file is missing, damaged or does not fit; nothing was allocated."""

    recoverable = False


class MechanismError(SleepBackendsError):
    """A driver or system call failed; ``report`` says what is where."""


class CheckpointError(MechanismError):
    """A step of checkpointing processes failed.

    Parameters
    ----------
    step : str
        ``"lock"``, ``"checkpoint"``, ``"restore"``, ``"unlock"`` or ``"state"``.
    answers : mapping of int to str
        What the driver answered, by process number, where that was not success.
    states : mapping of int to str
        The state of each process afterwards, as far as the driver told.
    """

    def __init__(
        self,
        message: str,
        *,
        step: str = "",
        answers: Mapping[int, str] | None = None,
        states: Mapping[int, str] | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(message, **kwargs)
        self.step = step
        self.answers = dict(answers or {})
        self.states = dict(states or {})


class LockTimeoutError(CheckpointError, TransitionTimeoutError):
    """Work that was submitted to the device did not end in time; all processes run on."""


class HelperError(CheckpointError):
    """The process that calls the driver died or did not answer; ``states`` says what is so now."""


class ProcessLostError(CheckpointError):
    """A process is asleep for good, failed or gone; it has to be replaced."""

    recoverable = False


class ContentsLostError(SleepBackendsError):
    """Saved bytes no longer match their checksum and were not used.

    The blocks concerned (``addresses``) are DISCARDED from now on and everything
    else is as before, so the same resume can be made again: the lost tags then come
    back undefined and have to be reloaded.
    """

    def __init__(self, message: str, *, addresses: Collection[int] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.addresses = frozenset(addresses)


class RankLostError(SleepBackendsError):
    """The process of a rank has ended, or its connection is gone.

    What the other ranks had begun was undone as ``report`` says; ``ranks`` names the lost
    ones, which no transition waits for any more once they were forgotten.
    """

    recoverable = False

    def __init__(self, message: str, *, ranks: Collection[int] = (), **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.ranks = tuple(sorted(ranks))


class HookError(SleepBackendsError):
    """An engine hook raised; memory is intact, the engine does not serve."""

    def __init__(self, message: str, *, hook: str = "", **kwargs: Any) -> None:
        super().__init__(message, **kwargs)
        self.hook = hook


def add_note(error: BaseException, note: str) -> None:
    """Attach a secondary failure to an error.

    ``BaseException.add_note`` exists from Python 3.11 on; the attribute it fills is
    filled here directly for 3.10, so that no note is lost.
    """
    notes = getattr(error, "__notes__", None)
    if notes is None:
        notes = []
        error.__notes__ = notes  # type: ignore[attr-defined, unused-ignore]
    notes.append(note)
