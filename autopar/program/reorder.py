"""An emitted graph in another order: steps that are started before they are finished become two
nodes.

Many orders are tried for one program, and most are only looked at: `Program.orders` holds them
beside the graphs, and `written` makes graphs of them, which takes longer than all that is asked of
an order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.kernels import collectives as kernels
from autopar.program.program import Action, LazyGraphModule, Program


def order_of(program: Program, phase: str) -> list[Action]:
    """In which a phase runs."""
    if phase in program.orders:
        return list(program.orders[phase])
    return [("run", node) for node in getattr(program, phase).graph.nodes]


def write_order(program: Program) -> Program:
    """The program whose graphs are in the order in which they are to run."""
    graphs = {
        phase: LazyGraphModule(getattr(program, phase), rebuilt(order))
        for phase, order in program.orders.items()
    }
    return replace(program, **graphs, orders={}) if graphs else program


def call_of_action(action: str, step: fx.Node) -> tuple[Any, tuple[Any, ...]]:
    """What starting or finishing a step calls, and with what behind what it reads."""
    _, *settings = kernels.positional(step)
    return (kernels.start if action == "start" else kernels.finish), (
        step.meta["collective"].kind,
        *settings,
    )


def reads(action: str, node: fx.Node) -> list[fx.Node]:
    """The nodes whose results an action reads; a step's finish reads its start."""
    return (
        []
        if action == "finish"
        else [kernels.positional(node)[0]]
        if action == "start"
        else node.all_input_nodes
    )


def without_idle_starts(order: Iterable[Action]) -> list[Action]:
    """A start right before its finish becomes the step itself."""
    found: list[Action] = []
    for action, node in order:
        if action == "finish" and found[-1] == ("start", node):
            found[-1] = ("run", node)
        else:
            found.append((action, node))
    return found


def rebuilt(order: Iterable[Action]) -> fx.Graph:
    """The graph whose nodes run, start and finish in this order."""
    graph = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    starts: dict[fx.Node, fx.Node] = {}
    for action, node in order:
        if action == "run":
            made[node] = graph.node_copy(node, made.__getitem__)
            continue
        target, settings = call_of_action(action, node)
        about = {k: v for k, v in node.meta.items() if k != "holds"}
        if action == "start":
            starts[node] = graph.create_node(
                "call_function",
                target,
                (made[reads(action, node)[0]], *settings),
                dict(node.kwargs),
            )
            starts[node].meta.update(about)
        else:
            made[node] = graph.create_node(
                "call_function", target, (starts[node], *settings), dict(node.kwargs), node.name
            )
            made[node].meta.update(
                {k: v for k, v in node.meta.items() if k not in ("collective", "time_s")}
            )
    return graph
