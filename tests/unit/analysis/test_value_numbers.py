"""Nodes with equal numbers hold equal elements, and nodes that may differ have different numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autopar.analysis.value_numbers import number_known_values
from autopar.capture import Trace, capture

Pair = Callable[[Tensor], tuple[Tensor, Tensor]]
EQUAL: dict[str, Pair] = {
    "the same op": lambda y: ((y != 2).sum(), (y != 2).sum()),
    "of a view": lambda y: ((y != 2).sum(), (y.view(2, 6) != 2).sum()),
    "of a view of a mask": lambda y: ((y != 2).sum(), (y != 2).view(3, 4).sum()),
    "of the opposite": lambda y: ((y != 2).sum(), (y == 2).logical_not().sum()),
    "of an opposite order": lambda y: ((y > 2).sum(), (~(y <= 2)).sum()),
    "in another dtype": lambda y: ((y != 2).sum(), (y != 2).double().sum()),
    "with another shape": lambda y: ((y != 2).sum(), (y != 2).sum(0, keepdim=True)),
}
DIFFERENT: dict[str, Pair] = {
    "another number": lambda y: ((y != 2).sum(), (y != 3).sum()),
    "the mask itself": lambda y: ((y != 2).sum(), (y == 2).sum()),
    "a part of the dims": lambda y: ((y != 2).view(2, 6).sum(0), (y != 2).view(2, 6).sum(1)),
    "a sum of other numbers": lambda y: (y.sum(), (y != 2).sum()),
    "a permuted view": lambda y: (y.view(3, 4).t() * 1, y.view(4, 3) * 1),
    "a broadcast operand": lambda y: (
        (y.view(3, 4) + y[:4]).sum(), (y.view(4, 3) + y[:3]).sum(),
    ),
    "rounded before it is added": lambda y: ((y / 3).sum(), (y / 3).int().sum()),
    "not a number": lambda y: ((y / 0.0 - y / 0.0 > 2).sum(), (~(y / 0.0 - y / 0.0 <= 2)).sum()),
}  # fmt: skip


class Two(nn.Module):
    """Return two values of `y`, and a loss that makes the graph joint."""

    def __init__(self, pair: Pair) -> None:
        super().__init__()
        self.weight, self.pair = nn.Parameter(torch.ones(())), pair

    def forward(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        one, other = self.pair(y)
        return self.weight * 2.0, one, other


def make_trace(pair: Pair) -> Trace:
    return capture(Two(pair), (torch.arange(12) % 5,), {})


@pytest.mark.parametrize("name", EQUAL)
def test_equal_values_have_one_number(name: str) -> None:
    trace = make_trace(EQUAL[name])
    values = number_known_values(trace)
    one, other = (o.node for o in trace.outputs[1:])
    assert values[one] == values[other]


@pytest.mark.parametrize("name", DIFFERENT)
def test_different_values_have_different_numbers(name: str) -> None:
    trace = make_trace(DIFFERENT[name])
    values = number_known_values(trace)
    one, other = (o.node for o in trace.outputs[1:])
    assert values[one] != values[other]


@pytest.mark.parametrize("name", [*EQUAL, *DIFFERENT])
def test_nodes_with_one_number_hold_the_same_elements(name: str) -> None:
    trace = make_trace({**EQUAL, **DIFFERENT}[name])
    held = defaultdict[int, list[Tensor]](list)
    values = number_known_values(trace)

    class Recording(fx.Interpreter):
        def run_node(self, n: fx.Node) -> object:
            found = super().run_node(n)
            if n.name in values and isinstance(found, Tensor):
                held[values[n.name]].append(found.flatten().double())
            return found

    placeholders = {n.name for n in trace.graph.nodes if n.op == "placeholder"}
    labels = {i.node for i in trace.inputs}
    given = [
        torch.randint(0, 5, (12,)) if n in labels else torch.ones(())
        for n in (n.name for n in trace.graph.nodes)
        if n in placeholders
    ]
    Recording(fx.GraphModule({}, trace.graph)).run(*given)
    assert held
    for first, *others in held.values():
        assert all(torch.equal(first.nan_to_num(), x.nan_to_num()) for x in others)
