"""``sleepbackends bench``: measure suspend and resume on a GPU, next to the peers."""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from sleepbackends.bench.request import Request
from sleepbackends.cli.bench_screen import BenchScreen
from sleepbackends.cli.output import console, prepare_file


class Allocator(str, Enum):
    """What can be measured."""

    SLEEPBACKENDS = "sleepbackends"
    VLLM = "vllm"
    TMS = "tms"
    TMS_RETAIN = "tms_retain"


_FILE = "FILE"


def run_benchmark(
    weights_gib: Annotated[
        list[float],
        typer.Option(help="GiB of weights on each device; repeat for time against bytes."),
    ] = [16.0],  # noqa: B006 - typer copies it
    kv_gib: Annotated[float, typer.Option(help="GiB of KV cache; 0 for none.")] = 32.0,
    tensor_mib: Annotated[
        list[float], typer.Option(help="MiB of each weight tensor; repeat for several sizes.")
    ] = [256.0, 20.0, 1.0],  # noqa: B006 - typer copies it
    rounds: Annotated[int, typer.Option(help="How often everything is done, 2 or more.")] = 5,
    devices: Annotated[int, typer.Option(help="1, or 2 to compare one with both at once.")] = 1,
    peers: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            exists=True,
            file_okay=False,
            help="A folder with the peers' packages, vllm/ and tms/; by default those that are "
            "installed.",
        ),
    ] = None,
    only: Annotated[
        list[Allocator], typer.Option(help="What to measure; repeat for several.")
    ] = list(Allocator),  # noqa: B006 - typer copies it
    timeout_s: Annotated[float, typer.Option(help="Of each process, in seconds.")] = 300.0,
    vllm_version: Annotated[
        str | None, typer.Option(help="Where the folder does not tell it.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(metavar=_FILE, help="Write everything as JSON.")
    ] = None,
    markdown: Annotated[
        Path | None, typer.Option(metavar=_FILE, help="Also write the tables.")
    ] = None,
    html: Annotated[
        Path | None, typer.Option(metavar=_FILE, help="Write a page with charts.")
    ] = None,
) -> None:
    """Measure suspend and resume on a GPU, next to plain copies and to the peers.

    Each runs in a process of its own. Exit code 1 if sleepbackends or a plain copy was not
    measured to the end.
    """
    from rich.markdown import Markdown

    from sleepbackends.bench.page import page
    from sleepbackends.bench.suspend_resume import has_failed, measure
    from sleepbackends.bench.tables import markdown as tables_of

    request = Request(
        weights_gib=tuple(weights_gib),
        kv_gib=kv_gib,
        tensor_mib=tuple(tensor_mib),
        rounds=rounds,
        devices=devices,
        peers=peers,
        only=tuple(allocator.value for allocator in only),
        timeout_s=timeout_s,
        vllm_version=vllm_version,
    )
    for path in filter(None, (out, markdown, html)):
        prepare_file(path)
    with BenchScreen() as screen:
        result = measure(request, screen)
    tables = tables_of(result)
    if out:
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if markdown:
        markdown.write_text(tables, encoding="utf-8")
    if html:
        html.write_text(page(result), encoding="utf-8")
    screen_out = console()
    if screen_out.is_terminal:
        screen_out.print(Markdown(tables))
    else:
        typer.echo(tables, nl=False)
    if has_failed(result):
        raise typer.Exit(1)
