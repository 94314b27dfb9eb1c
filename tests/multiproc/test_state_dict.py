"""`full_state_dict` gives what the plain model loads, and a pickle never holds one rank's parts."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from harness import run_processes
from worker_state_dict import PLANS

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_state_dict.py")


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "replicated"])
def test_the_whole_state_of_any_plan_loads_into_the_plain_model_and_parts_are_not_pickled(
    plan: str,
) -> None:
    for told in run_processes(math.prod(PLANS[plan][1].values()), WORKER, "whole", plan):
        assert told["plain"] and told["names"] and told["first"]
        assert told["apart"] < 1e-4
        for way in ("saved", "pickled", "safetensors", "optimizer"):
            assert "only this rank's shards" in told[way] and "pm.full_state_dict()" in told[way], (
                way
            )
        assert (
            "parameters of its own stage" in told["saved"]
            if plan == "stages"
            else "a shard of a tensor of shape" in told["saved"]
        )


def test_what_every_rank_has_whole_is_pickled_as_plain_tensors() -> None:
    assert max(run_processes(2, WORKER, "replicated")) < 1e-5
