"""What moves a tensor's instances under given choices: the cheapest trees of collectives of both
phases, at the prices of a balance.

A kernel that is on offer (`autopar.cost.kernels`) is taken where it saves something
(`autopar.solve.pick_kernels`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.core.collective import Collective, Kind
from autopar.core.layout import Layout
from autopar.core.layout_graph import Arc, LayoutGraph
from autopar.core.problem import Problem, Slack, Use, Value, is_early
from autopar.core.redistribute import cheapest_tree
from autopar.core.streams import ON_COMPUTE, Balance, Load, work
from autopar.errors import LayoutError
from autopar.solve.pick_kernels import (
    Chosen,
    Taken,
    most_saved,
    pick_kernels,
    saved_by,
    unseen_layouts,
    usable,
)
from autopar.solve.prices import arc_loads, tree_costs

# --------------------------------------------------------------------------------------------------
# Which communication may run beside compute: the slack of each collective of given choices.
#
# prefetchable what it reads is there at the start of its phase: what rests (parameters, buffers,
# inputs, what comes from another stage), what is kept, and what other prefetchable collectives
# made of the same tensor deferrable what it makes is read at the end of its phase alone:
# gradients, outputs, what is kept for backward critical all others: some op waits for it, and it
# waits for some op
#
# A slice moves nothing between devices: it has the slack of its place, and is no communication.
# Slack follows from the choices alone. Emission and explanation go by what is said here; pricing
# by where it is so whatever is chosen (`autopar.solve.prices`).


def slacks(
    arcs: Sequence[Arc], at_hand: Collection[int], waited_for: Collection[int]
) -> tuple[Slack, ...]:
    """Of each of a tree's arcs, which stand in an order in which each begins where one before it
    ended.

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


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The collectives of one variant in one phase: `sources` at hand, `arcs` in order, `wanted`
    layouts (node indices), the slack of each arc, whether it counts as early
    (`autopar.solve.prices`), and the kernels that do some (position among `arcs` → which). Times
    are of one instance; `load` is without what kernels save."""

    sources: tuple[int, ...]
    arcs: tuple[Arc, ...]
    wanted: tuple[int, ...]
    time_s: float
    slacks: tuple[Slack, ...] = ()
    early: bool = False
    load: Load = Load()  # noqa: RUF009 - frozen
    taken: Mapping[int, Taken] = field(default_factory=dict)


Moves = tuple[Redistribution, Redistribution, tuple[int, ...]]
"""Of a variant: in its own phase, in backward of what forward made, and the versions that are
kept between the two."""


def demand(problem: Problem, use: Use, chosen: Mapping[int, int] | Sequence[int]) -> Layout:
    """The layout in which `use` reads, under the chosen strategy of its op."""
    return problem.ops[use.op].strategies[chosen[use.op]].layouts.inputs[use.operand]


def moves_of(
    problem: Problem,
    v: int,
    strategies: Sequence[int],
    recomputed: Mapping[int, int],
    kept: Mapping[int, tuple[int, ...]] | None,
    balance: Balance = ON_COMPUTE,
) -> Moves:
    """What moves a variant. Arguments as of `autopar.solve.evaluate.evaluate`.

    Raises:
        LayoutError: where some layout cannot be reached.
    """
    variant = problem.variants[v]
    value = problem.values[variant.value]
    graph = value.graph
    made = graph.index[
        problem.ops[value.op].strategies[strategies[value.op]].layouts.outputs[value.result]
    ]
    now = [u for u in variant.uses if u.phase == value.phase]
    later = [u for u in variant.uses if u.phase != value.phase]
    rests = problem.ops[value.op].kind != "compute"
    wanted, awaited = _layouts_wanted(problem, graph, now, strategies)
    chosen = strategies, recomputed
    first = _redistribute(
        problem, v, False, {made}, wanted, {made} if rests else set(), awaited, chosen, balance
    )
    wanted_later, awaited_later = _layouts_wanted(problem, graph, later, strategies)
    again, awaited_again = _layouts_wanted(
        problem, graph, [u for u in now if u.again and u.op in recomputed], recomputed
    )
    wanted_later |= again
    if not wanted_later:
        return first, Redistribution((), (), (), 0.0), ()
    versions = {made, *wanted} if value.keepable is None else {made, *wanted} & value.keepable
    allowed = versions if kept is None else versions & set(kept.get(v, ()))
    stored = {
        n
        for n in versions - allowed
        if kept is not None
        and value.stored_version(n) in kept.get(v, ())
        and value.away(n) < math.inf
    }
    free = {made} if value.resident else set[int]()
    allowed |= free  # it is kept where it rests, whatever else is
    if value.op in recomputed:
        free.add(
            graph.index[
                problem.ops[value.op].strategies[recomputed[value.op]].layouts.outputs[value.result]
            ]
        )

    def later_from(allowed: set[int], stored: set[int]) -> tuple[Redistribution, tuple[int, ...]]:
        at_hand = allowed | ({made} if value.resident else set())
        awaited = awaited_later | awaited_again
        second = _redistribute(
            problem,
            v,
            True,
            allowed | free,
            wanted_later,
            at_hand,
            awaited,
            chosen,
            balance,
            stored - free,
        )
        read = {arc.src for arc in second.arcs} | set(second.wanted)
        return second, tuple(
            sorted(n for n in (*allowed, *map(value.stored_version, stored)) if n in read)
        )

    second, keep = later_from(allowed, stored)
    if not unseen_layouts(first.arcs, first.taken).intersection(
        n % len(graph.layouts) for n in keep
    ):
        return _add_stores(value, first, keep, {made} if rests else set(), awaited), second, keep
    # what a product scatters at once is nowhere in one piece, nor what it norms by itself: either
    # it is not kept so, or not done at once
    plain = pick_kernels(
        problem, v, first.arcs, wanted, [k for k in usable(problem, v, False, chosen) if not k.also]
    )
    layouts = {n % len(graph.layouts) for n in keep}
    apart = replace(
        first,
        taken={i: t for i, t in plain.items() if not unseen_layouts(first.arcs, {i: t}) & layouts},
    )
    ways = [(apart, second, keep)]
    for doing in (first, *([replace(first, taken=plain)] if plain != first.taken else [])):
        with suppress(LayoutError):
            hidden = unseen_layouts(doing.arcs, doing.taken)
            ways.append((doing, *later_from(allowed - hidden, stored - hidden)))
    ways = [
        (_add_stores(value, way[0], way[2], {made} if rests else set(), awaited), *way[1:])
        for way in ways
    ]
    return min(
        ways,
        key=lambda way: moved_load(problem, v, way).priced_s(problem.overlap_slowdown, balance),
    )


def _add_stores(
    value: Value, first: Redistribution, keep: Sequence[int], at_hand: set[int], awaited: set[int]
) -> Redistribution:
    """Forward's collectives, and copies of what is kept on the hosts."""
    stores = tuple(_copy(value, n, "store") for n in keep if value.on_host(n))
    if not stores:
        return first
    arcs, time_s = (*first.arcs, *stores), sum(arc.time_s for arc in stores)
    load = first.load + work("forward", time_s, compute=False, early=True)
    return replace(
        first,
        arcs=arcs,
        time_s=first.time_s + time_s,
        slacks=slacks(arcs, at_hand, awaited),
        load=load,
    )


def _copy(value: Value, version: int, kind: Kind) -> Arc:
    """A copy of a version that is stored, there or from there."""
    layout, time_s = (
        version - len(value.graph.layouts),
        value.away(version - len(value.graph.layouts)),
    )
    ends = (layout, version) if kind == "store" else (version, layout)
    return Arc(
        *ends, Collective(kind, -1, -1, -1, "", value.dtype, value.host_bytes(version)), time_s
    )


def moved_load(problem: Problem, v: int, moves: Moves) -> Load:
    """What all instances of a variant move, less what kernels save."""
    first, second, _ = moves
    moved = (first.load + second.load).scale(problem.variants[v].count)
    return sum(
        (saved_by(problem, v, late, r) for late, r in ((False, first), (True, second)) if r.taken),
        moved,
    )


def _layouts_wanted(
    problem: Problem,
    graph: LayoutGraph,
    uses: Iterable[Use],
    chosen: Mapping[int, int] | Sequence[int],
) -> tuple[set[int], set[int]]:
    """The layouts that the uses read, and of these the ones that ops wait for; parameters and
    outputs take theirs at a phase's end."""
    read = [(graph.index[demand(problem, use, chosen)], problem.ops[use.op].kind) for use in uses]
    return {layout for layout, _ in read}, {layout for layout, kind in read if kind == "compute"}


def _redistribute(
    problem: Problem,
    v: int,
    late: bool,
    sources: set[int],
    wanted: set[int],
    at_hand: set[int],
    awaited: set[int],
    chosen: Chosen,
    balance: Balance,
    stored: Collection[int] = (),
) -> Redistribution:
    """The cheapest tree, after copies of those of the layouts that are `stored` on the hosts
    from which it starts."""
    value = problem.values[problem.variants[v].value]
    graph = value.graph
    kernels = usable(problem, v, late, chosen)
    costs = tree_costs(problem, v, late=late, saved_s=most_saved(graph, kernels), balance=balance)
    tree = cheapest_tree(graph, {*sources, *stored}, wanted, costs)
    begun = {arc.src for arc in tree} | wanted
    fetches = tuple(
        _copy(value, value.stored_version(n), "fetch") for n in sorted(stored) if n in begun
    )
    arcs, early = (*fetches, *tree), is_early(problem, v, late=late)
    time_s = sum(arc.seconds(shares=early) for arc in arcs)
    at_hand = at_hand | {arc.src for arc in fetches}
    load = sum(map(arc_loads(problem, v, late=late), arcs), Load())
    which = pick_kernels(problem, v, arcs, wanted, kernels) if kernels else {}
    return Redistribution(
        tuple(sorted(sources)),
        arcs,
        tuple(sorted(wanted)),
        time_s,
        slacks(arcs, at_hand, awaited),
        early,
        load,
        which,
    )


def variant_load(
    problem: Problem, v: int, strategies: Sequence[int], recomputed: Mapping[int, int]
) -> Load | None:
    """Communication of one variant, all its instances; None where some layout cannot be reached."""
    try:
        return moved_load(problem, v, moves_of(problem, v, strategies, recomputed, None))
    except LayoutError:
        return None
