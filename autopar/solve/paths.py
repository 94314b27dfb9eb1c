"""Which collectives of a layout graph can carry anything."""

from __future__ import annotations

from collections.abc import Iterable

from autopar.layout_graph import LayoutGraph


def useful_arcs(graph: LayoutGraph, supplied: Iterable[int], wanted: Iterable[int]) -> list[int]:
    """Arcs that lie on some path from a supplied to a wanted layout."""
    forward = reach(graph, supplied, backwards=False)
    backward = reach(graph, wanted, backwards=True)
    return [a for a, arc in enumerate(graph.arcs) if arc.src in forward and arc.dst in backward]


def reach(graph: LayoutGraph, start: Iterable[int], *, backwards: bool) -> set[int]:
    """The layouts that arcs lead to from `start`, or `backwards` those from which they lead there."""
    seen, stack = set(start), list(start)
    steps: dict[int, list[int]] = {}
    for arc in graph.arcs:
        a, b = (arc.dst, arc.src) if backwards else (arc.src, arc.dst)
        steps.setdefault(a, []).append(b)
    while stack:
        for after in steps.get(stack.pop(), []):
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return seen
