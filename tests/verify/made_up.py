"""A verification that nobody made, with everything in it that there can be."""

from __future__ import annotations

from sleepbackends.availability import Availability
from sleepbackends.testing import Promise
from sleepbackends.verify.results import Outcome, TestCase, TestResult, Verification

ABOUT = {"from": "acme-sleep 2.3", "contract": "1", "suite": "1"}

PASSED = TestResult(
    TestCase("test_a", "lifecycle", Promise.POLICIES.key),
    Outcome.PASSED,
    0.5,
    tried=(Promise.POLICIES.key, Promise.ERRORS.key),
)
FAILED = TestResult(
    TestCase("test_b[<save>]", "offload", Promise.BIT_EXACT.key),
    Outcome.FAILED,
    0.25,
    "[b]17 of 99 bytes[/b] differ & more\nassert \x00 == 1",
    "the <traceback>",
)
SKIPPED = TestResult(
    TestCase("test_c", "staging", Promise.STAGING.key),
    Outcome.SKIPPED,
    message="acme: supports_staging is False",
)

KEPT = Verification(
    backend="acme",
    availability=Availability(True, "there is a device"),
    about=ABOUT,
    capabilities=("supports_offload",),
    results=(PASSED, SKIPPED),
    seconds=1.25,
)
BROKEN = Verification(
    backend="acme",
    options={"threads": 2},
    availability=Availability(True),
    about=ABOUT,
    results=(PASSED, FAILED, SKIPPED),
    problem="the process died of SIGSEGV; 3 tests were not run",
)
ABSENT = Verification(
    backend="acme", availability=Availability(False, "no [device]", "plug one in"), about=ABOUT
)
