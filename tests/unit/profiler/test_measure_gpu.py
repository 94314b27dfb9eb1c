"""Measuring a GPU, as far as it goes without one: what is run, what becomes of points, where
links come from."""

from __future__ import annotations

import json
import os
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from autopar import ops
from autopar.analysis.work import work
from autopar.api import default_hardware
from autopar.api.arguments import kind_of
from autopar.core.hardware import FLOP_KINDS, MEMORY_KINDS, HardwareProfile
from autopar.cost.op_times import compute_time
from autopar.cost.priced import OPTIMIZERS
from autopar.errors import HardwareError
from autopar.profiler import measure as measuring
from autopar.profiler import worker
from autopar.profiler.measure import measure
from autopar.profiler.worker import (
    CPU,
    DEVICE_ROUNDS,
    GPU,
    Sizes,
    compute_measurements,
    group_points,
    measure_alone,
)

TINY = Sizes(
    matmuls={"float32": ((4, 8, 16),), "bfloat16": ((4, 8, 16),)},
    attentions={"float32": ((1, 2, 8, 8),), "bfloat16": ((1, 2, 8, 8),)},
    numels=(64, 256),
    row=32,
)
CHIP = "NVIDIA H200"


def points_of(sizes: Sizes) -> dict[str, list[dict[str, Any]]]:
    found = list(compute_measurements(sizes))
    return group_points(found, [1e-6 * (i + 1) for i in range(len(found))])


@pytest.fixture
def gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with one GPU, whose every measurement is made up; its folder of profiles."""

    def run_workers(device: str, world_size: int, folder: Path) -> Any:
        assert (device, world_size) == ("cuda", 1)
        return {**points_of(GPU), "host": [{"step_bytes_per_s": 3e11, "copy_bytes_per_s": 5e10}]}

    monkeypatch.setenv("AUTOPAR_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index=0: CHIP)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda index: SimpleNamespace(name=CHIP, total_memory=150_754_820_097),
    )
    monkeypatch.setattr(measuring, "_run_workers", run_workers)
    return tmp_path


@pytest.mark.parametrize("sizes", [CPU, GPU], ids=["cpu", "gpu"])
def test_sizes_grow_and_every_dtype_has_matmul_and_attention(sizes: Sizes) -> None:
    assert sizes.matmuls.keys() == sizes.attentions.keys()
    for shapes in (*sizes.matmuls.values(), *sizes.attentions.values()):
        assert all(
            torch.Size(low).numel() < torch.Size(high).numel() for low, high in pairwise(shapes)
        )
    assert all(low < high for low, high in pairwise(sizes.numels))
    assert all(numel % min(numel, sizes.row) == 0 for numel in sizes.numels)


def test_no_side_of_a_gpus_product_falls() -> None:
    for shapes in GPU.matmuls.values():
        assert all(a <= b for low, high in pairwise(shapes) for a, b in zip(low, high, strict=True))


def test_what_is_run_counts_as_the_cost_model_counts_it() -> None:
    counted = {
        (kind, point.get("dtype", "")): point for kind, point, _ in compute_measurements(TINY)
    }
    aten, q, x, weight = (
        torch.ops.aten,
        torch.empty(1, 2, 8, 8),
        torch.empty(8, 32),
        torch.empty(32),
    )
    ids, lse = torch.empty(8, dtype=torch.int64), torch.empty(1, 2, 8)
    still = (None, False, 1.0)
    forward = work(ops.attention, (q, q, q, *still), {}, (q, q, q), (q, lse))
    backward = work(
        ops.attention_backward, (q, q, q, q, q, lse, *still), {}, (q, q, q, q, q, lse), (q, q, q)
    )
    assert counted["attention", "float32"]["flops"] == forward.flops
    assert counted["attention_backward", "float32"]["flops"] == backward.flops
    assert counted["elementwise", ""]["bytes"] == work(aten.add.Tensor, (), {}, (x, x), (x,)).bytes
    assert (
        counted["transcendental", ""]["bytes"] == work(aten.gelu.default, (), {}, (x,), (x,)).bytes
    )
    assert (
        counted["indexing", ""]["bytes"] == work(ops.embedding, (x, ids), {}, (x, ids), (x,)).bytes
    )
    norm = work(aten.native_layer_norm.default, (), {}, (x, weight, weight), (x,)).bytes
    assert counted["reduction", ""]["bytes"] == norm - 8 * weight.numel(), "weights are left out"


def test_one_process_measures_whatever_device_it_is_given(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker, "GPU", TINY)
    monkeypatch.setattr(
        worker, "measure_host", partial(worker.measure_host, numel=2**12, copy_bytes=2**12)
    )
    points = worker._alone("cpu")
    assert points.keys() == {*FLOP_KINDS, *MEMORY_KINDS, "host"} and len(points.pop("host")) == 1
    assert all(p["time_s"] > 0 for found in points.values() for p in found)
    num = DEVICE_ROUNDS * sum(map(len, points.values())) + 1
    said = capsys.readouterr().out.splitlines()  # among what else this process says
    assert said.count(f"total {num}") == 1 and said.count("measured") == num


def test_a_time_is_the_median_of_rounds_and_a_third_of_a_layers_products(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([9.0, 1.0, 3.0])
    monkeypatch.setattr(worker, "_back_to_back_s", lambda *_: next(times))
    compute = [next(compute_measurements(TINY))]
    assert group_points(compute, measure_alone(compute, "cpu")) == {
        "matmul": [{"m": 4, "n": 8, "k": 16, "dtype": "float32", "time_s": 1.0}]
    }


def test_a_measured_gpu_is_a_profile_that_loads_as_local_and_prices_ops(gpu: Path) -> None:
    profile = measure("cuda")
    assert HardwareProfile.load("local") == profile
    assert (profile.name, profile.device_type, profile.device_memory_bytes) == (
        "local",
        "cuda",
        150_754_820_097,
    )
    assert set(profile.curves) == {(k, d) for k in FLOP_KINDS for d in GPU.matmuls} | {
        (k, "") for k in MEMORY_KINDS
    }
    x = torch.empty(2**20, device="meta")
    addition = work(torch.ops.aten.add.Tensor, (), {}, (x, x), (x,))
    assert compute_time(addition, torch.float32, profile) == profile.curves[
        "elementwise", ""
    ].time_s(12 * 2**20)


def test_its_links_are_word_for_word_those_of_its_chip_and_all_else_was_measured(gpu: Path) -> None:
    profile, base = measure("cuda"), HardwareProfile.load("h200-sxm")
    assert "links, and what they cost compute, are those of h200-sxm" in profile.description
    taken = {
        path
        for path in profile.figures
        if path.startswith(("links.", "overlap_slowdown", "host.latency_s"))
    }
    assert taken and all(profile.figures[path] == base.figures[path] for path in taken)
    names = ("links", "overlap_slowdown", "kernels")
    assert [getattr(profile, name) for name in names] == [getattr(base, name) for name in names]
    for path in profile.figures.keys() - taken:
        assert profile.figures[path].source.startswith(
            'measured by autopar.profiler.measure.measure(device="cuda"): NVIDIA H200'
        ), path


def test_each_gpu_has_its_share_of_the_host_as_it_was_measured(gpu: Path) -> None:
    measured, base = measure("cuda"), HardwareProfile.load("h200-sxm")
    host = measured.host
    assert host is not None and base.host is not None
    assert (host.memory_bandwidth_bytes_per_s, host.bandwidth_bytes_per_s, host.latency_s) == (
        7.5e10,
        5e10,
        base.host.latency_s,
    )
    assert host.memory_bytes == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 4
    source = measured.figures["host.memory_bandwidth_bytes_per_s"].source
    assert source.endswith("; fused AdamW on all cores; shared evenly by 4 GPUs")


def test_what_a_host_reaches_is_counted_as_steps_are_priced_and_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    found = worker.measure_host("cpu", numel=2**12, copy_bytes=2**12)
    assert found.keys() == {"step_bytes_per_s", "copy_bytes_per_s"} and all(
        value > 0 for value in found.values()
    )
    assert OPTIMIZERS["adamw"][1] == worker.STEP_PASSES and torch.get_num_threads() == before


def test_links_may_be_those_of_another_profile_with_its_kernels(gpu: Path) -> None:
    data = HardwareProfile.read("a100-sxm-80gb")
    data["kernels"] = {
        "all_gather_matmul": {
            "value": 0.5,
            "unit": "1",
            "source": "of a test",
            "date": "2026-11-22",
        }
    }
    (gpu / "mine.json").write_text(json.dumps(data))
    profile = measure("cuda", links=gpu / "mine.json", out=gpu / "out.json")
    assert profile.links == HardwareProfile.load("a100-sxm-80gb").links
    assert profile.kernels == {"all_gather_matmul": 0.5}
    assert "mine.json" in profile.figures["launch_overhead_s"].source


def test_links_of_nowhere_are_refused_before_anything_is_measured(
    gpu: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(measuring, "_run_workers")
    with pytest.raises(HardwareError, match="hardware profile 'abacus' does not exist"):
        measure("cuda", links="abacus")


def test_without_a_gpu_there_is_nothing_to_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(HardwareError, match=r"no CUDA device(.|\n)*what to do"):
        measure("cuda")


def _put(home: Path, device_type: str | None) -> None:
    data = {
        name: field
        for name, field in HardwareProfile.read("cpu-gloo").items()
        if name != "device_type"
    }
    (home / "local.json").write_text(
        json.dumps(data if device_type is None else {**data, "device_type": device_type})
    )


@pytest.mark.parametrize(
    ("local", "model", "expected"),
    [
        (None, "cuda", "local"),
        (None, "cpu", "local"),
        ("cuda", "cuda", "local"),
        ("cuda", None, "local"),
        ("cuda", "cpu", "cpu-gloo"),
        ("cpu", "cuda", "h200-sxm"),
        ("cpu", None, "h200-sxm"),
        ("cpu", "cpu", "local"),
    ],
)
def test_what_was_measured_serves_models_on_that_kind_of_device(
    gpu: Path, local: str | None, model: str | None, expected: str
) -> None:
    _put(gpu, local)
    assert default_hardware(model) == expected


@pytest.mark.parametrize(
    ("weights", "batch", "expected"),
    [
        ("cpu", ("cpu",), "cpu"),
        ("cpu", ("cuda",), "cuda"),
        ("cuda", ("cpu",), "cuda"),
        ("cpu", ("cpu", "cuda"), "cpu"),
        ("cpu", (), "cpu"),
        ("cuda", ("cuda",), "cuda"),
        ("meta", ("cuda",), None),
        ("cpu", ("meta",), "cpu"),
    ],
)
def test_weights_on_the_cpu_go_where_the_batch_is(
    weights: str, batch: tuple[str, ...], expected: str | None
) -> None:
    with FakeTensorMode():
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.empty(2, device=weights))])
        assert (
            kind_of(model, ([torch.empty(2, 2, device=device) for device in batch], {"flag": True}))
            == expected
        )


def test_without_a_gpu_weights_on_meta_take_whatever_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_HOME", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert default_hardware() == "cpu-gloo"
    _put(tmp_path, "cuda")
    assert (default_hardware(), default_hardware("cpu")) == ("local", "cpu-gloo")


def test_an_unknown_kind_of_device_is_refused() -> None:
    with pytest.raises(HardwareError, match="device_type must be one of cpu, cuda, got 'abacus'"):
        HardwareProfile.from_json({**HardwareProfile.read("cpu-gloo"), "device_type": "abacus"})
