"""The program in PuLP: solvers by name, bounds that are proven, and the program as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import highspy
import pulp
import pytest

from autopar.errors import AutoparError
from autopar.solve import pulp_models, solve, write_lp
from autopar.solve.pulp_models import check_solver, pulp_solver, solve_modelled
from tests.laws.test_solver_oracles import AMPLE, Case, front


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("cbc", "PULP_CBC_CMD"),
        ("CBC", "PULP_CBC_CMD"),
        ("pulp_cbc_cmd", "PULP_CBC_CMD"),
        ("pulp:HiGHS", "HiGHS"),
        ("pulp:highs", "HiGHS"),
    ],
)
def test_a_solver_is_found_by_its_own_name_or_its_family_in_any_case(name: str, found: str) -> None:
    assert pulp_solver(name).name == found


def test_a_solver_that_is_not_known_is_refused_with_those_that_are_here() -> None:
    with pytest.raises(
        AutoparError, match=r"unknown solver 'simplex'(.|\n)*solvers: highs, (.|\n)*pulp:HiGHS"
    ):
        check_solver("simplex")


def test_a_solver_that_is_not_installed_is_refused_by_what_is_missing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(pulp_models, "available", lambda: ("HiGHS",))
    with pytest.raises(
        AutoparError,
        match=(
            r"'gurobi' \(GUROBI or GUROBI_CMD in PuLP\) is not installed(.|\n)*solvers: highs,"
            r" pulp:HiGHS"
        ),
    ):
        check_solver("gurobi")
    with pytest.raises(AutoparError, match=r"PuLP includes no CBC for this platform"):
        check_solver("cbc")


def test_a_time_limit_that_a_solver_cannot_keep_is_refused() -> None:
    with pytest.raises(
        AutoparError, match=r"PULP_CBC_CMD does not support a time limit(.|\n)*remove time_limit_s"
    ):
        pulp_models.PulpSolver("PULP_CBC_CMD", frozenset({"gapRel"})).build(0.0, 10.0)


@pytest.mark.parametrize("solver", ["cbc", "pulp:highs"])
def test_what_a_solver_that_a_limit_ended_has_not_proven_is_not_claimed(
    monkeypatch: pytest.MonkeyPatch, solver: str
) -> None:
    problem = Case(0).problem()
    best_s = solve(problem, gap=0.0).objective_s
    solve_once = pulp.LpProblem.solve

    def ended(model: pulp.LpProblem, *args: Any) -> Any:
        """Solve as with a limit that leaves a dear solution: one without the quickest
        strategies."""
        dear = sorted(
            (v for v in model.variables() if v.name.startswith("x")),
            key=lambda v: -(model.objective.get(v) or 0.0),
        )
        for variable in dear[:1]:
            variable.lowBound = 1
        status = solve_once(model, *args)
        model.sol_status = pulp.LpSolutionIntegerFeasible
        return status

    monkeypatch.setattr(pulp.LpProblem, "solve", ended)
    found = solve_modelled(problem, solver, 0.01, 60.0)
    assert found is not None and found.objective_s > best_s * 1.02
    assert 0.0 < found.bound_s <= best_s * (1 + 1e-9)


@pytest.mark.parametrize("budget", ["ample", "tight"])
def test_the_program_in_a_file_has_readable_names_and_the_same_optimum_for_other_solvers(
    tmp_path: Path, budget: str
) -> None:
    case = Case(0)
    problem = case.problem(AMPLE if budget == "ample" else front(case)[0][0])
    expected = solve(problem, gap=0.0)
    path = tmp_path / "program.lp"
    write_lp(problem, expected.objective_s * 2, path)
    text = path.read_text()
    for word in ("choose0.", "flow", "memory0.start_of_backward", "hidden.forward", "x0_0."):
        assert word in text
    highs = highspy.Highs()
    highs.setOptionValue("output_flag", False)
    highs.setOptionValue("mip_rel_gap", 0.0)
    assert (
        highs.readModel(str(path)) != highspy.HighsStatus.kError
    )  # of coefficients that are next to nothing it warns
    highs.run()
    assert highs.getInfo().objective_function_value / 1e6 == pytest.approx(
        expected.objective_s, rel=1e-6
    )


def test_a_program_that_cannot_be_written_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(AutoparError, match=r"cannot write the program(.|\n)*nowhere"):
        write_lp(Case(0).problem(), 1.0, tmp_path / "nowhere" / "program.lp")
