"""The multipliers of a problem without a budget, as its relaxation has them with the rows that cut off mixtures."""

from __future__ import annotations

import numpy as np

from autopar.problem import Multipliers, Problem
from autopar.solve.engine import Engine, Rows
from autopar.solve.formulation import FLOW, SCALE, Formulation
from autopar.solve.multipliers import rounded

_LEAST = 1e-7  # share of the largest cost: what is worth less is worth nothing


def relaxed(problem: Problem, time_limit_s: float = 60.0) -> Multipliers:
    """Those of rows (3) and of the first of rows (9) (`autopar.solve.formulation`), to a few digits, and the relaxation's value. Those of
    the other rows follow from these.

    Args:
        time_limit_s: a safety net; multipliers that are found in no time prove nothing.
    """
    program = Formulation(problem)
    engine = Engine(program.model, time_limit_s)
    lines = [([engine.column[v.name] for v, _ in terms], [c for _, c in terms], -np.inf, 0.0) for terms in program.tighter]
    relaxation = engine.relax(Rows.of(lines) if lines else None)
    if relaxation is None:
        return Multipliers(0.0, {}, {})
    least = _LEAST * float(np.abs(engine.cost).max(initial=0.0))
    num = len(program.keys)
    flows = zip(program.keys, relaxation.duals[:num].tolist(), strict=True)
    potentials = {key[1:]: rounded(y / SCALE) for key, y in flows if key[0] == FLOW and y > least}
    kept = zip(program.tighter_keys, relaxation.duals[num:].tolist(), strict=True)
    versions = {(v, layout): rounded(-y / SCALE) for (v, layout, which), y in kept if not which and -y > least}
    return Multipliers(max(relaxation.bound / SCALE, 0.0), potentials, {}, versions)  # type: ignore[arg-type]  # four indices
