"""The predicted memory traffic of the parts of a norm equals the traffic of their code, call by
call."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import ops
from autopar.analysis.fusable import PIECES
from autopar.analysis.work import is_view, works
from autopar.rules import TensorInfo

ROWS, WIDTH, EPS = 48, 64, 1e-6


class Passes(TorchDispatchMode):
    """A mode that records the bytes of the large tensors that each call reads and writes."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        large = [x for x in (*args, result) if isinstance(x, Tensor) and x.numel() == ROWS * WIDTH]
        if large and not is_view(func):
            self.found.append(sum(x.numel() * x.itemsize for x in large))
        return result


def calls(dtype: torch.dtype, weighted: bool) -> dict[Callable[..., Any], tuple[Any, ...]]:
    x, grad = (torch.randn(ROWS, WIDTH).to(dtype) for _ in range(2))
    weight, wide = (
        torch.rand(WIDTH).to(dtype) if weighted else None,
        torch.promote_types(dtype, torch.float32),
    )
    squares, product = torch.rand(ROWS, dtype=wide), torch.rand(ROWS, dtype=wide)
    return {
        ops.square_sum: (x, wide),
        ops.rms_norm: (x, squares, weight, WIDTH, EPS, wide, dtype, dtype),
        ops.rms_product: (grad, x, weight, wide),
        ops.rms_norm_backward: (grad, x, squares, product, weight, WIDTH, EPS, wide),
        ops.rms_weight_gradient: (grad, x, squares, WIDTH, EPS, wide),
    }


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.__name__)
def test_predicted_bytes_equal_the_bytes_of_each_pass(
    piece: Callable[..., Any], dtype: torch.dtype, weighted: bool
) -> None:
    args = calls(dtype, weighted)[piece]
    with Passes() as passes:
        result = piece(*args)
    infos = [TensorInfo(tuple(x.shape), x.dtype) for x in args if isinstance(x, Tensor)]
    predicted_work = works(piece, args, {}, infos, [TensorInfo(tuple(result.shape), result.dtype)])
    assert [work.bytes for work, times in predicted_work for _ in range(times)] == passes.found
