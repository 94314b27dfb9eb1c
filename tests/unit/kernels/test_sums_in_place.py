"""Sums over ranks are computed in place if nothing else reads the operand."""

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
    """Return a graph of a product and its sum over ranks. `operand` describes the operand of the
    sum."""
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
def test_product_with_no_other_reader_is_summed_in_place(early: bool) -> None:
    bound = bind(graph_of("new", early=early), fake_groups(MESH))
    assert steps_of(bound) & set(IN_PLACE.values())
    products: list[torch.Tensor] = []

    class Products(fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            result = super().call_function(target, args, kwargs)
            products.extend([result] if target is dot else [])
            return result

    total = Products(bound).run(torch.randn(2, 4), torch.randn(4, 3))[0]
    assert total.data_ptr() == products[0].data_ptr()


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("operand", ["given", "read twice", "returned", "a view"])
def test_operand_with_another_reader_is_not_overwritten(operand: str, early: bool) -> None:
    bound = bind(graph_of(operand, early=early), fake_groups(MESH))
    assert not steps_of(bound) & set(IN_PLACE.values())
    assert steps_of(bound) & set(IN_PLACE)


def test_inductor_gets_out_of_place_sums() -> None:
    bound = bind(graph_of("new", early=False), fake_groups(MESH))
    assert not steps_of(_functional(bound)) & set(IN_PLACE.values())
