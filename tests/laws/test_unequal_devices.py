"""Plans for unequal devices: stages use the profile of their devices with the fastest cut, and
other axes use the slowest profile."""

from __future__ import annotations

import contextlib
import itertools
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import zoo_small
from mlp import Mlp
from torch import nn

import autopar
from autopar.api.planning import plan_model
from autopar.constraints import pipeline
from autopar.core.hardware import HardwareProfile, slowest_of
from autopar.errors import ConstraintError, InfeasibleError, PlanError
from autopar.plans import Plan
from benchmarks import zoo

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
H100, A100 = HardwareProfile.load("h100-sxm"), HardwareProfile.load("a100-sxm-80gb")


def device(base: str, name: str, **figures: float) -> HardwareProfile:
    """Return a profile with changed fields."""
    data = json.loads(json.dumps(HardwareProfile.read(base)))
    data["name"] = name
    for field, value in figures.items():
        data[field]["value"] = value
    return HardwareProfile.from_json(data)


def slower(base: str, name: str, factor: float) -> HardwareProfile:
    """Return a device on which each op takes `factor` times as long."""
    data = HardwareProfile.read(base)
    peaks = data["peak_flops_per_s"]
    data = {
        **data,
        "name": name,
        "peak_flops_per_s": {k: {**p, "value": p["value"] / factor} for k, p in peaks.items()},
    }
    for field, share in (
        ("launch_overhead_s", factor),
        ("memory_bandwidth_bytes_per_s", 1 / factor),
    ):
        data[field] = {**data[field], "value": data[field]["value"] * share}
    return HardwareProfile.from_json(data)


SLOW, LITTLE = slower("h100-sxm", "slow", 3.0), slower("h100-sxm", "a little slower", 1.3)
Built = tuple[nn.Module, dict[str, Any]]


@pytest.fixture(scope="module")
def net() -> Built:
    return Mlp(256, 256, 6), {"x": torch.randn(64, 256)}


def made(
    built: Built,
    hardware: Any,
    mesh: Mapping[str, int] | None = None,
    *,
    num: int = 4,
    cuts: Sequence[str] | None = None,
    **asked: Any,
) -> Plan:
    model, batch = built
    schedule = {name: asked.pop(name) for name in ("schedule", "chunks") if name in asked}
    force = (pipeline("stage", microbatches=num, cuts=cuts, **schedule),)
    axes = autopar.Mesh(
        mesh or {"stage": len(hardware["stage"]) if isinstance(hardware, dict) else 2}
    )
    return plan_model(
        model, axes, example_inputs=batch, hardware=hardware, constraints=force, **asked
    )[1].plan


def layers(plan: Plan) -> list[int]:
    """Return the number of layers of each stage, of six."""
    assert plan.pipeline is not None
    edges = [
        0,
        *(
            int(name.rpartition(".")[2]) if name.startswith("layers.") else 6
            for name in plan.pipeline.modules
        ),
        6,
    ]
    return [after - before for before, after in itertools.pairwise(edges)]


CASES = {
    "two": ([H100, SLOW], 4),
    "two, the slow one first": ([SLOW, H100], 4),
    "one microbatch": ([H100, LITTLE], 1),
    "three": ([SLOW, H100, A100], 4),
    "three, two alike": ([H100, SLOW, H100], 8),
}


@pytest.mark.parametrize("case", CASES)
def test_no_other_cut_is_faster_on_unequal_devices(net: Built, case: str) -> None:
    along, num = CASES[case]
    found = made(net, {"stage": along}, num=num)
    assert found.pipeline is not None
    steps = steps_of_all_cuts(net, along, num)
    best = min(steps.values())
    assert len(steps) >= 5 and found.prediction.step_s <= best * (1 + 1e-9)
    assert found.proof.bound_s <= best
    assert sorted(steps.values())[1] > best, "there is one best cut"
    assert steps[found.pipeline.modules] == found.prediction.step_s


def steps_of_all_cuts(
    built: Built, along: Sequence[HardwareProfile], num: int
) -> dict[tuple[str, ...], float]:
    """Return the step of each cut of the model that fits."""
    with pytest.raises(ConstraintError) as told:
        made(built, {"stage": along}, num=num, cuts=["nowhere"] * (len(along) - 1))
    names = told.value.remedy.removeprefix("the model can be cut at ").split(", ")
    steps = {}
    for cuts in itertools.combinations(names, len(along) - 1):
        with contextlib.suppress(InfeasibleError):
            steps[cuts] = made(built, {"stage": along}, num=num, cuts=cuts).prediction.step_s
    return steps


@pytest.mark.parametrize(
    "seed", [3, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(4, 16))]
)
def test_no_other_cut_is_faster_for_any_devices_and_number_of_microbatches(
    seed: int,
) -> None:
    rng = random.Random(seed)
    num_stages, num = rng.choice((2, 2, 3)), rng.choice((1, 4, 8))
    bases = [rng.choice(("h100-sxm", "a100-sxm-80gb")) for _ in range(num_stages)]
    along = [slower(base, f"device {i}", rng.uniform(1.0, 4.0)) for i, base in enumerate(bases)]
    width = rng.choice((64, 256))
    built = Mlp(width, rng.choice((64, 1024)), rng.choice((5, 6))), {"x": torch.randn(64, width)}
    found, best = (
        made(built, {"stage": along}, num=num),
        min(steps_of_all_cuts(built, along, num).values()),
    )
    assert found.proof.bound_s <= best * (1 + 1e-9) and found.prediction.step_s <= best * (1 + 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("short", [0, 1])
@pytest.mark.parametrize("share", [0.5, pytest.param(0.7, marks=pytest.mark.slow), 1.0])
def test_no_other_cut_that_fits_is_faster_if_one_stage_has_little_memory(
    net: Built, short: int, share: float
) -> None:
    equal = made(net, "h100-sxm").pipeline
    assert equal is not None
    small = device(
        "h100-sxm",
        "small",
        device_memory_bytes=round(share * equal.stages[short].prediction.peak_bytes / 0.9),
    )
    along = [small, H100] if short == 0 else [H100, small]
    found, steps = made(net, {"stage": along}), steps_of_all_cuts(net, along, 4)
    assert found.pipeline is not None and all(
        peak <= found.budget_of(rank) for rank, peak in enumerate(found.pipeline.peaks)
    )
    assert found.prediction.step_s <= min(steps.values()) * (1 + 1e-9)


def test_a_stage_with_faster_devices_gets_more_layers(net: Built) -> None:
    equal, behind, before = (
        layers(made(net, {"stage": along})) for along in ([H100, H100], [H100, SLOW], [SLOW, H100])
    )
    assert equal == [3, 3] and behind[1] < 3 < behind[0] and before[0] < 3 < before[1]


def test_equal_profiles_give_the_plan_of_one_profile_except_for_the_profile_names(
    net: Built,
) -> None:
    one, other = (
        made(net, hardware, {"stage": 2, "data": 2})
        for hardware in ("h100-sxm", {"stage": ["h100-sxm", H100]})
    )
    assert (
        other.fingerprint.axis == "stage"
        and other.fingerprint.profiles == (("h100-sxm", H100.hash),) * 2
    )
    assert replace(other, fingerprint=one.fingerprint).dumps() == one.dumps()


def test_equal_profiles_along_other_axes_give_the_plan_of_one_profile(net: Built) -> None:
    model, batch = net
    mesh = autopar.Mesh({"data": 2})
    one, other = (
        autopar.plan(model, mesh, example_inputs=batch, hardware=h)
        for h in ("h100-sxm", {"data": ["h100-sxm"] * 2})
    )
    assert replace(other, fingerprint=one.fingerprint).dumps() == one.dumps()


@pytest.fixture(scope="module")
def mixed(net: Built) -> Plan:
    return made(net, {"stage": ["h100-sxm", "a100-sxm-80gb"]}, {"stage": 2, "data": 2})


def test_each_stage_records_its_profile_and_the_plan_round_trips(
    mixed: Plan,
) -> None:
    assert Plan.loads(mixed.dumps()) == mixed and mixed.pipeline is not None
    assert mixed.fingerprint.profiles == (("h100-sxm", H100.hash), ("a100-sxm-80gb", A100.hash))
    assert [(s.fingerprint.profile, s.fingerprint.profile_hash) for s in mixed.pipeline.stages] == [
        *mixed.fingerprint.profiles
    ]
    assert [each.profile for each in mixed.proof.on_profiles] == ["a100-sxm-80gb"]


def test_a_plan_without_the_field_for_unequal_devices_can_be_read(net: Built) -> None:
    plan = made(net, "h100-sxm")
    data = json.loads(plan.dumps())

    def forget(part: dict[str, Any]) -> None:
        for field, inner in (("fingerprint", ("axis", "profiles")), ("proof", ("on_profiles",))):
            for name in inner:
                del part[field][name]
        del part["alone_s"]

    forget(data)
    del data["pipeline"]["rank_budgets"]
    for stage in data["pipeline"]["stages"]:
        forget(stage)
    assert Plan.loads(json.dumps(data)) == plan


def test_a_plan_that_names_profiles_for_no_axis_of_its_mesh_is_refused(mixed: Plan) -> None:
    for wrong in (
        replace(mixed.fingerprint, axis="node"),
        replace(mixed.fingerprint, profiles=mixed.fingerprint.profiles[:1]),
    ):
        with pytest.raises(PlanError, match="profiles along"):
            Plan.loads(replace(mixed, fingerprint=wrong).dumps())


def test_a_plan_for_unequal_devices_is_certified_with_its_bound_over_cuts(
    net: Built, mixed: Plan
) -> None:
    found = autopar.check(mixed, *net)
    assert found.ok, str(found)
    assert found.step_s == pytest.approx(mixed.prediction.step_s, rel=1e-12)
    assert found.certified_bound_s == pytest.approx(mixed.proof.certified_bound_s, rel=1e-9)
    assert 0.95 * mixed.prediction.step_s < mixed.proof.certified_bound_s <= mixed.prediction.step_s


def _wrong(mixed: Plan) -> dict[str, tuple[Plan, set[str]]]:
    pipe, proof = mixed.pipeline, mixed.proof
    assert pipe is not None
    first, last = pipe.stages
    late = replace(last, prediction=replace(last.prediction, step_s=0.5 * last.prediction.step_s))
    entry = max(last.entries, key=lambda e: e.time_s)
    timed = replace(
        last,
        entries=tuple(replace(e, time_s=e.time_s / 2) if e is entry else e for e in last.entries),
    )
    swapped = replace(mixed.fingerprint, profiles=mixed.fingerprint.profiles[::-1])
    [on], optimal = proof.on_profiles, proof.objective_s
    dearer = replace(
        on,
        potentials=tuple(
            replace(p, values_s={k: 100 * v for k, v in p.values_s.items()}) for p in on.potentials
        ),
    )

    def staged(*stages: Plan, **changes: Any) -> Plan:
        return replace(mixed, pipeline=replace(pipe, stages=stages or pipe.stages, **changes))

    return {
        "a stage's step": (staged(first, late), {"time"}),
        "an op's time": (staged(first, timed), {"time"}),
        "the devices of stages": (replace(mixed, fingerprint=swapped), {"model"}),
        "a stage's devices": (
            staged(first, replace(last, fingerprint=first.fingerprint)),
            {"model"},
        ),
        "the multipliers of the other devices": (
            replace(mixed, proof=replace(proof, on_profiles=(dearer,))),
            {"bound"},
        ),
        "multipliers left out": (replace(mixed, proof=replace(proof, on_profiles=())), {"bound"}),
        "multipliers of other devices": (
            replace(mixed, proof=replace(proof, on_profiles=(replace(on, profile="mine"),))),
            {"bound"},
        ),
        "the bound": (
            replace(
                mixed,
                proof=replace(
                    proof, **dict.fromkeys(("certified_bound_s", "bound_s"), optimal), gap=0.0
                ),
            ),
            {"bound"},
        ),
        "budgets that devices do not have": (staged(rank_budgets=(2**50, 2**50)), {"memory"}),
    }


def test_a_plan_for_unequal_devices_with_a_wrong_claim_is_not_certified(
    net: Built, mixed: Plan
) -> None:
    for name, (plan, claims) in _wrong(mixed).items():
        assert claims <= {f.claim for f in autopar.check(plan, *net).findings}, name


def test_a_plan_for_unequal_devices_is_not_certified_for_other_devices(
    net: Built, mixed: Plan
) -> None:
    assert "model" in {f.claim for f in autopar.check(mixed, *net, hardware="h100-sxm").findings}
    assert "model" in {
        f.claim
        for f in autopar.check(mixed, *net, hardware="stage=a100-sxm-80gb,h100-sxm").findings
    }


def test_plans_for_unequal_devices_match_the_model(net: Built, mixed: Plan) -> None:
    assert autopar.verify(mixed, *net).ok


@pytest.mark.slow
def test_a_llama_on_unequal_devices_matches_the_model() -> None:
    llama = zoo.build("llama", batch=8, num_hidden_layers=6)
    plan = made(llama, {"stage": [H100, SLOW]}, {"stage": 2, "data": 2})
    assert (
        autopar.verify(plan, *llama).ok
        and autopar.check(plan, *llama, hardware={"stage": [H100, SLOW]}).ok
    )


def test_interleaved_stages_use_the_profiles_of_their_devices(net: Built) -> None:
    hardware = {"stage": [H100, SLOW]}
    plan = made(net, hardware, schedule="interleaved_1f1b", chunks=2)
    pipe = plan.pipeline
    assert (
        pipe is not None
        and [s.fingerprint.profile for s in pipe.stages] == ["h100-sxm", "slow"] * 2
    )
    times = [sum(s.prediction.step_s for s in pipe.stages[rank::2]) for rank in range(2)]
    assert max(times) < 1.7 * min(times), (
        "the slow device has fewer layers, or it would take three times as long"
    )
    found = autopar.check(plan, *net, hardware=hardware)
    assert found.ok, str(found)
    assert autopar.verify(plan, *net).ok and Plan.loads(plan.dumps()) == plan


@pytest.mark.parametrize("first", [True, False])
def test_a_stage_on_devices_with_little_memory_gets_fewer_layers(net: Built, first: bool) -> None:
    equal = made(net, "h100-sxm")
    assert equal.pipeline is not None and layers(equal) == [3, 3]
    short = 0 if first else 1
    peak = equal.pipeline.stages[short].prediction.peak_bytes
    small = device("h100-sxm", "small", device_memory_bytes=round(0.5 * peak / 0.9))
    along = [small, H100] if first else [H100, small]
    plan = made(net, {"stage": along})
    pipe = plan.pipeline
    assert pipe is not None and layers(plan)[short] < 3
    assert pipe.rank_budgets[short] < pipe.rank_budgets[1 - short] == plan.options["memory_bytes"]
    assert all(peak <= plan.budget_of(rank) for rank, peak in enumerate(pipe.peaks))
    found = autopar.check(plan, *net, hardware={"stage": along})
    assert found.ok, str(found)
    less = tuple(
        min(b, pipe.peaks[n] - 1) if n == short else b for n, b in enumerate(pipe.rank_budgets)
    )
    tight = replace(plan, pipeline=replace(pipe, rank_budgets=less))
    assert "memory" in {
        f.claim for f in autopar.check(tight, *net, hardware={"stage": along}).findings
    }
    assert Plan.loads(plan.dumps()) == plan


@pytest.mark.slow
def test_if_no_cut_fits_the_error_names_the_devices_with_too_little_memory(net: Built) -> None:
    tiny = device("h100-sxm", "tiny", device_memory_bytes=10_000)
    with pytest.raises(InfeasibleError) as refused:
        made(net, {"stage": [H100, tiny]})
    assert (
        "per device of stage 1 of 2 (tiny)" in refused.value.what
        and "stage 1 of 2 on tiny" in refused.value.what
    )


# In lockstep


@pytest.fixture(scope="module")
def lockstep(net: Built) -> Plan:
    model, batch = net
    return autopar.plan(
        model, autopar.Mesh({"data": 2}), example_inputs=batch, hardware={"data": [H100, A100]}
    )


def test_along_other_axes_the_plan_is_that_of_the_slowest_and_states_waiting_times(
    net: Built, lockstep: Plan
) -> None:
    model, batch = net
    alone = autopar.plan(
        model, lockstep.mesh, example_inputs=batch, hardware=slowest_of((H100, A100))
    )
    assert (
        lockstep.entries == alone.entries
        and lockstep.prediction == alone.prediction
        and not alone.alone_s
    )
    assert len(lockstep.alone_s) == 2 and max(lockstep.alone_s) <= lockstep.prediction.step_s * (
        1 + 1e-9
    )
    assert lockstep.alone_s[0] < 0.9 * lockstep.prediction.step_s
    there = autopar.what_if(lockstep, model, batch, hardware="h100-sxm")
    assert there.step_s == lockstep.alone_s[0]
    found = autopar.check(lockstep, model, batch)
    assert found.ok, str(found)
    assert Plan.loads(lockstep.dumps()) == lockstep
    told = " ".join(autopar.explain(lockstep).summary())
    waits = 1 - lockstep.alone_s[0] / lockstep.prediction.step_s
    assert (
        "data 0, h100-sxm, in lockstep with all other devices" in told
        and f"wait for {100 * waits:.1f} % of it" in told
    )


def test_explanations_of_unequal_devices_name_them(net: Built, mixed: Plan) -> None:
    told = str(autopar.explain(mixed))
    for text in (
        "stage 0, h100-sxm: ",
        "stage 1, a100-sxm-80gb: ",
        "data on h100-sxm",
        "stage on a100-sxm-80gb",
    ):
        assert text in told, text
    other = made(net, "h100-sxm", {"stage": 2, "data": 2})
    assert "hardware: stage=h100-sxm,a100-sxm-80gb → h100-sxm" in str(autopar.diff(mixed, other))


def test_a_plan_is_repriced_on_unequal_devices_and_back(net: Built, mixed: Plan) -> None:
    here = autopar.what_if(mixed, *net)
    assert (
        here.step_s == pytest.approx(mixed.prediction.step_s, rel=1e-12)
        and here.best.dumps() == mixed.dumps()
    )
    there = autopar.what_if(mixed, *net, hardware={"stage": ["a100-sxm-80gb", "h100-sxm"]})
    assert there.step_s > mixed.prediction.step_s and there.regret > 0 and there.fits
    carried = autopar.what_if(
        mixed, *net, mesh=autopar.Mesh({"stage": 2, "data": 2, "new": 1}, devices_per_node=2)
    )
    assert (
        carried.step_s == pytest.approx(mixed.prediction.step_s, rel=1e-9)
        and carried.peak_bytes == here.peak_bytes
    )
    wider = autopar.what_if(mixed, *net, mesh={"stage": 2, "data": 4})
    assert wider.best.fingerprint.profiles == mixed.fingerprint.profiles


@pytest.mark.slow
def test_a_stage_with_almost_no_compute_is_certified() -> None:
    """Its backward passes its input on. The time of crossing is not compute."""
    model, batch = zoo_small.gpt2(num_layers=4)
    devices = {"stage": ["h100-sxm", "a100-sxm-80gb", "cpu-gloo"]}
    stages = (pipeline("stage", microbatches=4),)
    plan = autopar.plan(
        model,
        autopar.Mesh({"stage": 3, "gpu": 1}),
        example_inputs=batch,
        hardware=devices,
        constraints=stages,
    )
    assert plan.pipeline is not None
    assert not any(
        e.phase == "backward" and e.kind == "compute" for e in plan.pipeline.stages[1].entries
    )
    certificate = autopar.check(plan, model, batch)
    assert certificate.ok, certificate.findings
