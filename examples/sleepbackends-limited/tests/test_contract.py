"""The contract suite over the limited backend, around the host backend."""

from __future__ import annotations

from hypothesis import settings

from sleepbackends_limited.contract import LimitedTests


class TestLimited(LimitedTests):
    # The wrapped backend has its own suite; what is under test is what lies around it.
    random_settings = settings(LimitedTests.random_settings, max_examples=25)
