"""Measuring a GPU: the profile loads, has a sensible order of magnitude, and is used by plans."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from native import needs_gpu

import autopar
from autopar.api import default_hardware
from autopar.core.hardware import FLOP_KINDS, MEMORY_KINDS, HardwareProfile
from autopar.profiler.measure import measure
from autopar.profiler.worker import GPU
from benchmarks import zoo

pytestmark = [pytest.mark.gpu, needs_gpu]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("home")
        patch.setenv("AUTOPAR_HOME", str(folder))
        yield folder


@pytest.fixture(scope="module")
def profile(home: Path) -> HardwareProfile:
    return measure("cuda")


def test_measured_profile_loads_as_local_and_is_the_default_for_gpus(
    profile: HardwareProfile,
) -> None:
    assert HardwareProfile.load("local") == profile
    assert (default_hardware("cuda"), default_hardware(), default_hardware("cpu")) == (
        "local",
        "local",
        "cpu-gloo",
    )
    assert profile.device_memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert set(profile.curves) == {(k, d) for k in FLOP_KINDS for d in GPU.matmuls} | {
        (k, "") for k in MEMORY_KINDS
    }


def test_half_precision_products_are_faster_than_float32(profile: HardwareProfile) -> None:
    for half in ("bfloat16", "float16"):
        assert profile.peak_flops_per_s[half] > profile.peak_flops_per_s["float32"]
        assert profile.curves["attention", half].time_s(1e11) < profile.curves[
            "attention", "float32"
        ].time_s(1e11)


def test_times_increase_with_work_on_a_busy_device(profile: HardwareProfile) -> None:
    for (kind, dtype), curve in profile.curves.items():
        assert curve.times[-2] < curve.times[-1], (kind, dtype)


def test_large_ops_take_more_than_five_times_as_long_as_small_ops(profile: HardwareProfile) -> None:
    for kind in MEMORY_KINDS:
        curve = profile.curves[kind, ""]
        assert curve.times[-1] > 5 * curve.times[0], kind
    assert (
        profile.curves["matmul", "bfloat16"].times[-1]
        > 5 * profile.curves["matmul", "bfloat16"].times[0]
    )


def test_figures_have_the_order_of_magnitude_of_gpus(profile: HardwareProfile) -> None:
    assert 1e-6 < profile.launch_overhead_s < 1e-3
    assert 1e11 < profile.memory_bandwidth_bytes_per_s < 2e13
    assert 1e12 < profile.peak_flops_per_s["bfloat16"] < 1e16


def test_links_are_taken_from_the_profile_of_the_chip(profile: HardwareProfile) -> None:
    assert (
        profile.links
        == HardwareProfile.load(HardwareProfile.of_gpu(torch.cuda.get_device_name(0))[0]).links
    )


def test_model_on_the_gpu_is_planned_with_the_measured_profile(profile: HardwareProfile) -> None:
    model, batch = zoo.build("gpt2")
    plan = autopar.plan(
        model.cuda(),
        autopar.Mesh({"gpu": 2}),
        example_inputs={name: x.cuda() for name, x in batch.items()},
    )
    assert plan.fingerprint.profile_hash == profile.hash
