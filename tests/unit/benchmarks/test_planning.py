"""Planning rows whose mesh shape is chosen by the planner."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.models import ModelSpec
from benchmarks.planning import row


@pytest.mark.slow
def test_planner_chooses_the_mesh_shape_of_a_row() -> None:
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
        <= min(result["objective_s"] for result in each)
        <= free["objective_s"]
    ), "shapes that save less than the gap are not tried"
    assert free["shape"] in ("gpu=4", "gpu0=2,gpu1=2") and [result["shape"] for result in each] == [
        "gpu=4",
        "gpu0=2,gpu1=2",
    ]


@pytest.mark.slow
def test_row_with_slower_links_between_nodes_has_slower_steps() -> None:
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
