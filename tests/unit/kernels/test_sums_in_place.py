"""Sums over ranks are computed in the memory of their operand where nothing else reads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from autopar.core.mesh import Mesh
from autopar.kernels.bind import bind
from autopar.kernels.bound_ops import IN_PLACE
from autopar.kernels.collectives import all_reduce, fake_groups, finish, start
from autopar.ops.products import dot
from autopar.program.executor import _functional

MESH = Mesh({"a": 2})
_aten = torch.ops.aten


def graph_of(operand: str, *, early: bool) -> fx.GraphModule:
    """A product and its sum over ranks, with an operand of the sum that is as its name says."""
    graph = fx.Graph()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(dot, ("ab,bc->ac", x, w))
    results: list[fx.Node] = []
    if operand == "given":
        product = x
    elif operand == "read twice":
        results.append(graph.call_function(_aten.neg.default, (product,)))
    elif operand == "returned":
        results.append(product)
    elif operand == "a view":
        product = graph.call_function(_aten.view.default, (product, [6]))
    if early:
        started = graph.call_function(start, (product, "all_reduce", "sum", 0))
        total = graph.call_function(finish, (started, "all_reduce", "sum", 0))
    else:
        total = graph.call_function(all_reduce, (product, "sum", 0))
    graph.output((total, *results))
    return fx.GraphModule(nn.Module(), graph)


def steps_of(module: fx.GraphModule) -> set[Any]:
    return {node.target for node in module.graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("early", [False, True])
def test_a_product_that_is_only_summed_is_summed_in_its_own_memory(early: bool) -> None:
    bound = bind(graph_of("new", early=early), fake_groups(MESH))
    assert steps_of(bound) & set(IN_PLACE.values())
    found: list[torch.Tensor] = []

    class Products(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            result = super().call_function(target, args, kwargs)
            found.extend([result] if target is dot else [])
            return result

    total = Products(bound).run(torch.randn(2, 4), torch.randn(4, 3))[0]
    assert total.data_ptr() == found[0].data_ptr()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("operand", ["given", "read twice", "returned", "a view"])
def test_an_operand_that_something_else_reads_is_left_as_it_is(operand: str, early: bool) -> None:
    bound = bind(graph_of(operand, early=early), fake_groups(MESH))
    assert not steps_of(bound) & set(IN_PLACE.values())
    assert steps_of(bound) & set(IN_PLACE)


def test_inductor_gets_sums_in_new_memory() -> None:
    bound = bind(graph_of("new", early=False), fake_groups(MESH))
    assert not steps_of(_functional(bound)) & set(IN_PLACE.values())
