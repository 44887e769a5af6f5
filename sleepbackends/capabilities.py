"""What a backend can do, as data.

Every flag is a fact, False unless the backend says otherwise, has a reader in the
orchestrator, and is checked both ways by the shipped contract suite. Names that vLLM's
``SleepModeBackend`` already has are kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Capabilities:
    """Facts about one backend instance on this machine, after probing.

    Parameters
    ----------
    supports_selective_release : bool
        ``discard(tags)`` releases the named tags and leaves the rest resident.
    supports_selective_resume : bool
        ``resume(tags)`` brings back the named tags alone.
    supports_offload : bool
        A suspend can keep contents: what the policy offloads comes back bit-exact.
    preserves_addresses : bool
        Memory comes back at the addresses it had.
    preserves_communicators : bool
        Communicators (NCCL, oneCCL) survive a suspend and resume.
    preserves_compiled_artifacts : bool
        Compiled kernels and modules survive.
    preserves_graphs_with_communicators : bool
        Captured graphs that contain collectives replay after a resume.
    supports_staging : bool
        ``stage(tags)`` copies contents while they are in use, so that a suspend has less
        left to copy.
    supports_durable_storage : bool
        What a suspend keeps can survive the end of this process.
    releases_device_context : bool
        The device context itself is given back, not only allocations.
    owns_allocations : bool
        Memory is allocated through the backend, by tag. A process-level backend does
        not and takes everything the process holds.
    """

    supports_selective_release: bool = False
    supports_selective_resume: bool = False
    supports_offload: bool = False
    preserves_addresses: bool = False
    preserves_communicators: bool = False
    preserves_compiled_artifacts: bool = False
    preserves_graphs_with_communicators: bool = False
    supports_staging: bool = False
    supports_durable_storage: bool = False
    releases_device_context: bool = False
    owns_allocations: bool = False

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """List the flags, in the order of the documentation."""
        return tuple(field.name for field in fields(cls))

    def supported(self) -> tuple[str, ...]:
        """List the flags that are True."""
        return tuple(name for name in self.names() if getattr(self, name))

    def missing(self, required: Iterable[str]) -> tuple[str, ...]:
        """List which of the required flags are False.

        Raises
        ------
        AttributeError
            If a required name is not a flag.
        """
        return tuple(name for name in required if not getattr(self, name))


IN_PROCESS = Capabilities(
    supports_selective_release=True,
    supports_selective_resume=True,
    supports_offload=True,
    preserves_addresses=True,
    preserves_communicators=True,
    preserves_compiled_artifacts=True,
    preserves_graphs_with_communicators=True,
    owns_allocations=True,
)
"""What memory that is unmapped and mapped again inside one process can promise."""


def combined(outer: Capabilities, inner: Capabilities) -> Capabilities:
    """Compute what two backends can do together.

    Tags are the outer one's business; what survives has to survive both.
    """
    return Capabilities(
        supports_selective_release=outer.supports_selective_release,
        supports_selective_resume=outer.supports_selective_resume,
        supports_offload=outer.supports_offload and inner.supports_offload,
        preserves_addresses=outer.preserves_addresses and inner.preserves_addresses,
        preserves_communicators=outer.preserves_communicators and inner.preserves_communicators,
        preserves_compiled_artifacts=outer.preserves_compiled_artifacts
        and inner.preserves_compiled_artifacts,
        preserves_graphs_with_communicators=outer.preserves_graphs_with_communicators
        and inner.preserves_graphs_with_communicators,
        supports_staging=outer.supports_staging,
        supports_durable_storage=inner.supports_durable_storage,
        releases_device_context=outer.releases_device_context or inner.releases_device_context,
        owns_allocations=outer.owns_allocations,
    )
