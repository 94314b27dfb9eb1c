"""Graph modules whose code is written when it is wanted."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import fx

from autopar.program.program import LazyGraphModule


def graph_of(factor: int) -> fx.Graph:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.mul, (graph.placeholder("x"), factor)))
    return graph


def is_written(module: LazyGraphModule) -> bool:
    return hasattr(module, "_code")


def test_code_is_written_when_a_module_is_called_or_read_and_not_before() -> None:
    one, two, three = (LazyGraphModule({}, graph_of(n)) for n in (2, 3, 4))
    assert not any(map(is_written, (one, two, three)))
    assert one(torch.ones(2)).tolist() == [2.0, 2.0] and "x, 3" in two.code and "x, 4" in str(three)
    assert all(map(is_written, (one, two, three)))
    assert [module(torch.ones(1)).item() for module in (one, two, three)] == [2.0, 3.0, 4.0]


@pytest.mark.parametrize("called", [True, False])
def test_a_changed_graph_counts_once_it_is_recompiled(called: bool) -> None:
    module = LazyGraphModule({}, graph_of(2))
    if called:
        module(torch.ones(1))
    node = next(n for n in module.graph.nodes if n.op == "call_function")
    node.args = (node.args[0], 5)
    module.recompile()
    assert module(torch.ones(1)).item() == 5.0 and "x, 5" in module.code


@pytest.mark.parametrize(
    "copied",
    [
        copy.deepcopy,
        lambda module: pickle.loads(pickle.dumps(module)),
        lambda m: fx.GraphModule(m, m.graph),
    ],
)
def test_copies_compute_the_same(copied) -> None:  # type: ignore[no-untyped-def]
    assert copied(LazyGraphModule({}, graph_of(2)))(torch.ones(1)).item() == 2.0
