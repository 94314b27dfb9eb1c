"""Biases of linear layers in normal form: one op with the product if the model computes them so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from autopar import ops
from autopar.capture import Trace, capture, execute
from autopar.capture.graphs import calls, shape_of

aten = torch.ops.aten
DRAWN = torch.Generator().manual_seed(0)
X, WEIGHT, BIAS = (
    torch.randn(shape, generator=DRAWN, dtype=torch.float64) for shape in ((2, 3, 6), (4, 6), (4,))
)


class Layer(nn.Module):
    """A model that applies a function to x, a weight [4, 6] and a bias."""

    def __init__(
        self, made: Callable[[Tensor, Tensor, Tensor], Tensor], bias: Tensor = BIAS
    ) -> None:
        super().__init__()
        self.made, self.weight, self.bias = (
            made,
            nn.Parameter(WEIGHT.clone()),
            nn.Parameter(bias.clone()),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.made(x, self.weight, self.bias).square().mean()


def traced(model: nn.Module) -> tuple[Trace, list[fx.Node], list[fx.Node]]:
    """Check that the trace matches the model. Return the trace, its forward products and its
    adds."""
    trace = capture(model, (X,))
    (loss,), gradients, _ = execute(trace, dict(model.named_parameters()), {}, [X])
    model.zero_grad()
    expected = model(X)
    expected.backward()
    torch.testing.assert_close(loss, expected)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
    return (
        trace,
        [n for n in calls(trace.graph, ops.dot) if n.meta["phase"] == "forward"],
        calls(trace.graph, aten.add.Tensor),
    )


ONE: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {
    "a linear": F.linear,
    "a linear of rows": lambda x, w, b: F.linear(x[0], w, b),
    "addmm with a weight that lies otherwise": lambda x, w, b: torch.addmm(
        b, x.view(6, 6), w.reshape(6, 4)
    ),
    "a linear after a merging view": lambda x, w, b: F.linear(x.view(1, 6, 6), w, b),
}


@pytest.mark.parametrize("name", ONE)
def test_a_linear_with_a_bias_is_one_op_and_the_bias_gradient_is_a_sum(name: str) -> None:
    trace, (product,), additions = traced(Layer(ONE[name]))
    assert not additions and len(product.args) == 4 and shape_of(product.args[3]) == (4,)  # type: ignore[arg-type]
    gradient = next(iter(reversed(trace.graph.nodes))).args[0][trace.parameters[1].gradient]
    assert trace.parameters[1].name == "bias" and gradient.target is aten.sum.dim_IntList


APART: dict[str, tuple[Callable[[Tensor, Tensor, Tensor], Tensor], Tensor]] = {
    "a sum that the model writes": (lambda x, w, b: x @ w.t() + b, BIAS),
    "a linear of several dims in memory of another order": (
        lambda x, w, b: F.linear(x.transpose(0, 1), w, b),
        BIAS,
    ),
    "addmm with one number": (lambda x, w, b: torch.addmm(b, x.view(6, 6), w.t()), BIAS[:1]),
}


@pytest.mark.parametrize("name", APART)
def test_a_bias_that_torch_adds_separately_stays_a_separate_add(name: str) -> None:
    _, (product,), additions = traced(Layer(*APART[name]))
    assert len(product.args) == 3 and len(additions) == 1


def test_addmm_with_a_matrix_stays_addmm() -> None:
    trace, products, _ = traced(
        Layer(
            lambda x, w, b: torch.addmm(b, x.view(6, 6), w.t()),
            torch.randn(6, 4, dtype=torch.float64),
        )
    )
    assert not products and len(calls(trace.graph, aten.addmm.default)) == 1


def test_a_bias_has_the_split_column_dims_of_its_product() -> None:
    """For a weight of heads, the product and the bias have separate dims for heads and features."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.bias = (
                nn.Parameter(torch.randn(shape, dtype=torch.float64))
                for shape in ((6, 2, 5), (10,))
            )

        def forward(self, x: Tensor) -> Tensor:
            return torch.addmm(self.bias, x.view(6, 6), self.weight.view(6, 10)).square().mean()

    _, (product,), additions = traced(Heads())
    assert (
        shape_of(product) == (2, 3, 2, 5) and shape_of(product.args[3]) == (2, 5) and not additions
    )  # type: ignore[arg-type]


def test_under_autocast_the_bias_is_cast_as_torch_casts_it() -> None:
    model, x = nn.Linear(6, 4), X.float()

    class Summed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = model

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x).float().square().mean()

    with torch.autocast("cpu", dtype=torch.bfloat16):
        trace = capture(Summed(), (x,))
        expected = model(x)
    product = next(iter(calls(trace.graph, ops.dot)))
    assert {n.meta["val"].dtype for n in (product, *product.all_input_nodes)} == {
        torch.bfloat16
    } and len(product.args) == 4
    operands = (x.bfloat16(), model.weight.bfloat16(), model.bias.bfloat16())
    assert torch.equal(ops.dot(product.args[0], *operands), expected)  # type: ignore[arg-type]
