from __future__ import annotations

import json
from dataclasses import replace
from xml.etree import ElementTree

import pytest

from sleepbackends.availability import Availability
from sleepbackends.cli.verify_screen import show
from sleepbackends.testing import Promise
from sleepbackends.verify.junit import junit
from sleepbackends.verify.page import page
from sleepbackends.verify.results import Outcome, Verdict, Verification
from tests.verify.made_up import ABSENT, BROKEN, FAILED, KEPT, PASSED, SKIPPED


@pytest.mark.parametrize(
    ("verification", "verdict"),
    [
        (KEPT, Verdict.KEPT),
        (BROKEN, Verdict.BROKEN),
        (ABSENT, Verdict.UNAVAILABLE),
        (replace(KEPT, results=(PASSED, FAILED)), Verdict.BROKEN),
        (replace(KEPT, problem="it died"), Verdict.BROKEN),
        (replace(KEPT, results=()), Verdict.BROKEN),
        (replace(KEPT, results=(SKIPPED,)), Verdict.BROKEN),
        (replace(ABSENT, availability=Availability(True)), Verdict.BROKEN),
    ],
)
def test_only_tests_that_passed_are_a_proof(verification: Verification, verdict: Verdict) -> None:
    assert verification.verdict is verdict


def test_a_promise_is_broken_by_one_test_and_kept_only_if_something_was_tried() -> None:
    other = replace(FAILED, outcome=Outcome.PASSED, tried=(Promise.BIT_EXACT.key,))
    promises = replace(BROKEN, results=(FAILED, other, PASSED, SKIPPED)).promises()
    assert promises[Promise.BIT_EXACT] is Outcome.FAILED
    assert promises[Promise.POLICIES] is Outcome.PASSED
    assert promises[Promise.ERRORS] is Outcome.PASSED, "a test checks more than it is about"
    assert promises[Promise.STAGING] is Outcome.SKIPPED
    assert promises[Promise.ROOM] is Outcome.SKIPPED
    assert list(promises) == list(Promise)


def test_json_holds_everything() -> None:
    told = json.loads(json.dumps(BROKEN.to_json()))
    assert told["verdict"] == "broken"
    assert told["options"] == {"threads": 2}
    assert [each["name"] for each in told["results"]] == ["test_a", "test_b[<save>]", "test_c"]
    assert told["results"][1]["message"] == FAILED.message
    assert told["promises"]["bit-exact"] == {
        "text": Promise.BIT_EXACT.value,
        "outcome": "failed",
    }


def test_junit_is_read_by_others() -> None:
    suites = ElementTree.fromstring(junit(BROKEN))  # noqa: S314 - written by us
    assert suites.tag == "testsuites"
    (suite,) = suites
    cases = suite.findall("testcase")
    assert suite.get("name") == "acme"
    assert (suite.get("tests"), len(cases)) == ("4", 4)
    assert (suite.get("failures"), suite.get("errors"), suite.get("skipped")) == ("1", "1", "1")
    assert [case.get("classname") for case in cases[:3]] == [
        "acme.lifecycle",
        "acme.offload",
        "acme.staging",
    ]
    failure = cases[1].find("failure")
    assert failure is not None
    assert failure.get("type") == "bit-exact"
    assert (failure.get("message") or "").startswith("[b]17 of 99 bytes[/b] differ & more")
    assert failure.text == "the <traceback>"
    error = cases[3].find("error")
    assert error is not None
    assert error.get("message") == BROKEN.problem


def test_junit_of_what_cannot_work_here_is_one_skipped_test() -> None:
    (suite,) = ElementTree.fromstring(junit(ABSENT))  # noqa: S314 - written by us
    assert (suite.get("tests"), suite.get("skipped"), suite.get("failures")) == ("1", "1", "0")
    skipped = suite.find("testcase/skipped")
    assert skipped is not None
    assert skipped.get("message") == "no [device]"


def test_the_page_says_what_was_broken_and_stands_alone() -> None:
    text = page(BROKEN)
    assert "Broken promise 1: bit-exact" in text
    assert Promise.BIT_EXACT.value in text
    assert "test_b[&lt;save&gt;]" in text
    assert "&lt;traceback&gt;" in text
    assert "option threads" in text
    assert BROKEN.problem in text
    for outside in ("http:", "https:", "<script", "<link", "@import", "src="):
        assert outside not in text
    assert "Broken promise" not in page(KEPT)
    assert "plug one in" in page(ABSENT)


@pytest.mark.parametrize("verification", [KEPT, BROKEN, ABSENT])
def test_the_text_ends_with_the_verdict(
    verification: Verification, capsys: pytest.CaptureFixture[str]
) -> None:
    show(verification)
    text = capsys.readouterr().out
    assert verification.summary in text
    if verification is BROKEN:
        assert f"broken promise [bit-exact]: {Promise.BIT_EXACT.value}" in text
        assert "seen: [b]17 of 99 bytes[/b] differ & more" in text
    if verification is ABSENT:
        assert "no [device]" in text
        assert "plug one in" in text
    else:
        assert "1 acme: supports_staging is False" in text
