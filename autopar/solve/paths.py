"""Paths in layout graphs: the collectives that can move a tensor between layouts, pieces of the
program's rows, and the error if a reader cannot be reached."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from autopar.core.layout import Layout
from autopar.core.layout_graph import LayoutGraph
from autopar.core.problem import Problem, Variant
from autopar.errors import InfeasibleError
from autopar.solve.lp import Column, Terms


def useful_arcs(graph: LayoutGraph, supplied: Iterable[int], wanted: Iterable[int]) -> list[int]:
    """List the arcs on paths from a supplied to a wanted layout.

    Args:
        graph: the layouts and collectives of a value.
        supplied: indices of supplied layouts.
        wanted: indices of wanted layouts.

    Returns:
        Indices of arcs.
    """
    forward = reach(graph, supplied, backwards=False)
    backward = reach(graph, wanted, backwards=True)
    return [a for a, arc in enumerate(graph.arcs) if arc.src in forward and arc.dst in backward]


def reach(graph: LayoutGraph, start: Iterable[int], *, backwards: bool) -> set[int]:
    """Return the layouts that arcs reach from `start` or, with `backwards`, the layouts from which
    arcs reach `start`.

    Args:
        graph: the layouts and collectives of a value.
        start: indices of layouts.
        backwards: whether to follow arcs backwards.
    """
    reached, stack = set(start), list(start)
    steps: dict[int, list[int]] = {}
    for arc in graph.arcs:
        a, b = (arc.dst, arc.src) if backwards else (arc.src, arc.dst)
        steps.setdefault(a, []).append(b)
    while stack:
        for after in steps.get(stack.pop(), []):
            if after not in reached:
                reached.add(after)
                stack.append(after)
    return reached


# --------------------------------------------------------------------------------------------------
# Pieces of the program's rows.

Demand = dict[int, Terms]  # layout → variables


def worth_recomputing(problem: Problem) -> set[int]:
    """Return the ops whose results backward, or the recomputation of another such op, reads."""
    made_by: dict[int, list[int]] = {}
    useful: set[int] = set()
    for variant in problem.variants:
        value = problem.values[variant.value]
        for use in variant.uses:
            if use.phase == value.phase and use.read_again:
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
    """Merge terms of the same variable. A strategy may both produce and read a layout."""
    total: dict[Column, float] = {}
    for variable, coefficient in terms:
        total[variable] = total.get(variable, 0.0) + coefficient
    return [(variable, c) for variable, c in total.items() if c]


def arriving_flows(
    graph: LayoutGraph, arcs: Sequence[int], flows: Iterable[Sequence[Column]]
) -> Demand:
    """Return layout → the flows over arcs that lead to it.

    Args:
        graph: the layouts and collectives of a value.
        arcs: indices of collectives.
        flows: lists of columns, one column per arc.
    """
    flows_by_layout: Demand = {}
    for flow in flows:
        for a, variable in zip(arcs, flow, strict=True):
            flows_by_layout.setdefault(graph.arcs[a].dst, []).append((variable, 1))
    return flows_by_layout


# --------------------------------------------------------------------------------------------------
# The reason why no assignment of layouts is legal, regardless of memory: the op or the tensor at
# fault, if a single tensor shows it.

_MOST = 4  # largest number of listed layouts


def refusal(problem: Problem) -> InfeasibleError:
    """Return the error for a problem without a legal assignment."""
    message = "no legal assignment of layouts exists"
    reason = next(_refusals(problem), "")
    remedy = "relax the constraints; each op needs a strategy that satisfies them"
    return InfeasibleError(f"{message}: {reason}" if reason else message, remedy=remedy)


def _refusals(problem: Problem) -> Iterator[str]:
    """Yield a text for each op without a strategy, and for each reader that collectives do not
    reach."""
    yield from (f"{op.key} has no strategy" for op in problem.ops if not op.strategies)
    for variant in problem.variants:
        yield from _find_unreached(problem, variant)


def _find_unreached(problem: Problem, variant: Variant) -> Iterator[str]:
    """Yield a text for each use that collectives do not reach from the layouts in which the tensor
    is computed."""
    value = problem.values[variant.value]
    graph = value.graph
    made_layouts = [s.layouts.outputs[value.result] for s in problem.ops[value.op].strategies]
    there = reach(graph, [graph.index[layout] for layout in made_layouts], backwards=False)
    for use in variant.uses:
        op = problem.ops[use.op]
        read = [s.layouts.inputs[use.operand] for s in op.strategies]
        if not any(graph.index[layout] in there for layout in read):
            yield (
                f"{op.key} reads {value.key} as {_text(read)}, but no collectives lead to it from"
                f" {_text(made_layouts)}"
            )


def _text(layouts: Iterable[Layout]) -> str:
    names = list(dict.fromkeys(map(str, layouts)))
    return " or ".join([*names[:_MOST], *(["others"] if names[_MOST:] else [])])
