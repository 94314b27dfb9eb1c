"""explain and diff: golden texts of a plan made by hand, patterns, notebooks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from made_plan import made_plan

from autopar.errors import PlanError
from autopar.explanation import diff, explain


def test_an_explanation_reads_as_it_should(golden: Callable[[str, str], None]) -> None:
    golden("explain.txt", str(explain(made_plan())))


def test_a_pattern_shows_every_decision_of_its_modules_only(golden: Callable[[str, str], None]) -> None:
    golden("explain_up.txt", str(explain(made_plan(), module="net.layers.1.up")))


def test_a_pattern_that_matches_nothing_is_an_error_that_names_the_modules() -> None:
    with pytest.raises(PlanError, match=r"no module matches 'net.layer.\*'[\s\S]*net.layers.\*.up"):
        explain(made_plan(), module="net.layer.*")


def test_a_diff_reads_as_it_should(golden: Callable[[str, str], None]) -> None:
    golden("diff.txt", str(diff(made_plan(recompute=False), made_plan())))


def test_a_plan_does_not_differ_from_itself() -> None:
    same = diff(made_plan(), made_plan())
    assert same.changes == ()
    assert same.num_equal == 5


def test_a_module_of_one_plan_only_is_told() -> None:
    plan = made_plan()
    entries = tuple(e for e in plan.entries if not e.module.startswith("net.layers.*.attention"))
    other = type(plan)(**{**{f: getattr(plan, f) for f in plan.__slots__}, "entries": entries})
    assert [(c.module, c.said) for c in diff(plan, other).changes] == [("net.layers.*.attention", ("only in the first plan",))]


def test_notebooks_show_the_same_tables() -> None:
    page = explain(made_plan())._repr_html_()
    assert page.startswith("<pre")
    assert "net.layers.*.attention" in page
    assert "Why not otherwise" in page
