"""The options of the limited backend."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class LimitedOptions(BaseModel):
    """What is wrapped, and what it is limited to.

    Parameters
    ----------
    inner : str
        The name of the backend that does the work.
    inner_options : mapping of str to object
        Its own options, checked by its own model.
    max_saved_bytes : int, optional
        The most that sleeps may keep at a time; None sets no limit.
    max_mapped_bytes : int, optional
        The most that may be mapped after a wake-up; None sets no limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    inner: str = Field(default="host", min_length=1)
    inner_options: Mapping[str, Any] = {}
    max_saved_bytes: int | None = Field(default=None, ge=0)
    max_mapped_bytes: int | None = Field(default=None, ge=0)
