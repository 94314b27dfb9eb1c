"""Programs for the remedies for processes that srun, mpirun and their like started."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from autopar.runtime.launchers import adopt_launch
from autopar.runtime.launching import launch
from tests.support.remedy_programs import Program
from tests.support.remedy_programs_training import build_trainer

SRUN = {
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "2",
    "SLURM_STEP_NODELIST": "gpu[1-2]",
}
"""Variables of the second of two processes on one machine."""

MPIRUN = {
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
}
"""Variables of the second of two processes, which are on two machines."""

_TORCH = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RUN_ID",
)


def under(
    variables: dict[str, str], program: Callable[[], object] = adopt_launch
) -> Callable[[], object]:
    """Run a program with the environment variables of a launcher, and torch's variables unset."""

    def run() -> object:
        with pytest.MonkeyPatch.context() as patch:
            for name in _TORCH:
                patch.setenv(name, "")  # so that it is restored
                patch.delenv(name)
            for name, value in variables.items():
                patch.setenv(name, value)
            return program()

    return run


def _run_command(**options: object) -> Callable[[], object]:
    """Run `autopar run` in one process of srun."""

    def run() -> None:
        with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "execv", lambda path, arguments: None)
            script = Path(folder, "train.py")
            script.touch()
            launch(script, [], **options)  # type: ignore[arg-type]

    return under(SRUN, run)


_TORCHRUN = {"RANK": "0", "WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}

PROGRAMS: dict[str, Program] = {
    "runtime/launchers.py _number 0": Program(
        under({**SRUN, "SLURM_PROCID": "one"}),
        "unset SLURM_PROCID",
        under({name: value for name, value in SRUN.items() if name != "SLURM_PROCID"}),
    ),
    "runtime/launchers.py _check_torch_variables 0": Program(
        under({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}), "unset RANK and WORLD_SIZE", under(SRUN)
    ),
    "runtime/launchers.py _check_torch_variables 0 | independent": Program(
        under({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}),
        "set AUTOPAR_LAUNCHER=none",
        under({**SRUN, "RANK": "0", "WORLD_SIZE": "1", "AUTOPAR_LAUNCHER": "none"}),
    ),
    "runtime/launchers.py _check_agents 0": Program(
        under({**SRUN, **_TORCHRUN, "GROUP_WORLD_SIZE": "1"}),
        "let the launchers meet",
        under({**SRUN, **_TORCHRUN, "GROUP_WORLD_SIZE": "2"}),
    ),
    "runtime/launchers.py _address 0": Program(
        under(MPIRUN), "mpirun -x MASTER_ADDR=HOST", under({**MPIRUN, "MASTER_ADDR": "gpu1"})
    ),
    "runtime/launching.py _check_one_task 0": Program(
        _run_command(num_processes=4), "omit -n", _run_command()
    ),
    "runtime/launching.py _check_one_task 1": Program(
        _run_command(restarts=2), "omit --restarts", _run_command()
    ),
    "integrations/trainer_arguments.py check_arguments 1": Program(
        under(SRUN, build_trainer(set_to={"_n_gpu": 4})),
        "start the script with `srun ... autopar run SCRIPT`",
        build_trainer(),
    ),
}
