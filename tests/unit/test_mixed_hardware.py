"""Unequal devices: the times of the slowest of several profiles, and the forms of the hardware
argument."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import autopar
from autopar.analysis.work import Work
from autopar.api.arguments import as_hardware
from autopar.core.collective import (
    BUCKETED,
    KINDS,
    Collective,
    Kind,
    bucket_time,
    collective_time,
    share_of_bucket,
    with_faster,
)
from autopar.core.hardware import (
    FLOP_KINDS,
    LINKS,
    MEMORY_KINDS,
    HardwareProfile,
    Mixed,
    profile_of,
    slowest,
    slowest_of,
)
from autopar.cost.op_times import compute_time
from autopar.cost.priced import Crossing
from autopar.errors import HardwareError

PROFILES = {name: HardwareProfile.load(name) for name in HardwareProfile.names()}
H100, A100, MEASURED = (
    PROFILES["h100-sxm"],
    PROFILES["a100-sxm-80gb"],
    PROFILES["h100-sxm-measured"],
)
PAIRS = list(itertools.combinations(PROFILES, 2))
SIZES = st.floats(0.0, 13.0).map(lambda power: round(10**power))
MESH = autopar.Mesh({"stage": 2, "gpu": 4})


WORK = st.sampled_from((*FLOP_KINDS, *MEMORY_KINDS, "view"))


@given(st.sampled_from(PAIRS), WORK, st.sampled_from((torch.float32, torch.bfloat16)), SIZES, SIZES)
def test_the_time_of_an_op_on_the_slowest_profile_is_the_maximum_over_its_parts(
    names: tuple[str, str], kind: Any, dtype: torch.dtype, flops: int, num_bytes: int
) -> None:
    parts = tuple(PROFILES[name] for name in names)
    work = Work(flops, num_bytes, kind)
    knows = all(str(dtype).removeprefix("torch.") in part.peak_flops_per_s for part in parts)
    if kind in FLOP_KINDS and not knows:
        with pytest.raises(HardwareError, match="has no peak_flops_per_s"):
            compute_time(work, dtype, slowest_of(parts))
        return
    assert compute_time(work, dtype, slowest_of(parts)) == max(
        compute_time(work, dtype, part) for part in parts
    )


@given(
    st.sampled_from(PAIRS),
    st.sampled_from(KINDS),
    st.sampled_from(LINKS),
    st.sampled_from((2, 3, 4, 8, 16)),
    SIZES,
    st.integers(0, 1),
)
def test_the_time_of_a_collective_on_the_slowest_profile_is_the_maximum_over_its_parts(
    names: tuple[str, str], kind: Kind, link: str, size: int, num_bytes: int, dim: int
) -> None:
    parts = tuple(PROFILES[name] for name in names)
    collective = Collective(
        kind,
        0,
        dim,
        1 - dim if kind == "all_to_all" else -1,
        "",
        "float32",
        num_bytes,
        num_bytes // 4,
    )
    in_bucket = partial(bucket_time, members=(num_bytes,))
    for time in (
        (collective_time, in_bucket, share_of_bucket) if kind in BUCKETED else (collective_time,)
    ):
        assert time(collective, size, link, slowest_of(parts)) == max(
            time(collective, size, link, part) for part in parts
        )


def test_the_worst_figures_alone_do_not_give_the_slowest_measured_times() -> None:
    found = slowest_of((H100, MEASURED))
    assert found.parts == (H100, MEASURED)
    work = Work(10**9, 10**6, "matmul")
    assert compute_time(work, torch.bfloat16, found) != compute_time(
        work, torch.bfloat16, replace(found, parts=(), hash="apart")
    )


def test_the_slowest_profile_has_the_worst_figures_and_only_common_entries() -> None:
    found = slowest_of((MEASURED, A100))
    assert found.device_memory_bytes == min(MEASURED.device_memory_bytes, A100.device_memory_bytes)
    assert (
        found.memory_bandwidth_bytes_per_s
        == A100.memory_bandwidth_bytes_per_s
        < MEASURED.memory_bandwidth_bytes_per_s
    )
    assert found.overlap_slowdown == max(MEASURED.overlap_slowdown, A100.overlap_slowdown)
    assert MEASURED.kernels and not A100.kernels and not found.kernels, (
        "a kernel that one device lacks runs on no device"
    )
    assert set(found.peak_flops_per_s) == set(MEASURED.peak_flops_per_s) & set(
        A100.peak_flops_per_s
    )
    assert (
        found.host is not None
        and A100.host is not None
        and found.host.bandwidth_bytes_per_s == A100.host.bandwidth_bytes_per_s
    )
    assert slowest_of((MEASURED, PROFILES["cpu-gloo"])).host is None, (
        "nothing is known of one of the hosts"
    )


def test_the_slowest_of_equal_devices_is_one_of_them_and_others_have_distinct_hashes() -> None:
    assert (
        slowest_of((H100, H100)) == H100 == slowest(Mixed("a", (H100, H100)))
        and not slowest_of((H100, H100)).parts
    )
    hashes = {
        p.hash for p in (H100, A100, slowest_of((H100, A100)), slowest_of((H100, A100, MEASURED)))
    }
    assert len(hashes) == 4
    assert Mixed("stage", (H100, A100)).hash != Mixed("stage", (A100, H100)).hash


def test_a_faster_link_of_the_slowest_profile_is_faster_on_each_of_its_parts() -> None:
    found = slowest_of((H100, A100))
    moved = Collective("all_gather", 0, 0, -1, "", "bfloat16", 2**28)
    before, after = (
        collective_time(moved, 8, "intra", p) for p in (found, with_faster(found, "intra", 1.0))
    )
    assert after == max(
        collective_time(moved, 8, "intra", with_faster(p, "intra", 1.0)) for p in (H100, A100)
    )
    assert 0.45 * before < after < 0.6 * before


def test_stages_use_their_own_profile_and_other_axes_the_slowest_one() -> None:
    mixed = Mixed("stage", (H100, A100))
    assert [profile_of(mixed, "stage", stage) for stage in range(5)] == [
        H100,
        A100,
        H100,
        A100,
        H100,
    ]
    assert (
        profile_of(mixed, "gpu", 0) == profile_of(mixed, "", 0) == slowest_of((H100, A100)) != A100
    )
    assert profile_of(H100, "stage", 1) is H100


def test_transfers_between_stages_have_the_worse_link_of_both_ends() -> None:
    mesh, mixed = autopar.Mesh({"stage": 3, "gpu": 2}), Mixed("stage", (H100, H100, A100))
    first, second, last = (Crossing.links_along("stage", mesh, mixed, stage) for stage in range(3))
    fast, slow = H100.links["inter"], A100.links["inter"]
    assert fast.bandwidth_bytes_per_s > slow.bandwidth_bytes_per_s
    assert (
        first.behind == second.before
        and first.behind.bandwidth_bytes_per_s == fast.bandwidth_bytes_per_s
    )
    assert (
        second.behind == last.before
        and second.behind.bandwidth_bytes_per_s == slow.bandwidth_bytes_per_s
    )
    assert second.behind.latency_s == max(fast.latency_s, slow.latency_s)
    assert Crossing.links_along("stage", mesh, H100) == Crossing.links_along(
        "stage", mesh, Mixed("stage", (H100,) * 3), 1
    )


def test_hardware_may_be_a_mapping_a_text_or_profiles() -> None:
    wanted = Mixed("stage", (H100, A100))
    assert (
        as_hardware({"stage": ["h100-sxm", A100]}, MESH)
        == as_hardware("stage=h100-sxm, a100-sxm-80gb", MESH)
        == wanted
    )
    assert as_hardware(wanted, MESH) == wanted and wanted.name == "stage=h100-sxm,a100-sxm-80gb"
    assert as_hardware("h100-sxm", 8) == H100 and as_hardware(H100, MESH) is H100


WRONG: Mapping[str, tuple[Any, Any, str, str]] = {
    "too few": (
        {"stage": ["h100-sxm"]},
        MESH,
        "has 1 profile along 'stage', but mesh stage=2,gpu=4 has 2 devices",
        "pass 2",
    ),
    "too many": (
        "stage=h100-sxm,h100-sxm,h100-sxm",
        MESH,
        "has 3 profiles along 'stage'",
        "one per index",
    ),
    "no such axis": (
        {"node": ["h100-sxm", "h100-sxm"]},
        MESH,
        "along 'node', but mesh stage=2,gpu=4 has no such axis",
        "stage, gpu",
    ),
    "a count": (
        {"stage": ["h100-sxm", "h100-sxm"]},
        8,
        "the planner chooses the axes of the mesh",
        'Mesh({"stage": 2',
    ),
    "nodes and devices": (
        "node=h100-sxm,h100-sxm",
        (2, 4),
        "the planner chooses the axes of the mesh",
        "pass a mesh",
    ),
    "two axes": (
        {"stage": ["h100-sxm"] * 2, "gpu": ["h100-sxm"] * 4},
        MESH,
        "along 'stage' and 'gpu'",
        "one axis",
    ),
    "no axis": ({}, MESH, "along no axis", "one axis"),
    "one text": (
        {"stage": "h100-sxm"},
        MESH,
        "'h100-sxm' along 'stage', which is not a list",
        "one axis of the mesh",
    ),
    "a number": (
        {"stage": [1, 2]},
        MESH,
        "has 1 along 'stage', which is not a profile",
        "one axis of the mesh",
    ),
    "no mapping": (["h100-sxm"], MESH, "is not a profile", "the name of a profile"),
    "an unknown name": (
        {"stage": ["h100-sxm", "b300"]},
        MESH,
        "hardware profile 'b300' does not exist",
        "the name of a profile",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_invalid_hardware_for_the_mesh_is_refused_with_a_remedy(case: str) -> None:
    hardware, mesh, what, remedy = WRONG[case]
    with pytest.raises(HardwareError) as refused:
        as_hardware(hardware, mesh)
    assert what in refused.value.what and remedy in refused.value.remedy


def test_compile_for_unequal_devices_needs_a_mesh() -> None:
    model, batch = torch.nn.Linear(4, 4), {"input": torch.randn(4, 4)}
    with pytest.raises(HardwareError, match="the planner chooses the axes of the mesh"):
        autopar.compile(model, example_inputs=batch, hardware={"stage": ["cpu-gloo"]})
