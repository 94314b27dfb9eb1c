"""The attention kernels of a device match softmax attention and its gradients, also on shards of
queries and heads."""

from __future__ import annotations

import pytest
import torch
from attention import softmax_attention
from native import needs_gpu
from torch import Tensor

from autopar import ops

pytestmark = [pytest.mark.gpu, needs_gpu]
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 5e-2}


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return (
        torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        .to(dtype)
        .cuda()
    )


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("size", [8, 20, 64])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("kind", ["none", "causal", "added", "seen"])
@pytest.mark.parametrize("length", [16, 45])
def test_attention_and_its_backward_match_softmax_attention(
    length: int, kind: str, kv_heads: int, size: int, dtype: torch.dtype
) -> None:
    q, grad = (randn((2, 4, length, size), dtype, seed) for seed in (0, 1))
    k, v = (randn((2, kv_heads, length, size), dtype, seed) for seed in (2, 3))
    mask = {
        "added": randn((1, 1, length, length), dtype, 4),
        "seen": randn((2, 1, length, length), dtype, 5) > -1,
    }.get(kind)
    if kind == "seen":
        mask = mask | torch.eye(length, dtype=torch.bool, device="cuda")
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    wide = mask.double() if kind == "added" else mask
    expected = softmax_attention(*leaves, wide, kind == "causal", 0.3)
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())
    out, lse = ops.attention(q, k, v, mask, kind == "causal", 0.3)
    grads = ops.attention_backward(grad, q, k, v, out, lse, mask, kind == "causal", 0.3)
    for actual, reference in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert actual.dtype == dtype and actual.shape == reference.shape
        assert (actual.double() - reference).abs().max() <= TOLERANCE[dtype] * reference.abs().max()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("lengths", [(16, 24), (24, 16)])
@pytest.mark.parametrize("size", [20, 64])
def test_causal_mask_starts_at_the_first_key_if_lengths_differ(
    size: int, lengths: tuple[int, int], dtype: torch.dtype
) -> None:
    q, grad = (randn((2, 4, lengths[0], size), dtype, seed) for seed in (0, 1))
    k, v = (randn((2, 4, lengths[1], size), dtype, seed) for seed in (2, 3))
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = softmax_attention(*leaves, None, True, 0.3)
    expected_grads = torch.autograd.grad(expected, leaves, grad.double())
    out, lse = ops.attention(q, k, v, None, True, 0.3)
    grads = ops.attention_backward(grad, q, k, v, out, lse, None, True, 0.3)
    for actual, reference in zip((out, *grads), (expected, *expected_grads), strict=True):
        assert (actual.double() - reference).abs().max() <= TOLERANCE[dtype] * reference.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_attention_on_shards_of_queries_and_heads_matches_the_full_attention(
    dtype: torch.dtype,
) -> None:
    q, k, v, grad = (
        randn((2, heads, 32, 64), dtype, seed) for seed, heads in enumerate((6, 2, 2, 6))
    )
    whole, _ = ops.attention(q, k, v, None, True, 0.2)
    rows, sums = ops.attention(q[:, :, 8:20], k, v, None, True, 0.2, q_start=8)
    heads, lse = ops.attention(q[:, 2:5], k, v, None, True, 0.2, heads=(2, 0, 3))
    assert (rows - whole[:, :, 8:20]).abs().max() <= TOLERANCE[dtype] * whole.abs().max()
    assert (heads - whole[:, 2:5]).abs().max() <= TOLERANCE[dtype] * whole.abs().max()
    dq, dk, dv = ops.attention_backward(
        grad[:, 2:5], q[:, 2:5], k, v, heads, lse, None, True, 0.2, heads=(2, 0, 3)
    )
    masked = torch.zeros_like(grad)
    masked[:, 2:5] = grad[:, 2:5]
    expected = ops.attention_backward(
        masked, q, k, v, *ops.attention(q, k, v, None, True, 0.2), None, True, 0.2
    )
    for actual, reference in ((dq, expected[0][:, 2:5]), (dk, expected[1]), (dv, expected[2])):
        assert (actual - reference).abs().max() <= TOLERANCE[dtype] * reference.abs().max()
    row_grad = torch.zeros_like(grad)
    row_grad[:, :, 8:20] = grad[:, :, 8:20]
    expected = ops.attention_backward(
        row_grad, q, k, v, *ops.attention(q, k, v, None, True, 0.2), None, True, 0.2
    )
    grads = ops.attention_backward(
        grad[:, :, 8:20], q[:, :, 8:20], k, v, rows, sums, None, True, 0.2, q_start=8
    )
    for actual, reference in zip(grads, (expected[0][:, :, 8:20], *expected[1:]), strict=True):
        assert (actual - reference).abs().max() <= TOLERANCE[dtype] * reference.abs().max()
