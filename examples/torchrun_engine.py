"""An engine of several processes whose memory sleeps and wakes together.

Each process holds one shard of the weights and of the KV cache in a backend of its own.
Either rank 0 commands and the others serve (``--style driver``), or every rank makes the same
calls (``--style spmd``). The exit code is 0 if every step is right.

::

    torchrun --standalone --nproc-per-node 2 examples/torchrun_engine.py
    torchrun --standalone --nproc-per-node 2 examples/torchrun_engine.py --style spmd
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import distributed

from sleepbackends import Orchestrator, TorchDistributedGroup
from sleepbackends.config import SleepConfig
from sleepbackends.selection import open_backend

WEIGHTS, KV = (1024, 1024), (4, 1024, 1024)
SHARD_BYTES, KV_BYTES = 4 << 20, 16 << 20


def say(text: str) -> None:
    """Write a line at once, because the ranks share the pipe."""
    sys.stdout.write(f"{text}\n")


def drive(group: TorchDistributedGroup, ranks: int) -> bool:
    """Sleep, wake, release the KV cache; tell whether each step did what it should."""
    orchestrator = Orchestrator(group)
    slept = orchestrator.sleep()
    if group.rank == 0:
        for number, rank in slept.steps[0].ranks.items():
            say(f"rank {number} gave back {rank.released_bytes >> 20} MiB")
    right = slept.released_bytes == ranks * (SHARD_BYTES + KV_BYTES)
    right &= orchestrator.wake_up().serving
    right &= orchestrator.release_kv_cache().released_bytes == ranks * KV_BYTES
    right &= orchestrator.wake_up().serving
    return right


def main() -> int:
    """Load one shard, take part in every transition, check the shard."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=False)
    parser.add_argument("--style", choices=["driver", "spmd"], default="driver")
    style = parser.parse_args().style
    distributed.init_process_group("gloo")  # an engine's own may be NCCL: ours is made beside it
    backend: Any = open_backend(SleepConfig(backend="host")).backend
    with backend.region("weights") as region:
        weights = region.empty(WEIGHTS, torch.float32)
    with backend.region("kv_cache") as region:
        kv_cache = region.empty(KV, torch.float32)
    weights.normal_(generator=torch.Generator().manual_seed(distributed.get_rank()))
    expected = weights.sum().item()

    group = TorchDistributedGroup(backend, style=style)
    right = True
    if style == "spmd" or group.rank == 0:
        right = drive(group, distributed.get_world_size())
        group.close()
    else:
        group.serve()
    right &= weights.sum().item() == expected
    right &= not kv_cache.any().item()
    say(f"rank {group.rank}: {'right' if right else 'WRONG'}")
    distributed.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
