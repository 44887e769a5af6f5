"""The ways to have n ranks: in processes, in Ray actors, in threads, or in one backend."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.scaling.rank import Worker, make_backend
from benchmarks.scaling.spec import ROOT, Spec

GRACE_S = 10.0
END_S = 30.0
"""How long processes may take to end by themselves, all of them together."""

POLL_S = 0.1

Ask = Callable[[Sequence[int], str, Sequence[Any]], list[Any]]
"""Has some ranks do something, all at once, and returns what each of them returned."""


class Ranks:
    """Ranks, and the backend that is made of them.

    Parameters
    ----------
    group : Any
        What an orchestrator drives.
    count : int
        How many ranks there are.
    ask : callable
        The way to them.
    in_processes : bool
        Whether one can be killed without the others.
    """

    def __init__(self, group: Any, count: int, ask: Ask, *, in_processes: bool) -> None:
        self.group = group
        self.count = count
        self.in_processes = in_processes
        self._ask = ask

    def call(self, what: str, *arguments: Any) -> list[Any]:
        """Have all ranks do something at once, and return what each of them returned."""
        return self._ask(range(self.count), what, arguments)

    def call_on(self, rank: int, what: str, *arguments: Any) -> Any:
        """Have one rank do something, and return what it returned."""
        return self._ask([rank], what, arguments)[0]


def _answer(worker: Worker, what: str, arguments: Sequence[Any]) -> tuple[Any, str]:
    try:
        return worker.do(what, *arguments), ""
    except Exception as error:  # noqa: BLE001 - told to whoever asked, in another process
        return None, f"{type(error).__name__}: {error}"


def _results(answers: Sequence[tuple[Any, str]]) -> list[Any]:
    problems = [f"rank {n}: {problem}" for n, (_, problem) in enumerate(answers) if problem]
    if problems:
        raise RuntimeError("; ".join(problems))
    return [result for result, _ in answers]


# In this process


@contextmanager
def _local(group: Any, workers: Sequence[Worker]) -> Iterator[Ranks]:
    with ThreadPoolExecutor(len(workers)) as pool:

        def ask(ranks: Sequence[int], what: str, arguments: Sequence[Any]) -> list[Any]:
            asked = [pool.submit(workers[rank].do, what, *arguments) for rank in ranks]
            return [each.result() for each in asked]

        yield Ranks(group, len(workers), ask, in_processes=False)
    group.close()


@contextmanager
def threads(spec: Spec) -> Iterator[Ranks]:
    """Have a backend for each GPU, in this process."""
    from sleepbackends.ranks import InProcessGroup

    workers = [Worker(spec, rank, rank, make_backend(spec)) for rank in range(spec.ranks)]
    backends = [worker.backend for worker in workers]
    group = InProcessGroup(backends, timeout_s=spec.timeout_s, grace_s=GRACE_S)
    with _local(group, workers) as ranks:
        yield ranks


@contextmanager
def single(spec: Spec) -> Iterator[Ranks]:
    """Have one backend for all GPUs, in this process."""
    backend = make_backend(spec)
    workers = [
        Worker(spec, rank, rank, backend, owns_backend=not rank) for rank in range(spec.ranks)
    ]
    with _local(backend, workers) as ranks:
        yield ranks


# In processes of a gloo group


@contextmanager
def processes(spec: Spec) -> Iterator[Ranks]:
    """Have a process for each GPU; this one is rank 0."""
    from torch import distributed

    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="sleepbackends-scale-"))
        rendezvous = str(Path(folder) / "rendezvous")
        others: list[subprocess.Popen[bytes]] = []
        # Whoever is still there by then waits for what will not come.
        stack.callback(_end, others, 0.0)
        others.extend(_start(spec, rank, rendezvous) for rank in range(1, spec.ranks))
        with _all_there(others):
            worker, group = _join(spec, 0, rendezvous)

        def ask(ranks: Sequence[int], what: str, arguments: Sequence[Any]) -> list[Any]:
            answers = _together(worker, spec, (list(ranks), what, list(arguments)))
            return _results([answers[rank] for rank in ranks])

        yield Ranks(group, spec.ranks, ask, in_processes=True)
        complete = len(group.ranks) == spec.ranks and not group.lost_ranks
        if complete:
            distributed.broadcast_object_list([None])
        group.close()
        if complete:
            distributed.destroy_process_group()
            _end(others, END_S)


def _start(spec: Spec, rank: int, rendezvous: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "benchmarks.scale", "--rank", str(rank), rendezvous]
    return subprocess.Popen(  # noqa: S603 - runs a module of ours
        [*command, spec.to_json()], stdin=subprocess.DEVNULL, cwd=ROOT
    )


@contextmanager
def _all_there(others: Sequence[subprocess.Popen[bytes]]) -> Iterator[None]:
    """End this process if one of the others ends meanwhile: it would be waited for, for ever."""
    over = threading.Event()

    def watch() -> None:
        while not over.wait(POLL_S):
            for rank, process in enumerate(others, 1):
                if process.poll() is not None:
                    said = f"rank {rank} ended with exit code {process.returncode} at the start"
                    print(said, file=sys.stderr, flush=True)
                    os._exit(1)  # the thread that waits cannot be interrupted

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        over.set()
        watching.join()


def _end(processes: Sequence[subprocess.Popen[bytes]], patience_s: float) -> None:
    """Wait for processes to end, and kill those that have not by then."""
    give_up = time.monotonic() + patience_s
    for process in processes:
        try:
            process.wait(max(0.0, give_up - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    for process in processes:
        process.wait()


def _join(spec: Spec, rank: int, rendezvous: str) -> tuple[Worker, Any]:
    from torch import distributed

    from sleepbackends.ranks import TorchDistributedGroup

    distributed.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=rank,
        world_size=spec.ranks,
        timeout=timedelta(seconds=10 * spec.timeout_s),
    )
    worker = Worker(spec, rank, rank, make_backend(spec))
    group = TorchDistributedGroup(worker.backend, timeout_s=spec.timeout_s, grace_s=GRACE_S)
    return worker, group


def _together(worker: Worker, spec: Spec, message: Any) -> list[Any]:
    """Tell all ranks, from rank 0, or hear what it tells; return all answers, or nothing."""
    from torch import distributed

    box = [message]
    distributed.broadcast_object_list(box, src=0)
    if box[0] is None:
        return []
    ranks, what, arguments = box[0]
    mine = _answer(worker, what, arguments) if distributed.get_rank() in ranks else (None, "")
    answers: list[Any] = [None] * spec.ranks
    distributed.all_gather_object(answers, mine)
    return answers


def serve(spec: Spec, rank: int, rendezvous: str) -> None:
    """Be a rank other than 0, until rank 0 has done."""
    from torch import distributed

    worker, group = _join(spec, rank, rendezvous)
    while _together(worker, spec, None):
        pass
    group.serve()
    distributed.destroy_process_group()


# In Ray actors


@contextmanager
def actors(spec: Spec) -> Iterator[Ranks]:
    """Have a Ray actor for each GPU; this process only coordinates."""
    import ray

    from sleepbackends.ranks import RayGroup

    gpus = 1 if spec.on_gpus else 0
    started_here = not ray.is_initialized()
    if started_here:
        ray.init(
            runtime_env={"env_vars": {"PYTHONPATH": str(ROOT)}},
            num_cpus=spec.ranks,
            num_gpus=gpus * spec.ranks,
            include_dashboard=False,
            log_to_driver=False,
        )
    make: Any = ray.remote  # its types know nothing of concurrency groups
    place = make(num_cpus=0, num_gpus=gpus, concurrency_groups={"sleepbackends": 4})
    actor = place(_actor_class(ray))
    made = [actor.remote(spec, rank) for rank in range(spec.ranks)]
    try:
        group = RayGroup(made, timeout_s=spec.timeout_s, grace_s=GRACE_S)

        def ask(ranks: Sequence[int], what: str, arguments: Sequence[Any]) -> list[Any]:
            asked = [made[rank].do.remote(what, list(arguments)) for rank in ranks]
            return _results(ray.get(asked))

        yield Ranks(group, spec.ranks, ask, in_processes=True)
        group.close()
    finally:
        for each in made:
            ray.kill(each)
        if started_here:
            ray.shutdown()


def _actor_class(ray: Any) -> type:
    from sleepbackends.ranks import Answer, Command, Rank

    class Actor:
        def __init__(self, spec: Spec, rank: int) -> None:
            # Ray shows each actor its own GPU and no other.
            self._worker = Worker(spec, rank, 0, make_backend(spec))
            self._rank = Rank(self._worker.backend)

        @ray.method(concurrency_group="sleepbackends")  # type: ignore[untyped-decorator,unused-ignore]
        def sleepbackends_rank(self, command: Command) -> Answer:
            return self._rank.answer(command)

        def do(self, what: str, arguments: Sequence[Any]) -> tuple[Any, str]:
            return _answer(self._worker, what, arguments)

    return Actor


WAYS: Mapping[str, Callable[[Spec], Any]] = {
    "processes": processes,
    "ray": actors,
    "threads": threads,
    "single": single,
}


def open_ranks(spec: Spec) -> Any:
    """Return the scope in which the ranks are there."""
    return partial(WAYS[spec.layout], spec)()
