"""The options of the memfd backend."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class MemfdOptions(BaseModel):
    """How bytes are copied.

    Parameters
    ----------
    chunk_bytes : int
        Bytes copied at a time: how often progress is told and the deadline looked at.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk_bytes: int = Field(default=8 << 20, ge=1 << 12, le=1 << 30)
