"""explain and diff: golden texts of a handwritten plan, patterns, notebooks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from made_plan import WIRE_S, made_plan, made_staged_plan

from autopar.constraints import ddp, layout
from autopar.core.units import seconds, size
from autopar.errors import PlanError
from autopar.explanation import diff, explain
from autopar.explanation.difference import WAITING
from autopar.planner.pipeline.step_schedule import step_time
from autopar.plans import COMPUTE, Flip, Plan


def test_an_explanation_has_its_golden_text(golden: Callable[[str, str], None]) -> None:
    golden("explain.txt", str(explain(made_plan())))


def test_a_pattern_shows_only_the_decisions_of_its_modules(
    golden: Callable[[str, str], None],
) -> None:
    golden("explain_up.txt", str(explain(made_plan(), module="net.layers.1.up")))


def test_a_pattern_that_matches_nothing_is_an_error_that_names_the_modules() -> None:
    with pytest.raises(PlanError, match=r"no module matches 'net.layer.\*'[\s\S]*net.layers.\*.up"):
        explain(made_plan(), module="net.layer.*")


def test_a_diff_has_its_golden_text(golden: Callable[[str, str], None]) -> None:
    golden("diff.txt", str(diff(made_plan(recompute=False), made_plan())))


def test_different_constraints_are_shown_as_written() -> None:
    plan = made_plan()
    asked = replace(
        plan,
        options={
            **plan.options,
            "constraints": [layout("up", weight="S(0) R").to_json(), ddp(["a"]).to_json()],
        },
    )
    assert "constraints: none → layout('up', weight='S(0) R'), ddp(axes=['a'])" in str(
        diff(plan, asked)
    ).replace("\n", " ")


def test_a_plan_may_be_a_file_and_other_objects_are_refused(tmp_path: Path) -> None:
    plan = made_plan()
    plan.save(tmp_path / "plan.json")
    assert str(explain(tmp_path / "plan.json")) == str(explain(plan))
    assert str(diff(plan, str(tmp_path / "plan.json"))) == str(diff(plan, plan))
    for refused in (explain, lambda what: diff(plan, what)):
        with pytest.raises(PlanError, match=r"int is not a plan[\s\S]*pm\.plan"):
            refused(3)  # type: ignore[arg-type, operator]


def test_host_memory_is_listed_in_a_fixed_order() -> None:
    plan = made_plan()
    kinds = {"parameters": 1024, "optimizer": 2048, "gradients": 512}
    plan = replace(plan, prediction=replace(plan.prediction, host_bytes=kinds))
    told = " + ".join(f"{kind} {size(num_bytes)}" for kind, num_bytes in kinds.items())
    for same in (plan, Plan.loads(plan.dumps())):
        assert f"per device: {told}\n" in str(explain(same))


def test_the_diff_of_a_plan_with_itself_is_empty() -> None:
    same = diff(made_plan(), made_plan())
    assert same.changes == ()
    assert same.num_equal == 5


def test_a_diff_names_modules_of_only_one_plan() -> None:
    plan = made_plan()
    entries = tuple(e for e in plan.entries if not e.module.startswith("net.layers.*.attention"))
    other = type(plan)(**{**{f: getattr(plan, f) for f in plan.__slots__}, "entries": entries})
    assert [(c.module, c.said) for c in diff(plan, other).changes] == [
        ("net.layers.*.attention", ("only in the first plan",))
    ]


def test_notebooks_show_the_same_tables() -> None:
    page = explain(made_plan())._repr_html_()
    assert page.startswith("<pre")
    assert "net.layers.*.attention" in page
    assert "Best alternatives" in page


def test_an_explanation_of_stages_has_its_golden_text(golden: Callable[[str, str], None]) -> None:
    golden("explain_stages.txt", str(explain(made_staged_plan())))


def test_equal_neighbouring_stages_are_one_section() -> None:
    found = explain(made_staged_plan())
    assert [(section.first, section.last) for section in found.sections] == [(0, 0), (1, 2), (3, 3)]


def test_the_waiting_time_of_a_stage_is_the_step_minus_its_microbatches() -> None:
    plan = made_staged_plan(microbatches=8)
    assert plan.pipeline is not None
    text = str(explain(plan))
    for stage in plan.pipeline.stages:
        waits = 1 - 8 * stage.prediction.step_s / plan.prediction.step_s
        assert f"{waits:.1%}".replace("%", " %") in text


def test_transfers_between_stages_are_listed_separately_from_collectives() -> None:
    found = explain(made_staged_plan())
    received = [
        sum(t.time_s for p in s.explanation.parts for t in p.transfers if t.kind == "receive")
        for s in found.sections
    ]
    assert received == pytest.approx([WIRE_S, 2 * WIRE_S, WIRE_S])
    for section in found.sections:
        prediction = section.explanation.plan.prediction
        assert sum(p.communication_s for p in section.explanation.parts) == pytest.approx(
            prediction.communication_s
        )


def test_a_pattern_shows_only_the_stages_that_have_its_modules() -> None:
    found = explain(made_staged_plan(), module="net.layers.4.up")
    assert [(section.first, section.last) for section in found.sections] == [(1, 1)]
    with pytest.raises(PlanError, match=r"no module matches 'net.layers.12.up'"):
        explain(made_staged_plan(), module="net.layers.12.up")


def test_changes_that_turn_a_choice_are_shown_per_stage_and_for_requested_modules() -> None:
    key, other = "net.layers.*.up/dot/forward/0", "S(0) R, R R -> S(0) R"
    turning = tuple(
        Flip(key, other, 4e-3, what, factor, stage)
        for what, factor, stage in (("inter", 0.25, 0), (COMPUTE, 3.0, 3))
    )
    said = str(explain(made_staged_plan(), flips=turning))
    first, last = said.index("── stage 0 ──"), said.index("── stage 3 ──")
    assert first < said.index("1/4 of the bandwidth of link inter") < said.index("── stages 1 to 2")
    assert last < said.index("3 times the speed of compute")
    assert said.count("Hardware changes that would change close choices") == 2
    assert "close choices" in str(
        explain(made_staged_plan(), module="net.layers.*.up", flips=turning)
    )
    assert "close choices" not in str(explain(made_staged_plan(), module="net.head", flips=turning))
    assert "3 times the speed" in str(
        explain(made_plan(), flips=(Flip(key, other, 4e-3, COMPUTE, 3.0),))
    )


def test_a_diff_of_stages_starts_with_cuts_microbatches_and_schedule(
    golden: Callable[[str, str], None],
) -> None:
    first, second = made_staged_plan(schedule="gpipe"), made_staged_plan(microbatches=4)
    golden("diff_stages.txt", str(diff(first, second)))
    same = diff(first, first)
    assert same.changes == ()


def test_a_diff_of_stages_and_a_whole_model_compares_modules_by_their_shares_of_the_step(
    golden: Callable[[str, str], None],
) -> None:
    found = diff(made_plan(), made_staged_plan())
    golden("diff_cut.txt", str(found))
    shares = {c.module: c.shares for c in found.changes}
    (whole, staged) = shares["net.layers.*.up [0-2]"] or (None, None)
    assert whole is not None and whole.stages == () and whole.time_s == pytest.approx(15e-3)
    assert (
        staged is not None
        and staged.stages == (0,)
        and staged.time_s == pytest.approx(15e-3 * 8 / 4)
    )  # microbatches, stages
    assert whole.kept_bytes and staged.kept_bytes == 4 * whole.kept_bytes  # microbatches in flight
    both = [
        diff(made_plan(), made_staged_plan(schedule=name)).beside[-1]
        for name in ("1f1b", "interleaved_1f1b")
    ]
    assert [name for name, *_ in both] == [WAITING] * 2


def test_a_diff_names_stages_of_only_one_plan() -> None:
    plan = made_staged_plan()
    assert plan.pipeline is not None
    fewer = replace(plan, pipeline=replace(plan.pipeline, stages=plan.pipeline.stages[:3]))
    assert {c.said for c in diff(plan, fewer).changes} == {("only in the first plan",)}
    assert all(c.module.startswith("stage 3: ") for c in diff(plan, fewer).changes)


def test_a_plan_with_stages_round_trips_and_damaged_files_are_refused() -> None:
    plan = made_staged_plan()
    assert Plan.loads(plan.dumps()) == plan
    assert (
        repr(plan)
        == "Plan(Net on stage=4,node=2,gpu=4, 4 stages, 8 microbatches: step 397 ms, peak 44.0 MiB)"
    )
    with pytest.raises(PlanError, match="crosses as 'S"):
        Plan.loads(plan.dumps().replace('"layout": "S(0) R"', '"layout": "S(0)"'))


def test_interleaved_stages_are_explained_by_rank() -> None:
    plan = made_staged_plan(schedule="interleaved_1f1b", microbatches=4)
    assert plan.pipeline is not None
    found = explain(plan)
    text = str(found)
    assert (
        "4 microbatches through 4 stages along stage, 2 on each device, schedule interleaved_1f1b"
        in text
    )
    assert "3 on rank 1" in text and "peak of rank 1 " in text
    busy = 4 * sum(stage.prediction.step_s for stage in plan.pipeline.stages[0::2])
    assert f"the devices of rank 0, the busiest, work for {seconds(busy)} of it" in text


def test_the_cost_of_a_runner_up_is_given_per_microbatch_and_per_step() -> None:
    plan = made_staged_plan(microbatches=8)
    assert plan.pipeline is not None
    times = [stage.prediction.step_s for stage in plan.pipeline.stages]
    said = str(explain(plan)).split("── stage")
    for section, number in zip(said[1:], (0, 1, 3), strict=True):  # stages 1 and 2 are equal
        then = [*times[:number], times[number] + 4e-3, *times[number + 1 :]]
        delta = seconds(step_time(then, 8) - step_time(times, 8), signed=True)
        line = next(line for line in section.splitlines() if "S(0) R, R R -> S(0) R" in line)
        assert line.split("S(0) R, R R -> S(0) R")[1].split("  ")[-1].strip() == delta, line
    assert "step, about" in str(
        explain(made_staged_plan(schedule="interleaved_1f1b", microbatches=4))
    )
