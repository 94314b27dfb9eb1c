"""The benchmark of the relaxation of one layer."""

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
def test_layer_has_the_size_of_the_published_model(make: blocks.Made, parameters: int) -> None:
    layer, batch = make()
    assert sum(p.numel() for p in layer.parameters()) == parameters + layer.before.numel()
    assert batch["hidden"].shape == (64, 4096, 4096) and batch["hidden"].is_meta and layer.training


def test_relaxation_is_a_lower_bound_of_the_optimum() -> None:
    layer, batch = blocks.block_of("llama3-8b", batch=4, seq=64)
    problem = prepare(
        layer, batch, Mesh({"gpu": 4}), load_profile("cpu-gloo-frictionless")
    ).priced.problem
    relaxation = relaxed(Formulation(problem))
    solution = solve(problem, gap=0.0)
    assert 0.0 < relaxation["bound_s"] <= solution.objective_s * (1 + 1e-9)
    assert (
        relaxation["bound_s"] == pytest.approx(solution.objective_s)
        or relaxation["share_mixed"] > 0
    )
    assert (
        relaxation["relax_s"] > 0
        and relaxation["relax_wall_s"] > 0
        and relaxation["num_iterations"] > 0
    )


@pytest.mark.slow
def test_row_has_the_columns_of_planning_rows() -> None:
    spec = ModelSpec.known("tiny-llama").to_json()
    result = row(spec, "gpu=2", "float32", 8, 16, "h100-sxm")
    assert result["ok"] and set(result) > PLANNING_ROW and result["num_ops"] < result["num_nodes"]


def test_readme_table_matches_the_results() -> None:
    rows = json.loads(BLOCKS_RESULTS.read_text(encoding="utf-8"))["rows"]
    assert [(r["model"], r["mesh"]) for r in rows] == [
        (m, mesh) for m in ("llama3-8b layer", "mixtral-8x7b layer") for mesh in MESHES
    ]
    assert all(r["ok"] for r in rows) and blocks_table(rows) in README.read_text(encoding="utf-8")
