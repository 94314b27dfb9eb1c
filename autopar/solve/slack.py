"""Which communication may run beside compute: the slack of each collective of given choices.

    prefetchable   what it reads is there at the start of its phase: what rests (parameters, buffers, inputs, what comes from
                   another stage), what is kept, and what other prefetchable collectives made of the same tensor
    deferrable     what it makes is read at the end of its phase alone: gradients, outputs, what is kept for backward
    critical       all others: some op waits for it, and it waits for some op

A slice moves nothing between devices: it has the slack of its place, and is no communication. Slack follows from the choices alone.
Emission and explanation go by what is said here; pricing by where it is so whatever is chosen (`autopar.solve.prices`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from autopar.layout_graph import Arc
from autopar.problem import Slack


def slacks(arcs: Sequence[Arc], at_hand: Collection[int], waited_for: Collection[int]) -> tuple[Slack, ...]:
    """Of each of a tree's arcs, which stand in an order in which each begins where one before it ended.

    Args:
        at_hand: layouts (node indices) of the tensor that are there at the start of the phase.
        waited_for: layouts in which ops read it before the end of the phase.
    """
    there = set(at_hand)
    there_from: list[bool] = []
    for arc in arcs:
        there_from.append(arc.src in there)
        there |= {arc.dst} if arc.src in there else set()
    awaited = set(waited_for)
    found: list[Slack] = []
    for arc, early in zip(reversed(arcs), reversed(there_from), strict=True):
        late = arc.dst not in awaited
        awaited |= set() if late else {arc.src}
        found.append("prefetchable" if early else "deferrable" if late else "critical")
    return tuple(reversed(found))
