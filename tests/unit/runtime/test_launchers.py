"""The processes that srun, mpirun and their like started form one world."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import pytest
import torch

from autopar.errors import AutoparError, MeshError
from autopar.runtime.launchers import (
    LAUNCHERS,
    adopt_launch,
    find_launch,
    first_host,
    launched_shape,
    tasks_per_node,
)
from autopar.runtime.launching import launch
from autopar.runtime.rank_comm import take_gpu
from tests.support.remedy_programs_launchers import MPIRUN, SRUN


def srun(rank: int, per_node: str = "2(x2)", hosts: str = "gpu[07-08]") -> dict[str, str]:
    """The variables of one process of srun on several nodes."""
    nodes = [node for node, size in enumerate(tasks_per_node(per_node)) for _ in range(size)]
    return {
        "SLURM_JOB_ID": "41",
        "SLURM_STEP_ID": "0",
        "SLURM_PROCID": str(rank),
        "SLURM_STEP_NUM_TASKS": str(len(nodes)),
        "SLURM_LOCALID": str(nodes[:rank].count(nodes[rank])),
        "SLURM_NODEID": str(nodes[rank]),
        "SLURM_STEP_TASKS_PER_NODE": per_node,
        "SLURM_STEP_NODELIST": hosts,
    }


HYDRA = {"PMI_RANK": "1", "PMI_SIZE": "2", "MPI_LOCALRANKID": "1", "MPI_LOCALNRANKS": "2"}
FLUX = {"FLUX_TASK_RANK": "3", "FLUX_JOB_SIZE": "4", "FLUX_TASK_LOCAL_ID": "1"}
MVAPICH = {
    "MV2_COMM_WORLD_RANK": "1",
    "MV2_COMM_WORLD_SIZE": "2",
    "MV2_COMM_WORLD_LOCAL_RANK": "1",
    "MV2_COMM_WORLD_LOCAL_SIZE": "2",
}


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """The environment variables of the process, at first none."""
    variables: dict[str, str] = {}
    monkeypatch.setattr(os, "environ", variables)
    return variables


def _world(environ: dict[str, str]) -> tuple[str, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return tuple(environ[name] for name in names)


@pytest.mark.parametrize(
    ("variables", "world"),
    [
        (SRUN, ("1", "2", "1", "2", "127.0.0.1")),
        (srun(0), ("0", "4", "0", "2", "gpu07")),
        (srun(3), ("3", "4", "1", "2", "gpu07")),
        (srun(2, "2,1", "a,b"), ("2", "3", "0", "1", "a")),
        ({**MPIRUN, "MASTER_ADDR": "host"}, ("1", "2", "0", "1", "host")),
        ({**MPIRUN, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, ("1", "2", "0", "2", "127.0.0.1")),
        (HYDRA, ("1", "2", "1", "2", "127.0.0.1")),
        (MVAPICH, ("1", "2", "1", "2", "127.0.0.1")),
        ({**FLUX, "MASTER_ADDR": "host"}, ("3", "4", "1", "4", "host")),
        # mpirun starts one daemon per node with srun, and srun sets the variables of PMI as well
        ({**srun(0, "1(x2)"), **MPIRUN, "MASTER_ADDR": "host"}, ("1", "2", "0", "1", "host")),
        ({**srun(3), "PMI_RANK": "0", "PMI_SIZE": "9"}, ("3", "4", "1", "2", "gpu07")),
    ],
)
def test_a_launcher_sets_the_variables_of_torch(
    environ: dict[str, str], variables: dict[str, str], world: tuple[str, ...]
) -> None:
    environ.update(variables)
    adopt_launch()
    assert _world(environ) == world
    before = dict(environ)
    adopt_launch()
    assert environ == before


def test_every_launcher_has_an_example() -> None:
    found = [find_launch(one) for one in (MPIRUN, MVAPICH, FLUX, SRUN, HYDRA)]
    assert [one.launcher for one in found if one is not None] == list(LAUNCHERS)


def test_the_processes_of_one_run_meet_at_one_port(environ: dict[str, str]) -> None:
    ports = []
    for step, rank in (("0", 0), ("0", 3), ("1", 0)):
        environ.clear()
        environ.update({**srun(rank), "SLURM_STEP_ID": step})
        adopt_launch()
        ports.append(int(environ["MASTER_PORT"]))
    assert ports[0] == ports[1] != ports[2]
    assert all(15_000 <= port < 30_000 for port in ports)


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "41"},  # a batch script itself
        {**SRUN, "SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "1"},
        {**SRUN, "AUTOPAR_LAUNCHER": "none"},
    ],
)
def test_single_and_independent_processes_are_their_own_world(
    environ: dict[str, str], variables: dict[str, str]
) -> None:
    environ.update(variables)
    before = dict(environ)
    adopt_launch()
    assert environ == before


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({**SRUN, "RANK": "0", "WORLD_SIZE": "1"}, "srun started 2 processes, but WORLD_SIZE is 1"),
        ({**MPIRUN, "RANK": "0", "WORLD_SIZE": "1"}, "mpirun started 2 processes"),
        (
            {**SRUN, "RANK": "0", "WORLD_SIZE": "8", "TORCHELASTIC_RUN_ID": "none"},
            "srun started 2 launchers, and each of them started a world of its own with 8",
        ),
        (MPIRUN, "does not tell them the host of rank 0"),
        (FLUX, "does not tell them the host of rank 0"),
        ({**SRUN, "SLURM_STEP_NUM_TASKS": "two"}, "SLURM_STEP_NUM_TASKS is 'two', not a number"),
    ],
)
def test_separate_worlds_are_refused(
    environ: dict[str, str], variables: dict[str, str], words: str
) -> None:
    environ.update(variables)
    with pytest.raises(MeshError, match=words):
        adopt_launch()


def test_launchers_that_may_meet_later_are_announced(
    environ: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    elastic = {"TORCHELASTIC_RUN_ID": "autopar", "TORCHELASTIC_MAX_RESTARTS": "10"}
    environ.update({**SRUN, **elastic, "RANK": "0", "WORLD_SIZE": "8", "GROUP_WORLD_SIZE": "1"})
    with caplog.at_level(logging.WARNING, "autopar"):
        adopt_launch()
    assert "others join later" in caplog.text
    environ["GROUP_WORLD_SIZE"] = "2"
    caplog.clear()
    adopt_launch()
    assert not caplog.records


@pytest.mark.parametrize("rank", range(3))
def test_all_processes_get_the_same_shape_on_uneven_nodes(
    environ: dict[str, str], rank: int
) -> None:
    environ.update(srun(rank, "2,1", "a,b"))
    adopt_launch()
    assert launched_shape(3, environ) == 3


@pytest.mark.parametrize(
    ("variables", "world", "shape"),
    [
        ({}, 4, (1, 4)),
        ({"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "2"}, 6, 6),  # nodes with 4 and 2
        ({"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2"}, 6, 6),
        ({"LOCAL_WORLD_SIZE": "8"}, 16, (2, 8)),
        ({"RANK": "1", "KUBERNETES_SERVICE_HOST": "10.0.0.1"}, 4, (4, 1)),  # a PyTorchJob
        (srun(1), 4, (2, 2)),  # the script created the process group
        (srun(1), 2, (1, 2)),  # of a part of the processes
    ],
)
def test_the_shape_follows_from_the_variables(
    variables: dict[str, str], world: int, shape: object
) -> None:
    assert launched_shape(world, variables) == shape


@pytest.mark.parametrize(
    ("text", "host"),
    [
        ("gpu1", "gpu1"),
        ("gpu[003-005,9],login1", "gpu003"),
        ("rack[2-3]-n[1-4]", "rack2-n1"),
        ("a.b.c,d", "a.b.c"),
    ],
)
def test_the_first_host_of_a_list(text: str, host: str) -> None:
    assert first_host(text) == host


@pytest.mark.parametrize(
    ("visible", "is_refused"), [("0", False), ("3", False), (None, True), ("0,1", True)]
)
def test_a_process_uses_the_only_gpu_that_its_launcher_shows(
    environ: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    is_refused: bool,
) -> None:
    environ.update({**SRUN, "LOCAL_RANK": "1"})
    if visible is not None:
        environ["CUDA_VISIBLE_DEVICES"] = visible
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    if is_refused:
        with pytest.raises(MeshError, match="process 1 of this machine has no GPU"):
            take_gpu()
    else:
        take_gpu()
    environ["TORCHELASTIC_RUN_ID"] = "none"  # torchrun shows the same list to all processes
    with pytest.raises(MeshError, match="process 1 of this machine has no GPU"):
        take_gpu()


def test_autopar_run_is_one_process_of_an_outer_launcher(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environ.update(SRUN)
    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda path, arguments: started.append([path, *arguments]))
    monkeypatch.setattr("runpy.run_module", lambda name, run_name: None)
    script = tmp_path / "train.py"
    script.touch()
    launch(script, ["--steps", "3"])
    worker = [sys.executable, "-m", "autopar.runtime.launch_worker", str(script), "--steps", "3"]
    assert started[0] == [sys.executable, *worker]
    assert _world(environ) == ("1", "2", "1", "2", "127.0.0.1")
    with pytest.raises(AutoparError, match="started this command 2 times"):
        launch(script, [], num_processes=4)
    with pytest.raises(AutoparError, match="cannot restart it"):
        launch(script, [], restarts=1)
