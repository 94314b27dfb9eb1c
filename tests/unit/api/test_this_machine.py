"""Without a hardware argument, the plan is for the GPU of this machine: with the times of its
profile if one exists, and within its memory."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from autopar.api import arguments, default_hardware
from autopar.api.arguments import within_this_gpu
from autopar.core.hardware import HardwareProfile
from autopar.planner import PlanOptions


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A simulated GPU of this machine without a measured local profile."""
    made = SimpleNamespace(name="", total_memory=0)
    monkeypatch.setenv("AUTOPAR_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: made.name)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: made)
    monkeypatch.setattr(arguments, "_warned", set())
    return made


@pytest.mark.parametrize(
    ("name", "profile", "is_its_own"),
    [
        ("NVIDIA H100 80GB HBM3", "h100-sxm", True),
        ("NVIDIA H200", "h200-sxm", True),
        ("NVIDIA A100-SXM4-80GB", "a100-sxm-80gb", True),
        ("NVIDIA A100-SXM4-40GB", "a100-sxm-40gb", True),
        ("NVIDIA H100 PCIe", "h100-sxm", False),
        ("NVIDIA H200 NVL", "h200-sxm", False),
        ("NVIDIA GH200 480GB", "h200-sxm", False),
        ("NVIDIA A100 80GB PCIe", "a100-sxm-80gb", False),
        ("NVIDIA GeForce RTX 4090", "h100-sxm", False),
        ("NVIDIA B200", "h100-sxm", False),
        ("NVIDIA H20", "h100-sxm", False),
    ],
)
def test_a_gpu_without_a_profile_is_reported_once(
    name: str,
    profile: str,
    is_its_own: bool,
    gpu: SimpleNamespace,
    caplog: pytest.LogCaptureFixture,
) -> None:
    gpu.name = name
    assert HardwareProfile.of_gpu(name) == (profile, is_its_own)
    assert [default_hardware("cuda") for _ in range(2)] == [profile] * 2
    said = [record.getMessage().partition(". ")[0] for record in caplog.records]
    assert said == [f"no profile for {name}; using the times of {profile}"] * (not is_its_own)


def test_a_profile_that_other_users_can_write_is_not_the_default(
    gpu: SimpleNamespace, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gpu.name = "NVIDIA H200"
    path = HardwareProfile.local_path()
    path.write_bytes(
        Path(arguments.__file__).parents[1].joinpath("cost_models", "cpu-gloo.json").read_bytes()
    )
    assert default_hardware("cpu") == "local"
    path.chmod(0o666)
    assert default_hardware("cpu") == "cpu-gloo" and "other users can write" in caplog.text
    path.chmod(0o600)
    tmp_path.chmod(0o777)
    assert default_hardware("cpu") == "cpu-gloo"


def test_the_default_memory_budget_is_limited_to_the_memory_of_the_gpu(
    gpu: SimpleNamespace, caplog: pytest.LogCaptureFixture
) -> None:
    profile, asked = HardwareProfile.load("h100-sxm"), PlanOptions(memory_bytes=10**9)
    gpu.total_memory = 24 * 2**30
    assert within_this_gpu(PlanOptions(), profile).memory_bytes == int(0.9 * 24 * 2**30)
    assert within_this_gpu(asked, profile) is asked, "a budget that was asked for is taken"
    assert within_this_gpu(PlanOptions(), HardwareProfile.load("cpu-gloo")).memory_bytes is None
    (said,) = [record.getMessage() for record in caplog.records]
    assert (
        said == "h100-sxm has 74.5 GiB of memory, this GPU has 24.0 GiB:"
        " planning with a budget of 21.6 GiB"
    )
    gpu.total_memory = profile.device_memory_bytes
    assert within_this_gpu(PlanOptions(), profile).memory_bytes is None
