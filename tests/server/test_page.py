"""The status page: it loads nothing, is labelled throughout, and calls routes that exist."""

from __future__ import annotations

import base64
import hashlib
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from sleepbackends.server import app
from sleepbackends.server.events import KEPT
from tests.gated import make
from tests.server.calling import TOKEN, Caller

VOID = {"meta", "link", "input"}


class Page(HTMLParser):
    """Collects elements with their attributes and the text inside them."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, list[str]]] = []
        self.feed(text)
        assert not self._open, "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        inside: list[str] = []
        self.found.append((tag, dict(attrs), inside))
        if tag not in VOID:
            self._open.append((tag, inside))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, inside in self._open:
            inside.append(data)

    def all(self, *tags: str) -> list[tuple[dict[str, str | None], str]]:
        return [(attrs, "".join(text).strip()) for tag, attrs, text in self.found if tag in tags]


@pytest.fixture(scope="module")
def caller() -> Caller:
    return Caller(make()[0])


@pytest.fixture(scope="module")
def text(caller: Caller) -> str:
    return caller.get("/").text


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_it_can_be_read_without_the_token_and_holds_none() -> None:
    response = Caller(app(make()[0], token=TOKEN)).get("/")
    assert response.status_code == 200
    assert TOKEN not in response.text
    assert Caller(app(make()[0], token=TOKEN)).post("/").status_code == 401


def test_only_its_own_script_and_style_may_run(caller: Caller, page: Page, text: str) -> None:
    policy = caller.get("/").headers["content-security-policy"]
    assert policy.startswith("default-src 'none'")
    assert "unsafe" not in policy
    for element in ("script", "style"):
        (content,) = re.findall(f"<{element}>(.*?)</{element}>", text, flags=re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert f"{element}-src 'sha256-{digest}'" in policy
    for tag, attributes, _ in page.found:
        assert not [name for name in attributes if name.startswith("on") or name == "style"], tag


def test_it_loads_nothing_from_elsewhere(page: Page, text: str) -> None:
    assert "://" not in text
    assert "innerHTML" not in text
    assert not [attrs["src"] for _, attrs, _ in page.found if "src" in attrs]
    assert [attrs["href"] for _, attrs, _ in page.found if "href" in attrs] == ["data:,"]


def test_it_has_landmarks_and_names_for_everything(page: Page) -> None:
    ids = {attrs["id"] for _, attrs, _ in page.found if "id" in attrs}
    assert dict(page.found[0][1]) == {"lang": "en"}
    assert len(page.all("h1")) == len(page.all("main")) == len(page.all("header")) == 1
    for attrs, _ in page.all("section", "table"):
        assert attrs["aria-labelledby"] in ids
    labelled = {attrs["for"] for attrs, name in page.all("label") if name}
    for attrs, _ in page.all("input", "select", "progress"):
        assert attrs["id"] in labelled
    for _, name in page.all("button", "legend", "title", "th"):
        assert name
    assert all("scope" in attrs for attrs, _ in page.all("th"))


def test_what_changes_is_said_aloud(page: Page) -> None:
    by_id = {attrs["id"]: attrs for attrs, _ in page.all("p") if "id" in attrs}
    assert by_id["said"]["aria-live"] == "polite"
    assert by_id["problem"]["role"] == "alert"


def test_the_script_calls_routes_that_exist(caller: Caller, page: Page) -> None:
    ((_, script),) = page.all("script")
    called = set(re.findall(r'(?:ask|call)\([`"](\w+)', script)) | {"sleep"}
    paths = caller.ok("GET", "/openapi.json")["paths"]
    assert called == {"state", "events", "sleep", "wake_up", "release_kv_cache"}
    assert {f"/{path}" for path in called} <= set(paths)
    assert f"const KEPT = {KEPT};" in script
    ids = {attrs["id"] for _, attrs, _ in page.found if "id" in attrs}
    assert set(re.findall(r'\bat\("([\w-]+)"\)', script)) <= ids


def test_the_script_can_be_parsed(page: Page, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node to parse it with")
    path = tmp_path / "page.js"
    path.write_text(page.all("script")[0][1], encoding="utf-8")
    subprocess.run([node, "--check", str(path)], check=True)
