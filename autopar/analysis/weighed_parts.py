"""The graph of one microbatch, with what it is given of the batch and what it reads more of."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from autopar.analysis.counting import Given
from autopar.analysis.time_sites import Edge
from autopar.capture.graphs import copied, dtype_of, emit, shape_of, sweep
from autopar.capture.trace import Input, Trace
from autopar.rules import operands_of

OF_BATCH = "of the batch"  # ends keys of nodes that the batch's graph has not


def raise_operands(part: Trace, raised: Mapping[Edge, int], num: int) -> Trace:
    """The trace in which nodes read `num`^k times as much of some operands.

    Args:
        raised: name of a node (``output`` for the graph's results) and which of its operands → k.
    """
    if not raised:
        return part
    graph = copied(part.graph)
    nodes = {node.name: node for node in graph.nodes}
    readers: dict[tuple[fx.Node, int], list[Edge]] = defaultdict(list)
    for (name, index), power in raised.items():
        readers[operands_of(nodes[name])[index], power].append((name, index))
    order = {node: place for place, node in enumerate(nodes.values())}
    products: dict[tuple[fx.Node, str, int], fx.Node] = {}
    for (operand, power), edges in readers.items():
        for name, index in sorted(edges, key=lambda edge: order[nodes[edge[0]]]):
            reader = nodes[name]
            product = _power(operand, _phase(operand, reader), power, num, products, reader)
            _read(reader, index, product)
    graph.lint()
    return _with_graph(part, graph)


def _phase(operand: fx.Node, reader: fx.Node) -> str:
    phase = reader.meta.get("phase") or operand.meta.get("phase")
    return str(phase)


def _power(
    operand: fx.Node,
    phase: str,
    power: int,
    num: int,
    products: dict[tuple[fx.Node, str, int], fx.Node],
    reader: fx.Node,
) -> fx.Node:
    """The operand times `num`^`power`, in a phase."""
    if power == 0:
        return operand
    found = products.get((operand, phase, power))
    if found is None:
        below = _power(operand, phase, power - 1, num, products, reader)
        like = below if below.op == "call_function" else reader
        after = operand.meta.get("phase") == phase and operand.op == "call_function"
        graph = operand.graph
        place = graph.inserting_after(below) if after else graph.inserting_before(reader)
        with place:
            times = torch.ops.aten.mul.Tensor
            found = emit(like, times, (below, num), shape_of(below), dtype=dtype_of(below))
        found.meta["phase"] = phase
        found.meta["key"] = f"{below.meta['key']}/{OF_BATCH}"
        products[operand, phase, power] = found
    return found


def _read(reader: fx.Node, index: int, product: fx.Node) -> None:
    """Let a node read another one as its operand of that number."""
    counted = iter(range(len(operands_of(reader))))

    def other(operand: fx.Node) -> fx.Node:
        return product if next(counted) == index else operand

    arguments: Any = fx.map_arg((reader.args, reader.kwargs), other)
    reader.args, reader.kwargs = arguments


def take_given(part: Trace, given: Sequence[Given]) -> Trace:
    """The trace that takes what is given of the batch as inputs, and does not compute it."""
    graph = copied(part.graph)
    nodes = {node.name: node for node in graph.nodes}
    inputs = list(part.inputs)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    last = placeholders[len(part.parameters) + len(part.buffers) + len(inputs) - 1]
    for g in given:
        node = nodes[g.node]
        with graph.inserting_after(last):
            last = graph.create_node("placeholder", f"{g.node}_of_batch")
        last.meta = {**node.meta, "phase": "forward", "key": f"{node.meta['key']}/{OF_BATCH}"}
        node.replace_all_uses_with(last)
        inputs.append(Input(g.path, last.name, shape_of(node), dtype_of(node), given=True))
    sweep(graph)
    graph.lint()
    return replace(_with_graph(part, graph), inputs=tuple(inputs))


def _with_graph(part: Trace, graph: fx.Graph) -> Trace:
    """The trace of another graph, with its results."""
    results = next(iter(reversed(graph.nodes))).args[0]
    pairs = zip(part.outputs, results, strict=False)
    return replace(
        part, graph=graph, outputs=tuple(replace(o, node=result.name) for o, result in pairs)
    )
