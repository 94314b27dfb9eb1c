"""Paths in layout graphs: the collectives that can carry a tensor, pieces of the program's rows,
and the error if some reader cannot be reached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.core.layout import Layout
from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import Problem, Variant
from autopar.errors import InfeasibleError
from autopar.solve.lp import Column, Terms


def useful_arcs(graph: LayoutGraph, supplied: Iterable[int], wanted: Iterable[int]) -> list[int]:
    """List the arcs that lie on some path from a supplied to a wanted layout.

    Args:
        graph: the layouts and collectives of a value.
        supplied, wanted: indices of layouts.
    """
    forward = reach(graph, supplied, backwards=False)
    backward = reach(graph, wanted, backwards=True)
    return [a for a, arc in enumerate(graph.arcs) if arc.src in forward and arc.dst in backward]


def reach(graph: LayoutGraph, start: Iterable[int], *, backwards: bool) -> set[int]:
    """The layouts that arcs lead to from `start`, or `backwards` those from which they lead
    there."""
    seen, stack = set(start), list(start)
    steps: dict[int, list[int]] = {}
    for arc in graph.arcs:
        a, b = (arc.dst, arc.src) if backwards else (arc.src, arc.dst)
        steps.setdefault(a, []).append(b)
    while stack:
        for after in steps.get(stack.pop(), []):
            if after not in seen:
                seen.add(after)
                stack.append(after)
    return seen


# --------------------------------------------------------------------------------------------------
# Pieces of the program's rows.

Demand = dict[int, Terms]  # layout → variables


def worth_recomputing(problem: Problem) -> set[int]:
    """Find the ops of which backward, or another of these ops run again, reads a result."""
    made_by: dict[int, list[int]] = {}
    useful: set[int] = set()
    for variant in problem.variants:
        value = problem.values[variant.value]
        for use in variant.uses:
            if use.phase == value.phase and use.again:
                made_by.setdefault(use.op, []).append(value.op)
            elif use.phase != value.phase:
                useful.add(value.op)
    useful = {n for n in useful if problem.ops[n].recomputable}
    stack = sorted(useful)
    while stack:
        for producer in made_by.get(stack.pop(), ()):
            if producer not in useful and problem.ops[producer].recomputable:
                useful.add(producer)
                stack.append(producer)
    return useful


def merge_terms(terms: Terms) -> Terms:
    """Terms with each variable once (a strategy may both make and read a layout)."""
    total: dict[Column, float] = {}
    for variable, coefficient in terms:
        total[variable] = total.get(variable, 0.0) + coefficient
    return [(variable, c) for variable, c in total.items() if c]


def arriving_flows(
    graph: LayoutGraph, arcs: Sequence[int], flows: Iterable[Sequence[Column]]
) -> Demand:
    """Collect, by layout, the flows over arcs that lead to it.

    Args:
        graph: the layouts and collectives of a value.
        arcs: indices of collectives.
        flows: each has one column per arc.
    """
    found: Demand = {}
    for flow in flows:
        for a, variable in zip(arcs, flow, strict=True):
            found.setdefault(graph.arcs[a].dst, []).append((variable, 1))
    return found


# --------------------------------------------------------------------------------------------------
# Why no assignment of layouts is legal, regardless of memory: the op that refuses, if one tensor
# alone shows it.

_MOST = 4  # layouts that are named


def refusal(problem: Problem) -> InfeasibleError:
    """Make the error for a problem that has no legal assignment."""
    what = "no legal assignment of layouts exists"
    found = next(_refusals(problem), "")
    remedy = "relax the constraints; each op needs a strategy that satisfies them"
    return InfeasibleError(f"{what}: {found}" if found else what, remedy=remedy)


def _refusals(problem: Problem) -> Iterator[str]:
    """Name each op that has no strategy, and each reader that no available layout leads to."""
    yield from (f"{op.key} has no strategy" for op in problem.ops if not op.strategies)
    for variant in problem.variants:
        yield from _find_unreached(problem, variant)


def _find_unreached(problem: Problem, variant: Variant) -> Iterator[str]:
    """Name each use that no collectives lead to from the layouts in which the tensor is made."""
    value = problem.values[variant.value]
    graph = value.graph
    made = [s.layouts.outputs[value.result] for s in problem.ops[value.op].strategies]
    there = reach(graph, [graph.index[layout] for layout in made], backwards=False)
    for use in variant.uses:
        op = problem.ops[use.op]
        read = [s.layouts.inputs[use.operand] for s in op.strategies]
        if not any(graph.index[layout] in there for layout in read):
            yield (
                f"{op.key} reads {value.key} as {_text(read)}, but no collectives lead to it from"
                f" {_text(made)}"
            )


def _text(layouts: Iterable[Layout]) -> str:
    names = list(dict.fromkeys(map(str, layouts)))
    return " or ".join([*names[:_MOST], *(["others"] if names[_MOST:] else [])])
