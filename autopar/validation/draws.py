"""Random draws of a trace: no two of them share their numbers, and the state that all follow from
goes on by one at each call.
"""

from __future__ import annotations

import torch
from torch import fx

from autopar import random_ops
from autopar.capture.trace import Trace
from autopar.rules import where_of
from autopar.validation.generator import check_generator
from autopar.validation.law import DRAWS
from autopar.validation.states import invalid

_ADD = torch.ops.aten.add.Scalar
_LARGEST = 2**31


def check_draws(trace: Trace) -> None:
    """That draws are independent of each other and differ from step to step.

    Raises:
        ValidationError: naming the draw that is correlated with an earlier one, or the state that
            does not go on.
    """
    seen: dict[tuple[fx.Node, int], fx.Node] = {}
    for node in trace.graph.nodes:
        if node.op == "call_function" and node.target in DRAWS:
            number = node.kwargs.get("draw", node.args[-1])
            here = node.args[0], number
            if here in seen:
                what = f"{node.meta['key']} draws the numbers of {seen[here].meta['key']}: both are draw {number} of a step"
                raise invalid(what, where_of(node))
            if type(number) is not int or not 0 <= number < _LARGEST:
                raise invalid(f"{node.meta['key']} is draw {number!r}", where_of(node))
            seen[here] = node  # type: ignore[index]
    if seen:
        _check_state(trace, {node for node, _ in seen})
        check_generator({node.target for node in seen.values()})  # type: ignore[arg-type]


def _check_state(trace: Trace, states: set[fx.Node]) -> None:
    held = {b.node for b in trace.buffers if b.name == random_ops.STATE}
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    after = results[trace.mutated[random_ops.STATE]] if random_ops.STATE in trace.mutated else None  # type: ignore[index]
    goes_on = (
        isinstance(after, fx.Node)
        and after.target is _ADD
        and after.args[0] in states
        and after.args[1] == 1
    )
    if {state.name for state in states} != held or not goes_on:
        raise invalid(
            "random draws do not all follow from one state that goes on by one at each call"
        )
