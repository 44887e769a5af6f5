"""Tools to prove a backend, shipped for authors of backends and of engines.

``SimulatedDevice``, ``SimulatedBackend``, ``FaultInjector`` and ``FakeEngine`` need nothing but
this package; the contract suite needs the extra ``testing`` (pytest and hypothesis).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sleepbackends.testing.contract.faults import FaultTests
    from sleepbackends.testing.contract.fixtures import ContractFixtures
    from sleepbackends.testing.contract.graphs import GraphTests
    from sleepbackends.testing.contract.lifecycle import LifecycleTests
    from sleepbackends.testing.contract.offload import OffloadTests
    from sleepbackends.testing.contract.random_sequences import RandomSequenceTests
    from sleepbackends.testing.contract.ranks import RankTests
    from sleepbackends.testing.contract.selective import SelectiveTests
    from sleepbackends.testing.contract.staging import StagingTests
    from sleepbackends.testing.contract.threads import ThreadTests
    from sleepbackends.testing.device import HeldCall, InjectedFault, SimulatedDevice
    from sleepbackends.testing.engine import FakeEngine
    from sleepbackends.testing.faults import FaultInjector, hold_step
    from sleepbackends.testing.installed import InstalledBackendTests
    from sleepbackends.testing.memory import BufferMemory, ObservedMemory, RecordingMemory
    from sleepbackends.testing.promises import SUITE_VERSION, BrokenPromise, Promise
    from sleepbackends.testing.simulated import SimulatedBackend, SimulatedOptions
    from sleepbackends.testing.suite import BackendContractTests

__all__ = [
    "SUITE_VERSION",
    "BackendContractTests",
    "BrokenPromise",
    "BufferMemory",
    "ContractFixtures",
    "FakeEngine",
    "FaultInjector",
    "FaultTests",
    "GraphTests",
    "HeldCall",
    "InjectedFault",
    "InstalledBackendTests",
    "LifecycleTests",
    "ObservedMemory",
    "OffloadTests",
    "Promise",
    "RandomSequenceTests",
    "RankTests",
    "RecordingMemory",
    "SelectiveTests",
    "SimulatedBackend",
    "SimulatedDevice",
    "SimulatedOptions",
    "StagingTests",
    "ThreadTests",
    "hold_step",
]

# Loaded on first use: pytest imports this package wherever it is installed, for its plugin, and
# hypothesis may be missing there.
_MODULES = {
    "SUITE_VERSION": "promises",
    "BackendContractTests": "suite",
    "BrokenPromise": "promises",
    "BufferMemory": "memory",
    "ContractFixtures": "contract.fixtures",
    "FakeEngine": "engine",
    "FaultInjector": "faults",
    "FaultTests": "contract.faults",
    "GraphTests": "contract.graphs",
    "HeldCall": "device",
    "InjectedFault": "device",
    "InstalledBackendTests": "installed",
    "LifecycleTests": "contract.lifecycle",
    "ObservedMemory": "memory",
    "OffloadTests": "contract.offload",
    "Promise": "promises",
    "RandomSequenceTests": "contract.random_sequences",
    "RankTests": "contract.ranks",
    "RecordingMemory": "memory",
    "SelectiveTests": "contract.selective",
    "SimulatedBackend": "simulated",
    "SimulatedDevice": "device",
    "SimulatedOptions": "simulated",
    "StagingTests": "contract.staging",
    "ThreadTests": "contract.threads",
    "hold_step": "faults",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
