"""``sleepbackends host-copies``: the saved bytes that processes of this user share."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import click

from sleepbackends.cli.output import format_bytes, json_option, write_json
from sleepbackends.cli.terminal import say, say_table
from sleepbackends.vmm.shared import SharedCopy, SharedStore


@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    help="The backends' share_directory; /dev/shm by default.",
)
@click.option("--clean", is_flag=True, help="Remove the copies that no process uses.")
@json_option
def show_host_copies(directory: Path | None, clean: bool, as_json: bool) -> None:
    """List the saved copies that processes of this user share, and remove unused ones."""
    store = SharedStore(directory)
    removed_bytes = store.clean() if clean else 0
    copies = store.copies()
    if as_json:
        write_json(
            {
                "directory": os.fspath(store.directory),
                "copies": [asdict(copy) for copy in copies],
                "total_bytes": sum(copy.size_bytes for copy in copies),
                "removed_bytes": removed_bytes,
            }
        )
        return
    _show(store, copies)
    if clean:
        say(f"{format_bytes(removed_bytes)} removed")


def _show(store: SharedStore, copies: list[SharedCopy]) -> None:
    say_table(
        [
            [copy.name[:16], format_bytes(copy.size_bytes), "in use" if copy.in_use else "unused"]
            for copy in copies
        ]
    )
    total = format_bytes(sum(copy.size_bytes for copy in copies))
    unused = format_bytes(sum(copy.size_bytes for copy in copies if not copy.in_use))
    say(f"{len(copies)} copies, {total}, of which {unused} unused")
    say(os.fspath(store.directory))
