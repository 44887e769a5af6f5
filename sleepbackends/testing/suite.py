"""The contract suite: one class to subclass, one method to write."""

from __future__ import annotations

from sleepbackends.testing.contract.faults import FaultTests
from sleepbackends.testing.contract.graphs import GraphTests
from sleepbackends.testing.contract.lifecycle import LifecycleTests
from sleepbackends.testing.contract.offload import OffloadTests
from sleepbackends.testing.contract.random_sequences import RandomSequenceTests
from sleepbackends.testing.contract.ranks import RankTests
from sleepbackends.testing.contract.selective import SelectiveTests
from sleepbackends.testing.contract.staging import StagingTests
from sleepbackends.testing.contract.threads import ThreadTests

MIXINS = {
    "lifecycle": LifecycleTests,
    "offload": OffloadTests,
    "selective": SelectiveTests,
    "staging": StagingTests,
    "faults": FaultTests,
    "threads": ThreadTests,
    "graphs": GraphTests,
    "ranks": RankTests,
    "random": RandomSequenceTests,
}
"""The parts of the suite by name, in the order in which they are run."""


class BackendContractTests(
    LifecycleTests,
    OffloadTests,
    SelectiveTests,
    StagingTests,
    FaultTests,
    ThreadTests,
    GraphTests,
    RankTests,
    RandomSequenceTests,
):
    """Everything the contract promises, for any backend.

    Subclass it in a test module and define ``make_backend``::

        class TestMyBackend(BackendContractTests):
            def make_backend(self, settings):
                return MyBackend(MyOptions(), settings)

    ``allocate`` and ``used_bytes`` may be overridden where the defaults do not fit, and what is
    assumed beyond the contract can be denied (``ContractFixtures`` has the list). Tests of
    abilities the backend does not claim are skipped, naming the flag.
    """
