"""Orders, rows and offsets of the overlapped products. C and Python agree on them."""

from __future__ import annotations

import ctypes
from itertools import product

import pytest

from autopar.core.layout import part_range
from autopar.kernels import library
from autopar.kernels.chunked import Shards

WORLDS = (1, 2, 3, 5, 8)
CASES = [
    (Shards(1, rows, 12, size, num_chunks), rank)
    for rows, size, num_chunks in product((0, 1, 2, 5, 7, 8, 11, 16, 17), WORLDS, (1, 2, 3, 4))
    for rank in range(size)
]


@pytest.fixture(autouse=True)
def kernels() -> None:
    if library.host() is None:
        pytest.skip(f"no kernels for the host: {library.why_not()}")


def native(name: str, count: int, shards: Shards, rank: int, *further: int) -> list[int]:
    out = (ctypes.c_int64 * count)()
    library.check(library.function("host", name)(out, shards.struct_for(rank), *further), name)
    return list(out)


def orders(shards: Shards, rank: int) -> dict[str, list[tuple[int, int, int]]]:
    """Return the chunks of each kernel in order: owner, first row, number of rows."""
    count = shards.size * shards.num_chunks * 3
    by_kernel = {}
    for name in ("all_gather_matmul", "matmul_reduce_scatter"):
        flat = native(f"ap_{name}_order_host", count, shards, rank)
        by_kernel[name] = list(zip(flat[::3], flat[1::3], flat[2::3], strict=True))
    return by_kernel


def test_gather_starts_with_the_local_shard_and_scatter_ends_with_it() -> None:
    for shards, rank in CASES:
        by_kernel = orders(shards, rank)
        by_chunk = {
            name: [owner for owner, _, _ in rows][:: shards.num_chunks]
            for name, rows in by_kernel.items()
        }
        assert by_chunk["all_gather_matmul"] == [
            (rank + step) % shards.size for step in range(shards.size)
        ]
        assert by_chunk["matmul_reduce_scatter"] == [
            (rank + 1 + step) % shards.size for step in range(shards.size)
        ]


def test_ranks_access_different_peers_at_each_position() -> None:
    for size in WORLDS:
        shards = Shards(1, 3 * size, 4, size, 1)
        for name in ("all_gather_matmul", "matmul_reduce_scatter"):
            ranks = [orders(shards, rank)[name] for rank in range(size)]
            assert all(
                sorted(order[position][0] for order in ranks) == list(range(size))
                for position in range(size)
            )


def test_chunks_cover_the_rows_of_their_owner_exactly_once() -> None:
    for shards, rank in CASES:
        for rows in orders(shards, rank).values():
            for owner in range(shards.size):
                begin, length = part_range(shards.rows, (shards.size,), (owner,))
                mine = [
                    row
                    for who, first, count in rows
                    if who == owner
                    for row in range(first, first + count)
                ]
                assert mine == list(range(begin, begin + length))


def test_python_and_c_have_the_same_orders_and_sizes() -> None:
    for shards, rank in CASES:
        by_kernel = orders(shards, rank)
        for name, order in (
            ("all_gather_matmul", shards.gathered_order),
            ("matmul_reduce_scatter", shards.scattered_order),
        ):
            chunks = list(order(rank))
            assert [(begin, length) for _, _, begin, length in chunks] == [
                (begin, length) for _, begin, length in by_kernel[name]
            ]
            assert [(position, chunk) for position, chunk, _, _ in chunks] == list(
                product(range(shards.size), range(shards.num_chunks))
            )
        assert native("ap_all_gather_matmul_sizes_host", 2, shards, rank) == [
            2 * shards.slot_bytes,
            shards.num_flag_words,
        ]
        for epoch in (1, 2, 3):
            sizes = [
                2 * shards.size * shards.slot_bytes,
                shards.num_flag_words,
                shards.inbox_offset(epoch, rank),
            ]
            assert native("ap_matmul_reduce_scatter_sizes_host", 3, shards, rank, epoch) == sizes


def test_slots_fit_the_largest_shard_and_share_no_cache_line() -> None:
    for shards, _ in CASES:
        assert shards.slot_bytes % 128 == 0
        assert all(
            part_range(shards.rows, (shards.size,), (rank,))[1] * 12 <= shards.slot_bytes
            for rank in range(shards.size)
        )
        assert shards.num_flag_words == 16 * (1 + shards.size + shards.size * shards.num_chunks)


@pytest.mark.parametrize(
    "wrong",
    [
        (1, 4, 4, 2, 2, 1),
        (1, 4, 4, 2, -1, 1),
        (1, 4, 4, 0, 0, 1),
        (1, 4, 4, 2, 0, 0),
        (-1, 4, 4, 2, 0, 1),
    ],
)
def test_invalid_shards_are_refused(wrong: tuple[int, ...]) -> None:
    out = (ctypes.c_int64 * 64)()
    assert (
        library.function("host", "ap_all_gather_matmul_order_host")(
            out, library.NativeShards(*wrong)
        )
        == 1
    )
    assert (
        library.function("host", "ap_matmul_reduce_scatter_order_host")(
            out, library.NativeShards(*wrong)
        )
        == 1
    )
