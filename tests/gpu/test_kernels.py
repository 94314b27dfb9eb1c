"""The kernels on a device match the kernels on the host bit by bit. Peers are virtual ranks on one
device."""

from __future__ import annotations

import pytest
import torch
from native import WORLDS, needs_gpu, needs_nvcc
from torch import Tensor

from autopar.kernels import library
from autopar.kernels.normed import FLOATS, backward_op, reduce_add_rmsnorm
from autopar.kernels.packing import BucketLayout, pack, unpack

pytestmark = [pytest.mark.gpu, needs_gpu, needs_nvcc]
SIZES = ((7, 5), (2, 9, 3), (1,), (4, 2100), (300, 1024), (0, 4))
DIMS = (0, 1, 0, 1, 0, 0)
DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.float32,
)


def randn(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randn(
        shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(dtype)


def same(on_device: Tensor, on_host: Tensor) -> bool:
    return (
        on_device.is_cuda
        and on_device.dtype == on_host.dtype
        and torch.equal(on_device.cpu(), on_host)
    )


def test_library_is_available() -> None:
    assert library.cuda() is not None, library.why_not("cuda")


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("world", WORLDS)
def test_pack_and_unpack_match_the_host(world: int, dtype: torch.dtype) -> None:
    layout = BucketLayout(SIZES, DIMS, world)
    for first, count in {(0, world), (world - 1, 1)}:
        sizes = layout.local_sizes(first, count)
        tensors = [
            randn(size, own, seed)
            for seed, (size, own) in enumerate(zip(sizes, DTYPES, strict=True))
        ]
        expected = pack(tensors, layout, dtype, first=first, count=count, scale=0.3, squares=True)
        packed = pack(
            [t.cuda() for t in tensors],
            layout,
            dtype,
            first=first,
            count=count,
            scale=0.3,
            squares=True,
        )
        assert all(same(a, b) for a, b in zip(packed, expected, strict=True))
        back = unpack(packed[0], layout, DTYPES, first=first, count=count, scale=3.0)
        assert all(
            same(a, b)
            for a, b in zip(
                back,
                unpack(expected[0], layout, DTYPES, first=first, count=count, scale=3.0),
                strict=True,
            )
        )


def test_unaligned_tensors_are_packed_like_on_the_host() -> None:
    storage = randn((4100,), torch.bfloat16, 0)
    layout = BucketLayout(((1000,), (40, 77)), (0, 1), 3)
    host, device = ([t[1:1001], t[1003:4083].view(40, 77)] for t in (storage, storage.cuda()))
    assert same(pack(device, layout, torch.bfloat16)[0], pack(host, layout, torch.bfloat16)[0])


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("hidden", (1, 8, 257, 4096, 12289))
@pytest.mark.parametrize("world", (1, 3, 8))
@pytest.mark.parametrize("rounded", (False, True))
def test_norm_and_its_gradients_match_the_host(
    rounded: bool, world: int, hidden: int, dtype: torch.dtype
) -> None:
    parts = [randn((130, hidden), dtype, seed) for seed in range(world)]
    residual, grad_y, grad_normed = (randn((130, hidden), dtype, 100 + seed) for seed in range(3))
    weight = randn((hidden,), dtype, 200)
    expected = reduce_add_rmsnorm(parts, residual, weight, 1e-5, rounded)
    results = reduce_add_rmsnorm(
        [part.cuda() for part in parts], residual.cuda(), weight.cuda(), 1e-5, rounded
    )
    assert all(same(a, b) for a, b in zip(results, expected, strict=True))
    grads = backward_op(grad_y, grad_normed, *expected[:2], weight, 1e-5)
    on_device = backward_op(grad_y.cuda(), grad_normed.cuda(), *results[:2], weight.cuda(), 1e-5)
    assert all(same(a, b) for a, b in zip(on_device, grads, strict=True))


def test_kernels_are_differentiable_on_the_device() -> None:
    parts = [randn((9, 64), torch.float32, seed).cuda().requires_grad_() for seed in range(3)]
    weight = torch.ones(64, device="cuda", requires_grad=True)
    _, _, normed = reduce_add_rmsnorm(parts, torch.zeros(9, 64, device="cuda"), weight, 1e-5)
    bucket, _ = pack(
        [normed, weight], BucketLayout(((9, 64), (64,)), (0, 0), 2), torch.float32, scale=0.5
    )
    bucket.square().sum().backward()
    assert all(torch.equal(part.grad, parts[0].grad) for part in parts)
    assert weight.grad is not None and weight.grad.isfinite().all()


def test_waiter_on_another_stream_reads_data_written_before_the_signal() -> None:
    """The producer is enqueued first. Flags only increase, so that the rounds need no reset."""
    flag, status = (
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    value, values = torch.zeros(1 << 20, device="cuda"), torch.zeros(5, device="cuda")
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    for epoch in range(1, 6):
        with torch.cuda.stream(producer):
            value.fill_(epoch)
            library.launch("ap_epoch_signal", value.device, flag.data_ptr(), epoch)
        with torch.cuda.stream(consumer):
            library.launch("ap_epoch_wait", value.device, flag.data_ptr(), epoch, status.data_ptr())
            values[epoch - 1] = value[-1]
        producer.wait_stream(consumer)  # the next round overwrites the data that this round reads
    torch.cuda.synchronize()
    assert values.tolist() == [1, 2, 3, 4, 5] and status.item() == 0


def test_missing_signal_times_out_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AUTOPAR_KERNELS", "debug")
    flag, status = (
        torch.zeros(1, dtype=torch.int64, device="cuda"),
        torch.zeros(1, dtype=torch.int32, device="cuda"),
    )
    library.launch("ap_epoch_wait", flag.device, flag.data_ptr(), 1, status.data_ptr())
    assert status.item() == library.TIMED_OUT
