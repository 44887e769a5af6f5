"""How a backend of this family is declared."""

from __future__ import annotations

from sleepbackends.hookspecs import BackendSpec
from sleepbackends.protocol import API_VERSION


def vmm_spec(name: str, summary: str, auto_priority: int) -> BackendSpec:
    """Declare the backend in the folder of its name, which holds the usual modules.

    Parameters
    ----------
    name : str
        Of the backend and its folder; its classes begin with it.
    summary : str
        One line for people.
    auto_priority : int
        The higher, the rather it is chosen.
    """
    module = f"sleepbackends.{name}"
    return BackendSpec(
        name=name,
        target=f"{module}.backend:{name.title()}Backend",
        api_version=API_VERSION,
        options_model=f"{module}.options:{name.title()}Options",
        summary=summary,
        auto_priority=auto_priority,
        contract_tests=f"sleepbackends.verify.builtin:{name.title()}Tests",
    )
