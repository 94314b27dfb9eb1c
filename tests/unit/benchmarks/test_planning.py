"""Planning rows whose mesh is the planner's to shape."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.models import ModelSpec
from benchmarks.planning import row


@pytest.mark.slow
def test_nodes_and_devices_of_a_row_are_shaped_by_the_planner_and_its_row_says_how() -> None:
    spec = ModelSpec.known("tiny-gpt2").to_json()
    how: dict[str, Any] = {
        "dtype": "float32",
        "batch": 8,
        "seq": 16,
        "memory_gib": None,
        "gap": 0.01,
        "time_limit_s": None,
    }
    how["hardware"] = "cpu-gloo-frictionless"
    free = row(spec, "1x4", **how)
    each = [row(spec, mesh, **how) for mesh in ("gpu=4", "gpu0=2,gpu1=2")]
    assert (
        0.99 * free["objective_s"]
        <= min(made["objective_s"] for made in each)
        <= free["objective_s"]
    ), "what saves less is not tried"
    assert free["shape"] in ("gpu=4", "gpu0=2,gpu1=2") and [made["shape"] for made in each] == [
        "gpu=4",
        "gpu0=2,gpu1=2",
    ]


@pytest.mark.slow
def test_a_row_can_slow_down_the_links_between_nodes() -> None:
    spec = ModelSpec.known("tiny-gpt2").to_json()
    how: dict[str, Any] = {
        "dtype": "float32",
        "batch": 8,
        "seq": 16,
        "memory_gib": None,
        "gap": 0.01,
        "time_limit_s": None,
        "hardware": "h100-sxm-frictionless",
        "precision": "bf16",
    }
    fast = row(spec, "node=2,gpu=2", **how)
    slow = row(spec, "node=2,gpu=2", inter_gbits=1e-3, **how)
    assert slow["inter_gbits"] == 1e-3 and fast["inter_gbits"] is None
    assert slow["objective_s"] > fast["objective_s"]
    assert 0.0 <= slow["certified_gap"] <= 1.0
