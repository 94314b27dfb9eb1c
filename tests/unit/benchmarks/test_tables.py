"""Tables in the README are those that the results give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autopar.errors import AutoparError
from benchmarks import zoo
from benchmarks.tables import README, ZOO_RESULTS, parity_table, put

ROW = {
    "model": "a",
    "mesh": "gpu=2",
    "ok": True,
    "max_rel_err": 3e-8,
    "traced_rel_err": None,
    "note": "",
}


def test_a_cell_says_how_many_plans_are_right_and_their_largest_error() -> None:
    rows = [
        ROW,
        {**ROW, "max_rel_err": 2e-7},
        {**ROW, "ok": False, "max_rel_err": 0.5},
        {**ROW, "mesh": "4"},
    ]
    assert parity_table(rows).splitlines() == [
        "| model | mesh gpu=2 | mesh 4 |",
        "|---|---|---|",
        "| a | 2 of 3, 2e-07 | 1 of 1, 3e-08 |",
    ]


def test_a_model_with_float32_parts_is_marked_and_held_against_its_graph() -> None:
    assert parity_table(
        [{**ROW, "note": "model has float32 parts", "traced_rel_err": 1e-15}]
    ).endswith("| a* | 1 of 1, 1e-15 |")
    assert parity_table([{"model": "a", "mesh": "4", "ok": False, "error": "it broke"}]).endswith(
        "| a | 0 of 1 |"
    )


def test_a_table_replaces_the_one_of_its_name_and_nothing_else(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- t -->\nold\n<!-- end of t -->\nafter\n", encoding="utf-8")
    put("t", "new", readme)
    assert (
        readme.read_text(encoding="utf-8") == "before\n<!-- t -->\nnew\n<!-- end of t -->\nafter\n"
    )
    with pytest.raises(AutoparError, match="no table 'other'"):
        put("other", "new", readme)


def test_the_readme_shows_what_was_measured_of_the_whole_zoo() -> None:
    rows = json.loads(ZOO_RESULTS.read_text(encoding="utf-8"))["rows"]
    assert {row["model"] for row in rows} == set(zoo.NAMES)
    assert parity_table(rows) in README.read_text(encoding="utf-8")
