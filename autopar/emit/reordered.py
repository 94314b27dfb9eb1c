"""An emitted graph in another order: steps that are started before they are finished become two nodes."""

from __future__ import annotations

from collections.abc import Iterable

from torch import fx

from autopar.kernels import collectives as kernels

Action = tuple[str, fx.Node]  # "run", "start" or "finish"


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
        x, *settings = kernels.positional(node)
        kind = node.meta["collective"].kind
        about = {k: v for k, v in node.meta.items() if k != "holds"}
        if action == "start":
            starts[node] = graph.create_node("call_function", kernels.start, (made[x], kind, *settings), dict(node.kwargs))
            starts[node].meta.update(about)
        else:
            made[node] = graph.create_node("call_function", kernels.finish, (starts[node], kind, *settings), dict(node.kwargs), node.name)
            made[node].meta.update({k: v for k, v in node.meta.items() if k not in ("collective", "time_s")})
    return graph
