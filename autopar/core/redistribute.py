"""From one layout to another: the cheapest chains and trees in the layout graph of a tensor
(`autopar.core.layout_graph`).

A *tree* leads from the layouts a tensor is at hand in to all layouts that are wanted, and pays each
arc once, however many wanted layouts lie behind it: one all-gather feeds q, k and v. Hierarchical
all-reduces (reduce-scatter within the node, all-reduce across, all-gather back) are paths of this
graph and need no rule of their own.

The invariant: a tree is a tuple of `Step`s; the sum of their prices is the price, and each is
emitted as one collective.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from autopar.core.collective import Collective
from autopar.core.layout import Layout
from autopar.core.layout_graph import Arc, LayoutGraph, Price, layout_graph
from autopar.errors import LayoutError

_EXACT_TARGETS = (
    5  # Dreyfus-Wagner is 3^k; above this many wanted layouts the union of shortest paths is taken
)


@dataclass(frozen=True, slots=True)
class Step:
    """One emitted redistribution step; `time_s` and `share_s` as for `Arc`."""

    source: Layout
    target: Layout
    collective: Collective
    time_s: float
    share_s: float | None = None

    def divide(self, num: int) -> Step:
        """Return the step with its seconds divided by `num` microbatches."""
        return replace(
            self,
            time_s=self.time_s / num,
            share_s=None if self.share_s is None else self.share_s / num,
        )

    @property
    def counted_s(self) -> float:
        """Seconds that are counted: the share of a bucket if it may be in one, else `time_s`."""
        return self.time_s if self.share_s is None else self.share_s


def _duration(arc: Arc) -> float:
    return arc.time_s


def cheapest_tree(
    graph: LayoutGraph,
    sources: Iterable[int],
    targets: Iterable[int],
    cost: Callable[[Arc], float] = _duration,
) -> tuple[Arc, ...]:
    """Return the cheapest set of arcs that leads from any of `sources` to all `targets`.

    It is exact by Dreyfus and Wagner (1971), "The Steiner problem in graphs", on directed arcs, for
    up to five targets. For more it is the union of cheapest paths.

    Args:
        graph: the layout graph.
        sources: indices of the layouts that exist.
        targets: indices of the layouts to make.
        cost: cost of an arc; by default its seconds.

    Raises:
        LayoutError: if a target cannot be reached.
    """
    have = sorted(set(sources))
    want = sorted(set(targets) - set(have))
    if not want:
        return ()
    if not have:
        raise LayoutError(
            f"no version is at hand to make {', '.join(str(graph.layouts[t]) for t in want)} from"
        )
    if 1 < len(want) <= _EXACT_TARGETS:
        arcs = _steiner(graph, have, want, cost)
    else:
        arcs = {arc for target in want for arc in _chain(graph, have, target, cost)}
    return _in_order(have, arcs)


def _chain(
    graph: LayoutGraph, have: list[int], target: int, cost: Callable[[Arc], float]
) -> set[Arc]:
    """Dijkstra against the arcs, up to the nearest existing layout: the result of `_steiner` for
    one target."""
    root, incoming = have[0], _arcs_by_end(graph, have)
    far, how, heap = [math.inf] * len(graph.layouts), dict[int, Arc](), [(0.0, target)]
    far[target] = 0.0
    while heap and heap[0][1] != root:
        so_far, v = heapq.heappop(heap)
        if so_far > far[v]:
            continue
        for arc, source in incoming[v]:
            if (longer := so_far + cost(arc)) < far[source]:
                far[source], how[source] = longer, arc
                heapq.heappush(heap, (longer, source))
    _refuse_unreached(graph, far[root], have, [target])
    arcs: set[Arc] = set()
    while root != target:
        arcs.add(how[root])
        root = how[root].dst
    return arcs


def _arcs_by_end(graph: LayoutGraph, have: list[int]) -> list[list[tuple[Arc, int]]]:
    """By node, the arcs that end there, each with the node that it begins at. What is at hand is
    one node, the first, where none ends: so each branch of a tree begins where that is cheapest."""
    at_hand, by_end = set(have), [list[tuple[Arc, int]]() for _ in graph.layouts]
    for arc in graph.arcs:
        if arc.dst not in at_hand:
            by_end[arc.dst].append((arc, have[0] if arc.src in at_hand else arc.src))
    return by_end


def _refuse_unreached(graph: LayoutGraph, cost: float, have: list[int], want: list[int]) -> None:
    """Refuse what costs more than anything."""
    if cost == math.inf:
        names = ", ".join(str(graph.layouts[t]) for t in want)
        raise LayoutError(
            f"no chain of collectives leads from {[str(graph.layouts[s]) for s in have]} to {names}"
        )


def _steiner(
    graph: LayoutGraph, have: list[int], want: list[int], cost: Callable[[Arc], float]
) -> set[Arc]:
    """Dreyfus-Wagner: best[mask][v] is the price of a tree rooted at v that reaches the wanted
    layouts in mask."""
    root, incoming = (
        have[0],
        [[(arc, v, cost(arc)) for arc, v in arcs] for arcs in _arcs_by_end(graph, have)],
    )
    num, full = len(graph.layouts), (1 << len(want)) - 1
    best = [[math.inf] * num for _ in range(full + 1)]
    how: list[list[Arc | int | None]] = [[None] * num for _ in range(full + 1)]
    for mask in range(1, full + 1):
        row = best[mask]
        if mask & (mask - 1) == 0:
            row[want[mask.bit_length() - 1]] = 0.0
        sub = (mask - 1) & mask
        while sub > mask - sub:
            for v in range(num):
                if (both := best[sub][v] + best[mask ^ sub][v]) < row[v]:
                    row[v], how[mask][v] = both, sub
            sub = (sub - 1) & mask
        _relax(row, how[mask], incoming)
    _refuse_unreached(graph, best[full][root], have, want)
    return _collect(how, full, root)


def _relax(
    row: list[float], how: list[Arc | int | None], incoming: list[list[tuple[Arc, int, float]]]
) -> None:
    """Dijkstra against the arcs, from every node that has a price."""
    heap = [(cost, v) for v, cost in enumerate(row) if cost < math.inf]
    heapq.heapify(heap)
    while heap:
        cost, v = heapq.heappop(heap)
        if cost > row[v]:
            continue
        for arc, source, price in incoming[v]:
            if (longer := cost + price) < row[source]:
                row[source], how[source] = longer, arc
                heapq.heappush(heap, (longer, source))


def _collect(how: list[list[Arc | int | None]], mask: int, root: int) -> set[Arc]:
    arcs: set[Arc] = set()
    stack = [(mask, root)]
    while stack:
        mask, v = stack.pop()
        choice = how[mask][v]
        if isinstance(choice, Arc):
            arcs.add(choice)
            stack.append((mask, choice.dst))
        elif choice is not None:
            stack += [(choice, v), (mask ^ choice, v)]
    return arcs


def _in_order(have: list[int], arcs: set[Arc]) -> tuple[Arc, ...]:
    """The arcs so that each starts where one before it ended; arcs into what is at hand already
    are left out."""
    ready, ordered = set(have), list[Arc]()
    remaining = sorted(arcs, key=lambda a: (a.src, a.dst))
    while remaining:
        step = next((a for a in remaining if a.src in ready), None)
        if step is None:
            break
        remaining.remove(step)
        if step.dst not in ready:
            ready.add(step.dst)
            ordered.append(step)
    return tuple(ordered)


def cheapest_chain(
    shape: Sequence[int],
    dtype: torch.dtype,
    mesh_shape: Sequence[int],
    source: Layout,
    target: Layout,
    price: Price,
    share: Price | None = None,
) -> tuple[Step, ...]:
    """Return the cheapest chain of collectives from `source` to `target`, each by itself.

    Args:
        shape: shape of the whole tensor.
        dtype: its dtype.
        mesh_shape: devices on each axis of the mesh.
        source, target: the layouts at the ends of the chain.
        price: seconds of a collective by itself.
        share: seconds of a collective as a part of a bucket; None if there are no buckets.
    """
    graph = layout_graph(shape, dtype, mesh_shape, [source], [target], price, share=share)
    arcs = cheapest_tree(graph, [graph.index[source]], [graph.index[target]])
    return tuple(
        Step(graph.layouts[a.src], graph.layouts[a.dst], a.collective, a.time_s, a.share_s)
        for a in arcs
    )
