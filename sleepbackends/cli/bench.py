"""``sleepbackends bench``: measure suspend and resume on a GPU, next to the peers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from sleepbackends.bench.request import Request
from sleepbackends.bench.rows import OURS, PEERS
from sleepbackends.cli.bench_screen import BenchScreen
from sleepbackends.cli.output import file_option, prepare_file
from sleepbackends.cli.terminal import say_markdown
from sleepbackends.termination import terminated_like_interrupted

ALLOCATORS = (OURS, *PEERS)
"""What can be measured."""


@click.option(
    "--weights-gib",
    type=float,
    multiple=True,
    default=(16.0,),
    help="GiB of weights on each device; repeat for time against bytes.",
)
@click.option("--kv-gib", type=float, default=32.0, help="GiB of KV cache; 0 for none.")
@click.option(
    "--tensor-mib",
    type=float,
    multiple=True,
    default=(256.0, 20.0, 1.0),
    help="MiB of each weight tensor; repeat for several sizes.",
)
@click.option("--rounds", type=int, default=5, help="How often everything is done, 2 or more.")
@click.option("--devices", type=int, default=1, help="1, or 2 to compare one with both at once.")
@click.option(
    "--peers",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="A folder with the peers' packages, vllm/ and tms/; by default those that are installed.",
)
@click.option(
    "--only",
    type=click.Choice(ALLOCATORS),
    multiple=True,
    default=ALLOCATORS,
    help="What to measure; repeat for several.",
)
@click.option("--timeout-s", type=float, default=300.0, help="Of each process, in seconds.")
@click.option("--vllm-version", help="Where the folder does not tell it.")
@file_option("--out", "Write everything as JSON.")
@file_option("--markdown", "Also write the tables.")
@file_option("--html", "Write a page with charts.")
def run_benchmark(
    weights_gib: tuple[float, ...],
    kv_gib: float,
    tensor_mib: tuple[float, ...],
    rounds: int,
    devices: int,
    peers: Path | None,
    only: tuple[str, ...],
    timeout_s: float,
    vllm_version: str | None,
    out: Path | None,
    markdown: Path | None,
    html: Path | None,
) -> None:
    """Measure suspend and resume on a GPU, next to plain copies and to the peers.

    Each runs in a process of its own, and files are written after each. Exit code 1 if
    sleepbackends or a plain copy was not measured to the end.
    """
    from sleepbackends.bench.page import page
    from sleepbackends.bench.suspend_resume import has_failed, measure
    from sleepbackends.bench.tables import markdown as tables_of

    request = Request(
        weights_gib=weights_gib,
        kv_gib=kv_gib,
        tensor_mib=tensor_mib,
        rounds=rounds,
        devices=devices,
        peers=peers,
        only=only,
        timeout_s=timeout_s,
        vllm_version=vllm_version,
    )
    for path in filter(None, (out, markdown, html)):
        prepare_file(path)

    def keep(result: Mapping[str, Any]) -> None:
        if out:
            out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
        if markdown:
            markdown.write_text(tables_of(result), encoding="utf-8")
        if html:
            html.write_text(page(result), encoding="utf-8")

    with terminated_like_interrupted(), BenchScreen() as screen:
        result = measure(request, screen, keep)
    say_markdown(tables_of(result))
    if has_failed(result):
        raise click.exceptions.Exit(1)
