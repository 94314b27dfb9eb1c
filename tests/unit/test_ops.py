"""Each function of `autopar.ops` matches its formula, and its shards match the full result."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from attention import softmax_attention
from torch import Tensor

from autopar import ops
from autopar.ops import blocks
from autopar.ops import softmax_attention as attention_kernels
from autopar.program.abstract_executor import LiveBytes

EQUATIONS = [
    "bsk,nk->bsn",  # linear
    "bsn,nk->bsk",  # its gradient of the input
    "bsn,bsk->nk",  # and of the weight
    "bsk,kn->bsn",
    "bsk,bsn->kn",
    "bsd,dte->bste",  # fused projection
    "bste,dte->bsd",
    "bsd,bste->dte",
    "bsd,ted->bste",
    "bhsd,bhtd->bhst",
    "bhst,bhtd->bhsd",
    "bsk,nk->nbs",
    "mk,kn->mn",
    "bsn,nk->sbk",
    "k,kn->n",
]
SIZES = {"b": 2, "s": 5, "k": 6, "n": 7, "d": 4, "t": 3, "e": 5, "h": 3, "m": 4}


def _operands(equation: str) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    left, right = equation.split("->")[0].split(",")
    return tuple(
        torch.randn([SIZES[x] for x in term], generator=generator, dtype=torch.float64)
        for term in (left, right)
    )


@pytest.mark.parametrize("equation", EQUATIONS)
def test_dot_equals_einsum_and_is_contiguous(equation: str) -> None:
    a, b = _operands(equation)
    result = ops.dot(equation, a, b)
    torch.testing.assert_close(result, torch.einsum(equation, a, b), rtol=1e-12, atol=1e-12)
    assert result.is_contiguous()


@pytest.mark.parametrize(
    "equation",
    [
        "bsk,nk->bsn",
        "bsn,nk->bsk",
        "bsn,bsk->nk",
        "bsd,dte->bste",
        "bste,dte->bsd",
        "bsd,bste->dte",
    ],
)
def test_dot_of_contiguous_operands_is_one_product_without_copies(equation: str) -> None:
    a, b = _operands(equation)
    assert ran_by(lambda: ops.dot(equation, a, b)) == [torch.ops.aten.mm]


def ran_by(call: Callable[[], Tensor]) -> list[Any]:
    """Return the ops that a call runs, without views."""
    ran = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            ran.append(func.overloadpacket)
            return func(*args, **(kwargs or {}))

    with Watch():
        call()
    aten = torch.ops.aten
    return [op for op in ran if op not in (aten.permute, aten.view, aten.t, aten.transpose)]


@pytest.mark.parametrize("num_dims", [0, 1, 2])
@pytest.mark.parametrize("equation", [e for e in EQUATIONS if len(e.partition("->")[2]) > 1])
def test_a_bias_has_the_last_dims_of_the_result_and_is_added_by_the_first_shard_only(
    equation: str, num_dims: int
) -> None:
    a, b = _operands(equation)
    expected = torch.einsum(equation, a, b)
    bias = torch.randn(expected.shape[expected.dim() - num_dims :], dtype=torch.float64)
    result = ops.dot(equation, a, b, bias)
    torch.testing.assert_close(result, expected + bias, rtol=1e-12, atol=1e-12)
    assert result.is_contiguous()
    assert torch.equal(ops.dot(equation, a, b, bias, (0, 0)), result)
    assert torch.equal(ops.dot(equation, a, b, bias, (0, 3)), ops.dot(equation, a, b))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(6,), (5, 6), (2, 5, 6)])
def test_a_product_with_a_bias_is_bitwise_equal_to_linear(
    shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, weight, bias = (
        torch.randn(size, generator=torch.Generator().manual_seed(0)).to(dtype)
        for size in (shape, (7, 6), (7,))
    )
    letters = "bs"[2 - (len(shape) - 1) :]
    made = ops.dot(f"{letters}k,nk->{letters}n", x, weight, bias)
    assert torch.equal(made, torch.nn.functional.linear(x, weight, bias))
    assert dtype == torch.float32 or not torch.equal(
        made, ops.dot(f"{letters}k,nk->{letters}n", x, weight) + bias
    ), "rounded once"


@pytest.mark.parametrize("equation", ["bsk,nk->bsn", "bsd,dte->bste", "mk,kn->mn"])
def test_a_bias_needs_no_separate_op(equation: str) -> None:
    a, b = _operands(equation)
    bias = torch.randn(
        [SIZES[letter] for letter in equation.partition("->")[2] if letter not in "bsm"],
        dtype=torch.float64,
    )
    assert ran_by(lambda: ops.dot(equation, a, b, bias)) == [torch.ops.aten.addmm]


@pytest.mark.parametrize("equation", ["bsk,nk->bn", "bkz,nk->bn"])
def test_dot_refuses_a_summed_letter_of_only_one_operand(equation: str) -> None:
    with pytest.raises(ValueError, match="not a product"):
        ops.dot(equation, torch.ones(2, 3, 4), torch.ones(5, 4))


def test_shards_of_an_embedding_add_up_to_the_full_result() -> None:
    weight, ids = torch.randn(10, 4), torch.tensor([[0, 3, 9], [4, 5, 3]])
    whole = ops.embedding(weight, ids)
    assert torch.equal(whole, weight[ids])
    parts = [ops.embedding(weight[start : start + 4], ids, start, 10) for start in (0, 4, 8)]
    assert torch.equal(sum(parts), whole)
    assert not parts[0][0, 2].any()


@pytest.mark.parametrize("wrong", [-1, 10])
def test_a_shard_refuses_ids_and_labels_beyond_the_full_vocabulary(wrong: int) -> None:
    ids = torch.tensor([0, wrong])
    with pytest.raises(
        RuntimeError,
        match=r"token ids must be in 0…9; what to do: .*number of rows of the embedding",
    ):
        ops.embedding(torch.randn(5, 4), ids, 5, 10)
    with pytest.raises(RuntimeError, match=r"labels must be in 0…9"):
        ops.pick(torch.randn(2, 5), ids, -100, 5, 10)
    with pytest.raises(
        RuntimeError, match=r"labels must be in 0…9; what to do: .*its ignore_index, -7 here"
    ):
        ops.pick(torch.randn(2, 10), ids, -7)


@pytest.mark.parametrize("padding_idx", [-1, 3])
def test_shards_of_the_embedding_gradient_are_rows_of_the_full_gradient(padding_idx: int) -> None:
    ids, grad = torch.tensor([[0, 3, 9], [4, 5, 3]]), torch.randn(2, 3, 4)
    whole = ops.embedding_backward(grad, ids, 10, None, padding_idx)
    weight = torch.zeros(10, 4, requires_grad=True)
    torch.nn.functional.embedding(ids, weight, None if padding_idx < 0 else padding_idx).backward(
        grad
    )
    torch.testing.assert_close(whole, weight.grad)
    parts = [
        ops.embedding_backward(grad, ids, rows, start, padding_idx)
        for start, rows in ((0, 4), (4, 4), (8, 2))
    ]
    torch.testing.assert_close(torch.cat(parts), whole)


def _cross_entropy(x: Tensor, index: Tensor, splits: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return the loss per row and the gradient for ones, with a vocabulary in parts that begin at
    `splits`."""
    parts = [
        (start, x[..., start:end])
        for start, end in zip(splits, [*splits[1:], x.shape[-1]], strict=True)
    ]
    m = torch.stack([part.amax(-1) for _, part in parts]).amax(0)
    s = sum(ops.sum_exp(part, m) for _, part in parts)
    loss = (
        s.log() + m - sum(ops.pick(part, index, -100, start, x.shape[-1]) for start, part in parts)
    )
    scale = torch.linspace(0.5, 2, index.numel(), dtype=s.dtype).view(index.shape)
    return loss, torch.cat(
        [ops.cross_entropy_backward(part, m, s, index, scale, start) for start, part in parts], -1
    )


@pytest.mark.parametrize("splits", [(0,), (0, 3, 8)])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 1e-2)]
)
def test_cross_entropy_over_vocabulary_shards_equals_that_of_torch(
    splits: tuple[int, ...], dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(2, 3, 11, generator=generator) * 3).to(dtype)
    index = torch.randint(0, 11, (2, 3), generator=generator)
    reference = x.double().requires_grad_()
    expected = torch.nn.functional.cross_entropy(
        reference.flatten(0, 1), index.flatten(), reduction="none"
    ).view(2, 3)
    expected.backward(torch.linspace(0.5, 2, 6, dtype=torch.float64).view(2, 3))
    loss, grad = _cross_entropy(x, index, splits)
    torch.testing.assert_close(loss.double(), expected.detach(), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(grad.double(), reference.grad, rtol=tolerance, atol=tolerance)
    assert grad.dtype == dtype


def test_pick_and_backward_ignore_an_index_outside_of_the_vocabulary() -> None:
    x, index = torch.randn(2, 5), torch.tensor([-100, 7])
    assert not ops.pick(x, index, -100, 0, 10).any()
    m = x.amax(-1)
    grad = ops.cross_entropy_backward(x, m, ops.sum_exp(x, m), index, torch.ones(2))
    torch.testing.assert_close(grad, x.softmax(-1))


@pytest.mark.parametrize(
    "x",
    [torch.randn(8, 1000), torch.randn(2, 5, 1000)[:, :4]],
    ids=["whole", "a part of the sequence"],
)
def test_cross_entropy_allocates_one_temporary_as_large_as_the_logits(x: Tensor) -> None:
    index = torch.zeros(x.shape[:-1], dtype=torch.long)
    m, big = x.amax(-1), []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            known = {t.untyped_storage().data_ptr() for t in args if isinstance(t, Tensor)}
            if (
                isinstance(result, Tensor)
                and result.numel() >= x.numel()
                and result.untyped_storage().data_ptr() not in known
            ):
                big.append(func)
            return result

    with Watch():
        s = ops.sum_exp(x, m)
        assert len(big) == 1
        ops.cross_entropy_backward(x, m, s, index, torch.ones(x.shape[:-1]))
    assert len(big) == 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [(0,), (0, 3, 8)])
def test_cross_entropy_in_row_blocks_gives_the_same_result(
    splits: tuple[int, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, index = (
        torch.randn(2, 3, 11).transpose(0, 1).to(dtype),
        torch.tensor([[0, 10], [-100, 3], [3, 7]]),
    )
    at_once = _cross_entropy(x, index, splits)
    for block in (1, 22, 50):  # of fewer elements than a row, of rows that do and do not divide all
        monkeypatch.setattr(blocks, "_BLOCK", block)
        for some, whole in zip(_cross_entropy(x, index, splits), at_once, strict=True):
            torch.testing.assert_close(some, whole)
    assert not ops.sum_exp(x[:0], x[:0].amax(-1)).numel()
    monkeypatch.setattr(blocks, "_BLOCK", 1)
    assert len(blocks.row_blocks(torch.empty(1000, 11))) == 16, "a graph of huge logits stays short"


@pytest.mark.parametrize("transposed", [False, True])
def test_meta_tensors_run_at_most_two_blocks_and_have_the_same_metadata(
    transposed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", 11)
    x, index = torch.randn(4, 5, 11, dtype=torch.bfloat16), torch.randint(0, 11, (4, 5))
    x = x.transpose(0, 1).contiguous().transpose(0, 1) if transposed else x

    def looks() -> list[tuple[torch.Size, tuple[int, ...], torch.dtype]]:
        m = x.amax(-1)
        s, squares = ops.sum_exp(x, m), ops.square_sum(x, torch.float32)
        grad = ops.cross_entropy_backward(x, m, s, index, torch.ones_like(s))
        normed = ops.rms_norm(
            x, squares, None, 11, 1e-6, torch.float32, torch.bfloat16, torch.bfloat16
        )
        return [(t.shape, t.stride(), t.dtype) for t in (s, squares, grad, normed)]

    usual = looks()
    assert len(blocks.row_blocks(x)) == 10
    with blocks.shapes_only():
        assert len(blocks.row_blocks(x)) == 2 and len(blocks.row_blocks(x[:1, :1])) == 1
        assert looks() == usual
    assert len(blocks.row_blocks(x)) == 10


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("lies", ["together", "apart"])
@pytest.mark.parametrize("block", [1, 22, 2**24])
def test_the_in_place_gradient_of_logits_is_the_same(
    dtype: torch.dtype, lies: str, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", block)
    x, index = torch.randn(3, 2, 11).to(dtype), torch.tensor([[0, 10], [-100, 3], [3, 7]])
    x = x if lies == "together" else x.transpose(0, 1).contiguous().transpose(0, 1)
    m, start = x.amax(-1), 3
    s, scale = (
        ops.sum_exp(x, m),
        torch.linspace(-1, 2, 6, dtype=torch.float64).view(3, 2).to(blocks.wide_dtype(dtype)),
    )
    expected = ops.cross_entropy_backward(x, m, s, index, scale, start)
    assert not torch.equal(x, expected)
    found = ops.cross_entropy_backward_(x, m, s, index, scale, start)
    assert found is x and torch.equal(found, expected)


def test_the_in_place_gradient_of_logits_allocates_only_a_block() -> None:
    x, index, scale = torch.randn(64, 1000), torch.zeros(64, dtype=torch.long), torch.ones(64)
    m = x.amax(-1)
    s = ops.sum_exp(x, m)
    with LiveBytes() as memory:
        memory.register((x, index, scale, m, s))
        memory.reset_peak()
        before = memory.live_bytes
        ops.cross_entropy_backward_(x, m, s, index, scale)
        assert memory.peak_bytes - before < x.nbytes / 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [4000, 2**24])
def test_the_predicted_temporaries_of_a_gradient_of_logits_are_the_measured_ones(
    dtype: torch.dtype, block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocks, "_BLOCK", block)
    x, index = torch.randn(4, 16, 1000).to(dtype), torch.zeros(4, 16, dtype=torch.long)
    m, scale = x.amax(-1), torch.ones(4, 16)
    s = ops.sum_exp(x, m)
    scratch = ops.cross_entropy_backward_scratch(x.shape, dtype)
    assert (scratch > 0) == (dtype != torch.float32)

    def held(form: Callable[..., Tensor], result_bytes: int) -> int:
        with LiveBytes() as memory:
            memory.register((x, index, m, s, scale))
            memory.reset_peak()
            before = memory.live_bytes
            form(x, m, s, index, scale)
            return memory.peak_bytes - before - result_bytes

    few = 0.02 * x.nbytes  # indices of rows
    assert scratch <= held(ops.cross_entropy_backward, x.nbytes) <= scratch + few
    in_place = held(ops.cross_entropy_backward_, 0)
    assert scratch <= in_place <= scratch + few + (x.nbytes if block > x.numel() else 0), (
        "of one block its result is not its own"
    )


def test_exponentials_of_large_logits_allocate_only_a_block(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows, classes, block = 64, 1000, 4000
    x, index = torch.randn(rows, classes).bfloat16(), torch.zeros(rows, dtype=torch.long)
    m, scale = x.amax(-1), torch.ones(rows)
    per_row = 16 * rows * 8

    def peaks() -> tuple[int, int]:
        with LiveBytes() as memory:
            memory.register((x, index, m, scale))
            memory.reset_peak()
            before = memory.live_bytes
            s = ops.sum_exp(x, m)
            summed = memory.peak_bytes - before
            memory.reset_peak()
            grad = ops.cross_entropy_backward(x, m, s, index, scale)
            assert grad.nbytes == x.nbytes
            return summed, memory.peak_bytes - before - x.nbytes

    monkeypatch.setattr(blocks, "_BLOCK", block)
    assert (
        max(peaks()) <= 2 * block * 4 + per_row
    )  # x − m and its exponential, or the gradient of some rows and its cast
    monkeypatch.setattr(blocks, "_BLOCK", rows * classes)
    assert min(peaks()) >= rows * classes * 4, "all at once hold more"


@pytest.mark.parametrize("rows", [1, 4, 6, 100])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6), (torch.bfloat16, 3e-2)]
)
def test_cross_entropy_by_rows_equals_that_of_torch(
    rows: int, dtype: torch.dtype, tolerance: float
) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight = (
        torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 3, 5), (11, 5))
    )
    index = torch.tensor([[0, 10, -100], [3, 3, 7]])
    a, b = (t.double().clone().requires_grad_() for t in (x, weight))
    expected = torch.nn.functional.cross_entropy(
        (a @ b.t()).flatten(0, 1), index.flatten(), reduction="none"
    ).view(2, 3)
    expected.sum().backward()
    losses, d_x, d_weight = ops.linear_cross_entropy(x, weight, index, -100, rows)
    seen = index != -100
    torch.testing.assert_close(
        losses.double()[seen], expected.detach()[seen], rtol=tolerance, atol=tolerance
    )
    torch.testing.assert_close(d_x.double(), a.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(d_weight.double(), b.grad, rtol=tolerance, atol=tolerance)
    assert (d_x.dtype, d_weight.dtype) == (dtype, dtype) and losses.dtype == (
        torch.float32 if dtype == torch.bfloat16 else dtype
    )
    alone = ops.linear_cross_entropy(x, weight, index, -100, rows, gradients=False)
    assert torch.equal(alone[0], losses) and not alone[1].numel() and not alone[2].numel()


def test_cross_entropy_by_rows_of_no_rows_is_empty() -> None:
    losses, d_x, d_weight = ops.linear_cross_entropy(
        torch.ones(0, 4), torch.ones(3, 4), torch.ones(0, dtype=torch.long), -100, 2
    )
    assert losses.shape == (0,) and d_x.shape == (0, 4) and not d_weight.any()


def test_cross_entropy_by_rows_refuses_an_invalid_class() -> None:
    with pytest.raises(RuntimeError, match="labels must be in 0…2"):
        ops.linear_cross_entropy(torch.ones(2, 4), torch.ones(3, 4), torch.tensor([0, 3]), -100, 2)


def test_cross_entropy_by_rows_allocates_only_the_logits_of_its_rows() -> None:
    x, weight, index = torch.randn(64, 4), torch.randn(1000, 4), torch.zeros(64, dtype=torch.long)
    with LiveBytes() as memory:
        memory.register([x, weight, index])
        memory.reset_peak()
        before = memory.live_bytes
        made = ops.linear_cross_entropy(x, weight, index, -100, 8)
        held = sum(t.nbytes for t in made)
        assert memory.live_bytes - before == held
        assert (
            held + 8 * 1000 * 4 <= memory.peak_bytes - before <= held + 8 * 1000 * 4 + 1000
        )  # one buffer of logits, and rows


@pytest.mark.parametrize("mask", ["none", "causal", "bool", "bias"])
@pytest.mark.parametrize("kv_heads", [4, 2])
def test_attention_and_its_backward_match_softmax_attention(mask: str, kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(2, heads, 6, 8, generator=generator, dtype=torch.float64)
        for heads in (4, kv_heads, kv_heads)
    )
    visible = torch.rand(2, 1, 6, 6, generator=generator) > 0.3
    visible[..., 0] = True
    bias = {
        "bool": visible,
        "bias": torch.randn(2, 1, 6, 6, generator=generator, dtype=torch.float64),
    }.get(mask)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = softmax_attention(*leaves, bias, mask == "causal", 0.3)
    grad = torch.randn(expected.shape, generator=generator, dtype=torch.float64)
    expected.backward(grad)
    out, lse = ops.attention(q, k, v, bias, mask == "causal", 0.3)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-9, atol=1e-9)
    assert lse.shape == (2, 4, 6)
    grads = ops.attention_backward(grad, q, k, v, out, lse, bias, mask == "causal", 0.3)
    for got, leaf in zip(grads, leaves, strict=True):
        torch.testing.assert_close(got, leaf.grad, rtol=1e-8, atol=1e-9)


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return the same values with other strides."""
    if how == "transposed":
        return x.transpose(-1, -2).contiguous().transpose(-1, -2)
    if how == "reversed":
        return x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0)
    if how == "every other":
        wide = torch.stack([x, torch.full_like(x, float("nan"))], -1).flatten(-2)
        return wide[..., ::2]
    return x


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("how", ["transposed", "reversed", "every other"])
@pytest.mark.parametrize("which", ["q", "k", "v", "grad", "out", "mask"])
def test_attention_does_not_depend_on_the_strides_of_its_operands(
    which: str, how: str, dtype: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(0)
    named = {
        name: torch.randn(3, 2, 16, 16, generator=generator, dtype=dtype)
        for name in ("q", "k", "v", "grad", "mask")
    }
    q, k, v, grad, mask = named.values()
    out, lse = ops.attention(q, k, v, mask, False, 0.3)
    wanted = ops.attention_backward(grad, q, k, v, out, lse, mask, False, 0.3)
    named = {**named, "out": out, which: strided({**named, "out": out}[which], how)}
    q, k, v, grad, mask, other = named.values()
    assert named[which].stride(-1) != 1
    found, _ = ops.attention(q, k, v, mask, False, 0.3)
    torch.testing.assert_close(found, out)
    gradients = ops.attention_backward(grad, q, k, v, other, lse, mask, False, 0.3)
    for got, want in zip(gradients, wanted, strict=True):
        torch.testing.assert_close(got, want)


def test_the_fallback_attention_of_other_devices_gives_the_same_result() -> None:
    q, k, v, grad = (torch.randn(2, 4, 6, 8, dtype=torch.float64) for _ in range(4))
    out, lse = ops.attention(q, k, v, None, True, 0.3)
    scores = attention_kernels._scores(q, k, None, True, 0.3)
    torch.testing.assert_close(torch.matmul(scores.softmax(-1), v), out)
    torch.testing.assert_close(scores.logsumexp(-1), lse)
    for got, want in zip(
        attention_kernels._plain_backward(
            grad, attention_kernels.Saved(q, k, v, out, lse), None, True, 0.3
        ),
        ops.attention_backward(grad, q, k, v, out, lse, None, True, 0.3),
        strict=True,
    ):
        torch.testing.assert_close(got, want)
