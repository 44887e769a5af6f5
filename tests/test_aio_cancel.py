"""A cancelled call is undone or completes, is waited for, and says which it was."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from random import Random
from typing import Any

import pytest

from sleepbackends import ClosedError, EngineReport, Orchestrator, Status
from sleepbackends.aio import AsyncOrchestrator
from sleepbackends.calls import Aftermath, Call, Outcome, aftermath_of
from tests.gated import Gate, make, run_uvloop


async def reached(gate: Gate) -> None:
    while not gate.reached.is_set():
        await asyncio.sleep(0)


async def cancelled(task: asyncio.Task[Any]) -> Aftermath[Any]:
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await task
    aftermath = aftermath_of(caught.value)
    assert aftermath is not None
    return aftermath


@pytest.mark.parametrize("run", [asyncio.run, run_uvloop])
def test_cancelled_during_the_copy_it_is_rolled_back_before_the_error_comes(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def main() -> None:
        sync, backend, _ = make()
        before = sync.state()
        backend.saving = gate = Gate()
        async with AsyncOrchestrator(sync) as orchestrator:
            call = orchestrator.sleep()
            task = asyncio.create_task(call)
            await reached(gate)
            task.cancel()
            for _ in range(5):
                await asyncio.sleep(0.01)
                assert not task.done(), "raised while the thread was still at work"
                task.cancel()
            gate.open.set()
            aftermath = await cancelled(task)
            assert aftermath.outcome is Outcome.UNCHANGED
            assert aftermath.state.status is Status.AWAKE
            assert aftermath is call.aftermath
            assert str(aftermath) == "the cancelled sleep is unchanged; the engine is awake"
            assert sync.state() == before
            backend.saving = None
            assert (await orchestrator.sleep()).changed

    run(main())


def test_cancelled_too_late_it_completes_and_has_its_report() -> None:
    async def main() -> None:
        _, backend, engine = make()
        hook = Gate()
        engine.drop_caches = lambda tags: hook.pass_through()  # type: ignore[method-assign]
        sync = Orchestrator(backend, hooks=engine.hooks())
        async with AsyncOrchestrator(sync) as orchestrator:
            task = asyncio.create_task(orchestrator.sleep())
            await reached(hook)
            asyncio.get_running_loop().call_later(0.05, hook.open.set)
            aftermath = await cancelled(task)
            assert aftermath.outcome is Outcome.COMPLETED
            assert isinstance(aftermath.result, EngineReport)
            assert aftermath.result.changed
            assert aftermath.state.status is Status.ASLEEP

    asyncio.run(main())


def test_cancelled_and_failed_otherwise_it_has_the_error() -> None:
    async def main() -> None:
        _, backend, engine = make()
        engine.fail["unquiesce"] = RuntimeError("stuck")
        engine.fail["drop_caches"] = RuntimeError("no")
        hook = Gate()
        engine.quiesce = lambda mode, deadline_s: hook.pass_through()  # type: ignore[method-assign]
        async with AsyncOrchestrator(Orchestrator(backend, hooks=engine.hooks())) as orchestrator:
            task = asyncio.create_task(orchestrator.sleep())
            await reached(hook)
            asyncio.get_running_loop().call_later(0.05, hook.open.set)
            aftermath = await cancelled(task)
            assert aftermath.outcome is Outcome.FAILED
            assert "unquiesce" in str(aftermath.error)
            assert "unquiesce" in str(aftermath)
            assert aftermath.state.status is Status.FAULTED

    asyncio.run(main())


@pytest.mark.parametrize("behind", ["async", "sync"])
def test_cancelled_while_waiting_for_its_turn_nothing_happened(behind: str) -> None:
    async def main() -> None:
        sync, backend, engine = make()
        backend.saving = gate = Gate()
        async with AsyncOrchestrator(sync) as orchestrator:
            first: asyncio.Future[Any]
            if behind == "async":  # in the queue of the same thread
                first = asyncio.create_task(orchestrator.sleep())
            else:  # in front of the lock
                first = asyncio.get_running_loop().run_in_executor(None, sync.sleep)
            await reached(gate)
            task = asyncio.create_task(orchestrator.wake_up())
            await asyncio.sleep(0.03)
            aftermath = await cancelled(task)
            assert aftermath.outcome is Outcome.UNCHANGED
            assert not first.done()
            gate.open.set()
            assert (await first).changed
            assert engine.named() == ["quiesce", "drop_caches"]

    asyncio.run(main())


def test_a_task_cancelled_before_its_first_step_did_nothing() -> None:
    async def main() -> None:
        sync, _, engine = make()
        async with AsyncOrchestrator(sync) as orchestrator:
            aftermath = await cancelled(asyncio.create_task(orchestrator.sleep()))
            assert aftermath.outcome is Outcome.UNCHANGED
            assert engine.calls == []

    asyncio.run(main())


def test_cancelled_while_iterating_over_its_progress() -> None:
    async def main() -> None:
        sync, backend, _ = make()
        backend.saving = gate = Gate()
        async with AsyncOrchestrator(sync) as orchestrator:
            call = orchestrator.sleep()

            async def follow(call: Call[EngineReport]) -> None:
                async for progress in call:
                    if progress.done_bytes:
                        asyncio.get_running_loop().call_later(0.05, gate.open.set)

            task = asyncio.create_task(follow(call))
            await reached(gate)
            aftermath = await cancelled(task)
            assert aftermath.outcome is Outcome.UNCHANGED
            assert sync.state().serving

    asyncio.run(main())


def test_a_timeout_of_asyncio_is_one_and_knows_what_is_so() -> None:
    async def main() -> None:
        sync, backend, _ = make()
        backend.saving = gate = Gate()
        async with AsyncOrchestrator(sync) as orchestrator:
            call = orchestrator.sleep()
            asyncio.get_running_loop().call_later(0.1, gate.open.set)
            with pytest.raises((TimeoutError, asyncio.TimeoutError)) as caught:
                await asyncio.wait_for(call, 0.05)
            assert call.aftermath is not None
            assert call.aftermath.outcome is Outcome.UNCHANGED
            assert aftermath_of(caught.value) is call.aftermath
            assert aftermath_of(ValueError()) is None

    asyncio.run(main())


def test_the_error_carries_it_as_a_note() -> None:
    async def main() -> None:
        sync, backend, _ = make()
        backend.saving = gate = Gate()
        async with AsyncOrchestrator(sync) as orchestrator:
            notes: list[str] = []

            async def follow() -> None:
                try:
                    await orchestrator.sleep()
                except asyncio.CancelledError as error:
                    notes.extend(getattr(error, "__notes__", ()))
                    raise

            task = asyncio.create_task(follow())
            await reached(gate)
            asyncio.get_running_loop().call_later(0.05, gate.open.set)
            assert notes == []
            assert [str(await cancelled(task))] == notes

    asyncio.run(main())


def test_close_completes_even_if_it_is_cancelled() -> None:
    async def main() -> None:
        sync, backend, _ = make()
        backend.saving = gate = Gate()
        orchestrator = AsyncOrchestrator(sync)
        first = asyncio.create_task(orchestrator.sleep())
        await reached(gate)
        close = asyncio.create_task(orchestrator.close())
        await asyncio.sleep(0.02)
        asyncio.get_running_loop().call_later(0.05, gate.open.set)
        aftermath = await cancelled(close)
        assert aftermath.outcome is Outcome.COMPLETED
        assert (await first).changed
        with pytest.raises(ClosedError):
            await orchestrator.wake_up()
        await orchestrator.close()

    asyncio.run(main())


def test_random_cancellations_never_leave_anything_half_done() -> None:
    """Whatever the moment: kept bytes are kept, and what the caller is told is so."""

    async def main() -> None:
        sync, backend, _ = make()
        kept = {memory: bytes(data) for memory, data in list(backend.mapped.items())[:2]}
        chance = Random(1)  # noqa: S311 - nothing secret about it
        outcomes = set()
        async with AsyncOrchestrator(sync) as orchestrator:
            for _ in range(300):
                slept = not orchestrator.state().serving
                before = orchestrator.state()
                call = orchestrator.wake_up() if slept else orchestrator.sleep()
                task = asyncio.create_task(call)
                for _ in range(chance.randrange(8)):
                    await asyncio.sleep(0)
                task.cancel()
                try:
                    await task
                except asyncio.CancelledError:
                    assert call.aftermath is not None
                    outcomes.add(call.aftermath.outcome)
                    if call.aftermath.outcome is Outcome.UNCHANGED:
                        assert orchestrator.state() == before
                    else:
                        assert orchestrator.state().serving is slept
                if orchestrator.state().serving:
                    assert {address: bytes(backend.mapped[address]) for address in kept} == kept
            assert outcomes == {Outcome.UNCHANGED, Outcome.COMPLETED}
            await orchestrator.wake_up()

    asyncio.run(main())
