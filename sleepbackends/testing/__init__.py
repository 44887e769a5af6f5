"""Tools to prove a backend, shipped for authors of backends and of engines.

Needs the extra ``testing`` (pytest and hypothesis).
"""

from __future__ import annotations

from sleepbackends.testing.engine import FakeEngine
from sleepbackends.testing.faults import FaultInjector, InjectedFault
from sleepbackends.testing.memory import BufferMemory, ObservedMemory
from sleepbackends.testing.simulated import SimulatedBackend, SimulatedOptions
from sleepbackends.testing.suite import BackendContractTests

__all__ = [
    "BackendContractTests",
    "BufferMemory",
    "FakeEngine",
    "FaultInjector",
    "InjectedFault",
    "SimulatedBackend",
    "SimulatedOptions",
    "ObservedMemory",
]
