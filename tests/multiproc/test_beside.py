"""Objects saved together with a model are restored on any number of processes, or refused when
they are saved."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import run_processes

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_beside.py")


def apart(found: dict[str, Any], wanted: dict[str, Any]) -> float:
    """Return the largest difference. Values that are not arrays must be equal."""
    assert found.keys() == wanted.keys()
    largest = 0.0
    for path, value in wanted.items():
        if isinstance(value, tuple):
            assert (
                found[path][1].dtype == value[1].dtype and found[path][1].shape == value[1].shape
            ), path
            difference = np.abs(found[path][1].astype(float) - value[1].astype(float)).max(
                initial=0.0
            )
            largest = max(largest, float(difference))
        else:
            assert found[path] == value, path
    return largest


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A checkpoint saved by two processes."""
    folder = tmp_path_factory.mktemp("saved")
    first, second = run_processes(2, WORKER, "save", str(folder))
    assert apart(first["before"], second["before"]) == 0
    return folder, first


@pytest.mark.slow
def test_restoring_on_the_same_processes_is_exact(saved: tuple[Path, dict[str, Any]]) -> None:
    told = saved[1]
    numbers = {
        when: {path: x for path, x in told[when].items() if isinstance(x, tuple)}
        for when in ("before", "after")
    }
    assert apart(numbers["before"], numbers["after"]) > 1e-3, "a step changes something"
    assert apart(told["back"], told["before"]) == 0 and apart(told["again"], told["after"]) == 0
    kinds = {path: value[0] for path, value in told["back"].items() if isinstance(value, tuple)}
    assert (
        kinds[".ema.first.weight"]
        == kinds[".values.weight"]
        == kinds[".values.3.1.0"]
        == "HeldTensor"
    ), "in parts, as they were"
    assert kinds[".values.array"] == "ndarray" and kinds[".values.best"] == "Tensor"


@pytest.mark.slow
@pytest.mark.parametrize("num_processes", [1, 3])
def test_training_continues_identically_on_other_numbers_of_processes(
    num_processes: int, saved: tuple[Path, dict[str, Any]]
) -> None:
    folder, wanted = saved
    for told in run_processes(num_processes, WORKER, "load", str(folder)):
        for start in ("fresh", "stepped"):
            assert apart(told[start], wanted["before"]) == 0
            assert apart(told[f"{start} next"], wanted["after"]) < 1e-5


@pytest.mark.slow
def test_objects_saved_by_stages_are_restored_without_stages(tmp_path: Path) -> None:
    told = run_processes(2, WORKER, "save", str(tmp_path), True, True)[0]
    assert apart(told["back"], told["before"]) == 0 and apart(told["again"], told["after"]) == 0
    found = run_processes(1, WORKER, "load", str(tmp_path))[0]
    for start in ("fresh", "stepped"):
        assert apart(found[start], told["before"]) == 0
        assert (
            apart(*(beside_the_model(each) for each in (found[f"{start} next"], told["after"])))
            < 1e-5
        )


def beside_the_model(values: dict[str, Any]) -> dict[str, Any]:
    """Return the values without those that depend on dropout, which differs with the number of
    microbatches."""
    return {
        path: value
        for path, value in values.items()
        if path.startswith((".critic", ".third", ".head", ".random critic", ".rate"))
    }


def test_state_that_one_rank_cannot_write_is_refused_and_the_remedy_works(
    tmp_path: Path,
) -> None:
    told = run_processes(2, WORKER, "refused", str(tmp_path))
    assert told[0] == told[1]
    for kind in ("number", "tensor", "names", "module"):
        assert (
            "own" in told[0][kind]
            and "differ" in told[0][kind]
            and "all_gather_object" in told[0][kind]
        ), kind
    assert "ema" in told[0]["of a stage"] and "AveragedModel(pm)" in told[0]["of a stage"]
    assert (
        "of_critic=Adam has parameters of a module that is not saved in this checkpoint"
        in told[0]["optimizer"]
    )
    assert (
        "parameters that do not belong to the model" in told[0]["both"]
        and "pass the optimizer and the modules of the other parameters by name" in told[0]["both"]
    )
    assert "no state_dict" in told[0]["no state"] and told[0]["steps"] == "()"
    assert told[0]["followed"] == "{'of ranks': [{'seen': 0}, {'seen': 1}]}"
