from __future__ import annotations

import re
from html.parser import HTMLParser
from typing import Any

import pytest

from sleepbackends.bench.charts import kind_class
from sleepbackends.bench.page import page
from sleepbackends.bench.request import Request
from sleepbackends.bench.rows import MEANINGS, OURS, PEERS, PLAIN_COPY

from .conftest import measured, result_of

VOID = {"meta"}


class Reader(HTMLParser):
    """Keeps elements with their parents, and sees that each is closed."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None], str]] = []
        self.texts: dict[str, list[str]] = {}
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs), " ".join(self.open)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.setdefault(self.open[-1] if self.open else "", []).append(data)

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes, _ in self.elements if name == tag]


def result(request: Request, **changes: Any) -> dict[str, Any]:
    rows = [row for spec in request.specs() for row in measured(spec)]
    return {**result_of(*rows), **changes}


WHOLE = result(Request((4, 16), tensor_mib=(256, 1)), skipped={"vllm, 4 GiB": "no <room> & more"})


def test_it_needs_nothing_else() -> None:
    text = page(WHOLE)
    assert not re.search(r"\b(src|href|action|srcset)\s*=|url\(|@import|https?:|//", text)
    assert "<script" not in text
    assert text.startswith('<!doctype html>\n<html lang="en">')
    assert "prefers-color-scheme: dark" in text


@pytest.mark.parametrize("devices", [1, 2])
def test_every_chart_has_a_name_a_description_and_a_table(devices: int) -> None:
    read = Reader(page(result(Request((4, 16), tensor_mib=(256, 1), devices=devices))))
    charts = read.all("svg")
    figures = re.findall(r"<figure>.*?</figure>", page(WHOLE), flags=re.DOTALL)
    assert all(figure.count("<svg") == figure.count("<table") == 1 for figure in figures)
    assert len(charts) == len(read.all("figure"))
    ids = [attributes["id"] for _, attributes, _ in read.elements if "id" in attributes]
    assert len(set(ids)) == len(ids) == 2 * len(charts)
    for chart in charts:
        assert chart["role"] == "img"
        assert set((chart["aria-labelledby"] or "").split()) <= set(ids)
    kinds = {attributes.get("class") for attributes in read.all("g")}
    allowed = {OURS, PLAIN_COPY} if devices == 2 else {OURS, PLAIN_COPY, *PEERS}
    assert kinds == {kind_class(kind) for kind in allowed}


def test_every_kind_has_a_colour() -> None:
    text = page(WHOLE)
    for kind in (OURS, PLAIN_COPY, *PEERS):
        assert f".{kind_class(kind)} {{ --kind: var(" in text


def test_it_shows_the_figures_and_what_they_were_measured_with() -> None:
    read = Reader(page(WHOLE))
    bars = read.texts["text"]
    assert "0.320 s" in bars
    assert "0.480 s  (1.50x)" in bars
    assert "ours, zero-filled" in bars
    assert "93.8%" in bars
    assert {"Made-up 9000", "141.0", "no <room> & more", *MEANINGS.values()} <= {*read.texts["td"]}
    assert "Time against bytes, tensors of 256 MiB" in read.texts["h2"]
    assert "Time against bytes, tensors of 1 MiB" in read.texts["h2"]
    assert len(read.all("polyline")) == 2 * (3 * 5 + 2 * 3)


def test_one_amount_of_weights_has_no_lines() -> None:
    read = Reader(page(result(Request(tensor_mib=(256,)))))
    assert not read.all("polyline")
    assert not [title for title in read.texts["h2"] if title.startswith("Time against")]


def test_two_devices() -> None:
    read = Reader(page(result(Request((4, 16), devices=2))))
    assert "Two devices" in read.texts["h2"]
    assert "0.320 s  (2.00x)" in read.texts["text"]


def test_a_result_with_nothing_in_it() -> None:
    read = Reader(page({"machine": {}, "rows": []}))
    assert read.texts["h2"] == ["Machine and versions"]


def test_text_of_the_machine_is_only_text() -> None:
    machine = {"gpu": "<script>alert(1)</script>", 'x"y': "</style>"}
    read = Reader(page({**WHOLE, "machine": machine}))
    assert not read.all("script")
    assert "<script>alert(1)</script>" in read.texts["td"]
