"""One release of vLLM in this process: its own code for sleep mode, stand-ins around it.

Small modules are imported as they are. Of large ones the methods under test are taken out and
compiled alone, with what they name handed to them; a name that is not provided, or a method that
is gone, fails the test.
"""

from __future__ import annotations
import __future__

import ast
import gc
import logging
import os
import re
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from fnmatch import filter as fnmatch_filter
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class Platform:
    """What the platform is; a test may change it."""

    kind = "cuda"

    def graph_pool_handle(self) -> tuple[int, int]:
        return 1, 1

    def is_cuda(self) -> bool:
        return self.kind == "cuda"

    def is_cuda_alike(self) -> bool:
        return self.kind in ("cuda", "rocm")

    def is_rocm(self) -> bool:
        return self.kind == "rocm"

    def is_xpu(self) -> bool:
        return self.kind == "xpu"

    def is_cpu(self) -> bool:
        return self.kind == "cpu"

    def register_triton_kernel_overrides(self) -> None: ...


def forget() -> None:
    """Forget all modules of vLLM, and ours that inherits from one of them."""
    ours = "sleepbackends.adapters.vllm.sleep_backend"
    for name in [name for name in sys.modules if name == ours or name.split(".")[0] == "vllm"]:
        del sys.modules[name]


@cache
def _parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


class Logger(logging.LoggerAdapter):  # type: ignore[type-arg]
    """A logger with vLLM's additions."""

    def warning_once(self, message: str, *args: object) -> None:
        self.info(message, *args)


class ReleasedVllm:
    """The code of one release.

    Parameters
    ----------
    version : str
        Which one.
    root : Path
        The folder that holds its files.
    patch : MonkeyPatch
        Ends with the test.
    """

    def __init__(self, version: str, root: Path, patch: pytest.MonkeyPatch) -> None:
        self.version = version
        self.root = root
        self.platform = Platform()
        forget()
        self._patch = patch
        self.stand_in("vllm", __version__=version, __path__=[str(root / "vllm")])
        self.stand_in("vllm.logger", init_logger=self.logger)
        self.stand_in("vllm.platforms", current_platform=self.platform)
        self.stand_in("vllm.envs", VLLM_PLUGINS=None, VLLM_FLOAT32_MATMUL_PRECISION="highest")
        self.stand_in("vllm.ir", set_default_torch_wrap=lambda _: None)
        self.stand_in("vllm.utils", __path__=[])
        self.stand_in("vllm.utils.system_utils", find_loaded_library=lambda _: "none.so")
        utils = self.stand_in("vllm.utils.torch_utils", PIN_MEMORY=False)
        if version == "0.26.0":
            question = "is_quantized_kv_cache"
            setattr(utils, question, self.function("vllm/utils/torch_utils.py", question))
        # The native part of vLLM's own allocator: to be called is to fail.
        self.stand_in(
            "vllm.cumem_allocator",
            init_module=None,
            python_create_and_map=None,
            python_unmap_and_release=None,
        )
        communicators = "vllm.distributed.device_communicators"
        self.stand_in("vllm.distributed", __path__=[])
        self.stand_in(communicators, __path__=[])
        self.stand_in(f"{communicators}.cuda_wrapper", CudaRTLibrary=object)
        self.graph_pool_ids: list[object] = []
        self.stand_in(
            f"{communicators}.pynccl_allocator", set_graph_pool_id=self.graph_pool_ids.append
        )
        elastic = "vllm.distributed.elastic_ep"
        self.stand_in(elastic, __path__=[])
        self.stand_in(f"{elastic}.elastic_execute", ElasticEPScalingExecutor=_Elastic)

    @staticmethod
    def logger(name: str) -> Logger:
        return Logger(logging.getLogger(name), {})

    def stand_in(self, name: str, **attributes: Any) -> ModuleType:
        """Put a module with these attributes in the place of one of vLLM's."""
        module = ModuleType(name)
        vars(module).update(attributes)
        self._patch.setitem(sys.modules, name, module)
        parent, _, last = name.rpartition(".")
        if parent in sys.modules:
            setattr(sys.modules[parent], last, module)
        return module

    def tree(self, file: str) -> ast.Module:
        """Parse one of its files."""
        return _parsed(self.root / file)

    def class_tree(self, file: str, name: str) -> ast.ClassDef:
        """Parse one class of it."""
        (found,) = [
            node
            for node in self.tree(file).body
            if isinstance(node, ast.ClassDef) and node.name == name
        ]
        return found

    def method_tree(self, file: str, owner: str, name: str) -> ast.FunctionDef:
        """Parse one method of it."""
        (found,) = [
            node
            for node in self.class_tree(file, owner).body
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        return found

    def function(self, file: str, name: str, **names: Any) -> Callable[..., Any]:
        """Compile one function of a file."""
        (found,) = [
            node
            for node in self.tree(file).body
            if isinstance(node, ast.FunctionDef) and node.name == name
        ]
        function: Callable[..., Any] = self._run(file, found, names)[name]
        return function

    def part(
        self, file: str, owner: str, methods: set[str], base: type = object, **names: Any
    ) -> Any:
        """Compile some methods of a class.

        Parameters
        ----------
        file : str
            Where it is.
        owner : str
            The class.
        methods : set of str
            Which methods; all of them have to be there.
        base : type
            What it inherits from here.
        **names : object
            What the methods name.
        """
        found = self.class_tree(file, owner)
        chosen = [
            node
            for node in found.body
            if isinstance(node, ast.FunctionDef) and node.name in methods
        ]
        missing = methods - {node.name for node in chosen}
        assert not missing, f"{owner} of vLLM {self.version} has no {missing}"
        part = ast.ClassDef(owner, [ast.Name("_Base", ast.Load())], [], [*chosen], [])
        if sys.version_info >= (3, 12):
            part.type_params = []
        return self._run(file, part, {**names, "_Base": base})[owner]

    def _run(self, file: str, node: ast.stmt, names: dict[str, Any]) -> dict[str, Any]:
        module = ast.fix_missing_locations(ast.Module([node], []))
        code = compile(
            module,
            str(self.root / file),
            "exec",
            flags=__future__.annotations.compiler_flag,
            dont_inherit=True,
        )
        exec(code, names)  # noqa: S102 - vLLM's own code is what is tested
        return names

    def worker_names(self) -> dict[str, Any]:
        """What the methods of a worker name, as far as nothing but sleep mode is in use."""
        from vllm.device_allocator import get_mem_allocator_instance

        accelerator = SimpleNamespace(
            synchronize=lambda: None, get_memory_info=lambda: (1 << 30, 1 << 40)
        )
        return {
            "contextmanager": contextmanager,
            "current_platform": self.platform,
            "ensure_ec_transfer_shutdown": None,
            "ensure_kv_transfer_initialized": lambda *_: None,
            "ensure_kv_transfer_shutdown": None,
            "envs": sys.modules["vllm.envs"],
            "fnmatch_filter": fnmatch_filter,
            "format_gib": str,
            "gc": gc,
            "get_mem_allocator_instance": get_mem_allocator_instance,
            "has_ec_transfer": bool,
            "has_kv_transfer_group": bool,
            "instrument": lambda **_: lambda function: function,
            "logger": self.logger("vllm.worker"),
            "nullcontext": nullcontext,
            "os": os,
            "re": re,
            "set_current_vllm_config": nullcontext,
            "set_torch_threads_for_runtime": lambda: None,
            "time": time,
            "torch": SimpleNamespace(
                accelerator=accelerator,
                cuda=SimpleNamespace(memory=SimpleNamespace(get_allocator_backend=str)),
                no_grad=torch.no_grad,
                set_float32_matmul_precision=lambda _: None,
                _C=SimpleNamespace(_accelerator_setAllocatorSettings=lambda _: None),
            ),
            "validate_worker_profiler_config": lambda _: None,
            "vllm": sys.modules["vllm"],
            "HAS_TRITON": True,
        }


class _Elastic:
    def __init__(self, worker: object) -> None: ...

    def shutdown(self) -> None: ...
