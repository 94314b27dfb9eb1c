"""Where a model may be cut: before the first node of every layer and of every part that is no layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar.capture.trace import Trace


@dataclass(frozen=True, slots=True)
class CutPoint:
    """A place to cut.

    Attributes:
        position: index of a forward node among the forward nodes; a cut there puts it, and all after it, into a later stage.
        module: the layer or part that begins there.
    """

    position: int
    module: str


def forward_nodes(trace: Trace) -> list[fx.Node]:
    """The forward's compute nodes, in order."""
    return [n for n in trace.graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward"]


def layer_of(module: str) -> str:
    """A module's path up to its first layer index; up to its second part where it has none."""
    parts = module.split(".")
    for place, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: place + 1])
    return ".".join(parts[:2])


def cut_points(trace: Trace) -> tuple[CutPoint, ...]:
    """Every place to cut, in order; none before the first parameter is read."""
    return tuple(_points(trace))


def _points(trace: Trace) -> Iterator[CutPoint]:
    on_parameters = {p.node for p in trace.parameters}
    seen: set[str] = set()
    for position, node in enumerate(forward_nodes(trace)):
        if not any(operand.name in on_parameters for operand in node.all_input_nodes):
            continue
        on_parameters.add(node.name)
        layer = layer_of(node.meta["module"])
        if layer not in seen and layer:
            if seen:
                yield CutPoint(position, layer)
            seen.add(layer)
