"""What the commands share: JSON, sizes, files, and how an error looks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from sleepbackends.cli.terminal import say
from sleepbackends.errors import RequestError, SleepBackendsError

_Function = TypeVar("_Function", bound=Callable[..., Any])
_JSON_KEY = "sleepbackends.cli.json"
_UNITS = ("KiB", "MiB", "GiB", "TiB", "PiB")


def _remember(ctx: click.Context, _: click.Parameter, value: bool) -> bool:
    ctx.meta[_JSON_KEY] = value
    return value


json_option = click.option(
    "--json", "as_json", is_flag=True, help="Write JSON instead of text.", callback=_remember
)
"""The ``--json`` of every command; it also decides how an error is written."""


def file_option(name: str, meaning: str) -> Callable[[_Function], _Function]:
    """Declare an option that names a file to write."""
    return click.option(name, type=click.Path(path_type=Path), metavar="FILE", help=meaning)


def write_json(data: object) -> None:
    """Write one JSON document to standard output; sets become sorted lists."""
    click.echo(json.dumps(data, indent=2, default=_plain))


def format_bytes(size_bytes: int) -> str:
    """Format a size with binary units, such as ``1.5 GiB``."""
    power = min(max(size_bytes.bit_length() - 1, 0) // 10, len(_UNITS))
    if power == 0:
        return f"{size_bytes:,} bytes"
    return f"{size_bytes / 1024**power:,.1f} {_UNITS[power - 1]}"


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
    hint = f" ({error.hint})" if error.hint else ""
    say(" ".join(f"error: {error.message}{hint}".split()), "red", err=True)


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
