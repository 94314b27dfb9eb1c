"""What given choices cost, by arithmetic alone: no solver, exact trees of collectives.

A step takes at least max(C + s·P, P) + K seconds per phase (`autopar.streams`), which is what is minimised; trees are the cheapest where
an early second costs s.

A kernel that is on offer (`autopar.cost.kernels`) is taken where it saves something: of one collective by one product, and of a product
either what is gathered for it or what its result is scattered by, for all instances alike (`autopar.solve.taken`).

The same function prices the incumbent, runner-ups and hand-made choices, and says which versions of a value forward
makes, which are kept and which collectives run. Emission follows it step by step, so that what is priced is emitted.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from autopar.choices import Choices
from autopar.collective import Collective, Kind
from autopar.errors import LayoutError
from autopar.layout import Layout
from autopar.layout_graph import Arc, LayoutGraph
from autopar.problem import Problem, Slack, Use, Value
from autopar.redistribute import cheapest_tree
from autopar.solve.memory import budget_rows
from autopar.solve.prices import arc_loads, is_early, op_load, routed_load, tree_costs
from autopar.solve.slack import slacks
from autopar.solve.taken import Chosen, Taken, most_saved, regions_of, saved_by, taken, unseen, usable, within, without_clashes
from autopar.streams import ON_COMPUTE, Load, work


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The collectives of one variant in one phase: `sources` at hand, `arcs` in order, `wanted` layouts (node indices), the slack of each
    arc, whether it counts as early (`autopar.solve.prices`), and the kernels that do some (position among `arcs` → which). Times are of one
    instance; `load` is without what kernels save."""

    sources: tuple[int, ...]
    arcs: tuple[Arc, ...]
    wanted: tuple[int, ...]
    time_s: float
    slacks: tuple[Slack, ...] = ()
    early: bool = False
    load: Load = Load()  # noqa: RUF009 - frozen
    taken: Mapping[int, Taken] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Cost of given choices, per device and step.

    Attributes:
        compute_s, communication_s: as they take alone. saved_s: what kernels save of both.
        load: how much of the rest may run at once.
        slowdown: the profile's `overlap_slowdown`.
        kept_bytes, static_bytes, gradient_bytes: what rests between forward and backward, always, and at the end.
        host_bytes: of the host's memory, at most.
        kept: per variant, the versions kept (only those that backward reads).
        forward, backward: per variant, its redistributions.
        resting_bytes: left side of each budget row (`autopar.solve.memory.budget_rows`), in their order.
        regions: those that kernels and routes need; `static_bytes` holds them, too. routed: the ops whose routes are taken, and whether
            as backward runs them again.
    """

    compute_s: float
    communication_s: float
    kept_bytes: int
    static_bytes: int
    gradient_bytes: int
    kept: Mapping[int, tuple[int, ...]]
    forward: Mapping[int, Redistribution]
    backward: Mapping[int, Redistribution]
    resting_bytes: tuple[int, ...]
    load: Load
    slowdown: float
    saved_s: float = 0.0
    regions: frozenset[int] = frozenset()
    routed: frozenset[tuple[int, bool]] = frozenset()
    host_bytes: int = 0

    @property
    def objective_s(self) -> float:
        return self.load.least_s(self.slowdown)


def fits(problem: Problem, evaluation: Evaluation) -> bool:
    """Whether all budget rows hold, and the host's."""
    return max(evaluation.resting_bytes) <= problem.budget_bytes and evaluation.host_bytes <= problem.host_budget_bytes


def demand(problem: Problem, use: Use, chosen: Mapping[int, int] | Sequence[int]) -> Layout:
    """The layout in which `use` reads, under the chosen strategy of its op."""
    return problem.ops[use.op].strategies[chosen[use.op]].layouts.inputs[use.operand]


def evaluate(
    problem: Problem,
    strategies: Sequence[int],
    recomputed: Mapping[int, int] | None = None,
    kept: Mapping[int, tuple[int, ...]] | None = None,
    regions: frozenset[int] | None = None,
) -> Evaluation:
    """Price choices.

    Args:
        strategies: strategy index per op. recomputed: strategy index per op that backward runs again.
        kept: per variant, the versions that may be kept; by default every keepable layout that forward makes, on the devices.
        regions: those that kernels may use; by default all.
    """
    problem = within(problem, regions)
    found = _evaluate(problem, strategies, recomputed or {}, kept)
    if found.saved_s and any(found.load.unbalanced(found.slowdown)):  # compute waits there anyway, so that kernels may save nothing
        without = _evaluate(replace(problem, kernels={}, routes={}), strategies, recomputed or {}, kept)
        found = min(found, without, key=lambda e: e.objective_s)
    return found


def evaluated(problem: Problem, choices: Choices) -> Evaluation:
    """As `evaluate`, of a solver's answer."""
    return evaluate(problem, choices.strategies, choices.recomputed, choices.kept, choices.regions)


def _evaluate(
    problem: Problem, strategies: Sequence[int], recomputed: Mapping[int, int], kept: Mapping[int, tuple[int, ...]] | None
) -> Evaluation:
    compute = sum(op.count * op.strategies[s].time_s for op, s in zip(problem.ops, strategies, strict=True))
    compute += sum(problem.ops[o].count * problem.ops[o].strategies[s].time_s for o, s in recomputed.items())
    static = sum(op.count * op.strategies[s].static_bytes for op, s in zip(problem.ops, strategies, strict=True))
    gradient = sum(op.count * op.strategies[s].gradient_bytes for op, s in zip(problem.ops, strategies, strict=True))
    on_host = sum(op.count * op.strategies[s].host_bytes for op, s in zip(problem.ops, strategies, strict=True))
    forward: dict[int, Redistribution] = {}
    backward: dict[int, Redistribution] = {}
    kept_now: dict[int, tuple[int, ...]] = {}
    held: dict[int, int] = {}
    stored: dict[int, int] = {}
    for v in range(len(problem.variants)):
        first, second, keep = _variant(problem, v, strategies, recomputed, kept)
        forward[v], backward[v], kept_now[v] = first, second, keep
        value = problem.values[problem.variants[v].value]
        own = first.sources if value.resident else ()
        held[v] = sum(value.bytes(n) for n in keep if n not in own)
        stored[v] = sum(map(value.host_bytes, keep))
        on_host += problem.num_in_flight * problem.variants[v].count * stored[v]
    kept_bytes = sum(problem.variants[v].count * size for v, size in held.items())
    communication = sum(problem.variants[v].count * r.time_s for phase in (forward, backward) for v, r in phase.items())
    runs = [*((n, s, False) for n, s in enumerate(strategies)), *((n, s, True) for n, s in recomputed.items())]
    load = sum((op_load(problem, n, s, again=again) for n, s, again in runs), Load())
    moves = ((v, r) for phase in (forward, backward) for v, r in phase.items() if r.arcs)
    load = sum((r.load.scaled(problem.variants[v].count) for v, r in moves), load)
    forward, backward = without_clashes(problem, forward, backward)
    routes = {(n, again): problem.routes[n, s] for n, s, again in runs if (n, s) in problem.routes}
    regions = regions_of(forward, backward).union(*(route.regions for route in routes.values()))
    static += sum(problem.regions[region] for region in regions)
    resting = tuple(row.size(static, strategies, recomputed, held, stored) for row in budget_rows(problem))
    saved = [(problem, v, late, r) for late, phase in ((False, forward), (True, backward)) for v, r in phase.items() if r.taken]
    less = sum((saved_by(*each) for each in saved), Load())
    less = sum((routed_load(problem, n, route.saved_s, again=again) for (n, again), route in routes.items()), less)
    load = replace(load + less, serial_s=compute + communication + less.serial_s)
    return Evaluation(
        compute, communication, kept_bytes, static, gradient, kept_now, forward, backward, resting, load, problem.overlap_slowdown,
        -less.serial_s, regions, frozenset(routes), on_host,
    )  # fmt: skip


def _variant(
    problem: Problem,
    v: int,
    strategies: Sequence[int],
    recomputed: Mapping[int, int],
    kept: Mapping[int, tuple[int, ...]] | None,
) -> tuple[Redistribution, Redistribution, tuple[int, ...]]:
    variant = problem.variants[v]
    value = problem.values[variant.value]
    graph = value.graph
    made = graph.index[problem.ops[value.op].strategies[strategies[value.op]].layouts.outputs[value.result]]
    now = [u for u in variant.uses if u.phase == value.phase]
    later = [u for u in variant.uses if u.phase != value.phase]
    rests = problem.ops[value.op].kind != "compute"
    wanted, awaited = _wanted(problem, graph, now, strategies)
    chosen = strategies, recomputed
    first = _redistribute(problem, v, False, {made}, wanted, {made} if rests else set(), awaited, chosen)
    wanted_later, awaited_later = _wanted(problem, graph, later, strategies)
    again, awaited_again = _wanted(problem, graph, [u for u in now if u.again and u.op in recomputed], recomputed)
    wanted_later |= again
    if not wanted_later:
        return first, Redistribution((), (), (), 0.0), ()
    versions = {made, *wanted} if value.keepable is None else {made, *wanted} & value.keepable
    allowed = versions if kept is None else versions & set(kept.get(v, ()))
    stored = {n for n in versions - allowed if kept is not None and value.stored(n) in kept.get(v, ()) and value.away(n) < math.inf}
    free = {made} if value.resident else set[int]()
    if value.op in recomputed:
        free.add(graph.index[problem.ops[value.op].strategies[recomputed[value.op]].layouts.outputs[value.result]])

    def later_from(allowed: set[int], stored: set[int]) -> tuple[Redistribution, tuple[int, ...]]:
        at_hand = allowed | ({made} if value.resident else set())
        awaited = awaited_later | awaited_again
        second = _redistribute(problem, v, True, allowed | free, wanted_later, at_hand, awaited, chosen, stored - free)
        read = {arc.src for arc in second.arcs} | set(second.wanted)
        return second, tuple(sorted(n for n in (*allowed, *map(value.stored, stored)) if n in read))

    second, keep = later_from(allowed, stored)
    if not unseen(first.arcs, first.taken).intersection(n % len(graph.layouts) for n in keep):
        return _storing(value, first, keep, {made} if rests else set(), awaited), second, keep
    # what a product scatters at once is nowhere in one piece, nor what it norms by itself: either it is not kept so, or not done at once
    plain = taken(problem, v, first.arcs, wanted, [k for k in usable(problem, v, False, chosen) if not k.also])
    layouts = {n % len(graph.layouts) for n in keep}
    apart = replace(first, taken={i: t for i, t in plain.items() if not unseen(first.arcs, {i: t}) & layouts})
    ways = [(apart, second, keep)]
    for doing in (first, *([replace(first, taken=plain)] if plain != first.taken else [])):
        with suppress(LayoutError):
            hidden = unseen(doing.arcs, doing.taken)
            ways.append((doing, *later_from(allowed - hidden, stored - hidden)))
    ways = [(_storing(value, way[0], way[2], {made} if rests else set(), awaited), *way[1:]) for way in ways]
    return min(ways, key=lambda way: _moved(problem, v, *way[:2]).priced_s(problem.overlap_slowdown, ON_COMPUTE))


def _storing(value: Value, first: Redistribution, keep: Sequence[int], at_hand: set[int], awaited: set[int]) -> Redistribution:
    """Forward's collectives, and copies of what is kept on the hosts."""
    stores = tuple(_copy(value, n, "store") for n in keep if value.on_host(n))
    if not stores:
        return first
    arcs, time_s = (*first.arcs, *stores), sum(arc.time_s for arc in stores)
    load = first.load + work("forward", time_s, compute=False, early=True)
    return replace(first, arcs=arcs, time_s=first.time_s + time_s, slacks=slacks(arcs, at_hand, awaited), load=load)


def _copy(value: Value, version: int, kind: Kind) -> Arc:
    """A copy of a version that is stored, there or from there."""
    layout, time_s = version - len(value.graph.layouts), value.away(version - len(value.graph.layouts))
    ends = (layout, version) if kind == "store" else (version, layout)
    return Arc(*ends, Collective(kind, -1, -1, -1, "", value.dtype, value.host_bytes(version)), time_s)


def _moved(problem: Problem, v: int, first: Redistribution, second: Redistribution) -> Load:
    """What all instances of a variant move, less what kernels save."""
    moved = (first.load + second.load).scaled(problem.variants[v].count)
    return sum((saved_by(problem, v, late, r) for late, r in ((False, first), (True, second)) if r.taken), moved)


def _wanted(
    problem: Problem, graph: LayoutGraph, uses: Iterable[Use], chosen: Mapping[int, int] | Sequence[int]
) -> tuple[set[int], set[int]]:
    """The layouts that the uses read, and of these the ones that ops wait for; parameters and outputs take theirs at a phase's end."""
    read = [(graph.index[demand(problem, use, chosen)], problem.ops[use.op].kind) for use in uses]
    return {layout for layout, _ in read}, {layout for layout, kind in read if kind == "compute"}


def _redistribute(
    problem: Problem, v: int, late: bool, sources: set[int], wanted: set[int], at_hand: set[int], awaited: set[int], chosen: Chosen,
    stored: Collection[int] = (),
) -> Redistribution:  # fmt: skip
    """The cheapest tree, after copies of those of the layouts that are `stored` on the hosts from which it starts."""
    value = problem.values[problem.variants[v].value]
    graph = value.graph
    kernels = usable(problem, v, late, chosen)
    tree = cheapest_tree(graph, {*sources, *stored}, wanted, tree_costs(problem, v, late=late, saved_s=most_saved(graph, kernels)))
    begun = {arc.src for arc in tree} | wanted
    fetches = tuple(_copy(value, value.stored(n), "fetch") for n in sorted(stored) if n in begun)
    arcs, early = (*fetches, *tree), is_early(problem, v, late=late)
    time_s = sum(arc.seconds(shares=early) for arc in arcs)
    at_hand = at_hand | {arc.src for arc in fetches}
    load = sum(map(arc_loads(problem, v, late=late), arcs), Load())
    which = taken(problem, v, arcs, wanted, kernels) if kernels else {}
    return Redistribution(tuple(sorted(sources)), arcs, tuple(sorted(wanted)), time_s, slacks(arcs, at_hand, awaited), early, load, which)


def variant_load(problem: Problem, v: int, strategies: Sequence[int], recomputed: Mapping[int, int]) -> Load | None:
    """Communication of one variant, all its instances; None where some layout cannot be reached."""
    try:
        first, second, _ = _variant(problem, v, strategies, recomputed, None)
    except LayoutError:
        return None
    return _moved(problem, v, first, second)
