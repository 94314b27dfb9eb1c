"""A run resumes from its checkpoint on other numbers of processes and in other layouts without
loss of state."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from harness import run_processes
from worker_saved import ALL_STEPS, LEARNING_RATE, TRAINED

pytestmark = pytest.mark.multiproc
WORKER = str(Path(__file__).parent / "worker_saved.py")


def train(num_processes: int, folder: Path, steps: int, stages: bool = False) -> dict[str, Any]:
    """Train, and check that all ranks report the same values except for their local ones."""
    told = run_processes(num_processes, WORKER, "run", str(folder), steps, stages)
    assert all({**each, "sharded": 0} == {**told[0], "sharded": 0} for each in told)
    return told[0]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A run of one process without interruption."""
    return train(1, tmp_path_factory.mktemp("alone"), ALL_STEPS)


@pytest.mark.slow
def test_a_run_resumes_identically_on_fewer_and_on_more_processes(
    tmp_path: Path, alone: dict[str, Any]
) -> None:
    first = train(4, tmp_path, TRAINED)
    assert first["sharded"] and first["steps"] == (TRAINED,)
    second = train(3, tmp_path, TRAINED + 1)
    third = train(2, tmp_path, TRAINED + 2, stages=True)
    last = train(1, tmp_path, ALL_STEPS)
    assert [run["start"] for run in (first, second, third, last)] == [
        0,
        TRAINED,
        TRAINED + 1,
        TRAINED + 2,
    ]
    assert len({run["mesh"] for run in (first, second, third, last)}) == 4
    losses = [loss for run in (first, second, third, last) for loss in run["losses"]]
    assert losses == pytest.approx(alone["losses"], rel=1e-6) and len(set(losses)) == ALL_STEPS
    assert last["rate"] == alone["rate"] == LEARNING_RATE / 4 and last["state"] == alone["state"]


@pytest.mark.slow
def test_a_folder_that_ranks_do_not_share_is_refused_on_all_ranks(tmp_path: Path) -> None:
    told = run_processes(2, WORKER, "blind", str(tmp_path))
    for each in told:
        assert (
            "ranks [1] see different checkpoints from rank 0: () instead of (1,)"
            in each["rank 0 sees it"]
        )
        assert (
            "ranks [1] see different checkpoints from rank 0: (1,) instead of ()"
            in each["rank 1 sees it"]
        )
        assert (
            "ranks [1] do not see the folder that rank 0 created" in each["saved apart"]
            and "all machines share" in each["saved apart"]
        )
        assert "Error" in each["a file"] and "choose a writable folder" in each["a file"]


def test_a_damaged_file_of_any_rank_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_processes(2, WORKER, "damaged", str(tmp_path))
    assert first == second
    assert (
        "step 0 is damaged: rank_00000.safetensors was changed after it was written" in first[0]
        and "no earlier checkpoint exists" in first[0]
    )
    assert (
        "step 1 is damaged: rank_00001.safetensors was changed after it was written" in first[1]
        and "no earlier checkpoint is complete" in first[1]
    )


def test_of_two_runs_started_in_one_folder_one_continues_and_the_other_is_refused(
    tmp_path: Path,
) -> None:
    with ThreadPoolExecutor() as pool:
        both = list(
            pool.map(
                lambda name: run_processes(2, WORKER, "beside", str(tmp_path), name),
                ("first", "second"),
            )
        )
    (ended, same), (went_on, _) = sorted(both, key=lambda ranks: int(ranks[0]["saved"]))
    assert (
        ended == same
        and "another run also saves into this folder: step" in ended["said"]
        and "end one of the two runs" in ended["said"]
    )
    assert ended["saved"] == 0 and went_on["saved"] == 3
    assert (
        went_on["damage"] == ""
        and set(went_on["run"]) == {2, 3}
        and len(set(went_on["run"].values())) == 1
    )


def test_ranks_save_in_the_background_and_an_error_of_one_is_raised_on_all(tmp_path: Path) -> None:
    first, second = run_processes(2, WORKER, "background", str(tmp_path))
    for told in (first, second):
        assert told["changed"] and told["same"] and told["loaded"] == 1
        assert (
            "step 2 was not saved in the background" in told["said"]
            and "No space left" in told["said"]
        )
        assert told["steps"] == (1,) and told["last"] == (1, 3)
    names = {path.name for path in (tmp_path / "step_000000003").iterdir()}
    assert names == {
        "rank_00000.safetensors",
        "rank_00001.safetensors",
        "contents.json",
        "others.json",
        "plan.json",
        "autopar.json",
    }
