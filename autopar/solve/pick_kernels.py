"""The choice among the offered kernels for a solution.

A kernel runs one collective together with one product. If several kernels can run a collective, the
one that saves the most is chosen. If a product can run with several collectives of a tensor, the
one with the largest saving is chosen. A result that a product scatters as it is computed never
exists as a whole: no op may read it so, and only one collective may start from it. Likewise, a
result that a kernel processes further as it arrives never exists separately. A product is divided
into chunks in one way: if some instances gather their operand and others scatter their result, the
kind that saves more is chosen.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from autopar.core.layout_graph import Arc, LayoutGraph
from autopar.core.problem import OverlapKernel, OverlapOption, Problem
from autopar.core.streams import Load
from autopar.solve.prices import saved_load

Chosen = tuple[Sequence[int], Mapping[int, int]]
"""The strategy of each op, and those of recomputed ops."""


@dataclass(frozen=True, slots=True)
class KernelUse:
    """The kernel of one collective: the op of its product, whether that op is recomputed, and
    whether the kernel also computes a norm (`norms`)."""

    op: int
    recomputed: bool
    hidden: OverlapOption
    norms: bool = False


class Moves(Protocol):
    """A variant's collectives in one phase (`autopar.solve.tensor_moves.Redistribution`)."""

    @property
    def arcs(self) -> tuple[Arc, ...]:
        """The collectives, in order."""
        ...

    @property
    def kernels(self) -> Mapping[int, KernelUse]:
        """Position of a collective among `arcs` → the kernel that runs it."""
        ...


M = TypeVar("M", bound=Moves)


def usable(problem: Problem, v: int, late: bool, chosen: Chosen) -> tuple[OverlapKernel, ...]:
    """Return the offered kernels whose ops all run with one of the kernel's strategies: the
    product, and the ops that the kernel adds to it or runs after it.

    Args:
        problem: the problem.
        v: index of the variant that is moved.
        late: whether backward reads a forward value.
        chosen: strategies, and those of ops that backward recomputes.
    """
    now, again = chosen

    def runs(kernel: OverlapKernel) -> bool:
        """Return whether each op of the kernel has one of the required strategies."""
        needed = (kernel.op, kernel.strategies), kernel.product, *kernel.also
        return all(
            (again.get(op, -1) if kernel.recomputed else now[op]) in strategies
            for op, strategies in needed
        )

    return tuple(filter(runs, problem.kernels.get((v, late), ())))


def most_saved(
    graph: LayoutGraph, kernels: Sequence[OverlapKernel]
) -> dict[tuple[int, int], float]:
    """Return (source, target) of an arc → the largest saving of a kernel there."""
    most: dict[tuple[int, int], float] = {}
    for hidden in (hidden for kernel in kernels for hidden in kernel.hides):
        ends = graph.arcs[hidden.arc].src, graph.arcs[hidden.arc].dst
        most[ends] = max(most.get(ends, 0.0), hidden.saved_s)
    return most


def pick_kernels(
    problem: Problem,
    v: int,
    arcs: Sequence[Arc],
    wanted: set[int],
    kernels: Sequence[OverlapKernel],
) -> dict[int, KernelUse]:
    """Assign collectives to kernels, the largest saving first.

    Args:
        problem: the problem.
        v: index of the variant that is moved.
        arcs: its collectives in one phase.
        wanted: the layouts that ops read.
        kernels: the candidates, as from `usable`.

    Returns:
        Position of a collective among `arcs` → the kernel that runs it.
    """
    graph = problem.values[problem.variants[v].value].graph
    at = {(arc.src, arc.dst): i for i, arc in enumerate(arcs)}
    starting = [arc.src for arc in arcs]
    offers = []
    for kernel in kernels:
        for hidden in kernel.hides:
            arc = graph.arcs[hidden.arc]
            moves_full_tensor = arc.collective.kind != "reduce_scatter" or (
                arc.src not in wanted and starting.count(arc.src) == 1
            )
            if (arc.src, arc.dst) in at and moves_full_tensor:
                offers.append(
                    (
                        -hidden.saved_s,
                        kernel.product[0],
                        kernel.recomputed,
                        hidden.arc,
                        hidden,
                        bool(kernel.also),
                    )
                )
    kernels_of_arcs: dict[int, KernelUse] = {}
    busy: set[tuple[int, bool]] = set()
    for _, op, again, a, hidden, norms in sorted(offers, key=lambda offer: offer[:4]):
        position = at[graph.arcs[a].src, graph.arcs[a].dst]
        if position not in kernels_of_arcs and (op, again) not in busy:
            kernels_of_arcs[position] = KernelUse(op, again, hidden, norms)
            busy.add((op, again))
    return kernels_of_arcs


def unseen_layouts(arcs: Sequence[Arc], taken: Mapping[int, KernelUse]) -> set[int]:
    """Return the layouts in which a tensor never exists separately, since these kernels run some of
    its collectives."""
    scattered = {arcs[i].src for i in taken if arcs[i].collective.kind == "reduce_scatter"}
    return scattered | {arcs[i].dst for i, each in taken.items() if each.norms}


def saved_by(problem: Problem, v: int, late: bool, moves: Moves) -> Load:
    """Return the savings of the kernels of all instances of a variant, as a negative load.

    Args:
        problem: the problem.
        v: index of the variant.
        late: whether backward reads a forward value.
        moves: its collectives in that phase.
    """
    return saved_load(
        problem, v, late=late, saved_s=sum(t.hidden.saved_s for t in moves.kernels.values())
    )


def without_clashes(
    problem: Problem, forward: Mapping[int, M], backward: Mapping[int, M]
) -> tuple[dict[int, M], dict[int, M]]:
    """Drop kernels until each product is cut into chunks in one way.

    Args:
        problem: the problem.
        forward, backward: variant → collectives.

    Returns:
        The collectives of both phases. Each product keeps the kind with the largest saving.
    """
    both = dict(forward), dict(backward)
    saved: dict[tuple[int, bool], dict[str, float]] = {}
    for v, _, kind, use in _all(both):
        sums = saved.setdefault((use.op, use.recomputed), {})
        sums[kind] = sums.get(kind, 0.0) + problem.variants[v].count * use.hidden.saved_s
    ways = {
        product: min(sums, key=lambda kind: (-sums[kind], kind))
        for product, sums in saved.items()
        if len(sums) > 1
    }
    for v, moves, kind, use in list(_all(both)) if ways else ():
        if ways.get((use.op, use.recomputed), kind) != kind:
            rest = {i: t for i, t in moves[v].kernels.items() if t != use}
            moves[v] = replace(moves[v], taken=rest)  # type: ignore[type-var]  # a frozen dataclass
    return both


def regions_of(forward: Mapping[int, Moves], backward: Mapping[int, Moves]) -> frozenset[int]:
    """Return the regions of memory through which the chosen kernels reach their peers."""
    hidden = (
        each.hidden
        for phase in (forward, backward)
        for moves in phase.values()
        for each in moves.kernels.values()
    )
    return frozenset(each.region for each in hidden if each.region is not None)


def within(problem: Problem, regions: frozenset[int] | None) -> Problem:
    """Return the problem with only the kernels and routes that need no other regions; None keeps
    all."""
    if regions is None or len(regions) == len(problem.regions):
        return problem
    routes = {
        key: route for key, route in problem.routes.items() if regions.issuperset(route.regions)
    }
    kernels: dict[tuple[int, bool], tuple[OverlapKernel, ...]] = {}
    for key, offered in problem.kernels.items():
        kernels_here = (
            replace(k, hides=tuple(h for h in k.hides if h.region is None or h.region in regions))
            for k in offered
        )
        kernels[key] = tuple(k for k in kernels_here if k.hides)
    return replace(problem, kernels=kernels, routes=routes)


def _all(
    phases: tuple[dict[int, M], dict[int, M]],
) -> Iterator[tuple[int, dict[int, M], str, KernelUse]]:
    for moves in phases:
        for v, here in moves.items():
            for i, use in here.kernels.items():
                yield v, moves, here.arcs[i].collective.kind, use
