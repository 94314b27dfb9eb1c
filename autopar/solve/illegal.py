"""Why no assignment of layouts is legal, whatever the memory: which op refuses, where one tensor alone shows it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from autopar.errors import InfeasibleError
from autopar.layout import Layout
from autopar.problem import Problem, Variant
from autopar.solve.paths import reach

_MOST = 4  # layouts that are named


def refusal(problem: Problem) -> InfeasibleError:
    """The error to raise of a problem that has no legal assignment."""
    what = "no assignment of layouts is legal"
    found = next(_refusals(problem), "")
    remedy = "relax the constraints; each op needs one strategy that meets them"
    return InfeasibleError(f"{what}: {found}" if found else what, remedy=remedy)


def _refusals(problem: Problem) -> Iterator[str]:
    """Of each op that has no strategy, and of each reader that nothing which is there can be led to."""
    yield from (f"{op.key} refuses, it has no strategy" for op in problem.ops if not op.strategies)
    for variant in problem.variants:
        yield from _unreached(problem, variant)


def _unreached(problem: Problem, variant: Variant) -> Iterator[str]:
    """Of each use that no collectives lead to from the layouts in which the tensor is made; what is read or kept on the way is led to
    from these as well."""
    value = problem.values[variant.value]
    graph = value.graph
    made = [s.layouts.outputs[value.result] for s in problem.ops[value.op].strategies]
    there = reach(graph, [graph.index[layout] for layout in made], backwards=False)
    for use in variant.uses:
        op = problem.ops[use.op]
        read = [s.layouts.inputs[use.operand] for s in op.strategies]
        if not any(graph.index[layout] in there for layout in read):
            yield f"{op.key} refuses, it reads {value.key} as {_text(read)}, which no collectives make of {_text(made)}"


def _text(layouts: Iterable[Layout]) -> str:
    names = list(dict.fromkeys(map(str, layouts)))
    return " or ".join([*names[:_MOST], *(["others"] if names[_MOST:] else [])])
