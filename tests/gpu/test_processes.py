"""What depends on how the process was started, or on how it ends."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from .helpers import run_script

EXPANDABLE = """
import torch
from sleepbackends.cumem.backend import CumemBackend

NAMES = ("expandable_segments", "max_split_size", "garbage_collection_threshold")

def settings():
    found = torch.cuda.memory._snapshot()["allocator_settings"]
    return {name: found[name] for name in NAMES if name in found}

def expandable(tensor):
    for segment in torch.cuda.memory_snapshot():
        end = segment["address"] + segment["total_size"]
        if segment["address"] <= tensor.data_ptr() < end:
            return segment["is_expandable"]
    raise AssertionError("in no segment of torch's")

backend = CumemBackend()
before = settings()
assert before["expandable_segments"], before
assert before["max_split_size"] == 512 << 20, before
outside = torch.ones(40 << 20, device="cuda")
assert expandable(outside)
with backend.region("weights"):
    with backend.region("kv_cache"):
        inner = torch.full((40 << 20,), 2, device="cuda", dtype=torch.uint8)
        inside = settings()
    tensor = torch.arange(40 << 20, device="cuda", dtype=torch.int32)
    assert settings() == inside
    try:
        torch.empty(1 << 42, device="cuda", dtype=torch.uint8)
    except torch.OutOfMemoryError:
        pass
assert not inside["expandable_segments"], inside
assert {**inside, "expandable_segments": True} == {**before, "expandable_segments": True}
assert settings() == before
graph = torch.cuda.CUDAGraph()
with backend.graph_pool("cuda_graph") as pool, torch.cuda.graph(graph, pool=pool):
    result = outside + 1
assert settings() == before
assert backend.is_managed(tensor.data_ptr()) and not expandable(tensor)
assert backend.is_managed(inner.data_ptr()) and not expandable(inner)
assert backend.is_managed(result.data_ptr())
later = torch.ones(40 << 20, device="cuda")
assert expandable(later) and not backend.is_managed(later.data_ptr())
free = torch.cuda.mem_get_info()[0]
backend.suspend(1)
assert torch.cuda.mem_get_info()[0] - free > 200 << 20
assert (outside == 1).all() and (later == 1).all()
backend.resume()
assert torch.equal(tensor, torch.arange(40 << 20, device="cuda", dtype=torch.int32))
graph.replay()
assert (result == 2).all()
"""


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_expandable_segments_are_off_in_regions_alone(variable: str) -> None:
    """In a region the allocator is asked; every other setting and all other memory stay."""
    value = "expandable_segments:True,max_split_size_mb:512,garbage_collection_threshold:0.8"
    env: dict[str, str | None] = dict.fromkeys(("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    # Torch warns of the older name on standard error, which is not ours to keep clean.
    quiet = {"PYTHONWARNINGS": "ignore", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    run_script(EXPANDABLE, env={**env, **quiet, variable: value})


WORKSPACES = """
import gc, torch
from sleepbackends.cumem.backend import CumemBackend

backend = CumemBackend()
made = torch.randn(256, 256)
with backend.region("weights"):
    weights = made.cuda()
    product = weights @ weights
graph = torch.cuda.CUDAGraph()
given = made.cuda()
with backend.graph_pool("cuda_graph") as pool, torch.cuda.graph(graph, pool=pool):
    result = given @ given
graph.replay()
expected = result.clone()
backend.suspend(1)
other = made.cuda()
assert torch.allclose((other @ other).cpu(), made @ made, atol=1e-2)
again = torch.cuda.CUDAGraph()
with torch.cuda.graph(again):
    elsewhere = given @ given
again.replay()
assert torch.equal(elsewhere, expected)
backend.resume()
graph.replay()
assert torch.equal(result, expected)
assert torch.equal(product, weights @ weights)
del graph, result, weights, product
gc.collect()
torch.cuda.empty_cache()
assert all(tag.blocks == 0 for tag in backend.state().tags.values()), backend.state()
"""


def test_workspaces_of_libraries_do_not_stay_in_a_region() -> None:
    """What torch allocates once, at the first product, must not sleep with some tag."""
    run_script(WORKSPACES)


SETUP = """
import threading, torch
from sleepbackends.cumem.backend import CumemBackend
from sleepbackends import Orchestrator

backend = CumemBackend()
with backend.region("weights"):
    weights = [torch.ones(n << 20, device="cuda") for n in (1, 20, 100)]
with backend.region("kv_cache"):
    cache = torch.ones(64 << 20, device="cuda")
"""

ENDINGS = {
    "awake": "",
    "asleep": "backend.suspend(1)",
    "half": "backend.suspend(1); backend.resume(['kv_cache'])",
    "discarded": "backend.discard(['kv_cache'])",
    "closed": "backend.close()",
    "closed asleep": "backend.suspend(1); backend.close()",
    "orchestrator asleep": "orchestrator = Orchestrator(backend); orchestrator.sleep(1)",
    "tensors gone": "backend.suspend(1); weights.clear(); del cache",
    "backend gone": "del backend",
    "backend gone asleep": "backend.suspend(1); del backend",
    "cycle": "backend.suspend(1); weights.append((weights, backend)); cache.me = [cache]",
    "kernel running": "torch.cuda._sleep(10**9); weights[0].add_(1)",
    "graph": """
graph = torch.cuda.CUDAGraph()
with backend.graph_pool("cuda_graph") as pool, torch.cuda.graph(graph, pool=pool):
    result = weights[0] + 1
graph.replay()
""",
    "graph asleep": """
graph = torch.cuda.CUDAGraph()
with backend.graph_pool("cuda_graph") as pool, torch.cuda.graph(graph, pool=pool):
    result = weights[0] + 1
backend.suspend(1)
""",
    "region open": """
region = backend.region("weights")
region.__enter__()
more = torch.ones(64 << 20, device="cuda")
""",
    "thread in a region": """
inside = threading.Event()
def work():
    with backend.region("weights"):
        mine = torch.ones(64 << 20, device="cuda")
        inside.set()
        threading.Event().wait()
threading.Thread(target=work, daemon=True).start()
inside.wait()
""",
}


Processes = dict[str, Future[subprocess.CompletedProcess[str]]]


@pytest.fixture(scope="module")
def processes() -> Iterator[Processes]:
    """All of them, a few at a time: most of what they do is to start."""
    with ThreadPoolExecutor(4) as pool:
        yield {
            name: pool.submit(run_script, f"{SETUP}\n{code}\nprint('end of the script')")
            for name, code in ENDINGS.items()
        }


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_exits_cleanly(processes: Processes, ending: str) -> None:
    """Exit code 0 and nothing on standard error, whatever is alive."""
    assert processes[ending].result().stdout == "end of the script\n"
