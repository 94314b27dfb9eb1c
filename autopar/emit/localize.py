"""A call's local arguments as graph nodes: operands put in, positions turned into steps that know the rank."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from autopar.kernels import collectives as steps
from autopar.kernels import dispatched
from autopar.layout import Strategy
from autopar.rules import Call, Length, Operand, Start, Starts, localize


def local_call(
    graph: fx.Graph, call: Call, strategy: Strategy, mesh_shape: Sequence[int], operands: Sequence[fx.Node]
) -> tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]:
    """Target, args and kwargs of the node that one rank runs."""
    local = localize(call, strategy, mesh_shape)

    def resolve(value: Any) -> Any:
        if isinstance(value, Operand):
            return operands[value.index]
        if isinstance(value, Start | Length):
            place = steps.local_start if isinstance(value, Start) else steps.local_length
            found = graph.call_function(place, (value.dim_size, _splitters(value, mesh_shape)))
            before = value.before if isinstance(value, Start) else 0
            return graph.call_function(operator.sub, (found, before)) if before else found
        if isinstance(value, Starts):
            return value.dim_size, _splitters(value, mesh_shape)
        if isinstance(value, tuple | list):
            return [resolve(v) for v in value]
        return value

    args = tuple(resolve(a) for a in local.args)
    return dispatched.STEPS.get(local.target, local.target), args, {name: resolve(v) for name, v in local.kwargs.items()}


def _splitters(token: Start | Length | Starts, mesh_shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(axis, its size) of those that split the token's dim, outermost first."""
    return tuple((axis, mesh_shape[axis]) for axis in token.layout.splitters(token.dim))
