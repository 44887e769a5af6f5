"""Load plugins one by one, so that a broken one costs nobody else anything.

Each plugin gets a plugin manager of its own: a misspelt hook, an exception or a wrong
answer is then known to be this plugin's, and two distributions may use the same
entry-point name.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import inspect
import logging
import os
import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from importlib.metadata import Distribution, EntryPoint, PackageMetadata
from typing import Any

import pluggy

import sleepbackends
from sleepbackends import hookspecs
from sleepbackends.errors import PluginError
from sleepbackends.hookspecs import PROJECT_NAME, BackendSpec

BUILTIN_PLUGINS = tuple(
    f"sleepbackends.{name}.plugin" for name in ("host", "cumem", "xpu", "checkpoint")
)
"""Modules of this package that are plugins; they load first and cannot be disabled."""

DISABLE_VARIABLE = "SLEEPBACKENDS_DISABLE_PLUGINS"
"""Entry-point or distribution names, separated by commas, that are not loaded; ``*`` is all."""

AUTO = "auto"
"""What a configuration says to have a backend chosen; no backend may be called so."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_+-]*")
_TARGET = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")

logger = logging.getLogger(__name__)


class FailureKind(str, Enum):
    """Which step a plugin failed at."""

    IMPORT = "import"
    """It could not be found or imported."""
    HOOK = "hook"
    """Its hooks are not hooks of this package, or one raised."""
    RESULT = "result"
    """It returned something other than valid ``BackendSpec`` objects."""
    NAME = "name"
    """It claims a backend name that is taken."""


@dataclass(frozen=True)
class Source:
    """The distribution a plugin came from.

    Parameters
    ----------
    distribution, version : str
        As installed; the version is empty where it is unknown.
    """

    distribution: str
    version: str = ""

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}".strip()


@dataclass(frozen=True)
class PluginFailure:
    """A plugin that was not loaded, and why.

    Parameters
    ----------
    source : Source
        The distribution it came from.
    entry_point : str
        The name of its entry point; for a built-in plugin its module.
    error : str
        What went wrong.
    kind : FailureKind
        At which step.
    """

    source: Source
    entry_point: str
    error: str
    kind: FailureKind

    def __str__(self) -> str:
        return f"{self.entry_point} of {self.source}: {self.error}"


@dataclass(frozen=True)
class DisabledPlugin:
    """A plugin that was not loaded because ``SLEEPBACKENDS_DISABLE_PLUGINS`` names it."""

    source: Source
    entry_point: str

    def __str__(self) -> str:
        return f"{self.entry_point} of {self.source}"


@dataclass(frozen=True)
class RegisteredBackend:
    """A backend somebody offers, and who that is."""

    spec: BackendSpec
    source: Source


@dataclass
class LoadedPlugins:
    """What came of loading all plugins.

    Parameters
    ----------
    backends : dict of str to RegisteredBackend
        The offered backends by name, in the order in which they were offered.
    failures : list of PluginFailure
    disabled : list of DisabledPlugin
    """

    backends: dict[str, RegisteredBackend] = field(default_factory=dict)
    failures: list[PluginFailure] = field(default_factory=list)
    disabled: list[DisabledPlugin] = field(default_factory=list)

    def add(self, source: Source, entry_point: str, load: Callable[[], object]) -> None:
        """Load one plugin and take its backends, all or none of them.

        Whatever goes wrong, an attempt to exit included, is recorded as a failure.
        """
        step = FailureKind.IMPORT
        try:
            plugin = load()
            step = FailureKind.HOOK
            answer = _call_hook(plugin)
            step = FailureKind.RESULT
            specs = [_checked(spec) for spec in _iterate(answer)]
            step = FailureKind.NAME
            offered = self._without_clash(specs, source)
        except (Exception, SystemExit) as error:
            self.failures.append(PluginFailure(source, entry_point, _describe(error), step))
            logger.debug("plugin %s of %s was not loaded", entry_point, source, exc_info=True)
        else:
            self.backends.update(offered)

    def _without_clash(
        self, specs: Iterable[BackendSpec], source: Source
    ) -> dict[str, RegisteredBackend]:
        offered: dict[str, RegisteredBackend] = {}
        for spec in specs:
            owner = self.backends.get(spec.name) or offered.get(spec.name)
            if owner is not None:
                raise PluginError(
                    f"{source} offers a backend {spec.name!r}, which {owner.source} "
                    "already provides",
                    hint="rename it, or disable one of the two plugins",
                )
            offered[spec.name] = RegisteredBackend(spec, source)
        return offered


def load_plugins(
    environ: Mapping[str, str] | None = None,
    entry_points: Iterable[EntryPoint] | None = None,
    builtins: Iterable[str] = BUILTIN_PLUGINS,
) -> LoadedPlugins:
    """Load the built-in plugins, then every installed one that is not disabled.

    Never raises because of a plugin: what went wrong is in ``failures``. Third parties are
    loaded in the order of distribution name, then entry-point name.

    Parameters
    ----------
    environ : mapping of str to str, optional
        Where to look for ``SLEEPBACKENDS_DISABLE_PLUGINS``; ``os.environ`` by default.
    entry_points : iterable of EntryPoint, optional
        The third-party plugins; by default what is installed in the group ``sleepbackends``.
    builtins : iterable of str
        Modules to load first, as this distribution's own.
    """
    loaded = LoadedPlugins()
    own = Source(PROJECT_NAME, sleepbackends.__version__)
    for module in builtins:
        loaded.add(own, module, partial(importlib.import_module, module))

    if entry_points is None:
        entry_points = _installed(loaded.failures)
    switched_off = _switched_off(os.environ if environ is None else environ)
    for source, entry_point in sorted(
        ((_source(point.dist), point) for point in entry_points),
        key=lambda pair: (pair[0].distribution, pair[1].name, pair[1].value),
    ):
        names = {"*", _canonical(entry_point.name), _canonical(source.distribution)}
        if switched_off & names:
            loaded.disabled.append(DisabledPlugin(source, entry_point.name))
        else:
            loaded.add(source, entry_point.name, entry_point.load)
    return loaded


def _installed(failures: list[PluginFailure]) -> list[EntryPoint]:
    """Find installed entry points of the group; unreadable distributions become failures.

    ``importlib.metadata.entry_points()`` raises as a whole if a single distribution has a
    garbled file, so each distribution that mentions the group is read by itself.
    """
    names: set[str] = set()
    found: list[EntryPoint] = []
    for distribution in importlib.metadata.distributions():
        try:
            if f"[{PROJECT_NAME}]" in (distribution.read_text("entry_points.txt") or ""):
                names.add(_name(distribution))
        except Exception as error:  # noqa: BLE001 - isolation is the purpose
            failures.append(_unreadable(_source(distribution), error))
    for name in sorted(names):
        try:
            # Asked for again by name, because the first on the path is the one in use.
            points = importlib.metadata.distribution(name).entry_points
            found += [point for point in points if point.group == PROJECT_NAME]
        except Exception as error:  # noqa: BLE001 - isolation is the purpose
            failures.append(_unreadable(Source(name), error))
    return found


def _name(distribution: Distribution) -> str:
    name = _entry(distribution.metadata, "Name")
    if not name:  # looking up an empty name finds just any distribution on Python 3.10
        raise PluginError("it has no name", hint="reinstall it")
    return name


def _unreadable(source: Source, error: Exception) -> PluginFailure:
    said = f"its metadata cannot be read: {_describe(error)}"
    return PluginFailure(source, "entry_points.txt", said, FailureKind.IMPORT)


def _source(distribution: Distribution | None) -> Source:
    unknown = Source("unknown")
    if distribution is None:
        return unknown
    try:
        metadata = distribution.metadata
        return Source(_entry(metadata, "Name") or "unknown", _entry(metadata, "Version"))
    except Exception:  # noqa: BLE001 - the metadata is the plugin's, and may be anything
        return unknown


def _entry(metadata: PackageMetadata, key: str) -> str:
    """Look up an entry that may be missing, which ``metadata[key]`` warns of or raises at."""
    return metadata[key] if key in metadata else ""  # noqa: SIM401 - typed from 3.12 on


def _canonical(name: str) -> str:
    """Spell a name as package indexes do, where ``a_b``, ``a.b`` and ``A-B`` are one."""
    return re.sub(r"[-_.]+", "-", name.strip()).lower()


def _switched_off(environ: Mapping[str, str]) -> set[str]:
    listed = environ.get(DISABLE_VARIABLE, "").split(",")
    return {_canonical(name) for name in listed if name.strip()}


def _call_hook(plugin: object) -> object:
    """Call the one hook of one plugin and return its answer as it is."""
    if plugin is None or inspect.isclass(plugin):
        raise PluginError(
            f"the entry point leads to {reprlib.repr(plugin)}",
            hint="let it name a module with the hooks, not a class",
        )
    manager = pluggy.PluginManager(PROJECT_NAME)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    hook = manager.hook.sleepbackends_register_backends
    if not hook.get_hookimpls():
        raise PluginError(
            f"it implements no hook of {PROJECT_NAME}",
            hint="decorate sleepbackends_register_backends with sleepbackends.hookimpl",
        )
    answers = hook()
    return answers[0] if answers else None  # pluggy leaves out an answer of None


def _iterate(answer: Any) -> list[object]:
    if isinstance(answer, (str, bytes, BackendSpec)) or not isinstance(answer, Iterable):
        raise PluginError(
            f"sleepbackends_register_backends returned {reprlib.repr(answer)}",
            hint="return a list of BackendSpec objects",
        )
    return list(answer)


def _checked(spec: Any) -> BackendSpec:
    if not isinstance(spec, BackendSpec):
        raise PluginError(
            f"sleepbackends_register_backends returned a list with {reprlib.repr(spec)}",
            hint="return a list of BackendSpec objects",
        )
    fields: dict[str, Any] = vars(spec)
    name, model, tests = (fields[key] for key in ("name", "options_model", "contract_tests"))
    rules = {
        "name": (_matches(_NAME, name) and name != AUTO, f"{_NAME.pattern}, not {AUTO!r}"),
        "target": (_matches(_TARGET, fields["target"]), "'package.module:Class'"),
        "api_version": (_is_int(fields["api_version"]), "an integer"),
        "options_model": (model is None or _matches(_TARGET, model), "'package.module:Class'"),
        "contract_tests": (tests is None or _matches(_TARGET, tests), "'package.module:Class'"),
        "summary": (isinstance(fields["summary"], str), "a string"),
        "auto_priority": (
            fields["auto_priority"] is None or _is_int(fields["auto_priority"]),
            "an integer or None",
        ),
    }
    wrong = [
        f"{field} is {reprlib.repr(fields[field])}, not {rule}"
        for field, (kept, rule) in rules.items()
        if not kept
    ]
    if wrong:
        raise PluginError(f"the backend {reprlib.repr(name)} is ill described: {'; '.join(wrong)}")
    return spec


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _describe(error: BaseException) -> str:
    said = str(error)
    if isinstance(error, PluginError):
        return said
    return f"{type(error).__name__}: {said}" if said else type(error).__name__
