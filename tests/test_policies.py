"""Policies: defaults never lose data, deeper levels never keep more."""

from __future__ import annotations

from itertools import product

import pytest

from sleepbackends import (
    ConfigurationError,
    InvalidLevelError,
    Policies,
    Policy,
    PolicyConflictError,
    TagPolicy,
)


def test_defaults() -> None:
    policies = Policies()
    assert [policies.at("weights", level) for level in (0, 1, 2)] == [
        Policy.KEEP,
        Policy.OFFLOAD,
        Policy.DISCARD,
    ]
    assert policies.at("kv_cache", 1) is policies.at("kv_cache", 2) is Policy.DISCARD
    assert policies.at("anything", 1) is policies.at("anything", 2) is Policy.OFFLOAD
    assert [policies.of(tag).expendable for tag in ("kv_cache", "weights", "anything")] == [
        True,
        False,
        False,
    ]
    assert set(policies) == {"kv_cache", "weights"}


@pytest.mark.parametrize(("level_1", "level_2"), list(product(Policy, Policy)))
def test_level_2_gives_up_at_least_as_much(level_1: Policy, level_2: Policy) -> None:
    order = [Policy.KEEP, Policy.OFFLOAD, Policy.DISCARD]
    if order.index(level_2) < order.index(level_1):
        with pytest.raises(ConfigurationError, match="conflicting policies"):
            TagPolicy(level_1, level_2)
    else:
        assert Policies({"t": TagPolicy(level_1, level_2)}).at("t", 2) is level_2


def test_discarding_overrides_and_keeps_the_rest() -> None:
    policies = Policies({"lora": TagPolicy(Policy.KEEP, Policy.KEEP)}).discarding({"weights"})
    assert policies.at("weights", 1) is Policy.DISCARD
    assert policies.at("lora", 2) is Policy.KEEP


def test_bad_requests() -> None:
    with pytest.raises(InvalidLevelError):
        Policies().at("weights", 3)
    with pytest.raises(PolicyConflictError, match="lora"):
        Policies({"lora": TagPolicy(Policy.KEEP, Policy.KEEP)}).check_releasable(["lora", "x"])
