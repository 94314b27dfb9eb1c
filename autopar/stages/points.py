"""Where a model may be cut: before the first node of every layer and of every part that is no layer.

Where these places are fewer than are needed, the parts are those that lie deeper: modules within layers, one level after the other, and
at last what each parameter is read for. So any model has places as long as it has parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import fx

from autopar.capture.trace import Trace

_DEEPER = 6  # levels within a layer


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


def cut_points(trace: Trace, at_least: int = 1) -> tuple[CutPoint, ...]:
    """Places to cut, in order; none before the first parameter is read.

    Args:
        at_least: of the coarsest parts that have so many places; of the finest, if none has.
    """
    points: tuple[CutPoint, ...] = ()
    for points in levels(trace):
        if len(points) >= at_least:
            break
    return points


def levels(trace: Trace) -> Iterator[tuple[CutPoint, ...]]:
    """The places of layers, then those of finer and finer parts, each level with more than the one before."""
    names = {p.node: p.name for p in trace.parameters}

    def read(node: fx.Node) -> str:
        return next((names[operand.name] for operand in node.all_input_nodes if operand.name in names), "")

    num = -1
    for depth in range(_DEEPER + 1):
        points = tuple(_points(trace, lambda node, depth=depth: _part_of(node.meta["module"], depth)))  # type: ignore[misc]
        if len(points) > num:
            yield points
        num = max(num, len(points))
    points = tuple(_points(trace, read))
    if len(points) > num:
        yield points


def _part_of(module: str, deeper: int) -> str:
    """The path of the layer that a module is in, or of what lies so much deeper in it."""
    layer = layer_of(module)
    return ".".join([layer, *module[len(layer) + 1 :].split(".")[:deeper]]).rstrip(".")


def _points(trace: Trace, part_of: Callable[[fx.Node], str]) -> Iterator[CutPoint]:
    on_parameters = {p.node for p in trace.parameters}
    seen: set[str] = set()
    for position, node in enumerate(forward_nodes(trace)):
        if not any(operand.name in on_parameters for operand in node.all_input_nodes):
            continue
        on_parameters.add(node.name)
        part = part_of(node)
        if part not in seen and part:
            if seen:
                yield CutPoint(position, part)
            seen.add(part)
