"""Whether vLLM is to use this package, and which backend of it, by its names and variables."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum

from sleepbackends.adapters.vllm.versions import Release
from sleepbackends.config import VLLM_VARIABLE, SleepConfig, did_you_mean, load_config
from sleepbackends.errors import ConfigurationError
from sleepbackends.policies import Policy, TagPolicy

PLUGIN = "sleepbackends"
"""Name of the entry point, for ``VLLM_PLUGINS``, and of the backend that our own configuration
selects, for ``--sleep-mode-backend``."""

VLLM_OWN = "cumem"
"""Name of vLLM's own backend."""

_PREFIX = f"{PLUGIN}-"
_SCRATCH = TagPolicy(Policy.DISCARD, Policy.DISCARD)


class Wish(str, Enum):
    """What ``SLEEPBACKENDS_VLLM`` says."""

    UNSAID = ""
    """Nothing: whoever names a backend of ours to vLLM gets it."""
    OFF = "0"
    """Leave vLLM alone, whatever it is asked for."""
    ON = "1"
    """Use this package, unless an engine names another backend than vLLM's default."""
    FORCE = "force"
    """The same, and hook releases of vLLM that are not known."""


def read_wish(environ: Mapping[str, str]) -> Wish:
    """Read ``SLEEPBACKENDS_VLLM``.

    Raises
    ------
    ConfigurationError
        If it says something else than 0, 1 or force.
    """
    said = environ.get(VLLM_VARIABLE, "").strip().lower()
    try:
        return Wish(said)
    except ValueError:
        known = [wish.value for wish in Wish if wish is not Wish.UNSAID]
        raise ConfigurationError(
            f"{VLLM_VARIABLE}={said!r} means nothing{did_you_mean(said, known)}",
            hint=f"set it to one of {', '.join(known)}, or unset it",
        ) from None


def chosen_by_environment(environ: Mapping[str, str], release: Release) -> bool:
    """Tell whether the environment chooses this package for engines that name no backend.

    Where vLLM has no option for it, naming the plugin in ``VLLM_PLUGINS`` is enough.

    Raises
    ------
    ConfigurationError
        As ``read_wish``.
    """
    wish = read_wish(environ)
    if wish is Wish.UNSAID and not release.has_option:
        return PLUGIN in [name.strip() for name in environ.get("VLLM_PLUGINS", "").split(",")]
    return wish in (Wish.ON, Wish.FORCE)


def is_ours(name: str) -> bool:
    """Tell whether a name that vLLM was given as its sleep-mode backend is one of ours."""
    return name == PLUGIN or name.startswith(_PREFIX)


def vllm_name(backend: str) -> str:
    """Return under which name vLLM knows a backend of ours."""
    return f"{_PREFIX}{backend}"


def choose(named: str, by_environment: bool) -> str | None:
    """Return the name of ours that an engine is to use; None if it uses another backend.

    Parameters
    ----------
    named : str
        The sleep-mode backend in vLLM's configuration.
    by_environment : bool
        What ``chosen_by_environment`` said.
    """
    if is_ours(named):
        return named
    return PLUGIN if by_environment and named == VLLM_OWN else None


def configuration(name: str, environ: Mapping[str, str] | None = None) -> SleepConfig:
    """Load our configuration for an engine that uses the backend of this name.

    Memory that vLLM tags ``workspace`` is scratch: it is dropped, unless the configuration
    says otherwise.

    Raises
    ------
    ConfigurationError
        As ``load_config``.
    """
    backend = name.removeprefix(_PREFIX) if name != PLUGIN else None
    config = load_config({"backend": backend} if backend else None, environ=environ)
    return config.model_copy(update={"policies": {"workspace": _SCRATCH, **config.policies}})
