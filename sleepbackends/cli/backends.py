"""``sleepbackends backends``: what is registered, from where, and whether it works here."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from rich.table import Table
from rich.text import Text

from sleepbackends.capabilities import Capabilities
from sleepbackends.cli.output import JsonOption, console, with_hint, write_json
from sleepbackends.plugins import PluginFailure
from sleepbackends.registry import Registry


def list_backends(as_json: JsonOption = False) -> None:
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
    out = console()
    for name, registered in registry.specs.items():
        available = registry.probe(name)
        usable = Text("usable" if available else "not usable", "green" if available else "yellow")
        if available.reason:
            usable.append(": ")
            usable.append_text(with_hint(available.reason, available.hint))
        out.print(Text.assemble((name, "bold"), f"  from {registered.source}"))
        # A table would cut the names of the capabilities, which are what one looks up.
        facts = Table.grid(padding=(0, 1))
        facts.add_row("", "summary", registered.spec.summary or "none")
        facts.add_row("", "here", usable)
        facts.add_row("", "declares", _list(registry.declared_capabilities(name)))
        out.print(facts)
    if not registry.specs:
        out.print("no backend is registered")
    for failure in registry.failures:
        out.print(Text(f"failed: {failure}", style="red"), soft_wrap=True)
    for plugin in registry.disabled:
        out.print(Text(f"disabled: {plugin}", style="dim"), soft_wrap=True)


def _list(declared: Capabilities | None) -> str:
    if declared is None:
        return "unknown"
    return ", ".join(declared.supported()) or "none"
