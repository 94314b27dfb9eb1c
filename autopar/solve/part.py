"""The least cost of a part of a problem whose rows towards the rest are priced: a tree over its own
rows and choices.

Where a Lagrangian takes every op by itself, equal costs of many strategies let each op choose what
suits none of its neighbours. Within the part no row is priced away, and no op mixes strategies; so
its least is closer to what the part takes in any plan.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

from autopar.core.problem import Problem
from autopar.core.streams import Load
from autopar.solve.branching import Tree
from autopar.solve.formulation import SCALE, Formulation
from autopar.solve.highs import Engine, Live
from autopar.solve.lp import Floats
from autopar.solve.multipliers import tighter


@dataclass(frozen=True, slots=True)
class PricedPart:
    """Some ops, each once, and the tensors that only these make and read.

    Attributes:
        problem: of these. again: the ops that backward may run again, whatever the problem says of
            them.
        further: per op what each strategy costs beside its time, in seconds, and what it costs as
            backward runs it again.
    """

    problem: Problem
    again: frozenset[int]
    further: tuple[tuple[Floats, Floats], ...]


@dataclass
class _PartProgram(Formulation):
    part: PricedPart = field(kw_only=True)

    def _strategies(self) -> None:
        super()._strategies()
        loads = dict(self.loads)
        for n, (first, again) in enumerate(self.part.further):
            for variables, costs in ((self.x[n], first), (self.again.get(n, []), again)):
                for variable, cost in zip(variables, costs, strict=False):
                    loads[variable] = loads.get(variable, Load()) + Load(float(cost))
        self.loads = list(loads.items())

    def _useful_again(self) -> set[int]:
        return set(self.part.again)


def least_of(
    part: PricedPart, target_s: float, max_relaxations: int, time_limit_s: float = math.inf
) -> tuple[float, int]:
    """No choice for the part costs less than so many seconds; and how many relaxations that took.

    Args:
        target_s: what is to be shown, if it is true; the search ends there. max_relaxations: beyond
            those of a first dive.
    """
    program = _PartProgram(part.problem, part=part)
    engine = Engine(program.model, time_limit_s)
    if engine.relax() is None:
        return math.inf, 1
    live = Live(engine, tighter(program, engine))
    target = target_s * SCALE
    tree = Tree(
        program,
        engine,
        live,
        lambda _: (),
        lambda: target,
        0.0,
        max_relaxations,
        np.zeros(len(engine.names)),
    )
    bound = tree.dive().bound
    if bound < target:
        bound = max(bound, tree.branch().bound)
    return bound / SCALE, tree.num_relaxations
