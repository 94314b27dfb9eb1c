"""Reordering of emitted graphs. A step that starts early becomes two nodes, its start and its
finish.

Many orders are evaluated for one program, and most are then discarded. `StageProgram.orders`
therefore holds an order next to the graphs. `write_order` writes it into the graphs, which takes
longer than its evaluation.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.core.fx_nodes import copy_node
from autopar.kernels import collectives as kernels
from autopar.program.program import Action, LazyGraphModule, StageProgram


def order_of(program: StageProgram, phase: str) -> list[Action]:
    """Return the order in which a phase runs."""
    if phase in program.orders:
        return list(program.orders[phase])
    return [("run", node) for node in getattr(program, phase).graph.nodes]


def write_order(program: StageProgram) -> StageProgram:
    """Return the program with its orders written into its graphs."""
    graphs = {
        phase: LazyGraphModule(getattr(program, phase), rebuilt(order))
        for phase, order in program.orders.items()
    }
    return replace(program, **graphs, orders={}) if graphs else program


def call_of_action(action: str, step: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """Return the function that starts or finishes a step, and its arguments after the first."""
    _, *settings = kernels.positional(step)
    return (kernels.start if action == "start" else kernels.finish), (
        step.meta["collective"].kind,
        *settings,
    )


def reads(action: str, node: fx.Node) -> list[fx.Node]:
    """Return the nodes whose results an action reads; none for a finish, which reads its start."""
    return (
        []
        if action == "finish"
        else [kernels.positional(node)[0]]
        if action == "start"
        else node.all_input_nodes
    )


def without_idle_starts(order: Iterable[Action]) -> list[Action]:
    """Replace each start that is directly followed by its finish by the undivided step."""
    actions: list[Action] = []
    for action, node in order:
        if action == "finish" and actions[-1] == ("start", node):
            actions[-1] = ("run", node)
        else:
            actions.append((action, node))
    return actions


def rebuilt(order: Iterable[Action]) -> fx.Graph:
    """Return a graph with the nodes, starts and finishes in the given order."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    starts: dict[fx.Node, fx.Node] = {}
    for action, node in order:
        if action == "run":
            copies[node] = copy_node(graph, node, copies.__getitem__)
            continue
        target, settings = call_of_action(action, node)
        about = {k: v for k, v in node.meta.items() if k != "holds"}
        if action == "start":
            starts[node] = graph.create_node(
                "call_function",
                target,
                (copies[reads(action, node)[0]], *settings),
                dict(node.kwargs),
            )
            starts[node].meta.update(about)
        else:
            copies[node] = graph.create_node(
                "call_function", target, (starts[node], *settings), dict(node.kwargs), node.name
            )
            copies[node].meta.update(
                {k: v for k, v in node.meta.items() if k not in ("collective", "time_s")}
            )
    return graph
