"""Backends over a device's virtual memory, above the driver: what their users call.

A block of the ledger is an extent of the address space, with the bytes that were asked for
in it as its size. Extents come and go while torch allocates and frees, so the ledger is
brought up to date whenever a transition begins and ends, and whenever somebody looks.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import wait
from dataclasses import replace
from functools import partial

from sleepbackends.base import OptionsT
from sleepbackends.capabilities import IN_PROCESS
from sleepbackends.control import Control
from sleepbackends.errors import PolicyConflictError, RequestError
from sleepbackends.ledger import Block
from sleepbackends.policies import Policy
from sleepbackends.reports import Staged
from sleepbackends.residency import Residency
from sleepbackends.settings import BackendSettings
from sleepbackends.state import BackendState, check_tags
from sleepbackends.vmm.address_space import AddressSpace
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.mechanism import VmmMechanism
from sleepbackends.vmm.packing.packer import PackingMode
from sleepbackends.vmm.places import Store
from sleepbackends.vmm.shared_arena import SharedArena
from sleepbackends.vmm.sharing import Sharing
from sleepbackends.vmm.staging import Staging
from sleepbackends.vmm.verify import Verify

_BESIDE = ("stage", "share")
"""Operations that hold the transition lock in short steps."""

_STEP_S = 0.1
"""More than such a step takes."""


class VmmBackend(VmmMechanism[OptionsT]):
    """Memory of devices by tag, saved to host memory or a disk; see ``VmmMechanism``."""

    capabilities = replace(IN_PROCESS, supports_staging=True)

    def __init__(
        self,
        driver: Driver,
        space: AddressSpace,
        store: Store,
        verify: Verify = "off",
        packing: PackingMode = "off",
        options: OptionsT | None = None,
        settings: BackendSettings | None = None,
    ) -> None:
        super().__init__(driver, space, store, verify, packing, options, settings)
        self._followed = -1
        self._staging: Staging | None = None
        self._sharing: Sharing | None = None
        if isinstance(store, SharedArena):
            hold = partial(self._locked, "share", Control())
            self._sharing = Sharing(driver, store, self._copies, hold)

    # The ledger follows the address space

    def begin(self) -> None:
        """Hold the address space still and bring the ledger up to date."""
        self._space.begin()
        self._refresh()

    def end(self) -> None:
        """Let the address space go on, and account for what was freed meanwhile."""
        self._space.end()
        self._refresh()
        super().end()

    def _follow(self) -> None:
        """Bring the ledger up to date, unless a transition is going on: that does it itself.

        A step beside the engine is waited for, because it is short and would leave what was
        freed just now in the account.
        """
        if self._lock.try_acquire() or self._lock.try_acquire(self._patience_s()):
            try:
                self._refresh()
            finally:
                self._lock.release()

    def _patience_s(self) -> float:
        current = self._lock.current
        if current is None:  # just taken, or about to be free
            return _STEP_S
        beside = current.operation in _BESIDE and current.thread_id != threading.get_ident()
        return _STEP_S if beside else 0.0

    def _refresh(self) -> None:
        changes = self._space.changes()
        if changes == self._followed:
            return
        # One without live bytes could not be deleted yet; it belongs to nobody.
        extents = {e.address: e for e in self._space.extents() if e.live_bytes}
        for block in self.ledger.blocks():
            extent = extents.get(block.address)
            if extent is None or extent.id != block.extra.id:
                self.forget(block)
                self.ledger.remove(block)
                continue
            del extents[block.address]
            if extent != block.extra:
                block.size_bytes, block.extra = extent.live_bytes, extent
                self.ledger.add(block)
        for extent in extents.values():
            device = self.device_name(extent.device)
            self.ledger.add(
                Block(extent.address, extent.live_bytes, extent.tag, device=device, extra=extent)
            )
        self._followed = changes

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Sequence[Block]]:
        """Save as every mechanism here, and have what was saved shared where that is wanted."""
        yield from super().save(blocks, control)
        self._share()

    def _share(self) -> None:
        if self._sharing is not None:
            self._sharing.wake()

    # What users call

    def state(self) -> BackendState:
        """Return what is where; never waits and changes nothing.

        What was freed during a transition is counted until its end.
        """
        self._follow()
        return super().state()

    def trim(self) -> int:
        """Give room for saved bytes back that no tag asleep needs, whatever the policy.

        The next suspend has to make it ready again, which costs more than the copy, and to
        copy everything.

        Returns
        -------
        int
            How many bytes of host memory, or of a disk, were given back.
        """
        with self._driver.aside(), self._locked("trim", Control()):
            for block in self._spare([]):
                self.forget(block)
            return self._store.trim() + self._ring.trim()

    def host_copy(self, address: int, size_bytes: int) -> memoryview:
        """Return the saved bytes of memory that is asleep, read-only.

        The view is of the saved bytes themselves where they lie in one piece and are not packed,
        and shows them as long as the tag is asleep. Otherwise it is of a copy.

        Raises
        ------
        RequestError
            If the memory is not the backend's.
        PolicyConflictError
            If it is awake or was discarded, so that no bytes are saved.
        """
        with self._locked("host_copy", Control()):
            block = self._block_at(address)
            if block is None:
                raise RequestError(
                    f"{address:#x} is not in memory of this backend",
                    hint="is_managed(address) tells what is",
                )
            if not block.placement.owed:
                raise PolicyConflictError(
                    f"no bytes of tag {block.tag!r} are saved now: it is {block.residency.value}",
                    hint="suspend it with the policy 'offload' first",
                    tags=[block.tag],
                )
            return self._copies[block].view(address, size_bytes)

    def stage(
        self,
        tags: Collection[str] | None = None,
        *,
        background: bool = True,
        limit_gib_s: float = 2.0,
    ) -> Staging:
        """Make or refresh saved copies while the memory is in use; see ``StagingBackend``.

        Raises
        ------
        RequestError
            If the limit is not positive, or a tag is unknown; nothing changed.
        ClosedError
            If the backend was closed.
        """
        self._check_open()
        if not limit_gib_s > 0:
            raise RequestError(f"limit_gib_s must be more than 0, not {limit_gib_s}")
        policies, known = self.settings.policies, self.ledger.tags()
        if tags is None:
            tags = [tag for tag in known if policies.at(tag, 1) is Policy.OFFLOAD]
        wanted = check_tags(tags, known, "stage")
        self._end_staging()
        self._staging = Staging(
            *(self._driver, self._ring, self._packer, self._copies),
            partial(self._locked, "stage", Control()),
            *(partial(self._stageable, wanted), self._have_kernels),
            *(partial(self._prepare, at_ease=True), limit_gib_s),
        )
        self._staging.ended.add_done_callback(lambda _: self._share())
        return self._staging.start() if background else self._staging.run()

    def _end_staging(self) -> None:
        if self._staging is not None:
            self._staging.cancel()
            wait([self._staging.ended])

    def staged(self) -> Staged:
        """Tell what is saved of memory that is in use, and at which rate bytes were saved."""
        tags: Counter[str] = Counter()
        with self._locked("staged", Control()):
            for block in self._spare([]):
                tags[block.tag] += self._copies[block].known_bytes
        return Staged(
            tags=tags,
            copy_bytes_s=self._best_bytes_s or None,
            packing_ratio=self._packing_ratio,
        )

    def _stageable(self, tags: frozenset[str]) -> list[Block]:
        places = ((block, block.placement) for block in self.ledger.blocks(tags))
        return [block for block, place in places if place.mapped and not place.owed]

    def close(self) -> None:
        """Stop a staging and the sharing, then as for every backend."""
        self._end_staging()
        if self._sharing is not None:
            self._sharing.stop()
        super().close()

    def residency_at(self, address: int) -> Residency | None:
        """Tell where the byte at an address is; None if it is not in memory of this backend."""
        self._follow()
        block = self._block_at(address)
        return None if block is None else block.residency

    def _block_at(self, address: int) -> Block | None:
        """Return the block that an address lies in, gaps between its pieces included."""
        for block in self.ledger.blocks():
            if block.address <= address < block.address + block.extra.size_bytes:
                return block
        return None
