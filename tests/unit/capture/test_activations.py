"""Activations written as formulas become single ops. Similar formulas stay unchanged."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import Trace, capture

FLAT = math.sqrt(2 / math.pi)
Function = Callable[[Tensor], Tensor]


class Model(nn.Module):
    """A model with an activation between two layers."""

    def __init__(self, function: Function, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.function = function
        self.up, self.down = nn.Linear(6, 10, dtype=dtype), nn.Linear(10, 6, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.function(self.up(x))).square().sum()


def _changed_between(x: Tensor) -> Tensor:
    y = x * 1.0
    half = 0.5 * y
    y.add_(1.0)
    return half * (1 + torch.tanh(FLAT * (y + 0.044715 * y**3)))


def _without_gradient_of_its_gate(x: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.sigmoid(x)
    return x * gate


def _with_detached_gate(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x).detach()


def _twice(x: Tensor) -> Tensor:
    for _ in range(2):
        x = 0.5 * x * (1.0 + torch.tanh(FLAT * (x + 0.044715 * x**3)))
    return x


def _two_tensors(x: Tensor) -> Tensor:
    return 0.5 * (x + 1.0) * (1.0 + torch.tanh(FLAT * (x + 0.044715 * x**3)))


def _with_tanh_kept(x: Tensor) -> Tensor:
    t = torch.tanh(FLAT * (x + 0.044715 * x.pow(3)))
    return 0.5 * x * (1 + t) + t


WRITTEN_OUT: dict[str, tuple[Function, str]] = {
    "tanh, a power": (
        lambda x: (
            0.5
            * x
            * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))
        ),
        "gelu",
    ),
    "tanh, products": (
        lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x))),
        "gelu",
    ),
    "tanh, multiplied out": (
        lambda x: x / 2 + (x * 0.5) * (FLAT * x + (FLAT * 0.044715) * x.square() * x).tanh(),
        "gelu",
    ),
    "tanh, of a sum": (
        lambda x: (lambda u: u * (nn.functional.tanh(FLAT * (u + 0.044715 * u**3)) + 1) / 2)(
            x + x.sin()
        ),
        "gelu",
    ),
    "tanh, kept beside": (_with_tanh_kept, "gelu"),
    "tanh, twice": (_twice, "gelu"),
    "erf": (lambda x: x * 0.5 * (1.0 + torch.erf(x / math.sqrt(2.0))), "gelu"),
    "erf, torch.special": (lambda x: 0.5 * x * (torch.special.erf(x * math.sqrt(0.5)) + 1), "gelu"),
    "sigmoid": (lambda x: x * torch.sigmoid(x), "silu"),
    "sigmoid, the other way round": (lambda x: x.sigmoid().mul(x), "silu"),
    "sigmoid, of a sum": (lambda x: (lambda u: nn.functional.sigmoid(u) * u)(x + x.cos()), "silu"),
}
OTHERWISE: dict[str, Function] = {
    "another factor": lambda x: 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * x**3))),
    "another cubic": lambda x: 0.5 * x * (1.0 + torch.tanh(FLAT * (x + 0.0447 * x**3))),
    "no cubic": lambda x: 0.5 * x * (1.0 + torch.tanh(FLAT * x)),
    "of another tensor": _two_tensors,
    "changed in between": _changed_between,
    "no gradient of its gate": _without_gradient_of_its_gate,
    "a detached gate": _with_detached_gate,
    "quick": lambda x: x * torch.sigmoid(1.702 * x),
    "gated by another": lambda x: x * torch.sigmoid(x.sin()),
    "minus": lambda x: 0.5 * x * (1.0 - torch.tanh(FLAT * (x + 0.044715 * x**3))),
    "to the third power twice": lambda x: (
        0.5 * x * (1.0 + torch.tanh(FLAT * (x + 0.044715 * x**3))) ** 2
    ),
    "in another dtype": lambda x: (
        0.5 * x.float() * (1.0 + torch.tanh(FLAT * (x + 0.044715 * x**3)).float())
    ).double(),
}


def traced(function: Function) -> tuple[Model, Tensor, Trace]:
    torch.manual_seed(0)
    model, x = Model(function), torch.randn(8, 6, dtype=torch.float64)
    return model, x, capture(model, (x,))


def names(trace: Trace) -> list[str]:
    return [str(node.target) for node in trace.graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize("how", WRITTEN_OUT)
def test_an_activation_formula_becomes_one_op_with_the_same_result(how: str) -> None:
    function, op = WRITTEN_OUT[how]
    model, x, trace = traced(function)
    found = names(trace)
    assert f"aten.{op}.default" in found
    assert f"aten.{op}_backward.default" in found
    if "beside" not in how:
        assert not any(name.startswith(("aten.tanh", "aten.erf", "aten.sigmoid")) for name in found)
    plan = autopar.plan(model, 2, example_inputs=(x,))
    assert autopar.verify(plan, model, (x,)).ok


@pytest.mark.parametrize("how", OTHERWISE)
def test_a_similar_formula_stays_unchanged(how: str) -> None:
    model, x, trace = traced(OTHERWISE[how])
    assert not any("gelu" in name or "silu" in name for name in names(trace))
    plan = autopar.plan(model, 2, example_inputs=(x,))
    assert autopar.verify(plan, model, (x,)).ok


def test_the_source_line_of_the_op_is_the_end_of_the_formula() -> None:
    _, _, trace = traced(WRITTEN_OUT["tanh, a power"][0])
    (gelu,) = (node for node in trace.graph.nodes if str(node.target) == "aten.gelu.default")
    assert gelu.kwargs == {"approximate": "tanh"}
    assert "test_activations.py" in gelu.meta["source"]


def test_the_gelu_of_gpt2_is_one_op() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=64, n_positions=32)
    ids = torch.randint(0, 64, (2, 8))
    trace = capture(transformers.GPT2LMHeadModel(config), (), {"input_ids": ids, "labels": ids})
    assert names(trace).count("aten.gelu.default") == 2
    assert not any("tanh" in name for name in names(trace))
