"""The products whose sum with a residual a kernel can normalize."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from autopar import ops
from autopar.analysis.fusable import Normed, normed_after

ROWS, INNER, WIDTH = 4, 3, 8


class Model:
    """A builder of graphs with values. Nodes are in the forward phase by default."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.graph, self.dtype = fx.Graph(), dtype

    def tensor(self, *shape: int, dtype: torch.dtype | None = None) -> fx.Node:
        first = next(iter(self.graph.nodes), None)
        with self.graph.inserting_before(first):  # placeholders come first, as in a trace
            node = self.graph.placeholder("x")
        node.meta["val"] = torch.empty(shape, dtype=dtype or self.dtype, device="meta")
        return node

    def call(self, target: Callable[..., Any], *args: Any, phase: str = "forward") -> fx.Node:
        node = self.graph.call_function(target, args)
        node.meta.update(
            val=target(*(a.meta["val"] if isinstance(a, fx.Node) else a for a in args)), phase=phase
        )
        return node

    def product(self, phase: str = "forward") -> fx.Node:
        return self.call(
            ops.dot, "mk,kn->mn", self.tensor(ROWS, INNER), self.tensor(INNER, WIDTH), phase=phase
        )

    def add(self, a: fx.Node, b: fx.Node) -> fx.Node:
        return self.call(torch.ops.aten.add.Tensor, a, b)

    def norm(
        self,
        x: fx.Node,
        weight: fx.Node | None,
        *,
        wide: torch.dtype = torch.float32,
        rounded: torch.dtype | None = None,
    ) -> fx.Node:
        squares = self.call(ops.square_sum, x, wide)
        return self.call(
            ops.rms_norm, x, squares, weight, WIDTH, 1e-6, wide, rounded or self.dtype, self.dtype
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("first", [True, False])
def test_sum_squares_and_norm_after_a_product_are_found(dtype: torch.dtype, first: bool) -> None:
    m = Model(dtype)
    product, residual = m.product(), m.tensor(ROWS, WIDTH)
    total = m.add(*((product, residual) if first else (residual, product)))
    norm = m.norm(total, m.tensor(WIDTH), rounded=torch.float32)
    other = m.norm(total, m.tensor(WIDTH))
    assert normed_after(product) == Normed(total, norm.args[1], norm), "the first of several norms"
    assert normed_after(total) is None and normed_after(other) is None


def test_norm_of_a_sum_of_two_products_belongs_to_the_last_product() -> None:
    m = Model()
    before, after = m.product(), m.product()
    norm = m.norm(m.add(after, before), m.tensor(WIDTH))
    pattern = normed_after(after)
    assert normed_after(before) is None and pattern is not None and pattern.norm is norm


def test_residual_may_be_computed_after_the_product() -> None:
    m = Model()
    product, late = m.product(), m.call(torch.ops.aten.neg.default, m.tensor(ROWS, WIDTH))
    m.norm(m.add(product, late), m.tensor(WIDTH))
    assert normed_after(product) is not None


def read_twice(m: Model) -> fx.Node:
    product = m.product()
    m.call(torch.ops.aten.neg.default, product)
    m.norm(m.add(product, m.tensor(ROWS, WIDTH)), m.tensor(WIDTH))
    return product


def in_backward(m: Model) -> fx.Node:
    product = m.product(phase="backward")
    m.norm(m.add(product, m.tensor(ROWS, WIDTH)), m.tensor(WIDTH))
    return product


def with_a_bias(m: Model) -> fx.Node:
    product = m.call(
        ops.dot, "mk,kn->mn", m.tensor(ROWS, INNER), m.tensor(INNER, WIDTH), m.tensor(WIDTH)
    )
    m.norm(m.add(product, m.tensor(ROWS, WIDTH)), m.tensor(WIDTH))
    return product


def doubled(m: Model) -> fx.Node:
    product = m.product()
    m.norm(m.add(product, product), m.tensor(WIDTH))
    return product


def over_rows(m: Model) -> fx.Node:
    product = m.product()
    m.norm(m.add(product, m.tensor(WIDTH)), m.tensor(WIDTH))
    return product


def without_weight(m: Model) -> fx.Node:
    product = m.product()
    m.norm(m.add(product, m.tensor(ROWS, WIDTH)), None)
    return product


def weight_of_another_dtype(m: Model) -> fx.Node:
    product = m.product()
    m.norm(m.add(product, m.tensor(ROWS, WIDTH)), m.tensor(WIDTH, dtype=torch.float64))
    return product


def weight_that_is_made_later(m: Model) -> fx.Node:
    """The weight is a parameter plus one, as in Gemma, computed between the sum and the norm."""
    product = m.product()
    total = m.add(product, m.tensor(ROWS, WIDTH))
    m.norm(total, m.call(torch.ops.aten.add.Tensor, m.tensor(WIDTH), 1))
    return product


def not_normed(m: Model) -> fx.Node:
    product = m.product()
    m.add(product, m.tensor(ROWS, WIDTH))
    return product


def computed_in_less(m: Model) -> fx.Node:
    m.dtype = torch.float64
    product = m.product()
    m.norm(m.add(product, m.tensor(ROWS, WIDTH)), m.tensor(WIDTH), wide=torch.float32)
    return product


NONE = (
    read_twice,
    in_backward,
    doubled,
    with_a_bias,
    over_rows,
    without_weight,
    weight_of_another_dtype,
    weight_that_is_made_later,
    not_normed,
    computed_in_less,
)


@pytest.mark.parametrize("make", NONE)
def test_other_patterns_are_not_matched(make: Callable[[Model], fx.Node]) -> None:
    assert normed_after(make(Model())) is None
