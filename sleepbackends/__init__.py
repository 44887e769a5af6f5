"""Give engine memory back by tag and take it again, at the same addresses.

An engine talks to one ``Orchestrator``; mechanisms sit behind the ``SleepModeBackend``
protocol and say what they can do. Importing this package loads neither torch nor a driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control, Progress
from sleepbackends.deprecation import Renamed, warn_deprecated
from sleepbackends.engine import EngineHooks
from sleepbackends.engine_state import EngineReport, EngineState, Status
from sleepbackends.errors import (
    BackendUnavailableError,
    BusyError,
    CheckpointError,
    CheckpointRefusedError,
    ClosedError,
    ConfigurationError,
    ContentsLostError,
    DeviceMemoryError,
    HelperError,
    HookError,
    HostMemoryError,
    IncompatibleBackendError,
    InvalidLevelError,
    InvalidOptionsError,
    LockTimeoutError,
    MechanismError,
    NoRoomError,
    NoUsableBackendError,
    PluginError,
    PolicyConflictError,
    ProcessLostError,
    RankLostError,
    RequestError,
    SleepBackendsError,
    StorageError,
    StorageFullError,
    SuspendedError,
    TransitionCancelledError,
    TransitionTimeoutError,
    UnknownBackendError,
    UnknownTagError,
    UnsupportedOperationError,
    WeightsFileError,
)
from sleepbackends.fallback import ReleaseStrategy
from sleepbackends.plan import Plan, TagPlan
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.protocol import (
    API_VERSION,
    AllocatingBackend,
    SleepModeBackend,
    Staging,
    StagingBackend,
)
from sleepbackends.reports import (
    DiscardReport,
    FailureReport,
    ResumeReport,
    Staged,
    StagingReport,
    SuspendReport,
    TagChange,
    TransitionReport,
)
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.sleep_state import SleepState
from sleepbackends.state import BackendState, TagState

if TYPE_CHECKING:
    from sleepbackends.aio import AsyncOrchestrator
    from sleepbackends.base import BaseBackend
    from sleepbackends.calls import Aftermath, Call, Outcome, aftermath_of
    from sleepbackends.composite import CompositeBackend
    from sleepbackends.config import SleepConfig, load_config
    from sleepbackends.hookspecs import BackendSpec, hookimpl
    from sleepbackends.ledger import Block
    from sleepbackends.mechanism import Fill
    from sleepbackends.metrics import Metrics
    from sleepbackends.observers import Observation
    from sleepbackends.orchestrator import Orchestrator
    from sleepbackends.ranks import (
        InProcessGroup,
        Rank,
        RankGroup,
        RayGroup,
        TorchDistributedGroup,
    )
    from sleepbackends.registry import Registry

__version__ = "0.1.0"
"""The version of this package."""

__all__ = [
    "API_VERSION",
    "Aftermath",
    "AllocatingBackend",
    "AsyncOrchestrator",
    "Availability",
    "BackendSettings",
    "BackendSpec",
    "BackendState",
    "BackendUnavailableError",
    "BaseBackend",
    "Block",
    "BusyError",
    "Call",
    "Capabilities",
    "CheckpointError",
    "CheckpointRefusedError",
    "ClosedError",
    "CompositeBackend",
    "ConfigurationError",
    "ContentsLostError",
    "Control",
    "DeviceMemoryError",
    "DiscardReport",
    "EngineHooks",
    "EngineReport",
    "EngineState",
    "FailureReport",
    "Fill",
    "HelperError",
    "HookError",
    "HostMemoryError",
    "InProcessGroup",
    "IncompatibleBackendError",
    "InvalidLevelError",
    "InvalidOptionsError",
    "LockTimeoutError",
    "MechanismError",
    "Metrics",
    "NoRoomError",
    "NoUsableBackendError",
    "Observation",
    "Orchestrator",
    "Outcome",
    "Plan",
    "PluginError",
    "Policies",
    "Policy",
    "PolicyConflictError",
    "ProcessLostError",
    "Progress",
    "Rank",
    "RankGroup",
    "RankLostError",
    "RayGroup",
    "Registry",
    "ReleaseStrategy",
    "RequestError",
    "Residency",
    "ResumeReport",
    "SleepBackendsError",
    "SleepConfig",
    "SleepModeBackend",
    "SleepState",
    "Staged",
    "Staging",
    "StagingBackend",
    "StagingReport",
    "Status",
    "StorageError",
    "StorageFullError",
    "SuspendReport",
    "SuspendedError",
    "TagChange",
    "TagPlan",
    "TagPolicy",
    "TagState",
    "TorchDistributedGroup",
    "TransitionCancelledError",
    "TransitionReport",
    "TransitionTimeoutError",
    "UnknownBackendError",
    "UnknownTagError",
    "UnsupportedOperationError",
    "WeightsFileError",
    "__version__",
    "aftermath_of",
    "hookimpl",
    "load_config",
]

# Loaded on first use: pydantic and pluggy take longer to import than all the rest together.
_LAZY = {
    "Aftermath": "calls",
    "AsyncOrchestrator": "aio",
    "BackendSpec": "hookspecs",
    "BaseBackend": "base",
    "Block": "ledger",
    "Call": "calls",
    "CompositeBackend": "composite",
    "Fill": "mechanism",
    "InProcessGroup": "ranks",
    "Metrics": "metrics",
    "Observation": "observers",
    "Orchestrator": "orchestrator",
    "Outcome": "calls",
    "Rank": "ranks",
    "RankGroup": "ranks",
    "RayGroup": "ranks",
    "Registry": "registry",
    "SleepConfig": "config",
    "TorchDistributedGroup": "ranks",
    "aftermath_of": "calls",
    "hookimpl": "hookspecs",
    "load_config": "config",
}

_RENAMED: dict[str, Renamed] = {}
"""Public names of earlier releases, which still work and warn."""


def __getattr__(name: str) -> Any:
    if name in _RENAMED:
        renamed = _RENAMED[name]
        warn_deprecated(
            f"{__name__}.{name}",
            instead=f"it is called {renamed.to} since {renamed.since}",
            removed_in=renamed.removed_in,
        )
        return __getattr__(renamed.to) if renamed.to in _LAZY else globals()[renamed.to]
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
