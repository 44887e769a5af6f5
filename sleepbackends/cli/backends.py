"""``sleepbackends backends``: what is registered, from where, and whether it works here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from sleepbackends.capabilities import Capabilities
from sleepbackends.cli.output import json_option, write_json
from sleepbackends.cli.terminal import Cell, say, say_table
from sleepbackends.plugins import PluginFailure
from sleepbackends.registry import Registry


@json_option
def list_backends(as_json: bool) -> None:
    """List the backends, whether they work here, and the plugins that were not loaded."""
    registry = Registry.load()
    if as_json:
        write_json(
            {
                "backends": [_describe(registry, name) for name in registry.specs],
                "failed": [_describe_failure(failure) for failure in registry.failures],
                "disabled": [asdict(plugin) for plugin in registry.disabled],
            }
        )
    else:
        _show(registry)


def _describe(registry: Registry, name: str) -> dict[str, Any]:
    registered = registry.specs[name]
    available = registry.probe(name)
    declared = registry.declared_capabilities(name)
    return {
        "name": name,
        "summary": registered.spec.summary,
        "source": asdict(registered.source),
        "api_version": registered.spec.api_version,
        "auto_priority": registered.spec.auto_priority,
        "available": available.ok,
        "reason": available.reason,
        "hint": available.hint,
        "capabilities": None if declared is None else asdict(declared),
    }


def _describe_failure(failure: PluginFailure) -> dict[str, Any]:
    return {**asdict(failure), "kind": failure.kind.value}


def _show(registry: Registry) -> None:
    for name, registered in registry.specs.items():
        available = registry.probe(name)
        usable = ("usable", "green") if available else ("not usable", "yellow")
        if available.reason:
            usable = (f"{usable[0]}: {available.reason}", usable[1])
        rows: list[list[Cell]] = [
            ["", "summary", registered.spec.summary or "none"],
            ["", "here", usable],
            ["", "declares", _list(registry.declared_capabilities(name))],
        ]
        if available.hint:
            rows.insert(2, ["", "", (available.hint, "dim")])
        say(f"{name}  from {registered.source}", "bold")
        say_table(rows)
    if not registry.specs:
        say("no backend is registered")
    for failure in registry.failures:
        say(f"failed: {failure}", "red")
    for plugin in registry.disabled:
        say(f"disabled: {plugin}", "dim")


def _list(declared: Capabilities | None) -> str:
    if declared is None:
        return "unknown"
    return ", ".join(declared.supported()) or "none"
