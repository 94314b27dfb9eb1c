"""The device code, emulated on the CPU block by block and thread by thread, gives the results of
the references, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from native import needs_host
from torch import Tensor
from torch._subclasses import FakeTensorMode

from autopar import ops
from autopar.kernels import library
from autopar.kernels import row_kernels as rows
from autopar.kernels.normed import (
    FLOATS,
    backward_op,
    reduce_add_rmsnorm,
    reference_backward,
    reference_forward,
)
from autopar.kernels.packing import BucketLayout, pack, reference_pack, reference_unpack, unpack

pytestmark = needs_host
SIZES = ((7, 5), (2, 9, 3), (1,), (3, 6100), (0, 4))
DIMS = (0, 1, 0, 1, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run the emulated device code. New memory is filled with NaN."""
    monkeypatch.setenv("AUTOPAR_KERNELS", "emulated")
    assert library.host() is not None, library.why_not()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def assert_close(a: Tensor, b: Tensor) -> None:
    """Compare up to the order of sums and one rounding."""
    assert a.dtype == b.dtype and a.shape == b.shape
    scale = b.double().abs().max().clamp(min=1e-30)
    assert ((a.double() - b.double()).abs().max() / scale).item() <= 8 * torch.finfo(a.dtype).eps


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("parts", "first", "count"), ((1, 0, 1), (3, 0, 3), (3, 1, 1)))
def test_pack_and_unpack_equal_their_references(
    parts: int, first: int, count: int, dtype: torch.dtype
) -> None:
    layout = BucketLayout(SIZES, DIMS, parts)
    sizes = layout.local_sizes(first, count)
    tensors = [
        randn(size, own, seed) for seed, (size, own) in enumerate(zip(sizes, DTYPES, strict=True))
    ]
    packed = pack(tensors, layout, dtype, first=first, count=count, scale=0.3, squares=True)
    expected = reference_pack(tensors, layout, dtype, first, count, 0.3, True)
    assert all(same(a, b) for a, b in zip(packed, expected, strict=True))
    assert same(pack(tensors, layout, dtype, first=first, count=count, scale=0.3)[0], expected[0])
    back = unpack(packed[0], layout, DTYPES, first=first, count=count, scale=3.0)
    assert all(
        same(a, b)
        for a, b in zip(
            back, reference_unpack(packed[0], layout, DTYPES, first, count, 3.0), strict=True
        )
    )


def test_sum_over_more_chunks_than_threads_of_a_block_equals_its_reference() -> None:
    size, parts = 9000, 300  # at least one chunk per rank
    tensor = randn((size,), torch.float32, 0)
    tensor *= (
        tensor.abs() ** 3
    )  # values of very different magnitude, so that the order of the sum matters
    layout = BucketLayout(((size,),), (0,), parts)
    _, expected = reference_pack([tensor], layout, torch.bfloat16, 0, parts, 1.0, True)
    assert same(pack([tensor], layout, torch.bfloat16, squares=True)[1], expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "hidden"), ((0, 8), (3, 1), (2, 2051), (131, 300)))
@pytest.mark.parametrize("world", (1, 3))
@pytest.mark.parametrize("rounded", (False, True))
def test_norm_and_its_gradients_equal_their_references(
    rounded: bool, world: int, rows: int, hidden: int, dtype: torch.dtype
) -> None:
    parts = [randn((rows, hidden), dtype, seed) for seed in range(world)]
    residual, grad_y, grad_normed = (randn((rows, hidden), dtype, 100 + seed) for seed in range(3))
    weight = randn((hidden,), dtype, 200)
    settings = parts, residual, weight, 1e-5, rounded
    y, squares, normed = reduce_add_rmsnorm(*settings)
    assert all(
        same(a, b) for a, b in zip((y, squares, normed), reference_forward(*settings), strict=True)
    )
    arguments = grad_y, grad_normed, y, squares, weight, 1e-5
    assert all(
        same(a, b)
        for a, b in zip(backward_op(*arguments), reference_backward(*arguments), strict=True)
    )


def test_stream_waits_for_a_signal_or_times_out() -> None:
    flag, status = torch.zeros(1, dtype=torch.int64), torch.full((1,), 9, dtype=torch.int32)
    library.launch("ap_epoch_signal", flag.device, flag.data_ptr(), 4)
    library.launch("ap_epoch_wait", flag.device, flag.data_ptr(), 4, status.data_ptr())
    assert (flag.item(), status.item()) == (4, 0)
    library.launch("ap_epoch_wait", flag.device, flag.data_ptr(), 5, status.data_ptr())
    assert status.item() == library.TIMED_OUT


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ((1, 1), (5, 7), (3, 41, 24), (130, 300), (2, 2051), (9, 4096)))
@pytest.mark.parametrize("weighted", (True, False))
def test_row_norm_kernels_match_the_ops(
    weighted: bool, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    x, grad, n = randn(shape, dtype, 0), randn(shape, dtype, 1), 2 * shape[-1]
    weight = randn(shape[-1:], dtype, 2) if weighted else None
    squares, wide = 2 * ops.square_sum(x, dtype), library.wide(dtype)
    for rounded in {dtype, wide}:
        settings = x, squares, weight, n, 1e-5, wide, rounded, dtype
        assert_close(rows.rms_norm(*settings), ops.rms_norm(*settings))
    product = ops.rms_product(grad, x, weight, dtype)
    assert_close(rows.rms_product(grad, x, weight, dtype), product)
    arguments = grad, x, squares, product, weight, n, 1e-5, dtype
    assert_close(rows.rms_norm_backward(*arguments), ops.rms_norm_backward(*arguments))
    assert_close(
        rows.rms_weight_gradient(grad, x, squares, n, 1e-5, dtype),
        ops.rms_weight_gradient(grad, x, squares, n, 1e-5, dtype),
    )


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("shape", ((1, 1), (5, 7), (3, 41, 24), (2, 5003)))
def test_row_softmax_kernels_match_the_ops(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, scale = 4 * randn(shape, dtype, 0), randn(shape[:-1], library.wide(dtype), 1)
    index = torch.randint(-3, 2 * shape[-1], shape[:-1], generator=torch.Generator().manual_seed(2))
    m = x.amax(-1) + 1
    s = ops.sum_exp(x, m)
    assert_close(rows.sum_exp(x, m), s)
    for start in (0, shape[-1] // 2):
        expected = ops.cross_entropy_backward(x, m, s, index, scale, start)
        assert_close(rows.cross_entropy_backward(x, m, s, index, scale, start), expected)
        operand = x.clone()
        assert rows.cross_entropy_backward_in_place(operand, m, s, index, scale, start) is operand
        assert_close(operand, expected)


@pytest.mark.parametrize("dtype", FLOATS)
def test_row_loss_kernel_matches_the_op(dtype: torch.dtype) -> None:
    x, weight = randn((2, 5, 16), dtype, 0), randn((37, 16), dtype, 1)
    index = torch.randint(0, 37, (2, 5), generator=torch.Generator().manual_seed(2))
    index[0, 2] = -100
    results, expected = (
        way(x, weight, index, -100, 3)
        for way in (rows.linear_cross_entropy, ops.linear_cross_entropy)
    )
    for result, reference in zip(results, expected, strict=True):
        assert_close(result, reference)


def test_unsupported_operands_of_row_kernels_use_the_ops(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The operands are a weight of another dtype, strided rows, an empty tensor and an unsupported
    dtype."""
    x, squares = randn((4, 8), torch.bfloat16, 0), torch.ones(4)
    launched: list[str] = []
    monkeypatch.setattr(library, "launch", lambda kernel, *_: launched.append(kernel))
    settings = 8, 1e-5, torch.float32, torch.float32, torch.float32
    assert torch.equal(
        rows.rms_norm(x, squares, torch.ones(8), *settings),
        ops.rms_norm(x, squares, torch.ones(8), *settings),
    )
    strided = x[:, ::2]
    for _ in range(2):
        assert torch.equal(
            rows.sum_exp(strided, strided.amax(-1)), ops.sum_exp(strided, strided.amax(-1))
        )
    assert [record.message for record in caplog.records] == [
        "a norm or a loss of (4, 4) needs several passes over memory: it reads a tensor with"
        " strides (8, 2)"
    ]
    assert rows.sum_exp(x[:0], x[:0].amax(-1)).shape == (0,)
    assert rows.rms_product(x, x.float(), None, torch.float32).shape == (4,)
    assert rows.rms_product(x, x, None, torch.float64).dtype == torch.float64, (
        "the model computes the squares in float64"
    )
    with FakeTensorMode():
        assert rows.rms_product(
            torch.empty(4, 8), torch.empty(4, 8), None, torch.float32
        ).shape == (4,)
    assert launched == []
    rows.sum_exp(x, x.amax(-1))
    assert launched == ["ap_sum_exp"]
