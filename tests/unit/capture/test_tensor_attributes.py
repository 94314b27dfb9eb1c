"""Tensor attributes that are tensors, for example ``x.T``, are computed by the graph, also if
they are returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture, execute
from autopar.errors import CaptureError

REAL = torch.linspace(-1.0, 1.0, 24, dtype=torch.float64).reshape(4, 6)
ATTRIBUTES: dict[str, Callable[[Tensor], Tensor]] = {
    "T": lambda x: x.T,
    "mT": lambda x: x.mT,
    "H": lambda x: x.H,
    "mH": lambda x: x.mH,
    "real": lambda x: x.real,
    "imag": lambda x: x.imag,
    "data": lambda x: x.data,
    "T.T": lambda x: x.T.T,
}


class Net(nn.Module):
    """A model that returns an attribute of the input, of a parameter and of a buffer, and a result
    computed from them."""

    def __init__(self, attribute: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.attribute, self.layer = attribute, nn.Linear(6, 5, dtype=torch.float64)
        self.register_buffer("table", REAL + 2.0)

    def forward(self, x: Tensor) -> dict[str, Any]:
        input_, table = self.attribute(x), self.attribute(self.table)
        return {
            "input": input_,
            "table": table,
            "weight": self.attribute(self.layer.weight.to(x.dtype)),
            "sum": (table * input_).sum(),
        }


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_of_a_tensor_may_be_returned(name: str) -> None:
    x = torch.complex(REAL, REAL.flip(0)) if name == "imag" else REAL
    model = Net(ATTRIBUTES[name])
    if name == "imag":
        model.table = torch.complex(REAL, REAL + 1.0)
    trace = capture(model, (x,))
    outputs, *_ = execute(trace, dict(model.named_parameters()), dict(model.named_buffers()), (x,))
    for output, found in zip(trace.outputs, outputs, strict=True):
        torch.testing.assert_close(found, model(x)[output.path].detach(), rtol=0.0, atol=0.0)


class Turned(nn.Module):
    """A model that returns the transposed input, alone or with a loss."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.layer, self.alone = nn.Linear(6, 5), alone

    def forward(self, x: Tensor) -> Any:
        return x.T if self.alone else (self.layer(x).pow(2).mean(), x.T)


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.filterwarnings("ignore:no output of the model")
def test_a_model_that_returns_its_transposed_input_is_planned(alone: bool) -> None:
    model, x = Turned(alone), REAL.float()
    plan = autopar.plan(model, {"a": 2}, example_inputs=(x,), hardware="cpu-gloo")
    assert autopar.verify(plan, model, (x,)).ok


def test_the_gradient_of_a_returned_attribute_reaches_the_input() -> None:
    """The gradient of the input passes through its transpose."""

    class Both(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x.T, (x.T * 2.0).exp()

    x = REAL.clone().requires_grad_()
    module: Any = autopar.compile(Both(), 1, example_inputs=(x,), hardware="cpu-gloo")
    same = REAL.clone().requires_grad_()
    for each, of in ((module, x), (Both(), same)):
        turned, grown = each(of)
        (turned * grown).sum().backward()
    torch.testing.assert_close(x.grad, same.grad)


@pytest.mark.parametrize(
    "returned", [lambda x: x.shape[0], lambda x: None], ids=["a size", "nothing"]
)
def test_a_forward_without_tensor_outputs_is_refused(
    returned: Callable[[Tensor], Any],
) -> None:
    class Nothing(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return returned(x)

    with pytest.raises(CaptureError, match="forward returns no tensor"):
        capture(Nothing(), (REAL,))
