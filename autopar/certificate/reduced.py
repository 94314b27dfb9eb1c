"""Multipliers over the layouts of one tensor, as arrays: what lies behind a layout, and what a collective costs beyond its worth."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from autopar.layout_graph import LayoutGraph

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Flags = NDArray[np.bool_]


def flags(num: int, layouts: Iterable[Ints]) -> Flags:
    """Those of `num` layouts that are among any of the given."""
    found = np.zeros(num, bool)
    for each in layouts:
        found[each] = True
    return found


def weighted(num: int, terms: Iterable[tuple[int, Floats]]) -> Floats:
    return sum((times * pi for times, pi in terms), np.zeros(num))


def ends_of(graph: LayoutGraph) -> tuple[Ints, Ints]:
    """Where collectives start and end."""
    return np.array([a.src for a in graph.arcs], int), np.array([a.dst for a in graph.arcs], int)


def led(graph: LayoutGraph, start: Flags, *, back: bool = False) -> Flags:
    """The layouts that collectives lead to, or, `back`, come from."""
    tails, heads = ends_of(graph)[:: -1 if back else 1]
    found = start.copy()
    for _ in graph.layouts:
        found[heads[found[tails]]] = True
    return found


def raise_to_ends(graph: LayoutGraph, pi: Floats, reached: Flags) -> None:
    """Raise π, where the layout is never reached, to the most of what collectives lead to."""
    tails, heads = ends_of(graph)
    free = ~reached[tails]
    for _ in graph.layouts:
        np.maximum.at(pi, tails[free], pi[heads[free]])


def in_full(graph: LayoutGraph) -> Floats:
    """Seconds of collectives."""
    return np.array([a.time_s for a in graph.arcs])


def beyond_worth(graph: LayoutGraph, pis: Sequence[tuple[int, Floats]], worth: Floats, seconds: Floats) -> Floats:
    """What each collective costs beyond its worth and what π rises along it: for all readers for whom it does, or else for the best."""
    if not pis or not graph.arcs:
        return seconds
    tails, heads = ends_of(graph)
    steps = [pi[heads] - pi[tails] for _, pi in pis]
    up = sum(times * np.maximum(step, 0.0) for (times, _), step in zip(pis, steps, strict=True))
    rises = np.where(np.max(steps, axis=0) > 0.0, up, np.max(steps, axis=0))
    return seconds - worth[heads] - rises
