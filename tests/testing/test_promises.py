"""What a test of the suite tells of the promises that it found to be kept."""

from __future__ import annotations

from typing import Any

import pytest

from sleepbackends.testing import BrokenPromise, Promise
from sleepbackends.testing.promises import proves


class Suite:
    tried_promises: set[Promise]

    @proves(Promise.POLICIES)
    def test_kept(self) -> None:
        Promise.EPOCHS.check(True, "")

    @proves(Promise.ROOM)
    def test_nothing_else(self) -> None:
        pass

    @proves(Promise.ROOM)
    def test_inner(self) -> None:
        Promise.ERRORS.check(True, "")
        Suite().test_kept()
        Promise.FLAGS.check(True, "")

    @proves(Promise.ROOM)
    def test_broken(self) -> None:
        Promise.ERRORS.check(True, "")
        Promise.EPOCHS.check(False, "it fell")


@pytest.mark.parametrize(
    ("name", "tried"),
    [
        ("test_kept", {Promise.POLICIES, Promise.EPOCHS}),
        ("test_nothing_else", {Promise.ROOM}),
        ("test_inner", {Promise.ROOM, Promise.ERRORS, Promise.FLAGS}),
    ],
)
def test_each_test_tells_its_own(name: str, tried: set[Promise]) -> None:
    suite = Suite()
    suite.test_kept()
    getattr(suite, name)()
    assert suite.tried_promises == tried


def test_a_check_that_fails_is_no_promise_kept() -> None:
    suite: Any = Suite()
    with pytest.raises(BrokenPromise, match="it fell"):
        suite.test_broken()
    assert suite.tried_promises == {Promise.ROOM, Promise.ERRORS}
    Promise.EPOCHS.check(True, "outside of a test this is noted nowhere")
    assert suite.tried_promises == {Promise.ROOM, Promise.ERRORS}
