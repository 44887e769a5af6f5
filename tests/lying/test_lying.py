"""The contract suite is itself tested: whoever breaks a promise fails it, by the promise's name."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
from hypothesis import Phase, settings

from sleepbackends.testing import BackendContractTests, Promise, SimulatedBackend
from sleepbackends.testing.contract import ranks, threads
from sleepbackends.testing.suite import MIXINS
from tests.lying import steps, verbs

pytest_plugins = ["pytester"]


class Lie(NamedTuple):
    """Who lies, which test finds it out, which promise it names, and what it has seen."""

    backend: type[SimulatedBackend]
    test: str
    promise: Promise
    seen: str


P = Promise
LIES = [
    # The mechanism
    Lie(
        steps.LosesTheLastPage,
        "test_level_1_keeps_contents",
        P.BIT_EXACT,
        "17 of 12305, from offset 12288",
    ),
    Lie(steps.SkipsABlock, "test_level_1_keeps_contents", P.BIT_EXACT, "1 of 3 blocks not saved"),
    Lie(
        steps.KeepsTheFirstCopy, "test_many_sleeps", P.BIT_EXACT, "bytes differ from what was kept"
    ),
    Lie(steps.ForgetsInRestore, "test_resume[restore]", P.COPY_OUTLIVES_RESTORE, "KeyError"),
    Lie(steps.SwapsBlocks, "test_level_1_keeps_contents", P.BIT_EXACT, "tag 'weights'"),
    Lie(steps.LeavesStaleBytes, "test_level_2_drops_weights", P.UNDEFINED, "not filled with 0x00"),
    Lie(steps.UnmapsBeforeItFails, "test_level_1_keeps_contents", P.BIT_EXACT, "too late"),
    Lie(steps.KeepsMemory, "test_memory_is_given_back", P.GIVES_BACK, "0 were given back"),
    Lie(
        steps.KeepsMemory, "test_discarded_memory_is_given_back", P.GIVES_BACK, "0 were given back"
    ),
    Lie(
        steps.KeepsFreedMemory,
        "test_freed_memory_is_given_back_once",
        P.GIVES_BACK,
        "+16777216 bytes are in use",
    ),
    Lie(
        steps.ReleasesTwice,
        "test_free_in_every_residency",
        P.FREEING,
        "illegal access to unmapped memory",
    ),
    Lie(
        steps.ReleasesUncountedTwice,
        "test_freed_memory_is_given_back_once",
        P.GIVES_BACK,
        "-16777216 bytes are in use",
    ),
    Lie(
        steps.NeverCounts,
        "test_progress_ends_at_the_total",
        P.PROGRESS,
        "its progress ended at 0 of 20498",
    ),
    Lie(steps.NeverLooksAtTheDeadline, "test_deadline_rolls_back", P.DEADLINE, "DID NOT RAISE"),
    Lie(steps.ExitsTheProcess, "test_level_1_keeps_contents", P.ERRORS, "the process was ended"),
    Lie(
        steps.SharesALock,
        "test_both_sleep_at_the_same_time",
        P.SIDE_BY_SIDE,
        "waited for that of another",
    ),
    # The calls
    Lie(
        verbs.MarksBeforeActing,
        "test_a_transition_in_progress",
        P.DERIVED_STATE,
        "nothing has happened yet",
    ),
    Lie(
        verbs.MarksBeforeActing,
        "test_suspend[save]",
        P.ALL_OR_REPORTED,
        "the error's report is not the state",
    ),
    Lie(
        verbs.ForgetsATag,
        "test_level_1_keeps_contents",
        P.POLICIES,
        "the tag 'lora' is ['resident']",
    ),
    Lie(
        verbs.IgnoresTheLevel,
        "test_level_2_drops_weights",
        P.POLICIES,
        "'weights' is ['offloaded']",
    ),
    Lie(
        verbs.DiscardsNothing,
        "test_discard_releases_the_named_tags_only",
        P.FLAGS,
        "'kv_cache' is ['resident']",
    ),
    Lie(
        verbs.ResumesHalf,
        "test_level_1_keeps_contents",
        P.NEVER_HALF_AWAKE,
        "after resume() ['kv_cache', 'lora'] are asleep",
    ),
    Lie(
        verbs.LeavesSomethingAwake,
        "test_resume[restore]",
        P.NEVER_HALF_AWAKE,
        "a failed resume left something awake",
    ),
    Lie(
        verbs.WakesEverything,
        "test_resume_of_some_tags",
        P.FLAGS,
        "'lora' is ['resident'], not 'offloaded'",
    ),
    Lie(verbs.NeverBumpsTheEpoch, "test_level_2_drops_weights", P.REPORTS, "reports []"),
    Lie(verbs.NeverBumpsTheEpoch, "test_epochs_count_what_was_lost", P.EPOCHS, "its epoch is 0"),
    Lie(
        verbs.BumpsEveryEpoch,
        "test_epochs_count_what_was_lost",
        P.EPOCHS,
        "weights lost contents 0 times, its epoch is 1",
    ),
    Lie(
        verbs.CallsUndefinedValid,
        "test_level_2_drops_weights",
        P.UNDEFINED,
        "['resident'], not 'undefined'",
    ),
    Lie(
        verbs.BlocksInState,
        "test_a_transition_in_progress",
        P.NEVER_WAITS,
        "state() had not returned",
    ),
    Lie(
        verbs.NotThreadSafe,
        "test_a_transition_in_progress",
        P.SERIALISED,
        "resume() with a deadline began too",
    ),
    Lie(
        verbs.ChangesOnARefusal,
        "test_discard_refuses",
        P.CHECKED_FIRST,
        "a refused discard changed the state",
    ),
    Lie(verbs.AcceptsUnknownTags, "test_unknown_tag", P.UNKNOWN_TAGS, "DID NOT RAISE"),
    Lie(verbs.SwallowsFaults, "test_suspend[save]", P.FAULTS_SHOW, "a fault was swallowed"),
    Lie(
        verbs.LetsErrorsOfOthersThrough,
        "test_suspend[save]",
        P.ERRORS,
        "OSError: the driver said 700 is no error of the tree",
    ),
    Lie(verbs.ErrorsThatCannotBeSent, "test_errors_survive_pickling", P.TRAVELS, "cannot pickle"),
    Lie(
        verbs.ReportsTooMuch,
        "test_reports_say_what_happened",
        P.REPORTS,
        "20498 bytes were copied, the report says 24576",
    ),
    Lie(
        verbs.AlwaysChanged,
        "test_repeating_is_a_no_op_that_says_so",
        P.REPEATING,
        "the second suspend() says changed",
    ),
    Lie(verbs.MovesAddresses, "test_addresses_are_what_they_were", P.ADDRESSES, "came back at"),
    Lie(verbs.MovesAddresses, "test_level_1_keeps_contents", P.ADDRESSES, "came back at"),
    Lie(
        verbs.CallsGraphsLost,
        "test_the_engine_rebuilds_what_does_not_survive",
        P.GRAPHS,
        "it said",
    ),
    Lie(
        verbs.CallsGraphsLost, "test_capabilities_stay_as_they_are", P.FLAGS, "asleep the flags are"
    ),
    Lie(
        verbs.DeniesAndDoes,
        "test_without_selective_release_discard_is_refused",
        P.FLAGS,
        "DID NOT RAISE",
    ),
    Lie(
        verbs.ClaimsToOffload,
        "test_level_1_keeps_contents",
        P.BIT_EXACT,
        "supports_offload is False",
    ),
    Lie(
        verbs.TakesMemoryAwayWhenClosed,
        "test_closed",
        P.CLOSING,
        "illegal access to unmapped memory",
    ),
    Lie(verbs.GivesUpAtOnce, "test_waiting_for_memory", P.ROOM, "told to fail at call 0"),
    Lie(
        verbs.SharesItsLedger,
        "test_one_sleeps_while_the_other_works",
        P.SIDE_BY_SIDE,
        "the other one knows tags",
    ),
    Lie(
        verbs.FreesWhenItLikes,
        "test_a_transition_in_progress",
        P.FREEING,
        "free() had not returned",
    ),
    Lie(verbs.AnotherVersion, "test_identity_and_probe", P.IDENTITY, "999"),
]


class LiarTests(BackendContractTests):
    backend_class: type[SimulatedBackend] = SimulatedBackend

    # Finding the lie is enough here; making the example small takes minutes.
    random_settings = settings(
        BackendContractTests.random_settings,
        max_examples=600,
        phases=[Phase.generate],
        print_blob=False,
    )

    def make_backend(self, settings: Any) -> SimulatedBackend:
        return self.backend_class(None, settings)

    def used_bytes(self, backend: Any) -> int:
        return int(backend.mapped_bytes)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wait less for those who keep others waiting."""
    monkeypatch.setattr(ranks, "PATIENCE_S", 0.5)
    monkeypatch.setattr(threads, "AT_ONCE_S", 0.5)


def run(pytester: pytest.Pytester, backend: type[SimulatedBackend], test: str) -> Any:
    """Run one test of the suite against a backend, as its author would."""
    source = f"""
        from tests.lying.test_lying import LiarTests as _Tests
        from {backend.__module__} import {backend.__name__} as _Backend

        class Test(_Tests):
            backend_class = _Backend
    """
    path = pytester.makepyfile(test_liar=source)
    return pytester.inline_run("-p", "no:cacheprovider", f"{path}::Test::{test}")


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("lie", LIES, ids=lambda lie: f"{lie.backend.__name__}-{lie.test}")
def test_a_lie_is_found_and_named(pytester: pytest.Pytester, lie: Lie) -> None:
    result = run(pytester, lie.backend, lie.test)
    (failure,) = result.getfailures()
    message = failure.longrepr.reprcrash.message
    assert f"broken promise [{lie.promise.key}]: {lie.promise.value}" in message
    assert lie.seen in message


@pytest.mark.parametrize("test", sorted({lie.test for lie in LIES}))
def test_an_honest_backend_passes(pytester: pytest.Pytester, test: str) -> None:
    if "without" in test:
        pytest.skip("for backends that cannot; test_contract_simulated has one")
    run(pytester, SimulatedBackend, test).assertoutcome(passed=1)


@pytest.mark.parametrize(
    "liar",
    [
        steps.ForgetsInRestore,
        steps.LosesTheLastPage,
        steps.LeavesStaleBytes,
        verbs.NeverBumpsTheEpoch,
        verbs.AlwaysChanged,
    ],
)
def test_random_sequences_find_it_too(
    pytester: pytest.Pytester, liar: type[SimulatedBackend]
) -> None:
    result = run(pytester, liar, "test_random_sequences")
    (failure,) = result.getfailures()
    assert "broken promise [" in str(failure.longrepr)


def suite_tests(part: type) -> list[Any]:
    return [test for name, test in vars(part).items() if name.startswith("test_")]


def test_every_test_names_its_promise() -> None:
    for part in MIXINS.values():
        assert suite_tests(part)
        for test in suite_tests(part):
            assert isinstance(test.promise, Promise), test


def test_every_promise_is_broken_by_somebody() -> None:
    """But staging: that backend is tested where it is written, over the simulated driver."""
    assert {lie.promise for lie in LIES} == set(Promise) - {Promise.STAGING}


def test_there_are_no_lies_that_nobody_tells() -> None:
    written = {
        name
        for module in (steps, verbs)
        for name, value in vars(module).items()
        if getattr(value, "__module__", "") == module.__name__
        and isinstance(value, type)
        and issubclass(value, SimulatedBackend)
    }
    assert written == {lie.backend.__name__ for lie in LIES}
