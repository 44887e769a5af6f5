"""Which place for saved bytes the options ask for."""

from __future__ import annotations

from collections.abc import Callable

from sleepbackends.hostmemory.directory import choose_directory
from sleepbackends.vmm.arena import Arena
from sleepbackends.vmm.disk import DiskStore
from sleepbackends.vmm.driver import Driver
from sleepbackends.vmm.options import VmmOptions
from sleepbackends.vmm.places import Store
from sleepbackends.vmm.shared import SharedStore
from sleepbackends.vmm.shared_arena import SharedArena


def choose_store(options: VmmOptions) -> Callable[[Driver], Store]:
    """Return what opens the store for a driver, once its directory was found to do.

    Raises
    ------
    StorageError
        If saved bytes are to go to a disk, and the directory will not do.
    """
    if options.tier == "disk":
        directory = choose_directory(options.disk_directory, "disk_directory")
        return lambda driver: DiskStore(directory, options.retention)
    if options.share_copies:
        return lambda driver: SharedArena(
            driver, options.host_budget_bytes, SharedStore(options.share_directory)
        )
    return lambda driver: Arena(driver, options.host_budget_bytes, options.retention)
