"""The limited backend: every call goes to the one it wraps, checked before, counted after."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from sleepbackends import (
    Availability,
    BackendSettings,
    BackendState,
    Capabilities,
    Control,
    DeviceMemoryError,
    DiscardReport,
    HostMemoryError,
    Policies,
    Policy,
    Registry,
    ResumeReport,
    SleepBackendsError,
    SleepModeBackend,
    SuspendReport,
    TransitionReport,
)

from sleepbackends_limited.options import LimitedOptions
from sleepbackends_limited.statistics import Statistics

ReportT = TypeVar("ReportT", bound=TransitionReport)


class LimitedBackend:
    """Wraps another backend: the same memory, the same abilities, fewer bytes.

    It keeps to the ``SleepModeBackend`` protocol without ``BaseBackend``, because the ledger, the
    lock and the guarantees are those of the backend it wraps. What that one has beyond the
    protocol (``region``, ``adopt``, ``stage``) can be called here as well.

    The limits hold as long as transitions are asked for one at a time, as an orchestrator does.
    Allocations are not limited: they go to the wrapped backend.

    Parameters
    ----------
    options : LimitedOptions, optional
        What is wrapped, and what it is limited to.
    settings : BackendSettings, optional
        What is common to all backends; the wrapped one gets the same.

    Raises
    ------
    UnknownBackendError, PluginError, InvalidOptionsError, BackendUnavailableError
        If the wrapped backend cannot be created.

    Attributes
    ----------
    inner : SleepModeBackend
        The wrapped backend.
    statistics : Statistics
        What was done so far.
    """

    name = "limited"
    api_version = 1
    capabilities = Capabilities()

    def __init__(
        self, options: LimitedOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        self._options = options or LimitedOptions()
        self._settings = settings or BackendSettings()
        self.inner: SleepModeBackend = Registry.load().create(
            self._options.inner, self._options.inner_options, self._settings
        )
        self.capabilities = self.inner.capabilities
        self.statistics = Statistics()

    @classmethod
    def probe(cls) -> Availability:
        """Say yes: whether the wrapped backend can work is told when it is created."""
        return Availability(True, "as far as the backend it wraps")

    def __getattr__(self, name: str) -> Any:
        """Return what only the wrapped backend has."""
        if name.startswith("_") or name == "inner":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.inner, name)

    # The verbs

    def suspend(
        self,
        level: int = 1,
        *,
        policies: Policies | None = None,
        control: Control | None = None,
    ) -> SuspendReport:
        """Release memory, unless more would have to be kept than may be.

        Raises
        ------
        HostMemoryError
            If the limit would be exceeded; nothing changed.
        SleepBackendsError
            As the wrapped backend.

        Notes
        -----
        Guarantee: as that of the wrapped backend.
        """
        with self._calling("suspend"):
            self._check_saved(level, policies or self._settings.policies)
            return self._counted(self.inner.suspend(level, policies=policies, control=control))

    def resume(
        self, tags: Collection[str] | None = None, *, control: Control | None = None
    ) -> ResumeReport:
        """Map memory again, unless more would be mapped than may be.

        Raises
        ------
        DeviceMemoryError
            If the limit would be exceeded; everything is still asleep.
        SleepBackendsError
            As the wrapped backend.

        Notes
        -----
        Guarantee: as that of the wrapped backend.
        """
        with self._calling("resume"):
            self._check_mapped(tags)
            return self._counted(self.inner.resume(tags, control=control))

    def discard(self, tags: Collection[str], *, control: Control | None = None) -> DiscardReport:
        """Release the named tags and forget their bytes.

        Raises
        ------
        SleepBackendsError
            As the wrapped backend.

        Notes
        -----
        Guarantee: as that of the wrapped backend.
        """
        with self._calling("discard"):
            return self._counted(self.inner.discard(tags, control=control))

    def mark_valid(self, tags: Collection[str]) -> None:
        """Declare that the bytes of UNDEFINED memory were refilled.

        Raises
        ------
        SleepBackendsError
            As the wrapped backend.

        Notes
        -----
        Guarantee: if it raises, nothing changed.
        """
        with self._calling("mark_valid"):
            self.inner.mark_valid(tags)

    def state(self) -> BackendState:
        """Return what is where; never waits and changes nothing."""
        return self.inner.state()

    def close(self) -> None:
        """Close the wrapped backend."""
        self.inner.close()

    # Limits

    def _check_saved(self, level: int, policies: Policies) -> None:
        most = self._options.max_saved_bytes
        # A level that there is not is refused by the wrapped backend, in its own words.
        if most is None or level not in (1, 2):
            return
        needed = sum(
            tag.offloaded_bytes
            + (tag.mapped_bytes if policies.at(name, level) is Policy.OFFLOAD else 0)
            for name, tag in self.state().tags.items()
        )
        if needed > most:
            raise HostMemoryError(
                f"this sleep would keep {needed} bytes, and {most} may be kept",
                hint="discard tags that can be reloaded, or raise max_saved_bytes",
                needed_bytes=needed,
                available_bytes=most,
            )

    def _check_mapped(self, tags: Collection[str] | None) -> None:
        most = self._options.max_mapped_bytes
        if most is None:
            return
        state = self.state()
        asked = state.tags if tags is None else tags
        asleep = sum(tag.asleep_bytes for name, tag in state.tags.items() if name in asked)
        needed = state.mapped_bytes + asleep
        if asleep and needed > most:
            raise DeviceMemoryError(
                f"{needed} bytes would be mapped, and {most} may be",
                hint="wake fewer tags, release others first, or raise max_mapped_bytes",
                needed_bytes=needed,
                available_bytes=most,
            )

    # Counting

    @contextmanager
    def _calling(self, operation: str) -> Iterator[None]:
        """Count the call, and have errors name the backend that was called."""
        try:
            with self.statistics.counting(operation):
                yield
        except SleepBackendsError as error:
            error.backend = self.name
            error.operation = error.operation or operation
            raise

    def _counted(self, report: ReportT) -> ReportT:
        self.statistics.add(report)
        return replace(report, backend=self.name)
