"""Staging from an event loop: in the background, or awaited and cancelled."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from concurrent.futures import Future
from dataclasses import replace

import pytest

from sleepbackends import MechanismError, Orchestrator, Staging, StagingReport
from sleepbackends.aio import AsyncOrchestrator
from sleepbackends.calls import Outcome, aftermath_of
from sleepbackends.reports import Staged
from sleepbackends.testing import SimulatedBackend, SimulatedOptions
from sleepbackends.testing.simulated import ALL


class Copying:
    """A staging that ends when the test says so, or soon after it was cancelled."""

    def __init__(self) -> None:
        self.ended: Future[StagingReport] = Future()
        self.cancelled = False

    @property
    def done(self) -> bool:
        return self.ended.done()

    def pause(self) -> None: ...

    def proceed(self) -> None: ...

    def cancel(self) -> None:
        self.cancelled = True
        self.ended.set_result(StagingReport(copied_bytes=1))

    def wait(self, timeout_s: float | None = None) -> StagingReport:
        return self.ended.result(timeout_s)


class Stages(SimulatedBackend):
    def __init__(self) -> None:
        super().__init__(SimulatedOptions(replace(ALL, supports_staging=True)))
        self.copying = Copying()

    def stage(
        self,
        tags: Collection[str] | None = None,
        *,
        background: bool = True,
        limit_gib_s: float = 2.0,
    ) -> Staging:
        assert background, "or the thread could not be told of a cancellation"
        return self.copying

    def staged(self) -> Staged:
        return Staged()


def make() -> tuple[AsyncOrchestrator, Copying]:
    backend = Stages()
    with backend.region("weights") as region:
        region.buffer(10)
    return AsyncOrchestrator(Orchestrator(backend)), backend.copying


def test_in_the_background_it_is_returned_while_it_goes_on() -> None:
    async def main() -> None:
        orchestrator, copying = make()
        async with orchestrator:
            assert await orchestrator.stage() is copying
            assert not copying.done

    asyncio.run(main())


def test_awaited_it_has_ended_and_transitions_do_not_wait_for_it() -> None:
    async def main() -> None:
        orchestrator, copying = make()
        async with orchestrator:
            task = asyncio.create_task(orchestrator.stage(background=False))
            await asyncio.sleep(0.03)
            assert (await orchestrator.sleep()).changed
            assert not task.done()
            copying.ended.set_result(StagingReport())
            assert (await task).done

    asyncio.run(main())


def test_its_failure_is_raised() -> None:
    async def main() -> None:
        orchestrator, copying = make()
        async with orchestrator:
            copying.ended.set_exception(MechanismError("the copy failed"))
            with pytest.raises(MechanismError, match="the copy failed"):
                await orchestrator.stage(background=False)

    asyncio.run(main())


def test_cancelled_it_is_ended_before_the_error_comes() -> None:
    async def main() -> None:
        orchestrator, copying = make()
        async with orchestrator:
            task = asyncio.create_task(orchestrator.stage(background=False))
            await asyncio.sleep(0.03)
            task.cancel()
            with pytest.raises(asyncio.CancelledError) as caught:
                await task
            assert copying.cancelled
            aftermath = aftermath_of(caught.value)
            assert aftermath is not None
            assert aftermath.outcome is Outcome.UNCHANGED

    asyncio.run(main())
