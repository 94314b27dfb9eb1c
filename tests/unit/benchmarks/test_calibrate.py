"""What is fitted to published runs: on which of them, how, and what becomes of it."""

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
    """Predicted at 0.8, and measured as where matmuls reach `efficiency`; the models of both
    halves."""
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


def test_halves_share_no_model_of_a_source_on_a_gpu() -> None:
    keys: dict[bool, set[tuple[str, str, str]]] = {True: set(), False: set()}
    for run in RUNS:
        if why_skipped(run) is None:
            keys[is_fitted({"source": run.source, "gpu": run.gpu, "model": run.model})].add(
                (run.source, run.gpu, run.model)
            )
    assert not keys[True] & keys[False]
    assert min(len(half) for half in keys.values()) > 10


def test_the_efficiency_of_which_steps_were_made_is_found_beside_a_run_that_is_far_off() -> None:
    rows = runs(0.63)
    rows[3]["measured_s"] *= 2
    assert best_efficiency(rows) == pytest.approx(0.63, abs=0.011)
    assert best_efficiency(rows) == best_efficiency(rows[::-1])


def test_runs_that_wait_for_networks_are_not_fitted_and_stay_held_out() -> None:
    waiting = [
        {
            **row,
            "model": f"slow-{row['model']}",
            "row_id": f"slow-{row['row_id']}",
            "compute_share": 0.5,
        }
        for row in runs(0.4)
    ]
    found = fit(A100, [*runs(0.7), *waiting])
    assert found.efficiency == 0.7 and found.spread == (0.7, 0.7)
    assert all(is_fitted(row) and not row["row_id"].startswith("slow") for row in found.fitted)
    assert any(row["row_id"].startswith("slow") for row in found.held_out) and not any(
        map(is_fitted, found.held_out)
    )


def test_a_fit_that_leaves_the_held_out_half_further_off_is_not_taken() -> None:
    mixed = [
        row if is_fitted(row) else other for row, other in zip(runs(0.6), runs(0.9), strict=True)
    ]
    assert fit(A100, runs(0.6)).improves and not fit(A100, mixed).improves


def test_too_few_runs_are_refused() -> None:
    with pytest.raises(AutoparError, match="0 runs on H100 can be fitted"):
        fit(CHIPS[1], runs(0.7))


def test_a_profile_gets_the_figure_and_nothing_else_changes(tmp_path: Path) -> None:
    found = fit(A100, runs(0.66))
    for name in A100.profiles:
        shutil.copy(PROFILES / f"{name}.json", tmp_path)
    write(found, "2026-01-02", tmp_path)
    for name in A100.profiles:
        path = tmp_path / f"{name}.json"
        before, after = (
            json.loads(p.read_text(encoding="utf-8")) for p in (PROFILES / path.name, path)
        )
        figures = after["efficiency"]["matmul"]
        assert [figures[dtype].pop("value") for dtype in ("bfloat16", "float16")] == [0.66, 0.66]
        assert source_of(found) in figures["float16"].pop("source") and figures["bfloat16"].pop(
            "source"
        ) == source_of(found)
        for dtype in ("bfloat16", "float16"):
            assert figures[dtype].pop("date") == "2026-01-02"
            before["efficiency"]["matmul"][dtype] = figures[dtype]
        assert before == after
        assert HardwareProfile.load(path).efficiency["matmul"]["bfloat16"] == 0.66


def test_profiles_and_readme_say_what_the_results_give() -> None:
    rows = json.loads(tables.PUBLISHED_RESULTS.read_text(encoding="utf-8"))["rows"]
    fits = [fit(chip, rows) for chip in CHIPS]
    for found in fits:
        for name in found.chip.profiles:
            profile = HardwareProfile.load(name)
            for dtype in ("bfloat16", "float16"):
                assert profile.efficiency["matmul"][dtype] == (
                    found.efficiency if found.improves else found.chip.before
                ), name
            assert (
                source_of(found) in profile.figures["efficiency.matmul.bfloat16"].source
            ) == found.improves
    assert table_of(fits) in tables.README.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_step_at_another_efficiency_is_the_step_that_is_planned_there() -> None:
    """On a device whose memory bounds nothing, and under a plan that leaves no choice."""
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
    said = {"predicted_s": plan.prediction.step_s, "matmul_s": matmul_s, "matmul_efficiency": 0.8}
    assert half.prediction.step_s == pytest.approx(at_efficiency(said, 0.4), rel=1e-6)
    assert half.prediction.step_s > 1.2 * plan.prediction.step_s
