"""All nodes of the graphs of four models have a rule, and all strategies reproduce the node on its
values in the model."""

from __future__ import annotations

import math
import operator
from typing import Any

import pytest
import torch
import zoo_small
from torch import fx
from torch.distributed.tensor import Shard

from autopar.capture import capture
from autopar.capture.trace import Trace
from autopar.rules import Call, call_of, is_fallback, operands_of, strategies
from autopar.rules.law import check_strategies

MODELS = ("gpt2", "llama", "bert", "vit")
_known: dict[str, tuple[Trace, dict[fx.Node, Any]]] = {}


def traced(name: str) -> tuple[Trace, dict[fx.Node, Any]]:
    """Return the trace of a one-layer model in fp64, and the value of each node."""
    if name not in _known:
        model, batch = getattr(zoo_small, name)(num_layers=1, dtype=torch.float64)
        trace = capture(model, (), batch)
        tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        supply = [
            tensors[p.name].detach().reshape(p.view) for p in (*trace.parameters, *trace.buffers)
        ]
        supply += [next(v for k, v in batch.items() if k in i.path) for i in trace.inputs]
        values = iter([*supply, torch.ones((), dtype=torch.float64)])
        known: dict[fx.Node, Any] = {}
        for node in trace.graph.nodes:
            if node.op == "placeholder":
                known[node] = next(values)
            elif node.op == "call_function":
                args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
                known[node] = node.target(*args, **kwargs)
        _known[name] = trace, known
    return _known[name]


def calls(trace: Trace) -> list[tuple[fx.Node, Call]]:
    return [(node, call_of(node)) for node in trace.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("name", MODELS)
def test_no_node_falls_back_to_replication(name: str) -> None:
    trace, _ = traced(name)
    assert [node.name for node, call in calls(trace) if is_fallback(call)] == []


@pytest.mark.parametrize("name", MODELS)
def test_every_node_with_divisible_operands_has_several_strategies(name: str) -> None:
    trace, _ = traced(name)
    for node, call in calls(trace):
        if any(math.prod(info.shape) % 4 == 0 for info in call.inputs):
            assert len(strategies(call, (2,))) > 1, node.format_node()


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_every_strategy_of_every_node_matches_the_unsharded_node(
    name: str, mesh_shape: tuple[int, ...]
) -> None:
    trace, values = traced(name)
    seen = set()
    for node, call in calls(trace):
        if (key := call.key) in seen:
            continue
        seen.add(key)
        operands = [values[operand] for operand in operands_of(node)]
        if node.target is operator.getitem:
            operands = [operands[0][node.args[1]]]
        check_strategies(call, operands, mesh_shape)


@pytest.mark.parametrize("name", MODELS)
def test_strategies_on_three_axes_fit_their_operands(name: str) -> None:
    trace, _ = traced(name)
    mesh_shape = (2, 2, 2)
    for _, call in calls(trace):
        for strategy in strategies(call, mesh_shape):
            for info, layout in zip(
                (*call.inputs, *call.outputs), (*strategy.inputs, *strategy.outputs), strict=True
            ):
                assert layout.fits(info.shape, mesh_shape)
                assert not any(
                    isinstance(p, Shard) and info.shape[p.dim] == 1 for p in layout.placements
                )
