"""How the demo looks to a person."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sleepbackends import ReleaseStrategy, control
from sleepbackends.cli.output import format_bytes
from sleepbackends.cli.terminal import Live, Screen, live
from sleepbackends.demo.steps import PlannedRelease, Step
from sleepbackends.selection import Selection


class DemoScreen(Screen):
    """Shows each step as it ends, and a progress bar meanwhile.

    Parameters
    ----------
    silent : bool
        Show nothing at all, because standard output is for JSON.
    """

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        super().__init__(Live(err=False) if silent else live(amount=format_bytes))

    def announce_weights(self, path: Path) -> None:
        """Say that weights are created, because nothing moves meanwhile."""
        self._say(f"creating the default weights, once: {path}")

    def progress(self, progress: control.Progress) -> None:
        """Move the bar; called by the thread that copies."""
        self._live.update(progress.operation, progress.done_bytes, progress.total_bytes)

    def introduce(self, selection: Selection, model: Mapping[str, Any]) -> None:
        """Show what the demo runs with."""
        self._say(f"backend {selection.name}: {selection.reason}", style="")
        for name, why in selection.passed_over.items():
            self._say(f"not {name}: {why}")
        self._say(
            f"{format_bytes(model['weights_bytes'])} of weights ({model['dtype']}), KV cache of "
            f"{format_bytes(model['kv_cache_bytes'])}: {model['path']}",
            style="",
        )
        self._row("memory in use", "before", "after", "seconds", "bold")

    def show(self, event: PlannedRelease | Step) -> None:
        """Show a plan, or a step that ended."""
        if isinstance(event, PlannedRelease):
            self._say(f"plan: {_how(event.plan.strategy, event.plan.degraded)}")
            self._say(f"  {event.plan.reason}")
            return
        self._row(
            f"{event.backend}: {event.name}",
            format_bytes(event.before_bytes),
            format_bytes(event.after_bytes),
            f"{event.seconds:.3f}",
            "" if event.intact else "red",
        )
        if event.strategy is not None:
            self._say(f"done: {_how(event.strategy, event.degraded)}")

    def conclude(self, steps: Sequence[Step]) -> None:
        """Show the verdict."""
        wrong = [(step, what) for step in steps for what in step.differences]
        for step, what in wrong:
            self._say(f"{step.backend}: {step.name}: {what}", style="red")
        if wrong:
            self._say("not ok", style="red")
        else:
            said = "ok: weights, tokens and addresses were the same after every step"
            self._say(said, style="green")

    def _say(self, text: str, style: str = "dim") -> None:
        if not self._silent:
            self._live.say(text, style)

    def _row(self, name: str, before: str, after: str, seconds: str, style: str) -> None:
        self._say(f"{name:46} {before:>10} {after:>10} {seconds:>8}", style)


def _how(strategy: ReleaseStrategy | None, degraded: bool) -> str:
    name = "none" if strategy is None else strategy.value
    return (
        f"{name}, degraded: weights are not resident until the next wake-up" if degraded else name
    )
