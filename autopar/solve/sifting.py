"""The balance of large programs, found without dense rows.

A row over all columns (`autopar.solve.hiding`) makes each step of the simplex method as dear as the program is large. So the whole
program is solved at the prices of a balance, by a live relaxation that knows its basis; then the rows over the few columns whose reduced
cost was small at a balance so far, which takes a twentieth of the time; its duals are the next balance. The first proves a bound, the
second says how much better another balance could prove at most, as far as its columns go. Plans are looked for among the cheapest
columns of all balances so far: at one of them alone compute or communication is too cheap. Three or four rounds are enough.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solve.engine import Engine
from autopar.solve.formulation import Formulation
from autopar.solve.hiding import Excess
from autopar.solve.live import Live, Point
from autopar.solve.rows import Columns, Rows
from autopar.streams import PHASES, Balance

_SMALL, _USEFUL = 1e-5, 1e-4  # shares of the bound: reduced costs of what plans are looked for in, and of what the rows know
_ROUNDS = 8
_NEAR = 1e-3  # of what is proven to what could be, relative


@dataclass(frozen=True, slots=True)
class Sifted:
    """What the relaxation proves at a balance, and the columns that are cheap there or were at one before: plans take some of each."""

    point: Point
    balance: Balance
    columns: Columns


def sifted(
    program: Formulation, engine: Engine, live: Live, excess: Excess, phases: Sequence[int], first: Sequence[Balance]
) -> Iterator[Sifted]:
    """Better and better balances.

    Args:
        live: without rows of excess. phases: those whose excess counts; λ of the others is 1.
        first: what is tried to begin with, each; the more they differ, the more the rows over few columns know.
    """
    lines = Rows.of([excess.line(engine, phase) for phase in phases])
    waiting, best = [*first], -np.inf
    small, kept = np.zeros((2, len(engine.names)), bool)
    kept[excess.columns(engine)] = True
    for _ in range(_ROUNDS):
        balance = waiting.pop(0)
        live.reprice(engine.costs(program.costs(balance)))
        point = live.solve(np.zeros(len(kept)), np.ones(len(kept)))
        if point is None or not len(point.values):
            return
        small |= point.reduced <= _SMALL * abs(point.bound)
        kept |= point.reduced <= _USEFUL * abs(point.bound)
        yield Sifted(point, balance, small.copy())
        best = max(best, point.bound)
        if waiting:
            continue
        part = engine.part(kept, live.rows.plus(lines))
        if part is None or part.bound - best <= _NEAR * abs(best):
            return
        duals = dict(zip(phases, part.duals[len(part.duals) - len(phases) :].tolist(), strict=True))
        waiting.append(excess.balance(duals))


def middle(phases: Sequence[int]) -> Balance:
    """Where communication counts as much as compute does."""
    forward, backward = (0.5 if phase in phases else 1.0 for phase in range(len(PHASES)))
    return forward, backward
