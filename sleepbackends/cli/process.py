"""``sleepbackends resume`` and ``restore``: wake a process from outside, or make it anew."""

from __future__ import annotations

from pathlib import Path

import click

from sleepbackends.checkpoint import durable
from sleepbackends.checkpoint.waking import wake
from sleepbackends.cli.command import Argument
from sleepbackends.cli.output import json_option, write_json
from sleepbackends.cli.terminal import say

RUNTIME_DIRECTORY = "The backend's runtime_directory; the user's by default."


@click.option("--pid", type=int, required=True, help="The process that sleeps.")
@click.option("--directory", type=click.Path(path_type=Path), help=RUNTIME_DIRECTORY)
@click.option(
    "--force",
    is_flag=True,
    help="Wake what can be woken although others are lost, and even if nothing tells how "
    "much device memory is needed.",
)
@json_option
def resume_process(pid: int, directory: Path | None, force: bool, as_json: bool) -> None:
    """Wake a process that the checkpoint backend put to sleep, with those that sleep with it."""
    woken = wake(pid, directory, force=force)
    if as_json:
        write_json({"changed": woken.changed, "by": woken.by, "states": woken.states})
        return
    for number, state in sorted(woken.states.items()):
        say(f"process {number} is {state.value}")
    say(f"woken by {woken.by}" if woken.changed else "nothing had to be done")


@click.argument(
    "directory",
    type=click.Path(path_type=Path),
    cls=Argument,
    meaning="What was given to save_to().",
)
@click.option("--runtime-directory", type=click.Path(path_type=Path), help=RUNTIME_DIRECTORY)
@json_option
def restore_process(directory: Path, runtime_directory: Path | None, as_json: bool) -> None:
    """Make a process of what was saved in a directory, and wake it; experimental."""
    pid = durable.restore(directory)
    if durable.read_meta(directory)["cuda"]:
        wake(pid, runtime_directory, force=True)
    if as_json:
        write_json({"pid": pid})
        return
    say(f"process {pid} goes on")
