"""An engine of two Ray actors whose memory sleeps and wakes together.

Each actor holds one shard of the weights and of the KV cache in a backend of its own. The
driver has the orchestrator: one call moves both, or neither. Where the actors run is up to
Ray. The exit code is 0 if every step is right.

::

    pip install 'sleepbackends[ray]'
    python examples/ray_engine.py
"""

from __future__ import annotations

import sys
from typing import Any

import ray

from sleepbackends import EngineHooks, Orchestrator, Rank, RayGroup
from sleepbackends.config import SleepConfig
from sleepbackends.ranks import Answer, Command
from sleepbackends.selection import open_backend

WORKERS = 2
WEIGHTS_BYTES, KV_BYTES = 16 << 20, 32 << 20


@ray.remote(num_cpus=0, concurrency_groups={"sleepbackends": 4})
class Worker:
    """One rank of the engine."""

    def __init__(self, number: int) -> None:
        backend: Any = open_backend(SleepConfig(backend="host")).backend
        with backend.region("weights") as region:
            self.weights = region.buffer(WEIGHTS_BYTES)
        self.weights[:] = bytes([number + 1]) * WEIGHTS_BYTES
        with backend.region("kv_cache") as region:
            self.kv_cache = region.buffer(KV_BYTES)
        self.expected = bytes(self.weights)
        self.rank = Rank(backend)

    @ray.method(concurrency_group="sleepbackends")
    def sleepbackends_rank(self, command: Command) -> Answer:
        """Pass on what the driver's group asks."""
        return self.rank.answer(command)

    def weights_are_right(self) -> bool:
        """Tell whether the weights are, bit by bit, what was loaded."""
        return bytes(self.weights) == self.expected


def main() -> int:
    """Sleep, wake, release the KV cache; check each step."""
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(num_cpus=WORKERS, include_dashboard=False, log_to_driver=False)
    try:
        workers = [Worker.remote(number) for number in range(WORKERS)]
        hooks = EngineHooks(drop_caches=lambda tags: print(f"dropped {sorted(tags)}"))
        with Orchestrator(RayGroup(workers), hooks=hooks) as orchestrator:
            report = orchestrator.sleep()
            for number, rank in report.steps[0].ranks.items():
                print(f"rank {number} gave back {rank.released_bytes >> 20} MiB")
            right = report.released_bytes == WORKERS * (WEIGHTS_BYTES + KV_BYTES)
            right &= orchestrator.wake_up().serving
            right &= all(ray.get([worker.weights_are_right.remote() for worker in workers]))
            released = orchestrator.release_kv_cache()
            print(f"KV cache: {released.released_bytes >> 20} MiB from {WORKERS} ranks")
            right &= released.released_bytes == WORKERS * KV_BYTES
            right &= orchestrator.wake_up().serving
    finally:
        if started_here:
            ray.shutdown()
    print("right" if right else "WRONG")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
