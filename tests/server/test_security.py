"""Who may call an application that runs alone."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from sleepbackends import ConfigurationError, RequestError
from sleepbackends.config import TOKEN_VARIABLE
from sleepbackends.server import app
from sleepbackends.server.listening import bound_address, bound_path
from sleepbackends.server.security import is_loopback, read_token
from tests.gated import make
from tests.server.calling import BASE, TOKEN, Caller

BEARER = {"Authorization": f"Bearer {TOKEN}"}


@pytest.fixture
def guarded() -> Caller:
    return Caller(app(make()[0], token=TOKEN))


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"Authorization": TOKEN}, 401),
        ({"Authorization": "Basic abc"}, 401),
        ({"Authorization": "Bearer "}, 401),
        ({"Authorization": f"Bearer {TOKEN}x"}, 403),
        ({"Authorization": f"Bearer {TOKEN[:-1]}"}, 403),
        ({"Authorization": "Bearer \u00e4".encode("latin-1")}, 403),
        (BEARER, 200),
        ({"Authorization": f"bearer {TOKEN}"}, 200),
    ],
)
@pytest.mark.parametrize(("method", "path"), [("POST", "/sleep"), ("GET", "/state")])
def test_a_token_is_needed(
    guarded: Caller, method: str, path: str, headers: dict[str, str], status: int
) -> None:
    response = guarded(method, path, headers=headers)
    assert response.status_code == status
    assert (response.headers.get("www-authenticate") == "Bearer") == (status == 401)
    if status != 200:
        assert response.json()["hint"]
        assert TOKEN not in response.text
        assert guarded.ok("GET", "/state", headers=BEARER)["serving"]


def test_nothing_can_be_found_out_without_the_token(guarded: Caller) -> None:
    for path in ("/openapi.json", "/metrics", "/events", "/plan", "/no-such-route"):
        assert guarded.get(path).status_code == 401


def test_tokens_are_compared_in_constant_time(
    guarded: Caller, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[bytes, bytes]] = []

    def compare(given: bytes, expected: bytes) -> bool:
        asked.append((given, expected))
        return False

    monkeypatch.setattr("hmac.compare_digest", compare)
    assert guarded.get("/state", headers=BEARER).status_code == 403
    assert asked == [(TOKEN.encode(), TOKEN.encode())]


@pytest.mark.parametrize(
    "origin", ["http://evil.example", "null", "http://localhost:9", "http://localhost", "["]
)
def test_a_foreign_page_may_not_post(origin: str) -> None:
    caller = Caller(make()[0])
    response = caller.post("/sleep", headers={"Origin": origin})
    assert response.status_code == 403
    assert caller.ok("GET", "/state")["serving"]


def test_a_foreign_page_may_not_post_even_with_the_token(guarded: Caller) -> None:
    headers = {**BEARER, "Origin": "http://evil.example"}
    assert guarded.post("/sleep", headers=headers).status_code == 403


def test_its_own_page_may_post() -> None:
    assert Caller(make()[0]).post("/sleep", headers={"Origin": BASE}).status_code == 200


def test_no_page_may_read_across_origins() -> None:
    response = Caller(make()[0]).get("/state", headers={"Origin": "http://evil.example"})
    assert not [name for name in response.headers if name.startswith("access-control")]


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8420", "192.0.2.7", "", "[", "a@b"])
def test_without_a_token_only_loopback_names_are_answered(host: str) -> None:
    """Else a page whose name is pointed at this machine could call it: its origin is its host."""
    headers = {"Host": host, "Origin": f"http://{host}"}
    assert Caller(make()[0]).post("/sleep", headers=headers).status_code == 403


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1:8420", "[::1]:8420", "LOCALHOST:1"])
def test_loopback_names_are_answered(host: str) -> None:
    assert Caller(make()[0]).get("/state", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_what_is_loopback(host: str) -> None:
    assert is_loopback(host)


@pytest.mark.parametrize(
    "host",
    ["0.0.0.0", "::", "192.0.2.1", "localhost.evil.example", ""],  # noqa: S104 - it is not
)
def test_what_is_not(host: str) -> None:
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])  # noqa: S104 - it is refused
def test_listening_elsewhere_needs_a_token(host: str) -> None:
    with (
        pytest.raises(ConfigurationError, match="no token") as caught,
        bound_address(host, 0, has_token=False),
    ):
        pass
    assert TOKEN_VARIABLE in caught.value.hint
    assert "--token-file" in caught.value.hint


def test_listening_elsewhere_with_a_token() -> None:
    with bound_address("0.0.0.0", 0, has_token=True) as bound:  # noqa: S104 - closed at once
        assert bound.getsockname()[1] > 0


def test_a_port_that_is_taken_is_named() -> None:
    with bound_address("127.0.0.1", 0, has_token=False) as first:
        first.listen()
        port = first.getsockname()[1]
        with (
            pytest.raises(RequestError, match=f"127.0.0.1 port {port}"),
            bound_address("127.0.0.1", port, has_token=False),
        ):
            pass


def test_a_unix_socket_is_for_its_user_alone(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with bound_path(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert not path.exists()


def test_a_socket_that_was_left_behind_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))
    with bound_path(path) as bound:
        bound.listen()
        with pytest.raises(RequestError, match="in use"), bound_path(path):
            pass
        assert path.exists()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(RequestError, match="not a socket"), bound_path(path):
        pass
    assert path.read_text() == "mine"


def test_the_token_comes_from_a_file_or_a_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE, raising=False)
    assert read_token() is None
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    assert read_token() == TOKEN
    path = tmp_path / "token"
    path.write_text(TOKEN[::-1] + "\n")
    assert read_token(path) == TOKEN[::-1]
    with pytest.raises(ConfigurationError, match="cannot be read"):
        read_token(tmp_path / "missing")


@pytest.mark.parametrize("token", ["", "short", "with spaces in it, and long", "\u00e4" * 20])
def test_a_token_that_cannot_be_used_is_refused(token: str, tmp_path: Path) -> None:
    path = tmp_path / "token"
    path.write_text(token, encoding="utf-8")
    with pytest.raises(ConfigurationError, match="no usable token") as caught:
        read_token(path)
    assert not token or token not in str(caught.value)
    with pytest.raises(ConfigurationError):
        app(make()[0], token=token)
