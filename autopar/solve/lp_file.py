"""The program as a file in LP format, which PuLP, HiGHS and CBC read, with names that a reader can
follow.

    x3_1.layers.0.up.mm.R_S_0__to_S_0_      op 3 with strategy 1: its key, and the layouts that it
                                            reads and makes
    rc3_1. …                                backward runs it again
    k5_2.layers.0.act.S_0_                  value variant 5 is kept for backward in layout 2; h5_2:
                                            on the hosts
    f17.layers.0.act.S_0__to_R              the collective between two layouts; others that start
                                            with f are kernels and routes
    choose3. …, flow5_0_0_2. …, share,      rows
    keep, again, host, hidden_forward,
    memory0.start_of_backward

The objective is in microseconds. All budget rows are in, and both rows of early communication.
Characters that LP files do not allow everywhere are underscores, and a long key loses its middle;
what stands before the first point makes a name unique.
"""

from __future__ import annotations

import itertools
import re
from pathlib import Path

from autopar.core.problem import Problem
from autopar.core.streams import PHASES
from autopar.errors import AutoparError
from autopar.solve.formulation import (
    AGAIN,
    CHOOSE,
    FLOW,
    HOST,
    KEEP,
    RULED_OUT,
    SHARE,
    Formulation,
)
from autopar.solve.kernel_rows import RowKey
from autopar.solve.memory_rows import budget_rows
from autopar.solve.overlap_rows import Excess
from autopar.solve.pulp_models import to_pulp

_MOST = 100  # characters of a name
_KINDS = {
    CHOOSE: "choose",
    SHARE: "share",
    FLOW: "flow",
    KEEP: "keep",
    AGAIN: "again",
    HOST: "host",
    RULED_OUT: "ruled_out",
}


def write_lp(problem: Problem, objective_s: float, path: str | Path) -> None:
    """Write the integer program of a problem to a file in LP format.

    Args:
        objective_s: of a plan that is known; early communication that compute cannot hide is
            counted up to it.

    Raises:
        AutoparError: where the file cannot be written.
    """
    program = Formulation(problem)
    excess, keys = Excess(program), list(program.keys)
    names = [_row_name(problem, key, i) for i, key in enumerate(keys)]
    for number, row in enumerate(budget_rows(problem)):
        program.add_budget(row)
        names.append(_named(f"memory{number}", row.name))
    for phase, name in enumerate(PHASES):
        excess.add(phase, objective_s)
        names.append(_named("hidden", name))
    made = to_pulp(program.model, _column_names(program, keys), names)
    try:
        made.writeLP(str(path), max_length=_MOST)
    except OSError as error:
        raise AutoparError(
            f"cannot write the program: {error.strerror}", where=str(path), remedy="check the path"
        ) from error


def _named(unique: str, *words: object) -> str:
    """The unique part, then the words, as far as there is room."""
    said = re.sub(r"[^A-Za-z0-9_.]", "_", ".".join(str(word) for word in words))
    room = _MOST - len(unique) - 1
    if len(said) > room:
        said = f"{said[: room // 2 - 1]}__{said[len(said) - (room - room // 2 - 1) :]}"
    return f"{unique}.{said}" if said else unique


def _column_names(program: Formulation, keys: list[RowKey]) -> dict[str, str]:
    """Name of each column → a name that says what it is."""
    problem = program.problem
    names = {column.name: column.name for column in program.model.columns}
    rows = [*enumerate(program.x), *program.again.items()]
    for n, columns in rows:
        for column, strategy in zip(columns, problem.ops[n].strategies, strict=True):
            inputs, outputs = (
                " ".join(map(str, each))
                for each in (strategy.layouts.inputs, strategy.layouts.outputs)
            )
            names[column.name] = _named(column.name, problem.ops[n].key, f"{inputs} to {outputs}")
    for (v, version), column in program.keep.items():
        value = problem.values[problem.variants[v].value]
        names[column.name] = _named(column.name, value.key, value.layout(version))
    for name, (v, source, target) in _collectives(program, keys).items():
        value = problem.values[problem.variants[v].value]
        names[name] = _named(
            name, value.key, f"{value.graph.layouts[source]} to {value.graph.layouts[target]}"
        )
    return names


def _collectives(program: Formulation, keys: list[RowKey]) -> dict[str, tuple[int, int, int]]:
    """Flow → variant, and the layouts that it leads between: rows (3) say which it leaves and
    which it reaches."""
    model, sources, targets = (
        program.model,
        dict[int, tuple[int, int]](),
        dict[int, tuple[int, int]](),
    )
    for key, (start, end) in zip(keys, itertools.pairwise(model.starts), strict=False):
        if key[0] != FLOW:
            continue
        for number, value in zip(model.numbers[start:end], model.values[start:end], strict=True):
            if model.columns[number].name.startswith("f"):
                (targets if value > 0 else sources)[number] = key[1], key[-1]
    both = sources.keys() & targets.keys()
    return {
        model.columns[number].name: (*sources[number], targets[number][1])
        for number in sorted(both)
    }


def _row_name(problem: Problem, key: RowKey, position: int) -> str:
    kind, indices = key[0], key[1:]
    unique = f"{_KINDS.get(kind, f'kernel{kind}')}{'_'.join(map(str, indices))}"
    if kind in (CHOOSE, AGAIN, RULED_OUT):
        return _named(unique, problem.ops[indices[0]].key)
    if kind in (FLOW, SHARE, KEEP):
        value = problem.values[problem.variants[indices[0]].value]
        return _named(unique, value.key, "" if kind == SHARE else value.graph.layouts[indices[-1]])
    return _named(f"{unique}_r{position}")
