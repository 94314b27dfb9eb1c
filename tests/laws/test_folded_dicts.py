"""Layers of an nn.ModuleDict with consecutive numbers as keys are folded like layers of a list, for
all ways of calling them."""

from __future__ import annotations

import pytest
import torch
from same_trace import assert_same_trace
from torch import Tensor, nn

from autopar.capture import capture


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor, factor: int) -> Tensor:
        return x + self.linear(self.norm(x.to(self.linear.weight.dtype))).to(x.dtype) * factor


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        layers = [Layer() for _ in range(8)]
        if kind == "other dtype":
            layers[4] = layers[4].double()
        if kind == "shared":
            layers[4] = layers[3]
        if kind == "hook":
            layers[4].register_forward_hook(lambda _module, _args, made: made * 2)
        keys = [f"layer{n}" if kind == "names" else str(n) for n in range(8)]
        self.kind = kind
        self.layers = (
            nn.ModuleList(layers)
            if kind == "list"
            else nn.ModuleDict(dict(zip(keys, layers, strict=True)))
        )

    def forward(self, x: Tensor) -> Tensor:
        if isinstance(self.layers, nn.ModuleList):
            named = [(str(n), layer) for n, layer in enumerate(self.layers)]
        else:
            named = list(self.layers.items())
        if self.kind == "by key":
            named = [(str(n), self.layers[str(n)]) for n in range(8)]
        for key, layer in reversed(named) if self.kind == "reversed" else named:
            x = layer(x, 3 if self.kind == "key decides" and key == "4" else 2)
        return x.square().mean()


@pytest.mark.parametrize(
    ("kind", "folds"),
    [
        ("values", True),
        ("other dtype", False),
        ("shared", False),
        ("hook", False),
        ("key decides", False),
        ("by key", None),
        ("reversed", None),
        ("names", None),
    ],
)
def test_a_folded_dict_equals_a_full_capture_node_for_node(kind: str, folds: bool | None) -> None:
    model, batch = Net(kind), {"x": torch.randn(4, 8)}
    folded, full = capture(model, (), batch), capture(model, (), batch, fold=False)
    assert_same_trace(folded, full)
    if folds is not None:
        assert bool(folded.folding.runs) is folds, str(folded.folding)


def test_a_dict_is_folded_as_a_list_is() -> None:
    as_list, as_dict = (
        capture(Net(kind), (), {"x": torch.randn(4, 8)}) for kind in ("list", "values")
    )
    assert as_list.folding == as_dict.folding
    assert as_list.folding.runs
    assert [n.name for n in as_list.graph.nodes] == [n.name for n in as_dict.graph.nodes]
