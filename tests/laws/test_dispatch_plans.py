"""Plans with dispatched experts are chosen if they are faster, and are priced, emitted, run and
certified like other plans.

Volumes of the preset are tested in `test_expert_parallel`, the op itself in `test_dispatch`.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import zoo_small
from torch import Tensor, nn
from torch.distributed.tensor import Shard
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar import ops
from autopar.api.planning import plan_model
from autopar.capture import capture
from autopar.certificate import certify
from autopar.constraints import expert_parallel
from autopar.core.collective import faster
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Strategy
from autopar.core.mesh import Mesh
from autopar.core.problem import OpStrategy
from autopar.core.solution import Solution
from autopar.emit import emit_stage
from autopar.errors import PlanError
from autopar.planner.reprice import decisions, problems_of, reprice_plan
from autopar.planner.sensitivity import _Local, local_load, variants_by_op
from autopar.plans import COMPUTE, Communication, Plan
from autopar.program.lockstep import run_lockstep
from autopar.request import PlanOptions

H100 = HardwareProfile.load("h100-sxm")
LINE, SQUARE = Mesh({"expert": 2}), Mesh({"data": 2, "expert": 2})


@cache
def mixtral(hidden: int, seq: int, num_experts: int, picks: int) -> tuple[Any, dict[str, Any]]:
    config = AutoConfig.for_model(
        "mixtral",
        num_hidden_layers=1,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=8,
        num_key_value_heads=8,
        vocab_size=512,
        num_local_experts=num_experts,
        num_experts_per_tok=picks,
    )
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    ids = torch.zeros(8, seq, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def slow(profile: HardwareProfile, times: float) -> HardwareProfile:
    """Return a profile whose links have `times` less bandwidth, given only by formulas."""
    links = {
        name: replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times, curves={})
        for name, link in profile.links.items()
    }
    return replace(profile, links=links, hash="slow")


def dispatches(plan: Plan) -> set[bool]:
    """Return whether tokens are sharded in the decisions about experts, all of which shard the
    experts."""
    chosen = [c for e in plan.entries for c in e.nodes if "experts/experts" in c.node]
    found = [
        (c.strategy.inputs["backward" in c.node], c.strategy.inputs[3 + ("backward" in c.node)])
        for c in chosen
    ]
    assert found and all(up.placements[0] == Shard(0) for _, up in found)
    return {x.placements[0] == Shard(0) for x, _ in found}


@pytest.mark.parametrize(
    ("num_experts", "picks", "devices", "expected"),
    [(8, 2, 8, True), (8, 1, 4, True), (8, 4, 2, False), (8, 6, 2, False)],
    ids=["2 of 8 on 8", "1 of 8 on 4", "4 of 8 on 2", "6 of 8 on 2"],
)
def test_on_slow_links_tokens_are_dispatched_if_that_moves_fewer_bytes(
    num_experts: int, picks: int, devices: int, expected: bool
) -> None:
    """Dispatch sends k/P of the bytes that a gather sends."""
    model, batch = mixtral(512, 512, num_experts, picks)
    mesh = Mesh({"expert": devices})
    asked = (expert_parallel("expert"),)
    made = plan_model(
        model,
        mesh,
        example_inputs=batch,
        hardware=slow(H100, 50),
        constraints=asked,
        outputs="loss",
    )[1]
    assert dispatches(made.plan) == {expected}
    other = expert_parallel("expert", tokens="gathered" if expected else "dispatched")
    forced = plan_model(
        model,
        mesh,
        example_inputs=batch,
        hardware=slow(H100, 50),
        constraints=(other,),
        outputs="loss",
    )[1]
    assert dispatches(forced.plan) == {not expected}
    assert made.plan.prediction.step_s < forced.plan.prediction.step_s


@cache
def planned(mesh: Mesh, *asked: Any, **options: Any) -> tuple[Any, Any, Any]:
    model, batch = zoo_small.mixtral()
    return (
        plan_model(
            model, mesh, example_inputs=batch, hardware="h100-sxm", constraints=asked, **options
        )[1],
        model,
        batch,
    )


def quick(times: float) -> HardwareProfile:
    """Return an H100 on which only bytes and flops take time, with ten times slower memory and
    `times` slower links, so that sharding pays off for a small model."""
    links = {
        name: replace(
            link,
            latency_s=1e-12,
            bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / times,
            curves={},
        )
        for name, link in H100.links.items()
    }
    memory = H100.memory_bandwidth_bytes_per_s / 10
    settings = {
        "launch_overhead_s": 1e-12,
        "matmul_half_flops": 0,
        "memory_bandwidth_bytes_per_s": memory,
    }
    return replace(H100, links=links, curves={}, hash=f"quick {times}", **settings)


FREE = {
    "two picks on two devices": (Mesh({"gpu": 2}), 10.0, {False}),
    "two picks on four": (Mesh({"gpu": 4}), 30.0, {True}),
    "on four with faster links": (Mesh({"gpu": 4}), 1.0, {False}),
}


@cache
def free(mesh: Mesh, times: float) -> tuple[Any, Any, Any]:
    model, batch = zoo_small.mixtral(num_layers=1)
    return plan_model(model, mesh, example_inputs=batch, hardware=quick(times))[1], model, batch


@pytest.mark.slow
@pytest.mark.parametrize("name", FREE)
def test_the_planner_chooses_the_faster_of_dispatch_and_gather(name: str) -> None:
    mesh, times, expected = FREE[name]
    made, model, batch = free(mesh, times)
    assert dispatches(made.plan) == expected
    assert (
        autopar.verify(made.plan, model, batch).ok
        and certify(capture(model, (), batch), made.plan, quick(times)).ok
    )


@pytest.mark.slow
def test_unconstrained_plans_on_two_axes_match_the_model() -> None:
    mesh = Mesh({"data": 2, "expert": 4})
    made, model, batch = free(mesh, 30.0)
    assert {c.collective.axis for c in own(made.plan)} == {1}
    assert (
        autopar.verify(made.plan, model, batch).ok
        and certify(capture(model, (), batch), made.plan, quick(30.0)).ok
    )


def own(plan: Plan) -> list[Communication]:
    return [c for c in plan.communications if c.own]


class Layer(nn.Module):
    """Experts followed by an op whose operand backward reads, so that the experts may have to be
    recomputed."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(16, 4), nn.Linear(16, 16)
        self.up, self.down = (
            nn.Parameter(torch.randn(4, 2, 32, 16) / 8),
            nn.Parameter(torch.randn(4, 16, 32) / 8),
        )

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        gates, ids = self.gate(tokens).softmax(-1).topk(2, -1)
        made = nn.functional.gelu(ops.experts(tokens, ids, gates, self.up, self.down, "silu", 4))
        return x + self.out(made).view(x.shape)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.parametrize("share", [1.0, 0.9], ids=["ample", "tight"])
def test_priced_dispatch_equals_emitted_dispatch_including_recompute(
    share: float,
) -> None:
    torch.manual_seed(0)
    model, batch = Net(), {"x": torch.randn(8, 64, 16)}
    asked = {
        "example_inputs": batch,
        "hardware": "h100-sxm",
        "constraints": (expert_parallel("expert", tokens="dispatched"),),
    }
    ample = plan_model(model, LINE, **asked)[1].plan.prediction.peak_bytes
    made = plan_model(model, LINE, **asked, memory_bytes=int(ample * share))[1]
    assert Counter(made.plan.issued()) == Counter(
        (phase, c) for phase, _, c in made.program.stages[0].collectives
    )
    again = {("backward", False)} if share < 1 else set()
    assert {(c.phase, "experts_backward" in c.node) for c in own(made.plan)} == {
        ("forward", False),
        ("backward", True),
        *again,
    }
    found, num = (
        made.plan.prediction,
        {(e.phase, e.again_s > 0) for e in made.plan.entries if "experts/forward" in e.key},
    )
    assert ("forward", True) in num if share < 1 else num == {("forward", False)}, (
        "of two layers one may be enough"
    )
    assert sum(len(c.instances) * c.time_s for c in made.plan.communications) == pytest.approx(
        found.communication_s
    )
    assert any(
        phase == "forward" and kind == "communication" for _, phase, kind, *_ in found.timeline
    )
    values = dict(model.named_parameters())
    ran = run_lockstep(made.program, values, {}, batch)
    assert Counter((p, str(c)) for p, _, c in ran.records) == Counter(
        (p, str(c)) for p, _, c in made.program.stages[0].collectives
    )
    assert Plan.loads(made.plan.dumps()) == made.plan
    assert autopar.verify(made.plan, model, batch).ok and autopar.check(made.plan, model, batch).ok


@pytest.mark.slow
def test_repricing_a_dispatch_plan_gives_its_prediction_and_depends_on_links() -> None:
    made, model, batch = planned(LINE, expert_parallel("expert", tokens="dispatched"))
    options = PlanOptions(constraints=(expert_parallel("expert", tokens="dispatched"),))
    trace = capture(model, (), batch)
    assert reprice_plan(made.plan, trace, LINE, H100, options) == pytest.approx(
        made.plan.prediction.step_s
    )
    slower = reprice_plan(made.plan, trace, LINE, slow(H100, 1e3), options)
    assert slower > made.plan.prediction.step_s + 0.5 * sum(
        len(c.instances) * c.time_s for c in own(made.plan)
    )


def quicker(strategy: OpStrategy, factor: float) -> OpStrategy:
    moved_s = strategy.communication_s
    return replace(strategy, time_s=(strategy.time_s - moved_s) / factor + moved_s)


@pytest.mark.slow
def test_a_choice_on_changed_hardware_is_priced_as_in_the_full_problem() -> None:
    """Its collectives scale with the links and its products with the speed of compute, for both
    choices of the runner-up."""
    made, model, batch = free(Mesh({"gpu": 4}), 30.0)
    profile, trace, mesh = quick(30.0), capture(model, (), batch), made.plan.mesh
    part = next(problems_of(made.plan, trace, mesh, profile, PlanOptions()))
    strategies_now, again = decisions(part.priced, made.plan)
    choices = Solution(strategies_now, again, {}, 0.0, 0.0)
    at = next(
        i for i, e in enumerate(made.plan.entries) if e.key.endswith("experts/experts/forward/0")
    )
    ways = part.priced.problem.ops[at].strategies
    other = next(i for i, s in enumerate(ways) if str(s.layouts) == "R, R, R, S(0), S(0) -> P")
    for what, factor in itertools.product((COMPUTE, "intra"), (0.5, 1.0, 3.0)):
        touched = variants_by_op(part.priced.problem)[at]
        local = _Local(
            part.priced, {}, choices, at, (other,), touched, mesh, profile, what, (1.0, 1.0)
        )
        if what == COMPUTE:
            ops_then = [
                replace(op, strategies=tuple(quicker(s, factor) for s in op.strategies))
                for op in part.priced.problem.ops
            ]
            whole = replace(part.priced.problem, ops=tuple(ops_then))
        else:
            new = replace(
                profile,
                links={**profile.links, "intra": faster(profile.links["intra"], factor - 1)},
            )
            whole = next(problems_of(made.plan, trace, mesh, new, PlanOptions())).priced.problem
        now, then = (
            local_load(whole, choices, at, s, touched) for s in (strategies_now[at], other)
        )
        assert now is not None and then is not None
        expected = then.priced_s(profile.overlap_slowdown, (1.0, 1.0)) - now.priced_s(
            profile.overlap_slowdown, (1.0, 1.0)
        )
        assert local.delta_s(factor) == pytest.approx(expected, rel=1e-3), (what, factor)


def test_explain_states_the_assumed_balance_of_picks() -> None:
    made, _, _ = planned(LINE, expert_parallel("expert", tokens="dispatched"))
    text = " ".join(str(autopar.explain(made.plan)).split())
    assert (
        "tokens are dispatched to their experts over expert in 2 layers" in text
        and "that all experts receive the same number of tokens" in text
    )
    assert "experts over expert" in text and "forward all_to_all over expert" in text
    gathered, _, _ = planned(LINE, expert_parallel("expert", tokens="gathered"))
    text = " ".join(str(autopar.explain(gathered.plan)).split())
    assert (
        "are dispatched" not in text.replace("rows that are dispatched to them", "")
        and "experts over expert" in text
    )


# ── the certificate ──


def changed(pick: Callable[[Communication], bool], **change: Any) -> Callable[[Plan], Plan]:
    def damage(plan: Plan) -> Plan:
        at = next(i for i, c in enumerate(plan.communications) if pick(c))
        c = plan.communications[at]
        new = {name: value(c) if callable(value) else value for name, value in change.items()}
        return replace(
            plan,
            communications=(
                *plan.communications[:at],
                replace(c, **new),
                *plan.communications[at + 1 :],
            ),
        )

    return damage


def without(pick: Callable[[Communication], bool]) -> Callable[[Plan], Plan]:
    def damage(plan: Plan) -> Plan:
        at = next(i for i, c in enumerate(plan.communications) if pick(c))
        return replace(
            plan, communications=(*plan.communications[:at], *plan.communications[at + 1 :])
        )

    return damage


def gathering(plan: Plan) -> Plan:
    """Return the plan with the op as if it gathered, without changing its recorded
    communication."""
    entries = []
    for entry in plan.entries:
        if "experts/experts/forward" in entry.nodes[0].node:
            (choice,) = entry.nodes
            s = choice.strategy
            weights = replace(
                entry,
                nodes=(
                    replace(
                        choice,
                        strategy=Strategy(
                            (*s.inputs[:3], *(x.parse("R") for x in s.inputs[3:])), s.outputs
                        ),
                    ),
                ),
            )
            entry = weights
        entries.append(entry)
    return replace(plan, entries=tuple(entries))


def is_own(c: Communication) -> bool:
    return c.own


MUTANTS: dict[str, tuple[Callable[[Plan], Plan], str]] = {
    "one is missing": (without(is_own), "moves: with .* which differs from the plan"),
    "one is listed twice": (
        lambda p: replace(p, communications=(*p.communications, own(p)[0])),
        "moves: with .* differs from the plan",
    ),
    "its bytes": (
        changed(is_own, collective=lambda c: replace(c.collective, bytes=c.collective.bytes // 2)),
        "moves: with .* which differs from the plan",
    ),
    "its dtype": (
        changed(is_own, collective=lambda c: replace(c.collective, dtype="int32")),
        "moves: with .* which differs from the plan",
    ),
    "its time": (
        changed(is_own, time_s=lambda c: c.time_s / 2),
        "moves: its internal all_to_all in forward takes",
    ),
    "its slack": (changed(is_own, slack="deferrable"), "moves: nothing overlaps"),
    "it runs beside compute": (changed(is_own, beside=True), "moves: nothing overlaps"),
    "its layouts": (
        changed(is_own, source=lambda c: c.source.parse("R")),
        "moves: its internal communication in forward is from R",
    ),
    "its phase": (changed(is_own, phase="backward"), "moves: "),
    "it is the tensor's": (changed(is_own, own=False), "moves: "),
    "a tensor's is the node's": (changed(lambda c: not c.own, own=True), "moves: "),
    "its node's strategy": (gathering, "moves: .*|layouts: .*"),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_claim_about_the_collectives_within_a_node_is_detected(name: str) -> None:
    damage, words = MUTANTS[name]
    made, model, batch = planned(LINE, expert_parallel("expert", tokens="dispatched"))
    trace = capture(model, (), batch)
    assert certify(trace, made.plan, H100).ok
    found = certify(trace, damage(made.plan), H100)
    assert not found.ok
    said = [f"{f.claim}: {f.what}" for f in found.findings]
    assert any(re.match(words, line) for line in said), said


@pytest.mark.parametrize(
    "name",
    ["one is missing", "its bytes", "its phase", "one is listed twice", "its node's strategy"],
)
def test_a_wrong_claim_about_dispatch_is_not_emitted(name: str) -> None:
    made, model, batch = planned(LINE, expert_parallel("expert", tokens="dispatched"))
    with pytest.raises(PlanError):
        emit_stage(capture(model, (), batch), MUTANTS[name][0](made.plan))


@pytest.mark.slow
def test_the_bound_is_valid_for_dispatch_and_for_gather() -> None:
    proofs = {
        tokens: planned(SQUARE, expert_parallel("expert", tokens=tokens))[0].plan.proof
        for tokens in ("", "dispatched", "gathered")
    }
    for proof in proofs.values():
        assert proof.certified_bound_s <= proof.bound_s <= proof.objective_s
    for one, other in itertools.product(("",), ("dispatched", "gathered")):
        assert proofs[one].bound_s <= proofs[other].objective_s * (1 + 1e-9), (
            "the choice of both costs no more than either"
        )
