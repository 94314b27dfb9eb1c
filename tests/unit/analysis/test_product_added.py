"""The product that a sum in backward can be accumulated in: the last one that nothing else
reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn

from autopar import ops
from autopar.analysis.fusable import product_added
from autopar.capture import capture

Body = Callable[[Tensor, nn.ModuleList], Tensor]


class Sums(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.body, self.layers = body, nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x, self.layers).square().sum()


def sums(body: Body) -> list[fx.Node]:
    """Return the additions of the forward pass, after setting the phase of all nodes to
    backward."""
    graph = capture(Sums(body), (torch.randn(4, 8),)).graph
    additions = [
        n
        for n in graph.nodes
        if n.target is torch.ops.aten.add.Tensor and n.meta["phase"] == "forward"
    ]
    assert [product_added(n) for n in additions] == [None] * len(additions), (
        "forward nodes may run again"
    )
    for node in graph.nodes:
        node.meta["phase"] = "backward" if node.op == "call_function" else ""
    return additions


def read_twice(x: Tensor, layers: nn.ModuleList) -> Tensor:
    y = layers[0](x)
    return (y + x) * y


CASES: dict[str, tuple[Body, list[str | None]]] = {
    "two products": (lambda x, f: f[0](x) + f[1](x), ["layers.1"]),
    "the other way round": (lambda x, f: (lambda a, b: b + a)(f[0](x), f[1](x)), ["layers.1"]),
    "three of them": (lambda x, f: f[0](x) + f[1](x) + f[2](x), ["layers.1", "layers.2"]),
    "a product and something else": (lambda x, f: x + f[0](x), ["layers.0"]),
    "none": (lambda x, f: f[0](x).sin() + x, [None]),
    "itself": (lambda x, f: (lambda y: y + y)(f[0](x)), [None]),
    "read twice": (read_twice, [None]),
    "scaled": (lambda x, f: torch.add(x, f[0](x), alpha=2.0), [None]),
    "a row to all rows": (lambda x, f: x + f[0](x[:1]), [None]),
    "of another dtype": (lambda x, f: x.double() + f[0](x), [None]),
}


@pytest.mark.parametrize("case", CASES)
def test_sum_is_accumulated_in_the_last_product_without_other_readers(case: str) -> None:
    body, expected = CASES[case]
    modules = []
    for node in sums(body):
        place = product_added(node)
        product = None if place is None else node.args[place]
        assert product is None or product.target is ops.dot
        modules.append(None if product is None else product.meta["module"])
    assert modules == expected


def test_gradient_of_a_tensor_read_by_two_products_is_accumulated_in_the_last_one() -> None:
    graph = capture(
        Sums(lambda x, f: (lambda y: f[1](y) * f[2](y))(f[0](x))), (torch.randn(4, 8),)
    ).graph
    (total,) = (
        n
        for n in graph.nodes
        if n.target is torch.ops.aten.add.Tensor and n.meta["phase"] == "backward"
    )
    place = product_added(total)
    assert place is not None and total.args[1 - place].target is ops.dot
    assert total.args[1 - place] < total.args[place]
