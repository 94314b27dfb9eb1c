"""Causal attention of a shard of the queries gives rows of the full result, and its gradients add
up to the full gradients, without a mask."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from attention import softmax_attention
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from autopar import ops
from autopar.analysis.work import work
from autopar.ops import softmax_attention as attention_kernels

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def drawn(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def close(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    return ours.dtype == dtype and bool(
        (ours.double() - theirs.double()).abs().max() <= TOLERANCE[dtype] * theirs.abs().max()
    )


@pytest.fixture(params=["flash", "plain"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run with the CPU kernel, and with the products of devices without a kernel."""
    if request.param == "plain":
        monkeypatch.setattr(attention_kernels, "attend", _plain)
        monkeypatch.setattr(attention_kernels, "attend_backward", _plain_backward)


def _plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = attention_kernels._scores(
        q, attention_kernels._repeat_heads(k, q), mask, is_causal, scale
    )
    return torch.matmul(
        scores.softmax(-1).to(v.dtype), attention_kernels._repeat_heads(v, q)
    ), scores.logsumexp(-1)


def _plain_backward(
    grad: Tensor, saved: attention_kernels.Saved, *rest: Any
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, *_ = saved
    keys, values = attention_kernels._repeat_heads(k, q), attention_kernels._repeat_heads(v, q)
    dq, dk, dv = attention_kernels._plain_backward(grad, saved._replace(k=keys, v=values), *rest)
    return dq, attention_kernels._sum_heads(dk, k), attention_kernels._sum_heads(dv, v)


@pytest.mark.usefixtures("kernels")
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize(
    ("start", "length", "keys"),
    [
        (0, 6, 24),
        (6, 6, 24),
        (18, 6, 24),
        (5, 7, 24),
        (23, 1, 24),
        (6, 6, 10),
        (12, 6, 10),
        (10, 6, 10),
        (0, 12, 10),
    ],
    ids=str,
)
def test_attention_of_a_query_shard_gives_rows_of_the_full_result(
    start: int, length: int, keys: int, kv_heads: int, dtype: torch.dtype
) -> None:
    q, grad = (drawn(2, 4, 24, 8, dtype=dtype, seed=seed) for seed in (0, 1))
    k, v = (drawn(2, kv_heads, keys, 8, dtype=dtype, seed=seed) for seed in (2, 3))
    rows = slice(start, start + length)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    expected = softmax_attention(*leaves, None, True, 0.3)
    wanted = torch.autograd.grad(expected[:, :, rows], leaves, grad[:, :, rows].double())
    out, lse = ops.attention(q[:, :, rows], k, v, None, True, 0.3, q_start=start)
    assert close(out, expected[:, :, rows], dtype)
    assert lse.shape == (2, 4, length) and lse.dtype == torch.promote_types(dtype, torch.float32)
    found = ops.attention_backward(
        grad[:, :, rows], q[:, :, rows], k, v, out, lse, None, True, 0.3, q_start=start
    )
    for ours, theirs in zip(found, (wanted[0][:, :, rows], *wanted[1:]), strict=True):
        assert ours.shape == theirs.shape and close(ours, theirs, dtype)
    assert not any(gradient[:, :, start + length :].any() for gradient in found[1:]), (
        "what no query sees has zeros"
    )


def test_very_different_scores_are_combined_without_overflow() -> None:
    q, k, v = (drawn(1, 1, 8, 8, seed=seed) for seed in range(3))
    for large in (slice(0, 4), slice(4, 8)):
        keys = k.clone()
        keys[:, :, large] *= 1e4
        out, lse = ops.attention(q[:, :, 4:], keys, v, None, True, 1.0, q_start=4)
        assert (
            close(out, softmax_attention(q, keys, v, None, True, 1.0)[:, :, 4:], torch.float64)
            and lse.isfinite().all()
        )


@pytest.mark.parametrize("start", [0, 6, 18])
def test_kernels_run_visible_blocks_and_square_causal_attention(
    start: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FlashAttention supports only square causal attention. The computed FLOPs of the last shard
    are the priced ones."""
    asked: list[tuple[int, int, bool]] = []
    attend = attention_kernels.attend

    def seen(kernel: Any) -> Any:
        def run(*operands: Any) -> Any:
            *tensors, _mask, is_causal, _scale = operands
            q, k, *_ = tensors if kernel is attend else tensors[1]
            asked.append((q.shape[2], k.shape[2], is_causal))
            return kernel(*operands)

        return run

    monkeypatch.setattr(attention_kernels, "attend", seen(attend))
    monkeypatch.setattr(
        attention_kernels, "attend_backward", seen(attention_kernels.attend_backward)
    )
    q, k, v = drawn(1, 2, 6, 8), drawn(1, 2, 24, 8), drawn(1, 2, 24, 8)
    args = (None, True, 0.3, start)
    out, lse = ops.attention(q, k, v, *args)
    ops.attention_backward(out, q, k, v, out, lse, *args)
    wanted = {(6, 6, True), *([(6, start, False)] if start else [])}
    assert set(asked) == wanted and len(asked) == 2 * len(wanted)
    pairs = sum(rows * keys / (2 if is_causal else 1) for rows, keys, is_causal in wanted)
    priced = work(ops.attention, (q, k, v, *args), {}, [q, k, v], [out, lse]).flops  # type: ignore[list-item]
    assert (pairs * 2 * 2 * (8 + 8) == priced) == (start == 18), (
        "two heads, two products of 8 features"
    )


class Largest(TorchDispatchMode):
    """A mode that records the largest number of elements of a tensor."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.elements = max(
            [self.elements, *(x.numel() for x in tree_leaves(result) if isinstance(x, Tensor))]
        )
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_tensor_is_as_large_as_queries_times_keys(dtype: torch.dtype) -> None:
    q, k, v = (
        drawn(1, 1, 64, 8, dtype=dtype),
        drawn(1, 1, 256, 8, dtype=dtype),
        drawn(1, 1, 256, 8, dtype=dtype),
    )
    with Largest() as seen:
        out, lse = ops.attention(q, k, v, None, True, 0.3, q_start=128)
        ops.attention_backward(out, q, k, v, out, lse, None, True, 0.3, q_start=128)
    assert seen.elements == k.numel(), "nothing is larger than keys"
