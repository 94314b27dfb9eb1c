"""The value of faster links: the communication of a plan is priced again. Checked by hand, with
real plans, and without the profile of the plan."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from made_plan import MIB, made_plan, made_staged_plan

import autopar
from autopar.constraints import fsdp, pipeline, tensor_parallel
from autopar.core.collective import faster
from autopar.core.hardware import Curve, HardwareProfile
from autopar.explanation import explain
from autopar.explanation.link_prices import _seconds_received, _shorter_s, value_of_bandwidth
from autopar.plans import Plan
from benchmarks import zoo

PROFILE = HardwareProfile.load("cpu-gloo")


def plain(profile: HardwareProfile) -> HardwareProfile:
    """Return the profile without measured collectives, with latency and bandwidth only."""
    return replace(
        profile, links={name: replace(link, curves={}) for name, link in profile.links.items()}
    )


def for_profile(plan: Plan, profile: HardwareProfile) -> Plan:
    return replace(
        plan, fingerprint=replace(plan.fingerprint, profile=profile.name, profile_hash=profile.hash)
    )


@pytest.fixture(scope="module")
def llama() -> tuple[Any, dict[str, Any]]:
    return zoo.build("llama", batch=8)


def test_the_value_of_bandwidth_for_a_collective_is_its_bytes_over_bandwidth_squared() -> None:
    profile = plain(PROFILE)
    node, gpu = value_of_bandwidth(for_profile(made_plan(), profile), profile).links
    bandwidth = profile.links["inter"].bandwidth_bytes_per_s
    # over node with 2 devices: 3 all_gathers of layers and 2 of the head send MIB each, the
    # reduce_scatter sends half a MIB
    assert node.saved_s_per_gb_per_s == pytest.approx(5.5 * MIB / bandwidth**2 * 1e9, rel=2e-3)
    assert (gpu.saved_s_per_gb_per_s, gpu.communication_s) == (0.0, 0.0)


def test_transfers_between_stages_count_as_often_as_microbatches_in_the_step() -> None:
    profile = plain(PROFILE)
    stage, *_ = value_of_bandwidth(
        for_profile(made_staged_plan(microbatches=8), profile), profile
    ).links
    bandwidth = profile.links["inter"].bandwidth_bytes_per_s
    # 3 values and 3 gradients of MIB once, and 7 times the 2 that a middle stage receives, which
    # is the slowest
    assert stage.saved_s_per_gb_per_s == pytest.approx(
        (6 + 7 * 2) * MIB / bandwidth**2 * 1e9, rel=2e-3
    )


def test_a_faster_link_has_more_bandwidth_and_the_same_latency() -> None:
    link = PROFILE.links["intra"]
    curve = Curve((1e3, 1e6), (1e-3, 5e-3))
    twice = faster(replace(link, curves={"all_gather": {2: curve}}), 1.0)
    assert (
        twice.bandwidth_bytes_per_s == 2 * link.bandwidth_bytes_per_s
        and twice.latency_s == link.latency_s
    )
    changed = twice.curves["all_gather"][2]
    assert [changed.time_s(2 * size) for size in (10.0, 1e4, 1e8)] == pytest.approx(
        [curve.time_s(size) for size in (10.0, 1e4, 1e8)]
    )


@pytest.mark.parametrize("hardware", ["h100-sxm", "cpu-gloo"])
def test_repriced_communication_equals_that_of_the_plan(
    llama: tuple[Any, dict[str, Any]], hardware: str
) -> None:
    model, batch = llama
    mesh = autopar.Mesh({"data": 2, "tensor": 2})
    constraints = (fsdp("data"), tensor_parallel(axes="tensor"))
    plan = autopar.plan(
        model, mesh, example_inputs=batch, hardware=hardware, constraints=constraints
    )
    profile = HardwareProfile.load(hardware)
    for axis in mesh.names:
        shorter_s = _shorter_s(plan, axis, profile, 1)
        assert (
            shorter_s == pytest.approx(0.0, abs=1e-12 * plan.prediction.step_s)
            and _shorter_s(plan, axis, None, 1) > 0
        )
    found = value_of_bandwidth(plan)
    assert not found.missing
    sent = [
        (len(c.instances) * c.time_s, c.beside)
        for c in plan.communications
        if c.collective.kind != "slice"
    ]
    total = sum(time_s * (profile.overlap_slowdown if beside else 1.0) for time_s, beside in sent)
    assert sum(w.communication_s for w in found.links) == pytest.approx(total)
    # below the smallest measured size, the collectives of cpu-gloo are not faster on a faster
    # link
    assert all(
        w.saved_s_per_gb_per_s > 0 if hardware == "h100-sxm" else w.saved_s_per_gb_per_s >= 0
        for w in found.links
    )


def test_repriced_transfers_equal_the_waiting_time_of_stages(
    llama: tuple[Any, dict[str, Any]],
) -> None:
    model, batch = llama
    mesh = autopar.Mesh({"stage": 2, "data": 2})
    plan = autopar.plan(
        model,
        mesh,
        example_inputs=batch,
        hardware="cpu-gloo",
        constraints=[pipeline("stage", microbatches=4), fsdp("data")],
    )
    assert plan.pipeline is not None
    before, after = _seconds_received(plan.pipeline, mesh, PROFILE)
    assert before == pytest.approx(after, rel=1e-12)
    assert all(seconds > 0 for seconds in before)
    assert "Step time that faster links save" in str(explain(plan))


def test_a_missing_profile_of_the_plan_is_reported() -> None:
    other = for_profile(made_plan(), replace(PROFILE, name="mine"))
    assert "profile mine not found" in str(explain(other))
    assert "profile h100-sxm is not the one that the plan was made for" in str(explain(made_plan()))
    assert "Step time that faster links save" in str(explain(other, profile=PROFILE))


def test_the_memory_price_of_the_slowest_stage_counts_for_every_microbatch() -> None:
    plan = made_staged_plan(microbatches=8)
    assert plan.pipeline is not None
    first, second, third, last = plan.pipeline.stages
    slow = replace(second, prediction=replace(second.prediction, step_s=0.1))
    alone = str(
        explain(replace(plan, pipeline=replace(plan.pipeline, stages=(first, slow, third, last))))
    )
    assert "GiB on each device of stage 1 saves about 16.0 ms per step" in alone
    assert "GiB on each device of stage 0 saves about 2.00 ms per step" in alone
    assert "GiB on each device of stage 1 saves about 2.00 ms per step" in str(
        explain(plan)
    )  # as slow as stage 2
