"""Tables in the README match the results."""

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


def test_cell_states_the_number_of_correct_plans_and_the_largest_error() -> None:
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


def test_model_with_float32_parts_is_marked_and_compared_with_its_graph() -> None:
    assert parity_table(
        [{**ROW, "note": "model has float32 parts", "traced_rel_err": 1e-15}]
    ).endswith("| a* | 1 of 1, 1e-15 |")
    assert parity_table([{"model": "a", "mesh": "4", "ok": False, "error": "it broke"}]).endswith(
        "| a | 0 of 1 |"
    )


def test_put_replaces_only_the_table_with_the_given_name(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("before\n<!-- t -->\nold\n<!-- end of t -->\nafter\n", encoding="utf-8")
    put("t", "new", readme)
    assert (
        readme.read_text(encoding="utf-8") == "before\n<!-- t -->\nnew\n<!-- end of t -->\nafter\n"
    )
    with pytest.raises(AutoparError, match="no table 'other'"):
        put("other", "new", readme)


def test_readme_table_contains_the_results_of_the_full_zoo() -> None:
    rows = json.loads(ZOO_RESULTS.read_text(encoding="utf-8"))["rows"]
    assert {row["model"] for row in rows} == set(zoo.NAMES)
    assert parity_table(rows) in README.read_text(encoding="utf-8")
