"""``sleepbackends resume`` and ``restore``: wake a process from outside, or make it anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sleepbackends.checkpoint import durable
from sleepbackends.checkpoint.waking import wake
from sleepbackends.cli.output import JsonOption, console, write_json

DirectoryOption = Annotated[
    Path | None,
    typer.Option("--directory", help="The backend's runtime_directory; the user's by default."),
]
ForceOption = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Wake what can be woken although others are lost, and even if nothing tells how "
        "much device memory is needed.",
    ),
]


def resume_process(
    pid: Annotated[int, typer.Option("--pid", help="The process that sleeps.")],
    directory: DirectoryOption = None,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Wake a process that the checkpoint backend put to sleep, with those that sleep with it."""
    woken = wake(pid, directory, force=force)
    if as_json:
        write_json({"changed": woken.changed, "by": woken.by, "states": woken.states})
        return
    for number, state in sorted(woken.states.items()):
        console().print(f"process {number} is {state.value}")
    console().print(f"woken by {woken.by}" if woken.changed else "nothing had to be done")


def restore_process(
    directory: Annotated[Path, typer.Argument(help="What was given to save_to().")],
    runtime_directory: Annotated[
        Path | None,
        typer.Option(help="The backend's runtime_directory; the user's by default."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Make a process of what was saved in a directory, and wake it; experimental."""
    pid = durable.restore(directory)
    if durable.read_meta(directory)["cuda"]:
        wake(pid, runtime_directory, force=True)
    if as_json:
        write_json({"pid": pid})
        return
    console().print(f"process {pid} goes on")
