"""One vLLM engine in this process, put through everything; prints what was found as JSON.

``python -m tests.gpu.vllm_scenarios MODEL_FOLDER SCENARIO``, as named at the end, because a
process can have one engine only. What it prints is the last line of standard output.
"""

from __future__ import annotations

import faulthandler
import hashlib
import json
import sys
from collections.abc import Callable
from typing import Any

import torch

from sleepbackends.adapters.vllm.engine import release_kv_cache, restore_kv_cache

from .helpers import GIB, MIB, let_go, neighbour

KV_BYTES = 3 * GIB
SLACK = 256 * MIB
CYCLES = 50
STALLED_S = 150.0
"""When to say where all threads are, should something wait for ever."""
ALL = {"weights", "kv_cache"}
PROMPTS = [[1, *(31 * i * (row + 3) % 509 + 3 for i in range(12))] for row in range(8)]


def checksum(worker: Any) -> str:
    """Hash all parameters and buffers of a worker's model."""
    digest = hashlib.sha256()
    model = worker.model_runner.get_model()
    for _, tensor in sorted([*model.named_parameters(), *model.named_buffers()]):
        flat = tensor.detach().cpu().reshape(-1)  # scales have no dimension
        digest.update(flat.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def free_bytes() -> int:
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


class Checks:
    """An engine, and what is found about it."""

    def __init__(self, folder: str, graphs: bool) -> None:
        from vllm import LLM, SamplingParams

        options: dict[str, Any] = {"enforce_eager": True}
        if graphs:
            compilation = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
            options = {"compilation_config": compilation}
        self.llm = LLM(
            model=folder,
            skip_tokenizer_init=True,
            enable_sleep_mode=True,
            dtype="bfloat16",
            max_model_len=256,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            gpu_memory_utilization=0.05,
            kv_cache_memory_bytes=KV_BYTES,
            seed=0,
            generation_config="vllm",
            **options,
        )
        self.params = SamplingParams(
            temperature=0, max_tokens=16, ignore_eos=True, detokenize=False
        )
        self.found: dict[str, Any] = {}
        self.expected = self.tokens()
        self.note("the model computes the same twice", self.tokens() == self.expected)

    def note(self, what: str, found: bool) -> None:
        # Noted more than once, it has to hold each time.
        self.found[what] = self.found.get(what, True) and found

    def tokens(self) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
        outputs = self.llm.generate(prompts, self.params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def status(self) -> dict[str, Any]:
        (status,) = self.llm.collective_rpc("sleepbackends_status")
        found: dict[str, Any] = status
        return found

    def asleep(self) -> set[str]:
        tags = self.status()["tags"].items()
        return {t for t, b in tags if b["offloaded_bytes"] or b["discarded_bytes"]}

    def same(self, what: str) -> None:
        self.note(f"tokens are equal after {what}", self.tokens() == self.expected)

    def cycles(self) -> None:
        asleep_free = []
        for _ in range(CYCLES):
            awake_free = free_bytes()
            self.llm.sleep(level=1)
            asleep_free.append(free_bytes())
            released = asleep_free[-1] - awake_free
            self.note("a sleep releases the KV cache and more", released > KV_BYTES)
            self.note("all is asleep", self.asleep() >= ALL)
            self.llm.wake_up()
            self.same("sleep(1) and wake_up()")
        drift = max(asleep_free[1:]) - min(asleep_free[1:])
        self.note("cycles leave nothing behind", drift < SLACK)

    def parts(self) -> None:
        for order in (["weights", "kv_cache"], ["kv_cache", "weights"]):
            self.llm.sleep(level=1)
            self.llm.wake_up(tags=order[:1])
            self.note(f"{order[1]} is left asleep", self.asleep() == {order[1]})
            self.llm.wake_up(tags=order[1:])
            self.same(f"waking {order[0]} first")
        self.llm.sleep(level=1)
        self.llm.wake_up(tags=["weights"])
        self.llm.wake_up()
        self.same("waking a part, then everything")

    def level_2(self) -> None:
        for order in (["weights", "kv_cache"], ["kv_cache", "weights"]):
            self.llm.sleep(level=2)
            for tag in order:
                self.llm.wake_up(tags=[tag])
                if tag == "weights":
                    self.llm.collective_rpc("reload_weights")
            self.llm.collective_rpc("sleepbackends_mark_valid", args=(["weights"],))
            self.same(f"sleep(2), waking {order[0]} first, reload")

    def release(self) -> None:
        before, hashed = free_bytes(), self.llm.collective_rpc(checksum)
        release_kv_cache(self.llm)
        self.note("only the KV cache is asleep", self.asleep() == {"kv_cache"})
        self.note("a release gives its memory back", free_bytes() - before > KV_BYTES - SLACK)
        self.note("the weights are intact", self.llm.collective_rpc(checksum) == hashed)
        restore_kv_cache(self.llm)
        self.same("releasing the KV cache")
        release_kv_cache(self.llm)
        self.llm.sleep(level=1)
        self.llm.wake_up()
        self.same("sleeping after a release")

    def no_room(self) -> None:
        self.llm.sleep(level=1)
        before = self.status()["tags"]
        with neighbour(leave_bytes=GIB) as process:
            for _ in range(2):
                self.note("waking up without room raises", raises(self.llm.wake_up))
                self.note("and changes nothing", self.status()["tags"] == before)
            let_go(process)
        self.llm.wake_up()
        self.same("waking up without room, and with it")

    def weights_unchanged(self, hashed: Any) -> None:
        self.note("the weights are what they were", self.llm.collective_rpc(checksum) == hashed)


def raises(call: Callable[[], object]) -> bool:
    try:
        call()
    except Exception:  # noqa: BLE001 - from another process it is a plain Exception
        return True
    return False


def everything(folder: str, graphs: bool) -> dict[str, Any]:
    checks = Checks(folder, graphs)
    status = checks.status()
    checks.note("the backend is cumem", status["backend"] == "cumem")
    checks.note("the KV cache is ours", status["tags"]["kv_cache"]["resident_bytes"] >= KV_BYTES)
    checks.note("the weights are ours", status["tags"]["weights"]["resident_bytes"] > 0)
    hashed = checks.llm.collective_rpc(checksum)
    checks.cycles()
    checks.parts()
    checks.weights_unchanged(hashed)
    checks.release()
    checks.no_room()
    checks.weights_unchanged(hashed)
    checks.level_2()
    return checks.found


def foreign(folder: str) -> dict[str, Any]:
    """Ours cannot be used: vLLM's own allocator and its own sleep."""
    checks = Checks(folder, graphs=False)
    from vllm.device_allocator.cumem import CuMemAllocator

    checks.note("the allocator is vLLM's", type(CuMemAllocator.instance) is CuMemAllocator)
    checks.llm.sleep(level=1)
    checks.llm.wake_up()
    checks.same("vLLM's own sleep(1) and wake_up()")
    return checks.found


def child(folder: str) -> dict[str, Any]:
    """The engine is in a process of its own, started by vLLM."""
    checks = Checks(folder, graphs=False)
    checks.note("the backend is cumem", checks.status()["backend"] == "cumem")
    checks.llm.sleep(level=1)
    checks.note("all is asleep", checks.asleep() >= ALL)
    checks.llm.wake_up()
    checks.same("sleep(1) and wake_up()")
    release_kv_cache(checks.llm)
    checks.note("only the KV cache is asleep", checks.asleep() == {"kv_cache"})
    restore_kv_cache(checks.llm)
    checks.same("releasing the KV cache")
    return checks.found


def process(folder: str) -> dict[str, Any]:
    """cumem over a process checkpoint: the engine holds nothing while it is asleep."""
    from sleepbackends.checkpoint.device_memory import DeviceMonitor
    from sleepbackends.checkpoint.driver import CheckpointDriver
    from sleepbackends.checkpoint.measuring import OutsideMonitor

    monitor = OutsideMonitor()
    device = DeviceMonitor().devices[0]
    before = monitor.measure([device])[device].used_bytes
    checks = Checks(folder, graphs=True)
    checks.note("the backend is both", checks.status()["backend"] == "cumem+checkpoint")
    checks.note("it is the device", CheckpointDriver().devices_in_use()[:1] == [device])
    for _ in range(3):
        checks.llm.sleep(level=1)
        checks.note("all is asleep", checks.asleep() >= {*ALL, "process"})
        used = monitor.measure([device])[device].used_bytes
        checks.note("the engine holds nothing on the device", used - before < 8 * MIB)
        checks.llm.wake_up()
        checks.same("a sleep of the process")
    checks.llm.sleep(level=1)
    checks.llm.wake_up(tags=["weights"])
    checks.note("the KV cache is left asleep", checks.asleep() == {"kv_cache"})
    checks.llm.wake_up(tags=["kv_cache"])
    checks.same("a sleep of the process, woken in parts")
    release_kv_cache(checks.llm)
    checks.note("only the KV cache is asleep", checks.asleep() == {"kv_cache"})
    restore_kv_cache(checks.llm)
    checks.same("releasing the KV cache")
    return checks.found


def main(folder: str, scenario: str) -> None:
    faulthandler.dump_traceback_later(STALLED_S, repeat=True)
    scenarios: dict[str, Callable[[str], dict[str, Any]]] = {
        "eager": lambda folder: everything(folder, graphs=False),
        "graphs": lambda folder: everything(folder, graphs=True),
        "child": child,
        "foreign": foreign,
        "process": process,
    }
    found = scenarios[scenario](folder)
    sys.stdout.write(f"\n{json.dumps(found)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
