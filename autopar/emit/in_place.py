"""Nodes of a program that write their result into an operand, as the trace lets them, where nothing else in the program has it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from autopar.analysis.in_place import has_own_memory, operand_written
from autopar.capture.graphs import IN_PLACE
from autopar.layout import Strategy
from autopar.ops.in_place import in_place_form
from autopar.rules import operands_of


def mark(node: fx.Node, here: fx.Node, strategy: Strategy) -> None:
    """Say which argument a node of the program is to write its result into, where strategy and trace let it: the two are split alike."""
    place = operand_written(node)
    if place is not None:
        operand = strategy.inputs[operands_of(node).index(node.args[place])]  # type: ignore[arg-type]
        here.meta.update({IN_PLACE: place} if operand.splits_like(strategy.outputs[0]) else {})


def write(node: fx.Node, saved: Mapping[fx.Node, fx.Node], mesh_shape: Sequence[int]) -> None:
    """Let a node write into the operand that it is marked for, if that may go; else take its mark away.

    Args:
        saved: forward node → the placeholder that stands for it in this graph.
    """
    place = node.meta.pop(IN_PLACE, None)
    form = None if place is None else in_place_form(node.target)  # type: ignore[arg-type]
    if form is not None and _may_go(node.args[place], saved, mesh_shape):  # type: ignore[arg-type]
        node.target, keyword = form
        node.kwargs = {**node.kwargs, keyword: node.args[place]} if keyword else node.kwargs
        node.meta[IN_PLACE] = place


def _may_go(node: fx.Node, saved: Mapping[fx.Node, fx.Node], mesh_shape: Sequence[int]) -> bool:
    """Whether a tensor has no other reader and lies where nothing else does: a step along an axis of one device hands on what it reads."""
    source = next((source for source, placeholder in saved.items() if placeholder is node), node)
    views = (user for user in source.users if user.op == "call_function" and not has_own_memory(user))
    step = source.meta.get("collective")
    handed_on = step is not None and step.axis >= 0 and mesh_shape[step.axis] == 1
    return len(node.users) == 1 and has_own_memory(source) and not handed_on and not any(views)
