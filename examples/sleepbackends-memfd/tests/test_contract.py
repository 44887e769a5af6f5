"""The contract suite over the memfd backend."""

from __future__ import annotations

from hypothesis import settings

from sleepbackends_memfd.contract import MemfdTests


class TestMemfd(MemfdTests):
    # Verification tries more of them.
    random_settings = settings(MemfdTests.random_settings, max_examples=25)
