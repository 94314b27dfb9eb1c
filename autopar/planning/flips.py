"""At which change of the hardware a runner-up overtakes: by which factor a link's bandwidth, or the speed of compute, has to change.

The chosen strategy of an op and its runner-up are priced again on changed hardware, exactly, all else fixed as in
`autopar.planning.runner_up`; a second of compute and of early communication costs what it does in the plan's own step, whose longer stream
stays the longer. The factor nearest to 1 is bisected at which they cost the same. Only this one choice is compared: a plan made for the
changed hardware may change others sooner.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autopar.collective import faster
from autopar.cost.priced import Priced
from autopar.cost.times import price_collectives
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning.repricing import decisions
from autopar.planning.runner_up import local_load, variants_by_op
from autopar.plans import Plan, load_of
from autopar.problem import Choices, Problem
from autopar.streams import Balance

_FARTHEST = 64.0  # factors beyond are not looked at
_STEP = 2**0.5  # of the outward search for a factor at which the runner-up is no dearer
_PRECISION = 1e-4  # relative, of the factor
COMPUTE = "compute"


@dataclass(frozen=True, slots=True)
class Flip:
    """A choice and what would turn it.

    Attributes:
        key: of the entry. strategy: the runner-up. delta_s: by how much it is dearer now.
        what: ``compute``, or the name of a link. factor: by which its speed has to change for the two to cost the same.
    """

    key: str
    strategy: str
    delta_s: float
    what: str
    factor: float

    def __str__(self) -> str:
        what = "the speed of compute" if self.what == COMPUTE else f"the bandwidth of link {self.what}"
        change = f"{self.factor:.3g} times" if self.factor > 1 else f"1/{1 / self.factor:.3g} of"
        return f"{self.key} would take {self.strategy} from {change} {what} on"


def flips(plan: Plan, priced: Priced, mesh: Mesh, profile: HardwareProfile, *, most: int) -> tuple[Flip, ...]:
    """Per op of the `most` closest runner-ups the least change that turns the choice, the least first; ops that none turns are left out.

    Args:
        priced: the problem that the plan answers, on `profile`.
    """
    strategies, again = decisions(priced, plan)
    choices = Choices(strategies, again, {}, 0.0, 0.0)
    close = sorted((e.runner_up.delta_s, i) for i, e in enumerate(plan.entries) if e.runner_up and e.runner_up.delta_s > 0)[:most]
    links = dict.fromkeys(mesh.link(axis) for axis, size in enumerate(mesh.shape) if size > 1)
    touching = variants_by_op(priced.problem)
    forward, backward = load_of(plan).unbalanced(profile.overlap_slowdown)
    balance = (float(not forward), float(not backward))
    found: list[Flip] = []
    for delta_s, index in close:
        entry = plan.entries[index]
        assert entry.runner_up is not None, "it is among the closest"
        touched = touching.get(index, ())
        named = [i for i, s in enumerate(priced.problem.ops[index].strategies) if str(s.layouts) == entry.runner_up.strategy]
        other = min(named, key=lambda s: _cost(priced.problem, choices, index, s, touched, balance))
        changes: list[tuple[float, float, str]] = []
        for what in (COMPUTE, *links):
            local = _Local(priced.problem, choices, index, other, touched, mesh, profile, what, balance)
            factor = nearest_root(local.delta_s)
            if factor is not None:
                changes.append((abs(math.log(factor)), factor, what))
        if changes:
            _, factor, what = min(changes)
            found.append(Flip(entry.key, entry.runner_up.strategy, delta_s, what, factor))
    return tuple(sorted(found, key=lambda flip: abs(math.log(flip.factor))))


@dataclass(frozen=True, slots=True)
class _Local:
    """What one op's choice costs on hardware of which `what` is faster by a factor, at the prices of a balance."""

    problem: Problem
    choices: Choices
    index: int
    other: int
    touched: Sequence[int]
    mesh: Mesh
    profile: HardwareProfile
    what: str
    balance: Balance

    def delta_s(self, factor: float) -> float:
        """By how much the runner-up is dearer."""
        problem = self._changed(factor)
        chosen = self.choices.strategies[self.index]
        costs = (_cost(problem, self.choices, self.index, s, self.touched, self.balance) for s in (self.other, chosen))
        return next(costs) - next(costs)

    def _changed(self, factor: float) -> Problem:
        ops, values = list(self.problem.ops), list(self.problem.values)
        if self.what == COMPUTE:
            op = ops[self.index]
            ops[self.index] = replace(op, strategies=tuple(replace(s, time_s=s.time_s / factor) for s in op.strategies))
            return replace(self.problem, ops=tuple(ops))
        links = {**self.profile.links, self.what: faster(self.profile.links[self.what], factor - 1)}
        price = price_collectives(self.mesh, replace(self.profile, links=links))
        for v in {self.problem.variants[v].value for v in self.touched}:
            graph = values[v].graph
            arcs = tuple(replace(arc, time_s=price(arc.collective)) for arc in graph.arcs)
            values[v] = replace(values[v], graph=replace(graph, arcs=arcs))
        return replace(self.problem, values=tuple(values))


def _cost(problem: Problem, choices: Choices, index: int, strategy: int, touched: Sequence[int], balance: Balance) -> float:
    load = local_load(problem, choices, index, strategy, touched)
    return math.inf if load is None else load.priced_s(problem.overlap_slowdown, balance)


def nearest_root(delta: Callable[[float], float]) -> float | None:
    """The factor nearest to 1, on a logarithmic scale, at which `delta` is no longer above 0, or None where none was seen.

    Steps outward on both sides at once, then bisects the first step over which the sign changes.
    """
    inner = 1.0
    while inner < _FARTHEST:
        outer = inner * _STEP
        for side in (1, -1):
            if delta(outer**side) <= 0:
                low, high = inner, outer
                while high / low - 1 > _PRECISION:
                    middle = math.sqrt(low * high)
                    low, high = (middle, high) if delta(middle**side) > 0 else (low, middle)
                return high**side
        inner = outer
    return None
