"""``sleepbackends demo``: put a real model to sleep, wake it, and compare."""

from __future__ import annotations

import importlib
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from sleepbackends import AllocatingBackend, SleepConfig, load_config
from sleepbackends.cli.demo_screen import DemoScreen
from sleepbackends.cli.output import json_option, write_json
from sleepbackends.demo.steps import Step
from sleepbackends.errors import UnsupportedOperationError
from sleepbackends.registry import Registry
from sleepbackends.selection import open_backend

if TYPE_CHECKING:
    from sleepbackends.demo.checked_engine import DemoSettings


@click.option("--backend", metavar="NAME", help="The backend; by default as configured, else auto.")
@click.option(
    "--weights",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="A Llama-style safetensors file; by default one of about 0.5 GiB, created "
    "once in the user's cache directory.",
)
@click.option("--tokens", type=click.IntRange(1), default=8, help="Tokens of each generation.")
@click.option("--kv-mib", type=click.IntRange(1), default=64, help="Size of the KV cache in MiB.")
@json_option
def run_demo(
    backend: str | None, weights: Path | None, tokens: int, kv_mib: int, as_json: bool
) -> None:
    """Put a real language model to sleep, wake it and compare; exit code 1 if it differs.

    The policies are the default ones; backend, options and deadlines are as configured.
    """
    _require("numpy", "safetensors", "torch")
    from sleepbackends.demo.checked_engine import DemoSettings
    from sleepbackends.demo.observe import device_memory, process_memory
    from sleepbackends.demo.scenario import run_scenario, unselective_backends
    from sleepbackends.examples.default_weights import default_weights
    from sleepbackends.vmm.backend import VmmBackend

    config = _configuration(backend)
    registry = Registry.load()
    steps: list[Step] = []
    with DemoScreen(silent=as_json) as screen:
        if weights is None:
            weights = default_weights(on_create=screen.announce_weights)
        settings = DemoSettings(
            weights_path=weights,
            kv_bytes=kv_mib << 20,
            n_tokens=tokens,
            config=config,
            measure=process_memory,
            on_progress=screen.progress,
        )
        model = _describe(settings)
        opened = open_backend(config, registry)
        screen.introduce(opened.selection, model)
        chosen = cast("AllocatingBackend", opened.backend)
        if isinstance(chosen, VmmBackend):
            settings = replace(settings, measure=device_memory)
        if registry.specs[opened.selection.name].source.distribution != "sleepbackends":
            # Where a third party's backend keeps saved bytes is its own affair.
            settings = replace(settings, enough=0.0)
        others = unselective_backends(registry, chosen, config.settings)
        for event in run_scenario(settings, chosen, others):
            screen.show(event)
            if isinstance(event, Step):
                steps.append(event)
        screen.conclude(steps)
    ok = all(step.intact for step in steps)
    if as_json:
        write_json(
            {
                "ok": ok,
                "backend": opened.selection.name,
                "selection": asdict(opened.selection),
                "model": model,
                "steps": [{**asdict(step), "intact": step.intact} for step in steps],
            }
        )
    if not ok:
        raise click.exceptions.Exit(1)


def _require(*names: str) -> None:
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise UnsupportedOperationError(
                f"the demo needs {name}, which cannot be imported: {error}",
                hint="pip install 'sleepbackends[torch]'",
                operation="demo",
            ) from error


def _configuration(backend: str | None) -> SleepConfig:
    """Take from the configuration what does not change what the demo is to show."""
    config = load_config({} if backend is None else {"backend": backend})
    return SleepConfig(
        backend=config.backend,
        options=config.options,
        timeout_s=config.timeout_s,
        wait_for_memory_s=config.wait_for_memory_s,
    )


def _describe(settings: DemoSettings) -> dict[str, Any]:
    from sleepbackends.examples.model_config import read_config

    config = read_config(settings.weights_path)
    return {
        "path": str(settings.weights_path),
        "parameters": config.parameters,
        "weights_bytes": config.weights_bytes,
        "kv_cache_bytes": settings.kv_bytes // config.position_bytes * config.position_bytes,
        **asdict(config),
    }
