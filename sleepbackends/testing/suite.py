"""The contract suite: one class to subclass, one method to write."""

from __future__ import annotations

from sleepbackends.testing.contract.faults import FaultTests
from sleepbackends.testing.contract.lifecycle import LifecycleTests
from sleepbackends.testing.contract.random_sequences import RandomSequenceTests
from sleepbackends.testing.contract.selective import SelectiveTests
from sleepbackends.testing.contract.staging import StagingTests
from sleepbackends.testing.contract.threads import ThreadTests


class BackendContractTests(
    LifecycleTests, SelectiveTests, StagingTests, FaultTests, ThreadTests, RandomSequenceTests
):
    """Everything the contract promises, for a backend built on ``BaseBackend``.

    Subclass it in a test module and define ``make_backend``::

        class TestMyBackend(BackendContractTests):
            def make_backend(self, settings):
                return MyBackend(MyOptions(), settings)

    ``allocate`` and ``used_bytes`` may be overridden where the defaults do not fit. Tests
    of abilities the backend does not claim are skipped, naming the flag.
    """
