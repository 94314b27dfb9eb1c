"""Units: the parts of a model between neighbouring cut points, with their time and memory in a plan
of the whole model.

Cuts are chosen from the costs of units in a plan of the whole model without stages. Stages are then
planned separately.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.capture.trace import Trace
from autopar.core.solution import Solution
from autopar.core.streams import COMPUTE_BOUND
from autopar.cost.priced import Priced
from autopar.errors import ConstraintError
from autopar.planner.pipeline.cuts import fastest_path
from autopar.solve import Evaluation
from autopar.stages.cutting import NO_PIPELINE
from autopar.stages.placing import Placing

_SLOWER_WITH_RECOMPUTATION = 4 / 3  # forward runs twice; backward takes two forwards


@dataclass(frozen=True, slots=True)
class Unit:
    """The costs of a unit per device and microbatch: time, bytes at rest (with gradients) and bytes
    kept for backward."""

    time_s: float = 0.0
    static_bytes: int = 0
    kept_bytes: int = 0


def units_of(
    placing: Placing, num_units: int, priced: Priced, choices: Solution, evaluation: Evaluation
) -> tuple[Unit, ...]:
    """Compute the cost of each unit in a solution for the whole model. Early communication is
    priced as if compute hid it.

    Args:
        placing: the placing of all nodes into units.
        num_units: the number of units of the model.
        priced: the problem of the whole model.
        choices: its solution.
        evaluation: the evaluation of the solution.
    """
    time_s, static, saved_bytes = [0.0] * num_units, [0] * num_units, [0] * num_units
    homes = {name: held[0] for name, held in placing.holders.items()}
    nodes = {**{name: unit for name, unit in placing.stage.items()}}
    for op, source, s in zip(priced.problem.ops, priced.sources, choices.strategies, strict=True):
        strategy = op.strategies[s]
        if source.cluster is not None:
            for cluster in source.cluster.instances:
                time_s[nodes.get(cluster.members[0].node, 0)] += strategy.time_s
        elif source.kind == "parameter":
            for name, node in zip(source.names, source.nodes, strict=True):
                unit = nodes[node] = homes[name]
                time_s[unit] += strategy.time_s
                static[unit] += strategy.static_bytes + strategy.gradient_bytes
    for v, refs in enumerate(priced.refs):
        value = priced.problem.values[priced.problem.variants[v].value]
        size = sum(map(value.bytes, evaluation.kept[v]))
        for name, _ in refs:
            unit = nodes.get(name, 0)
            moves = evaluation.forward[v].load + evaluation.backward[v].load
            time_s[unit] += moves.priced_s(evaluation.slowdown, COMPUTE_BOUND)
            saved_bytes[unit] += size
    return tuple(Unit(*each) for each in zip(time_s, static, saved_bytes, strict=True))


def check_parts(num_parts: int, num_stages: int) -> None:
    """Check that a model has at least as many parts as stages.

    Raises:
        ConstraintError: if it has fewer.
    """
    if num_parts < num_stages:
        message = (
            f"the model can be cut into at most {num_parts} parts, but {num_stages} stages were"
            " requested"
        )
        fewer = f"use a pipeline of at most {num_parts} stages, or " if num_parts > 1 else ""
        raise ConstraintError(message, remedy=fewer + NO_PIPELINE)


def balance_cuts(
    units: Sequence[Sequence[Unit]], in_flight: Sequence[int], budgets: Sequence[int]
) -> tuple[int, ...]:
    """Find the cuts that minimize the time of the slowest stage, and among these the sum of
    squares.

    A stage that does not fit is assumed to recompute; a stage whose parameters do not fit is
    penalized. Cuts are indices of the first units of all stages but the first.

    Args:
        units: per stage, the costs of units on its devices.
        in_flight: per stage, microbatches in flight.
        budgets: per stage, bytes of memory.

    Raises:
        ConstraintError: if there are fewer units than stages.
    """
    cost, num, num_stages = _Costs(units, in_flight, budgets), len(units[0]), len(in_flight)
    check_parts(num, num_stages)
    best: list[dict[int, tuple[float, float, tuple[int, ...]]]] = [{0: (0.0, 0.0, ())}]
    for stage in range(num_stages):
        row: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for last in range(stage + 1, num - (num_stages - stage - 1) + 1):
            options = []
            for first, (worst, squares, cuts) in best[stage].items():
                if first < last:
                    here = cost.of(first, last, stage)
                    options.append(
                        (max(worst, here), squares + here * here, (*cuts, first) if stage else cuts)
                    )
            if options:
                row[last] = min(options)
        best.append(row)
    worst, _, cuts = best[num_stages][num]
    assert math.isfinite(worst), "some cut is always possible"
    return cuts


def fastest(
    units: Sequence[Sequence[Unit]],
    in_flight: Sequence[int],
    budgets: Sequence[int],
    num_microbatches: int,
) -> tuple[int, ...]:
    """Find the cuts that minimize the step, (M − 1) · max τ + Σ τ. If units take longer on the
    devices of some stages, Σ τ also depends on the cuts.

    Args:
        units, in_flight, budgets: as in `balance_cuts`.
        num_microbatches: M.

    Raises:
        ConstraintError: if there are fewer units than stages.
    """
    cost, num, num_stages = _Costs(units, in_flight, budgets), len(units[0]), len(in_flight)
    check_parts(num, num_stages)
    edges = [range(1)] + [range(1, num)] * (num_stages - 1) + [range(num, num + 1)]
    tables = [
        np.array(
            [
                [cost.of(first, last, stage) if first < last else np.inf for last in ends]
                for first in begins
            ]
        ).reshape(len(begins), -1)
        for stage, (begins, ends) in enumerate(itertools.pairwise(edges))
    ]
    _, path = fastest_path(tables, num_microbatches)
    return tuple(place + 1 for place in path)


class _Costs:
    """Estimates the seconds of stages."""

    def __init__(
        self, units: Sequence[Sequence[Unit]], in_flight: Sequence[int], budgets: Sequence[int]
    ) -> None:
        self._sums = [_sums(each) for each in units]
        self._in_flight, self._budgets = in_flight, budgets

    def of(self, first: int, last: int, stage: int) -> float:
        """Estimate the seconds of a stage.

        Args:
            first, last: the units of the stage are first … last − 1.
            stage: index of the stage.
        """
        sums, budget = self._sums[stage], self._budgets[stage]
        time_s, static, saved_bytes = (b - a for a, b in zip(sums[first], sums[last], strict=True))
        if static > budget:
            return time_s * 1e3 * static / budget
        return time_s * (
            _SLOWER_WITH_RECOMPUTATION
            if static + self._in_flight[stage] * saved_bytes > budget
            else 1.0
        )


def _sums(units: Sequence[Unit]) -> list[tuple[float, int, int]]:
    """Compute the sums of time and memory of all units before each border."""
    sums = [(0.0, 0, 0)]
    for unit in units:
        t, s, k = sums[-1]
        sums.append((t + unit.time_s, s + unit.static_bytes, k + unit.kept_bytes))
    return sums


def reweigh_units(
    units: Sequence[Sequence[Unit]], cuts: Sequence[int], times: Sequence[float]
) -> tuple[tuple[Unit, ...], ...]:
    """Scale the times of units to the times of their planned stages, with the same factor on all
    kinds of devices.

    Args:
        units: per stage, the units on its devices.
        cuts: the cuts of the plan, as indices of units.
        times: seconds of each planned stage.
    """
    edges = [0, *cuts, len(units[0])]
    reweighed: list[list[Unit]] = [[] for _ in units]
    for stage, ((first, last), time_s) in enumerate(
        zip(itertools.pairwise(edges), times, strict=True)
    ):
        guessed = sum(unit.time_s for unit in units[stage][first:last])
        for mine, kind_units in zip(reweighed, units, strict=True):
            mine += [
                replace(unit, time_s=unit.time_s * time_s / guessed if guessed else time_s)
                for unit in kind_units[first:last]
            ]
    return tuple(map(tuple, reweighed))


def one_stage(trace: Trace) -> Placing:
    """Place all nodes in one unit."""
    names = [n.name for n in trace.graph.nodes if n.op == "call_function"]
    returning = {o.node: 0 for o in trace.outputs}
    return Placing(
        dict.fromkeys(names, 0),
        returning,
        frozenset(),
        {},
        {p.name: (0,) for p in trace.parameters},
        {},
        frozenset(),
    )
