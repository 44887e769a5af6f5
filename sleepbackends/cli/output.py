"""What the commands share: consoles, JSON, sizes, and how an error looks."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.filesize import pick_unit_and_suffix
from rich.text import Text

from sleepbackends.errors import RequestError, SleepBackendsError

_JSON_KEY = "sleepbackends.cli.json"
_UNITS = ["bytes", "KiB", "MiB", "GiB", "TiB", "PiB"]


def _remember(ctx: typer.Context, value: bool) -> bool:
    ctx.meta[_JSON_KEY] = value
    return value


JsonOption = Annotated[
    bool, typer.Option("--json", help="Write JSON instead of text.", callback=_remember)
]
"""The ``--json`` of every command; it also decides how an error is written."""


def console(*, stderr: bool = False) -> Console:
    """Return a console on what standard output, or standard error, is at this moment."""
    return Console(stderr=stderr, highlight=False)


def write_json(data: object) -> None:
    """Write one JSON document to standard output; sets become sorted lists."""
    typer.echo(json.dumps(data, indent=2, default=_plain))


def format_bytes(size_bytes: int) -> str:
    """Format a size with binary units, such as ``1.5 GiB``."""
    unit, suffix = pick_unit_and_suffix(size_bytes, _UNITS, 1024)
    return f"{size_bytes:,} bytes" if unit == 1 else f"{size_bytes / unit:,.1f} {suffix}"


def with_hint(message: str, hint: str) -> Text:
    """Put a message and what to do about it into one text, free of markup."""
    text = Text(message)
    if hint:
        text.append(f"\n{hint}", style="dim")
    return text


def report_error(error: SleepBackendsError, meta: Mapping[str, Any]) -> None:
    """Write an error: a red line on standard error, or JSON on standard output.

    Parameters
    ----------
    error : SleepBackendsError
        What a command raised.
    meta : mapping of str to object
        The ``meta`` of the command's context, where ``--json`` left its mark.
    """
    if meta.get(_JSON_KEY):
        details = {key: value for key, value in vars(error).items() if not key.startswith("_")}
        details.pop("report", None)
        head = {"type": type(error).__name__, "message": error.message}
        write_json({"error": {**head, **details, "recoverable": error.recoverable}})
        return
    line = Text("error: " + " ".join(error.message.split()), style="red")
    if error.hint:
        line.append(f" ({' '.join(error.hint.split())})", style="dim")
    console(stderr=True).print(line, soft_wrap=True)


def prepare_file(path: Path) -> None:
    """See that a file can be written before hours are spent on what goes into it.

    Raises
    ------
    RequestError
        If it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{error.strerror}: {error.filename}"
    else:
        place = path if path.exists() else path.parent
        if not path.is_dir() and os.access(place, os.W_OK):
            return
        reason = "it is a folder" if path.is_dir() else "this user may not"
    raise RequestError(f"{path} cannot be written: {reason}", hint="name another file")


def _plain(value: object) -> object:
    return sorted(value) if isinstance(value, (set, frozenset)) else str(value)
