"""Nodes belong to the innermost module of the model, however forward accesses a module."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.capture import capture

ACTIVATION = nn.GELU()
ACTIVATIONS = [nn.GELU(), nn.Sequential(nn.GELU(), nn.Tanh())]
BY_NAME = {"gelu": nn.GELU()}


def enclosed() -> Callable[[Tensor], Tensor]:
    inside = nn.GELU()
    return lambda x: inside(x)


CLOSURE = enclosed()
CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "a global module": lambda x: ACTIVATION(x),
    "a list of modules": lambda x: ACTIVATIONS[0](x),
    "modules in a global module": lambda x: ACTIVATIONS[1](x),
    "a dict of modules": lambda x: BY_NAME["gelu"](x),
    "a closure": lambda x: CLOSURE(x),
    "a default": lambda x, act=nn.GELU(): act(x),  # noqa: B008
}


class Layer(nn.Module):
    def __init__(self, call: str) -> None:
        super().__init__()
        self.call, self.linear = call, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return CALLS[self.call](self.linear(x))


@pytest.mark.parametrize("call", CALLS)
def test_nodes_of_modules_outside_the_model_belong_to_the_calling_module(call: str) -> None:
    model = nn.Sequential(Layer(call), nn.Linear(8, 1))
    trace = capture(model, (torch.randn(4, 8),), {})
    calls = [node for node in trace.graph.nodes if node.op == "call_function"]
    known = {name for name, _ in model.named_modules()}
    assert {node.meta["module"] for node in calls} <= known
    acts = {node.meta["module"] for node in calls if "gelu" in str(node.target)}
    assert acts == {"0"}
