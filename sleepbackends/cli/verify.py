"""``sleepbackends verify``: prove an installed backend on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from sleepbackends.cli.command import Argument
from sleepbackends.cli.output import file_option, json_option, prepare_file, write_json
from sleepbackends.errors import RequestError, UnsupportedOperationError
from sleepbackends.termination import terminated_like_interrupted

BROKEN, UNAVAILABLE = 1, 3
"""Exit codes; 0 is for promises that are kept, 2 for requests that cannot be followed."""


@click.argument("name", metavar="NAME", cls=Argument, meaning="An installed backend.")
@click.option(
    "--option",
    multiple=True,
    metavar="KEY=VALUE",
    help="An option of the backend, its value as JSON or a plain string; repeat for more.",
)
@click.option(
    "--part",
    multiple=True,
    help="A part of the suite; repeat for several. All by default.",
)
@click.option(
    "--sequences",
    type=click.IntRange(1),
    help="How many random sequences of calls are tried.",
)
@click.option(
    "--test-timeout-s",
    type=click.FloatRange(1.0),
    default=300.0,
    help="What one test may take, in seconds.",
)
@file_option("--junit", "Also write JUnit XML.")
@file_option("--html", "Also write a page.")
@file_option("--out", "Also write everything as JSON.")
@json_option
def verify_backend(
    name: str,
    option: tuple[str, ...],
    part: tuple[str, ...],
    sequences: int | None,
    test_timeout_s: float,
    junit: Path | None,
    html: Path | None,
    out: Path | None,
    as_json: bool,
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
    request = VerifyRequest(name, options, part, sequences, test_timeout_s)
    for path in filter(None, (junit, html, out)):
        prepare_file(path)
    with terminated_like_interrupted(), VerifyScreen() as screen:
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
        show(verification)
    codes = {Verdict.KEPT: 0, Verdict.BROKEN: BROKEN, Verdict.UNAVAILABLE: UNAVAILABLE}
    raise click.exceptions.Exit(codes[verification.verdict])


def _pair(text: str) -> tuple[str, Any]:
    key, found, value = text.partition("=")
    if not key or not found:
        raise RequestError(f"{text!r} is not KEY=VALUE", hint="write --option threads=2")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value
