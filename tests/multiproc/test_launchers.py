"""One script under each launcher: the processes form one world, and train as one process does.

The launchers are those installed on this machine; a SLURM of one machine is started for the test.
On Debian: ``apt-get install slurm-wlm munge openmpi-bin mpich``; Ray is ``ray[train]`` on PyPI.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import worker_launched

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("worker_launched.py")
PYTHON = sys.executable
MPIRUN = ("mpirun.openmpi", "--allow-run-as-root", "--oversubscribe", "-n")
HYDRA = ("mpiexec.hydra", "-n")

pytestmark = pytest.mark.slow


def _run(
    command: list[str], folder: Path, variables: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    environment.update(variables or {})
    return subprocess.run(
        [*command, str(folder)], env=environment, capture_output=True, text=True, timeout=600
    )


def _check(folder: Path, num_processes: int) -> None:
    """Check that each rank of one world trained as one process does."""
    expected = worker_launched.losses(worker_launched.build())
    results = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json")}
    assert sorted(results) == [str(rank) for rank in range(num_processes)]
    for rank, result in results.items():
        assert result["world_size"] == num_processes
        assert result["local_rank"] == rank  # all are on one machine
        assert result["split"]
        assert result["losses"] == pytest.approx(expected, rel=1e-12)


def _installed(program: str) -> str:
    path = shutil.which(program)
    if path is None:
        pytest.skip(f"{program} is not installed")
    return path


@pytest.mark.parametrize("num_processes", [2, 4])
@pytest.mark.parametrize("launcher", [MPIRUN, HYDRA], ids=lambda command: command[0])
def test_processes_of_mpi_form_one_world(
    launcher: tuple[str, ...], num_processes: int, tmp_path: Path
) -> None:
    _installed(launcher[0])
    process = _run([*launcher, str(num_processes), PYTHON, str(SCRIPT)], tmp_path)
    assert process.returncode == 0, process.stderr
    _check(tmp_path, num_processes)


def test_mpirun_of_torchruns_that_do_not_meet_is_refused(tmp_path: Path) -> None:
    _installed(MPIRUN[0])
    torchrun = [PYTHON, "-m", "torch.distributed.run", "--nproc-per-node", "1", str(SCRIPT)]
    process = _run([*MPIRUN, "2", *torchrun], tmp_path)
    assert process.returncode != 0 and not list(tmp_path.iterdir())
    assert "mpirun started 2 launchers, and each of them started a world" in process.stderr


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A SLURM of this machine with 8 CPUs. Yields the environment variables that name it."""
    for program in ("slurmctld", "slurmd", "munged", "srun"):
        _installed(program)
    if os.geteuid() != 0 or not Path("/etc/munge/munge.key").exists():
        pytest.skip("slurmd needs root, and munge its key")
    folder = tmp_path_factory.mktemp("slurm")
    host = os.uname().nodename.split(".")[0]
    settings = {
        "ClusterName": "test",
        "SlurmctldHost": f"{host}(127.0.0.1)",
        "SlurmUser": "root",
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "SlurmctldLogFile": folder / "slurmctld.log",
        "SlurmdLogFile": folder / "slurmd.log",
        "SlurmctldPort": 16917,
        "SlurmdPort": 16918,
        "AuthInfo": f"socket={folder / 'munge.socket'}",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SlurmdParameters": "config_overrides",
        "NodeName": f"{host} NodeAddr=127.0.0.1 CPUs=8 State=UNKNOWN",
        "PartitionName": "all Nodes=ALL Default=YES State=UP OverSubscribe=YES",
    }
    conf = folder / "slurm.conf"
    conf.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
    for name in ("state", "spool"):
        (folder / name).mkdir()
    variables = {"SLURM_CONF": str(conf)}
    environment = {**os.environ, **variables}
    munge = [f"--{name}-file={folder / name}" for name in ("pid", "log", "seed")]
    daemons = [
        subprocess.Popen(
            ["munged", "--foreground", "--force", f"--socket={folder / 'munge.socket'}", *munge]
        ),
        subprocess.Popen(["slurmctld", "-D"], env=environment),
        subprocess.Popen(["slurmd", "-D"], env=environment),
    ]
    try:
        _wait_for_node(environment)
        yield variables
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait(timeout=60)


def _wait_for_node(environment: dict[str, str]) -> None:
    for _ in range(60):
        found = subprocess.run(
            ["sinfo", "--noheader", "--format=%t"], env=environment, capture_output=True, text=True
        )
        if found.stdout.strip() == "idle":
            return
        time.sleep(1)
    pytest.fail(f"the node of SLURM did not become idle: {found.stdout}{found.stderr}")


@pytest.mark.parametrize("num_processes", [2, 4])
def test_tasks_of_srun_form_one_world(
    slurm: dict[str, str], num_processes: int, tmp_path: Path
) -> None:
    process = _run(["srun", "-n", str(num_processes), PYTHON, str(SCRIPT)], tmp_path, slurm)
    assert process.returncode == 0, process.stderr
    _check(tmp_path, num_processes)


def test_autopar_run_is_one_task_of_srun(slurm: dict[str, str], tmp_path: Path) -> None:
    command = ["srun", "-n", "2", PYTHON, "-m", "autopar", "run", str(SCRIPT)]
    process = _run(command, tmp_path, slurm)
    assert process.returncode == 0, process.stderr
    _check(tmp_path, 2)


def test_launchers_that_srun_starts_may_meet(slurm: dict[str, str], tmp_path: Path) -> None:
    run = ["-m", "autopar", "run", "--nodes", "2", "--meet", "localhost:16919", str(SCRIPT)]
    process = _run(["srun", "-n", "2", PYTHON, *run], tmp_path, slurm)
    assert process.returncode == 0, process.stderr
    assert sorted(path.name for path in tmp_path.glob("*.json")) == ["0.json", "1.json"]


def test_a_batch_script_outside_srun_is_one_process(slurm: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text(f"#!/bin/sh\n#SBATCH --ntasks=2\nexec {PYTHON} {SCRIPT} $1\n")
    batch = ["sbatch", "--wait", f"--output={tmp_path}/log", str(script)]
    process = _run(batch, tmp_path, slurm)
    assert process.returncode == 0, process.stderr
    assert json.loads((tmp_path / "0.json").read_text())["world_size"] == 1


def test_separate_worlds_under_srun_are_refused(slurm: dict[str, str], tmp_path: Path) -> None:
    variables = {**slurm, "RANK": "0", "WORLD_SIZE": "1"}
    process = _run(["srun", "-n", "2", PYTHON, str(SCRIPT)], tmp_path, variables)
    assert process.returncode != 0 and not list(tmp_path.iterdir())
    assert "srun started 2 processes, but WORLD_SIZE is 1" in process.stderr


def test_workers_of_ray_train_form_one_world(tmp_path: Path) -> None:
    pytest.importorskip("ray.train.torch")
    code = f"""
import sys
sys.path.insert(0, {str(SCRIPT.parent)!r})
import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer

def train(config):
    sys.path.insert(0, {str(SCRIPT.parent)!r})
    import worker_launched
    worker_launched.main(config["folder"])

ray.init(num_cpus=2, include_dashboard=False)
TorchTrainer(
    train,
    train_loop_config={{"folder": sys.argv[1]}},
    scaling_config=ScalingConfig(num_workers=2),
    torch_config=TorchConfig(backend="gloo"),
    run_config=RunConfig(storage_path=sys.argv[1] + "-ray"),
).fit()
"""
    process = _run([PYTHON, "-c", code], tmp_path)
    assert process.returncode == 0, process.stderr
    _check(tmp_path, 2)
