"""The plain model loads `full_state_dict`, and a pickle never contains the shards of one rank."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from harness import run_processes
from worker_state_dict import PLANS

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_state_dict.py")


@pytest.mark.parametrize("plan", [plan for plan in PLANS if plan != "replicated"])
def test_the_plain_model_loads_the_full_state_and_pickling_shards_is_refused(
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


def test_replicated_tensors_are_pickled_as_plain_tensors() -> None:
    assert max(run_processes(2, WORKER, "replicated")) < 1e-5
