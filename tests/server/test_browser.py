"""The status page in a browser: it shows what its buttons did, and nothing without the token.

Needs Chromium, which is no Python package: ``make system-packages`` installs it.
``SLEEPBACKENDS_SCREENSHOT=docs/status-page.png`` makes the picture of the documentation anew.
"""

from __future__ import annotations

import os
import re
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import uvicorn

from sleepbackends import Orchestrator
from sleepbackends.server import app
from sleepbackends.testing import FakeEngine, SimulatedBackend
from tests.server.calling import TOKEN

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

MIB = 1 << 20
SIZES = {"weights": 24 * MIB, "lora": 2 * MIB, "kv_cache": 48 * MIB}
PICTURE = Path(__file__).parents[2] / "docs" / "status-page.png"
DOCS = PICTURE.with_name("server.md")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    found = shutil.which("chromium") or shutil.which("chromium-browser")
    if found is None:
        pytest.skip("there is no Chromium: make system-packages")
    with api.sync_playwright() as playwright:
        # Root has no sandbox of Chromium's; the page is our own.
        browser = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def served(token: str | None = None) -> Iterator[tuple[str, Orchestrator]]:
    """Serve an engine on a free port of this machine; give its address."""
    backend = SimulatedBackend()
    for tag, size_bytes in SIZES.items():
        with backend.region(tag) as region:
            region.buffer(size_bytes)
    orchestrator = Orchestrator(backend, hooks=FakeEngine().hooks())
    server = uvicorn.Server(
        uvicorn.Config(
            app(orchestrator, token=token),
            port=0,
            log_level="warning",
            timeout_graceful_shutdown=1,
        )
    )
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
        (listening,) = server.servers[0].sockets
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", orchestrator
    finally:
        server.should_exit = True
        thread.join(20)
        orchestrator.close()


@contextmanager
def opened(browser: Browser, url: str) -> Iterator[Page]:
    page = browser.new_page(viewport={"width": 1000, "height": 760})
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.set_default_timeout(15_000)
    page.goto(url)
    yield page
    page.close()
    assert not problems


def text_of(page: Page, element: str, expected: str) -> None:
    from playwright.sync_api import expect

    expect(page.locator(element)).to_have_text(re.compile(expected), timeout=15_000)


def cells(page: Page, tag: str) -> list[str]:
    """A tag's row: resident, offloaded, discarded, undefined, epoch."""
    row = page.get_by_role("row").filter(has=page.get_by_role("rowheader", name=tag, exact=True))
    return row.get_by_role("cell").all_inner_texts()[:5]


def click(page: Page, button: str) -> None:
    page.get_by_role("button", name=button, exact=True).click()


def test_the_buttons_do_what_the_page_then_shows(browser: Browser, tmp_path: Path) -> None:
    with served() as (url, orchestrator), opened(browser, url) as page:
        text_of(page, "#sleep-state", "^awake$")
        text_of(page, "#status", "^awake, serving$")
        assert cells(page, "kv_cache") == ["48.0 MiB", *["0 bytes"] * 3, "0"]
        click(page, "Release the KV cache")
        text_of(page, "#sleep-state", "^kv cache released$")
        text_of(page, "#status", "not serving$")
        text_of(page, "#said", "^release done: awake to kv cache released$")
        assert orchestrator.state().sleep_state.value == "kv_cache_released"
        assert cells(page, "kv_cache") == ["0 bytes", "0 bytes", "48.0 MiB", "0 bytes", "1"]
        assert cells(page, "weights") == ["24.0 MiB", *["0 bytes"] * 3, "0"]
        picture = Path(os.environ.get("SLEEPBACKENDS_SCREENSHOT", tmp_path / "page.png"))
        assert len(page.screenshot(path=picture, full_page=True)) > 10_000
        click(page, "Wake up everything")
        text_of(page, "#sleep-state", "^awake$")
        text_of(page, "#status", "^awake, serving$")
        assert cells(page, "kv_cache") == ["48.0 MiB", *["0 bytes"] * 3, "1"]
        assert orchestrator.state().serving


def test_one_tag_wakes_by_keyboard_and_a_refusal_is_said(browser: Browser) -> None:
    with served() as (url, orchestrator), opened(browser, url) as page:
        text_of(page, "#sleep-state", "^awake$")
        page.get_by_role("button", name="Sleep", exact=True).focus()
        page.keyboard.press("Enter")
        text_of(page, "#sleep-state", "^weights offloaded$")
        page.get_by_label("Level").select_option("2")
        click(page, "Sleep")
        text_of(page, "#problem", "'weights' is offloaded")
        page.get_by_role("button", name="Wake up weights").focus()
        page.keyboard.press("Space")
        text_of(page, "#said", "^wake_up done")
        assert orchestrator.state().memory.asleep_tags() == {"lora", "kv_cache"}


def test_nothing_is_shown_without_the_token(browser: Browser) -> None:
    with served(TOKEN) as (url, _), opened(browser, url) as page:
        text_of(page, "#problem", "token")
        text_of(page, "#sleep-state", "^unknown$")
        field = page.get_by_label("Token")
        field.fill("wrong" * 6)
        click(page, "Use the token")
        text_of(page, "#problem", "token")
        text_of(page, "#sleep-state", "^unknown$")
        field.fill(TOKEN)
        click(page, "Use the token")
        text_of(page, "#sleep-state", "^awake$")
        click(page, "Release the KV cache")
        text_of(page, "#sleep-state", "^kv cache released$")
        assert TOKEN not in page.content()


def test_the_picture_is_in_the_documentation() -> None:
    assert PICTURE.read_bytes().startswith(b"\x89PNG")
    assert f"]({PICTURE.name})" in DOCS.read_text(encoding="utf-8")
