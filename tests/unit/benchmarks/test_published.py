"""Published training runs and the setups that are planned for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from autopar import hf
from autopar.constraints import speak_of
from autopar.core.hardware import HardwareProfile
from benchmarks import tables
from benchmarks.published import main, row, with_kernels
from benchmarks.runs import RUNS, Run, setup_of, why_skipped
from benchmarks.runs.comparison import draw, published_table, summary

PLANNED = [run for run in RUNS if why_skipped(run) is None]


def run_of(row_id: str) -> Run:
    return next(run for run in RUNS if run.row_id == row_id)


def test_with_kernels_adds_measured_kernels_and_the_readme_states_the_effect() -> None:
    plain, measured = HardwareProfile.load("h100-sxm"), HardwareProfile.load("h100-sxm-measured")
    combined = with_kernels(plain)
    assert (
        not plain.kernels
        and combined.kernels == measured.kernels
        and combined.links == plain.links
        and combined != plain
    )
    ratios = {}
    for name in ("published", "published_kernels"):
        rows = json.loads(
            (tables.PUBLISHED_RESULTS.parent / f"{name}.json").read_text(encoding="utf-8")
        )["rows"]
        ratios[name] = {r["row_id"]: f"{r['ratio']:.2f}" for r in rows if r.get("ratio")}
    before, after = (
        [ratios[name][row_id] for row_id in ("p0414", "p0479", "p0541")]
        for name in ("published", "published_kernels")
    )
    readme = " ".join(tables.README.read_text(encoding="utf-8").split())
    assert (
        f"go from {before[0]} and {before[1]} to {after[0]} and {after[1]}, one of 340B from"
        f" {before[2]} to {after[2]}" in readme
    )


def test_runs_are_unique_and_more_than_300_can_be_planned() -> None:
    assert len({run.row_id for run in RUNS}) == len(RUNS) == 923
    assert len(PLANNED) > 300
    assert all(run.step_s or run.peak_bytes for run in PLANNED)


def test_setups_match_the_devices_and_batches_of_their_runs() -> None:
    for run in PLANNED:
        setup = setup_of(run)
        assert setup.mesh.num_devices == run.num_devices, run.row_id
        assert speak_of(setup.constraints, setup.mesh), run.row_id
        assert (setup.batch, setup.seq) == (run.batch, run.seq)
        assert setup.batch % setup.microbatches == 0
        settings = hf.parse(setup.spec)[2]
        assert run.hidden in (settings.get("n_embd"), settings.get("hidden_size"))


@pytest.mark.parametrize(
    ("row_id", "mesh", "words"),
    [
        ("p0237", "dp_node=64,dp=8", ["megatron(zero=3, recompute='full')"]),
        (
            "p0415",
            "dp_node=16,dp=2,tp=4",
            ["megatron(tp=['tp'], sequence=True, zero=1, microbatches=4)"],
        ),
        (
            "p0452",
            "pp=4,dp_node=2,cp=2,tp=4",
            [
                "megatron(tp=['tp'], cp=['cp'], sequence=True, zero=1, pp='pp', microbatches=64,"
                " chunks=5)"
            ],
        ),
        (
            "p0791",
            "dp_node=16,dp=8",
            [
                "megatron(dp=['dp'], zero=3, recompute='none', free=['dp_node'])",
                "ddp(axes=['dp_node'])",
            ],
        ),
    ],
)
def test_constraints_of_a_setup_match_the_run(row_id: str, mesh: str, words: list[str]) -> None:
    setup = setup_of(run_of(row_id))
    assert (str(setup.mesh), [str(c) for c in setup.constraints]) == (mesh, words)


def test_setup_has_the_network_bandwidth_of_its_run() -> None:
    eight, four = setup_of(run_of("p0415")).profile, setup_of(run_of("p0791")).profile
    assert (
        eight.links["inter"].bandwidth_bytes_per_s > 3.9 * four.links["inter"].bandwidth_bytes_per_s
    )
    assert setup_of(run_of("p0563")).profile.links["intra"] == four.links["intra"]


def test_setup_has_the_attention_efficiency_of_its_framework() -> None:
    """llm-foundry used the first FlashAttention on both GPUs. InternEvo has the value of the
    profile."""
    for row_id, shares in (
        ("p0373", (0.40, 0.30)),
        ("p0237", (0.1918, 0.1438)),
        ("p0563", (0.55, 0.44)),
    ):
        profile = setup_of(run_of(row_id)).profile
        reached = [
            profile.efficiency[kind]["bfloat16"] for kind in ("attention", "attention_backward")
        ]
        assert reached == pytest.approx(shares, rel=1e-3), row_id
    foundry, plain = setup_of(run_of("p0373")).profile, HardwareProfile.load("a100-sxm-40gb")
    assert foundry != plain and foundry.efficiency["matmul"] == plain.efficiency["matmul"]


@pytest.mark.parametrize(
    ("row_id", "why"),
    [
        ("p0003", "no profile of H100 96GB"),
        ("p0523", "FP8"),
        ("p0442", "XLA"),
        ("p0496", "adapters"),
    ],
)
def test_runs_that_cannot_be_planned_are_skipped_with_a_reason(row_id: str, why: str) -> None:
    assert why in str(why_skipped(run_of(row_id)))


@pytest.mark.slow
def test_row_of_a_small_run_has_a_prediction_and_a_free_plan() -> None:
    """The run has 125 million parameters on eight A100s, with FSDP and without recomputation."""
    result = row({"name": "MPT-125m", "row_id": "p0377"}, "dp=8", free=True)
    assert result["ok"] and result["measured_s"] == pytest.approx(1.07725)
    assert result["ratio"] == result["predicted_s"] / result["measured_s"]
    assert 0.5 < result["ratio"] < 2
    assert result["free_plan_s"] <= result["predicted_s"] * 1.02


def test_summary_counts_only_timed_rows() -> None:
    def timed_row(ratio: float, step_s: float) -> dict[str, Any]:
        sizes = {"source": "theirs", "gpu": "A100 80GB", "batch": 8, "seq": 16, "num_devices": 2}
        return {**sizes, "ratio": ratio, "predicted_s": ratio * step_s, "measured_s": step_s}

    rows = [
        timed_row(0.8, 1.0),
        timed_row(0.95, 2.0),
        timed_row(1.3, 4.0),
        {"source": "other", "gpu": "V100", "skipped": "no profile"},
    ]
    first, everything = summary(rows)
    assert first == ("theirs", "A100 80GB", "3", "0.95", "0.80", "1.30", "33%", "67%", "1.00")
    assert everything == ("all", "", *first[2:])


def test_readme_table_matches_the_results() -> None:
    rows = json.loads(tables.PUBLISHED_RESULTS.read_text(encoding="utf-8"))["rows"]
    assert {row["row_id"] for row in rows if row["skipped"] is None} <= {
        run.row_id for run in PLANNED
    }
    assert published_table(rows) in tables.README.read_text(encoding="utf-8")


def test_figure_is_drawn_as_png(tmp_path: Path) -> None:
    sizes = {"source": "theirs", "gpu": "A100 80GB", "batch": 8, "seq": 16, "num_devices": 2}
    draw(
        [{**sizes, "ratio": 0.5, "predicted_s": 0.5, "measured_s": 1.0}, {"skipped": "no profile"}],
        str(tmp_path / "runs.png"),
    )
    assert (tmp_path / "runs.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("row_id", "message"),
    [("p9999", "the data has no p9999"), ("p0003", "none of the requested runs")],
)
def test_missing_and_unplannable_rows_are_refused_by_name(
    row_id: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["--rows", row_id])
    assert message in capsys.readouterr().err
