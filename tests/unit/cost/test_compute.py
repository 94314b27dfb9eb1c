"""The time of an op on a profile."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.analysis.work import Work, WorkKind
from autopar.core.hardware import FLOP_KINDS, MEMORY_KINDS, HardwareProfile
from autopar.cost.op_times import compute_time
from autopar.errors import HardwareError

H100 = HardwareProfile.load("h100-sxm")
LOCAL = HardwareProfile.load("cpu-gloo")


def test_a_view_takes_no_time() -> None:
    assert compute_time(Work(0, 10**9, "view"), torch.bfloat16, H100) == 0.0


def test_a_large_matmul_runs_at_the_profile_s_efficiency() -> None:
    flops = 2 * 16384**3
    rate = flops / compute_time(Work(flops, 3 * 2 * 16384**2, "matmul"), torch.bfloat16, H100)
    assert rate == pytest.approx(0.75 * 989.4e12, rel=0.01)


def test_a_matmul_of_the_half_size_runs_at_half_that_speed() -> None:
    half = H100.matmul_half_flops
    time_s = (
        compute_time(Work(int(half), 0, "matmul"), torch.bfloat16, H100) - H100.launch_overhead_s
    )
    assert half / time_s == pytest.approx(0.75 * 989.4e12 / 2, rel=1e-6)


def test_a_thin_matmul_is_bound_by_memory() -> None:
    """A matrix of 1 GiB times a vector."""
    num_bytes = 2**30
    time_s = compute_time(Work(num_bytes, num_bytes, "matmul"), torch.bfloat16, H100)
    assert time_s == pytest.approx(num_bytes / (0.8 * 3.35e12), rel=0.01)


def test_an_elementwise_op_takes_its_bytes_over_the_bandwidth_and_the_launch() -> None:
    time_s = compute_time(Work(0, 2**30, "elementwise"), torch.float32, H100)
    assert time_s == pytest.approx(2**30 / (0.8 * 3.35e12) + H100.launch_overhead_s)


@pytest.mark.parametrize("kind", FLOP_KINDS)
def test_half_precision_is_faster_than_single_on_a_gpu(kind: WorkKind) -> None:
    work = Work(10**12, 0, kind)
    assert compute_time(work, torch.bfloat16, H100) < compute_time(work, "float32", H100)


def test_a_dtype_the_profile_does_not_know_is_refused_only_where_it_matters() -> None:
    with pytest.raises(HardwareError, match="no peak_flops_per_s for int64"):
        compute_time(Work(1, 1, "matmul"), torch.int64, H100)
    assert compute_time(Work(0, 1, "elementwise"), torch.int64, H100) > 0


def test_measured_points_are_met() -> None:
    curve = LOCAL.curves["matmul", "float32"]
    flops, time_s = curve.sizes[-1], curve.times[-1]
    assert compute_time(Work(int(flops), 0, "matmul"), torch.float32, LOCAL) == pytest.approx(
        time_s
    )


amounts = st.tuples(st.integers(0, 2**50), st.integers(0, 2**40))


@given(
    first=amounts,
    second=amounts,
    kind=st.sampled_from([*FLOP_KINDS, *MEMORY_KINDS]),
    name=st.sampled_from(HardwareProfile.names()),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
)
def test_more_flops_or_bytes_never_take_less_time(
    first: tuple[int, int], second: tuple[int, int], kind: WorkKind, name: str, dtype: torch.dtype
) -> None:
    profile = HardwareProfile.load(name)
    less, more = tuple(map(min, first, second)), tuple(map(max, first, second))
    fast, slow = (
        compute_time(Work(flops, num_bytes, kind), dtype, profile)
        for flops, num_bytes in (less, more)
    )
    assert 0 < fast <= slow * (1 + 1e-12)
    assert math.isfinite(slow)
