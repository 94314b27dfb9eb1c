"""What given choices cost, by arithmetic alone: no solver, exact trees of collectives.

The same function prices the incumbent, runner-ups and hand-made choices, and says which versions of a value forward
makes, which are kept and which collectives run. Emission follows it step by step, so that what is priced is emitted.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from autopar.errors import LayoutError
from autopar.layout import Layout
from autopar.problem import Problem, Slack, Use
from autopar.redistribute import Arc, LayoutGraph, cheapest_tree
from autopar.solve.memory import budget_rows
from autopar.solve.slack import slacks


@dataclass(frozen=True, slots=True)
class Redistribution:
    """The collectives of one variant in one phase: `sources` at hand, `arcs` in order, `wanted` layouts (node indices), and the
    slack of each arc."""

    sources: tuple[int, ...]
    arcs: tuple[Arc, ...]
    wanted: tuple[int, ...]
    time_s: float
    slacks: tuple[Slack, ...] = ()


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Cost of given choices, per device and step.

    Attributes:
        compute_s, communication_s: their sum is the objective.
        kept_bytes, static_bytes, gradient_bytes: what rests between forward and backward, always, and at the end.
        kept: per variant, the layouts kept (only those that backward reads).
        forward, backward: per variant, its redistributions.
        resting_bytes: left side of each budget row (`autopar.solve.memory.budget_rows`), in their order.
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

    @property
    def objective_s(self) -> float:
        return self.compute_s + self.communication_s


def demand(problem: Problem, use: Use, chosen: Mapping[int, int] | Sequence[int]) -> Layout:
    """The layout in which `use` reads, under the chosen strategy of its op."""
    return problem.ops[use.op].strategies[chosen[use.op]].layouts.inputs[use.operand]


def evaluate(
    problem: Problem,
    strategies: Sequence[int],
    recomputed: Mapping[int, int] | None = None,
    kept: Mapping[int, tuple[int, ...]] | None = None,
) -> Evaluation:
    """Price choices.

    Args:
        strategies: strategy index per op. recomputed: strategy index per op that backward runs again.
        kept: per variant, the layouts that may be kept; by default every keepable version that forward makes.
    """
    recomputed = recomputed or {}
    compute = sum(op.count * op.strategies[s].time_s for op, s in zip(problem.ops, strategies, strict=True))
    compute += sum(problem.ops[o].count * problem.ops[o].strategies[s].time_s for o, s in recomputed.items())
    static = sum(op.count * op.strategies[s].static_bytes for op, s in zip(problem.ops, strategies, strict=True))
    gradient = sum(op.count * op.strategies[s].gradient_bytes for op, s in zip(problem.ops, strategies, strict=True))
    forward: dict[int, Redistribution] = {}
    backward: dict[int, Redistribution] = {}
    kept_now: dict[int, tuple[int, ...]] = {}
    held: dict[int, int] = {}
    for v in range(len(problem.variants)):
        first, second, keep = _variant(problem, v, strategies, recomputed, kept)
        forward[v], backward[v], kept_now[v] = first, second, keep
        value = problem.values[problem.variants[v].value]
        own = first.sources if value.resident else ()
        held[v] = sum(value.graph.bytes[n] for n in keep if n not in own)
    kept_bytes = sum(problem.variants[v].count * size for v, size in held.items())
    resting = tuple(row.size(static, strategies, recomputed, held) for row in budget_rows(problem))
    communication = sum(problem.variants[v].count * r.time_s for phase in (forward, backward) for v, r in phase.items())
    return Evaluation(compute, communication, kept_bytes, static, gradient, kept_now, forward, backward, resting)


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
    first = _redistribute(graph, {made}, wanted, {made} if rests else set(), awaited)
    wanted_later, awaited_later = _wanted(problem, graph, later, strategies)
    again, awaited_again = _wanted(problem, graph, [u for u in now if u.op in recomputed], recomputed)
    wanted_later |= again
    if not wanted_later:
        return first, Redistribution((), (), (), 0.0), ()
    versions = {made, *wanted} if value.keepable is None else {made, *wanted} & value.keepable
    allowed = versions if kept is None else versions & set(kept.get(v, ()))
    sources = set(allowed)
    if value.resident:
        sources.add(made)
    if value.op in recomputed:
        sources.add(graph.index[problem.ops[value.op].strategies[recomputed[value.op]].layouts.outputs[value.result]])
    at_hand = allowed | ({made} if value.resident else set())
    second = _redistribute(graph, sources, wanted_later, at_hand, awaited_later | awaited_again)
    read = {arc.src for arc in second.arcs} | set(second.wanted)
    free = sources - allowed
    keep = tuple(sorted(n for n in allowed if n in read and n not in free))
    return first, second, keep


def _wanted(
    problem: Problem, graph: LayoutGraph, uses: Iterable[Use], chosen: Mapping[int, int] | Sequence[int]
) -> tuple[set[int], set[int]]:
    """The layouts that the uses read, and of these the ones that ops wait for; parameters and outputs take theirs at a phase's end."""
    read = [(graph.index[demand(problem, use, chosen)], problem.ops[use.op].kind) for use in uses]
    return {layout for layout, _ in read}, {layout for layout, kind in read if kind == "compute"}


def _redistribute(graph: LayoutGraph, sources: set[int], wanted: set[int], at_hand: set[int], awaited: set[int]) -> Redistribution:
    arcs, time_s = cheapest_tree(graph, sources, wanted)
    return Redistribution(tuple(sorted(sources)), arcs, tuple(sorted(wanted)), time_s, slacks(arcs, at_hand, awaited))


def variant_time(problem: Problem, v: int, strategies: Sequence[int], recomputed: Mapping[int, int]) -> float:
    """Communication time of one variant, all its instances; infinite where some layout cannot be reached."""
    try:
        first, second, _ = _variant(problem, v, strategies, recomputed, None)
    except LayoutError:
        return math.inf
    return problem.variants[v].count * (first.time_s + second.time_s)
