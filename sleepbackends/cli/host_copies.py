"""``sleepbackends host-copies``: the saved bytes that processes of this user share."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from sleepbackends.cli.output import JsonOption, console, format_bytes, write_json
from sleepbackends.vmm.shared import SharedCopy, SharedStore


def show_host_copies(
    directory: Annotated[
        Path | None,
        typer.Option(help="The backends' share_directory; /dev/shm by default."),
    ] = None,
    clean: Annotated[
        bool, typer.Option("--clean", help="Remove the copies that no process uses.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
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
        console().print(f"{format_bytes(removed_bytes)} removed")


def _show(store: SharedStore, copies: list[SharedCopy]) -> None:
    out = console()
    table = Table.grid(padding=(0, 2))
    for copy in copies:
        state = "in use" if copy.in_use else "unused"
        table.add_row(copy.name[:16], format_bytes(copy.size_bytes), state)
    if copies:
        out.print(table)
    total = format_bytes(sum(copy.size_bytes for copy in copies))
    unused = format_bytes(sum(copy.size_bytes for copy in copies if not copy.in_use))
    out.print(f"{len(copies)} copies, {total}, of which {unused} unused", soft_wrap=True)
    out.print(os.fspath(store.directory), soft_wrap=True, markup=False)
