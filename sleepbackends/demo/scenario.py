"""The order of the demo: every step on one backend, then the release on unselective ones."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator
from contextlib import closing
from typing import Any

from sleepbackends import AllocatingBackend, BackendSettings, Registry
from sleepbackends.demo.checked_engine import CheckedEngine, DemoSettings
from sleepbackends.demo.steps import PlannedRelease, Step
from sleepbackends.examples.unselective import (
    UnselectiveHostBackend,
    without_selective_release,
)
from sleepbackends.host.backend import HostBackend
from sleepbackends.vmm.backend import VmmBackend

Event = PlannedRelease | Step

_THIRD_PARTY = "zstd"


def run_scenario(
    settings: DemoSettings, backend: AllocatingBackend, unselective: Iterable[AllocatingBackend]
) -> Iterator[Event]:
    """Run the whole demo, telling of each step as it ends.

    Parameters
    ----------
    settings : DemoSettings
        What to run with.
    backend : AllocatingBackend
        Takes every step; it is closed.
    unselective : iterable of AllocatingBackend
        Backends that cannot release selectively, made when they are asked for; each
        releases the KV cache as well as it can, and is closed before the next one is made.

    Raises
    ------
    SleepBackendsError
        What the engine or a transition raises; everything is closed.
    """
    tokens = yield from _every_step(settings, backend)
    for other in unselective:
        yield from _release_alone(settings, other, tokens)


def _every_step(
    settings: DemoSettings, backend: AllocatingBackend
) -> Generator[Event, None, list[int]]:
    with closing(backend), closing(CheckedEngine(settings, backend)) as engine:
        yield engine.loaded()
        yield engine.generate()
        yield engine.generate("generate again")
        if backend.capabilities.supports_offload:
            yield engine.sleep(1)
            yield engine.wake_up()
        yield from engine.release_kv_cache()
        yield engine.wake_up()
        yield engine.sleep(2)
        yield engine.wake_up("wake up, reload and generate")
        return engine.tokens


def _release_alone(
    settings: DemoSettings, backend: AllocatingBackend, tokens: list[int]
) -> Iterator[Event]:
    with closing(backend), closing(CheckedEngine(settings, backend, tokens)) as engine:
        yield engine.loaded()
        yield engine.generate()
        yield from engine.release_kv_cache()
        yield engine.wake_up()


def unselective_backends(
    registry: Registry, backend: AllocatingBackend, settings: BackendSettings
) -> Iterator[AllocatingBackend]:
    """Make backends that cannot release selectively: with selective resume, then without.

    Beside a device backend they are the same backend with those abilities turned off, so
    that the model computes on the same device. Otherwise they are of the third-party
    backend ``zstd`` if it is installed, or else the host backend without those abilities.

    Parameters
    ----------
    registry : Registry
        Tells what is installed.
    backend : AllocatingBackend
        The backend of the whole demo; a host backend lends its options.
    settings : BackendSettings
        For the backends that are made.
    """
    host_options = backend.options if isinstance(backend, HostBackend) else None
    for selective_resume in (True, False):
        if isinstance(backend, VmmBackend):
            yield without_selective_release(backend, settings, selective_resume)
        elif _THIRD_PARTY in registry.specs:
            options = {"selective_resume": selective_resume}
            other: Any = registry.create(_THIRD_PARTY, options, settings)
            yield other
        else:
            yield UnselectiveHostBackend(host_options, settings, selective_resume=selective_resume)
