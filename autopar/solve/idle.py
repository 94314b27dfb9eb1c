"""What backward would run again though nothing reads it.

Where communication outlasts compute, or an op takes no time, running it again costs nothing, and the program may choose so for no reason.
Its operands would then be kept for it, in predictions and budgets, though not in the emitted program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from autopar.choices import Choices
from autopar.problem import Problem
from autopar.solve.evaluate import Evaluation, evaluate, evaluated


def without_idle(problem: Problem, choices: Choices) -> Choices:
    """The choices without it; no slower, and nowhere larger."""
    if not choices.recomputed:
        return choices
    evaluation = evaluated(problem, choices)
    while idle := _idle(problem, choices.recomputed, evaluation):
        left = {op: s for op, s in choices.recomputed.items() if op not in idle}
        evaluation = evaluate(problem, choices.strategies, left, evaluation.kept, choices.regions)
        choices = replace(choices, recomputed=left, kept=evaluation.kept, objective_s=evaluation.objective_s)
    return choices


def _idle(problem: Problem, recomputed: Mapping[int, int], evaluation: Evaluation) -> set[int]:
    """The ops none of whose results is read as it is made again."""
    idle = set(recomputed)
    for v, moves in evaluation.backward.items():
        value = problem.values[problem.variants[v].value]
        if value.op in idle:
            layouts = problem.ops[value.op].strategies[recomputed[value.op]].layouts
            made = value.graph.index[layouts.outputs[value.result]]
            read = {arc.src for arc in moves.arcs} | set(moves.wanted)
            if made in read and not {made, value.stored(made)}.intersection(evaluation.kept[v]):
                idle.discard(value.op)
    return idle
