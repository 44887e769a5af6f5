"""A backend, its plugin and its contract tests, as somebody wrote them for sleepbackends 0.1.

Frozen: if it no longer works, the interface has changed. A release that may break it raises
API_VERSION, and gets a file of its own beside this one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from sleepbackends import (
    Availability,
    BackendSettings,
    BackendSpec,
    BaseBackend,
    Block,
    Capabilities,
    Control,
    DeviceMemoryError,
    Fill,
    hookimpl,
)
from sleepbackends.testing import BackendContractTests


class TapeOptions(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    reels: int = Field(default=1 << 30, ge=1)
    selective: bool = True


class TapeMemory:
    def __init__(self, backend: TapeBackend, address: int) -> None:
        self.backend = backend
        self.address = address

    def read(self) -> bytes:
        return bytes(self.backend.mounted[self.address])

    def write(self, data: bytes) -> None:
        self.backend.mounted[self.address][:] = data

    def free(self) -> None:
        self.backend.free(self.address)


class TapeRegion:
    def __init__(self, backend: TapeBackend, tag: str) -> None:
        self.backend = backend
        self.tag = tag

    def buffer(self, size_bytes: int) -> TapeMemory:
        block = self.backend.enter(lambda: self.backend.wind(self.tag, size_bytes))
        return TapeMemory(self.backend, block.address)


class TapeBackend(BaseBackend[TapeOptions]):
    name = "tape"
    api_version = 1
    capabilities = Capabilities(
        supports_selective_release=True,
        supports_selective_resume=True,
        supports_offload=True,
        preserves_addresses=True,
        owns_allocations=True,
    )

    def __init__(
        self, options: TapeOptions | None = None, settings: BackendSettings | None = None
    ) -> None:
        super().__init__(options, settings)
        chosen = options or TapeOptions()
        self.reels = chosen.reels
        self.capabilities = replace(
            type(self).capabilities,
            supports_selective_release=chosen.selective,
            supports_selective_resume=chosen.selective,
        )
        self.mounted: dict[int, bytearray] = {}
        self.shelf: dict[int, bytes] = {}
        self.next_address = 4096

    @classmethod
    def probe(cls) -> Availability:
        return Availability(True, "there is always tape")

    @contextmanager
    def region(self, tag: str) -> Iterator[TapeRegion]:
        yield TapeRegion(self, self.open_tag(tag))

    def wind(self, tag: str, size_bytes: int) -> Block:
        address, self.next_address = self.next_address, self.next_address + size_bytes + 1
        self.mounted[address] = bytearray(size_bytes)
        return Block(address, size_bytes, tag)

    def synchronize(self, blocks: Sequence[Block]) -> None:
        pass

    def save(self, blocks: Sequence[Block], control: Control) -> Iterator[Block]:
        for block in blocks:
            self.shelf[block.address] = bytes(self.mounted[block.address])
            control.advance(block.size_bytes)
            yield block

    def unmap(self, block: Block) -> None:
        del self.mounted[block.address]

    def reserve(self, blocks: Sequence[Block]) -> None:
        needed = sum(block.size_bytes for block in blocks)
        available = self.reels - sum(map(len, self.mounted.values()))
        if needed > available:
            raise DeviceMemoryError(
                f"{needed} bytes needed, {available} left",
                hint="buy tape",
                needed_bytes=needed,
                available_bytes=available,
            )

    def map(self, block: Block) -> None:
        self.mounted[block.address] = bytearray(b"?" * block.size_bytes)

    def restore(self, blocks: Iterable[Block], control: Control) -> Iterator[Block]:
        for block in blocks:
            self.mounted[block.address][:] = self.shelf[block.address]
            control.advance(block.size_bytes)
            yield block

    def fill(self, block: Block, fill: Fill) -> None:
        if fill is not Fill.NONE:
            byte = 0xA5 if fill is Fill.POISON else 0
            self.mounted[block.address][:] = bytes([byte]) * block.size_bytes

    def forget(self, block: Block) -> None:
        self.shelf.pop(block.address, None)

    def release(self, block: Block) -> None:
        self.mounted.pop(block.address, None)
        self.forget(block)


@hookimpl
def sleepbackends_register_backends() -> Iterable[BackendSpec]:
    return [
        BackendSpec(
            name="tape",
            target=f"{__name__}:TapeBackend",
            api_version=1,
            options_model=f"{__name__}:TapeOptions",
            summary="tape",
            auto_priority=-1,
        )
    ]


class TapeTests(BackendContractTests):
    def make_backend(self, settings: BackendSettings) -> TapeBackend:
        return TapeBackend(TapeOptions(), settings)

    def allocate(self, backend: Any, tag: str, size_bytes: int) -> TapeMemory:
        with backend.region(tag) as region:
            memory: TapeMemory = region.buffer(size_bytes)
        return memory

    def used_bytes(self, backend: Any) -> int:
        return sum(map(len, backend.mounted.values()))
