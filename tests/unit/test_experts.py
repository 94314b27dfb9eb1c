"""An expert layer as one op, compared with a dense computation of all experts, and on shards."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar import ops
from autopar.analysis.work import works
from autopar.ops.expert_layers import ACTS
from autopar.rules.call import TensorInfo

FUNCTIONS = {
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
}


def dense(x: Tensor, ids: Tensor, gates: Tensor, up: Tensor, down: Tensor, act: str) -> Tensor:
    """Compute every expert for every token, and select the picked results."""
    hidden = torch.einsum("th,egfh->tegf", x, up)
    between = FUNCTIONS[act](hidden[:, :, 0])
    if up.shape[1] == 2:
        between = between * hidden[:, :, 1]
    made = torch.einsum("tef,edf->ted", between, down)
    picked = torch.stack([(ids == e).to(x.dtype).mul(gates).sum(1) for e in range(up.shape[0])], 1)
    return torch.einsum("ted,te->td", made, picked)


def drawn(t: int, p: int, e: int, parts: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Return tokens, picks (some without an expert), gates and weights."""
    generator = torch.Generator().manual_seed(seed)
    x, gates, up, down = (
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        for shape in ((t, 3), (t, p), (e, parts, 4, 3), (e, 5, 4))
    )
    return x, torch.randint(-1, e + 1, (t, p), generator=generator), gates, up, down


@pytest.mark.parametrize("act", ACTS)
@settings(max_examples=15)
@given(
    t=st.integers(0, 6),
    p=st.integers(1, 3),
    e=st.integers(1, 5),
    parts=st.sampled_from([1, 2]),
    seed=st.integers(0, 99),
)
def test_experts_and_their_gradients_match_the_dense_computation(
    act: str, t: int, p: int, e: int, parts: int, seed: int
) -> None:
    x, ids, gates, up, down = drawn(t, p, e, parts, seed)
    given = [tensor.requires_grad_() for tensor in (x, gates, up, down)]
    expected = dense(x, ids, gates, up, down, act)
    torch.testing.assert_close(ops.experts(x, ids, gates, up, down, act, e), expected)
    grad = torch.randn_like(expected)
    found = ops.experts_backward(
        grad, x.detach(), ids, gates.detach(), up.detach(), down.detach(), act, e
    )
    for mine, theirs in zip(found, torch.autograd.grad(expected, given, grad), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_autograd_uses_the_registered_gradient_of_experts() -> None:
    x, ids, gates, up, down = drawn(4, 2, 3, 2)
    given = [tensor.requires_grad_() for tensor in (x, gates, up, down)]
    torch.autograd.gradcheck(
        lambda x, gates, up, down: ops.experts(x, ids, gates, up, down, "silu", 3), given
    )


def test_shards_of_experts_add_up_and_compute_only_their_rows() -> None:
    x, ids, gates, up, down = drawn(8, 2, 5, 2)
    whole = ops.experts(x, ids, gates, up, down, "silu", 5)
    cuts = [(0, 2), (2, 4), (4, 5)]
    parts = [ops.experts(x, ids, gates, up[a:b], down[a:b], "silu", 5, a) for a, b in cuts]
    torch.testing.assert_close(sum(parts), whole)
    for (a, b), part in zip(cuts, parts, strict=True):
        others = ~((ids >= a) & (ids < b)).any(1)
        assert not part[others].any(), "zeros where nothing of the part was picked"
    poisoned = x.clone()
    poisoned[~(ids == 4).any(1)] = float("nan")  # rows of other experts are not read
    torch.testing.assert_close(
        ops.experts(poisoned, ids, gates, up[4:], down[4:], "silu", 5, 4), parts[-1]
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_results_are_summed_over_picks_in_float32(dtype: torch.dtype) -> None:
    x, ids, gates, up, down = drawn(16, 4, 3, 2)
    low = [tensor.to(dtype) for tensor in (x, up, down)]
    found = ops.experts(low[0], ids, gates.float(), *low[1:], "silu", 3)
    high = dense(low[0].double(), ids, gates, *(w.double() for w in low[1:]), "silu")
    assert found.dtype == dtype
    assert (found.double() - high).abs().max() / high.abs().max() < 2 * torch.finfo(dtype).eps


def test_experts_can_be_traced_with_fake_tensors() -> None:
    with torch._subclasses.FakeTensorMode():
        x, ids, gates, up, down = (
            torch.empty(6, 3),
            torch.empty(6, 2, dtype=torch.long),
            torch.empty(6, 2),
            torch.empty(4, 2, 5, 3),
            torch.empty(4, 7, 5),
        )
        assert ops.experts(x, ids, gates, up, down, "silu", 4).shape == (6, 7)
        found = ops.experts_backward(torch.empty(6, 7), x, ids, gates, up, down, "silu", 4)
        assert [tuple(g.shape) for g in found] == [(6, 3), (6, 2), (4, 2, 5, 3), (4, 7, 5)]


def work_of(op: Any, t: int, local: int, size: int, f: int = 64) -> int:
    infos = [((t, 32), 4), ((t, 2), 8), ((t, 2), 4), ((local, 2, f, 32), 4), ((local, 32, f), 4)]
    tensors = [
        TensorInfo(shape, torch.float32 if item == 4 else torch.int64) for shape, item in infos
    ]
    if op is ops.experts:
        return sum(
            w.flops * n
            for w, n in works(op, (None,) * 5 + ("silu", size), {}, tensors, tensors[:1])
        )
    return sum(
        w.flops * n
        for w, n in works(op, (None,) * 6 + ("silu", size), {}, [tensors[0], *tensors], tensors[:1])
    )


@pytest.mark.parametrize(("op", "products"), [(ops.experts, 3), (ops.experts_backward, 8)])
def test_flops_assume_that_picks_are_balanced_over_experts(op: Any, products: int) -> None:
    """Up has twice the FLOPs of down. Forward runs both. Backward runs up again, and two products
    for the gradients of each."""
    whole = work_of(op, 256, 8, 8)
    assert whole == products * 2 * (2 * 256) * 32 * 64
    for split in (2, 4, 8):
        assert split * work_of(op, 256, 8 // split, 8) == whole, "experts"
        assert split * work_of(op, 256 // split, 8, 8) == whole, "tokens"
        assert split * work_of(op, 256, 8, 8, 64 // split) == whole, "what lies between"


def test_the_order_of_experts_does_not_matter() -> None:
    x, ids, gates, up, down = drawn(6, 2, 3, 2)
    whole = ops.experts(x, ids, gates, up, down, "silu", 3)
    for order in itertools.permutations(range(3)):
        place = torch.full((5,), 3)
        place[list(order)] = torch.arange(3)
        place[3], place[4] = 3, -1  # picks without an expert stay so
        moved = place[torch.where(ids < 0, 4, ids)]
        again = ops.experts(x, moved, gates, up[list(order)], down[list(order)], "silu", 3)
        torch.testing.assert_close(again, whole)
