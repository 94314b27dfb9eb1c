"""The in-place forms of ops are bitwise equal to the ops, and exist only for ops that allow
them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from autopar import ops
from autopar.ops.in_place import functional_form, in_place_form

aten = torch.ops.aten
GRADIENT, OTHER = object(), object()  # placeholders of tensors
CALLS: tuple[tuple[Any, tuple[Any, ...], dict[str, Any]], ...] = (
    (aten.gelu_backward.default, (GRADIENT, OTHER), {"approximate": "tanh"}),
    (aten.silu_backward.default, (GRADIENT, OTHER), {}),
    (aten.threshold_backward.default, (GRADIENT, OTHER, 0), {}),
    (aten.tanh_backward.default, (GRADIENT, OTHER), {}),
    (aten.sigmoid_backward.default, (OTHER, GRADIENT), {}),
    (aten.elu_backward.default, (GRADIENT, 1.0, 1.0, 1.0, False, OTHER), {}),
    (aten.leaky_relu_backward.default, (GRADIENT, OTHER, 0.1, False), {}),
    (aten.softplus_backward.default, (GRADIENT, OTHER, 1.0, 20.0), {}),
    (aten.hardtanh_backward.default, (GRADIENT, OTHER, -1.0, 1.0), {}),
    (aten.add.Tensor, (OTHER, GRADIENT), {"alpha": 2}),
    (aten.sub.Tensor, (OTHER, GRADIENT), {}),
    (aten.mul.Tensor, (GRADIENT, OTHER), {}),
    (aten.div.Tensor, (GRADIENT, OTHER), {}),
    (aten.neg.default, (GRADIENT,), {}),
    (aten.pow.Tensor_Scalar, (GRADIENT, 2), {}),
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("target", "args", "kwargs"), CALLS, ids=[str(call[0]) for call in CALLS])
def test_an_in_place_form_writes_the_result_of_the_op_into_any_operand(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], dtype: torch.dtype
) -> None:
    form, keyword = in_place_form(target) or pytest.fail(f"{target} has none")
    assert functional_form(form) == (target, keyword) and functional_form(target) is None
    for into in (GRADIENT, OTHER) if OTHER in args else (GRADIENT,):
        given = {
            GRADIENT: torch.randn(7, 5, dtype=dtype),
            OTHER: torch.rand(7, 5, dtype=dtype) + 0.5,
        }
        operands = [given.get(a, a) if a in (GRADIENT, OTHER) else a for a in args]
        expected, written = target(*operands, **kwargs), given[into]
        result = form(*operands, **kwargs, **{keyword: written})
        assert result.data_ptr() == written.data_ptr() and torch.equal(written, expected)


@pytest.mark.parametrize(
    "target",
    [
        aten._softmax_backward_data.default,  # it reads whole rows
        aten.cumsum.default,
        aten.mm.default,
        aten.native_dropout_backward.default,  # torch generates its in-place form, which copies
        aten.add_.Tensor,
        ops.dot,
        ops.embedding_backward,
    ],
    ids=lambda target: getattr(target, "__name__", None) or str(target),
)
def test_other_ops_have_no_in_place_form(target: Any) -> None:
    assert in_place_form(target) is None


def test_the_gradient_of_logits_has_a_custom_in_place_form() -> None:
    assert in_place_form(ops.cross_entropy_backward) == (ops.cross_entropy_backward_, "")
    assert functional_form(ops.cross_entropy_backward_) == (ops.cross_entropy_backward, "")
