"""A bucket contains the shards of all tensors, rank by rank. The compiled code equals the reference
bit by bit."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from native import WORLDS
from torch import Tensor

from autopar.core.layout import part_range
from autopar.errors import KernelError
from autopar.kernels import library
from autopar.kernels.packing import (
    ALIGN,
    FLOATS,
    BucketLayout,
    pack,
    pack_op,
    reference_pack,
    reference_unpack,
    unpack,
    unpack_op,
)

LAYOUT = BucketLayout(((7, 5), (2, 9, 3), (1,), (4, 2100)), (0, 1, 0, 1), 3)


def tensors_of(
    sizes: Sequence[tuple[int, ...]], dtypes: Sequence[torch.dtype], seed: int = 0
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
        for size, dtype in zip(sizes, dtypes, strict=True)
    ]


def same(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)


@st.composite
def layouts(draw: st.DrawFn) -> BucketLayout:
    length = st.one_of(st.integers(0, 9), st.sampled_from((64, 129)))
    sizes = draw(
        st.lists(st.lists(length, min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)
    )
    dims = tuple(draw(st.integers(0, len(size) - 1)) for size in sizes)
    return BucketLayout(tuple(sizes), dims, draw(st.integers(1, 5)))


@given(layouts(), st.data())
def test_pack_and_unpack_equal_their_references_bit_by_bit(
    layout: BucketLayout, data: st.DataObject
) -> None:
    first = data.draw(st.integers(0, layout.parts - 1))
    count = data.draw(st.integers(1, layout.parts - first))
    dtypes = [data.draw(st.sampled_from(FLOATS)) for _ in layout.sizes]
    dtype, scale, squares = (
        data.draw(st.sampled_from(FLOATS)),
        data.draw(st.sampled_from((1.0, 0.125, -0.3))),
        data.draw(st.booleans()),
    )
    tensors = tensors_of(layout.local_sizes(first, count), dtypes)
    packed = pack(tensors, layout, dtype, first=first, count=count, scale=scale, squares=squares)
    reference = reference_pack(tensors, layout, dtype, first, count, scale, squares)
    assert all(same(a, b) for a, b in zip(packed, reference, strict=True))
    unpacked = unpack(packed[0], layout, dtypes, first=first, count=count, scale=scale)
    expected = reference_unpack(packed[0], layout, dtypes, first, count, scale)
    assert all(same(a, b) for a, b in zip(unpacked, expected, strict=True))


def test_row_contains_the_contiguous_shard_of_each_tensor_of_one_rank() -> None:
    tensors = tensors_of(LAYOUT.sizes, [torch.float32] * 4)
    bucket, _ = pack(tensors, LAYOUT, torch.float32)
    for rank in range(3):
        expected: list[Tensor] = []
        for tensor, dim, segment in zip(tensors, LAYOUT.dims, LAYOUT.segments(), strict=True):
            start, length = part_range(tensor.shape[dim], [3], [rank])
            part = tensor.narrow(dim, start, length).flatten()
            assert segment % ALIGN == 0 and segment >= part.numel()
            expected += [part, torch.zeros(segment - part.numel())]
        assert torch.equal(bucket[rank], torch.cat(expected))


@given(layouts())
def test_unpack_inverts_pack(layout: BucketLayout) -> None:
    tensors = tensors_of(layout.sizes, [FLOATS[i % 4] for i in range(len(layout.sizes))])
    bucket, _ = pack(tensors, layout, torch.float64)
    assert all(
        same(a, b)
        for a, b in zip(unpack(bucket, layout, [t.dtype for t in tensors]), tensors, strict=True)
    )


@pytest.mark.parametrize("world", WORLDS)
def test_reduce_scatter_of_buckets_gives_each_rank_its_shards_of_the_sums(world: int) -> None:
    layout = BucketLayout(LAYOUT.sizes, LAYOUT.dims, world)
    ranks = [
        [t.mul(8).round() for t in tensors_of(layout.sizes, [torch.float32] * 4, seed)]
        for seed in range(world)
    ]
    total = torch.stack([pack(tensors, layout, torch.float32)[0] for tensors in ranks]).sum(0)
    for rank in range(world):
        mine = unpack(total[rank : rank + 1], layout, [torch.float32] * 4, first=rank, count=1)
        for index, (size, dim) in enumerate(zip(layout.sizes, layout.dims, strict=True)):
            start, length = part_range(size[dim], [world], [rank])
            assert torch.equal(
                mine[index],
                torch.stack([tensors[index] for tensors in ranks])
                .sum(0)
                .narrow(dim, start, length),
            )


@pytest.mark.parametrize("world", WORLDS)
def test_all_gather_of_rows_gives_the_full_tensors(world: int) -> None:
    layout = BucketLayout(LAYOUT.sizes, LAYOUT.dims, world)
    dtypes = [torch.float32, torch.bfloat16, torch.float16, torch.float32]
    tensors = tensors_of(layout.sizes, dtypes)
    rows = []
    for rank in range(world):
        ranges = [
            part_range(size[dim], [world], [rank])
            for size, dim in zip(layout.sizes, layout.dims, strict=True)
        ]
        parts = [
            t.narrow(dim, *where)
            for t, dim, where in zip(tensors, layout.dims, ranges, strict=True)
        ]
        rows.append(pack(parts, layout, torch.float32, first=rank, count=1)[0])
    assert all(
        same(a, b) for a, b in zip(unpack(torch.cat(rows), layout, dtypes), tensors, strict=True)
    )


def test_sum_over_many_chunks_does_not_depend_on_threads_or_compiled_code() -> None:
    sizes = ((301, 777), (50000,), *[(30000,)] * 6)  # more elements than one thread processes
    tensors = [
        t * t.abs() ** 3 for t in tensors_of(sizes, [torch.float32] * 8)
    ]  # values of very different magnitude, so that the order of the sum matters
    layout = BucketLayout(sizes, (1,) + (0,) * 7, 3)
    results = [reference_pack(tensors, layout, torch.bfloat16, 0, 3, 0.7, True)]
    try:
        for threads in (1, 4):
            torch.set_num_threads(threads)
            results.append(pack(tensors, layout, torch.bfloat16, scale=0.7, squares=True))
    finally:
        torch.set_num_threads(1)
    assert all(same(a, b) and same(b, c) for a, b, c in zip(*results, strict=True))


def test_sum_over_more_chunks_than_lanes_has_the_order_of_the_reference() -> None:
    (tensor,) = tensors_of([(9000,)], [torch.float32])
    tensor *= tensor.abs() ** 3
    layout = BucketLayout(((9000,),), (0,), 300)  # one chunk per rank
    expected = reference_pack([tensor], layout, torch.bfloat16, 0, 300, 1.0, True)
    assert all(
        same(a, b)
        for a, b in zip(pack([tensor], layout, torch.bfloat16, squares=True), expected, strict=True)
    )


def test_squares_are_computed_from_scaled_elements_before_rounding() -> None:
    tensors = tensors_of(
        ((301, 77), (5000,), (0, 4)), [torch.float32, torch.float16, torch.float32]
    )
    _, squares = pack(
        tensors,
        BucketLayout(((301, 77), (5000,), (0, 4)), (1, 0, 0), 3),
        torch.bfloat16,
        scale=0.5,
        squares=True,
    )
    expected = [math.fsum((0.5 * t.double()).square().flatten().tolist()) for t in tensors]
    assert squares.dtype == torch.float64
    assert squares.tolist() == pytest.approx(expected, rel=1e-14)


@pytest.mark.parametrize("scale", (float("inf"), float("nan"), -1.0))
def test_padding_is_zero_for_each_scale(scale: float) -> None:
    bucket, squares = pack(
        [torch.ones(5)], BucketLayout(((5,),), (0,), 2), torch.float32, scale=scale, squares=True
    )
    assert torch.equal(bucket[0, 3:], torch.zeros(5)) and torch.equal(bucket[1, 2:], torch.zeros(6))
    assert not bucket.signbit()[:, 3:].any()
    assert torch.equal(
        squares, torch.tensor([5 * scale * scale], dtype=torch.float64)
    ) or math.isnan(scale)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16))
def test_conversions_round_like_torch(dtype: torch.dtype) -> None:
    """The values are all 16-bit values, the midpoints between them, the neighbours of the
    midpoints, and random bits."""
    every = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype)
    wide = every.float()
    bits = wide.view(torch.int32)
    half = 1 << (15 if dtype == torch.bfloat16 else 12)
    random_bits = torch.randint(
        -(2**31), 2**31 - 1, (40000,), dtype=torch.int32, generator=torch.Generator().manual_seed(0)
    )
    tiny = (
        torch.arange(4096, dtype=torch.float32) * 2.0**-27
    )  # near the subnormal numbers of float16
    values = torch.cat(
        [
            wide,
            *((bits + half + by).view(torch.float32) for by in (-1, 0, 1)),
            random_bits.view(torch.float32),
            tiny,
        ]
    )
    layout = BucketLayout(((len(values),),), (0,), 1)
    narrow = pack([values], layout, dtype)[0][0, : len(values)]
    assert torch.equal(narrow.nan_to_num(7), values.to(dtype).nan_to_num(7)) and torch.equal(
        narrow.isnan(), values.isnan()
    )
    assert torch.equal(narrow[~values.isnan()].signbit(), values[~values.isnan()].signbit())
    back = pack([every], BucketLayout(((2**16,),), (0,), 1), torch.float32)[0][0]
    assert torch.equal(back.nan_to_num(7), wide.nan_to_num(7))


@pytest.mark.parametrize("dtype", FLOATS)
def test_unaligned_and_non_contiguous_tensors_are_packed_correctly(
    dtype: torch.dtype,
) -> None:
    storage = torch.arange(2000.0).to(dtype)
    tensors = [storage[1:1001], storage[3:43].view(5, 8).t()]
    layout = BucketLayout(((1000,), (8, 5)), (0, 1), 3)
    bucket, _ = pack(tensors, layout, dtype)
    assert same(bucket, reference_pack(tensors, layout, dtype, 0, 3, 1.0, False)[0])
    unaligned = torch.cat([torch.zeros(1, dtype=dtype), bucket.flatten()])[1:].view_as(
        bucket
    )  # an unaligned bucket
    assert all(
        same(a, b) for a, b in zip(unpack(unaligned, layout, [dtype] * 2), tensors, strict=True)
    )


def gradients(results: Sequence[Tensor], inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    weights = tensors_of([tuple(t.shape) for t in results], [t.dtype for t in results], seed=9)
    return torch.autograd.grad(
        sum((t * w).double().sum() for t, w in zip(results, weights, strict=True)), inputs
    )


@pytest.mark.parametrize(("first", "count"), ((0, 3), (1, 1), (1, 2)))
def test_gradients_match_the_references(first: int, count: int) -> None:
    dtypes = [torch.float32, torch.bfloat16, torch.float64, torch.float16]
    tensors = [t.requires_grad_() for t in tensors_of(LAYOUT.local_sizes(first, count), dtypes)]
    bucket, squares = pack(
        tensors, LAYOUT, torch.float32, first=first, count=count, scale=0.5, squares=True
    )
    assert bucket.requires_grad and not squares.requires_grad
    reference = reference_pack(tensors, LAYOUT, torch.float32, first, count, 0.5, False)[0]
    assert all(
        same(a, b)
        for a, b in zip(gradients([bucket], tensors), gradients([reference], tensors), strict=True)
    )
    leaf = bucket.detach().requires_grad_()
    unpacked = unpack(leaf, LAYOUT, dtypes, first=first, count=count, scale=0.5)
    expected = reference_unpack(leaf, LAYOUT, dtypes, first, count, 0.5)
    assert all(
        same(a, b)
        for a, b in zip(gradients(unpacked, [leaf]), gradients(expected, [leaf]), strict=True)
    )


def test_unused_results_have_zero_gradients() -> None:
    leaf = torch.ones(3, LAYOUT.row, requires_grad=True)
    unpacked = unpack(leaf, LAYOUT, [torch.float32] * 4)
    (grad,) = torch.autograd.grad(unpacked[2].sum(), leaf)
    assert grad.sum() == 1


PACKED: tuple[Any, ...] = (
    [torch.ones(7, 5, requires_grad=True), torch.ones(4, 3).bfloat16()],
    [7, 4],
    [0, 0],
    2,
    0,
    2,
)


@pytest.mark.parametrize(("dtype", "squares"), ((torch.float32, False), (torch.bfloat16, True)))
def test_pack_passes_opcheck(dtype: torch.dtype, squares: bool) -> None:
    torch.library.opcheck(pack_op, (*PACKED, dtype, 0.5, squares))


@pytest.mark.parametrize("parts", (2, 3))
def test_unpack_passes_opcheck(parts: int) -> None:
    layout = BucketLayout(((7, 5), (4, 3)), (0, 1), parts)
    bucket = torch.ones(1, layout.row, requires_grad=True)
    codes = [library.code_of(dtype) for dtype in (torch.float32, torch.bfloat16)]
    torch.library.opcheck(
        unpack_op, (bucket, [7, 5, 4, 3], [2, 2], [0, 1], parts, 1, 1, codes, 0.5)
    )


REFUSED: list[tuple[str, Any, str]] = [
    (
        "shape",
        lambda: pack(
            [torch.ones(6, 5)], BucketLayout(((7, 5),), (0,), 2), torch.float32, first=1, count=1
        ),
        r"\(6, 5\)",
    ),
    (
        "dtype",
        lambda: pack(
            [torch.ones(2, dtype=torch.int32)], BucketLayout(((2,),), (0,), 1), torch.float32
        ),
        "int32",
    ),
    (
        "bucket dtype",
        lambda: pack([torch.ones(2)], BucketLayout(((2,),), (0,), 1), torch.int64),
        "int64",
    ),
    (
        "ranks",
        lambda: pack(
            [torch.ones(2)], BucketLayout(((2,),), (0,), 2), torch.float32, first=1, count=2
        ),
        "ranks 1 to 2 do not exist among 2",
    ),
    (
        "dim",
        lambda: pack_op([torch.ones(2)], [2], [1], 1, 0, 1, torch.float32, 1.0, False),
        "no dim 1",
    ),
    (
        "scalar",
        lambda: pack_op([torch.tensor(1.0)], [1], [0], 1, 0, 1, torch.float32, 1.0, False),
        "no dim 0",
    ),
    (
        "bucket",
        lambda: unpack(torch.ones(1, 16), BucketLayout(((2,),), (0,), 1), [torch.float32]),
        r"\(1, 16\)",
    ),
]


@pytest.mark.parametrize(
    ("call", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_invalid_buckets_are_refused(call: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        call()


def test_library_refuses_a_table_that_does_not_match_its_bucket() -> None:
    if library.host() is None:
        pytest.skip(library.why_not())
    tensor, bucket = torch.ones(16), torch.zeros(1, 16)
    row = [tensor.data_ptr(), 0, 1, 16, 16, 1, 0, 0]
    for place, value in ((None, 0), (1, 9), (3, 17), (6, 4), (6, 8), (7, 1), (2, -1)):
        table = torch.tensor(
            [value if index == place else entry for index, entry in enumerate(row)]
        )
        arguments = table.data_ptr(), 1, bucket.data_ptr(), 0, 16, 1, 0, 1, 1, 1.0, None, None, 1
        assert library.function("host", "ap_pack_bucket_host")(*arguments) == int(place is not None)
