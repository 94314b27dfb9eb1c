"""The kernel for the sum over peers, the residual and the norm equals its reference bit by bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native import WORLDS, needs_host
from torch import Tensor

from autopar.errors import KernelError
from autopar.kernels import library
from autopar.kernels.normed import (
    FLOATS,
    backward_op,
    forward_op,
    reduce_add_rmsnorm,
    reference_backward,
    reference_forward,
)

EPS = 1e-5


def inputs_of(
    world: int, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0
) -> tuple[list[Tensor], Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator).to(dtype) for _ in range(world + 1)]
    return tensors[1:], tensors[0], torch.randn(shape[-1], generator=generator).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


SHAPES = st.tuples(st.integers(0, 70), st.sampled_from((1, 3, 8, 13, 64, 257, 2048, 2051)))


@given(st.sampled_from(WORLDS), SHAPES, st.sampled_from(FLOATS), st.booleans())
def test_forward_and_backward_equal_their_references_bit_by_bit(
    world: int, shape: tuple[int, int], dtype: torch.dtype, rounded: bool
) -> None:
    parts, residual, weight = inputs_of(world, shape, dtype)
    results = reduce_add_rmsnorm(parts, residual, weight, EPS, rounded)
    assert all(
        same(a, b)
        for a, b in zip(
            results, reference_forward(parts, residual, weight, EPS, rounded), strict=True
        )
    )
    grads, grad_y, _ = inputs_of(1, shape, dtype, seed=1)
    settings = grad_y, grads[0], *results[:2], weight, EPS
    assert all(
        same(a, b)
        for a, b in zip(backward_op(*settings), reference_backward(*settings), strict=True)
    )


@pytest.mark.parametrize("world", WORLDS)
def test_parts_are_added_in_the_order_of_the_ranks(world: int) -> None:
    parts, residual, weight = inputs_of(world, (9, 40), torch.float32)
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    y, _, _ = reduce_add_rmsnorm(parts, residual, weight, EPS)
    assert torch.equal(y, residual + total)
    if world > 2:
        assert not torch.equal(y, reduce_add_rmsnorm(parts[::-1], residual, weight, EPS)[0])


@pytest.mark.parametrize(
    ("dtype", "digits"),
    ((torch.float32, 2e-6), (torch.float64, 1e-14), (torch.bfloat16, 1e-2), (torch.half, 2e-3)),
)
def test_norm_matches_torch_rms_norm(dtype: torch.dtype, digits: float) -> None:
    parts, residual, weight = inputs_of(3, (4, 6, 200), dtype)
    y, squares, normed = reduce_add_rmsnorm(parts, residual, weight, EPS)
    wide = y.double()
    expected = torch.nn.functional.rms_norm(wide, (200,), weight.double(), EPS)
    assert normed.shape == (4, 6, 200) and squares.shape == (4, 6)
    assert torch.allclose(squares.double(), wide.square().sum(-1), rtol=1e-6)
    assert (normed.double() - expected).abs().max() <= digits * expected.abs().max()
    summed = residual.double() + sum(part.double() for part in parts)
    assert (wide - summed).abs().max() <= digits * summed.abs().max()


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.half))
def test_rounded_norm_is_rounded_before_the_multiplication_by_the_weight(
    dtype: torch.dtype,
) -> None:
    parts, residual, weight = inputs_of(3, (40, 200), dtype)
    y, squares, normed = reduce_add_rmsnorm(parts, residual, weight, EPS, rounded=True)
    wide = y.float()
    assert torch.equal(
        normed, weight * (wide * torch.rsqrt(squares.div(200).add(EPS)).unsqueeze(-1)).to(dtype)
    )
    assert not torch.equal(normed, reduce_add_rmsnorm(parts, residual, weight, EPS)[2])


@pytest.mark.parametrize("uses", ("both", "y", "normed"))
def test_gradients_match_autograd(uses: str) -> None:
    parts, residual, weight = inputs_of(3, (2, 35, 24), torch.float64)
    leaves = [t.requires_grad_() for t in (*parts, residual, weight)]

    def reference(
        parts: list[Tensor], residual: Tensor, weight: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        y = residual + torch.stack(parts).sum(0)
        return y, torch.nn.functional.rms_norm(y, (24,), weight, eps)

    def loss(y: Tensor, normed: Tensor) -> Tensor:
        return (y.sin().sum() if uses != "normed" else 0) + (
            normed.cos().sum() if uses != "y" else 0
        )

    y, _, normed = reduce_add_rmsnorm(parts, residual, weight, EPS)
    grads = torch.autograd.grad(loss(y, normed), leaves)
    expected = torch.autograd.grad(
        loss(*reference(parts, residual, weight, EPS)), leaves, materialize_grads=True
    )
    for a, b in zip(grads, expected, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-13)
    assert all(torch.equal(grads[0], grad) for grad in grads[1:4])


def test_squares_have_no_gradient() -> None:
    parts, residual, weight = inputs_of(2, (3, 8), torch.float32)
    results = reduce_add_rmsnorm(parts, residual.requires_grad_(), weight, EPS)
    assert [t.requires_grad for t in results] == [True, False, True]


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    parts, residual, weight = inputs_of(3, (200, 1500), torch.bfloat16)
    try:
        results: list[tuple[Tensor, ...]] = []
        for threads in (1, 4):
            torch.set_num_threads(threads)
            y, squares, normed = reduce_add_rmsnorm(parts, residual, weight, EPS)
            results.append(
                (y, squares, normed, *backward_op(residual, parts[0], y, squares, weight, EPS))
            )
    finally:
        torch.set_num_threads(1)
    assert all(same(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("dtype", FLOATS)
def test_unaligned_and_non_contiguous_tensors_give_the_same_results(dtype: torch.dtype) -> None:
    storage = torch.randn(4, 801, generator=torch.Generator().manual_seed(3)).to(dtype)
    parts = [storage[0, 1:].view(20, 40), storage[1, 1:].view(40, 20).t()]
    residual, weight = storage[2, :800].view(20, 40), storage[3, 3:43]
    results = reduce_add_rmsnorm(parts, residual, weight, EPS)
    assert all(
        same(a, b)
        for a, b in zip(results, reference_forward(parts, residual, weight, EPS), strict=True)
    )
    assert all(t.is_contiguous() for t in results)


def test_forward_passes_opcheck() -> None:
    parts, residual, weight = inputs_of(2, (3, 5, 16), torch.float32)
    leaves = [p.requires_grad_() for p in parts], residual.requires_grad_(), weight.requires_grad_()
    for rounded in (False, True):
        torch.library.opcheck(forward_op, (*leaves, EPS, rounded))


def test_backward_passes_opcheck() -> None:
    (normed, y), grad_y, weight = inputs_of(2, (3, 5, 16), torch.bfloat16)
    torch.library.opcheck(backward_op, (grad_y, normed, y, torch.ones(3, 5), weight, EPS))


X = torch.ones(2, 3)
REFUSED: list[tuple[str, Any, str]] = [
    ("no part", lambda: reduce_add_rmsnorm([], X, X[0], EPS), "no peer"),
    ("shape", lambda: reduce_add_rmsnorm([X[:1]], X, X[0], EPS), r"a part has shape \(1, 3\)"),
    ("weight", lambda: reduce_add_rmsnorm([X], X, X[0, :2], EPS), r"weight of \(2,\)"),
    (
        "dtype",
        lambda: reduce_add_rmsnorm([X.double()], X, X[0], EPS),
        "float64 on cpu with torch.float32",
    ),
    (
        "weight's dtype",
        lambda: reduce_add_rmsnorm([X], X, X[0].double(), EPS),
        "float64 on cpu with torch.float32",
    ),
    ("whole numbers", lambda: reduce_add_rmsnorm([X.int()], X.int(), X[0].int(), EPS), "int32"),
    (
        "nothing to norm",
        lambda: reduce_add_rmsnorm([X[:, :0]], X[:, :0], X[0, :0], EPS),
        r"norm of \(2, 0\)",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_mismatched_operands_are_refused(call: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        call()


@needs_host
def test_library_refuses_invalid_arguments() -> None:
    for world, code, rows, hidden in ((0, 0, 1, 1), (1, 4, 1, 1), (1, 0, -1, 1), (1, 0, 1, 0)):
        arguments = *(None,) * 5, code, rows, hidden, EPS, 0, 1
        assert (
            library.function("host", "ap_reduce_add_rmsnorm_forward_host")(None, world, *arguments)
            == 1
        )
