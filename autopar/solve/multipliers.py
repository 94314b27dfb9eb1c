"""The duals that a plan stores to prove its bound by arithmetic alone: few duals with few digits.

These are the potentials y of rows (3), the duals of rows (9), those of k[v,l] ≤ 1 if there are rows
(9), and the prices of budget rows. Any multipliers of the right sign prove a bound, so rounding
only lowers the bound slightly. The duals of the other rows follow from these. Each is the best,
given the others, with d = cost − Aᵀy over the rows that are known so far (names of rows and columns
as in `autopar.solve.formulation`):

    (2)  max(0, −d[f])           then no reader's flow has a negative reduced cost, and their total
                                 payment decides
    (4)  min(0, d[k], d[h])      then no version has a negative reduced cost
    (10) −max(0, min d[f])       over the flows that pay for the collective: kernels may save its
                                 cost beyond its worth
    (11) min(0, min_a d[h])      the product gets their savings beyond that
    (5)  min(0, min_s d[rc])     at most one strategy
    (20) low enough to rule these strategies out of the least of (1)
    (1)  min_s d[x]              exactly one strategy
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from autopar.core.problem import Problem
from autopar.core.solution import Multipliers
from autopar.core.streams import OverlapWeights
from autopar.solve.formulation import (
    AGAIN,
    CHOOSE,
    FLOW,
    KEEP,
    RULED_OUT,
    SCALE,
    SHARE,
    Formulation,
)
from autopar.solve.highs import Engine, proof
from autopar.solve.kernel_rows import ARC, PRODUCT
from autopar.solve.lp import Floats, Rows

_DIGITS = 5  # significant digits: the bound of Llama-3 8B loses 5e-5, and 4e-4 with one digit less
_LEAST = 1e-7  # duals below this share of the largest cost are dropped
_LEAST_PRICE = (
    1e-5  # share of the largest price of memory; smaller prices are errors of an inexact solution
)


def tighter(program: Formulation, engine: Engine) -> Rows:
    """Build rows (9) over the engine's columns."""
    rows = [
        ([engine.column[v.name] for v, _ in terms], [c for _, c in terms], -np.inf, 0.0)
        for terms in program.tighter
    ]
    return Rows.of(rows)


def multipliers(
    program: Formulation,
    engine: Engine,
    balance: OverlapWeights,
    duals: Floats,
    budget: Rows,
    prices: Mapping[str, float],
) -> Multipliers:
    """Return the rounded duals that a plan stores, and the bound that they prove.

    Args:
        program: the program.
        engine: the arrays of the program.
        balance: overlap weights of the costs.
        duals: duals of the engine's own rows, or of these and rows (9), in the program's unit. Few
            duals of a vertex are not 0.
        budget: budget rows without reserves.
        prices: name of a budget row → its dual, ≤ 0.
    """
    cost, num = engine.costs(program.costs(balance)), len(program.keys)
    kinds = np.array([key[0] for key in program.keys])
    least = _LEAST * float(np.abs(cost).max(initial=0.0))
    known = _round_duals(np.where((kinds == FLOW) & (duals[:num] > least), duals[:num], 0.0))
    cuts, versions_kept = (
        tighter(program, engine),
        engine.rows.indices[engine.rows.starts[:-1][kinds == KEEP]],
    )
    versions = np.zeros(len(program.tighter)), np.zeros(len(versions_kept))
    if len(duals) > num:
        all_duals = np.concatenate([duals, np.array([*prices.values()])])
        reduced = proof(cost, engine.rows.plus(cuts).plus(budget), all_duals)[1]
        versions = duals[num:], np.minimum(0.0, reduced[versions_kept])
    tight = [_round_duals(np.where(y < -least, y, 0.0)) for y in versions]
    few = min(prices.values(), default=0.0) * _LEAST_PRICE
    worth = _round_duals(np.array([y if y < min(few, -least) else 0.0 for y in prices.values()]))
    once = Rows.of(
        [([int(k)], [1.0], -np.inf, 1.0) for k in versions_kept]
    )  # k[v,l] ≤ 1, in the order of rows (4)
    further, theirs = cuts.plus(once).plus(budget), np.concatenate([*tight, worth])
    bound, reduced, _ = proof(
        cost,
        engine.rows.plus(further),
        np.concatenate([complete_duals(program, engine, cost, known, further, theirs), theirs]),
    )
    potentials = {
        (key[1], key[2], key[3], key[4]): round_value(y / SCALE)
        for key, y in zip(program.keys, known.tolist(), strict=True)
        if y
    }
    memory = {
        name: round_value(-y / SCALE) for name, y in zip(prices, worth.tolist(), strict=True) if y
    }
    rows = [(key, y) for key, y in zip(program.tighter_keys, tight[0].tolist(), strict=True)]
    rows += [
        ((*key[1:], 2), y)
        for key, y in zip((k for k in program.keys if k[0] == KEEP), tight[1].tolist(), strict=True)
    ]
    of_versions, of_copies, of_once = (
        {(key[0], key[1]): round_value(-y / SCALE) for key, y in rows if y and key[2] == which}
        for which in range(3)
    )
    penalties = {
        n: tuple((reduced[[engine.column[v.name] for v in row]] / SCALE).tolist())
        for n, row in enumerate(program.x)
    }
    return Multipliers(
        max(bound / SCALE, 0.0),
        potentials,
        memory,
        balance,
        of_versions,
        of_copies,
        of_once,
        penalties_s=penalties,
    )


def _round_duals(duals: Floats) -> Floats:
    """Round duals in the program's unit to the stored number of digits in seconds."""
    return np.array([round_value(y / SCALE) for y in duals.tolist()], float) * SCALE


def complete_duals(
    program: Formulation, engine: Engine, cost: Floats, known: Floats, further: Rows, theirs: Floats
) -> Floats:
    """Complete the duals of the engine's rows from the stored duals (see the module docstring).

    Args:
        program: the program.
        engine: the arrays of the program.
        cost: cost of each column, in the program's unit.
        known: for each row of the engine, the potentials of rows (3), and 0 for other rows.
        further: rows beyond the engine's.
        theirs: duals of `further`.

    Returns:
        A dual for each row of the engine.
    """
    rows, y, kinds = engine.rows, known.copy(), np.array([key[0] for key in program.keys])
    first, last = rows.starts[:-1], rows.starts[1:] - 1

    def reduced_now() -> Floats:
        """Return the reduced costs by column, given the duals so far."""
        return proof(cost, rows.plus(further), np.concatenate([y, theirs]))[1]

    share, keep = kinds == SHARE, kinds == KEEP
    y[share] = np.maximum(0.0, -reduced_now()[rows.indices[last[share]]])
    y[keep] = np.minimum(0.0, _of_kept(program, rows, first, reduced_now())[keep])
    y[kinds == ARC] = -np.maximum(0.0, _lowest(rows, kinds == ARC, reduced_now(), -1.0))
    y[kinds == PRODUCT] = np.minimum(0.0, _lowest(rows, kinds == PRODUCT, reduced_now(), 1.0))
    least = np.minimum.reduceat(
        np.append(reduced_now()[rows.indices], np.inf), first
    )  # the last row may be empty
    y[kinds == AGAIN] = np.minimum(0.0, least[kinds == AGAIN])
    y[kinds == CHOOSE] = least[kinds == CHOOSE]
    for i in np.flatnonzero(kinds == RULED_OUT):
        n = program.keys[i][1]
        ruled_out = rows.indices[rows.starts[i] : rows.starts[i + 1]]
        choices = np.array([engine.column[v.name] for v in program.x[n]])
        reduced, choose = reduced_now(), program.keys.index((CHOOSE, n))
        # The duals of (1) are not subtracted from the least of these yet.
        admitted = float(reduced[np.setdiff1d(choices, ruled_out)].min())
        y[choose] += admitted
        y[i] = min(0.0, float(reduced[ruled_out].min()) - admitted)
    return y


def _of_kept(
    program: Formulation, rows: Rows, first: NDArray[np.signedinteger], reduced: Floats
) -> Floats:
    """Compute, per row (4), the least reduced cost of its versions, which are the first columns: on
    the devices, then on the hosts."""
    least_costs = np.zeros(len(program.keys))
    for i, key in enumerate(program.keys):
        if key[0] == KEEP:
            variant = program.problem.variants[key[1]]
            value, at = program.problem.values[variant.value], int(first[i])
            both = 2 if (key[1], value.stored_version(key[2])) in program.keep else 1
            least_costs[i] = reduced[rows.indices[at : at + both]].min()
    return least_costs


def _lowest(rows: Rows, which: NDArray[np.bool_], reduced: Floats, sign: float) -> Floats:
    """Compute, per row, the least reduced cost among the columns whose entry has this sign."""
    least_costs = []
    for i in np.flatnonzero(which):
        here = slice(rows.starts[i], rows.starts[i + 1])
        least_costs.append(reduced[rows.indices[here]][rows.values[here] * sign > 0.0].min())
    return np.array(least_costs, float)


def quickest(problem: Problem) -> Multipliers | None:
    """Bound the step by each op's quickest strategy, for which no multiplier is needed; None if
    kernels or routes may save time of ops."""
    least = sum(op.count * min(s.time_s for s in op.strategies) for op in problem.ops)
    return None if problem.kernels or problem.routes else Multipliers(least, {}, {})


def round_value(value: float) -> float:
    """Round to as many significant digits as plans keep."""
    return float(f"{value:.{_DIGITS - 1}e}")
