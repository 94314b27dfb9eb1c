"""Unchanged plans with stages are certified. A plan with one changed claim of the full plan or of a
stage is refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from changed import with_options
from torch import nn

import autopar
from autopar.api.planning import plan_model
from autopar.api.tracing import staged_trace
from autopar.capture import Trace
from autopar.certificate import Certificate, StagedTrace, certify
from autopar.constraints import fsdp, pipeline
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.errors import PlanError
from autopar.planner.pipeline.cuts import Pair
from autopar.planner.pipeline.lagrangian import UnitLagrangian
from autopar.plans import Pipeline, Plan
from autopar.sharding import Ref
from benchmarks import zoo

PROFILE = HardwareProfile.load("cpu-gloo")


@dataclass(frozen=True)
class Made:
    """A plan and the inputs of its certificate."""

    plan: Plan
    whole: Trace
    staged: StagedTrace

    def certificate(self, plan: Plan) -> Certificate:
        return certify(self.whole, plan, PROFILE, self.staged)


@pytest.fixture(scope="module")
def made() -> Made:
    model, batch = zoo.build("gpt2")
    mesh, force = (
        autopar.Mesh({"stage": 2, "data": 2}),
        (pipeline("stage", microbatches=4), fsdp("data")),
    )
    whole, planned = plan_model(
        model, mesh, example_inputs=batch, hardware="cpu-gloo", constraints=force, gap=0.15
    )
    assert planned.plan.pipeline is not None
    return Made(planned.plan, whole, staged_trace(planned.plan, model, whole, (), batch))


@pytest.mark.slow
def test_a_plan_with_stages_is_certified(made: Made) -> None:
    found = made.certificate(made.plan)
    assert found.ok, str(found)
    assert (
        found.step_s == pytest.approx(made.plan.prediction.step_s, rel=1e-12)
        and found.peak_bytes == made.plan.prediction.peak_bytes
    )
    assert any("proven by arithmetic" in note for note in found.notes)
    proof = made.plan.proof
    assert found.certified_bound_s == pytest.approx(proof.certified_bound_s, rel=1e-12)
    assert 0 < proof.certified_bound_s == proof.bound_s <= proof.objective_s
    assert Plan.loads(made.plan.dumps()) == made.plan


@pytest.mark.slow
def test_units_are_searched_if_multipliers_do_not_prove_the_requested_gap(
    made: Made,
) -> None:
    model, batch = zoo.build("gpt2")
    mesh, force = (
        autopar.Mesh({"stage": 2, "data": 2}),
        (pipeline("stage", microbatches=4), fsdp("data")),
    )
    plan = plan_model(
        model, mesh, example_inputs=batch, hardware="cpu-gloo", constraints=force, gap=1e-5
    )[1].plan
    proof = plan.proof
    assert proof.certified_bound_s < proof.searched_bound_s == proof.bound_s <= proof.objective_s
    assert proof.gap == pytest.approx(1 - proof.bound_s / proof.objective_s)
    found = made.certificate(plan)
    assert found.ok, str(found)
    assert found.certified_bound_s == pytest.approx(proof.certified_bound_s, rel=1e-12)
    assert found.claimed_bound_s == proof.bound_s
    assert made.plan.proof.searched_bound_s == 0.0, "what was asked for is proven"
    claimed = replace(
        plan,
        proof=replace(
            proof, searched_bound_s=proof.objective_s * 1.01, bound_s=proof.objective_s * 1.01
        ),
    )
    assert "bound" in {f.claim for f in made.certificate(claimed).findings}


def test_the_bound_of_one_stage_is_its_bound_times_the_microbatches() -> None:
    model, batch = zoo.build("gpt2")
    whole, planned = plan_model(
        model,
        autopar.Mesh({"data": 2}),
        example_inputs=batch,
        hardware="cpu-gloo",
        num_microbatches=4,
    )
    pipe, proof = planned.plan.pipeline, planned.plan.proof
    assert pipe is not None and len(pipe.stages) == 1
    own = pipe.stages[0].proof
    assert (proof.bound_s, proof.certified_bound_s) == pytest.approx(
        (4 * own.bound_s, 4 * own.certified_bound_s), rel=1e-12
    )
    staged = staged_trace(planned.plan, model, whole, (), batch)
    found = certify(whole, planned.plan, PROFILE, staged)
    assert found.ok, str(found)
    proven_more = replace(
        planned.plan, proof=replace(proof, certified_bound_s=proof.bound_s * 1.01)
    )
    assert "bound" in {f.claim for f in certify(whole, proven_more, PROFILE, staged).findings}


def test_a_bound_that_ignores_the_gain_from_boundary_layouts_is_detected(
    made: Made, monkeypatch: pytest.MonkeyPatch
) -> None:
    crosses = UnitLagrangian._crosses

    def dearer(
        self: UnitLagrangian, ref: Ref, *where: Any
    ) -> Iterator[tuple[int, tuple[Pair, ...]]]:
        for border, pairs in crosses(self, ref, *where):
            yield border, tuple((max(pair), max(pair)) for pair in pairs)

    monkeypatch.setattr(UnitLagrangian, "_crosses", dearer)
    model, batch = zoo.build("gpt2")
    mesh, force = (
        autopar.Mesh({"stage": 2, "data": 2}),
        (pipeline("stage", microbatches=4), fsdp("data")),
    )
    plan = plan_model(model, mesh, example_inputs=batch, hardware="cpu-gloo", constraints=force)[
        1
    ].plan
    assert plan.proof.certified_bound_s > made.plan.proof.certified_bound_s
    assert "bound" in {f.claim for f in made.certificate(plan).findings}


def piped(**changes: Any) -> Callable[[Plan], Plan]:
    def change(plan: Plan) -> Plan:
        assert plan.pipeline is not None
        return replace(plan, pipeline=replace(plan.pipeline, **changes))

    return change


def stage(number: int, change: Callable[[Plan], Plan]) -> Callable[[Plan], Plan]:
    def changed(plan: Plan) -> Plan:
        pipe = plan.pipeline
        assert isinstance(pipe, Pipeline)
        return replace(
            plan,
            pipeline=replace(
                pipe,
                stages=tuple(change(s) if n == number else s for n, s in enumerate(pipe.stages)),
            ),
        )

    return changed


def predicted(**changes: float) -> Callable[[Plan], Plan]:
    return lambda plan: replace(
        plan,
        prediction=replace(
            plan.prediction,
            **{name: getattr(plan.prediction, name) * by for name, by in changes.items()},
        ),
    )


def proven(**changes: float) -> Callable[[Plan], Plan]:
    return lambda plan: replace(
        plan,
        proof=replace(
            plan.proof, **{name: getattr(plan.proof, name) * by for name, by in changes.items()}
        ),
    )


def multiplied(which: str, by: float) -> Callable[[Plan], Plan]:
    """Scale the largest multiplier of the full problem."""

    def change(plan: Plan) -> Plan:
        found = list(getattr(plan.proof, which))
        most, layout = max(
            ((n, at) for n, p in enumerate(found) for at in p.values_s),
            key=lambda w: found[w[0]].values_s[w[1]],
        )
        found[most] = replace(
            found[most],
            values_s={**found[most].values_s, layout: found[most].values_s[layout] * by},
        )
        return replace(plan, proof=replace(plan.proof, **{which: tuple(found)}))

    return change


def all_multiplied(by: float) -> Callable[[Plan], Plan]:
    """Scale all potentials of the full problem."""

    def change(plan: Plan) -> Plan:
        found = (
            replace(p, values_s={layout: worth * by for layout, worth in p.values_s.items()})
            for p in plan.proof.potentials
        )
        return replace(plan, proof=replace(plan.proof, potentials=tuple(found)))

    return change


def slower_crossing(plan: Plan) -> Plan:
    entries = tuple(
        replace(e, time_s=e.time_s * 0.5) if e.kind == "output" and e.time_s else e
        for e in plan.entries
    )
    assert entries != plan.entries
    return replace(plan, entries=entries)


def forgetful(plan: Plan) -> Plan:
    """Remove a kept tensor that arrived from another stage and that backward reads."""
    arrived = {c.node for e in plan.entries if e.kind == "input" for c in e.nodes}
    kept = tuple(k for k in plan.kept if k.node not in arrived)
    assert kept != plan.kept
    return replace(plan, kept=kept)


def crossing(**changes: Any) -> Callable[[Plan], Plan]:
    """Change the first tensor that crosses from stage 0 to the next stage."""

    def change(plan: Plan) -> Plan:
        assert plan.pipeline is not None
        first, *others = plan.pipeline.crossings[0]
        return piped(crossings=((replace(first, **changes), *others),))(plan)

    return change


def twice_crossing(plan: Plan) -> Plan:
    assert plan.pipeline is not None
    return piped(crossings=((*plan.pipeline.crossings[0], plan.pipeline.crossings[0][0]),))(plan)


def other_runner_ups(plan: Plan) -> Plan:
    entries = tuple(
        replace(e, runner_up=replace(e.runner_up, strategy="S(7) -> S(7)")) if e.runner_up else e
        for e in plan.entries
    )
    assert entries != plan.entries
    return replace(plan, entries=entries)


CHANGES: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "the step": (predicted(step_s=0.9), "time"),
    "the compute of the slowest stage": (predicted(compute_s=0.9), "time"),
    "the bound": (proven(bound_s=1e3), "bound"),
    "the bound and the gap": (
        lambda p: replace(p, proof=replace(p.proof, bound_s=p.proof.objective_s, gap=0.0)),
        "bound",
    ),
    "the bound over all cuts": (proven(certified_bound_s=1.001), "bound"),
    "all multipliers": (all_multiplied(1.5), "bound"),
    "a multiplier that is gone": (multiplied("potentials", 0.0), "bound"),
    "a multiplier of no layout": (
        lambda p: replace(
            p,
            proof=replace(
                p.proof, potentials=(replace(p.proof.potentials[0], values_s={"X": 1.0}),)
            ),
        ),
        "bound",
    ),
    "the gap": (proven(gap=0.5), "bound"),
    "the objective": (proven(objective_s=0.99), "time"),
    "the microbatches in flight": (piped(num_in_flight=(1, 1)), "memory"),
    "the schedule": (piped(schedule="gpipe"), "memory"),
    "a stage's step": (stage(1, predicted(step_s=0.9)), "time"),
    "a stage's peak": (
        stage(
            0,
            lambda p: replace(
                p, prediction=replace(p.prediction, peak_bytes=p.prediction.peak_bytes - 1)
            ),
        ),
        "memory",
    ),
    "a stage's time of crossing": (stage(0, slower_crossing), "time"),
    "a stage's kept values": (
        stage(1, forgetful),
        "emission",
    ),  # no layout of a tensor that backward reads is kept
    "a stage's objective": (stage(0, proven(objective_s=0.9)), "time"),
    "a stage's certified bound": (stage(0, proven(certified_bound_s=1.5)), "bound"),
    "a stage's entries": (stage(0, lambda p: replace(p, entries=p.entries[1:])), "emission"),
    "a stage's collectives": (
        stage(1, lambda p: replace(p, communications=p.communications[1:])),
        "emission",
    ),
    "the bytes of what crosses": (crossing(bytes=1), "moves"),
    "the layout of what crosses": (crossing(layout=Layout.parse("P")), "moves"),
    "another name of what crosses": (crossing(node="nowhere"), "moves"),
    "whether its gradient comes back": (crossing(returns=False), "moves"),
    "nothing crosses": (piped(crossings=((),)), "moves"),
    "it crosses twice": (twice_crossing, "moves"),
    "with what a stage begins": (piped(modules=("another",)), "model"),
    "the budget of a stage": (stage(1, lambda p: with_options(p, memory_bytes=2**60)), "memory"),
    "the optimizer of a stage": (stage(0, lambda p: with_options(p, optimizer="sgd")), "model"),
    "the seconds in which outputs go to all stages": (piped(handed_s=1e-3), "time"),
    "the bytes of outputs that do": (piped(handed_bytes=4), "time"),
    "a promise that was not made": (piped(independent=True), "model"),
    "microbatches that were not asked for": (
        lambda p: with_options(p, num_microbatches=8),
        "model",
    ),
    "a pipeline that was not asked for": (
        lambda p: with_options(p, constraints=[{**p.options["constraints"][0], "microbatches": 8}]),
        "model",
    ),
    "the name of a stage's model": (
        stage(1, lambda p: replace(p, fingerprint=replace(p.fingerprint, model_name="other"))),
        "model",
    ),
    "the version that made a stage": (
        stage(0, lambda p: replace(p, fingerprint=replace(p.fingerprint, torch="1.0"))),
        "model",
    ),
    "what a stage reads": (
        stage(
            1,
            lambda p: replace(p, fingerprint=replace(p.fingerprint, inputs=(("x", "int64 [1]"),))),
        ),
        "model",
    ),
    "how a stage was captured": (stage(1, lambda p: replace(p, capture="at a glance")), "words"),
    "how it was captured": (lambda p: replace(p, capture="at a glance"), "words"),
    "a stage's slowdown": (
        stage(1, lambda p: replace(p, overlap=replace(p.overlap, slowdown=p.overlap.slowdown / 2))),
        "overlap",
    ),
    "a stage's runner-ups": (stage(0, other_runner_ups), "layouts"),
    "the batch": (
        lambda p: replace(p, fingerprint=replace(p.fingerprint, model="another")),
        "model",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_one_changed_claim_of_stages_is_detected(made: Made, name: str) -> None:
    change, claim = CHANGES[name]
    changed = change(made.plan)
    assert changed != made.plan
    found = made.certificate(changed)
    assert not found.ok
    assert claim in {f.claim for f in found.findings}, str(found)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        (piped(schedule="2f2b"), "its schedule is '2f2b'"),
        (
            lambda p: replace(p, overlap=replace(p.overlap, forward_bytes=64)),
            "decisions outside its stages",
        ),
        (
            lambda p: replace(
                p,
                prediction=replace(p.prediction, timeline=(("", "forward", "compute", 0.0, 1.0),)),
            ),
            "decisions outside its stages",
        ),
        (
            lambda p: replace(p, proof=replace(p.proof, balance=(1.0, 1.5))),
            "its proof's balance is",
        ),
        (
            stage(0, lambda p: replace(p, loss_rows=4)),
            "a stage processes 4 rows of the loss at a time",
        ),
    ],
)
def test_an_inconsistent_plan_with_stages_is_refused_when_it_is_read(
    made: Made, change: Callable[[Plan], Plan], complaint: str
) -> None:
    with pytest.raises(PlanError, match=complaint):
        Plan.loads(change(made.plan).dumps())


def test_explain_refuses_a_value_that_crosses_no_cut(made: Made) -> None:
    with pytest.raises(
        PlanError, match="nowhere crosses a cut, but stage 0 has no decision about it"
    ):
        autopar.explain(crossing(node="nowhere")(made.plan), profile=PROFILE)


class NamedByParameter(nn.Module):
    """A model with too few modules for four stages, so that cuts are before parameters, one of them
    in the module of an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.table = nn.Linear(16, 16), nn.Embedding(5, 16)
        self.keys, self.head = nn.Parameter(torch.randn(7, 16)), nn.Linear(16, 5)

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        hidden = x * self.first(x) + x + self.table(label)
        hidden = hidden + (hidden @ self.keys.t()).softmax(-1) @ self.keys
        return self.head(hidden).square().mean()


def test_a_stage_may_begin_with_a_parameter_of_a_module() -> None:
    model, batch = NamedByParameter(), {"x": torch.randn(12, 16), "label": torch.zeros(12).long()}
    four = autopar.constraints.pipeline("a", microbatches=2, schedule="gpipe")
    plan = autopar.plan(
        model,
        {"a": 4},
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=[four],
        outputs="loss",
        gap=0.5,
    )
    assert plan.pipeline is not None
    assert "table.weight" in plan.pipeline.modules
    assert autopar.check(plan, model, batch).ok
