"""Choose a backend, and say why the others were passed over."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from sleepbackends.config import SleepConfig
from sleepbackends.errors import NoUsableBackendError
from sleepbackends.plugins import AUTO
from sleepbackends.protocol import SleepModeBackend
from sleepbackends.registry import Registry

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Selection:
    """Which backend was chosen.

    Parameters
    ----------
    name : str
        The backend.
    reason : str
        Why this one.
    passed_over : mapping of str to str
        Every other backend and why it was not taken; empty if one was asked for by name.
    """

    name: str
    reason: str
    passed_over: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class OpenedBackend:
    """A backend that is ready for use, and how it was chosen."""

    backend: SleepModeBackend
    selection: Selection


def select(registry: Registry, config: SleepConfig) -> Selection:
    """Choose the backend that the configuration asks for.

    ``auto`` takes the first one that is available, in descending order of ``auto_priority``
    and then by name. Backends that rank below it are neither imported nor probed.

    Raises
    ------
    UnknownBackendError
        If the configuration names a backend that nobody offers.
    NoUsableBackendError
        If the choice is automatic and none is available; ``attempts`` says why, one by one.
    """
    if config.backend != AUTO:
        registry.get(config.backend)
        return Selection(config.backend, "named by the configuration")

    passed_over: dict[str, str] = {}
    ranked: list[tuple[int, str]] = []
    for name, registered in registry.specs.items():
        priority = registered.spec.auto_priority
        if priority is None:
            passed_over[name] = "has no auto_priority and has to be asked for by name"
        else:
            ranked.append((-priority, name))
    chosen = reason = ""
    for rank, name in sorted(ranked):
        if chosen:
            passed_over[name] = f"ranks below {chosen!r} (auto_priority {-rank})"
            continue
        available = registry.probe(name)
        if available:
            chosen = name
            reason = f"the best that is available here (auto_priority {-rank})"
        else:
            advice = f" ({available.hint})" if available.hint else ""
            passed_over[name] = available.reason + advice
    if not chosen:
        raise _none_usable(registry, passed_over)
    return Selection(chosen, reason, passed_over)


def open_backend(config: SleepConfig, registry: Registry | None = None) -> OpenedBackend:
    """Choose a backend and create it.

    Parameters
    ----------
    config : SleepConfig
        What to use and how.
    registry : Registry, optional
        Where to look for it; by default every installed plugin is loaded.

    Raises
    ------
    UnknownBackendError, NoUsableBackendError
        If there is none to choose.
    PluginError, InvalidOptionsError, BackendUnavailableError
        If the chosen one cannot be created; see ``Registry.create``.
    """
    registry = Registry.load() if registry is None else registry
    for failure in registry.failures:
        logger.warning("a plugin was not loaded: %s", failure)
    selection = select(registry, config)
    backend = registry.create(selection.name, config.options, config.settings)
    logger.info("using the backend %r: %s", selection.name, selection.reason)
    return OpenedBackend(backend, selection)


def _none_usable(registry: Registry, passed_over: Mapping[str, str]) -> NoUsableBackendError:
    reasons = "; ".join(f"{name}: {reason}" for name, reason in passed_over.items())
    hint = "name a backend in the configuration, or run 'sleepbackends doctor'"
    if registry.failures:
        hint += f"; plugins that failed to load: {'; '.join(map(str, registry.failures))}"
    return NoUsableBackendError(
        f"no backend can be used here: {reasons or 'none is registered'}",
        hint=hint,
        attempts=passed_over,
        operation="select",
    )
