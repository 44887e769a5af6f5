"""What a backend alone can promise where an engine has several ranks."""

from __future__ import annotations

import concurrent.futures
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sleepbackends.errors import UnknownTagError
from sleepbackends.residency import Residency
from sleepbackends.testing.contract.fixtures import ContractFixtures
from sleepbackends.testing.faults import hold_step
from sleepbackends.testing.promises import Promise, proves

PATIENCE_S = 30.0


class RankTests(ContractFixtures):
    """Backends side by side are independent, and what they answer can be sent."""

    @proves(Promise.SIDE_BY_SIDE)
    def test_one_sleeps_while_the_other_works(self) -> None:
        """Neither tags, nor blocks, nor the end of one show in the other."""
        self.assume("side_by_side")
        with self.opened() as one, self.opened() as other:
            self.populate(one, "weights", "lora")
            contents = self.populate(other, "weights")
            before = other.state()
            assert set(before.tags) == {"weights"}, f"the other one knows tags {set(before.tags)}"
            # A tag nobody declared is kept at every level; without offload it cannot sleep.
            one.suspend(1 if one.capabilities.supports_offload else 0)
            assert other.state() == before, f"one was suspended; the other is {other.state()}"
            with pytest.raises(UnknownTagError):
                other.resume(["lora"])
            self.check(contents)
            one.close()
            self.check(contents)
            other.suspend(2)
            self.check_residency(
                other, Promise.SIDE_BY_SIDE, "suspend(2)", weights=Residency.DISCARDED
            )
            assert other.resume().changed, "after one was closed, the other cannot be resumed"

    @proves(Promise.SIDE_BY_SIDE)
    def test_both_sleep_at_the_same_time(self) -> None:
        """One transition does not wait for the other's."""
        self.assume("side_by_side", "many_threads")
        with self.opened() as one, self.opened() as other:
            self.need_steps(one)
            for backend in (one, other):
                self.populate(backend, "kv_cache")
            with ThreadPoolExecutor(2) as pool, hold_step(one, "synchronize") as held:
                first = pool.submit(one.suspend, 1)
                assert held.wait_until_entered(), "suspend did not call synchronize"
                second = pool.submit(other.suspend, 1)
                done, _ = concurrent.futures.wait([second], PATIENCE_S)
                assert done, "a suspend waited for that of another backend"
                held.let_go()
                assert first.result(PATIENCE_S).changed
                assert second.result(0).changed

    @proves(Promise.TRAVELS)
    def test_answers_can_be_sent(self, backend: Any) -> None:
        """Reports and capabilities survive pickling, unchanged."""
        self.populate(backend, "kv_cache")
        answers = [backend.capabilities, backend.suspend(1), backend.resume(), backend.resume()]
        for answer in answers:
            copy = pickle.loads(pickle.dumps(answer))  # noqa: S301 - made here
            assert copy == answer, f"{answer} arrived as {copy}"
