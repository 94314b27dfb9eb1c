"""The default plan has stages if links between nodes are slow, and none if they are fast. Both
list the tried alternatives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from mlp import Mlp

import autopar
from autopar.core.hardware import HardwareProfile

H100 = HardwareProfile.load("h100-sxm")
MESH = autopar.Mesh({"node": 4, "gpu": 2}, devices_per_node=2)


class WithOutputs(Mlp):
    """A model that returns more than its loss."""

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"loss": super().forward(x), "x": x * 2}


def slowed(times: float) -> HardwareProfile:
    """Return H100s whose links between nodes are slower by a factor."""
    links = dict(H100.links)
    links["inter"] = replace(
        links["inter"],
        bandwidth_bytes_per_s=links["inter"].bandwidth_bytes_per_s / times,
        curves={},
    )
    return replace(H100, links=links, hash=f"{times}")


def on_meta(model: type[Mlp] = Mlp) -> tuple[Mlp, dict[str, torch.Tensor]]:
    with torch.device("meta"):
        return model(4096, 16384, 16).to(torch.bfloat16), {
            "x": torch.empty(32768, 4096, dtype=torch.bfloat16)
        }


def planned(times: float, model: type[Mlp] = Mlp, **options: Any) -> autopar.Plan:
    network, batch = on_meta(model)
    return autopar.plan(network, MESH, example_inputs=batch, hardware=slowed(times), **options)


@pytest.mark.slow
def test_on_slow_links_stages_are_chosen_that_are_faster_than_any_plan_without() -> None:
    plan, without = planned(10), planned(10, num_microbatches=1)
    assert (
        plan.pipeline is not None
        and plan.pipeline.axis == "node"
        and plan.pipeline.num_microbatches > 1
    )
    assert without.pipeline is None and plan.prediction.step_s < 0.7 * without.prediction.step_s
    (line,) = (line for line in plan.proof.covers if "tried" in line)
    assert "no stages" in line and "in stages along node" in line and "in stages along gpu" in line
    assert plan.options["constraints"] == [] and not any(
        "in stages along" in line for line in without.proof.covers
    )
    network, batch = on_meta()
    assert autopar.check(plan, network, batch, hardware=slowed(10)).ok


@pytest.mark.slow
def test_no_stages_are_chosen_with_constraints_with_outputs_or_on_fast_links() -> None:
    forced = planned(10, constraints=[autopar.constraints.fsdp()])
    assert forced.pipeline is None and not any(
        "in stages along" in line for line in forced.proof.covers
    )
    more = planned(10, WithOutputs)
    assert (
        more.pipeline is None and sum('outputs="loss"' in line for line in more.proof.covers) == 1
    )
    alone = planned(10, WithOutputs, outputs="loss")
    assert alone.pipeline is not None
    fast = planned(0.01)
    assert fast.pipeline is None and not any(
        "in stages along" in line for line in fast.proof.covers
    ), "computing is nearly all of its step"
