"""Which pipelines are tried, and which are not, since bounds say enough."""

from __future__ import annotations

import logging
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from autopar.api import microbatch_search, pipeline_search, plan
from autopar.api.pipeline_search import Chooser
from autopar.constraints import Pipelined, fsdp, pipeline
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.core.units import seconds
from autopar.errors import ConstraintError, CoupledError, InfeasibleError
from autopar.planner import PlanOptions, TooSlow

ALONE_S = 1.0  # what is found without stages
TRACE: Any = SimpleNamespace(loss=0, given_back=(), outputs=(0, 1))


def uncovered(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What plans would say that they cover, which these have no place for."""
    told: list[str] = []

    def add_coverage(found: Any, line: str) -> Any:
        told.append(line)
        return found

    for module in (microbatch_search, pipeline_search):
        monkeypatch.setattr(module, "add_coverage", add_coverage)
    return told


def whole(step_s: float, compute_s: float = 0.0) -> Any:
    """A plan without stages."""
    plan = SimpleNamespace(prediction=SimpleNamespace(step_s=step_s), pipeline=None, entries=())
    return SimpleNamespace(plan=plan, computing_s=compute_s)


@pytest.mark.parametrize(
    ("compute_s", "asked", "device", "looked"),
    [
        (0.8, {}, "h100-sxm", True),
        (0.8, {"outputs": "full"}, "h100-sxm", True),
        (
            0.8,
            {"outputs": "dtensor"},
            "h100-sxm",
            False,
        ),  # in stages a call would return other outputs
        (0.95, {}, "h100-sxm", False),  # what stages wait for would take as long
        (0.8, {}, "cpu-gloo", False),
        (0.8, {"num_microbatches": 1}, "h100-sxm", False),
        (0.8, {"inference": True}, "h100-sxm", False),
        (0.8, {"batch": "local"}, "h100-sxm", False),
        (0.8, {"constraints": (fsdp(),)}, "h100-sxm", False),
        (0.95, {"constraints": (pipeline(),)}, "h100-sxm", True),
    ],
    ids=str,
)
@pytest.mark.parametrize("goes_on", [False, True])
def test_stages_are_tried_without_asking_where_a_plan_without_them_waits(
    compute_s: float,
    asked: dict[str, Any],
    device: str,
    looked: bool,
    goes_on: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Once, before the search without stages goes on for long where it would, and else behind
    it."""
    seen: list[tuple[str, float]] = []
    limits = list[float]()

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append((f"{num} along {wish.axis}", limit_s))
        if limit_s <= 0.5:
            raise TooSlow(0.6)
        return whole(0.5)

    def alone(self: Chooser, limit_s: float, elsewhere: Any = None) -> Any:
        if goes_on and elsewhere is not None:
            limits.append(elsewhere(ALONE_S, compute_s))
        return whole(ALONE_S, compute_s)

    monkeypatch.setattr(Chooser, "in_one_piece", alone)
    monkeypatch.setattr(Chooser, "_plan_schedules", staged)
    told = uncovered(monkeypatch)
    options, batch = (
        PlanOptions(**{"gap": 0.1, "outputs": "loss", **asked}),
        {"x": torch.zeros(4, 2)},
    )
    chooser = Chooser(
        torch.nn.Identity(),
        TRACE,
        (),
        batch,
        Mesh({"a": 2, "b": 1}),
        HardwareProfile.load(device),
        options,
    )
    found = chooser._pipelines(math.inf)
    assert found.plan.prediction.step_s == (0.5 if looked else ALONE_S)
    assert [s for s in seen if s[1] == 0.9] == ([("2 along a", 0.9)] if looked else []), (
        "a plan that saves more than the gap, once"
    )
    assert len({name for name, _ in seen}) == len(seen)
    assert ("no stages" in "".join(told)) == (asked.get("outputs") == "dtensor")
    beaten_s = (
        0.45 if asked.get("constraints") else 0.5 / 0.95
    )  # there one without stages would be taken
    assert limits in ([], [pytest.approx(beaten_s) if looked else math.inf])


@pytest.mark.parametrize("late", [False, True])
def test_when_the_time_is_over_and_there_is_a_plan_no_stages_are_tried(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []

    def alone(self: Chooser, limit_s: float, elsewhere: Any) -> Any:
        elsewhere(ALONE_S, 0.0)
        return whole(ALONE_S)

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        raise TooSlow(2.0)

    monkeypatch.setattr(Chooser, "in_one_piece", alone)
    monkeypatch.setattr(Chooser, "_plan_schedules", staged)
    uncovered(monkeypatch)
    options = PlanOptions(outputs="loss", time_limit_s=1.0, ends=1.0 if late else math.inf)
    chooser = Chooser(
        torch.nn.Identity(),
        TRACE,
        (),
        {"x": torch.zeros(4, 2)},
        Mesh({"a": 2}),
        HardwareProfile.load("h100-sxm"),
        options,
    )
    assert chooser._pipelines(math.inf).plan.prediction.step_s == ALONE_S
    assert bool(seen) != late


@pytest.mark.parametrize(
    ("asked", "steps_s"), [((), 1.0), ((pipeline(),), 0.97)], ids=["unasked", "asked"]
)
def test_stages_that_nobody_asked_for_are_taken_where_they_save_a_twentieth(
    asked: tuple[Pipelined, ...], steps_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Chooser, "in_one_piece", lambda self, limit_s, elsewhere: whole(ALONE_S))
    monkeypatch.setattr(Chooser, "_plan_schedules", lambda self, wish, num, limit_s: whole(0.97))
    told = uncovered(monkeypatch)
    batch, options = {"x": torch.zeros(4, 2)}, PlanOptions(outputs="loss", constraints=asked)
    chooser = Chooser(
        torch.nn.Identity(),
        TRACE,
        (),
        batch,
        Mesh({"a": 2}),
        HardwareProfile.load("h100-sxm"),
        options,
    )
    assert chooser._pipelines(math.inf).plan.prediction.step_s == steps_s
    assert "no microbatches (1.00 s); 2 microbatches in stages along a (970 ms)" in told[0]
    assert ("save less than 5 %" in told[0]) == (not asked)


def test_stages_that_nobody_asked_for_are_no_more_tried_once_samples_depend_on_each_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []

    def coupled(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(f"{num} along {wish.axis}")
        raise CoupledError("samples meet in a norm", remedy="one microbatch")

    monkeypatch.setattr(Chooser, "in_one_piece", lambda self, limit_s, elsewhere: whole(ALONE_S))
    monkeypatch.setattr(Chooser, "_plan_schedules", coupled)
    uncovered(monkeypatch)
    batch, mesh, options = (
        {"x": torch.zeros(4, 2)},
        Mesh({"a": 2, "b": 2}),
        PlanOptions(outputs="loss"),
    )
    chooser = Chooser(
        torch.nn.Identity(), TRACE, (), batch, mesh, HardwareProfile.load("h100-sxm"), options
    )
    assert chooser._pipelines(math.inf).plan.prediction.step_s == ALONE_S
    assert seen == ["2 along a"], "neither in one microbatch, nor along another axis"


@pytest.mark.parametrize(("bound_s", "tried"), [(1.3, [4]), (1.2, [4, 8])])
def test_more_microbatches_are_tried_as_long_as_waiting_less_may_help(
    bound_s: float,
    tried: list[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Two stages: a bound of M microbatches says that M/(M + 1) of it remain, however many they
    are; fewer wait for more."""
    seen: list[int] = []

    def too_slow(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        assert limit_s == ALONE_S * 0.99, "what saves less than the gap is not looked for"
        raise TooSlow(bound_s if len(seen) == 1 else 10.0)

    found = whole(ALONE_S)
    monkeypatch.setattr(Chooser, "in_one_piece", lambda self, limit_s, elsewhere: found)
    monkeypatch.setattr(Chooser, "_plan_schedules", too_slow)
    covered = uncovered(monkeypatch)
    options = PlanOptions(constraints=(pipeline(),))
    batch = {"x": torch.zeros(16, 2)}
    chooser = Chooser(
        torch.nn.Identity(),
        TRACE,
        (),
        batch,
        Mesh({"stage": 2}),
        HardwareProfile.load("h100-sxm"),
        options,
    )
    with caplog.at_level(logging.INFO, "autopar"):
        assert chooser._pipelines(float("inf")) is found
    assert seen == tried, "4/5 of 1.3 s are too slow, of 1.2 s are not; 8/9 of 10 s are"
    assert "with nothing to wait for" in caplog.text
    bounds = [bound_s, *[10.0] * (len(tried) - 1)]
    told = [
        f"{num} microbatches in stages along stage (at least {seconds(s)})"
        for num, s in zip(tried, bounds, strict=True)
    ]
    assert covered[0].endswith(
        f"tried, with the step found for each: no microbatches ({seconds(ALONE_S)});"
        f" {'; '.join(told)}"
    )


@pytest.mark.parametrize(
    "asked",
    [{"constraints": (pipeline(),)}, *({"outputs": each} for each in ("loss", "full", "dtensor"))],
    ids=str,
)
@pytest.mark.parametrize(
    ("again_s", "steps_s", "tried"),
    [
        (0.04, {}, []),  # too little is run again
        (0.2, {2: 0.9, 4: 0.85, 8: 0.86}, [2, 4, 8]),
        (0.2, {2: 1.1}, [2]),
        (0.2, {2: None, 4: 0.9}, [2]),  # a bound says that two are no faster
        (0.2, {2: math.inf, 4: 0.9, 8: 0.95}, [2]),
    ],
)
def test_where_much_is_run_again_microbatches_are_tried_while_they_are_faster(
    again_s: float,
    steps_s: dict[int, float | None],
    tried: list[int],
    asked: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without a pipeline in what is asked for, where the call returns the same of several."""

    def plan(step_s: float, num: int) -> Any:
        entry = SimpleNamespace(again_s=again_s / num, instances=((),))
        prediction = SimpleNamespace(step_s=step_s)
        alone = SimpleNamespace(prediction=prediction, pipeline=None, entries=(entry,))
        stages = (
            SimpleNamespace(stages=(alone,), num_microbatches=num, num_chunks=1)
            if num > 1
            else None
        )
        return SimpleNamespace(
            plan=SimpleNamespace(prediction=prediction, pipeline=stages, entries=(entry,)),
            computing_s=step_s,
        )

    def staged(self: Chooser, wish: Pipelined, num: int, limit_s: float) -> Any:
        seen.append(num)
        step_s = steps_s[num]
        if step_s is None:
            raise TooSlow(2.0)
        if math.isinf(step_s):
            raise InfeasibleError("it does not fit", remedy="more memory")
        return plan(step_s, num)

    seen: list[int] = []
    monkeypatch.setattr(
        Chooser, "in_one_piece", lambda self, limit_s, elsewhere=None: plan(ALONE_S, 1)
    )
    monkeypatch.setattr(Chooser, "in_stages", staged)
    uncovered(monkeypatch)
    options, batch = PlanOptions(**asked), {"x": torch.zeros(16, 2)}
    chooser = Chooser(
        torch.nn.Identity(), TRACE, (), batch, Mesh(1), HardwareProfile.load("h100-sxm"), options
    )
    found = chooser._pipelines(math.inf)
    tried = [] if asked.get("outputs") == "dtensor" else tried
    assert seen == tried
    assert found.plan.prediction.step_s == min(
        [ALONE_S, *(s for num in tried if (s := steps_s[num]) is not None)]
    )


def test_the_numbers_of_a_batch_are_one_and_those_that_fill_the_stages() -> None:
    assert microbatch_search.numbers_of((1, 2, 3, 4, 6, 8, 12, 24), 2) == (1, 2, 3, 4, 6, 8, 12)
    assert microbatch_search.numbers_of((1, 2, 4), 8) == (
        1,
        4,
    ), "too few for the stages: as many as there are"
    assert microbatch_search.numbers_of((1,), 4) == (1,)
    assert (
        microbatch_search.first_of((1, 4)) == (4,)
        and microbatch_search.first_of((1,)) == (1,)
        and microbatch_search.first_of((1, 2, 4, 8, 16)) == (4, 8, 16)
    )


@pytest.mark.parametrize("overhead_s", [0.0, 0.01, 0.1, 0.5, 2.0])
@pytest.mark.parametrize("num_stages", [2, 4, 8])
def test_the_walk_finds_the_best_number_where_the_step_falls_and_then_rises(
    overhead_s: float, num_stages: int
) -> None:
    """t(M) = overhead + 1/M: every such step has one valley among the numbers."""
    numbers = microbatch_search.numbers_of(
        tuple(n for n in range(1, 97) if 96 % n == 0), num_stages
    )
    steps = {num: (num + num_stages - 1) * (overhead_s + 1 / num) / num_stages for num in numbers}
    found: dict[int, float] = {}
    for num in microbatch_search.walk(numbers, found):
        found[num] = steps[num]
    assert min(found.values()) == min(steps.values())
    assert len(found) < len(numbers) or overhead_s > 0.01, (
        "where waiting is all, the first numbers are enough"
    )


def test_where_the_first_numbers_do_not_fit_fewer_are_not_tried() -> None:
    found: dict[int, float] = {}
    for num in microbatch_search.walk((1, 2, 4, 8, 16), found):
        found[num] = math.inf
    assert list(found) == [4, 8, 16]


@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (pipeline("s", microbatches=2), "2 microbatches are fewer than the stages along 's'"),
        (
            pipeline("s", microbatches=2, schedule="interleaved_1f1b"),
            "2 microbatches are not equal rounds over 4 ranks of 's'",
        ),
    ],
    ids=str,
)
def test_a_schedule_that_does_not_run_is_refused_before_a_microbatch_is_captured(
    asked: Pipelined, says: str, loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Net(torch.nn.Sequential):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y.pow(2).mean() if loss else y

    def part(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("a microbatch is captured")

    monkeypatch.setattr(microbatch_search, "trace_part", part)
    if (
        not loss and asked.schedule == "1f1b"
    ):  # backward waits for the user's loss: it runs as GPipe, for which a microbatch is captured
        with pytest.raises(AssertionError, match="is captured"):
            plan(
                Net(*map(torch.nn.Linear, [8] * 8, [8] * 8)),
                {"s": 4},
                example_inputs=(torch.ones(8, 8),),
                constraints=[asked],
            )
        return
    with pytest.raises(
        ConstraintError, match=says if loss else "returns no loss that is differentiated"
    ):
        plan(
            Net(*map(torch.nn.Linear, [8] * 8, [8] * 8)),
            {"s": 4},
            example_inputs=(torch.ones(8, 8),),
            constraints=[asked],
        )
