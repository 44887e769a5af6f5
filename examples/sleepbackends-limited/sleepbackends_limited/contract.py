"""The contract suite for the limited backend: a wrapper keeps every promise of what it wraps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from sleepbackends.testing import InstalledBackendTests


class LimitedTests(InstalledBackendTests):
    """The suite, with limits that nothing in it meets."""

    backend_name = "limited"
    options: ClassVar[Mapping[str, Any]] = {
        "inner": "host",
        "max_saved_bytes": 1 << 40,
        "max_mapped_bytes": 1 << 40,
    }
