"""Plans with collective-overlap kernels: when they pay off, their results, their description, and
that changed plans are refused."""

from __future__ import annotations

import operator
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
import zoo_small
from overlapping import NORMING, overlapping
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import autopar
from autopar.analysis.fusable import product_added
from autopar.api import what_if
from autopar.capture import Trace, capture
from autopar.certificate import certify
from autopar.constraints import fsdp
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.core.mesh import Mesh
from autopar.emit import emit_stage
from autopar.errors import VerificationError
from autopar.kernels import fused
from autopar.planner import PlanOptions, make_plan
from autopar.plans import Communication, InKernel, Plan
from autopar.program import interpreter
from autopar.program.lockstep import run_lockstep
from autopar.program.program import Program
from autopar.sharding import pattern_of

Built = tuple[nn.Module, dict[str, torch.Tensor], Trace]
LINE, SQUARE, UNEVEN = Mesh({"gpu": 4}), Mesh({"data": 2, "tensor": 2}), Mesh({"gpu": 3})
SLOW, NORMS = overlapping(), overlapping(kernels=NORMING)
PLANS: dict[str, tuple[str, Mesh, PlanOptions]] = {
    "llama": ("narrow", LINE, PlanOptions()),
    "gpt2": ("gpt2", LINE, PlanOptions()),
    "wide": ("llama", LINE, PlanOptions()),
    "run again": ("narrow", LINE, PlanOptions(memory_bytes=123_000)),
    "data and tensor": (
        "narrow",
        SQUARE,
        PlanOptions(gap=0.1, constraints=(fsdp("data"),)),
    ),  # without constraints, it takes a minute
    "norms": ("narrow", LINE, PlanOptions()),
    "norms, data and tensor": ("narrow", SQUARE, PlanOptions(gap=0.1, constraints=(fsdp("data"),))),
}
NORMED = tuple(name for name in PLANS if name.startswith("norms"))
QUICK = tuple(
    name for name in PLANS if name != "wide"
)  # takes longer than all other cases together


def profile_of(name: str) -> HardwareProfile:
    return NORMS if name in NORMED else SLOW


@cache
def built(kind: str) -> Built:
    torch.manual_seed(0)
    model, batch = narrow() if kind == "narrow" else getattr(zoo_small, kind)(dtype=torch.float64)
    return model, batch, capture(model, (), batch)


def narrow() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """Return a Llama whose products are all as large as their communicated tensors."""
    sizes = {
        "num_hidden_layers": 2,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
    }
    ids = torch.randint(0, 64, (2, 16))
    config = AutoConfig.for_model("llama", **sizes, vocab_size=64, use_cache=False)
    return AutoModelForCausalLM.from_config(config), {"input_ids": ids, "labels": ids}


@cache
def planned(name: str) -> Plan:
    kind, mesh, options = PLANS[name]
    return make_plan(built(kind)[2], mesh, profile_of(name), options, model_name=kind).plan


def kernels(plan: Plan) -> list[Communication]:
    return [c for c in plan.communications if c.kernel is not None]


@pytest.mark.parametrize("name", PLANS)
def test_plans_with_kernels_match_the_model_on_every_rank(name: str) -> None:
    plan, (model, batch, _) = planned(name), built(PLANS[name][0])
    assert kernels(plan), "the links are slow, so kernels pay"
    report = autopar.verify(plan, model, batch)
    assert report.ok, str(report)


@pytest.mark.slow
def test_both_kernels_occur_in_both_phases_and_in_recompute() -> None:
    seen = {
        (c.kernel.name, c.phase, c.kernel.again)
        for name in QUICK
        if name not in NORMED
        for c in kernels(planned(name))
        if c.kernel
    }
    assert {(name, phase) for name, phase, _ in seen} == {
        (n, p) for n in SLOW.kernels for p in ("forward", "backward")
    }
    assert any(again for _, _, again in seen)
    assert {c.kernel.num_chunks for name in QUICK for c in kernels(planned(name)) if c.kernel} != {
        1
    }


def test_the_last_product_of_a_summed_gradient_scatters_the_sum() -> None:
    """An example is the gradient of the input of the gate and the up projection of an MLP. Only the
    node of the last product has the sum."""
    plan, (model, batch, trace) = planned("llama"), built("narrow")
    summed = [c for c in kernels(plan) if scatters(c) and "/add.Tensor/backward/" in c.node]
    assert len(summed) == 2 and all("/dot/backward/" in c.kernel.node for c in summed if c.kernel)
    for c in summed:
        assert not [
            other for other in plan.communications if other.node == c.node and other.kernel is None
        ]
        total = next(
            n
            for n in trace.graph.nodes
            if n.op == "call_function" and n.meta["key"] == c.node.format(0)
        )
        place = product_added(total)
        assert place is not None and c.kernel is not None
        assert pattern_of(total.args[place].meta["key"])[0] == c.kernel.node
    program = emit_stage(trace, plan)
    nodes = [
        n
        for n in program.backward.graph.nodes
        if n.target is fused.matmul_reduce_scatter and n.args[2] is not None
    ]
    assert len(nodes) == sum(len(c.instances) for c in summed)
    assert not any(
        n.meta.get("key") in n2.meta["kernel"].others
        for n in program.backward.graph.nodes
        for n2 in nodes
    )
    assert autopar.verify(plan, model, batch).ok


@pytest.mark.parametrize("name", NORMED)
def test_norms_run_in_scattering_kernels_if_the_profile_has_figures_for_them(
    name: str,
) -> None:
    """These are the norms after attention and after the MLP of each layer, and the last norm of the
    model. One node computes all three results."""
    plan, trace = planned(name), built("narrow")[2]
    normed = {
        c.node: c
        for c in kernels(plan)
        if c.kernel and c.kernel.name == "matmul_reduce_add_rmsnorm"
    }
    assert sorted(node.rpartition("/dot/")[0] for node in normed) == [
        "model.layers.{0}.mlp.down_proj",
        "model.layers.{0}.self_attn.o_proj",
    ]
    nodes = [
        n
        for n in emit_stage(trace, plan).forward.graph.nodes
        if n.target is fused.matmul_reduce_add_rmsnorm
    ]
    assert len(nodes) == sum(len(c.instances) for c in normed.values()) == 4
    done = {key for n in nodes for key in n.meta["kernel"].others}
    norms = [
        *(f"model.layers.{i}.post_attention_layernorm" for i in range(2)),
        "model.layers.1.input_layernorm",
        "model.norm",
    ]
    sums = [f"model.layers.{i}/add.Tensor/forward/{n}" for i in range(2) for n in range(2)]
    assert done == {
        *sums,
        *(f"{norm}/{op}/forward/0" for norm in norms for op in ("square_sum", "rms_norm")),
    }
    others = [n for n in emit_stage(trace, plan).forward.graph.nodes if n.meta.get("key") in done]
    assert all(n.target is operator.getitem for n in others) and len(others) == len(done)
    plain = planned({"norms": "llama"}.get(name, name.removeprefix("norms, ")))
    assert plan.prediction.step_s < plain.prediction.step_s


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_with_kernels_is_certified_and_round_trips(name: str) -> None:
    plan, trace = planned(name), built(PLANS[name][0])[2]
    assert Plan.loads(plan.dumps()) == plan
    found = certify(trace, Plan.loads(plan.dumps()), profile_of(name))
    assert found.ok, str(found)
    predicted = plan.prediction
    saved_s = sum(len(c.instances) * c.kernel.saved_s for c in kernels(plan) if c.kernel)
    assert predicted.in_kernels_s == pytest.approx(saved_s) and saved_s > 0
    assert predicted.step_s <= predicted.compute_s + predicted.communication_s - saved_s + 1e-12
    assert predicted.simulated_s + predicted.in_buckets_s >= predicted.step_s * (1 - 1e-9)


@pytest.mark.parametrize("name", ["llama", "run again", "norms"])
def test_listed_kernels_run_and_each_kernel_is_one_node(name: str) -> None:
    plan, (model, batch, trace) = planned(name), built(PLANS[name][0])
    program = emit_stage(trace, plan)
    nodes = [
        n
        for g in (program.forward, program.backward)
        for n in g.graph.nodes
        if n.target in fused.KERNELS
    ]
    assert len(nodes) == sum(len(c.instances) for c in kernels(plan))
    values = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {t.name: values[t.name] for t in program.parameters}
    records = run_lockstep(
        Program.of_one_stage(trace, program),
        known,
        {t.name: values[t.name] for t in program.buffers},
        batch,
        dtype=torch.float64,
    ).records
    ran = Counter((phase, c.kind, c.axis, c.dim) for phase, _, c in records)
    listed: Counter[tuple[str, str, int, int]] = Counter()
    for c in plan.communications:
        listed[c.phase, c.collective.kind, c.collective.axis, c.collective.dim] += len(c.instances)
    assert ran == listed


def test_kernels_are_not_used_on_a_fast_link_and_change_layouts_on_a_slow_one() -> None:
    trace = built("narrow")[2]
    fast = replace(overlapping(link_bytes_per_s=3e12), launch_overhead_s=1e-7, hash="fast")
    assert not kernels(make_plan(trace, LINE, fast, PlanOptions()).plan)
    without = make_plan(trace, LINE, replace(SLOW, kernels={}, hash="without"), PlanOptions()).plan
    assert planned("llama").prediction.step_s < without.prediction.step_s
    assert planned("llama").node_choices() != without.node_choices()


def test_between_nodes_no_kernel_is_available_and_plans_give_the_reason() -> None:
    """The links have the same speed, but no rank can access the memory of another node."""
    apart = Mesh({"gpu": 4}, links={"gpu": "inter"})
    plan = make_plan(built("narrow")[2], apart, NORMS, PlanOptions()).plan
    assert not kernels(plan)
    assert any(
        "axis 'gpu' spans several nodes, which do not share memory" in c.why
        for c in plan.communications
    )
    found = certify(built("narrow")[2], replace(planned("norms"), mesh=apart), NORMS)
    assert "ranks along 'gpu' cannot access each other's memory" in str(found)


def test_small_products_are_not_split_if_launches_cost_more_than_overlap_saves() -> None:
    sluggish = replace(SLOW, launch_overhead_s=1e-3, hash="sluggish")
    assert not kernels(make_plan(built("narrow")[2], LINE, sluggish, PlanOptions()).plan)


@pytest.mark.slow
def test_a_profile_without_kernel_figures_gives_no_kernels_and_plans_say_so() -> None:
    h100 = HardwareProfile.load("h100-sxm")
    assert not h100.kernels, "none was measured"
    plan = make_plan(built("gpt2")[2], LINE, h100, PlanOptions()).plan
    assert (
        "no collective-overlap kernels, because the hardware profile has no measurements of them"
        in plan.proof.covers
    )
    assert "that they hide, of what their chunks allow: all_gather_matmul 0.9" in " ".join(
        planned("gpt2").proof.covers
    )


@pytest.mark.slow
def test_the_savings_of_a_kernel_scale_with_its_efficiency() -> None:
    half = overlapping(kernels=dict.fromkeys(SLOW.kernels, 0.45))
    whole, less = (what_if_saved(profile) for profile in (SLOW, half))
    assert less == pytest.approx(whole / 2)


def what_if_saved(profile: HardwareProfile) -> float:
    """Return the time that the kernels of a plan save on a profile, by its step with and without
    them."""
    none = replace(profile, kernels={}, hash=f"{profile.hash} without")
    model, batch, _ = built("narrow")
    with_s, without_s = (
        what_if(planned("llama"), model, batch, hardware=each).step_s for each in (profile, none)
    )
    return without_s - with_s


def test_no_kernel_is_available_for_uneven_shards() -> None:
    trace = built("narrow")[2]
    plan = make_plan(trace, UNEVEN, SLOW, PlanOptions()).plan
    assert any("shards differ in length" in c.why for c in plan.communications)
    for c in kernels(plan):
        tensor = next(
            n
            for n in trace.graph.nodes
            if n.op == "call_function" and n.meta["key"] == c.node.format(*c.instances[0])
        )
        assert tensor.meta["val"].shape[c.collective.dim] % 3 == 0


def test_explain_lists_considered_kernels_with_the_reasons() -> None:
    said = str(autopar.explain(planned("llama")))
    assert "Collective-overlap kernels considered" in said
    assert "all_gather_matmul of" in said and "matmul_reduce_scatter of" in said
    assert re.search(r"\d+ collective-overlap kernels save \d", said)


def test_explain_names_the_norm_of_a_kernel_or_the_reason_for_none() -> None:
    whys = {
        name: {c.why for c in kernels(planned(name)) if c.why}
        for name in ("llama", "norms", "gpt2")
    }
    assert whys == {
        "llama": {
            "the norm runs separately: the hardware profile has no measurement of"
            " reduce_add_rmsnorm"
        },
        "norms": set(),
        "gpt2": set(),
    }
    assert "the norm runs separately" in str(autopar.explain(planned("llama")))
    assert "matmul_reduce_add_rmsnorm" in str(autopar.explain(planned("norms")))
    slow = overlapping(kernels={**NORMING, "reduce_add_rmsnorm": 0.01})
    plan = make_plan(built("narrow")[2], LINE, slow, PlanOptions()).plan
    assert {c.why for c in kernels(plan) if c.why} == {
        "the norm runs separately: one fused pass would take longer"
    }
    assert "share of the memory bandwidth of a copy: reduce_add_rmsnorm 0.9" in " ".join(
        planned("norms").proof.covers
    )


class Twice(nn.Module):
    """A sum that is normalized without a weight, then with one, and that may be an output."""

    def __init__(self, *, returned: bool = False) -> None:
        super().__init__()
        self.first, self.up, self.down, self.last = (
            nn.Linear(a, b, bias=False) for a, b in ((32, 32), (32, 64), (64, 32), (32, 32))
        )
        self.norm, self.returned = nn.RMSNorm(32, eps=1e-6), returned

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
        h = self.first(x)
        h = h + self.down(torch.relu(self.up(h)))
        made = (
            self.last(self.norm(h)) * nn.functional.rms_norm(h, (32,), None, 1e-6)
            if not self.returned
            else self.last(h)
        )
        return {"loss": ((made - y) ** 2).mean(), **({"h": h} if self.returned else {})}


def planned_twice(*, returned: bool) -> tuple[nn.Module, dict[str, torch.Tensor], Trace, Plan]:
    torch.manual_seed(0)
    model, batch = (
        Twice(returned=returned),
        {"x": torch.randn(2, 16, 32), "y": torch.randn(2, 16, 32)},
    )
    trace = capture(model, (), batch)
    return model, batch, trace, make_plan(trace, LINE, NORMS, PlanOptions()).plan


def test_of_several_norms_the_first_with_a_weight_runs_in_the_kernel() -> None:
    model, batch, trace, plan = planned_twice(returned=False)
    found = certify(trace, plan, NORMS)
    assert found.ok, str(found)
    assert autopar.verify(plan, model, batch).ok


def test_a_claimed_norm_of_a_sum_without_a_norm_is_refused() -> None:
    _, _, trace, plan = planned_twice(returned=True)
    assert any(scatters(c) and c.phase == "forward" for c in kernels(plan))
    false = kernel(
        lambda c: scatters(c) and c.phase == "forward", name="matmul_reduce_add_rmsnorm"
    )(plan)
    assert "kernels" in {f.claim for f in certify(trace, false, NORMS).findings}


Change = Callable[[Plan], Plan]


def kernel(pick: Callable[[Communication], bool], **changes: object) -> Change:
    def change(plan: Plan) -> Plan:
        at = next(i for i, c in enumerate(plan.communications) if c.kernel is not None and pick(c))
        parts = list(plan.communications)
        assert parts[at].kernel is not None
        parts[at] = replace(parts[at], kernel=replace(parts[at].kernel, **changes))  # type: ignore[type-var]
        return replace(plan, communications=tuple(parts))

    return change


def gathers(c: Communication) -> bool:
    return c.collective.kind == "all_gather"


def scatters(c: Communication) -> bool:
    return c.collective.kind == "reduce_scatter"


def sums(c: Communication) -> bool:
    return scatters(c) and "/add.Tensor/" in c.node


def without(plan: Plan) -> Plan:
    """Remove the first kernel without removing its savings."""
    at = next(i for i, c in enumerate(plan.communications) if c.kernel is not None)
    parts = [replace(c, kernel=None) if i == at else c for i, c in enumerate(plan.communications)]
    return replace(plan, communications=tuple(parts))


def another(plan: Plan) -> Plan:
    """Give a kernel to a collective of no product."""
    stranger = next(
        i
        for i, c in enumerate(plan.communications)
        if c.kernel is None and c.collective.kind == "all_to_all"
    )
    taken = InKernel(
        "all_gather_matmul",
        next(c.kernel.node for c in plan.communications if c.kernel),
        False,
        1,
        1e-5,
    )
    parts = [
        replace(c, kernel=taken) if i == stranger else c for i, c in enumerate(plan.communications)
    ]
    return replace(plan, communications=tuple(parts))


MUTANTS: dict[str, Change] = {
    "saves more": kernel(gathers, saved_s=1e-3),
    "saves less": kernel(scatters, saved_s=1e-9),
    "more chunks": kernel(gathers, num_chunks=2),
    "another product": kernel(gathers, node="model.layers.{0}.self_attn.v_proj/dot/backward/1"),
    "no product": kernel(gathers, node="model.layers.{0}.mlp/mul.Tensor/forward/0"),
    "another kernel": kernel(scatters, name="all_gather_matmul"),
    "as it runs again": kernel(scatters, again=True),
    "a kernel forgotten": without,
    "what adds as the product": kernel(
        sums, node="model.layers.{0}.mlp.gate_proj/add.Tensor/backward/0"
    ),
    "a product that is not added": kernel(
        sums, node="model.layers.{0}.mlp.gate_proj/dot/backward/0"
    ),
    "a sum's product saves more": kernel(sums, saved_s=1e-3),
    "a sum runs again": kernel(sums, again=True),
    "a kernel where none can be": another,
    "a norm where there is none": kernel(sums, name="matmul_reduce_add_rmsnorm"),
    "a norm that the profile does not offer": kernel(
        lambda c: "/dot/forward/" in c.node and scatters(c), name="matmul_reduce_add_rmsnorm"
    ),
    "saves what is not said": lambda plan: replace(
        plan, prediction=replace(plan.prediction, in_kernels_s=0.0)
    ),
}


@pytest.mark.parametrize("change", [pytest.param(m, id=n) for n, m in MUTANTS.items()])
def test_a_plan_whose_kernels_are_changed_is_not_certified(change: Change) -> None:
    plan = change(planned("llama"))
    assert plan != planned("llama")
    found = certify(built("narrow")[2], plan, SLOW)
    assert not found.ok and {f.claim for f in found.findings} & {"kernels", "time", "layouts"}, str(
        found
    )


def norms(c: Communication) -> bool:
    return c.kernel is not None and c.kernel.name == "matmul_reduce_add_rmsnorm"


def lying(pattern: str, layout: str) -> Change:
    """Change the layout of a node that reads and returns full rows."""

    def change(plan: Plan) -> Plan:
        at = next(i for i, e in enumerate(plan.entries) if e.nodes and e.nodes[0].node == pattern)
        first, whole = plan.entries[at].nodes[0], Layout.parse(layout)
        strategy = replace(
            first.strategy, inputs=(whole, *first.strategy.inputs[1:]), outputs=(whole,)
        )
        parts = list(plan.entries)
        parts[at] = replace(
            parts[at], nodes=(replace(first, strategy=strategy), *parts[at].nodes[1:])
        )
        return replace(plan, entries=tuple(parts))

    return change


NORM_MUTANTS: dict[str, Change] = {
    "nothing normed": kernel(norms, name="matmul_reduce_scatter"),
    "more is saved": kernel(norms, saved_s=9e-5),
    "other chunks": kernel(norms, num_chunks=1),
    "as it runs again": kernel(norms, again=True),
    "of another product": kernel(norms, node="model.layers.{0}.mlp.gate_proj/dot/forward/0"),
    "the sum lies otherwise": lying("model.layers.{0}/add.Tensor/forward/0", "R"),
    "the norm lies otherwise": lying(
        "model.layers.{0}.post_attention_layernorm/rms_norm/forward/0", "R"
    ),
    "the last norm lies otherwise": lying("model.norm/rms_norm/forward/0", "R"),
    "a norm where nothing is normed": kernel(sums, name="matmul_reduce_add_rmsnorm"),
}


@pytest.mark.parametrize("change", [pytest.param(m, id=n) for n, m in NORM_MUTANTS.items()])
def test_a_plan_whose_norms_are_changed_is_not_certified(change: Change) -> None:
    plan, trace = change(planned("norms")), built("narrow")[2]
    assert plan != planned("norms") and certify(trace, planned("norms"), NORMS).ok
    found = certify(trace, plan, NORMS)
    assert "kernels" in {f.claim for f in found.findings}, str(found)


@pytest.mark.parametrize(
    "without", [(), ("reduce_add_rmsnorm",), ("matmul_reduce_scatter", "reduce_add_rmsnorm")]
)
def test_a_plan_with_norm_kernels_needs_a_profile_with_figures_for_them(
    without: tuple[str, ...],
) -> None:
    left = replace(
        NORMS, kernels={name: share for name, share in NORMS.kernels.items() if name not in without}
    )
    found = certify(built("narrow")[2], planned("norms"), left)
    assert ("kernels" in {f.claim for f in found.findings}) == bool(without), str(found)


def test_a_kernel_without_its_collective_gives_wrong_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ranks multiply the shard of one rank instead of all shards. This shows that the check above
    can fail."""
    plan, (model, batch, _), step = planned("llama"), built("narrow"), interpreter.step

    def stale(
        kind: str, parts: list[torch.Tensor], dim: int, to_dim: int, op: str
    ) -> list[torch.Tensor]:
        same = [parts[0]] * len(parts) if kind == "all_gather" and parts[0].dim() == 3 else parts
        return step(kind, same, dim, to_dim, op)  # type: ignore[arg-type]

    assert autopar.verify(plan, model, batch).ok
    monkeypatch.setattr(interpreter, "step", stale)
    with pytest.raises(
        VerificationError,
        match=r"first node that differs is .*input_layernorm/rms_norm/forward/0/all_gather",
    ):
        autopar.verify(plan, model, batch)
