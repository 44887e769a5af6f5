"""Choose a backend, and say why the others were passed over."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field

from sleepbackends.composite import CompositeBackend
from sleepbackends.config import SleepConfig, did_you_mean
from sleepbackends.errors import (
    ConfigurationError,
    InvalidOptionsError,
    NoUsableBackendError,
    add_note,
)
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
        for name in parts(registry, config.backend):
            registry.get(name)
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
    backend = _create(registry, selection.name, config)
    logger.info("using the backend %r: %s", selection.name, selection.reason)
    return OpenedBackend(backend, selection)


def parts(registry: Registry, name: str) -> tuple[str, ...]:
    """Return the names of the backends that a name stands for: two for ``outer+inner``.

    Raises
    ------
    ConfigurationError
        If there are more than two, or one has no name.
    """
    if name in registry.specs or "+" not in name:
        return (name,)
    found = tuple(name.split("+"))
    if len(found) != 2 or not all(found):
        raise ConfigurationError(
            f"backend {name!r} does not name two backends",
            hint="name one that owns memory and one that takes the process: 'cumem+checkpoint'",
        )
    return found


def _create(registry: Registry, name: str, config: SleepConfig) -> SleepModeBackend:
    names = parts(registry, name)
    if len(names) == 1:
        return registry.create(name, config.options, config.settings)
    own = dict(config.options)
    depth = own.pop("depth", "process")
    options = {part: own.pop(part, {}) for part in names}
    if own or depth not in ("memory", "process"):
        wrong = ", ".join(
            f"{key!r}{did_you_mean(str(key), [*names, 'depth'])}" for key in own or ["depth"]
        )
        raise InvalidOptionsError(
            f"the options of {name!r} cannot be used: {wrong}",
            hint=f"put the options of each under its name ({', '.join(names)}); depth is "
            "'memory' or 'process'",
            backend=name,
        )
    outer = registry.create(names[0], options[names[0]], config.settings)
    try:
        inner = registry.create(names[1], options[names[1]], config.settings)
        try:
            return CompositeBackend(outer, inner, config.settings, depth=depth)
        except BaseException:
            inner.close()
            raise
    except BaseException as error:
        try:
            outer.close()
        except Exception as second:  # noqa: BLE001 - the first failure is the one to report
            add_note(error, f"closing {names[0]!r} raised {second!r}")
        raise


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
