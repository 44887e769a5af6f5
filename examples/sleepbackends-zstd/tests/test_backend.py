"""What is the zstd backend's own: compression, its use of memory, and damaged frames."""

from __future__ import annotations

import errno
import mmap
import platform
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import xxhash
import zstandard
from sleepbackends import (
    BackendSettings,
    ContentsLostError,
    Control,
    HostMemoryError,
    InvalidOptionsError,
    Progress,
    Registry,
    Residency,
)

from sleepbackends_zstd.backend import ZstdBackend
from sleepbackends_zstd.frames import Frame, packer_bytes, worst_case_bytes
from sleepbackends_zstd.options import ZstdOptions

MIB = 1 << 20


def resident_bytes() -> int:
    """Resident memory of this process, as the kernel counts it."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


def noise(size_bytes: int) -> bytes:
    return random.Random(size_bytes).randbytes(size_bytes)  # noqa: S311 - test data


def allocate(backend: ZstdBackend, tag: str, *contents: bytes) -> list[memoryview]:
    buffers = []
    with backend.region(tag) as region:
        for data in contents:
            buffers.append(region.buffer(len(data)))
            buffers[-1][:] = data
    return buffers


@pytest.fixture
def backend() -> Iterator[ZstdBackend]:
    backend = ZstdBackend(ZstdOptions(chunk_bytes=MIB, level=1))
    yield backend
    backend.close()


def test_compressible_memory_takes_little_while_it_sleeps(backend: ZstdBackend) -> None:
    pattern = noise(4096) * (MIB // 4096)
    weights = allocate(backend, "weights", *[pattern] * 64)
    awake = resident_bytes()
    backend.suspend(1)
    assert awake - resident_bytes() >= 0.95 * 64 * MIB
    backend.resume()
    assert all(buffer == pattern for buffer in weights)


def test_frames_go_back_to_the_kernel_when_their_blocks_are_awake(backend: ZstdBackend) -> None:
    weights = allocate(backend, "weights", *[noise(MIB)] * 64)
    awake = resident_bytes()
    # What else is allocated meanwhile would pin a heap that the frames were in.
    crumbs: list[bytearray] = []
    control = Control(on_progress=lambda _: crumbs.append(bytearray(3000)))
    for _ in range(3):
        backend.suspend(1, control=control)
        backend.resume()
    assert resident_bytes() - awake <= 8 * MIB
    assert not backend.frames
    assert weights[-1] == noise(MIB)


def test_the_room_that_is_checked_is_enough_for_incompressible_bytes(
    backend: ZstdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(backend, "check_room", asked.append)
    weights = allocate(backend, "weights", *[noise(8 * MIB)] * 12)
    asked.clear()
    before, seen = resident_bytes(), [0]
    backend.suspend(1, control=Control(on_progress=lambda _: seen.append(resident_bytes())))
    assert max(seen) - before <= asked[0]
    assert asked[0] <= 16 * MIB, "one block at a time is in memory twice, not all of them"
    backend.resume()
    assert weights[-1] == noise(8 * MIB)


@pytest.mark.parametrize("size_bytes", [1, 4096, 65536, 131072, MIB + 17])
@pytest.mark.parametrize("level", [1, 3, 19, 22])
def test_no_frame_is_larger_than_the_worst_case(size_bytes: int, level: int) -> None:
    compressor = zstandard.ZstdCompressor(level=level, write_checksum=True)
    frame = compressor.compress(noise(size_bytes))
    assert len(frame) + mmap.PAGESIZE <= worst_case_bytes(size_bytes)
    working_bytes = packer_bytes(level, size_bytes) - worst_case_bytes(size_bytes)
    assert compressor.memory_size() <= working_bytes


def test_without_room_nothing_changes(
    backend: ZstdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weights,) = allocate(backend, "weights", noise(MIB))
    (kv_cache,) = allocate(backend, "kv_cache", noise(MIB))

    def refuse(size_bytes: int) -> None:
        raise HostMemoryError("no room", needed_bytes=size_bytes)

    monkeypatch.setattr(backend, "check_room", refuse)
    with pytest.raises(HostMemoryError) as caught:
        backend.suspend(1)
    assert caught.value.needed_bytes > MIB
    assert not backend.state().unusable_tags()
    assert weights == kv_cache == noise(MIB)
    assert backend.suspend(2).changed, "what saves nothing needs no room"


def test_memory_that_runs_out_after_all_is_undone(
    backend: ZstdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = allocate(backend, "weights", *[noise(MIB)] * 3)
    real, left = mmap.mmap, [2]

    def scarce(fileno: int, length: int, flags: int) -> mmap.mmap:
        if not left[0]:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")
        left[0] -= 1
        return real(fileno, length, flags=flags)

    with monkeypatch.context() as patch:
        patch.setattr(mmap, "mmap", scarce)
        with pytest.raises(HostMemoryError, match="Cannot allocate memory") as caught:
            backend.suspend(1)
    assert not caught.value.report.changed
    assert not backend.frames
    assert all(buffer == noise(MIB) for buffer in weights)
    assert backend.suspend(1).changed


def flip(position: int) -> Callable[[list[Frame], list[Frame]], None]:
    def damage(damaged: list[Frame], _: list[Frame]) -> None:
        damaged[1].compressed[position] ^= 1

    return damage


def cut(damaged: list[Frame], _: list[Frame]) -> None:
    damaged[1].compressed.resize(len(damaged[1].compressed) - 5)


def exchange(damaged: list[Frame], other: list[Frame]) -> None:
    """Put another whole frame of the right size there; only the hash can tell."""
    damaged[1] = Frame(other[1].compressed, damaged[1].digest)


@pytest.mark.parametrize(
    "damage",
    [flip(0), flip(6), flip(1000), flip(-1), cut, exchange],
    ids=["magic", "header", "payload", "checksum", "cut", "exchanged"],
)
def test_damaged_frames_are_lost_contents_and_never_used(
    backend: ZstdBackend, damage: Callable[[list[Frame], list[Frame]], None]
) -> None:
    contents = noise(3 * MIB + 5)
    (lora,) = allocate(backend, "lora", contents[::-1])
    (weights,) = allocate(backend, "weights", contents)
    backend.suspend(1)
    whole, damaged = backend.frames.values()
    damage(damaged, whole)
    with pytest.raises(ContentsLostError) as caught:
        backend.resume()
    assert caught.value.tags == {"weights"}
    tags = backend.state().tags
    assert tags["weights"].residencies == {Residency.DISCARDED}
    assert tags["lora"].residencies == {Residency.OFFLOADED}
    assert backend.resume().undefined_tags == {"weights"}
    assert lora == contents[::-1]
    assert weights == bytes(len(contents))


def test_the_checksum_of_the_frame_tells_as_well(
    backend: ZstdBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    (weights,) = allocate(backend, "weights", noise(MIB))
    monkeypatch.setattr(xxhash, "xxh3_128_digest", lambda _: b"equal")
    backend.suspend(1)
    (frame,) = backend.frames[backend.ledger.blocks()[0].address]
    frame.compressed[1000] ^= 1
    with pytest.raises(ContentsLostError):
        backend.resume()
    assert len(weights) == MIB


def test_large_blocks_are_told_and_timed_chunk_by_chunk(backend: ZstdBackend) -> None:
    (weights,) = allocate(backend, "weights", noise(2 * MIB + 5))
    seen: list[Progress] = []
    control = Control(on_progress=seen.append)
    backend.suspend(1, control=control)
    backend.resume(control=control)
    steps = [0, MIB, 2 * MIB, 2 * MIB + 5]
    assert [(each.operation, each.done_bytes) for each in seen] == [
        *[("suspend", done) for done in steps],
        *[("resume", done) for done in steps],
    ]
    assert weights == noise(2 * MIB + 5)


def test_options_are_checked_before_anything_is_created() -> None:
    registry = Registry.load()
    for options, named in (({"level": 23}, "level"), ({"levle": 3}, "levle")):
        with pytest.raises(InvalidOptionsError, match=named):
            registry.create("zstd", options, BackendSettings())


def test_other_systems_are_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ZstdBackend.probe()
    monkeypatch.setattr(platform, "system", lambda: "Plan9")
    answer = ZstdBackend.probe()
    assert not answer
    assert "Plan9" in answer.reason
    assert answer.hint


def test_listing_backends_does_not_import_zstandard() -> None:
    script = (
        "import sys\nfrom sleepbackends import Registry\nassert 'zstd' in Registry.load().specs\n"
        "sys.exit('zstandard' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)  # noqa: S603 - our own script
