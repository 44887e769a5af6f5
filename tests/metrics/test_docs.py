"""The page and the dashboard speak of what is exported, and of nothing else."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families as parse

from sleepbackends import HookError
from sleepbackends.metrics import METRIC_NAMES, Metrics
from sleepbackends.metrics.names import SLEEP_STATE_CODE
from sleepbackends.sleep_state import SleepState
from tests.gated import make

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "metrics.md").read_text(encoding="utf-8")
DASHBOARD: dict[str, Any] = json.loads((DOCS / "grafana-dashboard.json").read_text("utf-8"))
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
NAME = re.compile(r"\bsleepbackends_\w+")


def exported() -> dict[str, set[str]]:
    """The labels of every sample of an engine to which everything has happened."""
    orchestrator, _, engine = make()
    metrics = Metrics()
    metrics.observe(orchestrator)
    engine.fail["drop_caches"] = RuntimeError("no")
    with pytest.raises(HookError):
        orchestrator.sleep()
    samples: dict[str, set[str]] = {}
    for family in parse(generate_latest(metrics.registry).decode()):
        for sample in family.samples:
            samples.setdefault(sample.name, set()).update(sample.labels)
    return samples


@pytest.mark.parametrize("panel", PANELS, ids=lambda panel: str(panel["title"]))
def test_every_panel_asks_for_metrics_and_labels_that_are_exported(panel: dict[str, Any]) -> None:
    samples = exported()
    assert panel["targets"]
    for target in panel["targets"]:
        query = target["expr"]
        names = NAME.findall(query)
        assert names, "a query about nothing"
        assert set(names) <= samples.keys()
        labels = set().union(*(samples[name] for name in names))
        for grouped in re.findall(r"by \(([^)]*)\)", query):
            assert set(re.split(r",\s*", grouped)) <= labels
        assert set(re.findall(r"(\w+)(?:=~|=)\"", query)) <= labels
        assert set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])) <= labels
        assert 'engine=~"$engine"' in query
        for one, other in ("()", "[]", "{}"):
            assert query.count(one) == query.count(other)
        assert query.count('"') % 2 == 0


def test_every_metric_is_on_the_dashboard() -> None:
    shown = {
        re.sub(r"_(bucket|sum|count)$", "", name)
        for panel in PANELS
        for target in panel["targets"]
        for name in NAME.findall(target["expr"])
    }
    assert shown == set(METRIC_NAMES)


def test_the_dashboard_is_one() -> None:
    assert DASHBOARD["title"]
    assert DASHBOARD["schemaVersion"] >= 36
    assert {v["name"] for v in DASHBOARD["templating"]["list"]} == {"datasource", "engine"}
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    cells: set[tuple[int, int]] = set()
    for panel in PANELS:
        at = panel["gridPos"]
        across = range(at["x"], at["x"] + at["w"])
        own = {(x, y) for x in across for y in range(at["y"], at["y"] + at["h"])}
        assert not own & cells, f"{panel['title']} lies on another panel"
        assert at["x"] + at["w"] <= 24
        cells |= own
        assert panel["datasource"]["uid"] == "${datasource}"


def test_the_page_describes_every_metric_and_no_other() -> None:
    described = set(re.findall(r"^\| `(sleepbackends_\w+)` \|", PAGE, flags=re.MULTILINE))
    assert described == set(METRIC_NAMES)
    assert set(NAME.findall(PAGE)) == {*METRIC_NAMES, SLEEP_STATE_CODE.name}


@pytest.mark.parametrize("state", SleepState)
def test_the_page_defines_every_sleep_state(state: SleepState) -> None:
    assert len(re.findall(rf"^\| `{state.value}` \|", PAGE, flags=re.MULTILINE)) == 1
