"""What the pages have a vLLM user type is there, in each release that they are about."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tests.adapters.vllm.conftest import WITH_OPTION
from tests.adapters.vllm.released import ReleasedVllm
from tests.docs.pages import DOCS, ROOT, fences

PAGES = [ROOT / "README.md", DOCS / "with-vllm.md"]
ROUTERS = [f"vllm/entrypoints/serve/dev/{name}/api_router.py" for name in ("cache", "rpc", "sleep")]


def lines() -> Iterator[str]:
    """What is typed that starts vLLM or asks its server."""
    for page in PAGES:
        for fence in fences(page.read_text(encoding="utf-8")):
            for line in fence.code.replace("\\\n", " ").splitlines():
                if "vllm serve" in line or "localhost:8000/" in line:
                    yield line


def routes(vllm: ReleasedVllm) -> set[tuple[str, str]]:
    found = set()
    for file in ROUTERS:
        for node in ast.walk(vllm.tree(file)):
            if isinstance(node, ast.AsyncFunctionDef):
                for each in node.decorator_list:
                    if isinstance(each, ast.Call) and isinstance(each.func, ast.Attribute):
                        (path,) = [a.value for a in each.args if isinstance(a, ast.Constant)]
                        found.add((each.func.attr.upper(), str(path)))
    return found


def test_its_routes(vllm: ReleasedVllm) -> None:
    typed = [
        (method or "GET", path)
        for line in lines()
        for method, path in re.findall(r"curl (?:-X (\w+) )?'?localhost:8000(/\w+)", line)
    ]
    assert len(typed) >= 7
    assert set(typed) <= routes(vllm)


def test_its_options(vllm: ReleasedVllm) -> None:
    known = (vllm.root / "vllm/engine/arg_utils.py").read_text(encoding="utf-8")
    served = [line for line in lines() if "vllm serve" in line]
    assert len(served) >= 4
    for line in served:
        if "SLEEPBACKENDS_VLLM=1" in line or vllm.version in WITH_OPTION:
            options = re.findall(r"--[a-z-]+", line)
            assert options
            assert all(f'"{option}"' in known for option in options), line


def test_its_variables(vllm: ReleasedVllm) -> None:
    known = (vllm.root / "vllm/envs.py").read_text(encoding="utf-8")
    for page in PAGES:
        variables = set(re.findall(r"\bVLLM_[A-Z_]+", page.read_text(encoding="utf-8")))
        assert variables
        assert all(f'"{name}"' in known for name in variables)


def test_the_address_of_a_request_with_parameters_is_quoted() -> None:
    """An unquoted question mark is a pattern to some shells."""
    assert not [line for line in lines() if re.search(r" localhost:8000/\S*\?", line)]
