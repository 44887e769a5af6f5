"""The configuration: one frozen model, filled from Python, the environment and a file.

Precedence, highest first: Python, environment, file, defaults.
"""

from __future__ import annotations

import json
import os
import reprlib
import sys
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
)
from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, SettingsError

from sleepbackends.errors import ConfigurationError
from sleepbackends.mechanism import Fill
from sleepbackends.plugins import AUTO, DISABLE_VARIABLE
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.settings import BackendSettings

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PREFIX = "SLEEPBACKENDS_"
"""What the names of all environment variables of this package start with."""

FILE_VARIABLE = "SLEEPBACKENDS_CONFIG"
"""Names the configuration file, unless the caller names one."""

VLLM_VARIABLE = "SLEEPBACKENDS_VLLM"
"""Chooses this package inside vLLM; no field of the configuration."""

TOKEN_VARIABLE = "SLEEPBACKENDS_SERVER_TOKEN"  # noqa: S105 - the name of a variable
"""Holds the token of a server that runs alone; no field of the configuration."""

_NESTED = "__"
_TEST_PREFIX = "SLEEPBACKENDS_TEST_"
_NO_FIELDS = (FILE_VARIABLE, DISABLE_VARIABLE, VLLM_VARIABLE, TOKEN_VARIABLE)
_LEVELS = ("level_1", "level_2")


def _both_levels(value: object) -> object:
    """Spell out a policy given as one string, and refuse what is no level."""
    if isinstance(value, str):
        known = [policy.value for policy in Policy]
        if value not in known:
            raise ValueError(f"no such policy{did_you_mean(value, known)}")
        return dict.fromkeys(_LEVELS, value)
    if isinstance(value, Mapping) and (unknown := [key for key in value if key not in _LEVELS]):
        raise ValueError(f"no such level: {unknown[0]!r}{did_you_mean(unknown[0], _LEVELS)}")
    return value


def _not_a_switch(number: object) -> object:
    """Refuse ``timeout_s = true``, which pydantic would take for one second."""
    if isinstance(number, bool):
        raise ValueError("a number is needed")
    return number


def _finite_or_none(seconds: float | None) -> float | None:
    return None if seconds == float("inf") else seconds


_Number = Annotated[float, BeforeValidator(_not_a_switch)]

if TYPE_CHECKING:  # what may be written; a TagPolicy is what is kept
    PolicyChoice = TagPolicy | Literal["keep", "offload", "discard"] | Mapping[str, str]
else:
    PolicyChoice = Annotated[TagPolicy, BeforeValidator(_both_levels)]


class SleepConfig(BaseModel):
    """What to use and how; immutable.

    Raises
    ------
    ConfigurationError
        If a field is unknown or its value cannot be used; the message lists each of them.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    backend: str = Field(default=AUTO, min_length=1)
    """Name of the backend; ``auto`` takes the best one that works on this machine."""

    options: Mapping[str, Any] = {}
    """The backend's own options, checked by its options model when it is created."""

    policies: Mapping[str, PolicyChoice] = {}
    """What a sleep does with each tag: ``keep``, ``offload`` or ``discard`` at both levels, or
    ``level_1`` and ``level_2`` apart. Tags not listed follow the defaults of ``Policies``."""

    on_unselective: Literal["fallback", "reload_only", "error"] = "fallback"
    """What to do when some tags are to be released by a backend that can only release all:
    whatever works (``fallback``), only what leaves the rest awake (``reload_only``), or raise
    (``error``)."""

    quiesce_mode: Literal["wait", "abort", "keep"] = "wait"
    """What happens to requests in flight before a sleep: let them end (``wait``), end them
    (``abort``), or keep them where they are (``keep``)."""

    timeout_s: Annotated[_Number | None, Field(gt=0), AfterValidator(_finite_or_none)] = 300.0
    """Seconds each transition may take; None, or infinity, sets no deadline."""

    wait_for_memory_s: Annotated[_Number, Field(ge=0, allow_inf_nan=False)] = 0.0
    """Seconds a resume waits for others to give memory back before it fails."""

    staging: Literal["on_call", "automatic"] = "on_call"
    """When contents are copied ahead, while the engine serves, so that a sleep has less left to
    copy: only by ``stage()``, or also after ``loaded()`` and each wake-up (``automatic``)
    where the backend can."""

    stage_limit_gib_s: Annotated[_Number, Field(gt=0, allow_inf_nan=False)] = 2.0
    """The most that is copied ahead in a second."""

    fill: Fill = Fill.ZERO
    """What discarded memory holds when it is mapped again: ``zero``, ``poison`` (0xA5 in every
    byte) or ``none`` (whatever is there)."""

    if not TYPE_CHECKING:  # type checkers see the fields instead

        def __init__(self, **values: Any) -> None:
            try:
                super().__init__(**values)
            except ValidationError as error:
                raise ConfigurationError(
                    f"the configuration cannot be used: {problems(error, type(self).model_fields)}",
                    hint="docs/configuration.md describes every field",
                ) from error

    @property
    def tag_policies(self) -> Policies:
        """The policies of all tags, defaults included."""
        return Policies(cast("Mapping[str, TagPolicy]", self.policies))

    @property
    def settings(self) -> BackendSettings:
        """What every backend is told when it is created."""
        return BackendSettings(self.tag_policies, self.wait_for_memory_s, self.fill)


class _Variables(SleepConfig, BaseSettings):
    """The same fields, for pydantic-settings to look for in the environment."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, env_nested_delimiter=_NESTED)

    # pydantic-settings 2.4 stumbles over the validator in the type of the values.
    policies: Mapping[str, Any] = {}


def load_config(
    source: SleepConfig | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
) -> SleepConfig:
    """Build the configuration from what the caller, the environment and a file say.

    Precedence, highest first: Python, environment, file, defaults. Mappings (``options``,
    ``policies``) are merged key by key.

    Parameters
    ----------
    source : SleepConfig, mapping, path or None
        A ``SleepConfig`` is complete and returned as it is. A mapping has the first word. A
        path names the file, ``.toml`` or ``.json``; without one, ``SLEEPBACKENDS_CONFIG`` does.
    environ : mapping of str to str, optional
        ``os.environ`` by default.

    Raises
    ------
    ConfigurationError
        If a file is missing or garbled, a variable or field unknown, or a value wrong.
    """
    if isinstance(source, SleepConfig):
        return source
    environ = os.environ if environ is None else environ
    layers: dict[str, Mapping[str, Any]] = {}
    if isinstance(source, Mapping):
        layers["the caller"] = source
        path = environ.get(FILE_VARIABLE)
    else:
        path = environ.get(FILE_VARIABLE) if source is None else os.fspath(source)
    layers["the environment"] = _from_environment(environ)
    if path:
        layers[str(path)] = _from_file(Path(path))

    merged: dict[str, Any] = {}
    for layer in reversed(layers.values()):
        merged = _merge(merged, layer)
    try:
        return SleepConfig(**{str(field): value for field, value in merged.items()})
    except ConfigurationError as error:
        origins = ", then ".join(name for name, layer in layers.items() if layer)
        raise ConfigurationError(error.message, hint=f"values come from {origins}") from error


def problems(error: ValidationError, known: Collection[str]) -> str:
    """Describe what a pydantic model refused: each field, what was given, what is known."""
    said = []
    for problem in error.errors(include_url=False):
        place = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            last = str(problem["loc"][-1])
            candidates = known if len(problem["loc"]) == 1 else ()
            said.append(f"{place}: no such field{did_you_mean(last, candidates)}")
        elif problem["type"] == "missing":
            said.append(f"{place}: missing")
        else:
            message = problem["msg"].removeprefix("Value error, ")
            given = reprlib.repr(problem["input"])
            said.append(f"{place}: {message}; given: {given}" if place else message)
    return "; ".join(said)


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return the end of a message about an unknown name: close matches, and what is known."""
    if not known:
        return ""
    close = get_close_matches(name.lower(), known)
    guess = f", did you mean {' or '.join(map(repr, close))}?" if close else ""
    return f"{guess} (known: {', '.join(sorted(known))})"


def _from_environment(environ: Mapping[str, str]) -> dict[str, Any]:
    ours = {name.upper(): value for name, value in environ.items()}
    ours = {
        name: value
        for name, value in ours.items()
        if name.startswith(PREFIX) and not name.startswith(_TEST_PREFIX) and name not in _NO_FIELDS
    }
    for name in ours:
        _check_variable(name)
    source = EnvSettingsSource(_Variables)
    # It looks names up in lower case. An empty variable counts as unset, because container
    # manifests can often not leave one out.
    source.env_vars = {name.lower(): value for name, value in ours.items() if value}
    try:
        return source()
    except SettingsError as error:
        raise ConfigurationError(
            f"an environment variable cannot be read: {error}: {error.__cause__}",
            hint="options and policies as a whole are JSON objects",
        ) from error


def _check_variable(name: str) -> None:
    """Refuse a variable that sets nothing, which would otherwise go unnoticed."""
    field, *keys = name.removeprefix(PREFIX).lower().split(_NESTED)
    nests = field in ("options", "policies")
    if field in SleepConfig.model_fields and all(keys) and (nests or not keys):
        return
    known = [known.upper() for known in SleepConfig.model_fields]
    known += [other.removeprefix(PREFIX) for other in _NO_FIELDS]
    # Compared without the prefix that they share, or each would look like all others.
    close = [PREFIX + guess for guess in get_close_matches(field.upper(), known)]
    raise ConfigurationError(
        f"unknown environment variable {name}"
        + (f", did you mean {' or '.join(close)}?" if close else "")
        + f" (known: {PREFIX} and one of {', '.join(known)})",
        hint=f"correct or unset it; {PREFIX}OPTIONS{_NESTED}KEY sets one option, "
        f"{PREFIX}POLICIES{_NESTED}TAG the policy of one tag",
    )


def _from_file(path: Path) -> dict[str, Any]:
    readers = {".toml": tomllib.loads, ".json": json.loads}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise ConfigurationError(
            f"configuration file {path}: unknown suffix {path.suffix!r} (known: .json, .toml)",
            hint="write it as TOML or JSON and name it so",
        )
    try:
        content: Any = reader(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"configuration file {path} cannot be read: {error.strerror or error}",
            hint=f"check the path, and {FILE_VARIABLE} if it came from there",
        ) from error
    except ValueError as error:
        raise ConfigurationError(
            f"configuration file {path} is garbled: {error}", hint="correct it at that place"
        ) from error
    if not isinstance(content, dict):
        raise ConfigurationError(
            f"configuration file {path} holds {reprlib.repr(content)}, not an object",
            hint="the top level must be an object with the fields of SleepConfig",
        )
    return content


def _merge(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        below = low.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            merged[key] = _merge(below, value)
        else:
            merged[key] = value
    return merged
