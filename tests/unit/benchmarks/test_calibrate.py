"""The calibration of matmul efficiencies with published runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from autopar.constraints import megatron
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import AutoparError
from benchmarks import tables
from benchmarks.calibrate import (
    CHIPS,
    PROFILES,
    at_efficiency,
    best_efficiency,
    fit,
    is_fitted,
    source_of,
    table_of,
    write,
)
from benchmarks.published import _planned, with_matmuls
from benchmarks.runs import RUNS, Setup, why_skipped

A100 = CHIPS[0]


def runs(efficiency: float, **more: Any) -> list[dict[str, Any]]:
    """Return rows predicted with a matmul efficiency of 0.8 and measured with `efficiency`. They
    include fitted and held-out models."""
    rows = []
    for num in range(24):
        name = {"source": "theirs", "gpu": "A100 80GB", "model": f"net-{num}", "row_id": f"x{num}"}
        sizes = {**name, "batch": 8, "seq": 16, "num_devices": 2}
        row = {
            **sizes,
            "predicted_s": 1.0 + num,
            "matmul_s": 0.6 + 0.5 * num,
            "matmul_efficiency": 0.8,
            "compute_share": 0.95,
            **more,
        }
        measured_s = at_efficiency(row, efficiency)
        rows.append({**row, "measured_s": measured_s, "ratio": row["predicted_s"] / measured_s})
    return rows


def test_fitted_and_held_out_runs_share_no_model_of_a_source_on_a_gpu() -> None:
    keys: dict[bool, set[tuple[str, str, str]]] = {True: set(), False: set()}
    for run in RUNS:
        if why_skipped(run) is None:
            keys[is_fitted({"source": run.source, "gpu": run.gpu, "model": run.model})].add(
                (run.source, run.gpu, run.model)
            )
    assert not keys[True] & keys[False]
    assert min(len(half) for half in keys.values()) > 10


def test_fit_recovers_the_efficiency_despite_an_outlier() -> None:
    rows = runs(0.63)
    rows[3]["measured_s"] *= 2
    assert best_efficiency(rows) == pytest.approx(0.63, abs=0.011)
    assert best_efficiency(rows) == best_efficiency(rows[::-1])


def test_network_bound_runs_are_not_fitted() -> None:
    waiting = [
        {
            **row,
            "model": f"slow-{row['model']}",
            "row_id": f"slow-{row['row_id']}",
            "compute_share": 0.5,
        }
        for row in runs(0.4)
    ]
    calibration = fit(A100, [*runs(0.7), *waiting])
    assert calibration.efficiency == 0.7 and calibration.spread == (0.7, 0.7)
    assert all(
        is_fitted(row) and not row["row_id"].startswith("slow") for row in calibration.fitted
    )
    assert any(row["row_id"].startswith("slow") for row in calibration.held_out) and not any(
        map(is_fitted, calibration.held_out)
    )


def test_fit_that_increases_the_error_of_held_out_runs_is_rejected() -> None:
    mixed = [
        row if is_fitted(row) else other for row, other in zip(runs(0.6), runs(0.9), strict=True)
    ]
    assert fit(A100, runs(0.6)).improves and not fit(A100, mixed).improves


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(AutoparError, match="0 runs on H100 can be fitted"):
        fit(CHIPS[1], runs(0.7))


def test_write_changes_only_the_fitted_figures_of_a_profile(tmp_path: Path) -> None:
    calibration = fit(A100, runs(0.66))
    for name in A100.profiles:
        shutil.copy(PROFILES / f"{name}.json", tmp_path)
    write(calibration, "2026-01-02", tmp_path)
    for name in A100.profiles:
        path = tmp_path / f"{name}.json"
        before, after = (
            json.loads(p.read_text(encoding="utf-8")) for p in (PROFILES / path.name, path)
        )
        figures = after["efficiency"]["matmul"]
        assert [figures[dtype].pop("value") for dtype in ("bfloat16", "float16")] == [0.66, 0.66]
        assert source_of(calibration) in figures["float16"].pop("source") and figures[
            "bfloat16"
        ].pop("source") == source_of(calibration)
        for dtype in ("bfloat16", "float16"):
            assert figures[dtype].pop("date") == "2026-01-02"
            before["efficiency"]["matmul"][dtype] = figures[dtype]
        assert before == after
        assert HardwareProfile.load(path).efficiency["matmul"]["bfloat16"] == 0.66


def test_profiles_and_readme_match_the_results() -> None:
    rows = json.loads(tables.PUBLISHED_RESULTS.read_text(encoding="utf-8"))["rows"]
    fits = [fit(chip, rows) for chip in CHIPS]
    for calibration in fits:
        for name in calibration.chip.profiles:
            profile = HardwareProfile.load(name)
            for dtype in ("bfloat16", "float16"):
                assert profile.efficiency["matmul"][dtype] == (
                    calibration.efficiency if calibration.improves else calibration.chip.before
                ), name
            assert (
                source_of(calibration) in profile.figures["efficiency.matmul.bfloat16"].source
            ) == calibration.improves
    assert table_of(fits) in tables.README.read_text(encoding="utf-8")


@pytest.mark.slow
def test_rescaled_step_time_equals_the_step_planned_at_that_efficiency() -> None:
    """The device has unlimited memory bandwidth, and the constraints determine the plan."""
    spec = (
        'llama:{"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2,'
        ' "num_attention_heads": 4, "vocab_size": 512}'
    )
    profile = replace(
        HardwareProfile.load("a100-sxm-80gb"),
        memory_bandwidth_bytes_per_s=1e18,
        hash="of no memory",
    )
    setup = Setup(
        spec,
        16,
        256,
        Mesh({"dp": 4}, devices_per_node=4),
        (megatron(zero=3, recompute="none"),),
        1,
        profile,
        None,
    )
    plan, matmul_s = _planned(setup, setup.constraints, None)
    half, _ = _planned(replace(setup, profile=with_matmuls(profile, 0.5)), setup.constraints, None)
    row_data = {
        "predicted_s": plan.prediction.step_s,
        "matmul_s": matmul_s,
        "matmul_efficiency": 0.8,
    }
    assert half.prediction.step_s == pytest.approx(at_efficiency(row_data, 0.4), rel=1e-6)
    assert half.prediction.step_s > 1.2 * plan.prediction.step_s
