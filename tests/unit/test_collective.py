"""The time of a collective: formulas, measured points, local copies."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.certificate.rates import _bytes_sent
from autopar.core.collective import (
    BUCKET_DTYPES,
    KINDS,
    STRIPE,
    Collective,
    Kind,
    _copied_bytes,
    _num_rounds,
    collective_time,
)
from autopar.core.hardware import HardwareProfile
from autopar.errors import HardwareError
from autopar.kernels import library, packing
from autopar.program.interpreter import step

GIB = 2**30
H100 = HardwareProfile.load("h100-sxm")


def collective(kind: Kind, num_bytes: int, dim: int = 0, to_dim: int = 0) -> Collective:
    reduce_op = "sum" if kind in ("all_reduce", "reduce_scatter") else ""
    dim = -1 if kind == "all_reduce" else dim
    return Collective(
        kind, 0, dim, to_dim if kind == "all_to_all" else -1, reduce_op, "bfloat16", num_bytes
    )


@pytest.mark.parametrize(
    ("num_bytes", "published_s"),
    [(1024, 16.94e-6), (64 * 2**20, 324.7e-6), (GIB, 4029.4e-6), (16 * GIB, 62648e-6)],
)
def test_all_reduce_on_eight_h100_takes_the_published_time(
    num_bytes: int, published_s: float
) -> None:
    assert collective_time(collective("all_reduce", num_bytes), 8, "intra", H100) == pytest.approx(
        published_s, rel=0.01
    )


@pytest.mark.parametrize(
    ("profile", "published_s"), [("h200-sxm", GIB / 264.9e9), ("a100-sxm-80gb", 8203.9e-6)]
)
def test_all_reduce_of_one_gib_takes_the_published_time(profile: str, published_s: float) -> None:
    time_s = collective_time(
        collective("all_reduce", GIB), 8, "intra", HardwareProfile.load(profile)
    )
    assert time_s == pytest.approx(published_s, rel=0.01)


def test_all_reduce_on_four_devices_runs_at_ring_speed() -> None:
    """The published bus bandwidth at 8 GiB on four H200 is 363.3 GB/s: without multicast, a ring
    is the fastest algorithm."""
    time_s = collective_time(
        collective("all_reduce", 8 * GIB), 4, "intra", HardwareProfile.load("h200-sxm")
    )
    assert time_s == pytest.approx(2 * 3 / 4 * 8 * GIB / 363.3e9, rel=0.05)


def test_all_gather_and_reduce_scatter_take_half_of_a_measured_all_reduce() -> None:
    half = (
        collective_time(collective("all_reduce", GIB), 8, "intra", H100) / 2
        + H100.launch_overhead_s
    )
    assert collective_time(collective("all_gather", GIB // 8), 8, "intra", H100) == pytest.approx(
        half
    )
    assert collective_time(collective("reduce_scatter", GIB), 8, "intra", H100) == pytest.approx(
        half
    )


def test_all_to_all_reaches_a_share_of_the_ring_bandwidth() -> None:
    link = H100.links["inter"]
    wire = (
        7 / 8 * GIB / (link.bandwidth_bytes_per_s * link.all_to_all_efficiency)
        + 3 * link.latency_s
        + H100.launch_overhead_s
    )
    assert collective_time(collective("all_to_all", GIB), 8, "inter", H100) == pytest.approx(wire)


def test_a_dim_that_is_not_leading_costs_a_local_copy() -> None:
    copy_s = 2 * GIB / (H100.memory_bandwidth_bytes_per_s * H100.memory_efficiency["elementwise"])
    for kind, num_bytes in (("all_gather", GIB // 8), ("reduce_scatter", GIB)):
        leading, inner = (
            collective_time(collective(kind, num_bytes, dim=d), 8, "intra", H100) for d in (0, 1)
        )
        assert inner - leading == pytest.approx(copy_s)
    first = collective_time(collective("all_to_all", GIB, dim=1, to_dim=0), 8, "intra", H100)
    both = collective_time(collective("all_to_all", GIB, dim=1, to_dim=2), 8, "intra", H100)
    assert both - first == pytest.approx(copy_s)


def test_a_slice_costs_one_local_copy_of_the_shard() -> None:
    copy_s = (
        2 * (GIB // 8) / (H100.memory_bandwidth_bytes_per_s * H100.memory_efficiency["elementwise"])
    )
    assert collective_time(collective("slice", GIB), 8, "inter", H100) == pytest.approx(
        H100.launch_overhead_s + copy_s
    )


def test_a_halo_costs_its_edges_and_one_local_copy_for_any_number_of_ranks() -> None:
    halo = replace(collective("halo", GIB, dim=2), halo_bytes=GIB // 16)
    link = H100.links["inter"]
    copy_s = (
        2
        * (GIB + GIB // 16)
        / (H100.memory_bandwidth_bytes_per_s * H100.memory_efficiency["elementwise"])
    )
    expected = (
        H100.launch_overhead_s + link.latency_s + GIB / 16 / link.bandwidth_bytes_per_s + copy_s
    )
    assert [collective_time(halo, n, "inter", H100) for n in (2, 64)] == pytest.approx(
        [expected, expected]
    )


def test_a_swap_costs_half_a_shard_and_its_local_copies_for_any_number_of_ranks() -> None:
    link = H100.links["inter"]
    for dim, copied in ((0, GIB), (2, GIB + GIB // 2)):
        copy_s = (
            2 * copied / (H100.memory_bandwidth_bytes_per_s * H100.memory_efficiency["elementwise"])
        )
        expected = (
            H100.launch_overhead_s + link.latency_s + GIB / 2 / link.bandwidth_bytes_per_s + copy_s
        )
        times = [
            collective_time(collective("swap", GIB, dim=dim), n, "inter", H100) for n in (2, 64)
        ]
        assert times == pytest.approx([expected, expected])
    assert collective("swap", GIB).output_bytes(8) == GIB


@pytest.mark.parametrize("kind", KINDS)
def test_an_axis_of_one_device_costs_nothing(kind: Kind) -> None:
    assert collective_time(collective(kind, GIB), 1, "intra", H100) == 0.0


@pytest.mark.parametrize(
    "use",
    [
        lambda c: c.output_bytes(4),
        lambda c: collective_time(c, 4, "intra", H100),
        lambda c: _copied_bytes(c, 4),
        lambda c: _num_rounds(c.kind),
        lambda c: _bytes_sent(c.kind, 4, 8.0),
        lambda c: step(c.kind, [torch.ones(4)] * 2, 0, 0, ""),
    ],
)
def test_a_kind_without_a_formula_is_refused(use: Callable[[Any], object]) -> None:
    with pytest.raises(AssertionError, match="gather_all"):
        use(collective(cast(Kind, "gather_all"), 1024))


@pytest.mark.parametrize("kind", ["swap", "halo", "slice", "fetch", "store"])
def test_point_to_point_steps_do_not_use_the_ring_formula(kind: Kind) -> None:
    for count in (_num_rounds, lambda kind: _bytes_sent(kind, 4, 8.0)):
        with pytest.raises(AssertionError, match=kind):
            count(kind)


@pytest.mark.parametrize("kind", ["all_gather", "reduce_scatter", "all_reduce", "all_to_all"])
def test_a_collective_between_nodes_takes_longer_than_within_a_node(kind: Kind) -> None:
    for num_bytes in (1024, GIB):
        within, between = (
            collective_time(collective(kind, num_bytes), 8, link, H100)
            for link in ("intra", "inter")
        )
        assert between > within


def test_an_unknown_link_is_refused() -> None:
    with pytest.raises(HardwareError, match="no link 'moon'"):
        collective_time(collective("all_reduce", 1), 8, "moon", H100)


@given(
    kind=st.sampled_from(KINDS),
    name=st.sampled_from(HardwareProfile.names()),
    link=st.sampled_from(["intra", "inter"]),
    size=st.sampled_from([2, 3, 4, 8, 64]),
    sizes=st.lists(st.integers(0, 2**34), min_size=2, max_size=6),
)
def test_more_bytes_never_take_less_time(
    kind: Kind, name: str, link: str, size: int, sizes: list[int]
) -> None:
    profile = HardwareProfile.load(name)
    times = [collective_time(collective(kind, n), size, link, profile) for n in sorted(sizes)]
    assert all(0 < a <= b * (1 + 1e-12) and math.isfinite(b) for a, b in pairwise(times))


def test_the_members_and_packing_of_buckets_match_the_kernels() -> None:
    assert STRIPE == packing.STRIPE
    assert {getattr(torch, name): size for name, size in BUCKET_DTYPES.items()} == {
        dtype: dtype.itemsize for dtype in library.FLOATS
    }
