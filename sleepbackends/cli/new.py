"""``sleepbackends new``: a package with a backend in it, to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from sleepbackends.cli.output import console
from sleepbackends.scaffold.package import NewPackage


def new_package(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="Of the backend and its distribution.")
    ],
    directory: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New or empty; by default ./NAME."),
    ] = None,
) -> None:
    """Write a package with a backend that passes the contract suite, to be made into yours."""
    folder = directory or Path(name)
    written = NewPackage(name).write(folder)
    out = console()
    for path in written:
        out.print(Text(str(path), style="dim"), soft_wrap=True)
    place = str(folder) if folder.is_absolute() else f"./{folder}"
    out.print(Text(f"\npip install --editable '{place}'"), soft_wrap=True)
    out.print(Text(f"sleepbackends verify {name}"), soft_wrap=True)
