"""What vLLM calls in each of its processes; loads nothing else of this package before."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import suppress

logger = logging.getLogger("vllm.sleepbackends")


def register() -> None:
    """Offer our backends to vLLM, and take part where one of them is chosen.

    May be called any number of times. Never raises, initialises no driver, and changes nothing
    of vLLM but its list of backends unless one of ours can be or is chosen.
    """
    try:
        _register(os.environ)
    except Exception as error:
        logger.warning("sleepbackends leaves vLLM alone: %s", error, exc_info=_unexpected(error))


def _register(environ: Mapping[str, str]) -> None:
    from vllm import __version__ as version

    from sleepbackends.adapters.vllm.choice import Wish, chosen_by_environment, read_wish
    from sleepbackends.adapters.vllm.versions import SUPPORTED, find
    from sleepbackends.config import VLLM_VARIABLE

    wish = read_wish(environ)
    if wish is Wish.OFF:
        return
    release = find(version, forced=wish is Wish.FORCE)
    if release is None:
        logger.warning(
            "sleepbackends leaves vLLM %s alone, it knows %s; %s=force hooks it all the same, "
            "%s=0 silences this",
            version,
            ", ".join(SUPPORTED),
            VLLM_VARIABLE,
            VLLM_VARIABLE,
        )
        # Our names then stand for vLLM's own backend, instead of failing at the first sleep.
        with suppress(ImportError, AttributeError):
            _offer()
        return
    by_environment = chosen_by_environment(environ, release)
    if release.has_option or by_environment:
        from sleepbackends.adapters.vllm import hook

        _offer()
        hook.place(release, by_environment)


def _offer() -> None:
    from sleepbackends.adapters.vllm.choice import PLUGIN, vllm_name
    from sleepbackends.adapters.vllm.offer import offer
    from sleepbackends.registry import Registry

    offer([PLUGIN, *map(vllm_name, Registry.load().specs)])


def _unexpected(error: Exception) -> bool:
    from sleepbackends.errors import SleepBackendsError

    return not isinstance(error, SleepBackendsError)
