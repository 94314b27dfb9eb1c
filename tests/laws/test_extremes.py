"""Gradients of max and min go to the elements that equal the extreme, also if the elements are
recomputed."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

import autopar
from autopar.capture import capture
from autopar.ops import extremes
from benchmarks.common import load_profile
from benchmarks.random_plans import prepare, random_plan

EXTREMES: dict[str, Callable[[Tensor], Tensor]] = {
    "amax": lambda h: h.amax(1),
    "amin, kept": lambda h: h.amin((0, 1), keepdim=True),
    "max": lambda h: h.max(),
    "min": lambda h: h.min(),
    "aminmax": lambda h: h.aminmax(dim=1)[0],
    "infinity norm": lambda h: torch.linalg.vector_norm(h, math.inf, dim=1),
    "infinity norm of all": lambda h: h.norm(math.inf),
    "smallest magnitude": lambda h: torch.linalg.vector_norm(h, -math.inf, dim=-1),
    "median": lambda h: h.median(),
    "nanmedian": lambda h: h.nanmedian(),
    "matrix norm": lambda h: torch.linalg.matrix_norm(h, 1),
    "normalize": lambda h: F.normalize(h, p=math.inf, dim=1),
    "pairwise distance": lambda h: F.pairwise_distance(h, h.roll(1, 0), p=math.inf),
    "distances": lambda h: torch.cdist(h, h.roll(1, 0), p=math.inf),
    "own distances": lambda h: F.pdist(h, p=math.inf),
    "scattered": lambda h: torch.zeros(4, 6).scatter_reduce(
        0, INDEX[:, None].expand(12, 6), h, "amax", include_self=False
    ),
    "indexed": lambda h: torch.zeros(4, 6).index_reduce(0, INDEX, h, "amin", include_self=False),
    "segments": lambda h: torch.segment_reduce(h, "max", lengths=torch.tensor([2, 10])),
}
INDEX = torch.arange(12).remainder(4)
COMPARED = {
    torch.ops.aten.eq.Tensor,
    torch.ops.aten._cdist_backward.default,
    torch.ops.aten._pdist_backward.default,
    torch.ops.aten._segment_reduce_backward.default,
}


class Model(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.linear, self.extreme = nn.Linear(16, 6), EXTREMES[name]

    def forward(self, x: Tensor) -> Tensor:
        return self.extreme(self.linear(x)).square().mean()


def batch() -> dict[str, Tensor]:
    return {"x": torch.randn(12, 16, generator=torch.Generator().manual_seed(1))}


@pytest.mark.parametrize("name", EXTREMES)
def test_graphs_do_not_compare_values_with_extremes_of_another_op(name: str) -> None:
    graph = capture(Model(name), (), batch()).graph
    targets = {node.target for node in graph.nodes if node.op == "call_function"}
    assert not targets & COMPARED
    assert any(getattr(target, "__module__", "") == extremes.__name__ for target in targets)


@pytest.mark.parametrize("name", EXTREMES)
def test_gradients_of_extremes_match_the_plain_model_under_recompute(
    name: str,
) -> None:
    torch.manual_seed(0)
    model, mesh = Model(name), autopar.Mesh({"a": 2, "b": 2})
    prepared = prepare(model, batch(), mesh, load_profile("cpu-gloo-frictionless"))
    for seed in range(3):
        plan, _ = random_plan(prepared, seed, recompute_otherwise=True)
        found = autopar.verify(plan, model, batch())
        assert found.ok, found


OTHERS: dict[str, Callable[[Tensor], Tensor]] = {
    "rows with columns": lambda x: x == x.amax(0).unsqueeze(1),
    "rows with columns, expanded": lambda x: x == x.amax(0).unsqueeze(1).expand(4, 4),
    "a number with a maximum": lambda x: (x.sum() == x[0].amax(0)).expand(4, 4),
    "other places": lambda x: (
        x
        == torch.zeros(4, 4)
        .scatter_reduce(0, INDEX[:4, None].expand(4, 4), x, "amax")
        .gather(0, INDEX[:4].flip(0)[:, None].expand(4, 4))
    ),
    "without magnitudes": lambda x: x == torch.linalg.vector_norm(x, math.inf, dim=1).unsqueeze(1),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_comparisons_are_unchanged(name: str) -> None:
    class Other(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.where(OTHERS[name](x), x, -x).sum()

    x = torch.randn(4, 4, requires_grad=True)
    graph: fx.Graph = capture(Other(), (x,), {}).graph
    assert any(node.target is torch.ops.aten.eq.Tensor for node in graph.nodes)
