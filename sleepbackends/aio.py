"""The orchestrator for programs that run in an event loop.

Everything stands on asyncio and one thread. Transitions are serialised, so that one thread
is enough, and it keeps the calls of a loop in their order. A library above asyncio would
add a dependency and no ability: uvloop and the servers that run engines are asyncio.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from sleepbackends.calls import Call, Work
from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control
from sleepbackends.engine import QuiesceMode
from sleepbackends.engine_state import EngineReport, EngineState
from sleepbackends.errors import BusyError, ClosedError, SleepBackendsError
from sleepbackends.plan import Plan
from sleepbackends.policies import Policies
from sleepbackends.protocol import Staging

if TYPE_CHECKING:
    from sleepbackends.orchestrator import Orchestrator

T = TypeVar("T")

_POLL_S = 0.02


class AsyncOrchestrator:
    """The verbs of one ``Orchestrator`` as coroutines that never block the event loop.

    Each verb returns a ``Call``: await it for the report, or iterate over it for its
    progress. Engine hooks run in the thread that makes the transitions, in the context of
    the caller. Others may use the orchestrator itself at the same time.

    A cancelled call is rolled back or completes, and ``aftermath_of(error)`` says which;
    see ``Call``. A hook that runs is never interrupted, and is waited for.

    Parameters
    ----------
    orchestrator : Orchestrator
        What does the work. ``close`` closes it.
    """

    def __init__(self, orchestrator: Orchestrator) -> None:
        self.orchestrator = orchestrator
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="sleepbackends")
        # Not the same one: a transition does not wait for a staging.
        self._staging_thread = ThreadPoolExecutor(1, thread_name_prefix="sleepbackends-stage")
        self._users: Counter[asyncio.Task[Any] | None] = Counter()
        self._closed = False

    # What could be done, and what is: none of these waits

    @property
    def capabilities(self) -> Capabilities:
        """What the backend can do."""
        return self.orchestrator.capabilities

    def state(self) -> EngineState:
        """Return what is where and whether the engine serves."""
        return self.orchestrator.state()

    def plan_sleep(self, level: int = 1) -> Plan:
        """Tell what ``sleep(level)`` would do; raises what it would refuse with."""
        return self.orchestrator.plan_sleep(level)

    def plan_wake(self, tags: Collection[str] | None = None) -> Plan:
        """Tell what ``wake_up(tags)`` would do; raises what it would refuse with."""
        return self.orchestrator.plan_wake(tags)

    def plan_release(self, tags: Collection[str] = ("kv_cache",)) -> Plan:
        """Tell what ``release(tags)`` would do; raises what it would refuse with."""
        return self.orchestrator.plan_release(tags)

    # Transitions

    def sleep(
        self,
        level: int = 1,
        *,
        mode: QuiesceMode | None = None,
        policies: Policies | None = None,
        timeout_s: float | None = None,
    ) -> Call[EngineReport]:
        """Stop serving and release memory; see ``Orchestrator.sleep``.

        Raises
        ------
        BusyError
            Awaited by a task that is inside ``use()`` itself; nothing happened.
        SleepBackendsError
            When awaited, as ``Orchestrator.sleep``, with the same guarantees.
        """
        run = partial(self.orchestrator.sleep, level, mode=mode, policies=policies)
        return self._transition("sleep", run, timeout_s, drains=True)

    def wake_up(
        self, tags: Collection[str] | None = None, *, timeout_s: float | None = None
    ) -> Call[EngineReport]:
        """Take memory again and serve; see ``Orchestrator.wake_up``.

        Raises
        ------
        SleepBackendsError
            When awaited, as ``Orchestrator.wake_up``, with the same guarantees.
        """
        return self._transition("wake_up", partial(self.orchestrator.wake_up, tags), timeout_s)

    def release_kv_cache(self, *, timeout_s: float | None = None) -> Call[EngineReport]:
        """Release the tag ``kv_cache`` and leave the rest resident; see ``release``."""
        return self._transition(
            "release", self.orchestrator.release_kv_cache, timeout_s, drains=True
        )

    def release(
        self, tags: Collection[str], *, timeout_s: float | None = None
    ) -> Call[EngineReport]:
        """Release the named tags and forget their contents; see ``Orchestrator.release``.

        Raises
        ------
        BusyError
            Awaited by a task that is inside ``use()`` itself; nothing happened.
        SleepBackendsError
            When awaited, as ``Orchestrator.release``, with the same guarantees.
        """
        run = partial(self.orchestrator.release, tags)
        return self._transition("release", run, timeout_s, drains=True)

    def mark_valid(self, tags: Collection[str]) -> Call[EngineReport]:
        """Say that the caller has refilled these tags; see ``Orchestrator.mark_valid``."""
        return self._transition("mark_valid", partial(self.orchestrator.mark_valid, tags), None)

    def loaded(self) -> Call[None]:
        """Say that the engine has loaded its contents; see ``Orchestrator.loaded``."""
        return self._call("loaded", lambda _: self.orchestrator.loaded())

    def stage(
        self, tags: Collection[str] | None = None, *, background: bool = True
    ) -> Call[Staging]:
        """Copy contents ahead while the engine serves; see ``Orchestrator.stage``.

        Without ``background`` the call ends when the staging has; cancelled, it ends the
        staging, and what was staged so far is kept.

        Raises
        ------
        UnsupportedOperationError, UnknownTagError
            When awaited: the backend cannot stage, or there is no such tag.
        """

        def run(control: Control) -> Staging:
            staging = self.orchestrator.stage(tags, background=True)
            if not background:
                _see_through(staging, control)
            return staging

        return self._call("stage", run, self._thread if background else self._staging_thread)

    @asynccontextmanager
    async def use(
        self, tags: Collection[str] | None = None, *, holder: str = "engine"
    ) -> AsyncIterator[None]:
        """Guard work on the memory: no transition begins while it runs.

        It may await anything but a transition that waits for it to end.

        Parameters
        ----------
        tags : collection of str, optional
            As in ``Orchestrator.use``.
        holder : str
            Named by the ``BusyError`` of a transition that waited in vain.

        Raises
        ------
        SuspendedError
            Not admitted, at once; nothing was touched.
        """
        task = asyncio.current_task()
        with self.orchestrator.use(tags, holder=holder):
            self._users[task] += 1
            try:
                yield
            finally:
                self._users[task] -= 1
                self._users += Counter()  # drops those that have left

    async def close(self) -> None:
        """Wait for transitions that are going on and close the orchestrator.

        It completes even if it is cancelled. Repeating the call does nothing.
        """
        if not self._closed:
            await self._call("close", self._close, cancellable=False)

    async def __aenter__(self) -> AsyncOrchestrator:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _close(self, _: Control) -> None:
        # All of it in the thread, so that it completes even if nobody waits any more.
        self.orchestrator.close()
        self._closed = True
        self._thread.shutdown(wait=False)
        self._staging_thread.shutdown(wait=False)

    def _transition(
        self,
        operation: str,
        run: Callable[..., EngineReport],
        timeout_s: float | None,
        *,
        drains: bool = False,
    ) -> Call[EngineReport]:
        limit_s = self.orchestrator.config.timeout_s if timeout_s is None else timeout_s
        return self._call(
            operation, lambda control: run(control=control), timeout_s=limit_s, drains=drains
        )

    def _call(
        self,
        operation: str,
        run: Callable[[Control], T],
        thread: ThreadPoolExecutor | None = None,
        *,
        timeout_s: float | None = None,
        drains: bool = False,
        cancellable: bool = True,
    ) -> Call[T]:
        def submit(job: Callable[[], T]) -> Future[T]:
            if self._closed:
                raise ClosedError("the orchestrator was closed", hint="create a new one")
            if drains and self._users[asyncio.current_task()]:
                raise BusyError(
                    f"{operation} was awaited by a task that is inside use() itself",
                    hint="leave use() first: the transition waits for it",
                    operation=operation,
                    holders=["this very task"],
                )
            return (thread or self._thread).submit(job)

        return Call(
            Work(
                operation,
                run,
                submit=submit,
                state=self.orchestrator.state,
                timeout_s=timeout_s,
                cancellable=cancellable,
            )
        )


def _see_through(staging: Staging, control: Control) -> None:
    """Wait until a staging has ended, or end it if the call was cancelled."""
    try:
        while not staging.done:
            control.check("stage")
            time.sleep(_POLL_S)
    except SleepBackendsError:
        staging.cancel()
        with suppress(SleepBackendsError):
            staging.wait()
        raise
    staging.wait()
