"""The promises of the contract, as data: what each test proves and each failure names."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from enum import Enum
from typing import Any, ParamSpec, TypeVar

import pytest

P = ParamSpec("P")
R = TypeVar("R")

SUITE_VERSION = 1
"""The version of the suite. It goes up when a test is added that a backend that passed before
may fail."""


class BrokenPromise(AssertionError):
    """A backend did not do what the contract says.

    Parameters
    ----------
    promise : Promise
        Which promise.
    seen : str
        What was seen instead.
    """

    def __init__(self, promise: Promise, seen: str) -> None:
        super().__init__(f"broken promise [{promise.key}]: {promise.value}\nseen: {seen}")
        self.promise = promise
        self.seen = seen


class Promise(Enum):
    """What every backend promises, in the words that a failure quotes."""

    IDENTITY = (
        "A backend says its name, the version of the contract it was written for, what it can "
        "do, and whether it can work here."
    )
    FLAGS = (
        "A flag is a fact: what a True says works, and what a False denies is refused with "
        "UnsupportedOperationError before anything changes."
    )
    CHECKED_FIRST = "The whole request is checked first; a refused one changed nothing."
    UNKNOWN_TAGS = "An unknown tag is an error that lists the known ones."
    POLICIES = "A sleep follows each tag's policy at its level; no tag is left out."
    GIVES_BACK = "Memory that is suspended, discarded or freed is given back, once."
    BIT_EXACT = "What a policy keeps comes back with the same bytes, all of them."
    ADDRESSES = "With preserves_addresses, memory comes back where it was."
    COPY_OUTLIVES_RESTORE = "A saved copy lives until the restore of its block has succeeded."
    ALL_OR_REPORTED = (
        "A suspend or discard that raises changed nothing, or its error's report says which "
        "tags are where; nothing that a policy keeps is lost."
    )
    NEVER_HALF_AWAKE = (
        "A resume brings back all that was asked for; one that raises leaves all of it asleep, "
        "and can be repeated."
    )
    ROOM = (
        "Missing room is an error with numbers that leaves everything as it was; "
        "wait_for_memory_s waits for a neighbour instead."
    )
    REPEATING = "Repeating a call is a no-op that says so (changed=False)."
    DERIVED_STATE = (
        "The state is derived from the blocks: nothing is marked before it happened, and what "
        "happened shows."
    )
    NEVER_WAITS = "state() answers at once, whatever is going on."
    SERIALISED = "There is one transition at a time; another waits, or is told who is in its way."
    FREEING = (
        "Memory can be freed in any residency and any thread, without waiting, and no other "
        "block is disturbed."
    )
    DEADLINE = "A transition that meets its deadline is rolled back."
    PROGRESS = "Progress counts every copied byte once; a callback that raises is ignored."
    REPORTS = "A report says what happened, with the bytes that were moved."
    EPOCHS = "Dropping contents raises the tag's epoch by one, and nothing else does."
    UNDEFINED = "Dropped contents come back UNDEFINED, filled as configured, until mark_valid."
    FAULTS_SHOW = "A step that fails makes its call fail."
    ERRORS = (
        "Every failure is an error of the tree that carries backend, operation, tags, hint and "
        "recoverable; the process is never ended."
    )
    TRAVELS = "Errors, reports and capabilities can be sent to another process."
    CLOSING = (
        "close() can be repeated, leaves mapped memory usable, and whatever comes after it is "
        "refused."
    )
    STAGING = "What was staged is not copied again, and what changed since is saved as it is then."
    GRAPHS = (
        "Work recorded with addresses runs again after a sleep, or the flags have the engine "
        "record it anew."
    )
    SIDE_BY_SIDE = "Backends of several ranks share no tag, no block and no lock."

    @property
    def key(self) -> str:
        """The short name that messages and reports have, such as ``bit-exact``."""
        return self.name.lower().replace("_", "-")

    def check(self, kept: object, seen: str) -> None:
        """Go on if the promise is kept, and note that it was tried; see ``proves``.

        Raises
        ------
        BrokenPromise
            If it is not.
        """
        if not kept:
            raise BrokenPromise(self, seen)
        tried = _tried.get()
        if tried is not None:
            tried.add(self)


_tried = ContextVar[set[Promise] | None]("tried", default=None)
"""What the test under way has found to be kept."""


def proves(promise: Promise, *, since: int = 1) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Name the promise that a test of the suite is about.

    Whatever goes wrong in it unforeseen then names the promise too: an assertion, an exception
    out of the backend, an exit. The object whose test it is has all promises that it found to be
    kept as ``tried_promises`` afterwards.

    Parameters
    ----------
    promise : Promise
        What the test proves, unless a check inside names another.
    since : int
        The version of the suite that the test came with. Classes that ask for an earlier
        ``suite_version`` skip it.
    """

    def decorate(test: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            asked: Any = getattr(args[0], "suite_version", SUITE_VERSION)
            if since > asked:
                pytest.skip(f"suite_version is {asked}; this test came with {since}")
            tried = {promise}
            args[0].tried_promises = tried  # type: ignore[attr-defined]  # read by reports
            token = _tried.set(tried)
            try:
                return test(*args, **kwargs)
            except BrokenPromise:
                raise
            except AssertionError as error:
                raise BrokenPromise(promise, str(error)) from error
            except pytest.fail.Exception as error:
                raise BrokenPromise(promise, str(error)) from error
            except SystemExit as error:
                raise BrokenPromise(Promise.ERRORS, f"the process was ended: {error!r}") from error
            except Exception as error:
                raise BrokenPromise(promise, _describe(error)) from error
            finally:
                _tried.reset(token)

        run.__dict__.update(promise=promise, since=since)  # read by reports and by tests
        return run

    return decorate


def _describe(error: Exception) -> str:
    notes = "".join(f"\n{note}" for note in getattr(error, "__notes__", ()))
    return f"{type(error).__name__}: {error}{notes}"
