"""Figures show the values of the plan, and the format of a file follows from its suffix."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from made_plan import made_plan, made_staged_plan
from matplotlib.colors import to_hex

from autopar.breakdown.parallelism import PARALLELISMS
from autopar.errors import AutoparError
from autopar.report import layouts, memory, report, schedule, stage_memory, timeline
from autopar.report.charts import COLOURS, MEMORY_COLOURS


def _colours(axes: Any) -> list[str]:
    return [to_hex(patch.get_facecolor()) for patch in axes.patches]


def test_a_row_has_the_colours_of_the_parallelism_of_its_module_on_each_axis() -> None:
    computing, resting, _ = layouts(made_plan()).axes
    rows = [label.get_text() for label in computing.get_yticklabels()]
    assert rows == [
        "net.embed",
        "net.layers.*.norm   ×3",
        "net.layers.*.up   ×3",
        "net.layers.*.attention   ×3",
        "net.head",
    ]
    kinds = (
        "data",
        "tensor",
        "replicated",
        "replicated",
        "data",
        "tensor",
        "data",
        "heads",
        "data",
        "sequence",
    )
    assert _colours(computing) == [COLOURS[kind] for kind in kinds]
    assert _colours(resting) == [
        COLOURS[kind] for kind in ("whole", "sharded", "ZeRO-2", "sharded", "ZeRO-3", "whole")
    ]


def test_the_bars_of_a_module_show_its_compute_and_communication() -> None:
    *_, times = layouts(made_plan()).axes
    widths = [bar.get_width() for bar in times.patches]
    assert widths == pytest.approx([1, 3, 12, 9, 2, 0, 0, 3, 0, 3])


def test_the_stacked_bar_has_the_length_of_the_peak_and_the_budget_is_drawn() -> None:
    plan = made_plan()
    (axes,) = memory(plan).axes
    stack = [bar for bar in axes.patches if bar.get_y() < 0]
    assert sum(bar.get_width() for bar in stack) * 2**30 == pytest.approx(
        plan.prediction.peak_bytes
    )
    assert {to_hex(bar.get_facecolor()) for bar in axes.patches} <= set(MEMORY_COLOURS.values())
    (budget,) = axes.lines
    assert budget.get_xdata()[0] * 2**30 == pytest.approx(plan.options["memory_bytes"])


def test_the_timeline_has_every_bar_and_one_layer_in_detail() -> None:
    plan = made_plan()
    forward, backward, whole = timeline(plan).axes
    drawn = [path.get_extents() for lane in whole.collections for path in lane.get_paths()]
    assert sum(box.width for box in drawn) == pytest.approx(
        sum(bar[4] for bar in plan.prediction.timeline)
    )
    assert forward.get_title(loc="left") == "net.layers.1, forward: 7.00 ms"
    assert backward.get_title(loc="left") == "net.layers.1, backward: 2.00 ms"


def test_the_timeline_of_an_inference_plan_has_no_backward() -> None:
    plan = made_plan()
    forward_bars = tuple(bar for bar in plan.prediction.timeline if bar[1] == "forward")
    figure = timeline(replace(plan, prediction=replace(plan.prediction, timeline=forward_bars)))
    forward, whole = figure.axes
    assert forward.get_title(loc="left") == "net.layers.1, forward: 7.00 ms"
    assert [text.get_text() for text in whole.texts] == ["forward 24.0 ms"] and not whole.lines


@pytest.mark.parametrize(
    ("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF")]
)
def test_the_suffix_of_a_file_determines_the_format_of_a_figure(
    tmp_path: Path, suffix: str, start: bytes
) -> None:
    assert report(made_plan(), tmp_path / f"plan{suffix}").read_bytes().startswith(start)


def test_a_page_is_self_contained_and_has_figures_and_tables(tmp_path: Path) -> None:
    page = report(made_plan(), tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 3
    assert "Best alternatives" in page
    assert "http" not in page


def test_an_unknown_suffix_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match=r"plan\.docx[\s\S]*\.png"):
        report(made_plan(), tmp_path / "plan.docx")


def test_a_missing_folder_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match="No such file"):
        report(made_plan(), tmp_path / "missing" / "plan.png")


def test_every_parallelism_has_a_colour() -> None:
    assert set(PARALLELISMS) <= set(COLOURS)


def test_a_schedule_has_a_row_per_stage_with_all_its_work() -> None:
    plan = made_staged_plan(microbatches=8)
    assert plan.pipeline is not None
    (axes,) = schedule(plan).axes
    rows = [
        [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == row]
        for row in range(4)
    ]
    for bars, stage in zip(rows, plan.pipeline.stages, strict=True):
        assert len(bars) == 2 * 8
        assert sum(bar.get_width() for bar in bars) == pytest.approx(
            8 * sum(b[4] for b in stage.prediction.timeline)
        )
        starts = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(starts))
    assert [text.get_text() for text in axes.get_yticklabels()] == [
        "0  the model",
        "1  net.layers.3",
        "2  net.layers.6",
        "3  net.layers.9",
    ]


def test_interleaved_stages_have_a_row_per_rank() -> None:
    plan = made_staged_plan(schedule="interleaved_1f1b", microbatches=4)
    assert plan.pipeline is not None
    (axes,), (beside,) = schedule(plan).axes, stage_memory(plan).axes
    for row in range(2):
        bars = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == row]
        assert len(bars) == 2 * 2 * 4
        starts = sorted((bar.get_x(), bar.get_x() + bar.get_width()) for bar in bars)
        assert all(end <= start + 1e-12 for (_, end), (start, _) in pairwise(starts))
        held = [bar for bar in beside.patches if round(bar.get_y() + bar.get_height() / 2) == row]
        assert sum(bar.get_width() for bar in held) * 2**30 == pytest.approx(
            plan.pipeline.rank_bytes[row]
        )
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == ["0  the model, net.layers.6", "1  net.layers.3, net.layers.9"]


def test_the_memory_bar_of_a_stage_has_the_length_of_its_peak() -> None:
    plan = made_staged_plan()
    assert plan.pipeline is not None
    (axes,) = stage_memory(plan).axes
    for row, stage in enumerate(plan.pipeline.stages):
        bars = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2) == row]
        assert sum(bar.get_width() for bar in bars) * 2**30 == pytest.approx(
            stage.prediction.peak_bytes
        )


@pytest.mark.slow
def test_a_page_of_stages_shows_equal_stages_once(tmp_path: Path) -> None:
    page = report(made_staged_plan(), tmp_path / "plan.html").read_text(encoding="utf-8")
    assert page.count("data:image/png;base64,") == 2 + 2 * 3
    assert "stages 1 to 2, each" in page
    assert report(made_staged_plan(), tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
