"""Errors carry data, survive pickling, and form the documented tree."""

from __future__ import annotations

import pickle
import re

import pytest

from sleepbackends import SleepBackendsError, errors


def subclasses(cls: type[SleepBackendsError]) -> list[type[SleepBackendsError]]:
    return [cls, *(s for direct in cls.__subclasses__() for s in subclasses(direct))]


@pytest.mark.parametrize("cls", subclasses(SleepBackendsError), ids=lambda c: c.__name__)
def test_pickling_keeps_everything(cls: type[SleepBackendsError]) -> None:
    error = cls(
        "it broke", hint="mend it", backend="host", operation="suspend", tags=["a"], report=(1, 2)
    )
    errors.add_note(error, "and so did the other thing")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is cls
    assert str(copy) == "it broke (mend it)"
    assert copy.message == "it broke"
    assert vars(copy) == vars(error)
    assert copy.tags == {"a"}
    assert copy.__notes__ == ["and so did the other thing"]


def test_recoverable_defaults_to_the_class_and_can_be_overruled() -> None:
    assert SleepBackendsError("x").recoverable
    assert not errors.ClosedError("x").recoverable
    assert errors.ClosedError("x", recoverable=True).recoverable
    assert not errors.ClosedError("y").recoverable


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    assert errors.__doc__ is not None
    drawn = set(re.findall(r"[├└]── (\w+)", errors.__doc__))
    assert drawn == {cls.__name__ for cls in subclasses(SleepBackendsError)[1:]}


def test_builtin_bases_that_callers_may_catch() -> None:
    assert issubclass(errors.RequestError, ValueError)
    assert issubclass(errors.TransitionTimeoutError, TimeoutError)
    assert issubclass(errors.DeviceMemoryError, MemoryError)
