"""Norms and softmaxes on a GPU are single-pass kernels that match the ops."""

from __future__ import annotations

import pytest
import torch
from native import needs_gpu, needs_nvcc
from torch import Tensor

from autopar import ops
from autopar.kernels import library, row_kernels

pytestmark = [pytest.mark.gpu, needs_gpu, needs_nvcc]


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .to(dtype)
        .cuda()
    )


def assert_close(actual: Tensor, exact: Tensor, dtype: torch.dtype) -> None:
    assert actual.is_cuda and actual.shape == exact.shape
    scale = exact.abs().max().clamp(min=1e-30)
    assert ((actual.double() - exact).abs().max() / scale).item() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", library.FLOATS, ids=str)
@pytest.mark.parametrize(
    "shape", [(1, 1), (5, 7), (3, 41, 24), (1300, 300), (3, 2051), (70, 4096), (2, 20000)]
)
@pytest.mark.parametrize("weighted", [True, False])
def test_row_norms_are_exact_up_to_rounding(
    weighted: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, grad, n, wide = (
        randn(shape, dtype, 0),
        randn(shape, dtype, 1),
        2 * shape[-1],
        library.wide(dtype),
    )
    weight = randn(shape[-1:], dtype, 2) if weighted else None
    squares = 2 * ops.square_sum(x, dtype)
    product = row_kernels.rms_product(grad, x, weight, dtype)
    exact = [t.double() if t is not None else None for t in (x, grad, weight, squares, product)]
    double = torch.float64
    result = row_kernels.rms_norm(x, squares, weight, n, 1e-5, wide, wide, dtype)
    assert_close(
        result, ops.rms_norm(exact[0], exact[3], exact[2], n, 1e-5, double, double, double), dtype
    )
    half = row_kernels.rms_norm(x, squares, weight, n, 1e-5, wide, dtype, dtype)
    assert_close(
        half, ops.rms_norm(x, squares, weight, n, 1e-5, wide, dtype, dtype).double(), dtype
    )
    assert_close(product, ops.rms_product(exact[1], exact[0], exact[2], double), wide)
    backward = row_kernels.rms_norm_backward(grad, x, squares, product, weight, n, 1e-5, dtype)
    assert_close(
        backward,
        ops.rms_norm_backward(exact[1], exact[0], exact[3], exact[4], exact[2], n, 1e-5, double),
        dtype,
    )
    gradient = row_kernels.rms_weight_gradient(grad, x, squares, n, 1e-5, dtype)
    assert_close(
        gradient, ops.rms_weight_gradient(exact[1], exact[0], exact[3], n, 1e-5, double), wide
    )
    assert torch.equal(gradient, row_kernels.rms_weight_gradient(grad, x, squares, n, 1e-5, dtype))


@pytest.mark.parametrize("dtype", library.FLOATS, ids=str)
@pytest.mark.parametrize("shape", [(1, 2), (5, 7), (3, 41, 24), (2, 5003), (300, 32000)])
def test_row_softmaxes_are_exact_up_to_rounding(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, scale = 4 * randn(shape, dtype, 0), randn(shape[:-1], library.wide(dtype), 1)
    index = torch.randint(
        -3, 2 * shape[-1], shape[:-1], generator=torch.Generator().manual_seed(2)
    ).cuda()
    m = x.amax(-1) + 1
    s = row_kernels.sum_exp(x, m)
    assert_close(s, ops.sum_exp(x.double(), m.double()), library.wide(dtype))
    for start in (0, shape[-1] // 2):
        exact = ops.cross_entropy_backward(
            x.double(), m.double(), s.double(), index, scale.double(), start
        )
        assert_close(row_kernels.cross_entropy_backward(x, m, s, index, scale, start), exact, dtype)
        operand = x.clone()
        assert (
            row_kernels.cross_entropy_backward_in_place(operand, m, s, index, scale, start)
            is operand
        )
        assert_close(operand, exact, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_row_loss_kernel_matches_the_op(dtype: torch.dtype) -> None:
    x, weight = randn((2, 50, 64), dtype, 0), randn((1037, 64), dtype, 1)
    index = torch.randint(0, 1037, (2, 50), generator=torch.Generator().manual_seed(2)).cuda()
    index[0, 2] = -100
    results, expected = (
        way(x, weight, index, -100, 30)
        for way in (row_kernels.linear_cross_entropy, ops.linear_cross_entropy)
    )
    for result, reference in zip(results, expected, strict=True):
        assert_close(result, reference.double(), dtype)
