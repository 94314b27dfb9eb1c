"""Which alternatives the search plans, and which it skips because of their bounds."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx

from autopar.api import captured_call, plan
from autopar.api import chooser as chooser_module
from autopar.api.alternatives import EFFORTS, Alternative, SearchStatus, WorkBudget
from autopar.api.chooser import Chooser
from autopar.api.plan_search import PlanSearch
from autopar.constraints import Pipelined, fsdp, pipeline
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.units import seconds
from autopar.errors import ConstraintError, CoupledError, InfeasibleError
from autopar.planner import PlanOptions, TooSlow

ALONE_S = 1.0  # the step of the plan without stages
TRACE: Any = SimpleNamespace(
    loss=0, given_back=(), outputs=(0, 1), graph=fx.Graph(), parameters=(), inputs=()
)
Bounds = Mapping[tuple[str, int], float]
Staged = Callable[[Chooser, Pipelined, int, float], Any]


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines about the alternatives that the search adds to a plan. The plans of these tests
    cannot store them. No loss can be computed by rows."""
    lines: list[str] = []

    def add_coverage(found: Any, line: str) -> Any:
        lines.append(line)
        return found

    monkeypatch.setattr(chooser_module, "add_coverage", add_coverage)
    monkeypatch.setattr(chooser_module, "heads_of", lambda trace: ((), ()))
    return lines


@dataclass(frozen=True)
class Found:
    """The fields of a found plan that the search reads and writes."""

    plan: Any
    computing_s: float
    was_interrupted: bool = False


def plan_of(num: int, **figures: Any) -> Any:
    """Return a plan with these figures, with a pipeline if there are microbatches."""
    stages, num_microbatches = (SimpleNamespace(**figures),), num or 1
    one = SimpleNamespace(
        stages=stages, num_microbatches=num_microbatches, num_chunks=1, num_ranks=1
    )
    return SimpleNamespace(
        **figures,
        pipeline=one if num else None,
        as_pipeline=one,
        stages=stages,
        num_microbatches=num_microbatches,
    )


def made(step_s: float, compute_s: float = 0.0, num: int = 0) -> Any:
    """Return a found plan, in stages if there are microbatches."""
    proof = SimpleNamespace(memory_price_s_per_gib=0.0, num_variables=10_000, gap=0.004)
    prediction = SimpleNamespace(step_s=step_s)
    return Found(plan_of(num, prediction=prediction, entries=(), proof=proof), compute_s)


def search(
    monkeypatch: pytest.MonkeyPatch,
    staged: Staged,
    alone: Any = None,
    bounds: Bounds = MappingProxyType({}),
    *,
    mesh: Mesh = Mesh({"a": 2}),  # noqa: B008 (it is frozen)
    samples: int = 4,
    device: str = "h100-sxm",
    batch_s: float = 0.0,
    **options: Any,
) -> Any:
    """Search for a plan: `staged` plans pipelines, and `alone` is the plan without stages."""

    def in_one_piece(self: Chooser, limit_s: float) -> Any:
        if isinstance(alone, Exception):
            raise alone
        return made(ALONE_S) if alone is None else alone

    monkeypatch.setattr(Chooser, "in_one_piece", in_one_piece)
    monkeypatch.setattr(Chooser, "_plan_schedules", staged)

    def bound_s(self: Chooser, wish: Pipelined, num: int, chunks: int, total: Any) -> float:
        return bounds.get((wish.axis or "", num), 0.0 if num > 1 else 0.9)

    monkeypatch.setattr(Chooser, "_bound_s", bound_s)
    monkeypatch.setattr(Chooser, "_least_batch_s", lambda self, axis: batch_s)
    monkeypatch.setattr(chooser_module, "most_parts", lambda trace: 64)
    monkeypatch.setattr(Chooser, "_most_chunks", lambda self, wish, num, num_parts: 1)
    chosen = PlanOptions(**{"outputs": "loss", **options})
    profile, batch = HardwareProfile.load(device), {"x": torch.zeros(samples, 2)}
    chooser = Chooser(torch.nn.Identity(), TRACE, (), batch, mesh, profile, chosen)
    budget = WorkBudget.of(chosen)
    chooser = replace(chooser, budget=budget)
    return PlanSearch(lambda _: chooser, chosen, (mesh,), budget=budget).run()


@pytest.mark.parametrize(
    ("compute_s", "asked", "device", "looked"),
    [
        (0.8, {}, "h100-sxm", True),
        (0.8, {"outputs": "full"}, "h100-sxm", True),
        # In stages a call would return other outputs.
        (0.8, {"outputs": "dtensor"}, "h100-sxm", False),
        (0.95, {}, "h100-sxm", False),  # the bubble of stages would take as long
        (0.8, {}, "cpu-gloo", False),
        (0.8, {"num_microbatches": 1}, "h100-sxm", False),
        (0.8, {"inference": True}, "h100-sxm", False),
        (0.8, {"batch": "local"}, "h100-sxm", False),
        (0.8, {"effort": "quick"}, "h100-sxm", False),
        (0.8, {"constraints": (fsdp(),)}, "h100-sxm", False),
        (0.95, {"constraints": (pipeline(),)}, "h100-sxm", True),
        (0.95, {"constraints": (pipeline(),), "effort": "quick"}, "h100-sxm", True),
    ],
    ids=str,
)
def test_stages_are_tried_unrequested_if_the_plan_without_stages_waits_on_communication(
    compute_s: float,
    asked: dict[str, Any],
    device: str,
    looked: bool,
    monkeypatch: pytest.MonkeyPatch,
    told: list[str],
) -> None:
    seen: list[tuple[int, float]] = []

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append((num, limit_s))
        return made(0.5, num=num)

    found = search(
        monkeypatch, staged, made(ALONE_S, compute_s), gap=0.1, device=device, samples=2, **asked
    )
    assert found.plan.prediction.step_s == (0.5 if looked else ALONE_S)
    first = [(2, 0.9)] if looked else []
    assert seen[:1] == first, "a plan that saves more than the gap is looked for"
    assert ("no stages, because a call" in "".join(told)) == (asked.get("outputs") == "dtensor")


@pytest.mark.parametrize("late", [False, True])
def test_no_stages_are_tried_after_the_time_limit_if_a_plan_exists(
    late: bool, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    seen: list[int] = []

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        raise TooSlow(2.0)

    ends = 1.0 if late else math.inf
    found = search(monkeypatch, staged, time_limit_s=1.0, ends=ends)
    assert found.plan.prediction.step_s == ALONE_S
    assert bool(seen) != late
    assert ("not tried" in told[0]) == late


@pytest.mark.parametrize(
    ("asked", "steps_s"), [((), 1.0), ((pipeline(),), 0.97)], ids=["unasked", "asked"]
)
def test_unrequested_stages_are_chosen_only_if_they_save_five_percent(
    asked: tuple[Pipelined, ...],
    steps_s: float,
    monkeypatch: pytest.MonkeyPatch,
    told: list[str],
) -> None:
    found = search(
        monkeypatch,
        lambda self, wish, num, limit_s: made(0.97, num=num),
        samples=2,
        constraints=asked,
    )
    assert found.plan.prediction.step_s == steps_s
    assert "no stages (1.00 s); 2 microbatches in stages along a (970 ms)" in told[0]
    assert ("save less than 5 %" in told[0]) == (not asked)


@pytest.mark.parametrize("asked", [False, True])
def test_if_samples_are_coupled_only_requested_stages_are_tried_with_one_microbatch(
    asked: bool, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    seen: list[tuple[int, str | None]] = []

    def coupled(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append((num, wish.axis))
        if num == 1:
            return made(0.9, num=1)
        raise CoupledError("samples meet in a norm", remedy="one microbatch")

    found = search(
        monkeypatch,
        coupled,
        bounds={("a", 1): 0.5, ("b", 1): 0.6},
        mesh=Mesh({"a": 2, "b": 2}),
        constraints=(pipeline(),) if asked else (),
    )
    assert len({num for num, _ in seen if num > 1}) == 1, "no other number above one"
    assert [each for each in seen if each[0] == 1] == ([(1, "a"), (1, "b")] if asked else [])
    assert ("only one microbatch" in "".join(told)) == asked
    assert found.plan.prediction.step_s == (0.9 if asked else ALONE_S)


def test_alternatives_are_searched_in_order_of_their_bounds_until_a_bound_is_too_high(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    seen: list[tuple[str | None, int]] = []

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append((wish.axis, num))
        return made({8: 0.7, 2: 0.6}[num], num=num)

    bounds = {("a", 8): 0.3, ("b", 2): 0.5, ("b", 4): 0.65, ("b", 8): 0.67}
    found = search(
        monkeypatch,
        staged,
        bounds={(axis, num): bounds.get((axis, num), 0.9) for axis in "ab" for num in (2, 4, 8)},
        mesh=Mesh({"a": 2, "b": 2}),
        samples=8,
    )
    assert seen == [("a", 8), ("b", 2)]
    assert found.plan.prediction.step_s == 0.6
    assert "2 to 4 microbatches in stages along a (at least 900 ms)" in told[0]
    assert "4 to 8 microbatches in stages along b (at least 650 ms)" in told[0]


def test_a_bound_implies_bounds_for_other_numbers_of_microbatches(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    """With two stages, 4 microbatches take 5/4 of the compute time of a stage, and 8 take 9/8. A
    bound of 1.2 s for 4 microbatches implies at least 1.08 s for 8. For 2 larger microbatches,
    with 3 slots in sequence instead of 5, it implies at least 0.72 s."""
    seen: list[int] = []

    def too_slow(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        raise TooSlow(1.2)

    bounds = {("a", 4): 0.1, ("a", 8): 0.2, ("a", 2): 0.3}
    search(monkeypatch, too_slow, bounds=bounds, samples=8)
    assert seen == [4, 2]
    assert "8 microbatches in stages along a (at least 1.08 s)" in told[0]


@pytest.mark.parametrize("tokens", [8, 24])
def test_a_bound_applies_to_fewer_microbatches_only_if_the_same_splits_are_possible(
    tokens: int, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    """A stage has 3 devices. An eighth of 24 tokens can be split over them. An eighth of 8 tokens
    cannot, and neither can a quarter (2 tokens). A half (4 tokens) allows an uneven split."""
    seen: list[int] = []

    def too_slow(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        raise TooSlow(10.0)

    graph = fx.Graph()
    graph.placeholder("x").meta["val"] = torch.empty(tokens, device="meta")
    monkeypatch.setattr(TRACE, "graph", graph)
    bounds = {("a", 8): 0.1, ("a", 4): 0.2, ("a", 2): 0.3, ("b", 4): 2.0, ("b", 8): 2.0}
    search(monkeypatch, too_slow, bounds=bounds, mesh=Mesh({"a": 2, "b": 3}), samples=8)
    assert seen == {8: [8, 2], 24: [8]}[tokens]


@pytest.mark.parametrize("batch_s", [1.5, 2.1])
def test_a_bound_of_the_batch_on_the_stage_mesh_applies_to_all_numbers_of_microbatches(
    batch_s: float, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    """With two stages, 2 microbatches take 3/4 of the time of the batch through both stages, 4
    take 5/8, and 8 take 9/16."""
    seen: list[int] = []

    def too_slow(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        raise TooSlow(1.2)

    search(monkeypatch, too_slow, batch_s=batch_s, samples=8, effort="thorough")
    assert seen == {1.5: [8, 4], 2.1: []}[batch_s]
    assert f"(at least {seconds(batch_s * 0.75)})" in told[0] or batch_s == 2.1
    assert "2 to 8 microbatches in stages along a (at least 1.18 s)" in told[0] or batch_s == 1.5


@pytest.mark.parametrize(
    ("first", "steps_s", "seen"),
    [
        (4, {4: 0.5, 8: 0.6}, [4, 8, 2]),  # beyond 8 the step rises
        (8, {4: 0.6, 8: 0.5}, [8, 4, 16]),  # below 4 it rises
        (4, {4: math.inf}, [4, 8, 16]),  # fewer microbatches need more memory
    ],
)
def test_microbatch_numbers_beyond_a_slower_one_or_below_an_infeasible_one_are_skipped(
    first: int,
    steps_s: dict[int, float],
    seen: list[int],
    monkeypatch: pytest.MonkeyPatch,
    told: list[str],
) -> None:
    tried: list[int] = []

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        tried.append(num)
        step_s = steps_s.get(num, 0.55)
        if math.isinf(step_s):
            raise InfeasibleError("it does not fit", remedy="more memory")
        return made(step_s, num=num)

    order = [first, *(num for num in (4, 8, 2, 16) if num != first)]
    bounds = {("a", num): 0.01 * (place + 1) for place, num in enumerate(order)}
    search(monkeypatch, staged, bounds=bounds, samples=16, effort="thorough")
    assert tried == seen


def test_alternatives_that_the_work_budget_skips_are_listed_with_their_bounds(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    seen: dict[str, int] = {}
    alone = made(ALONE_S)
    alone.plan.proof.num_variables = 60_000
    for effort in EFFORTS:
        counted: list[int] = []

        def staged(
            self: Chooser, wish: Pipelined, num: int, limit_s: float, counted: list[int] = counted
        ) -> Any:
            counted.append(num)
            raise TooSlow(0.5)

        bounds = {("a", num): 0.4 - num / 1000 for num in (2, 4, 8, 16, 32, 64)}
        search(
            monkeypatch,
            staged,
            alone,
            bounds=bounds,
            mesh=Mesh({"a": 8, "b": 2}),
            samples=64,
            effort=effort,
        )
        seen[effort] = len(counted)
    assert seen["quick"] == 0 < seen["normal"] < seen["thorough"]
    assert "(not tried, at least" in told[0] and "(not tried" not in told[-1]


def test_without_a_plan_stages_are_searched_regardless_of_the_work_budget(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    """The budget applies only after a first plan was found."""
    seen: list[int] = []

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        if len(seen) == 1:
            raise ConstraintError("this number does not do", remedy="another")
        return made(2.0, num=num)

    found = search(
        monkeypatch,
        staged,
        InfeasibleError("all at once does not fit", remedy="more memory"),
        samples=16,
        effort="quick",
    )
    assert found.plan.prediction.step_s == 2.0 and len(seen) == 2


@pytest.mark.parametrize("is_first", [True, False])
def test_ctrl_c_ends_the_search_and_returns_the_best_plan_if_one_exists(
    is_first: bool, monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    seen: list[int] = []

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        raise KeyboardInterrupt

    def slow(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        raise TooSlow(2.0)

    refusal = InfeasibleError("all at once does not fit", remedy="more memory")
    if is_first:
        with pytest.raises(KeyboardInterrupt):
            search(monkeypatch, staged, refusal, samples=16)
        return
    found = search(monkeypatch, staged, samples=16, effort="thorough")
    assert found.plan.prediction.step_s == ALONE_S and len(seen) == 1
    assert found.was_interrupted and not search(monkeypatch, slow, samples=2).was_interrupted
    assert "2 to 16 microbatches in stages along a (not tried, at least" in told[0]


def test_the_status_shows_the_current_alternative_and_the_best_plan_so_far() -> None:
    said: list[str] = []
    status = SearchStatus(said.append)
    status("solve")
    status.begin("8 microbatches in stages along a", 3)
    status.add(made(0.5))
    status("emit")
    assert said == [
        "solving",
        "emitting, 8 microbatches in stages along a (3 more), best so far: 500 ms per"
        " step, gap 0.4 %",
    ]


def test_if_no_alternative_has_a_plan_the_error_of_the_last_one_is_raised(
    monkeypatch: pytest.MonkeyPatch, told: list[str]
) -> None:
    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        raise ConstraintError(f"not {num}", remedy="another")

    with pytest.raises(ConstraintError, match="not 2"):
        search(
            monkeypatch,
            staged,
            InfeasibleError("all at once does not fit", remedy="more memory"),
            samples=2,
        )


@pytest.mark.parametrize(
    "asked",
    [{"constraints": (pipeline(),)}, *({"outputs": each} for each in ("loss", "full", "dtensor"))],
    ids=str,
)
@pytest.mark.parametrize(
    ("again_s", "steps_s", "tried"),
    [
        (0.04, {}, []),  # too little is recomputed
        (0.2, {2: 0.9, 4: 0.85, 8: 0.86}, [2, 4, 8]),
        (0.2, {2: 1.1}, [2]),
        (0.2, {2: None, 4: 0.9}, [2]),  # the bound shows that two are not faster
        (0.2, {2: math.inf, 4: 0.9, 8: 0.95}, [2]),
    ],
)
def test_if_much_is_recomputed_more_microbatches_are_tried_while_they_are_faster(
    again_s: float,
    steps_s: dict[int, float | None],
    tried: list[int],
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    told: list[str],
) -> None:
    """A pipeline need not be requested if a call with microbatches returns the same outputs."""

    def plan(step_s: float, num: int) -> Any:
        entry = SimpleNamespace(again_s=again_s / num, instances=((),))
        prediction = SimpleNamespace(step_s=step_s)
        found = plan_of(num if num > 1 else 0, prediction=prediction, entries=(entry,))
        return SimpleNamespace(plan=found, computing_s=step_s)

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        step_s = steps_s[num]
        if step_s is None:
            raise TooSlow(2.0)
        if math.isinf(step_s):
            raise InfeasibleError("it does not fit", remedy="more memory")
        return plan(step_s, num)

    seen: list[int] = []
    monkeypatch.setattr(Chooser, "in_one_piece", lambda self, limit_s: plan(ALONE_S, 1))
    monkeypatch.setattr(Chooser, "in_stages", staged)
    options, batch = PlanOptions(**asked), {"x": torch.zeros(16, 2)}
    chooser = Chooser(
        torch.nn.Identity(), TRACE, (), batch, Mesh(1), HardwareProfile.load("h100-sxm"), options
    )
    found = chooser.plan()
    tried = [] if asked.get("outputs") == "dtensor" else tried
    assert seen == tried
    assert found.plan.prediction.step_s == min(
        [ALONE_S, *(s for num in tried if (s := steps_s[num]) is not None)]
    )


@pytest.mark.parametrize(
    ("fitting", "tried", "chosen"),
    [
        ({2, 4, 8, 16}, [2], 2),
        ({4, 8}, [2, 4], 4),
        ({8, 16}, [2, 4, 16, 8], 8),  # 4 samples per microbatch: one per device
        ({8}, [2, 4, 16], None),
        (set(), [2, 4, 16], None),
    ],
)
def test_sequential_microbatches_are_searched_only_if_those_that_need_least_memory_fit(
    fitting: set[int], tried: list[int], chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        if num not in fitting:
            raise InfeasibleError("it does not fit", remedy="more memory")
        return made(ALONE_S, num=num)

    monkeypatch.setattr(Chooser, "in_stages", staged)
    monkeypatch.setattr(chooser_module, "heads_of", lambda trace: ((), ()))
    options, batch = PlanOptions(outputs="loss"), {"x": torch.zeros(16, 2)}
    mesh, profile = Mesh({"a": 4}), HardwareProfile.load("h100-sxm")
    chooser = Chooser(torch.nn.Identity(), TRACE, (), batch, mesh, profile, options)
    refusal = InfeasibleError("the batch does not fit", remedy="more memory")
    if chosen is None:
        with pytest.raises(InfeasibleError, match="the batch does not fit"):
            chooser.in_parts(refusal, math.inf)
    else:
        assert chooser.in_parts(refusal, math.inf).plan.num_microbatches == chosen
    assert seen == tried


def test_candidate_microbatch_numbers_are_one_and_those_that_fill_the_stages() -> None:
    numbers_of = chooser_module.numbers_of
    assert numbers_of((1, 2, 3, 4, 6, 8, 12, 24), 2) == (1, 2, 3, 4, 6, 8, 12)
    assert numbers_of((1, 2, 4), 8) == (1, 4), "too few for the stages: as many as there are"
    assert numbers_of((1,), 4) == (1,)


def test_a_bound_needs_less_work_than_a_search_and_work_grows_with_the_mesh() -> None:
    def work(mesh: Mesh) -> float:
        each = Alternative(mesh, "a", 2, 0.75, 0.0, frozenset(), lambda: 0.0, lambda _: made(1.0))
        assert each.bound_work < each.search_work
        return each.search_work

    assert (
        work(Mesh({"a": 2})) < work(Mesh({"a": 2, "b": 2})) < work(Mesh({"a": 2, "b": 2, "c": 2}))
    )


@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (pipeline("s", microbatches=2), "2 microbatches are fewer than the stages along 's'"),
        (
            pipeline("s", microbatches=2, schedule="interleaved_1f1b"),
            "2 microbatches is not a multiple of the 4 ranks along 's'",
        ),
    ],
    ids=str,
)
def test_an_impossible_schedule_is_refused_before_a_microbatch_is_captured(
    asked: Pipelined, says: str, loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y.pow(2).mean() if loss else y

    def part(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a microbatch is captured")

    monkeypatch.setattr(captured_call, "trace_part", part)
    if (
        not loss and asked.schedule == "1f1b"
    ):  # backward waits for the user's loss, so GPipe runs, and a microbatch is captured for it
        with pytest.raises(AssertionError, match="is captured"):
            plan(
                Net(*map(torch.nn.Linear, [8] * 8, [8] * 8)),
                {"s": 4},
                example_inputs=(torch.ones(8, 8),),
                constraints=[asked],
            )
        return
    with pytest.raises(ConstraintError, match=says if loss else "returns no differentiable loss"):
        plan(
            Net(*map(torch.nn.Linear, [8] * 8, [8] * 8)),
            {"s": 4},
            example_inputs=(torch.ones(8, 8),),
            constraints=[asked],
        )


@pytest.mark.parametrize("axis", ["", "a"])
@pytest.mark.parametrize("limit_s", [1.0, math.inf])
@pytest.mark.parametrize("is_slow", [True, False])
def test_sequential_microbatches_are_validated_only_if_their_bound_is_below_a_known_plan(
    axis: str, limit_s: float, is_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []

    def part(*_: Any, validated: bool, **__: Any) -> Any:
        events.extend(["validated"] * validated)
        return TRACE, None

    def planned(*_: Any, **__: Any) -> Any:
        events.append("planned")
        if is_slow:
            raise TooSlow(2.0)
        return made(0.5, num=4)

    def validated(*_: Any, **__: Any) -> None:
        events.append("validated")

    monkeypatch.setattr(captured_call, "trace_part", part)
    monkeypatch.setattr(captured_call, "make_staged_plan", planned)
    monkeypatch.setattr(captured_call, "refuse_unproven", validated)
    for name in ("check_parts", "check_order"):
        monkeypatch.setattr(captured_call, name, lambda *_: None)
    monkeypatch.setattr(captured_call, "cut_points", lambda *_: ())
    batch, profile = {"x": torch.zeros(16, 2)}, HardwareProfile.load("h100-sxm")
    chooser = Chooser(
        torch.nn.Identity(), TRACE, (), batch, Mesh({"a": 2}), profile, PlanOptions(outputs="loss")
    )
    wish = Pipelined(axis, 4, "1f1b", None, independent=False)
    if is_slow:
        with pytest.raises(TooSlow):
            chooser.in_stages(wish, 4, limit_s)
    else:
        chooser.in_stages(wish, 4, limit_s)
    later = not axis and limit_s < math.inf
    after = ["validated"] * (not is_slow)
    assert events == (["planned", *after] if later else ["validated", "planned"])
