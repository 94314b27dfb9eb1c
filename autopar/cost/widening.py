"""Partial sums that are reduced in a wider dtype than their own: while they are widened both copies are there.

Gradients of 16-bit parameters are reduced in fp32 (`autopar.layout_graph`), as soon as they are made. A reduction need not be
the first step: what is replicated on another axis may be cut there before.
"""

from __future__ import annotations

from autopar.layout_graph import LayoutGraph
from autopar.problem import Problem, Value

WIDENED = "/widen"
"""Ends the name of a moment at which what a node made is widened, as it ends the key of the node that does that."""


def widened_bytes(problem: Problem, value: Value) -> list[int]:
    """Bytes of the sums and of their wide copy, at least, per strategy of what makes them; 0 where it makes none, or they are read so."""
    ops = problem.ops
    uses = {use for variant in problem.variants if problem.values[variant.value] is value for use in variant.uses}
    wanted = {s.layouts.inputs[use.operand] for use in uses for s in ops[use.op].strategies}
    fewest: dict[int, int] = {}
    found = []
    for strategy in ops[value.op].strategies:
        layout = strategy.layouts.outputs[value.result]
        if layout in wanted or not layout.has_partial:
            found.append(0)
        else:
            made = value.graph.index[layout]
            if made not in fewest:
                fewest[made] = _fewest(value.graph, made)
            found.append(fewest[made])
    return found


def _fewest(graph: LayoutGraph, made: int) -> int:
    """Over the reductions that may come first; 0 where they are in the dtype of the tensor."""
    outgoing, queue, both = graph.outgoing(), [made], []
    for layout in queue:  # grows while it is walked
        for arc in outgoing[layout]:
            if arc.collective.reduce_op:
                narrow, wide = graph.bytes[layout], arc.collective.bytes
                both.append(narrow + wide if wide > narrow else 0)
            elif arc.dst not in queue:
                queue.append(arc.dst)
    return min(both, default=0)
