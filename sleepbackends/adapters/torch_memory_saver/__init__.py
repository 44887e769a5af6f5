"""The interface of torch_memory_saver 0.0.10, on the cumem backend.

Change one import, ``from torch_memory_saver import torch_memory_saver``, into::

    from sleepbackends.adapters.torch_memory_saver import torch_memory_saver

Memory of a region with ``enable_cpu_backup`` is offloaded by ``pause`` and comes back bit-exact;
any other is discarded. Where torch_memory_saver ends the process, an error is raised here and
nothing has changed. ``docs/with-torch-memory-saver.md`` lists every difference.
"""

from sleepbackends.adapters.torch_memory_saver.saver import TorchMemorySaver, configure_subprocess

__all__ = ["TorchMemorySaver", "configure_subprocess", "torch_memory_saver"]

# The one mutable thing of a whole process in this package: the interface is an object of this
# name that all importers share. It holds nothing until its first use.
torch_memory_saver = TorchMemorySaver()
"""What importers of torch_memory_saver use."""
