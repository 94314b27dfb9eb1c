"""Nodes that are created without a search of their arguments equal those that torch creates."""

from __future__ import annotations

import torch
from torch import fx

from autopar.core.fx_nodes import add_call, copy_node

_VIEW, _FULL = torch.ops.aten.view.default, torch.ops.aten.full_like.default


def as_data(graph: fx.Graph) -> list[object]:
    return [
        (n.op, n.name, n.target, str(n.args), str(n.kwargs), n.type, n.meta, [*map(str, n.users)])
        for n in graph.nodes
    ]


def by_torch() -> fx.Graph:
    graph = fx.Graph()
    x = graph.placeholder("x", float)
    flat = graph.call_function(_VIEW, (x, [2, -1]))
    flat.meta["key"] = "flat"
    whole = graph.call_function(_FULL, (flat, 1.0), {"dtype": torch.float32})
    graph.output((whole, flat))
    return graph


def test_a_call_is_added_as_torch_adds_it() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x", float)
    flat = add_call(graph, _VIEW, (x, [2, -1]))
    flat.meta["key"] = "flat"
    whole = add_call(graph, _FULL, (flat, 1.0), {"dtype": torch.float32})
    graph.output((whole, flat))
    assert as_data(graph) == as_data(by_torch())


def test_a_node_is_copied_as_torch_copies_it() -> None:
    source, copy, plain = by_torch(), fx.Graph(), fx.Graph()
    made, wanted = dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for node in source.nodes:
        made[node] = copy_node(copy, node, made.__getitem__)
        wanted[node] = plain.node_copy(node, wanted.__getitem__)
    assert as_data(copy) == as_data(plain) == as_data(source)
    flat = next(node for node in source.nodes if node.meta)
    made[flat].meta["key"] = "changed"
    assert flat.meta["key"] == "flat"
