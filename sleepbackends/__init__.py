"""Give engine memory back by tag and take it again, at the same addresses.

An engine talks to one ``Orchestrator``; mechanisms sit behind the ``SleepModeBackend``
protocol and say what they can do. Importing this package loads neither torch nor a driver.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sleepbackends.availability import Availability
from sleepbackends.capabilities import Capabilities
from sleepbackends.control import Control, Progress
from sleepbackends.engine import EngineHooks
from sleepbackends.engine_state import EngineReport, EngineState, Status
from sleepbackends.errors import (
    BackendUnavailableError,
    BusyError,
    ClosedError,
    ConfigurationError,
    ContentsLostError,
    DeviceMemoryError,
    HookError,
    HostMemoryError,
    IncompatibleBackendError,
    InvalidLevelError,
    InvalidOptionsError,
    MechanismError,
    NoRoomError,
    NoUsableBackendError,
    PluginError,
    PolicyConflictError,
    RequestError,
    SleepBackendsError,
    StorageError,
    StorageFullError,
    SuspendedError,
    TransitionTimeoutError,
    UnknownBackendError,
    UnknownTagError,
    UnsupportedOperationError,
    WeightsFileError,
)
from sleepbackends.fallback import ReleaseStrategy
from sleepbackends.plan import Plan, TagPlan
from sleepbackends.policies import Policies, Policy, TagPolicy
from sleepbackends.protocol import API_VERSION, AllocatingBackend, SleepModeBackend
from sleepbackends.reports import (
    DiscardReport,
    FailureReport,
    ResumeReport,
    SuspendReport,
    TagChange,
    TransitionReport,
)
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.state import BackendState, TagState

if TYPE_CHECKING:
    from sleepbackends.base import BaseBackend
    from sleepbackends.config import SleepConfig, load_config
    from sleepbackends.hookspecs import BackendSpec, hookimpl
    from sleepbackends.ledger import Block
    from sleepbackends.mechanism import Fill
    from sleepbackends.orchestrator import Orchestrator
    from sleepbackends.registry import Registry

__version__ = "0.1.0"

__all__ = [
    "API_VERSION",
    "AllocatingBackend",
    "Availability",
    "BackendSettings",
    "BackendSpec",
    "BackendState",
    "BackendUnavailableError",
    "BaseBackend",
    "Block",
    "BusyError",
    "Capabilities",
    "ClosedError",
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
    "HookError",
    "HostMemoryError",
    "IncompatibleBackendError",
    "InvalidLevelError",
    "InvalidOptionsError",
    "MechanismError",
    "NoRoomError",
    "NoUsableBackendError",
    "Orchestrator",
    "Plan",
    "PluginError",
    "Policies",
    "Policy",
    "PolicyConflictError",
    "Progress",
    "Registry",
    "ReleaseStrategy",
    "RequestError",
    "Residency",
    "ResumeReport",
    "SleepBackendsError",
    "SleepConfig",
    "SleepModeBackend",
    "Status",
    "StorageError",
    "StorageFullError",
    "SuspendReport",
    "SuspendedError",
    "TagChange",
    "TagPlan",
    "TagPolicy",
    "TagState",
    "TransitionReport",
    "TransitionTimeoutError",
    "UnknownBackendError",
    "UnknownTagError",
    "UnsupportedOperationError",
    "WeightsFileError",
    "__version__",
    "hookimpl",
    "load_config",
]

# Loaded on first use: pydantic and pluggy take longer to import than all the rest together.
_LAZY = {
    "BackendSpec": "hookspecs",
    "BaseBackend": "base",
    "Block": "ledger",
    "Fill": "mechanism",
    "Orchestrator": "orchestrator",
    "Registry": "registry",
    "SleepConfig": "config",
    "hookimpl": "hookspecs",
    "load_config": "config",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
