"""Which kernels given choices take, of those on offer.

A kernel does one collective for one product. Of several that could do a collective the one that
saves the most does it; of several collectives of a tensor that a product could do, it does the one
of which that is most. What a product scatters at once is nowhere in one piece: so nobody else may
read it so, and one collective alone may start from there; nor is what arrives anywhere by itself
where the kernel does what its reader would. And a product is cut into chunks one way: where some
instances have what they read gathered and some what they make scattered, the ones that save more
have it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from autopar.core.layout_graph import Arc, LayoutGraph
from autopar.core.problem import Hidden, Kernel, Problem
from autopar.core.streams import Load
from autopar.solve.prices import saved_load

Chosen = tuple[Sequence[int], Mapping[int, int]]
"""Strategy per op, and of those that backward runs again."""


@dataclass(frozen=True, slots=True)
class Taken:
    """The kernel of one collective: the op whose product does it, `again` as backward runs that
    again; `norms` where it norms as well."""

    op: int
    again: bool
    hidden: Hidden
    norms: bool = False


class Moves(Protocol):
    """A variant's collectives in one phase (`autopar.solve.moves.Redistribution`)."""

    @property
    def arcs(self) -> tuple[Arc, ...]: ...

    @property
    def taken(self) -> Mapping[int, Taken]: ...


M = TypeVar("M", bound=Moves)


def usable(problem: Problem, v: int, late: bool, chosen: Chosen) -> tuple[Kernel, ...]:
    """The kernels on offer whose product, and what they add to it or do after it, run with one
    of their strategies."""
    now, again = chosen

    def runs(kernel: Kernel) -> bool:
        needed = (kernel.op, kernel.strategies), kernel.product, *kernel.also
        return all(
            (again.get(op, -1) if kernel.again else now[op]) in strategies
            for op, strategies in needed
        )

    return tuple(filter(runs, problem.kernels.get((v, late), ())))


def most_saved(graph: LayoutGraph, kernels: Sequence[Kernel]) -> dict[tuple[int, int], float]:
    """Ends of an arc → the most that a kernel saves there."""
    most: dict[tuple[int, int], float] = {}
    for hidden in (hidden for kernel in kernels for hidden in kernel.hides):
        ends = graph.arcs[hidden.arc].src, graph.arcs[hidden.arc].dst
        most[ends] = max(most.get(ends, 0.0), hidden.saved_s)
    return most


def pick_kernels(
    problem: Problem, v: int, arcs: Sequence[Arc], wanted: set[int], kernels: Sequence[Kernel]
) -> dict[int, Taken]:
    """Position of a collective among `arcs` → the kernel that does it."""
    graph = problem.values[problem.variants[v].value].graph
    at = {(arc.src, arc.dst): i for i, arc in enumerate(arcs)}
    starting = [arc.src for arc in arcs]
    offers = []
    for kernel in kernels:
        for hidden in kernel.hides:
            arc = graph.arcs[hidden.arc]
            whole = arc.collective.kind != "reduce_scatter" or (
                arc.src not in wanted and starting.count(arc.src) == 1
            )
            if (arc.src, arc.dst) in at and whole:
                offers.append(
                    (
                        -hidden.saved_s,
                        kernel.product[0],
                        kernel.again,
                        hidden.arc,
                        hidden,
                        bool(kernel.also),
                    )
                )
    found: dict[int, Taken] = {}
    busy: set[tuple[int, bool]] = set()
    for _, op, again, a, hidden, norms in sorted(offers, key=lambda offer: offer[:4]):
        position = at[graph.arcs[a].src, graph.arcs[a].dst]
        if position not in found and (op, again) not in busy:
            found[position] = Taken(op, again, hidden, norms)
            busy.add((op, again))
    return found


def unseen_layouts(arcs: Sequence[Arc], taken: Mapping[int, Taken]) -> set[int]:
    """The layouts in which a tensor is nowhere by itself where these kernels do some of its
    collectives."""
    scattered = {arcs[i].src for i in taken if arcs[i].collective.kind == "reduce_scatter"}
    return scattered | {arcs[i].dst for i, each in taken.items() if each.norms}


def saved_by(problem: Problem, v: int, late: bool, moves: Moves) -> Load:
    """What the kernels of all instances of a variant take away."""
    return saved_load(
        problem, v, late=late, saved_s=sum(t.hidden.saved_s for t in moves.taken.values())
    )


def without_clashes(
    problem: Problem, forward: Mapping[int, M], backward: Mapping[int, M]
) -> tuple[dict[int, M], dict[int, M]]:
    """The same, each product cut into chunks one way."""
    both = dict(forward), dict(backward)
    saved: dict[tuple[int, bool], dict[str, float]] = {}
    for v, _, kind, each in _all(both):
        sums = saved.setdefault((each.op, each.again), {})
        sums[kind] = sums.get(kind, 0.0) + problem.variants[v].count * each.hidden.saved_s
    ways = {
        product: min(sums, key=lambda kind: (-sums[kind], kind))
        for product, sums in saved.items()
        if len(sums) > 1
    }
    for v, moves, kind, each in list(_all(both)) if ways else ():
        if ways.get((each.op, each.again), kind) != kind:
            left = {i: t for i, t in moves[v].taken.items() if t != each}
            moves[v] = replace(moves[v], taken=left)  # type: ignore[type-var]  # a frozen dataclass
    return both


def regions_of(forward: Mapping[int, Moves], backward: Mapping[int, Moves]) -> frozenset[int]:
    """What the kernels that are taken reach their peers through."""
    hidden = (
        each.hidden
        for phase in (forward, backward)
        for moves in phase.values()
        for each in moves.taken.values()
    )
    return frozenset(each.region for each in hidden if each.region is not None)


def within(problem: Problem, regions: frozenset[int] | None) -> Problem:
    """The problem with the kernels and routes that need no other regions; None is all."""
    if regions is None or len(regions) == len(problem.regions):
        return problem
    routes = {
        where: route for where, route in problem.routes.items() if regions.issuperset(route.regions)
    }
    kernels: dict[tuple[int, bool], tuple[Kernel, ...]] = {}
    for where, offered in problem.kernels.items():
        left = (
            replace(k, hides=tuple(h for h in k.hides if h.region is None or h.region in regions))
            for k in offered
        )
        kernels[where] = tuple(k for k in left if k.hides)
    return replace(problem, kernels=kernels, routes=routes)


def _all(
    phases: tuple[dict[int, M], dict[int, M]],
) -> Iterator[tuple[int, dict[int, M], str, Taken]]:
    for moves in phases:
        for v, here in moves.items():
            for i, each in here.taken.items():
                yield v, moves, here.arcs[i].collective.kind, each
