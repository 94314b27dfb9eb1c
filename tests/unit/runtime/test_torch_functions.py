"""The properties that are derived from the names of torch functions match their behavior."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.runtime.gather_fallback import computes_in_place, draws, tensors_in, written_by

X, Y, OUT = torch.zeros(3), torch.ones(3), torch.zeros(3)


@pytest.mark.parametrize(
    ("func", "args", "kwargs", "written"),
    [
        (Tensor.add_, (X, Y), {}, [X]),
        (Tensor.add, (X, Y), {}, []),
        (Tensor.__iadd__, (X, Y), {}, [X]),
        (Tensor.__setitem__, (X, 0, 1.0), {}, [X]),
        (Tensor.__getitem__, (X, 0), {}, []),
        (Tensor.__iter__, (X,), {}, []),
        (Tensor.__invert__, (X,), {}, []),
        (Tensor.requires_grad_, (X,), {}, []),
        (torch._foreach_mul_, ([X, Y], 2.0), {}, [X, Y]),
        (torch._foreach_norm, ([X, Y], 2.0), {}, []),
        (torch.add, (X, Y), {"out": OUT}, [OUT]),
        (nn.init.uniform_, (), {"tensor": X}, [X]),
    ],
)
def test_the_tensors_that_a_function_writes(
    func: Any, args: Any, kwargs: Any, written: list[Tensor]
) -> None:
    assert [id(x) for x in written_by(func, args, kwargs)] == [id(x) for x in written]


@pytest.mark.parametrize(
    "func",
    [
        Tensor.normal_,
        torch.randn_like,
        torch.bernoulli,
        nn.functional.dropout,
        nn.init.kaiming_uniform_,
    ],
)
def test_functions_that_draw_random_numbers_are_known(func: Any) -> None:
    assert draws(func) and not draws(torch.zeros_like)


@pytest.mark.parametrize(
    ("func", "args", "where"),
    [
        (Tensor.add_, (X, Y), True),
        (Tensor.__rsub__, (X, 1.0), True),
        (Tensor.__itruediv__, (X, 2.0), True),
        (torch._foreach_lerp_, ([X], [Y], 0.5), True),
        (Tensor.norm, (X,), True),
        (Tensor.sum, (X, 0), False),
        (Tensor.index_add_, (X, 0, X, X), False),
        (Tensor.cumsum_, (X, 0), False),
        (Tensor.view, (X, -1), False),
        (Tensor.t, (X,), False),
        (Tensor.t_, (X,), True),
    ],
)
def test_functions_that_compute_elementwise_in_place_are_known(
    func: Any, args: Any, where: bool
) -> None:
    assert computes_in_place(func, args, {}) == where


def test_tensors_are_found_in_nested_arguments() -> None:
    assert [id(x) for x in tensors_in(([X, (Y, 2)], {"out": OUT}))] == [id(X), id(Y), id(OUT)]
