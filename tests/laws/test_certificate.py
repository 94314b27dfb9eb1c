"""`autopar.check` certifies unchanged plans, and refuses a plan with any changed claim and names
the claim."""

from __future__ import annotations

import copy
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import expert
import pytest
import torch
import zoo_small
from changed import with_options
from shown import shown
from torch import nn

import autopar
from autopar.capture import Trace, capture
from autopar.certificate import certify
from autopar.certificate.facts import Context, Facts
from autopar.certificate.multiplier_proof import Moments
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.cost.gradient_dtypes import WIDENED
from autopar.cost.memory import Liveness
from autopar.cost.price import price
from autopar.cost.priced import Priced
from autopar.planner import PlanOptions, make_plan
from autopar.plans import Plan
from autopar.sharding import classes_of

SQUARE, LINE = Mesh({"data": 2, "tensor": 2}), Mesh({"gpu": 4})
H100, GLOO = HardwareProfile.load("h100-sxm"), HardwareProfile.load("cpu-gloo")
Built = tuple[Trace, Plan]


class Net(nn.Module):
    """A model with two convolutions, a batch norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.second, self.head = nn.Conv2d(8, 8, 3, stride=2, padding=1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = torch.relu(self.second(torch.relu(self.norm(self.first(x)))))
        return nn.functional.cross_entropy(self.head(z.mean((2, 3))), y)


def conv() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    return Net(), {"x": torch.randn(8, 3, 16, 16), "y": torch.randint(0, 4, (8,))}


def planned(
    kind: str,
    mesh: Mesh,
    profile: HardwareProfile,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Built:
    model, batch = conv() if kind == "conv" else getattr(zoo_small, kind)(dtype=dtype)
    trace = capture(model, (), batch)
    return trace, make_plan(trace, mesh, profile, PlanOptions(**options), model_name=kind).plan


PLANS: dict[str, Callable[[], Built]] = {
    "gpt2, ample": lambda: planned("gpt2", SQUARE, H100),
    "llama, tight": lambda: planned("llama", LINE, H100, memory_bytes=190_000),
    "llama, bfloat16": lambda: planned("llama", LINE, H100, dtype=torch.bfloat16),
    "conv, halo": lambda: planned("conv", LINE, GLOO, optimizer="sgd"),
    "llama, by experts": lambda: planned(
        "llama", SQUARE, H100, constraints=expert.llama(fsdp=True)
    ),
    "gpt2, megatron": lambda: planned(
        "gpt2", SQUARE, H100, constraints=(autopar.constraints.megatron(tp=2, dp=2, zero=3),)
    ),
    "gpt2, one device": lambda: planned("gpt2", Mesh(1), H100),
}


SLOW = ("llama, tight", "llama, by experts", "llama, bfloat16", "gpt2, ample")


@pytest.mark.parametrize(
    "make",
    [pytest.param(m, id=n, marks=[pytest.mark.slow] * (n in SLOW)) for n, m in PLANS.items()],
)
def test_an_unchanged_plan_is_certified_with_its_gap(
    make: Callable[[], Built],
) -> None:
    trace, plan = make()
    found = certify(
        trace, Plan.loads(plan.dumps()), GLOO if plan.fingerprint.profile == "cpu-gloo" else H100
    )
    assert found.ok, str(found)
    assert (found.peak_bytes, found.step_s) == (
        plan.prediction.peak_bytes,
        pytest.approx(plan.prediction.step_s, rel=1e-9),
    )
    assert found.certified_bound_s is not None and found.certified_gap is not None
    assert plan.proof.searched_bound_s == plan.proof.bound_s
    assert (
        plan.proof.certified_bound_s
        <= found.certified_bound_s * (1 + 1e-9)
        <= plan.proof.objective_s * (1 + 2e-9)
    )
    assert found.certified_gap <= found.claimed_gap + 1e-3, (
        "these close at the root, so that multipliers tell what the search does"
    )
    assert str(found).startswith("certified: ") and "by arithmetic from" in str(found)
    again = any(e.recompute for e in plan.entries)
    if plan.options["memory_bytes"] == 190_000:
        assert again and plan.kept and plan.proof.memory_s, (
            "this one recomputes, and memory has a price"
        )


@pytest.fixture(scope="module")
def tight() -> Built:
    """Return a plan that recomputes, keeps layouts, communicates in both phases, and whose bound
    uses prices of memory."""
    trace, plan = planned("gpt2", SQUARE, H100, memory_bytes=300_000)
    assert certify(trace, plan, H100).ok
    assert any(e.again_s for e in plan.entries) and plan.kept and plan.proof.memory_s
    assert {c.phase for c in plan.communications} == {"forward", "backward"}
    return trace, plan


Change = Callable[[Plan], Plan]


def with_part(plan: Plan, name: str, pick: Callable[[Any], bool], **changes: Any) -> Plan:
    """Change the first element of a list that `pick` accepts. A change may be a function of the
    element."""
    parts = list(getattr(plan, name))
    at = next(i for i, part in enumerate(parts) if pick(part))
    parts[at] = replace(
        parts[at], **{k: v(parts[at]) if callable(v) else v for k, v in changes.items()}
    )
    return replace(plan, **{name: tuple(parts)})


def entry(pick: Callable[[Any], bool], **changes: Any) -> Change:
    return lambda plan: with_part(plan, "entries", pick, **changes)


def move(pick: Callable[[Any], bool] = lambda c: True, **changes: Any) -> Change:
    def change(c: Any) -> Any:
        return replace(
            c.collective, **{k: v(c.collective) if callable(v) else v for k, v in changes.items()}
        )

    return lambda plan: with_part(plan, "communications", pick, collective=change)


def proof(**changes: Any) -> Change:
    def change(plan: Plan) -> Plan:
        return replace(
            plan,
            proof=replace(
                plan.proof, **{k: v(plan.proof) if callable(v) else v for k, v in changes.items()}
            ),
        )

    return change


def prediction(**changes: Any) -> Change:
    def change(plan: Plan) -> Plan:
        new = {k: v(plan.prediction) if callable(v) else v for k, v in changes.items()}
        return replace(plan, prediction=replace(plan.prediction, **new))

    return change


def relaid(text: str, side: str) -> Callable[[Any], Any]:
    """Replace the layouts of one side of the first node."""

    def change(e: Any) -> Any:
        strategy = e.nodes[0].strategy
        new = {side: tuple(Layout.parse(text) for _ in getattr(strategy, side))}
        return (replace(e.nodes[0], strategy=replace(strategy, **new)), *e.nodes[1:])

    return change


def stored(text: str) -> Callable[[Any], Any]:
    """Change the storage layout of a parameter and its gradient."""
    at = Layout.parse(text)
    return lambda e: (replace(e.nodes[0], strategy=Strategy((at,), (at,))),)


def without(name: str, pick: Callable[[Any], bool] = lambda part: True) -> Change:
    def change(plan: Plan) -> Plan:
        parts = list(getattr(plan, name))
        parts.remove(next(p for p in parts if pick(p)))
        return replace(plan, **{name: tuple(parts)})

    return change


def scaled(factor: float) -> Callable[[Any], Any]:
    return lambda p: tuple(
        replace(x, values_s={k: v * factor for k, v in x.values_s.items()}) for x in p.potentials
    )


def raised(p: Any) -> Any:
    """Add one second to one of the values."""
    first = min(p.values_s)
    return replace(p, values_s={**p.values_s, first: p.values_s[first] + 1.0})


def is_gather(c: Any) -> bool:
    return bool(c.collective.kind == "all_gather")


def is_sharded(e: Any) -> bool:
    return bool(e.kind == "parameter" and "S(" in str(e.nodes[0].strategy.outputs[0]))


def other_layout(k: Any) -> tuple[Layout, ...]:
    return tuple(
        Layout.parse(text) for text in ("R R", "S(0) R") if Layout.parse(text) not in k.layouts
    )[:1]


def bars(**changes: Any) -> Change:
    """Change the second bar of the timeline."""

    def change(plan: Plan) -> Plan:
        timeline = list(plan.prediction.timeline)
        names = ("label", "phase", "kind", "start_s", "duration_s")
        timeline[1] = tuple(
            changes.get(name, value) for name, value in zip(names, timeline[1], strict=True)
        )  # type: ignore[assignment]
        return replace(plan, prediction=replace(plan.prediction, timeline=tuple(timeline)))

    return change


def exchanged(plan: Plan) -> Plan:
    """Exchange the labels of two bars of one phase and lane, so that all sums stay the same."""
    timeline = list(plan.prediction.timeline)
    one = next(i for i, bar in enumerate(timeline) if bar[1:3] == ("forward", "compute"))
    other = next(
        i
        for i, bar in enumerate(timeline)
        if bar[1:3] == ("forward", "compute") and bar[0] != timeline[one][0]
    )
    timeline[one], timeline[other] = (
        (timeline[other][0], *timeline[one][1:]),
        (timeline[one][0], *timeline[other][1:]),
    )
    return replace(plan, prediction=replace(plan.prediction, timeline=tuple(timeline)))


def marked(**changes: Any) -> Change:
    """Change the fingerprint."""
    return lambda plan: replace(plan, fingerprint=replace(plan.fingerprint, **changes))


CHANGES: dict[str, tuple[Change, str]] = {
    "two bars with each other's labels": (
        exchanged,
        "time: the timeline has compute of .*, not compute of",
    ),
    "another batch": (
        marked(inputs=(("input_ids", "int64 [8, 12]"),)),
        "model: the inputs are input_ids int64 .4, 12., labels .*, not input_ids int64 .8, 12.$",
    ),
    "a profile's name": (marked(profile="h200"), "model: the plan is for profile 'h200' of hash"),
    "how it was captured": (
        lambda p: replace(p, capture="at a glance"),
        "words: the model was captured .*, not at a glance",
    ),
    "an option that is missing": (
        lambda p: replace(p, options={k: v for k, v in p.options.items() if k != "gap"}),
        "model: the plan does not record its option gap",
    ),
    "rows of the loss that were not asked for": (
        lambda p: with_options(p, loss_rows=7),
        "model: the loss uses 0 rows at a time, but 7",
    ),
    "microbatches that were not asked for": (
        lambda p: with_options(p, num_microbatches=2),
        "model: the plan has 1 microbatches, but 2",
    ),
    "a constraint of an axis that is not there": (
        lambda p: with_options(p, constraints=[{"plan": "ddp", "axes": ["row"]}]),
        "model: .*row",
    ),
    "stages that it does not have": (
        lambda p: with_options(p, constraints=[autopar.constraints.pipeline("data").to_json()]),
        "model: the pipeline's axis is '', but 'data' was requested",
    ),
    "an op without a rule, where that was to be refused": (
        lambda p: with_options(entry(lambda e: e.op == "dot", replicated=True)(p), strict=True),
        "model: it has no sharding rule and runs replicated",
    ),
    "nothing runs beside compute": (
        lambda p: replace(p, overlap=replace(p.overlap, slowdown=1.0)),
        "overlap: a hidden second costs compute 0.41 s on this hardware, not 1",
    ),
    "another decision's name": (
        entry(lambda e: e.op == "dot", key="h.*.attn/dot/forward/7"),
        r"words: its key is '.*/dot/.*', not 'h",
    ),
    "another module's name": (
        entry(lambda e: e.op == "dot", module="h.*.mlp.other"),
        "words: its module is .* not 'h",
    ),
    "another op's name": (
        entry(lambda e: e.op == "dot", op="mm"),
        "words: its op is 'dot', not 'mm'",
    ),
    "an op that has a rule, as one without": (
        entry(lambda e: e.op == "dot", replicated=True),
        "words: its replicated is False",
    ),
    "a rule of ours as one found by experiment": (
        entry(lambda e: e.op == "dot", discovered=("dot",)),
        "words: its discovered is",
    ),
    "a collective in another module": (
        lambda p: with_part(p, "communications", is_gather, module="lm_head.other"),
        "words: a collective .* attributed to lm_head.other",
    ),
    "a bar of a layer that is not there": (
        bars(label="transformer.h.9"),
        "words: the plan has no .* of transformer.h.9 in",
    ),
    "a bar of another lane": (bars(kind="waiting"), "words: the plan has no waiting of"),
    "a bar of another phase": (bars(phase="sideways"), "words: the plan has no .* in sideways"),
    "a bar that begins before time": (bars(start_s=-1.0), "words: .* starts at -1 s, before"),
    "a layout that no rule offers": (
        entry(lambda e: e.op == "dot", nodes=relaid("P P", "inputs")),
        "layouts: no rule",
    ),
    "a layout without its axis order": (
        entry(lambda e: e.kind == "output", nodes=relaid("S(0) S(0)", "inputs")),
        "layouts: ",
    ),
    "a layout of a dim that the tensor has not": (
        entry(lambda e: e.kind == "compute", nodes=relaid("S(5) R", "outputs")),
        r"layouts: .*S\(5\) R.* cannot be .* of shape",
    ),
    "a collective to a dim that the tensor has not": (
        lambda p: with_part(p, "communications", is_gather, target=Layout.parse("R S(7)")),
        r"layouts: .*R S\(7\).* of shape",
    ),
    "a kept value in a dim that it has not": (
        lambda p: with_part(p, "kept", lambda k: True, layouts=(Layout.parse("S(9) R"),)),
        r"layouts: .*S\(9\) R.* of shape",
    ),
    "a storage layout that does not fit": (
        entry(is_sharded, nodes=stored("P R")),
        "layouts: it cannot be stored as P R",
    ),
    "another storage layout": (entry(is_sharded, nodes=stored("R R")), "(moves|memory): "),
    "an operand that is missing": (
        entry(
            lambda e: e.kind == "compute",
            nodes=lambda e: (replace(e.nodes[0], strategy=Strategy((), ())), *e.nodes[1:]),
        ),
        "layouts: .* does not have one layout per tensor",
    ),
    "an entry's time": (
        entry(lambda e: e.time_s > 0, time_s=lambda e: e.time_s * 0.5),
        "time: one instance takes",
    ),
    "a runner-up that no rule offers": (
        entry(
            lambda e: e.runner_up, runner_up=lambda e: replace(e.runner_up, strategy="P P -> P P")
        ),
        "layouts: .*, its runner-up",
    ),
    "an entry's kind": (
        entry(lambda e: e.kind == "compute", kind="output"),
        "layouts: it is a compute",
    ),
    "an entry is missing": (
        without("entries", lambda e: e.kind == "compute"),
        "layouts: the plan has no decision for",
    ),
    "an entry stands twice": (
        lambda plan: replace(plan, entries=(*plan.entries, plan.entries[-1])),
        "layouts: the plan has two decisions for",
    ),
    "an entry of no nodes": (
        lambda p: replace(p, entries=(*p.entries, replace(p.entries[0], instances=()))),
        "layouts: it has no",
    ),
    "a kept value of no tensors": (
        lambda p: replace(p, kept=(*p.kept, replace(p.kept[0], instances=()))),
        "kept values: it has no",
    ),
    "a kept value that is not made": (
        lambda p: with_part(p, "kept", lambda k: True, result=3),
        "kept values: the model has no such",
    ),
    "a collective of what is not made": (
        lambda p: with_part(p, "communications", is_gather, result=3),
        "moves: .* does not compute",
    ),
    "nothing runs again": (
        entry(lambda e: e.recompute, recompute=()),
        "kept values: backward reads it|moves: backward reads it",
    ),
    "what may not run again does": (
        entry(lambda e: e.phase == "backward" and e.kind == "compute", recompute=lambda e: e.nodes),
        "layouts: backward cannot recompute it",
    ),
    "more runs again than need be": (
        entry(
            lambda e: (
                e.kind == "compute" and e.phase == "forward" and not e.recompute and e.time_s > 0
            ),
            recompute=lambda e: e.nodes,
        ),
        "time: the step takes|layouts: backward cannot",
    ),
    "a byte count": (
        move(is_gather, bytes=lambda c: c.bytes // 2),
        "moves: all_gather .*: a device contributes",
    ),
    "an axis": (
        move(is_gather, axis=lambda c: 1 - c.axis),
        "moves: all_gather .* does not return this layout",
    ),
    "a dim": (
        move(is_gather, dim=lambda c: 1 - c.dim if c.dim < 2 else 0),
        "moves: all_gather .* does not return this layout",
    ),
    "a reduction": (
        move(lambda c: c.collective.reduce_op, reduce_op="max"),
        "moves: .* does not return this layout",
    ),
    "a dtype": (move(dtype="float64"), "moves: .*: it moves float64"),
    "halo bytes": (move(halo_bytes=64), "moves: .*: a device receives 0 bytes"),
    "a collective's time": (
        lambda p: with_part(p, "communications", is_gather, time_s=lambda c: c.time_s / 2),
        "moves: .*: it takes",
    ),
    "a collective's target": (
        lambda p: with_part(p, "communications", is_gather, target=lambda c: c.source),
        "moves: ",
    ),
    "a collective's phase": (
        lambda p: with_part(p, "communications", lambda c: c.phase == "backward", phase="forward"),
        "moves|kept values: ",
    ),
    "a collective is missing": (
        without("communications", is_gather),
        "moves: .*which no collective returns",
    ),
    "a collective stands twice": (
        lambda p: replace(p, communications=(*p.communications, p.communications[0])),
        "moves: .* returns a layout that already exists",
    ),
    "a kept layout": (
        lambda p: with_part(p, "kept", lambda k: other_layout(k), layouts=other_layout),
        "kept values: ",
    ),
    "kept bytes": (
        lambda p: with_part(p, "kept", lambda k: k.bytes, bytes=lambda k: k.bytes - 1),
        "kept values: one instance holds",
    ),
    "a layout is kept twice": (
        lambda p: with_part(
            p,
            "kept",
            lambda k: k.bytes,
            layouts=lambda k: k.layouts * 2,
            bytes=lambda k: k.bytes * 2,
        ),
        "kept values: a layout is kept twice",
    ),
    "a kept value is missing": (
        without("kept", lambda k: "/parameter" not in k.node),
        "kept values: backward reads it",
    ),
    "the objective": (
        proof(objective_s=lambda p: p.objective_s * 0.99),
        "time: the objective takes",
    ),
    "the step": (prediction(step_s=lambda p: p.step_s * 0.99), "time: the step takes"),
    "a bar of the time line": (
        prediction(timeline=lambda p: p.timeline[1:]),
        "time: .* on the timeline",
    ),
    "what is hidden": (
        prediction(hidden_s=lambda p: p.hidden_s * 0.9 + 1e-6),
        "overlap: simulated, the step hides",
    ),
    "the simulated step": (
        prediction(simulated_s=lambda p: p.simulated_s * 0.99),
        "overlap: simulated, the step takes",
    ),
    "the slowdown": (
        lambda p: replace(p, overlap=replace(p.overlap, slowdown=0.1)),
        "overlap: a hidden second costs compute 0.41 s",
    ),
    "what early steps hold": (
        lambda p: replace(
            p, overlap=replace(p.overlap, backward_bytes=2 * p.overlap.backward_bytes + 1)
        ),
        "overlap: early collectives hold at most",
    ),
    "a collective's slack": (
        lambda p: with_part(
            p, "communications", lambda c: c.slack == "critical", slack="deferrable"
        ),
        "moves: .* is critical, not deferrable",
    ),
    "what counts as overlapping compute": (
        lambda p: with_part(p, "communications", lambda c: c.slack == "critical", beside=True),
        "moves: .* does not count as overlapping",
    ),
    "what does not count so": (
        lambda p: with_part(p, "communications", lambda c: c.beside, beside=False),
        "moves: .* counts as overlapping compute",
    ),
    "the balance": (proof(balance=(0.9, 1.0)), "bound: the multipliers prove"),
    "a balance beyond its range": (proof(balance=(1.0, 1.5)), "bound: balance .* proves nothing"),
    "what it takes by itself": (
        lambda p: with_part(
            p, "communications", lambda c: c.alone_s, alone_s=lambda c: c.alone_s * 2
        ),
        "moves: .* s by itself, not",
    ),
    "that it may share a bucket": (
        lambda p: with_part(p, "communications", lambda c: c.alone_s, alone_s=None),
        "moves: .* counts as a share of a bucket",
    ),
    "that it may share none": (
        lambda p: with_part(
            p,
            "communications",
            lambda c: c.alone_s is None and c.collective.kind != "slice",
            alone_s=lambda c: c.time_s,
        ),
        "moves: .* has no share of a bucket",
    ),
    "the time of what runs again": (
        lambda p: with_part(p, "entries", lambda e: e.again_s, again_s=lambda e: e.again_s * 2),
        "time: one instance takes .* when recomputed",
    ),
    "the peak": (prediction(peak_bytes=lambda p: p.peak_bytes - 4), "memory: the peak is"),
    "bytes by kind": (
        prediction(memory_bytes=lambda p: {**p.memory_bytes, "optimizer": 0}),
        "memory: optimizer: ",
    ),
    "a smaller budget": (
        lambda p: with_options(p, memory_bytes=p.prediction.peak_bytes - 1),
        "memory: .* over the budget",
    ),
    "a larger budget": (
        lambda p: with_options(p, memory_bytes=p.options["memory_bytes"] * 2),
        "bound: the multipliers prove",
    ),
    "no budget": (lambda p: with_options(p, memory_bytes=2**60), "bound: the multipliers prove"),
    "another optimizer": (lambda p: with_options(p, optimizer="sgd"), "time: one instance takes"),
    "a constraint it does not meet": (
        lambda p: with_options(p, constraints=[{"plan": "ddp", "axes": None}]),
        "layouts: the problem does not offer",
    ),
    "the certified bound": (
        proof(certified_bound_s=lambda p: p.certified_bound_s * 1.001),
        "bound: the multipliers prove",
    ),
    "both bounds and the gap": (
        proof(certified_bound_s=lambda p: p.objective_s, bound_s=lambda p: p.objective_s, gap=0.0),
        "bound: the multipliers prove",
    ),
    "the bound alone": (
        proof(bound_s=lambda p: p.objective_s * 1.01),
        "bound: the bound is claimed to be",
    ),
    "the bound and its gap": (
        proof(bound_s=lambda p: p.objective_s, gap=0.0),
        "bound: the bound is claimed to be .* the search claims",
    ),
    "a bound that no search proved": (
        proof(searched_bound_s=0.0),
        "bound: the bound is claimed to be .* no search any",
    ),
    "what the search proved, beyond the objective": (
        proof(
            searched_bound_s=lambda p: p.objective_s * 1.01, bound_s=lambda p: p.objective_s * 1.01
        ),
        "bound: the search claims",
    ),
    "what the search proved, less than is claimed": (
        proof(searched_bound_s=lambda p: p.bound_s * 0.999),
        "bound: the bound is claimed to be",
    ),
    "the gap": (proof(gap=lambda p: p.gap + 0.01), "bound: objective and bound are"),
    "a bound that is no number": (
        proof(certified_bound_s=math.nan),
        "bound: the multipliers prove",
    ),
    "larger multipliers that claim more": (
        proof(potentials=scaled(1.1), certified_bound_s=lambda p: p.bound_s),
        "bound: the multipliers prove",
    ),
    "one multiplier": (
        proof(potentials=lambda p: (raised(p.potentials[0]), *p.potentials[1:])),
        "bound: the multipliers prove",
    ),
    "a price of memory": (
        proof(memory_s=lambda p: {k: v * 3 for k, v in p.memory_s.items()}),
        "bound: the multipliers prove",
    ),
    "a price of memory where no row holds": (
        proof(memory_s={"/x/forward/0": 1.0}),
        "bound: no memory constraint",
    ),
    "a multiplier of no tensor": (
        proof(
            potentials=lambda p: (
                replace(p.potentials[0], node="up/x/forward/0"),
                *p.potentials[1:],
            )
        ),
        "bound: a multiplier ",
    ),
    "the model": (
        lambda p: replace(p, fingerprint=replace(p.fingerprint, model="0" * 16)),
        "model: the plan is for another model",
    ),
    "the profile": (
        lambda p: replace(p, fingerprint=replace(p.fingerprint, profile_hash=GLOO.hash)),
        "model: the plan is for profile",
    ),
    "the mesh": (
        lambda p: replace(p, mesh=Mesh({"data": 4, "tensor": 2})),
        "layouts|moves|memory|time|bound: ",
    ),
}


@pytest.fixture(scope="module")
def stated() -> Callable[..., Priced]:
    """Cache the statement of the problem, which is the same for most changed plans."""
    known: dict[str, Priced] = {}
    state = Context.problem

    def remembered(self: Context, trace: Trace, plan: Plan, profile: HardwareProfile) -> Priced:
        key = f"{plan.mesh} {dict(plan.options)}"
        if key not in known:
            known[key] = state(self, trace, plan, profile)
        return known[key]

    return remembered


@pytest.mark.parametrize(("change", "finding"), CHANGES.values(), ids=CHANGES.keys())
def test_a_plan_with_one_changed_claim_is_refused_with_that_claim(
    tight: Built,
    stated: Callable[..., Priced],
    change: Change,
    finding: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Context, "problem", stated)
    trace, plan = tight
    other = change(plan)
    assert other != plan
    found = certify(trace, other, H100)
    assert not found.ok and str(found).startswith("NOT certified")
    assert any(re.match(finding, str(f)) for f in found.findings), str(found)


# the trace depends on the rows of the loss; `autopar.check` creates it with them
FREE = (
    "loss_rows",
    "runner_up",
    "num_variables",
    "num_constraints",
    "memory_price_s_per_gib",
    "potentials",
    "memory_s",
    "options",
    "gap",
    "version",
)


def numbers(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Iterate over the paths to all numbers of a plan that are claims. The start of a bar between
    other bars is not a claim."""
    if (
        isinstance(data, int | float)
        and not isinstance(data, bool)
        and not (path[-3:-2] == ("timeline",) and path[-1] == 3)
    ):
        yield path
    for key in (
        data if isinstance(data, dict) else range(len(data)) if isinstance(data, list) else ()
    ):
        if key not in FREE:
            yield from numbers(data[key], (*path, key))


@pytest.mark.slow
def test_a_plan_with_any_changed_number_is_refused(
    tight: Built, stated: Callable[..., Priced], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Context, "problem", stated)
    trace, plan = tight
    data = json.loads(plan.dumps())
    places = list(numbers(data))
    passed, num_read = [], 0
    for path in random.Random(0).sample(places, 150):
        changed = copy.deepcopy(data)
        part = changed
        for key in path[:-1]:
            part = part[key]
        part[path[-1]] = part[path[-1]] * 2 + 3
        try:
            other = Plan.loads(json.dumps(changed))
        except autopar.AutoparError:
            continue
        num_read += 1
        if certify(trace, other, H100).ok:
            passed.append(path)
    assert not passed
    assert num_read > 75


def test_the_certificate_runs_no_solver(tight: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("a certificate needs no solver")

    for name in (
        "formulation.Formulation.__post_init__",
        "highs.Engine.__init__",
        "solver.BranchAndCut",
        "min_budget.least_budget",
    ):
        monkeypatch.setattr(f"autopar.solve.{name}", refuse)
    trace, plan = tight
    assert certify(trace, plan, H100).ok
    with pytest.raises(AssertionError, match="needs no solver"):
        make_plan(trace, SQUARE, H100, PlanOptions())


@pytest.mark.parametrize("returns", (False, True))
def test_the_memory_that_is_live_at_a_moment_equals_that_of_the_planner(
    tight: Built, returns: bool
) -> None:
    model, batch = shown(2048)
    trace = capture(model, (), batch) if returns else tight[0]
    priced = price(trace, classes_of(trace, SQUARE.shape), SQUARE, H100, budget_bytes=1)
    moments, facts = Moments(trace, Facts.of(trace), priced, SQUARE.shape), Facts.of(trace)
    liveness = Liveness(trace, priced)
    certain = liveness.certain
    assert (
        len(certain) > 7
        and liveness.returned
        and bool(liveness.scratch) == returns == bool(liveness.widened)
    )
    assert any(moment.key.endswith(WIDENED) for moment in certain) == returns
    for moment in certain:
        node = moment.key.removesuffix(WIDENED)
        row = moments.row(facts.names[node] + moment.key.removeprefix(node), 1.0)
        assert row is not None
        assert dict(row.kept) == dict(moment.kept)
        assert {n: tuple(sizes) for n, sizes in row.live.items()} == dict(moment.live)
    assert (
        moments.row("up/no/backward/0", 1.0) is None
        and moments.row(next(k for k in facts.nodes if "/forward/" in k), 1.0) is None
    )


def test_check_finds_the_profile_and_refuses_another_batch() -> None:
    model, batch = conv()
    plan = autopar.plan(model, LINE, example_inputs=batch, hardware="cpu-gloo")
    assert autopar.check(plan, model, batch).ok
    other = {name: torch.cat([x, x]) for name, x in batch.items()}
    found = autopar.check(plan, model, other)
    assert [f.claim for f in found.findings] == ["model"] and found.step_s is None
    assert "another batch: x is float32 [8, 3, 16, 16] in the plan" in str(found)
    wrong = autopar.check(plan, model, batch, hardware=H100)
    assert [f.claim for f in wrong.findings] == ["model"] and "the profile is 'h100-sxm'" in str(
        wrong
    )
    nowhere = replace(plan, fingerprint=replace(plan.fingerprint, profile="mine"))
    with pytest.raises(autopar.AutoparError, match="hardware profile 'mine' does not exist"):
        autopar.check(nowhere, model, batch)


def test_a_plan_of_the_other_solver_is_certified_without_multipliers() -> None:
    trace, plan = planned("conv", LINE, GLOO, solver="cbc")
    assert plan.proof.certified_bound_s == 0.0 and not plan.proof.potentials
    found = certify(trace, plan, GLOO)
    assert found.ok and found.num_multipliers == 0
    assert found.certified_bound_s is not None and 0 < found.certified_bound_s < plan.proof.bound_s
