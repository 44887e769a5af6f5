"""The verbs as coroutines: same results, same errors, and an event loop that never waits."""

from __future__ import annotations

import asyncio
import contextvars
import re
import threading
from ast import PyCF_ALLOW_TOP_LEVEL_AWAIT
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import FunctionType
from typing import Any

import pytest

from sleepbackends import (
    BusyError,
    ClosedError,
    EngineHooks,
    Orchestrator,
    Progress,
    Status,
    SuspendedError,
    UnknownTagError,
    UnsupportedOperationError,
)
from sleepbackends.aio import AsyncOrchestrator
from sleepbackends.errors import TransitionCancelledError
from sleepbackends.testing import SimulatedBackend
from tests.gated import SIZE, Gate, make, run_uvloop


@pytest.mark.parametrize("run", [asyncio.run, run_uvloop])
def test_every_verb_does_what_the_orchestrator_does(
    run: Callable[[Coroutine[Any, Any, None]], None],
) -> None:
    async def main() -> None:
        async with AsyncOrchestrator(make()[0]) as orchestrator:
            assert orchestrator.plan_sleep(1).changes
            assert orchestrator.capabilities.supports_offload
            report = await orchestrator.sleep(1)
            assert report.released_bytes == 3 * SIZE
            assert orchestrator.state().status is Status.ASLEEP
            assert orchestrator.plan_wake().changes
            assert not (await orchestrator.wake_up({"weights"})).serving
            assert (await orchestrator.wake_up()).serving
            assert orchestrator.plan_release().changes
            assert (await orchestrator.release_kv_cache()).released_bytes == SIZE
            assert not (await orchestrator.release(["kv_cache"])).changed
            await orchestrator.wake_up()
            assert (await orchestrator.mark_valid({"kv_cache"})).serving
            await orchestrator.loaded()
            with pytest.raises(UnsupportedOperationError):
                await orchestrator.stage()
        with pytest.raises(ClosedError):
            await orchestrator.sleep()
        await orchestrator.close()

    run(main())


def test_the_loop_goes_on_while_a_thread_copies() -> None:
    async def main() -> None:
        sync, backend, _ = make()
        backend.saving = Gate()
        async with AsyncOrchestrator(sync) as orchestrator:
            task = asyncio.create_task(orchestrator.sleep())
            while not backend.saving.reached.is_set():
                await asyncio.sleep(0)
            assert orchestrator.state().transition.startswith("sleep by thread 'sleepbackends")
            assert not task.done()
            backend.saving.open.set()
            assert (await task).changed

    asyncio.run(main())


def test_progress_comes_while_it_happens_and_the_report_afterwards() -> None:
    async def main() -> None:
        sync, backend, _ = make()
        async with AsyncOrchestrator(sync) as orchestrator:
            backend.saving = gate = Gate()
            call = orchestrator.sleep()
            seen: list[Progress] = []
            async for progress in call:
                seen.append(progress)
                if progress.done_bytes:  # else the copy would wait for ever
                    gate.open.set()
            assert seen[0].operation == "suspend"
            assert seen[0].total_bytes == 2 * SIZE
            assert [p.done_bytes for p in seen] == sorted(p.done_bytes for p in seen)
            assert seen[-1].done_bytes == 2 * SIZE
            assert (await call).changed
            assert await call is await call, "awaited again, it is the same report"

    asyncio.run(main())


def test_iterating_raises_what_the_call_raises_and_so_does_awaiting_it() -> None:
    async def main() -> None:
        async with AsyncOrchestrator(make()[0]) as orchestrator:
            call = orchestrator.wake_up(["nothing"])
            with pytest.raises(UnknownTagError):
                async for _ in call:
                    pass
            with pytest.raises(UnknownTagError):
                await call

    asyncio.run(main())


def test_leaving_an_iteration_early_leaves_the_call_going() -> None:
    async def main() -> None:
        async with AsyncOrchestrator(make()[0]) as orchestrator:
            call = orchestrator.sleep()
            async for _ in call:
                break
            assert (await call).changed

    asyncio.run(main())


def test_calls_of_one_loop_are_made_in_their_order() -> None:
    async def main() -> None:
        async with AsyncOrchestrator(make()[0]) as orchestrator:
            for _ in range(20):
                slept, woke = await asyncio.gather(orchestrator.sleep(), orchestrator.wake_up())
                assert slept.changed
                assert woke.serving

    asyncio.run(main())


def test_a_deadline_counts_while_the_call_waits_for_its_turn() -> None:
    async def main() -> None:
        sync, backend, _ = make()
        backend.saving = Gate()
        async with AsyncOrchestrator(sync) as orchestrator:
            first = asyncio.create_task(orchestrator.sleep())
            while not backend.saving.reached.is_set():
                await asyncio.sleep(0)
            with pytest.raises(BusyError, match=r"wake_up waited 0\.05 s for sleep") as caught:
                await orchestrator.wake_up(timeout_s=0.05)
            assert caught.value.holders[0].startswith("sleep by")
            backend.saving.open.set()
            await first
            assert not orchestrator.state().serving, "the wake_up that gave up never ran"

    asyncio.run(main())


def test_work_under_use_keeps_transitions_out_until_it_ends() -> None:
    async def main() -> None:
        async with AsyncOrchestrator(make()[0]) as orchestrator:
            async with orchestrator.use(holder="request 7"):
                task = asyncio.create_task(orchestrator.sleep())
                await asyncio.sleep(0.05)
                assert not task.done()
            assert (await task).changed
            with pytest.raises(SuspendedError):
                async with orchestrator.use():
                    raise AssertionError("admitted while asleep")
            await orchestrator.wake_up({"weights"})
            async with orchestrator.use({"weights"}):
                assert (await orchestrator.wake_up()).serving, "a wake-up waits for nobody"

    asyncio.run(main())


@pytest.mark.parametrize("verb", ["sleep", "release_kv_cache"])
def test_a_transition_inside_use_in_the_same_task_is_refused_not_waited_for(verb: str) -> None:
    async def main() -> None:
        async with AsyncOrchestrator(make()[0]) as orchestrator:
            async with orchestrator.use():
                with pytest.raises(BusyError, match="inside use"):
                    await getattr(orchestrator, verb)()
            assert (await getattr(orchestrator, verb)()).changed

    asyncio.run(main())


def test_hooks_run_in_the_thread_and_in_the_context_of_the_caller() -> None:
    request: contextvars.ContextVar[str] = contextvars.ContextVar("request")
    seen: list[tuple[str, str]] = []

    def quiesce(mode: str, deadline_s: float | None) -> None:
        seen.append((request.get(), threading.current_thread().name))

    async def main() -> None:
        request.set("7")
        sync = Orchestrator(SimulatedBackend(), hooks=EngineHooks(quiesce=quiesce))
        async with AsyncOrchestrator(sync) as orchestrator:
            await orchestrator.sleep(0)

    asyncio.run(main())
    assert [value for value, _ in seen] == ["7"]
    assert seen[0][1].startswith("sleepbackends")


def test_a_call_that_is_never_awaited_is_warned_about_and_does_nothing() -> None:
    sync, _, _ = make()
    orchestrator = AsyncOrchestrator(sync)
    with pytest.warns(RuntimeWarning, match="sleep was neither awaited nor"):
        orchestrator.sleep()
    assert sync.state().serving
    sync.close()


def test_the_examples_on_the_page_run() -> None:
    page = (Path(__file__).parents[1] / "docs" / "async.md").read_text(encoding="utf-8")
    first, progress, cancellation = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    shown: list[tuple[int, int]] = []

    async def main() -> None:
        async with AsyncOrchestrator(make()[0]) as orchestrator:
            names = {
                "orchestrator": orchestrator,
                "asyncio": asyncio,
                "show": lambda done_bytes, total_bytes: shown.append((done_bytes, total_bytes)),
            }
            for example in (first, progress, cancellation):
                code = compile(example, "docs/async.md", "exec", PyCF_ALLOW_TOP_LEVEL_AWAIT)
                await FunctionType(code, {**names, "__builtins__": __builtins__})()

    asyncio.run(main())
    assert shown[-1] == (2 * SIZE, 2 * SIZE)


def test_a_cancelled_control_from_elsewhere_is_an_error_not_a_cancelled_task() -> None:
    async def main() -> None:
        sync, backend, _ = make()
        backend.saving = Gate()
        async with AsyncOrchestrator(sync) as orchestrator:
            task = asyncio.create_task(orchestrator.sleep())
            while not backend.saving.reached.is_set():
                await asyncio.sleep(0)
            current = sync._transitions.lock.current
            assert current is not None
            current.control.cancel()
            backend.saving.open.set()
            with pytest.raises(TransitionCancelledError):
                await task

    asyncio.run(main())
