"""On a GPU norms and softmaxes are kernels of one pass, which compute what the ops do, and whose
graphs call them."""

from __future__ import annotations

import pytest
import torch
from native import needs_gpu, needs_nvcc
from torch import Tensor

from autopar import ops
from autopar.kernels import library, row_kernels

pytestmark = [pytest.mark.gpu, needs_gpu, needs_nvcc]


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .to(dtype)
        .cuda()
    )


def alike(ours: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert ours.is_cuda and ours.shape == exact.shape
    scale = exact.abs().max().clamp(min=1e-30)
    assert ((ours.double() - exact).abs().max() / scale).item() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", library.FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 7), (3, 41, 24), (1300, 300), (3, 2051), (70, 4096), (2, 20000)]
)
@pytest.mark.parametrize("weighted", [True, False])
def test_norms_of_rows_are_exact_but_for_roundings(
    weighted: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, grad, n, wide = (
        drawn(shape, dtype, 0),
        drawn(shape, dtype, 1),
        2 * shape[-1],
        library.wide(dtype),
    )
    weight = drawn(shape[-1:], dtype, 2) if weighted else None
    squares = 2 * ops.square_sum(x, dtype)
    product = row_kernels.rms_product(grad, x, weight, dtype)
    exact = [t.double() if t is not None else None for t in (x, grad, weight, squares, product)]
    double = torch.float64
    found = row_kernels.rms_norm(x, squares, weight, n, 1e-5, wide, wide, dtype)
    alike(found, ops.rms_norm(exact[0], exact[3], exact[2], n, 1e-5, double, double, double), dtype)
    half = row_kernels.rms_norm(x, squares, weight, n, 1e-5, wide, dtype, dtype)
    alike(half, ops.rms_norm(x, squares, weight, n, 1e-5, wide, dtype, dtype).double(), dtype)
    alike(product, ops.rms_product(exact[1], exact[0], exact[2], double), wide)
    backward = row_kernels.rms_norm_backward(grad, x, squares, product, weight, n, 1e-5, dtype)
    alike(
        backward,
        ops.rms_norm_backward(exact[1], exact[0], exact[3], exact[4], exact[2], n, 1e-5, double),
        dtype,
    )
    gradient = row_kernels.rms_weight_gradient(grad, x, squares, n, 1e-5, dtype)
    alike(gradient, ops.rms_weight_gradient(exact[1], exact[0], exact[3], n, 1e-5, double), wide)
    assert torch.equal(gradient, row_kernels.rms_weight_gradient(grad, x, squares, n, 1e-5, dtype))


@pytest.mark.parametrize("dtype", library.FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 7), (3, 41, 24), (2, 5003), (300, 32000)])
def test_softmaxes_of_rows_are_exact_but_for_roundings(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, scale = 4 * drawn(shape, dtype, 0), drawn(shape[:-1], library.wide(dtype), 1)
    index = torch.randint(
        -3, 2 * shape[-1], shape[:-1], generator=torch.Generator().manual_seed(2)
    ).cuda()
    m = x.amax(-1) + 1
    s = row_kernels.sum_exp(x, m)
    alike(s, ops.sum_exp(x.double(), m.double()), library.wide(dtype))
    for start in (0, shape[-1] // 2):
        exact = ops.cross_entropy_backward(
            x.double(), m.double(), s.double(), index, scale.double(), start
        )
        alike(row_kernels.cross_entropy_backward(x, m, s, index, scale, start), exact, dtype)
        held = x.clone()
        assert row_kernels.cross_entropy_backward_in_place(held, m, s, index, scale, start) is held
        alike(held, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_loss_by_rows_is_that_of_the_op(dtype: torch.dtype) -> None:
    x, weight = drawn((2, 50, 64), dtype, 0), drawn((1037, 64), dtype, 1)
    index = torch.randint(0, 1037, (2, 50), generator=torch.Generator().manual_seed(2)).cuda()
    index[0, 2] = -100
    found, expected = (
        way(x, weight, index, -100, 30)
        for way in (row_kernels.linear_cross_entropy, ops.linear_cross_entropy)
    )
    for ours, theirs in zip(found, expected, strict=True):
        alike(ours, theirs.double(), dtype)
