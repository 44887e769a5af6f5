"""``sleepbackends new``: a package with a backend in it, to begin with."""

from __future__ import annotations

from pathlib import Path

import click

from sleepbackends.cli.command import Argument
from sleepbackends.cli.terminal import say
from sleepbackends.scaffold.package import NewPackage


@click.argument(
    "name", metavar="NAME", cls=Argument, meaning="Of the backend and its distribution."
)
@click.option(
    "--directory",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="New or empty; by default ./NAME.",
)
def new_package(name: str, directory: Path | None) -> None:
    """Write a package with a backend that passes the contract suite, to be made into yours."""
    folder = directory or Path(name)
    written = NewPackage(name).write(folder)
    for path in written:
        say(str(path), "dim")
    place = str(folder) if folder.is_absolute() else f"./{folder}"
    say(f"\npip install --editable '{place}' 'sleepbackends[testing]'")
    say(f"sleepbackends verify {name}")
