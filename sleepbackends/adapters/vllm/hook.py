"""Take part in each of vLLM's workers whose engine uses a backend of ours.

The one thing of vLLM that is replaced before it is known who is chosen is the constructor that
all workers share: only there does a worker's own configuration meet our code before anything
is allocated, in whatever way its process was started. It does nothing for other backends.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial, wraps
from typing import Any

from sleepbackends.adapters.vllm import graphs, worker_calls
from sleepbackends.adapters.vllm.allocator import Allocator, installed
from sleepbackends.adapters.vllm.choice import VLLM_OWN, choose, configuration, is_ours
from sleepbackends.adapters.vllm.memory import Memory
from sleepbackends.adapters.vllm.offer import offer
from sleepbackends.adapters.vllm.versions import Release
from sleepbackends.adapters.vllm.wake_order import WakeOrder
from sleepbackends.errors import BusyError, SleepBackendsError, UnsupportedOperationError

logger = logging.getLogger("vllm.sleepbackends")

_MARK = "_placed_by_sleepbackends"


def place(release: Release, by_environment: bool) -> None:
    """Have every worker that is built from now on ask whether it uses a backend of ours.

    Placing it again does nothing.

    Parameters
    ----------
    release : Release
        What this vLLM has.
    by_environment : bool
        Whether engines that name no backend use ours.
    """
    from vllm.v1.worker.worker_base import WorkerBase

    construct = WorkerBase.__init__
    if hasattr(construct, _MARK):
        return

    @wraps(construct)
    def construct_and_ask(worker: Any, *args: Any, **kwargs: Any) -> None:
        construct(worker, *args, **kwargs)
        _prepare(worker, release, by_environment)

    setattr(construct_and_ask, _MARK, True)
    WorkerBase.__init__ = construct_and_ask


def _prepare(worker: Any, release: Release, by_environment: bool) -> None:
    """Have the worker take our memory once its device is known, if it uses a backend of ours."""
    try:
        # A worker need not have a model.
        model_config = worker.model_config
        name = choose(getattr(model_config, "sleep_mode_backend", ""), by_environment)
        if name is None or not model_config.enable_sleep_mode:
            _withdraw()
            return
        graphs.prepare(model_config)
        worker.init_device = _then(worker.init_device, partial(install, worker, name, release))
    except Exception:
        logger.exception("sleepbackends is not used, vLLM's own sleep mode is")


def _then(first: Callable[..., Any], second: Callable[[], object]) -> Callable[..., Any]:
    """Do one thing after another, whose failure is no concern of vLLM's."""

    @wraps(first)
    def both(*args: Any, **kwargs: Any) -> Any:
        result = first(*args, **kwargs)
        try:
            second()
        except Exception:
            logger.exception("sleepbackends failed and vLLM goes on")
        return result

    return both


def install(worker: Any, name: str, release: Release) -> None:
    """Put our memory in the place of vLLM's allocator for this worker's process.

    Where that is impossible the worker goes on with vLLM's own, and one line says why. Never
    raises.

    Parameters
    ----------
    worker : object
        vLLM's worker; its device is set, and nothing is allocated under tags yet.
    name : str
        Which of our names was chosen.
    release : Release
        What this vLLM has.
    """
    try:
        _install(worker, name, release)
    except Exception as error:
        logger.warning(
            "sleepbackends is not used, vLLM's own sleep mode is: %s",
            error,
            exc_info=not isinstance(error, SleepBackendsError),
        )
        _withdraw()
        if is_ours(worker.model_config.sleep_mode_backend):
            worker.model_config.sleep_mode_backend = VLLM_OWN


def _withdraw() -> None:
    """Give vLLM's place back that an engine which is gone has not."""
    ours = installed()
    try:
        if ours is not None and not ours.get_current_usage():
            ours.release_pools()
    except Exception:
        logger.exception("an engine that is gone keeps the place of vLLM's allocator")


def _install(worker: Any, name: str, release: Release) -> None:
    if not worker.current_platform.is_cuda():
        raise UnsupportedOperationError("it works on NVIDIA GPUs only")
    from vllm.device_allocator.cumem import CuMemAllocator

    before = CuMemAllocator.instance
    if before is not None and before.get_current_usage():
        raise BusyError(
            "another engine in this process uses vLLM's allocator already",
            hint="run one engine in a process",
        )
    memory = Memory.open(configuration(name, os.environ))
    try:
        # Some names stand for two backends together, and are in no list beforehand.
        offer([name])
        graphs.offload(worker.model_config, memory)
        # The last step of an engine's start: what is staged now is what a sleep will find.
        worker.compile_or_warm_up_model = _then(
            worker.compile_or_warm_up_model, memory.orchestrator.loaded
        )
        worker_calls.attach(worker, memory)
    except BaseException:
        memory.close()
        raise
    _withdraw()
    order = WakeOrder(worker, memory) if release.restores_buffers_on_any_wake else None
    CuMemAllocator.instance = Allocator(memory, order)
    worker.model_config.sleep_mode_backend = name
    backend = memory.orchestrator.backend
    logger.info("sleepbackends owns this worker's memory, by the backend %r", backend.name)
