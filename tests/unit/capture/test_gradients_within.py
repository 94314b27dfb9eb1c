"""Gradients computed in forward, for example for gradient penalties: backward differentiates
through them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.capture import capture
from autopar.constraints import fsdp
from autopar.errors import CaptureError

MESH = autopar.Mesh({"data": 2})
of_tensors = pytest.mark.skipif(
    torch.__version__ < (2, 13), reason="no gradient of what forward computes"
)


class Net(nn.Module):
    """A model with equal layers and a `loss` of the model and the batch."""

    def __init__(self, loss: Callable[[nn.Module, Tensor], Any], num_layers: int = 2) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(num_layers))
        )
        self.head, self.loss = nn.Linear(4, 1), loss

    def score(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.layers(x))
        return result

    def forward(self, x: Tensor) -> Any:
        return self.loss(self, x)


def _penalty(net: Any, x: Tensor) -> Tensor:
    between = (0.3 * x + 0.7 * x.flip(1)).requires_grad_(True)
    score = net.score(between)
    (gradient,) = torch.autograd.grad(
        score, between, torch.ones_like(score), create_graph=True, retain_graph=True
    )
    penalty: Tensor = (gradient.norm(2, dim=1) - 1).square().mean() - net.score(x).mean()
    return penalty


def _equation(net: Any, x: Tensor) -> Tensor:
    place = x.detach().requires_grad_(True)
    value = net.score(place)[:, 0]
    (first,) = torch.autograd.grad(value.sum(), place, create_graph=True)
    (second,) = torch.autograd.grad(first[:, 0].sum(), place, create_graph=True)
    residual: Tensor = (second[:, 0] + value).square().mean()
    return residual


def _unused(net: Any, x: Tensor) -> Tensor:
    read, other = x.detach().requires_grad_(True), x.detach().requires_grad_(True)
    given = torch.autograd.grad(
        net.score(read).sum(),
        (read, other),
        create_graph=True,
        allow_unused=True,
        materialize_grads=True,
    )
    return (given[0].square() + given[1]).mean()


def _made_here(net: Any, x: Tensor) -> Tensor:
    place = torch.linspace(0.0, 1.0, 4, dtype=x.dtype, requires_grad=True)
    (gradient,) = torch.autograd.grad(net.score(place[None].tanh()).sum(), place, create_graph=True)
    zeros = torch.zeros_like(x, requires_grad=net.training)
    return (gradient - net.score(x + zeros)).square().mean()  # type: ignore[no-any-return]


def _of_parameters(net: Any, x: Tensor) -> Tensor:
    gradients = torch.autograd.grad(
        net.score(x).square().mean(), list(net.head.parameters()), create_graph=True
    )
    return torch.stack([gradient.square().sum() for gradient in gradients]).sum()


def _forces(net: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        place = x.detach().requires_grad_(True)
        energy = net.score(place)
        (force,) = torch.autograd.grad(energy.sum(), place, create_graph=True)
    return energy, force


def _backward(net: Any, x: Tensor) -> Tensor:
    net.score(x).mean().backward()
    return net.score(x).square().mean()  # type: ignore[no-any-return]


def _of_the_input(net: Any, x: Tensor) -> Tensor:
    x.requires_grad_(True)
    (gradient,) = torch.autograd.grad(net.score(x).sum(), x, create_graph=True)
    return gradient.square().mean()


def _twice(net: Any, x: Tensor) -> Tensor:
    score = net.score(x).square().mean()
    (gradient,) = torch.autograd.grad(score, (net.head.weight,))
    return score + gradient.mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "loss",
    [
        _of_parameters,
        *(
            pytest.param(each, marks=of_tensors)
            for each in (_penalty, _equation, _unused, _forces, _made_here)
        ),
    ],
)
def test_backward_differentiates_through_gradients_computed_in_forward(
    loss: Callable[[nn.Module, Tensor], Any],
) -> None:
    torch.manual_seed(0)
    model, batch = Net(loss).double(), (torch.randn(4, 4, dtype=torch.float64),)
    report = autopar.verify(
        autopar.plan(model, MESH, example_inputs=batch, constraints=[fsdp()]), model, batch
    )
    assert report.ok, report


@of_tensors
def test_gradients_in_forward_are_computed_in_inference() -> None:
    model, batch = Net(_forces).double(), (torch.randn(4, 4, dtype=torch.float64),)
    report = autopar.verify(
        autopar.plan(model, MESH, example_inputs=batch, inference=True), model, batch
    )
    assert report.ok, report


@pytest.mark.parametrize("fold", [True, False])
@pytest.mark.parametrize(
    ("loss", "complaint", "line", "remedy"),
    [
        (
            _backward,
            "Tensor.backward",
            "net.score(x).mean().backward()",
            "torch.autograd.grad(..., create_graph=True)",
        ),
        (_of_the_input, "requires_grad_", "x.requires_grad_(True)", "x.detach().requires_grad_()"),
        (_twice, "autograd.grad consumed", "torch.autograd.grad(score", "create_graph=True"),
    ],
)
def test_unsupported_gradient_calls_are_refused_with_the_line_and_a_remedy(
    loss: Callable[[nn.Module, Tensor], Any], complaint: str, line: str, remedy: str, fold: bool
) -> None:
    batch = torch.randn(4, 4)
    with pytest.raises(CaptureError, match=complaint) as refused:
        capture(Net(loss, 6), (batch,), fold=fold)
    assert line in str(refused.value.where) and remedy in refused.value.remedy
    assert not batch.requires_grad
