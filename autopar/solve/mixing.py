"""Which equal ops a relaxation would have decide apart."""

from __future__ import annotations

from collections.abc import Iterator

from autopar.solve.engine import Engine
from autopar.solve.formulation import Formulation
from autopar.solve.rows import Floats


def mixed(program: Formulation, engine: Engine, values: Floats) -> dict[int, tuple[float, ...]]:
    """Op of several instances → the shares of them for which something is decided, kept or run again, if that is so for one at least and
    not for all. Two strategies for two thirds and one third are both shares.

    Args:
        values: of the columns.
    """
    problem = program.problem
    found: dict[int, list[float]] = {}
    for n, variable in _decisions(program):
        share, num = float(values[engine.column[variable]]), problem.ops[n].count
        if 0.5 <= share * num <= num - 0.5:
            found.setdefault(n, []).append(share)
    return {n: tuple(shares) for n, shares in sorted(found.items())}


def _decisions(program: Formulation) -> Iterator[tuple[int, str]]:
    """(op, name of the variable); what is kept is the decision of the op that makes it."""
    for n, row in enumerate(program.x):
        yield from ((n, variable.name) for variable in (*row, *program.again.get(n, ())))
    for (v, _), variable in program.keep.items():
        yield program.problem.values[program.problem.variants[v].value].op, variable.name
