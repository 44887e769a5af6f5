"""What is to be measured: the whole of it, and the part of one process."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from sleepbackends.bench.rows import IN_TURN, OURS, PEERS, PLAIN_COPY, STAGED, Row
from sleepbackends.errors import RequestError

DESCRIBE = "describe"
"""A process of its own tells what the machine is."""

FIRST_TIME = "first_time"
"""A process of its own does what a machine does once."""

RETAINING = ("vllm", "tms_retain")
"""The peers that keep their host memory between sleeps."""


@dataclass(frozen=True)
class Spec:
    """What one process measures.

    Parameters
    ----------
    peer : str
        As in ``Row``, or ``in_turn``, ``staged``, ``describe`` or ``first_time``.
    weights_gib, kv_gib : float
        How much memory of either kind, on each device; for ``first_time``, how much
        host memory is touched.
    tensor_mib : float
        The size of the weight tensors; 0 for ``in_turn``, which chooses it.
    rounds : int
        How often everything is done.
    fill : str
        What discarded memory is filled with when it comes back.
    devices : int
        1, or 2 to compare one device with both at once.
    folder : str, optional
        The folder of the peers; without it, they are installed.
    among : sequence of str
        Whom ``in_turn`` measures.
    """

    peer: str
    weights_gib: float = 0.0
    kv_gib: float = 0.0
    tensor_mib: float = 0.0
    rounds: int = 1
    fill: str = "none"
    devices: int = 1
    folder: str | None = None
    among: Sequence[str] = ()

    @property
    def title(self) -> str:
        """What to call it; no two of one request have the same."""
        parts = [self.peer]
        if self.weights_gib:
            parts.append(f"{self.weights_gib:g} GiB")
        if self.tensor_mib:
            parts.append(f"tensors of {self.tensor_mib:g} MiB")
        if self.fill != "none":
            parts.append(f"{self.fill}-filled")
        if self.devices > 1:
            parts.append(f"{self.devices} devices")
        return ", ".join(parts)

    def to_json(self) -> str:
        """Return it as JSON."""
        return json.dumps(dataclasses.asdict(self))

    def row(self, case: str, round_: int, seconds: float, devices: str = "0") -> Row:
        """Make a row of one measurement."""
        return Row(
            self.peer,
            case,
            self.weights_gib,
            self.kv_gib,
            self.tensor_mib,
            round_,
            seconds,
            self.fill,
            devices,
        )


@dataclass(frozen=True)
class Request:
    """What a user asks for.

    Parameters
    ----------
    weights_gib : tuple of float
        Amounts of weights on each device, which a suspend keeps.
    kv_gib : float
        How much KV cache, which a suspend drops; 0 for none.
    tensor_mib : tuple of float
        Sizes of the weight tensors.
    rounds : int
        How often each process does everything.
    devices : int
        1, or 2 to compare one device with both at once; then only the first tensor size is
        measured, of ours and of plain copies, without a KV cache.
    peers : Path, optional
        The folder with the peers' packages; without it, those that are installed.
    only : tuple of str
        What to measure besides plain copies, which are always measured.
    timeout_s : float
        How long each process may take.
    vllm_version : str, optional
        What to call vLLM's version where its folder does not tell.

    Raises
    ------
    RequestError
        If something of it cannot be measured by anybody.
    """

    weights_gib: tuple[float, ...] = (16.0,)
    kv_gib: float = 32.0
    tensor_mib: tuple[float, ...] = (256.0, 20.0, 1.0)
    rounds: int = 5
    devices: int = 1
    peers: Path | None = None
    only: tuple[str, ...] = (OURS, *PEERS)
    timeout_s: float = 300.0
    vllm_version: str | None = None

    def __post_init__(self) -> None:
        if self.rounds < 2:
            raise RequestError(
                f"{self.rounds} rounds are too few: the first suspend is a case of its own",
                hint="--rounds must be 2 or more",
            )
        if self.devices not in (1, 2):
            raise RequestError(f"{self.devices} devices cannot be compared", hint="1 or 2 can")
        if unknown := sorted({*self.only} - {OURS, *PEERS}):
            raise RequestError(
                f"nothing is known of {', '.join(unknown)}",
                hint=f"known: {', '.join((OURS, *PEERS))}",
            )
        if not self.weights_gib or not self.tensor_mib:
            raise RequestError("no amount of weights, or no tensor size, was given")
        for weights_gib in self.weights_gib:
            for tensor_mib in self.tensor_mib:
                if not 0 < tensor_mib <= weights_gib * 1024:
                    raise RequestError(
                        f"{weights_gib:g} GiB of weights cannot be tensors of {tensor_mib:g} MiB",
                        hint="--tensor-mib must be positive, and one tensor must fit",
                    )
        if 0 < self.kv_gib < 1 or self.kv_gib < 0 or self.timeout_s <= 0:
            raise RequestError(
                f"a KV cache of {self.kv_gib:g} GiB or a time limit of {self.timeout_s:g} s "
                "cannot be measured",
                hint="--kv-gib must be 0, or 1 or more, and --timeout-s positive",
            )

    def specs(self) -> list[Spec]:
        """List what each process is to measure, in order."""
        found: list[Spec] = []
        if self.devices == 1 and self.kv_gib and {OURS, "tms"} <= set(self.only):
            found.append(self._in_turn(["tms"], weights_gib=0.0, kv_gib=self.kv_gib))
        variants = [(peer, "none") for peer in PEERS]
        variants += [(OURS, "none"), (OURS, "zero"), (STAGED, "none")]
        only = {*self.only, STAGED} if OURS in self.only else {*self.only}
        for weights_gib in dict.fromkeys(self.weights_gib):
            base = Spec(PLAIN_COPY, weights_gib, rounds=self.rounds, devices=self.devices)
            found.append(base)
            if self.devices == 2:
                size = self.tensor_mib[0]
                found.append(dataclasses.replace(base, peer=OURS, tensor_mib=size))
                continue
            if OURS in only and (others := [peer for peer in RETAINING if peer in only]):
                found.append(self._in_turn(others, weights_gib=weights_gib, kv_gib=0.0))
            base = dataclasses.replace(base, kv_gib=self.kv_gib, folder=self._folder)
            found += [
                dataclasses.replace(base, peer=peer, tensor_mib=size, fill=fill)
                for size in dict.fromkeys(self.tensor_mib)
                for peer, fill in variants
                if peer in only
            ]
        return found

    def _in_turn(self, others: Sequence[str], *, weights_gib: float, kv_gib: float) -> Spec:
        return Spec(
            IN_TURN,
            weights_gib,
            kv_gib,
            rounds=self.rounds,
            folder=self._folder,
            among=[OURS, *others],
        )

    @property
    def _folder(self) -> str | None:
        return str(self.peers) if self.peers else None

    @property
    def device_gib(self) -> float:
        """The most device memory that the weights and the KV cache of one process take."""
        return max(self.weights_gib) + (self.kv_gib if self.devices == 1 else 0.0)
