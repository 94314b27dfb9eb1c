"""The relaxation of one layer, alone."""

from __future__ import annotations

import json

import pytest

from autopar.core.mesh import Mesh
from autopar.solve import solve
from autopar.solve.formulation import Formulation
from benchmarks.blocks import MESHES, blocks_table, relaxed, row
from benchmarks.common import load_profile
from benchmarks.models import ModelSpec
from benchmarks.random_plans import prepare
from benchmarks.tables import BLOCKS_RESULTS, README
from benchmarks.zoo import blocks

PLANNING_ROW = {
    "trace_s",
    "enumerate_s",
    "price_s",
    "write_s",
    "relax_s",
    "num_ops",
    "num_variables",
    "num_constraints",
    "peak_rss_bytes",
}


@pytest.mark.parametrize(
    ("make", "parameters"),
    [(blocks.llama3_8b, 218_112_000), (blocks.mixtral_8x7b, 1_451_270_144)],
    ids=["llama", "mixtral"],
)
def test_a_layer_has_its_true_size(make: blocks.Made, parameters: int) -> None:
    layer, batch = make()
    assert sum(p.numel() for p in layer.parameters()) == parameters + layer.before.numel()
    assert batch["hidden"].shape == (64, 4096, 4096) and batch["hidden"].is_meta and layer.training


def test_the_relaxation_is_the_bound_of_the_search() -> None:
    layer, batch = blocks.block_of("llama3-8b", batch=4, seq=64)
    problem = prepare(
        layer, batch, Mesh({"gpu": 4}), load_profile("cpu-gloo-frictionless")
    ).priced.problem
    found = relaxed(Formulation(problem))
    chosen = solve(problem, gap=0.0)
    assert 0.0 < found["bound_s"] <= chosen.objective_s * (1 + 1e-9)
    assert found["bound_s"] == pytest.approx(chosen.objective_s) or found["share_mixed"] > 0
    assert found["relax_s"] > 0 and found["relax_wall_s"] > 0 and found["num_iterations"] > 0


@pytest.mark.slow
def test_a_row_has_what_planning_rows_have() -> None:
    spec = ModelSpec.known("tiny-llama").to_json()
    made = row(spec, "gpu=2", "float32", 8, 16, "h100-sxm")
    assert made["ok"] and set(made) > PLANNING_ROW and made["num_ops"] < made["num_nodes"]


def test_the_table_is_that_of_the_results() -> None:
    rows = json.loads(BLOCKS_RESULTS.read_text(encoding="utf-8"))["rows"]
    assert [(r["model"], r["mesh"]) for r in rows] == [
        (m, mesh) for m in ("llama3-8b layer", "mixtral-8x7b layer") for mesh in MESHES
    ]
    assert all(r["ok"] for r in rows) and blocks_table(rows) in README.read_text(encoding="utf-8")
