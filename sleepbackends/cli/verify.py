"""``sleepbackends verify``: prove an installed backend on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from sleepbackends.cli.output import JsonOption, console, prepare_file, write_json
from sleepbackends.errors import RequestError, UnsupportedOperationError

_FILE = "FILE"
BROKEN, UNAVAILABLE = 1, 3
"""Exit codes; 0 is for promises that are kept, 2 for requests that cannot be followed."""


def verify_backend(
    name: Annotated[str, typer.Argument(metavar="NAME", help="An installed backend.")],
    option: Annotated[
        list[str],
        typer.Option(
            metavar="KEY=VALUE",
            help="An option of the backend, its value as JSON or a plain string; repeat for more.",
        ),
    ] = [],  # noqa: B006 - typer copies it
    part: Annotated[
        list[str], typer.Option(help="A part of the suite; repeat for several. All by default.")
    ] = [],  # noqa: B006 - typer copies it
    sequences: Annotated[
        int | None, typer.Option(min=1, help="How many random sequences of calls are tried.")
    ] = None,
    test_timeout_s: Annotated[
        float, typer.Option(min=1.0, help="What one test may take, in seconds.")
    ] = 300.0,
    junit: Annotated[Path | None, typer.Option(metavar=_FILE, help="Also write JUnit XML.")] = None,
    html: Annotated[Path | None, typer.Option(metavar=_FILE, help="Also write a page.")] = None,
    out: Annotated[
        Path | None, typer.Option(metavar=_FILE, help="Also write everything as JSON.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Run the contract suite against an installed backend, here, and report.

    Exit code 0 if it keeps every promise, 1 if not, 2 if it cannot be tried like this, 3 if
    it cannot work on this machine.
    """
    try:
        from sleepbackends.cli.verify_screen import VerifyScreen, show
        from sleepbackends.verify.junit import junit as junit_of
        from sleepbackends.verify.page import page
        from sleepbackends.verify.request import VerifyRequest
        from sleepbackends.verify.results import Verdict
        from sleepbackends.verify.running import verify
    except ImportError as error:
        raise UnsupportedOperationError(
            f"the contract suite needs a package that cannot be imported: {error}",
            hint="pip install 'sleepbackends[testing]'",
            operation="verify",
        ) from error

    options = dict(map(_pair, option))
    request = VerifyRequest(name, options, tuple(part), sequences, test_timeout_s)
    for path in filter(None, (junit, html, out)):
        prepare_file(path)
    with VerifyScreen() as screen:
        verification = verify(request, screen)
    if junit:
        junit.write_text(junit_of(verification), encoding="utf-8")
    if html:
        html.write_text(page(verification), encoding="utf-8")
    if out:
        text = json.dumps(verification.to_json(), indent=1)
        out.write_text(f"{text}\n", encoding="utf-8")
    if as_json:
        write_json(verification.to_json())
    else:
        show(verification, console())
    codes = {Verdict.KEPT: 0, Verdict.BROKEN: BROKEN, Verdict.UNAVAILABLE: UNAVAILABLE}
    raise typer.Exit(codes[verification.verdict])


def _pair(text: str) -> tuple[str, Any]:
    key, found, value = text.partition("=")
    if not key or not found:
        raise RequestError(f"{text!r} is not KEY=VALUE", hint="write --option threads=2")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
