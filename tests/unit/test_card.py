"""The HTML card of a plan in a notebook: its summary, the step and the peak as bars, and a table of
modules. It is safe HTML and readable on any background."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from changed import with_options
from made_plan import made_plan, made_staged_plan

import autopar
from autopar.breakdown import WAITING, step_parts
from autopar.explanation import explain
from autopar.plans import Plan
from autopar.report import card
from autopar.report.charts import COLOURS, MEMORY_COLOURS

PLANS = {
    "whole": made_plan(),
    "stages": made_staged_plan(),
    "interleaved": made_staged_plan(schedule="interleaved_1f1b", microbatches=4),
}
OF_ALL = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())
VOID = {"br"}


class Nested(HTMLParser):
    """A parser that checks that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []
        self.seen: set[str] = set()

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self.seen.add(tag)
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def bars(shown: str) -> list[list[float]]:
    """Return the widths of the pieces of each bar, in percent."""
    found = re.findall(r'<div class="bar".*?</div>', shown)
    return [
        [float(width) for width in re.findall(r'<i style="width:([0-9.]+)%', bar)] for bar in found
    ]


@OF_ALL
def test_a_notebook_shows_the_card_of_a_plan_with_all_lines_of_its_summary(plan: Plan) -> None:
    shown = plan._repr_html_()
    assert shown == card(plan)
    for line in explain(plan).summary():
        assert html.escape(line) in shown
    parser = Nested()
    parser.feed(shown)
    assert not parser.wrong and not parser.open
    assert (
        not {"script", "img", "link", "iframe"} & parser.seen
        and "http" not in shown
        and "url(" not in shown
    )


def test_the_bar_of_the_step_shows_its_parts() -> None:
    for plan in PLANS.values():
        parts, (step, *_) = step_parts(plan), bars(card(plan))
        there = [time_s for _, time_s in parts.items() if time_s > 1e-12]
        assert step == pytest.approx(
            [100 * time_s / plan.prediction.simulated_s for time_s in there], abs=1e-3
        )
    assert WAITING in card(PLANS["stages"]) and WAITING not in card(PLANS["whole"])


def test_the_bar_of_the_peak_shows_its_share_of_the_marked_budget() -> None:
    plan = with_options(made_plan(), memory_bytes=4 * made_plan().prediction.peak_bytes)
    _, peak = bars(card(plan))
    assert sum(peak) == pytest.approx(25.0, abs=0.01)
    assert "34.0 MiB of 136 MiB" in card(plan) and "left:calc(100.000% - 2px)" in card(plan)
    unlimited = replace(
        plan, options={k: v for k, v in plan.options.items() if k != "memory_bytes"}
    )
    assert sum(bars(card(unlimited))[1]) == pytest.approx(100.0, abs=0.01) and "calc(" not in card(
        unlimited
    )


def test_each_rank_has_a_bar_of_its_peak_and_equal_neighbours_share_one() -> None:
    shown = card(PLANS["stages"])
    assert [round(sum(bar), 1) for bar in bars(shown)[1:]] == [round(100 * 34 / 44, 1), 100.0]
    assert "stages 0 to 2</span>" in shown and "stage 3</span>" in shown
    interleaved = PLANS["interleaved"].pipeline
    assert interleaved is not None
    lengths = [sum(bar) for bar in bars(card(PLANS["interleaved"]))[1:]]
    assert lengths == pytest.approx(
        [100 * peak / max(interleaved.rank_bytes) for peak in interleaved.rank_bytes], abs=0.01
    )


def test_each_module_has_a_row_and_repeated_modules_are_folded_as_in_explain() -> None:
    shown = card(PLANS["whole"])
    rows = dict(re.findall(r"<tr><td><code>(.*?)</code></td><td>(\d+)</td>", shown))
    layer = {f"net.layers.*.{name}": "3" for name in ("norm", "up", "attention")}
    assert list(rows.items()) == list({"net.embed": "1", **layer, "net.head": "1"}.items())
    (attention,) = re.findall(r"<tr><td><code>net\.layers\.\*\.attention</code>.*?</tr>", shown)
    assert (
        f"background:{COLOURS['data']}" in attention
        and f"background:{COLOURS['heads']}" in attention
    )
    staged = card(PLANS["stages"])
    assert re.findall(r"Modules, (.*?); per device", staged) == [
        "stage 0",
        "stages 1 to 2, each",
        "stage 3",
    ]
    assert staged.count("<details open>") == 1 and staged.count("<details") == 3


def test_text_has_the_colour_of_the_page_and_bars_have_medium_lightness() -> None:
    shown = card(PLANS["stages"])
    assert not re.search(
        r"[;{](color|background):(#fff|#000|black|white)[;}]", shown.split("</style>")[0]
    )
    for colour in re.findall(r"<i style=\"(?:width:[0-9.]+%;)?background:(#[0-9a-f]{6})", shown):
        lightness = sum(int(colour[at : at + 2], 16) for at in (1, 3, 5)) / 765
        assert 0.3 < lightness < 0.85, colour
    assert set(MEMORY_COLOURS) >= set(PLANS["whole"].prediction.memory_bytes)


def test_names_of_modules_and_models_are_escaped() -> None:
    plan = made_plan()
    text = (
        plan.dumps()
        .replace("net.head", "<script>alert(1)</script>")
        .replace('"Net"', '"<b>Net</b> & co"')
    )
    shown = Plan.loads(text)._repr_html_()
    assert "<script" not in shown and "<b>Net" not in shown
    assert "&lt;script&gt;alert(1)&lt;" in shown and "&lt;b&gt;Net&lt;/b&gt; &amp; co" in shown


@pytest.mark.slow
def test_a_loaded_plan_has_the_same_card(tmp_path: Path) -> None:
    made_plan().save(tmp_path / "plan.json")
    code = "import sys, autopar; print(autopar.Plan.load(sys.argv[1])._repr_html_())"
    done = subprocess.run(
        [sys.executable, "-c", code, tmp_path / "plan.json"],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert done.stdout.strip() == card(made_plan()).strip()
    assert autopar.Plan is Plan
