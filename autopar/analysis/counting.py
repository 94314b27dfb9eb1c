"""Values of the whole batch that are known before its first microbatch runs, and how they are
counted.

A loss ``Σa / Σf`` is no sum over microbatches of what each makes of its own a and f. It is one of
``Σa_m / F`` with the batch's F = Σf: labels that are not ignored, weights of classes, a mask's
ones. F follows from no parameter. So each microbatch's f_m are computed first, and F is an input of
every microbatch, in the place where its graph would compute its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from autopar.capture.trace import Trace


@dataclass(frozen=True, slots=True)
class Given:
    """A value of the whole batch.

    Attributes:
        node: name of the node of a microbatch's graph in whose place it is read.
        path: of the input.
        kind: whether the batch's value is the sum or the average of the microbatches' own.
    """

    node: str
    path: str
    kind: Literal["sum", "mean"]


@dataclass(frozen=True, slots=True)
class Counting:
    """What each microbatch makes of its own: the terms of values that all are given.

    Attributes:
        graph: from the buffers, by name, then the inputs, by path, of a microbatch, all whole, to
            the terms of `given`, as a tuple. Values that were counted before may be among the inputs.
    """

    graph: fx.Graph
    buffers: tuple[str, ...]
    inputs: tuple[str, ...]
    given: tuple[Given, ...]


def counting(part: Trace, given: Sequence[Given]) -> tuple[Counting, ...]:
    """How the terms of what is given are computed: one after another, since some follow from
    others.

    Args:
        part: the trace of one microbatch, which computes its own.
    """
    paths, of, ranks = {g.node: g.path for g in given}, {g.node: g for g in given}, dict[str, int]()
    for node in part.graph.nodes:
        rank = max((ranks[operand.name] for operand in node.all_input_nodes), default=0)
        ranks[node.name] = rank + (node.name in of)
    last = max((ranks[g.node] for g in given), default=0)
    rounds = [tuple(g for g in given if ranks[g.node] == rank) for rank in range(1, last + 1)]
    return tuple(_counting(part, now, paths) for now in rounds)


def _counting(part: Trace, given: tuple[Given, ...], paths: Mapping[str, str]) -> Counting:
    """Of values that do not follow from each other; `paths` of all."""
    own = {g.node for g in given}
    wanted, before = set(own), {name: path for name, path in paths.items() if name not in own}
    for node in reversed(part.graph.nodes):
        if node.name in wanted and node.name not in before:
            wanted |= {operand.name for operand in node.all_input_nodes}
    buffers = {b.node: b.name for b in part.buffers if b.node in wanted}
    inputs = {i.node: i.path for i in part.inputs if i.node in wanted}
    inputs |= {name: path for name, path in before.items() if name in wanted}
    graph = fx.Graph()
    env = {part.node(name): graph.placeholder(name) for name in (*buffers, *inputs)}
    for node in part.graph.nodes:
        if node.name in wanted and node not in env:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.output(tuple(env[part.node(g.node)] for g in given))
    return Counting(graph, tuple(buffers.values()), tuple(inputs.values()), given)
