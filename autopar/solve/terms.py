"""Pieces of the program's rows, and what need not be in it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from autopar.layout_graph import LayoutGraph
from autopar.problem import Problem
from autopar.solve.model import Column, Terms

Demand = dict[int, Terms]  # layout → variables


def worth_recomputing(problem: Problem) -> set[int]:
    """Ops some result of which is read in backward, or by another of these ops in forward."""
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


def merged(terms: Terms) -> Terms:
    """Terms with each variable once (a strategy may both make and read a layout)."""
    total: dict[Column, float] = {}
    for variable, coefficient in terms:
        total[variable] = total.get(variable, 0.0) + coefficient
    return [(variable, c) for variable, c in total.items() if c]


def arriving(graph: LayoutGraph, arcs: Sequence[int], flows: Iterable[Sequence[Column]]) -> Demand:
    """layout → the flows over arcs into it."""
    found: Demand = {}
    for flow in flows:
        for a, variable in zip(arcs, flow, strict=True):
            found.setdefault(graph.arcs[a].dst, []).append((variable, 1))
    return found
