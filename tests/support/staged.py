"""A reference interpreter of stages: they run one after another on one device, forward in order and
backward in reverse order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from autopar.capture.trace import Trace
from autopar.stages import Cut


def run_stages(
    cut: Cut,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor],
    tangent: Tensor,
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
    """Return outputs by path, gradients by parameter in stored shapes, and new buffers by name. The
    caller casts the tensors.

    Args:
        parameters: tensors by all of their names.
        buffers: tensors by all of their names.
        inputs: tensors by path.
    """
    outputs: dict[str, Tensor] = {}
    gradients: dict[str, Tensor] = {}
    mutated: dict[str, Tensor] = {}
    crossing: dict[str, Tensor] = {}
    known: list[dict[fx.Node, Any]] = []
    for stage in cut.stages:
        values = {p.node: parameters[p.name].reshape(p.view) for p in stage.parameters}
        values |= {b.node: buffers[b.name].reshape(b.view) for b in stage.buffers}
        values |= {i.node: crossing[i.path] if i.crosses else inputs[i.path] for i in stage.inputs}
        env: dict[fx.Node, Any] = {}
        _run(stage, "forward", env, values)
        results = _results(stage)
        for o, node in zip(stage.outputs, results, strict=False):
            (crossing if o.crosses else outputs)[o.path] = env[node]
        mutated |= {name: env[results[i]] for name, i in stage.mutated.items()}
        known.append(env)
    returning: dict[str, Tensor] = {}
    for stage, env in zip(reversed(cut.stages), reversed(known), strict=True):
        values = {
            o.tangent: returning[o.path] if o.crosses else tangent for o in stage.differentiable
        }
        _run(stage, "backward", env, values)
        results = _results(stage)
        for p in stage.parameters:
            if p.gradient is not None:
                part = env[results[p.gradient]].reshape(p.shape)
                gradients[p.name] = gradients[p.name] + part if p.name in gradients else part
        returning = {
            i.path: env[results[i.gradient]] for i in stage.inputs if i.gradient is not None
        }
    return outputs, gradients, mutated


def _results(stage: Trace) -> Sequence[fx.Node]:
    return next(iter(reversed(stage.graph.nodes))).args[0]


def _run(stage: Trace, phase: str, env: dict[fx.Node, Any], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for node in stage.graph.nodes:
            if node.op == "placeholder" and node.name in values:
                env[node] = values[node.name]
            elif node.op == "call_function" and node.meta["phase"] == phase:
                args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
                env[node] = node.target(*_wide(args), **_wide(kwargs))


def _wide(value: Any) -> Any:
    """Replace the casts of the graph with casts to float64."""
    if isinstance(value, torch.dtype) and value.is_floating_point:
        return torch.float64
    if isinstance(value, dict):
        return {k: _wide(v) for k, v in value.items()}
    return tuple(map(_wide, value)) if isinstance(value, tuple) else value
