"""Equality of two traces in their nodes, inputs and outputs. Names of nodes are ignored."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from autopar.capture import Trace


def assert_same_trace(one: Trace, other: Trace) -> None:
    """Fail at the first node, input or output that differs."""
    for entry, other_entry in zip(_nodes(one), _nodes(other), strict=True):
        assert entry == other_entry
    for entry, other_entry in zip(_border(one), _border(other), strict=True):
        assert entry == other_entry
    assert one.fingerprint == other.fingerprint


def differs(one: Trace, other: Trace) -> bool:
    """Return whether two traces differ."""
    try:
        assert_same_trace(one, other)
    except (AssertionError, ValueError):
        return True
    return False


def _nodes(trace: Trace) -> Iterator[Any]:
    number = {node: position for position, node in enumerate(trace.graph.nodes)}
    for node in trace.graph.nodes:
        is_call = node.op == "call_function"
        arguments = (
            fx.map_arg((node.args, node.kwargs), lambda operand: f"%{number[operand]}")
            if is_call or node.op == "output"
            else ()
        )
        value = node.meta.get("val")
        looks = [_look(item) for item in (value if isinstance(value, (tuple, list)) else (value,))]
        labels = {name: node.meta[name] for name in ("phase", "module", "source", "key")}
        yield node.op, node.target if is_call else "", str(arguments), labels, looks


def _look(value: Any) -> Any:
    return (
        (value.shape, value.stride(), value.dtype, value.device)
        if isinstance(value, torch.Tensor)
        else value
    )


def _border(trace: Trace) -> Iterator[Any]:
    number = {node.name: position for position, node in enumerate(trace.graph.nodes)}
    for group in (trace.parameters, trace.buffers, trace.inputs, trace.outputs):
        for entry in group:
            yield (
                {
                    name: getattr(entry, name)
                    for name in entry.__dataclass_fields__
                    if name != "node"
                },
                number[entry.node],
            )
    yield (
        [number[o.tangent] for o in trace.differentiable],
        dict(trace.mutated),
        trace.in_spec,
        trace.out_spec,
        dict(trace.constants),
        dict(trace.settings),
    )
