"""The KV cache alone, released and taken again, on an ``LLM`` of any supported release."""

from __future__ import annotations

from typing import Any

from sleepbackends.errors import BusyError, UnsupportedOperationError

__all__ = ["release_kv_cache", "restore_kv_cache"]

_KV_CACHE = "kv_cache"


def release_kv_cache(llm: Any) -> None:
    """Stop an engine and release its KV cache; the weights stay resident.

    Requests that run are aborted, and nothing is computed until ``restore_kv_cache``.

    Parameters
    ----------
    llm : vllm.LLM
        An engine that uses a backend of ours.

    Raises
    ------
    BusyError
        If blocks of the cache are still in use; the engine goes on, nothing was released.
    UnsupportedOperationError
        If the engine does not use a backend of ours and its vLLM cannot do it either;
        nothing changed.
    Exception
        Whatever a worker raised. The engine stays stopped; ``restore_kv_cache`` takes back
        what was released.
    """
    able = _is_able(llm)
    if not able:
        _ask_for_ours(llm)
    llm.sleep(level=0)
    if able:
        llm.release_kv_cache_memory()
        return
    if not llm.reset_prefix_cache():
        llm.wake_up(tags=["scheduling"])
        raise BusyError(
            "the prefix cache could not be dropped: blocks of the KV cache are in use",
            hint="wait until no request runs, then call it again",
            tags=[_KV_CACHE],
        )
    llm.collective_rpc("discard", args=([_KV_CACHE],))


def restore_kv_cache(llm: Any) -> None:
    """Take the memory of the KV cache again and let the engine go on.

    Parameters
    ----------
    llm : vllm.LLM
        The engine.

    Raises
    ------
    Exception
        Whatever a worker raised, for lack of memory perhaps. The engine stays stopped, and
        the call can be repeated.
    """
    if _is_able(llm):
        llm.wake_up(tags=[_KV_CACHE])
        return
    llm.collective_rpc("wake_up", kwargs={"tags": [_KV_CACHE]})
    llm.wake_up(tags=["scheduling"])


def _is_able(llm: Any) -> bool:
    return hasattr(llm, "release_kv_cache_memory")


def _ask_for_ours(llm: Any) -> None:
    # How a worker fails that lacks a method depends on how vLLM runs it; that it fails does not.
    try:
        llm.collective_rpc("sleepbackends_status")
    except Exception as error:
        raise UnsupportedOperationError(
            "this engine cannot release its KV cache alone",
            hint="start it with sleep mode on and SLEEPBACKENDS_VLLM=1",
            tags=[_KV_CACHE],
        ) from error
