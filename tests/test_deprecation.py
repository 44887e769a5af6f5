from __future__ import annotations

import warnings

import pytest

import sleepbackends
from sleepbackends.deprecation import Renamed, SleepBackendsDeprecationWarning, warn_deprecated


def numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@pytest.mark.parametrize("to", ["Policy", "Orchestrator"])
def test_an_old_name_works_and_says_what_it_is_called_now(
    monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    monkeypatch.setitem(sleepbackends._RENAMED, "OldName", Renamed(to, "0.2", "0.4"))
    with pytest.warns(SleepBackendsDeprecationWarning) as said:
        assert sleepbackends.OldName is getattr(sleepbackends, to)
    assert str(said[0].message) == (
        "sleepbackends.OldName is deprecated and will be gone in sleepbackends 0.4: "
        f"it is called {to} since 0.2"
    )
    assert said[0].filename == __file__, "whoever uses it is named"
    assert "OldName" not in dir(sleepbackends), "it is not offered any more"


def test_names_that_were_announced_to_go_have_gone() -> None:
    now = numbers(sleepbackends.__version__)
    for old, renamed in sleepbackends._RENAMED.items():
        since, removed_in = numbers(renamed.since), numbers(renamed.removed_in)
        assert old not in sleepbackends.__all__
        assert renamed.to in sleepbackends.__all__
        assert now < removed_in, f"{old} was to be gone in {renamed.removed_in}"
        assert since[:2] < removed_in[:2], f"{old} warns for less than one minor release"


def test_the_caller_is_named() -> None:
    def old() -> None:
        warn_deprecated("old()", instead="call new()", removed_in="0.9")

    with pytest.warns(SleepBackendsDeprecationWarning, match=r"old\(\) is .* 0\.9: call new") as w:
        old()
    assert w[0].filename == __file__


def test_it_can_be_told_from_the_warnings_of_others() -> None:
    assert issubclass(SleepBackendsDeprecationWarning, DeprecationWarning)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("error", SleepBackendsDeprecationWarning)
        warnings.warn("of others", DeprecationWarning, stacklevel=1)
        with pytest.raises(SleepBackendsDeprecationWarning):
            warn_deprecated("it", instead="do not", removed_in="0.9")
