"""Which host memory is near which device, on machines with several NUMA nodes.

A copy between a device and memory of another node goes through the link between the
processors, which all devices share. On a machine with one node nothing is asked and nothing
is done.
"""

from __future__ import annotations

from sleepbackends.errors import SleepBackendsError
from sleepbackends.hostmemory import numa
from sleepbackends.vmm.driver import Driver


class Near:
    """Tells the node of a device, and has threads run there while they touch memory for it.

    Parameters
    ----------
    driver : Driver
        Tells where the devices are attached.
    """

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        nodes = numa.nodes()
        self._cpus = nodes if len(nodes) > 1 else {}
        self._anywhere = frozenset[int]().union(*self._cpus.values())
        self._known: dict[int, int | None] = {}

    def node(self, device: int) -> int | None:
        """Return the node that memory for a device should be on; None if any will do."""
        if not self._cpus:
            return None
        if device not in self._known:
            self._known[device] = self._find(device)
        return self._known[device]

    def go(self, node: int | None) -> None:
        """Have this thread run on a node, or anywhere; where that is refused, it stays."""
        if self._cpus:
            numa.run_on(self._anywhere if node is None else self._cpus[node])

    def _find(self, device: int) -> int | None:
        try:
            address = self._driver.pci_address(device)
        except SleepBackendsError:  # its memory can be saved anywhere
            return None
        node = None if address is None else numa.node_of(address)
        return node if node in self._cpus else None
