"""Values of buffers, attributes and arguments that decide branches, and kinds of tensors that are
refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.constraints import ddp, fsdp
from autopar.errors import CaptureError, RuntimeStateError

CAUSAL = nn.Transformer.generate_square_subsequent_mask(6)
EDGES = torch.tensor([[0, 1, 2, 2, 3], [1, 1, 0, 2, 0]])  # two of them lead from a node to itself


class Encoder(nn.Module):
    """An encoder whose causal mask is a buffer, an attribute, or created in forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 2, 32, 0.0, batch_first=True)
        self.encoder, self.kind = nn.TransformerEncoder(layer, 2), kind
        if kind == "buffer":
            self.register_buffer("mask", CAUSAL.clone())
        elif kind == "attribute":
            self.mask = CAUSAL.clone()

    def forward(self, x: Tensor) -> Tensor:
        made = self.kind == "made"
        mask = nn.Transformer.generate_square_subsequent_mask(6) if made else self.mask
        return self.encoder(x, mask=mask)


class Translation(nn.Module):
    """Both halves of a Transformer with causal masks as arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Transformer(16, 2, 1, 1, 32, 0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor, mask: Tensor) -> Tensor:
        return self.body(source, target, tgt_mask=mask)


class Graph(nn.Module):
    """A graph layer that omits edges from a node to itself, using a mask computed from its
    buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("edges", EDGES.clone())

    def forward(self, x: Tensor) -> Tensor:
        kept = self.edges[:, self.edges[0] != self.edges[1]]
        return torch.zeros_like(x).index_add(0, kept[1], self.linear(x)[kept[0]])


class Repeated(nn.Module):
    """Rows repeated as often as a buffer says."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("repeats", torch.tensor([2, 0, 1, 3]))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).repeat_interleave(self.repeats, dim=0)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


Case = tuple[Callable[[], nn.Module], tuple[Tensor, ...]]
CASES: dict[str, Case] = {
    "buffer": (lambda: Encoder("buffer"), (draw(4, 6, 16),)),
    "attribute": (lambda: Encoder("attribute"), (draw(4, 6, 16),)),
    "made in forward": (lambda: Encoder("made"), (draw(4, 6, 16),)),
    "argument": (Translation, (draw(4, 6, 16), draw(4, 6, 16), CAUSAL)),
    "edges": (Graph, (draw(4, 8),)),
    "repeats": (Repeated, (draw(4, 8),)),
}


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("name", CASES)
def test_known_values_may_determine_branches_and_shapes(name: str) -> None:
    make, batch = CASES[name]
    plan = autopar.plan(make(), 2, example_inputs=batch, hardware="cpu-gloo", constraints=[ddp()])
    found = autopar.verify(plan, make(), batch)
    assert found.ok and found.max_error < 1e-12, str(found)


def test_a_buffer_that_changed_since_the_capture_is_refused() -> None:
    module = autopar.compile(Graph(), autopar.Mesh({"gpu": 1}), example_inputs=(draw(4, 8),))
    module(draw(4, 8))
    module.edges.zero_()
    with pytest.raises(
        RuntimeStateError, match="the values of buffer 'edges', which forward reads, changed"
    ):
        module(draw(4, 8))


KINDS: dict[str, tuple[Callable[[], Tensor], Callable[[Tensor], Tensor]]] = {
    "torch.sparse_coo": (lambda: draw(4, 8).relu().to_sparse(), Tensor.to_dense),
    "torch.sparse_csr": (lambda: draw(4, 8).relu().to_sparse_csr(), Tensor.to_dense),
    "torch.sparse_csc": (lambda: draw(4, 8).relu().to_sparse_csc(), Tensor.to_dense),
    "nested": (
        lambda: torch.nested.nested_tensor([draw(3, 8), draw(5, 8)], layout=torch.jagged),
        lambda x: torch.nested.to_padded_tensor(x, 0.0),
    ),
    "quantized": (
        lambda: torch.quantize_per_tensor(draw(4, 8), 0.1, 0, torch.qint8),
        Tensor.dequantize,
    ),
}


@pytest.mark.filterwarnings("ignore")  # torch warns that these kinds are in beta or deprecated
@pytest.mark.parametrize("name", KINDS)
def test_unsupported_tensor_types_are_refused_with_a_remedy_that_works(name: str) -> None:
    make, follow_remedy = KINDS[name]
    model = nn.Sequential(nn.Linear(8, 4))
    options = {"hardware": "cpu-gloo", "constraints": [fsdp()]}
    with pytest.raises(CaptureError, match=name):
        autopar.plan(model, 2, example_inputs=(make(),), **options)
    dense = follow_remedy(make())
    plan = autopar.plan(model, 2, example_inputs=(dense,), **options)
    assert autopar.verify(plan, model, (dense,)).ok


@pytest.mark.slow
def test_packed_positions_match_the_plain_model() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=64,
    )
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (4, 16))
    packed = torch.cat([torch.arange(5), torch.arange(11)])[None].expand(4, 16).clone()
    losses = []
    for cached in (True, False):
        model = transformers.LlamaForCausalLM(config)
        model.config.use_cache = cached
        batch = {"input_ids": ids, "labels": ids, "position_ids": packed}
        plan = autopar.plan(
            model, 2, example_inputs=batch, hardware="cpu-gloo", constraints=[fsdp()]
        )
        found = autopar.verify(plan, model, batch)
        assert found.ok, str(found)  # rotary embeddings compute in float32
        assert model.config.use_cache is cached
        torch.manual_seed(1)
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.1)
        module = autopar.compile(model, autopar.Mesh({"gpu": 1}), example_inputs=batch)
        losses.append(tuple(float(m(**batch).loss.detach()) for m in (module, model)))
        assert losses[-1][0] == pytest.approx(losses[-1][1], rel=1e-5)
    assert losses[0] != losses[1], "the cache decides whether documents are told apart"
