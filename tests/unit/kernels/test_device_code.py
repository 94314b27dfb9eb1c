"""The device's code, run on the CPU block by block and thread by thread, computes what the references compute, bit by bit."""

from __future__ import annotations

import pytest
import torch
from native import needs_host
from torch import Tensor

from autopar.kernels import library
from autopar.kernels.buckets import BucketLayout
from autopar.kernels.normed import FLOATS, backward_op, reduce_add_rmsnorm, reference_backward, reference_forward
from autopar.kernels.packing import pack, reference_pack, reference_unpack, unpack

pytestmark = needs_host
SIZES = ((7, 5), (2, 9, 3), (1,), (3, 6100), (0, 4))
DIMS = (0, 1, 0, 1, 0)
DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16, torch.float32)


@pytest.fixture(autouse=True)
def emulated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_KERNELS", "emulated")
    assert library.host() is not None, library.why_not()


def drawn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("parts", "first", "count"), ((1, 0, 1), (3, 0, 3), (3, 1, 1)))
def test_pack_and_unpack(parts: int, first: int, count: int, dtype: torch.dtype) -> None:
    layout = BucketLayout(SIZES, DIMS, parts)
    sizes = layout.local_sizes(first, count)
    tensors = [drawn(size, own, seed) for seed, (size, own) in enumerate(zip(sizes, DTYPES, strict=True))]
    found = pack(tensors, layout, dtype, first=first, count=count, scale=0.3, squares=True)
    expected = reference_pack(tensors, layout, dtype, first, count, 0.3, True)
    assert all(same(a, b) for a, b in zip(found, expected, strict=True))
    assert same(pack(tensors, layout, dtype, first=first, count=count, scale=0.3)[0], expected[0])
    back = unpack(found[0], layout, DTYPES, first=first, count=count, scale=3.0)
    assert all(same(a, b) for a, b in zip(back, reference_unpack(found[0], layout, DTYPES, first, count, 3.0), strict=True))


def test_a_sum_over_more_chunks_than_a_block_has_threads() -> None:
    size, parts = 9000, 300  # a chunk or more for each rank
    tensor = drawn((size,), torch.float32, 0)
    tensor *= tensor.abs() ** 3  # of very different size, so that the order shows
    layout = BucketLayout(((size,),), (0,), parts)
    _, expected = reference_pack([tensor], layout, torch.bfloat16, 0, parts, 1.0, True)
    assert same(pack([tensor], layout, torch.bfloat16, squares=True)[1], expected)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize(("rows", "hidden"), ((0, 8), (3, 1), (2, 2051), (131, 300)))
@pytest.mark.parametrize("world", (1, 3))
@pytest.mark.parametrize("rounded", (False, True))
def test_the_norm_and_its_gradients(rounded: bool, world: int, rows: int, hidden: int, dtype: torch.dtype) -> None:
    parts = [drawn((rows, hidden), dtype, seed) for seed in range(world)]
    residual, grad_y, grad_normed = (drawn((rows, hidden), dtype, 100 + seed) for seed in range(3))
    weight = drawn((hidden,), dtype, 200)
    settings = parts, residual, weight, 1e-5, rounded
    y, squares, normed = reduce_add_rmsnorm(*settings)
    assert all(same(a, b) for a, b in zip((y, squares, normed), reference_forward(*settings), strict=True))
    given = grad_y, grad_normed, y, squares, weight, 1e-5
    assert all(same(a, b) for a, b in zip(backward_op(*given), reference_backward(*given), strict=True))


def test_a_signal_and_a_wait_on_a_stream() -> None:
    flag, status = torch.zeros(1, dtype=torch.int64), torch.full((1,), 9, dtype=torch.int32)
    library.launch("ap_epoch_signal", flag.device, flag.data_ptr(), 4)
    library.launch("ap_epoch_wait", flag.device, flag.data_ptr(), 4, status.data_ptr())
    assert (flag.item(), status.item()) == (4, 0)
    library.launch("ap_epoch_wait", flag.device, flag.data_ptr(), 5, status.data_ptr())
    assert status.item() == library.TIMED_OUT
