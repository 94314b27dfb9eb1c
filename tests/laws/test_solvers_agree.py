"""Programs of small models solved by the live model of HiGHS and by CBC through PuLP give plans
with the same objective, and bounds below both."""

from __future__ import annotations

from pathlib import Path

import pulp
import pytest
import zoo_small

import autopar
from autopar.capture import capture
from autopar.core.hardware import HardwareProfile
from autopar.core.mesh import Mesh
from autopar.errors import AutoparError
from autopar.planner import PlanOptions, make_plan

H100 = HardwareProfile.load("h100-sxm")
GAP = 0.001
MESHES = {"line": Mesh({"a": 2}), "square": Mesh({"a": 2, "b": 2})}
FAST = {("gpt2", "line"), ("llama", "line")}
CASES = (*sorted(FAST), ("gpt2", "square"))  # CBC takes minutes for Llama on the square mesh


@pytest.mark.parametrize(
    ("kind", "mesh"),
    [pytest.param(k, m, marks=[pytest.mark.slow] * ((k, m) not in FAST)) for k, m in CASES],
)
def test_both_solvers_find_plans_of_models_with_the_same_objective(kind: str, mesh: str) -> None:
    model, batch = getattr(zoo_small, kind)()
    trace = capture(model, (), batch)
    ours, theirs = (
        make_plan(
            trace, MESHES[mesh], H100, PlanOptions(gap=GAP, solver=solver), model_name=kind
        ).plan.proof
        for solver in ("highs", "cbc")
    )
    assert (ours.solver, theirs.solver) == ("highs", "cbc")
    assert theirs.objective_s == pytest.approx(ours.objective_s, rel=2 * GAP)
    for proof in (ours, theirs):
        assert 0.0 < proof.bound_s <= min(ours.objective_s, theirs.objective_s) * (1 + 1e-6)


def test_another_solver_finds_the_objective_of_the_plan_in_its_lp_file(
    tmp_path: Path,
) -> None:
    model, batch = zoo_small.gpt2()
    path = tmp_path / "program.lp"
    plan = autopar.plan(
        model,
        autopar.Mesh({"a": 2}),
        example_inputs=batch,
        hardware="h100-sxm",
        gap=0.0,
        num_microbatches=1,
        write_lp=path,
    )
    text = path.read_text()
    assert "choose" in text and "memory0.start_of_backward" in text and "transformer.h" in text
    _, program = read_back(path)
    assert program / 1e6 == pytest.approx(plan.proof.objective_s, rel=1e-4)


def read_back(path: Path) -> tuple[str, float]:
    """Return the status and objective of a file in LP format, solved by the CBC of PuLP, which
    reads the file itself."""
    import subprocess

    answer = path.with_suffix(".sol")
    command = [
        pulp.PULP_CBC_CMD.pulp_cbc_path,
        str(path),
        "-ratioGap",
        "0",
        "-solve",
        "-solution",
        str(answer),
    ]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    first = answer.read_text().splitlines()[0]
    return first.split()[0], float(first.split()[-1])


def test_writing_the_program_of_a_plan_with_stages_is_refused(tmp_path: Path) -> None:
    model, batch = zoo_small.gpt2()
    with pytest.raises(AutoparError, match=r"several integer programs(.|\n)*what to do"):
        autopar.plan(
            model,
            autopar.Mesh({"a": 2}),
            example_inputs=batch,
            hardware="cpu-gloo",
            constraints=[autopar.constraints.pipeline("a", microbatches=2)],
            write_lp=tmp_path / "program.lp",
        )
