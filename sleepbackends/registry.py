"""The backends that plugins offer: listed without importing, imported when asked for."""

from __future__ import annotations

import importlib
import inspect
import reprlib
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any, cast

from pydantic import BaseModel, ValidationError

from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.config import did_you_mean, problems
from sleepbackends.deprecation import warn_deprecated
from sleepbackends.errors import (
    BackendUnavailableError,
    IncompatibleBackendError,
    InvalidOptionsError,
    PluginError,
    SleepBackendsError,
    UnknownBackendError,
    add_note,
)
from sleepbackends.plugins import (
    BUILTIN_PLUGINS,
    DISABLE_VARIABLE,
    DisabledPlugin,
    LoadedPlugins,
    PluginFailure,
    RegisteredBackend,
    load_plugins,
)
from sleepbackends.protocol import API_VERSION, OLDEST_API_VERSION, SleepModeBackend
from sleepbackends.settings import BackendSettings

_VERBS = ("suspend", "resume", "discard", "state", "mark_valid", "close")


class Registry:
    """Every backend that can be named, and every plugin that failed to bring one.

    Parameters
    ----------
    plugins : LoadedPlugins
        What ``sleepbackends.plugins.load_plugins`` found.
    """

    def __init__(self, plugins: LoadedPlugins) -> None:
        self.specs: Mapping[str, RegisteredBackend] = MappingProxyType(dict(plugins.backends))
        self.failures: tuple[PluginFailure, ...] = tuple(plugins.failures)
        self.disabled: tuple[DisabledPlugin, ...] = tuple(plugins.disabled)

    @classmethod
    def load(
        cls,
        environ: Mapping[str, str] | None = None,
        entry_points: Iterable[EntryPoint] | None = None,
        builtins: Iterable[str] = BUILTIN_PLUGINS,
    ) -> Registry:
        """Load all plugins; see ``sleepbackends.plugins.load_plugins`` for the parameters."""
        return cls(load_plugins(environ, entry_points, builtins))

    def get(self, name: str) -> RegisteredBackend:
        """Look up a backend by name, without importing it.

        Raises
        ------
        UnknownBackendError
            If nobody offers it; the error lists the known ones, and the plugins that were
            not loaded and might have brought it.
        """
        if name in self.specs:
            return self.specs[name]
        known = ", ".join(sorted(self.specs)) or "none"
        hint = "install the package that provides it, or name a known one"
        if self.failures:
            hint += f"; failed to load: {'; '.join(map(str, self.failures))}"
        if self.disabled:
            hint += f"; disabled by {DISABLE_VARIABLE}: {', '.join(map(str, self.disabled))}"
        raise UnknownBackendError(
            f"unknown backend {name!r}{did_you_mean(name, self.specs) or f' (known: {known})'}",
            hint=hint,
            known=self.specs,
        )

    def load_class(self, name: str) -> type[SleepModeBackend]:
        """Import a backend's class and check that it keeps to the contract.

        Raises
        ------
        UnknownBackendError
            If nobody offers it.
        IncompatibleBackendError
            If it was written for another version of the contract.
        PluginError
            If it cannot be imported, or lacks something the contract asks for.
        """
        registered = self.get(name)
        target = registered.spec.target
        _check_version(registered, registered.spec.api_version)
        backend = _import(registered, target)
        if not inspect.isclass(backend):
            raise _broken(registered, f"{target} is {reprlib.repr(backend)}, not a class")
        _check_contract(registered, backend)
        if registered.spec.api_version < API_VERSION:
            warn_deprecated(
                f"version {registered.spec.api_version} of the contract, which the backend "
                f"{name!r} of {registered.source} was written for,",
                instead=f"update {registered.source.distribution} to one for {API_VERSION}",
                removed_in="a release to come",
            )
        return cast("type[SleepModeBackend]", backend)

    def options_model(self, name: str) -> type[BaseModel] | None:
        """Import the model of a backend's options; None if it has no options.

        Raises
        ------
        UnknownBackendError
            If nobody offers the backend.
        PluginError
            If the model cannot be imported or is not a pydantic model.
        """
        registered = self.get(name)
        target = registered.spec.options_model
        if target is None:
            return None
        model = _import(registered, target)
        if not (inspect.isclass(model) and issubclass(model, BaseModel)):
            raise _broken(registered, f"{target} is not a pydantic model")
        return model

    def declared_capabilities(self, name: str) -> Capabilities | None:
        """Return what the class says of itself, without creating a backend.

        An instance may know better, because it has seen the machine. None if the class says
        nothing or cannot be loaded. Never raises.
        """
        try:
            declared = getattr(self.load_class(name), "capabilities", None)
        except SleepBackendsError:
            return None
        return declared if isinstance(declared, Capabilities) else None

    def probe(self, name: str) -> Availability:
        """Ask a backend whether it can work on this machine. Never raises."""
        try:
            backend: Any = self.load_class(name)
            answer: object = backend.probe()
        except SleepBackendsError as error:
            return Availability(False, error.message, error.hint)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a probe is anybody's code
            return Availability(
                False,
                f"its probe raised {type(error).__name__}: {error}",
                f"report it to the authors of {self.specs[name].source}",
            )
        if isinstance(answer, Availability):
            return answer
        return Availability(
            False,
            f"its probe answered {reprlib.repr(answer)} instead of an Availability",
            f"report it to the authors of {self.specs[name].source}",
        )

    def create(
        self, name: str, options: Mapping[str, Any], settings: BackendSettings
    ) -> SleepModeBackend:
        """Create a backend, after checking its options and probing the machine.

        Parameters
        ----------
        name : str
            Which backend.
        options : mapping of str to object
            Its own options.
        settings : BackendSettings
            What is common to all backends.

        Raises
        ------
        UnknownBackendError
            If nobody offers it.
        IncompatibleBackendError, PluginError
            If its class cannot be used, or constructing it raises something else than an
            error of this package.
        InvalidOptionsError
            If an option is unknown or wrong.
        BackendUnavailableError
            If it cannot work on this machine.
        """
        backend: Any = self.load_class(name)
        checked = self.check_options(name, options)
        available = self.probe(name)
        if not available:
            raise BackendUnavailableError(
                f"the backend {name!r} cannot be used here: {available.reason}",
                hint=available.hint,
                backend=name,
                operation="create",
            )
        registered = self.get(name)
        try:
            instance: SleepModeBackend = backend(checked, settings)
        except SleepBackendsError:
            raise
        except Exception as error:
            raise _broken(
                registered, f"constructing it raised {type(error).__name__}: {error}"
            ) from error
        _check_capabilities(registered, instance)
        return instance

    def contract_tests(self, name: str) -> type[Any] | None:
        """Import the class of the contract suite that a backend brings; None if it brings none.

        Raises
        ------
        UnknownBackendError
            If nobody offers the backend.
        PluginError
            If it cannot be imported or is not a class.
        """
        registered = self.get(name)
        target = registered.spec.contract_tests
        if target is None:
            return None
        tests = _import(registered, target)
        if not inspect.isclass(tests):
            raise _broken(registered, f"{target} is {reprlib.repr(tests)}, not a class")
        return tests

    def check_options(self, name: str, options: Mapping[str, Any]) -> BaseModel | None:
        """Check options by the backend's own model; None if it has none.

        Raises
        ------
        UnknownBackendError
            If nobody offers the backend.
        PluginError
            If its model cannot be used.
        InvalidOptionsError
            If an option is unknown or wrong.
        """
        model = self.options_model(name)
        if model is None:
            if options:
                raise InvalidOptionsError(
                    f"the backend {name!r} has no options, but was given "
                    f"{', '.join(map(str, options))}",
                    hint="leave options empty, or name the backend that they are for",
                    backend=name,
                )
            return None
        known = [field.alias or key for key, field in model.model_fields.items()]
        try:
            return model.model_validate(dict(options))
        except ValidationError as error:
            raise InvalidOptionsError(
                f"the options of the backend {name!r} cannot be used: {problems(error, known)}",
                hint=f"known options: {', '.join(sorted(known)) or 'none'}",
                backend=name,
            ) from error


def _broken(registered: RegisteredBackend, what: str) -> PluginError:
    return PluginError(
        f"the backend {registered.spec.name!r} of {registered.source} cannot be used: {what}",
        hint=f"update or remove {registered.source.distribution}, or tell its authors",
        backend=registered.spec.name,
    )


def _check_version(registered: RegisteredBackend, version: object) -> None:
    if not (isinstance(version, int) and OLDEST_API_VERSION <= version <= API_VERSION):
        older = isinstance(version, int) and version < API_VERSION
        source = registered.source
        raise IncompatibleBackendError(
            f"the backend {registered.spec.name!r} of {source} was written for version {version} "
            f"of the contract, and this is version {API_VERSION}",
            hint=f"update {source.distribution if older else 'sleepbackends'}",
            backend=registered.spec.name,
        )


def _import(registered: RegisteredBackend, target: str) -> Any:
    module, _, path = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for attribute in path.split("."):
            found = getattr(found, attribute)
    except (Exception, SystemExit) as error:
        raise _broken(
            registered, f"importing {target} raised {type(error).__name__}: {error}"
        ) from error
    return found


def _check_contract(registered: RegisteredBackend, backend: Any) -> None:
    target = registered.spec.target
    missing = [
        method for method in (*_VERBS, "probe") if not callable(getattr(backend, method, None))
    ]
    if missing:
        raise _broken(registered, f"{target} has no method {', '.join(missing)}")
    for verb in _VERBS:
        _check_signature(registered, backend, verb)
    if not _accepts(backend.probe, (), {}):
        raise _broken(registered, "probe() must be a classmethod without arguments")
    # Read from the class, where a property shows itself instead of being run.
    name, version = getattr(backend, "name", None), getattr(backend, "api_version", None)
    if name != registered.spec.name:
        raise _broken(registered, f"its class attribute name is {reprlib.repr(name)}")
    if not isinstance(version, int):
        raise _broken(registered, f"its class attribute api_version is {reprlib.repr(version)}")
    _check_version(registered, version)


def _check_signature(registered: RegisteredBackend, backend: Any, verb: str) -> None:
    """Check that a method can be called in every way the contract promises."""
    contract = inspect.signature(getattr(SleepModeBackend, verb))
    _, *parameters = contract.parameters.values()
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    required = [p for p in by_position if p.default is p.empty]
    keywords = {p.name: None for p in parameters if p.kind is p.KEYWORD_ONLY}
    bound = isinstance(inspect.getattr_static(backend, verb), (classmethod, staticmethod))
    instance = () if bound else (None,)
    promised: tuple[tuple[tuple[None, ...], dict[str, None]], ...] = (
        ((*instance, *[None] * len(required)), {}),
        ((*instance, *[None] * len(by_position)), keywords),
        (instance, {p.name: None for p in parameters}),
    )
    method = getattr(backend, verb)
    if not all(_accepts(method, *arguments) for arguments in promised):
        raise _broken(
            registered,
            f"{verb}{inspect.signature(method)} does not accept all that {verb}{contract} does",
        )


def _accepts(
    function: Callable[..., object], args: tuple[None, ...], keywords: dict[str, None]
) -> bool:
    try:
        signature = inspect.signature(function)
    except ValueError:  # compiled code may not tell; the call itself will
        return True
    try:
        signature.bind(*args, **keywords)
    except TypeError:
        return False
    return True


def _check_capabilities(registered: RegisteredBackend, instance: SleepModeBackend) -> None:
    """Check what the instance says of itself, and close it if that is nothing usable."""
    try:
        capabilities: object = instance.capabilities
    except Exception as error:  # noqa: BLE001 - shown in the message below
        capabilities = error
    if isinstance(capabilities, Capabilities):
        return
    broken = _broken(
        registered, f"its capabilities are {reprlib.repr(capabilities)}, not Capabilities"
    )
    try:
        instance.close()
    except Exception as error:  # noqa: BLE001 - the first failure is the one to report
        add_note(broken, f"closing it raised {type(error).__name__}: {error}")
    raise broken
