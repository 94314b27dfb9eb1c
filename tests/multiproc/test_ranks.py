"""If ranks do different things, all of them raise an error that names the different rank and its
operation."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness import run_processes

import autopar

pytestmark = pytest.mark.multiproc
HERE = Path(__file__).parent
Told = dict[str, tuple[str, tuple[int, ...]]]
DOES = {
    "size": "with x = float32 (6, 8)",
    "dtype": "with x = float64 (12, 8)",
    "keywords": "scale = float32 (8,)",
    "evaluation": "without gradients with x = float32 (12, 8)",
    "save": "checkpoints.save(1, module, training.optimizer)",
    "async_save": "checkpoints.async_save(1, module, training.optimizer)",
    "clip": "clips the gradients of Net",
    "compile": "autopar.compile(",
    "gather": "gathers a tensor of shape (8, 8)",
    "torch's norm": "over the values of all ranks",
    "factor": "of the loss multiplied by 2.0",
    "loss_scale": "with loss_scale=4.0",
    "settings": "after a step of SGD with lr=0.1 and settings",
    "accumulates": "adding to gradients",
    "frozen": "with 1 frozen parameters",
    "no backward": "calls Net in training mode with x = float32 (12, 8)",
    "no step": "without a step of the optimizer before it",
}


def check(told: list[Told], other: int) -> None:
    for fact in told:
        assert fact["alike"] == fact["reads shapes"] == ("", ())
    for name in sorted(told[0].keys() - {"alike", "reads shapes"}):
        does = DOES[name]
        (said, ranks), *others = (each[name] for each in told)
        assert all(each == (said, ranks) for each in others), (
            f"{name}: ranks are told different things"
        )
        assert ranks == (other,), f"{name}: {said}"
        assert (
            f"rank {other} does something else" in said
            and does in said
            and "worker_ranks.py:" in said
            and "what to do" in said
        ), said


@pytest.mark.parametrize(
    "plan",
    [
        "ddp",
        pytest.param("fsdp", marks=pytest.mark.slow),
        pytest.param("stages", marks=pytest.mark.slow),
    ],
)
def test_of_two_ranks_the_one_that_departs_from_the_earlier_steps_is_named(
    plan: str, tmp_path: Path
) -> None:
    check(run_processes(2, str(HERE / "worker_ranks.py"), "run", plan, 1, str(tmp_path)), 1)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["ddp", "tensor"])
def test_of_several_ranks_the_one_that_differs_from_the_majority_is_named(
    plan: str, tmp_path: Path
) -> None:
    check(run_processes(3, str(HERE / "worker_ranks.py"), "run", plan, 0, str(tmp_path)), 0)


def test_a_rank_that_compiles_with_other_options_is_refused() -> None:
    first, second = run_processes(2, str(HERE / "worker_ranks.py"), "compile_unlike")
    assert first == second and len(first) == 5
    for option, (message, ranks) in first.items():
        assert option in message and "compiles Net for mesh" in message, message
        assert not ranks and "rank 0 compiles" in message and "rank 1 compiles" in message


FAILS = {
    "raise": ("CallError", "forward raises ValueError: sample 17 is broken"),
    "width": ("PlanError", "the plan does not fit this call"),
    "batch": ("PlanError", "the plan does not fit this call"),
    "plan": ("PlanError", "cannot read plan 'missing'"),
    "optimizer": ("AutoparError", "optimizer 'missing' is not known"),
}


@pytest.mark.parametrize(
    ("num_ranks", "other"), [(2, 1), pytest.param(4, 2, marks=pytest.mark.slow)]
)
def test_if_compiling_fails_on_one_rank_the_others_raise_its_reason_and_do_not_wait(
    num_ranks: int, other: int
) -> None:
    told = run_processes(num_ranks, str(HERE / "worker_ranks.py"), "compile_failing", other)
    for kind, (error, reason) in FAILS.items():
        for rank, (name, message, ranks) in enumerate(each[kind] for each in told):
            if rank == other:
                assert name == error and reason in message, message
            else:
                assert name == "RankError" and ranks == (other,), message
                assert f"rank {other} cannot continue: {error}: {reason}" in message


KILLED = "rank 1 has ended: it was killed (by the system if memory ran out), or called os._exit"
ENDS = {
    "raise": "rank 1 has ended: it raised ValueError: sample 17 is broken",
    "exit": "rank 1 has ended: it reached the end of its script, or called sys.exit",
    "exit 3": "rank 1 has ended: it reached the end of its script, or called sys.exit",
    "left": KILLED,
    "killed": KILLED,
    "inside": KILLED,
    "terminated": "rank 1 has ended: it was terminated by SIGTERM",
    "interrupted": "rank 1 has ended: it raised KeyboardInterrupt",
}


def launched(what: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "autopar",
        "run",
        "-n",
        "3",
        str(HERE / "script_ranks.py"),
        what,
    ]
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[1])}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


@pytest.mark.slow
@pytest.mark.parametrize("what", ENDS)
def test_the_other_ranks_report_how_a_rank_ended(what: str) -> None:
    done = launched(what)
    assert done.returncode != 0
    for rank in (0, 2):
        assert f"[rank{rank}]: autopar.errors.RankError: {ENDS[what]}" in done.stderr, done.stderr
    assert what != "raise" or "[rank1]: ValueError: sample 17 is broken" in done.stderr


@pytest.mark.slow
def test_the_other_ranks_report_a_rank_that_ended_while_all_save(tmp_path: Path) -> None:
    done = launched(f"saving {tmp_path}")
    assert done.returncode != 0
    for rank in (0, 2):
        assert f"[rank{rank}]: autopar.errors.RankError: {KILLED}" in done.stderr, done.stderr
    assert autopar.Checkpoints(tmp_path).steps() == ()


@pytest.mark.slow
def test_ranks_wait_for_a_late_rank() -> None:
    done = launched("late 4")
    assert done.returncode == 0 and done.stdout.count("is done") == 3, done.stderr
