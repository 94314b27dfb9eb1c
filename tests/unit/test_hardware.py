"""Hardware profiles: shipped profiles load, and damaged profiles are refused with the field."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from autopar.core.hardware import FLOP_KINDS, LINKS, MEMORY_KINDS, Curve, HardwareProfile
from autopar.errors import HardwareError

SHIPPED = (
    "a100-sxm-40gb",
    "a100-sxm-80gb",
    "cpu-gloo",
    "h100-sxm",
    "h100-sxm-measured",
    "h200-sxm",
    "h200-sxm-measured",
)


@pytest.fixture
def data() -> dict[str, Any]:
    path = Path(__file__).parents[2] / "cost_models" / "h100-sxm.json"
    return json.loads(path.read_text(encoding="utf-8"))


def test_the_names_of_the_shipped_profiles() -> None:
    assert HardwareProfile.names() == SHIPPED


@pytest.mark.parametrize("name", SHIPPED)
def test_every_figure_of_a_shipped_profile_has_a_unit_a_source_and_a_date(name: str) -> None:
    profile = HardwareProfile.load(name)
    assert profile.name == name
    assert all(f.unit and len(f.source) > 20 and f.date for f in profile.figures.values())
    for kind in FLOP_KINDS:
        assert profile.efficiency[kind].keys() == profile.peak_flops_per_s.keys()
    assert profile.memory_efficiency.keys() == set(MEMORY_KINDS)
    assert tuple(profile.links) == LINKS


def test_the_h100_profile_matches_the_data_sheet() -> None:
    profile = HardwareProfile.load("h100-sxm")
    assert profile.device_memory_bytes == 80_000_000_000
    assert profile.memory_bandwidth_bytes_per_s == 3.35e12
    assert profile.peak_flops_per_s["bfloat16"] == 989.4e12


def test_the_efficiency_of_large_matmuls_stays_below_the_best_published_shape() -> None:
    best = {"h100-sxm": 794.5e12, "h200-sxm": 794.5e12, "a100-sxm-80gb": 271.2e12}
    for name, flops_per_s in best.items():
        profile = HardwareProfile.load(name)
        assert (
            profile.peak_flops_per_s["bfloat16"] * profile.efficiency["matmul"]["bfloat16"]
            < flops_per_s
        )


def test_the_link_between_nodes_is_slower_than_the_link_within_a_node() -> None:
    for name in ("h100-sxm", "h200-sxm", "a100-sxm-80gb"):
        links = HardwareProfile.load(name).links
        assert links["inter"].bandwidth_bytes_per_s < links["intra"].bandwidth_bytes_per_s
        assert links["inter"].latency_s > links["intra"].latency_s


def test_a_profile_loads_from_a_path_and_equals_the_named_one(
    tmp_path: Path, data: dict[str, Any]
) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(data))
    assert (
        HardwareProfile.load(path)
        == HardwareProfile.load(str(path))
        == HardwareProfile.load("h100-sxm")
    )


def test_the_hash_changes_with_any_figure(data: dict[str, Any]) -> None:
    before = HardwareProfile.from_json(data)
    data["links"]["inter"]["latency_s"]["value"] *= 2
    after = HardwareProfile.from_json(data)
    assert before.hash != after.hash
    assert before != after


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(HardwareError, match=", ".join((*SHIPPED, "local"))):
        HardwareProfile.load("h1000")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(HardwareError, match=r"nowhere\.json"):
        HardwareProfile.load(tmp_path / "nowhere.json")


def test_a_missing_local_profile_is_refused_with_the_command_that_measures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AUTOPAR_HOME", str(tmp_path))
    with pytest.raises(HardwareError, match="autopar profile"):
        HardwareProfile.load("local")


def test_the_profile_of_a_measured_machine_is_named_local(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: dict[str, Any]
) -> None:
    monkeypatch.setenv("AUTOPAR_HOME", str(tmp_path))
    (tmp_path / "local.json").write_text(json.dumps(data))
    assert HardwareProfile.load("local").device_memory_bytes == 80_000_000_000


def test_a_profile_that_is_not_json_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(HardwareError, match="not JSON"):
        HardwareProfile.load(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("value", "complaint"),
    [
        ("[" * 5000, "nested more than 100 levels deep"),
        ("9" * 400, "with 400 digits has more than 64 bits"),
        ("-" + "9" * 5000, "with 5000 digits has more than 64 bits"),
        ("1e999", "number 1e999 is too large"),
        ("Infinity", "Infinity is not a JSON number"),
    ],
)
def test_a_profile_that_is_too_deep_or_has_too_large_numbers_is_refused(
    value: str, complaint: str, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text('{"device_memory_bytes": {"value": ' + value + "}}")
    with pytest.raises(HardwareError, match=rf"not JSON.*{complaint}(.|\n)*a\.json"):
        HardwareProfile.load(tmp_path / "a.json")


def test_an_integer_beyond_the_range_of_floats_is_refused_with_its_field(
    data: dict[str, Any],
) -> None:
    data["device_memory_bytes"]["value"] = 10**400
    with pytest.raises(HardwareError, match=r"device_memory_bytes\.value must be a number"):
        HardwareProfile.from_json(data)


def _set(*path: str | int, value: Any) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        data[path[-1]] = value

    return change


def _drop(*path: str | int) -> Callable[[Any], None]:
    def change(data: Any) -> None:
        for key in path[:-1]:
            data = data[key]
        del data[path[-1]]

    return change


POINTS = ("links", "intra", "measured", "all_reduce", "points")
DAMAGE = [
    (_set("format", value="something"), "format"),
    (_set("version", value=99), "format"),
    (_set("name", value=""), "name"),
    (_drop("launch_overhead_s"), "launch_overhead_s is missing"),
    (_set("device_memory_bytes", value=80), "device_memory_bytes must be an object"),
    (
        _set("device_memory_bytes", "value", value="80 GB"),
        "device_memory_bytes.value must be a number",
    ),
    (
        _set("device_memory_bytes", "value", value=True),
        "device_memory_bytes.value must be a number",
    ),
    (_set("device_memory_bytes", "value", value=0), "device_memory_bytes.value must be above 0"),
    (_set("device_memory_bytes", "unit", value="GB"), "device_memory_bytes.unit must be 'bytes'"),
    (_set("device_memory_bytes", "source", value=""), "device_memory_bytes.source"),
    (
        _set("device_memory_bytes", "date", value="last year"),
        "device_memory_bytes.date must be a date",
    ),
    (
        _set("device_memory_bytes", "note", value="x"),
        "device_memory_bytes.note is not a known field",
    ),
    (_drop("peak_flops_per_s"), "peak_flops_per_s is missing"),
    (_drop("efficiency", "matmul", "bfloat16"), "efficiency.matmul.bfloat16 is missing"),
    (_drop("efficiency", "indexing"), "efficiency.indexing is missing"),
    (
        _set("efficiency", "elementwise", "value", value=1.2),
        "efficiency.elementwise.value must be between 1e-06 and 1, got 1.2",
    ),
    # numbers that no device has, and with which sums or quotients are not finite
    (
        _set("efficiency", "elementwise", "value", value=5e-324),
        "efficiency.elementwise.value must be between 1e-06 and 1",
    ),
    (
        _set("device_memory_bytes", "value", value=5e-324),
        r"device_memory_bytes.value must be between 1 and 1e\+30",
    ),
    (
        _set("memory_bandwidth_bytes_per_s", "value", value=1e-300),
        r"memory_bandwidth_bytes_per_s.value must be between 1 and 1e\+30",
    ),
    (
        _set("launch_overhead_s", "value", value=1e308),
        r"launch_overhead_s.value must be between 1e-12 and 100000",
    ),
    (
        _set(*POINTS, 3, "time_s", value=1e308),
        r"all_reduce.points\[3\].time_s must be between 1e-12 and 100000",
    ),
    (
        _set(*POINTS, 3, "num_devices", value=0.5),
        r"all_reduce.points\[3\].num_devices must be between 1 and 1e\+30",
    ),
    (_drop("links", "inter"), "links.inter is missing"),
    (_set("links", "moon", value={}), "links.moon is not a known field"),
    (
        _set("links", "inter", "latency_s", "value", value=-1),
        "links.inter.latency_s.value must be 0 or more",
    ),
    (
        _set("links", "intra", "measured", "gossip", value={}),
        "links.intra.measured.gossip is not a known field",
    ),
    (_set(*POINTS, value=[]), "links.intra.measured.all_reduce.points must be a non-empty list"),
    (_set(*POINTS, 3, "time_s", value=0), r"all_reduce.points\[3\].time_s must be above 0"),
    (_drop(*POINTS, 3, "bytes"), r"all_reduce.points\[3\].bytes must be a number"),
    (_set("memory", value=1), "memory is not a known field"),
    (
        _set("kernels", value={"matmul_all_reduce": {}}),
        "kernels.matmul_all_reduce is not a known field",
    ),
    (
        _set("kernels", value={"all_gather_matmul": {}}),
        "kernels.all_gather_matmul.value must be a number",
    ),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_a_damaged_profile_is_refused_with_the_field(
    data: dict[str, Any], damage: Callable[[Any], None], message: str
) -> None:
    damaged = copy.deepcopy(data)
    damage(damaged)
    with pytest.raises(HardwareError, match=message):
        HardwareProfile.from_json(damaged, where="mine.json")


def test_a_profile_that_is_not_a_json_object_is_refused() -> None:
    with pytest.raises(HardwareError, match="must be an object, got list"):
        HardwareProfile.from_json([])


def test_a_curve_interpolates_its_points_and_extrapolates_latency_and_bandwidth() -> None:
    curve = Curve.curve_through([(100.0, 2.0), (10.0, 1.0)])
    assert [curve.time_s(x) for x in (1, 10, 100, 1000)] == [1.0, 1.0, 2.0, 20.0]
    assert math.isclose(curve.time_s(math.sqrt(1000)), math.sqrt(2))


positive = st.floats(1e-3, 1e12)


@given(
    points=st.lists(st.tuples(positive, positive), min_size=1, max_size=8),
    sizes=st.lists(positive, min_size=2, max_size=8),
)
def test_a_curve_of_noisy_points_is_monotonic(
    points: list[tuple[float, float]], sizes: list[float]
) -> None:
    curve = Curve.curve_through(points)
    times = [curve.time_s(size) for size in sorted(sizes)]
    assert all(a <= b * (1 + 1e-12) for a, b in pairwise(times))


def test_a_profile_may_have_kernel_figures_and_has_none_by_default(
    data: dict[str, Any],
) -> None:
    assert [name for name in SHIPPED if HardwareProfile.load(name).kernels] == [
        "h100-sxm-measured",
        "h200-sxm-measured",
    ]
    figure = {
        "value": 0.85,
        "unit": "1",
        "source": "a measurement of ours, on a device of this kind",
        "date": "2026-11-22",
    }
    profile = HardwareProfile.from_json({**data, "kernels": {"all_gather_matmul": figure}})
    assert profile.kernels == {"all_gather_matmul": 0.85}
    assert profile.figures[
        "kernels.all_gather_matmul"
    ].value == 0.85 and profile != HardwareProfile.load("h100-sxm")
