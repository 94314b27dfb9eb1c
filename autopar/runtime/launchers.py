"""The launcher that started this process, and this process's place among the processes it started.

torchrun, Ray Train and PyTorchJob set the variables that torch reads (``RANK``, ``WORLD_SIZE``,
``LOCAL_RANK``, ...). SLURM's ``srun`` and the launchers of MPI set variables of their own; a
program that reads only torch's variables would run once per process, each time as a world of one
process. `adopt_launch` sets torch's variables from those of the launcher.

Sources of the variables: the manual pages of ``srun`` (section "OUTPUT ENVIRONMENT VARIABLES") and
``mpirun`` of Open MPI (section "MPI-specific environment variables"); the user guides of MVAPICH2,
Flux, HPE PALS and Intel MPI.
"""

from __future__ import annotations

import logging
import os
import re
import zlib
from collections.abc import Mapping
from dataclasses import dataclass

from autopar.errors import MeshError

log = logging.getLogger("autopar")

CHOICE = "AUTOPAR_LAUNCHER"
"""The environment variable that, set to ``none``, makes each process a world of its own."""

_INDEPENDENT = f"set {CHOICE}=none if the processes are independent runs"
_FIRST_PORT, _NUM_PORTS = 15_000, 15_000  # below the ports that Linux gives to clients (32,768)


@dataclass(frozen=True, slots=True)
class Launcher:
    """The environment variables of a launcher.

    Attributes:
        name: the command that the user runs.
        rank: variable with the rank of the process.
        world_size: variable with the number of processes.
        local_rank: variable with the index of the process on its node.
        local_world_size: variable with the number of processes on the node. SLURM writes one number
            per node, such as ``2(x3),1``.
        job: variables that together identify the run.
        node: variable with the index of the node; empty if there is none.
        hosts: variable with the list of hosts, rank 0's first, as SLURM writes it; empty if there
            is none.
        passing: options that pass an environment variable to every process, to be formatted with
            its assignment.
    """

    name: str
    rank: str
    world_size: str
    local_rank: str
    local_world_size: str
    job: tuple[str, ...]
    node: str = ""
    hosts: str = ""
    passing: str = "export {}"


# Open MPI and others start their daemons with srun, so the processes also have variables of SLURM,
# which count the daemons. MPI's therefore come first, and PMI's, which srun sets as well, last.
LAUNCHERS = (
    Launcher(
        "mpirun",
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        "OMPI_COMM_WORLD_LOCAL_RANK",
        "OMPI_COMM_WORLD_LOCAL_SIZE",
        ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
        passing="mpirun -x {}",
    ),
    Launcher(
        "mpirun_rsh",
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        "MV2_COMM_WORLD_LOCAL_RANK",
        "MV2_COMM_WORLD_LOCAL_SIZE",
        ("PMI_ID", "MPIRUN_ID"),
    ),
    Launcher(
        "flux run",
        "FLUX_TASK_RANK",
        "FLUX_JOB_SIZE",
        "FLUX_TASK_LOCAL_ID",
        "",
        ("FLUX_JOB_ID",),
    ),
    Launcher(
        "srun",
        "SLURM_PROCID",
        "SLURM_STEP_NUM_TASKS",
        "SLURM_LOCALID",
        "SLURM_STEP_TASKS_PER_NODE",
        ("SLURM_JOB_ID", "SLURM_STEP_ID"),
        node="SLURM_NODEID",
        hosts="SLURM_STEP_NODELIST",
    ),
    Launcher(
        "mpiexec",
        "PMI_RANK",
        "PMI_SIZE",
        "MPI_LOCALRANKID",
        "MPI_LOCALNRANKS",
        ("PMI_JOBID", "HYDRA_JOBID"),
        passing="mpiexec -genv {}",
    ),
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The processes that a launcher started, and this one's place among them.

    Attributes:
        launcher: the launcher.
        rank: the rank of this process.
        world_size: number of processes.
        local_rank: index of this process on its node.
        local_world_size: number of processes on this node; `world_size` if unknown.
        num_nodes: number of nodes.
        node: index of this node.
    """

    launcher: Launcher
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    num_nodes: int
    node: int


def find_launch(environ: Mapping[str, str]) -> Launch | None:
    """Find which launcher other than torchrun started this process together with others.

    Args:
        environ: the environment variables of this process.

    Returns:
        The launch, or None if there is no such launcher, if it started one process, or if the user
        declared its processes independent.

    Raises:
        MeshError: if a variable of the launcher does not hold a number.
    """
    if environ.get(CHOICE, "").lower() == "none":
        return None
    for launcher in LAUNCHERS:
        if launcher.rank not in environ or launcher.world_size not in environ:
            continue
        if _number(environ, launcher.world_size) == 1:
            return None
        return _read_launch(launcher, environ)
    return None


def _read_launch(launcher: Launcher, environ: Mapping[str, str]) -> Launch:
    rank, world_size = (_number(environ, name) for name in (launcher.rank, launcher.world_size))
    sizes = _tasks_per_node(launcher, environ)
    if sizes:
        node = min(_number(environ, launcher.node), len(sizes) - 1)
        local_world_size, num_nodes = sizes[node], len(sizes)
    else:
        is_told = launcher.local_world_size in environ
        local_world_size = _number(environ, launcher.local_world_size) if is_told else world_size
        node, num_nodes = rank // local_world_size, -(-world_size // local_world_size)
    has_local = launcher.local_rank in environ
    local_rank = _number(environ, launcher.local_rank) if has_local else rank % local_world_size
    return Launch(launcher, rank, world_size, local_rank, local_world_size, num_nodes, node)


def _number(environ: Mapping[str, str], name: str) -> int:
    if not re.fullmatch(r"\d{1,9}", environ[name]):
        raise MeshError(
            f"environment variable {name} is {environ[name]!r}, not a number",
            remedy=f"unset {name}, or start the script with: autopar run -n NUMBER SCRIPT",
        )
    return int(environ[name])


def _tasks_per_node(launcher: Launcher, environ: Mapping[str, str]) -> list[int]:
    """Return the number of processes per node, or nothing if the launcher does not list them."""
    if not launcher.node or {launcher.node, launcher.local_world_size} - environ.keys():
        return []
    return tasks_per_node(environ[launcher.local_world_size])


def tasks_per_node(text: str) -> list[int]:
    """Parse SLURM's numbers of tasks per node.

    >>> tasks_per_node("2(x3),1")
    [2, 2, 2, 1]
    """
    parts = re.findall(r"(\d+)(?:\(x(\d+)\))?", text)
    return [int(size) for size, count in parts for _ in range(int(count or 1))]


def first_host(text: str) -> str:
    """Return the first host of a list as SLURM writes it.

    >>> first_host("gpu[003-005,9],login1"), first_host("rack2-n[1-4]"), first_host("a,b")
    ('gpu003', 'rack2-n1', 'a')
    """
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])+", text)
    name = first[0] if first else text
    return re.sub(r"\[([^\],-]+)[^\]]*\]", r"\1", name)


def adopt_launch() -> None:
    """Set the environment variables that torch reads, if a launcher other than torchrun started
    this process and they are not set.

    ``MASTER_ADDR`` is this machine if all processes are on it, and otherwise the first host that
    SLURM lists. ``MASTER_PORT`` is derived from the job. Both are left as they are if they are set.

    Raises:
        MeshError: if the launcher started several processes, but torch's variables describe a world
            of fewer processes, or the address of rank 0 is unknown.
    """
    launch = find_launch(os.environ)
    if launch is None:
        return
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        _check_torch_variables(launch)
        return
    name = launch.launcher.name
    variables = {
        "RANK": launch.rank,
        "WORLD_SIZE": launch.world_size,
        "LOCAL_RANK": launch.local_rank,
        "LOCAL_WORLD_SIZE": launch.local_world_size,
        "GROUP_RANK": launch.node,
        "GROUP_WORLD_SIZE": launch.num_nodes,
        "MASTER_ADDR": os.environ.get("MASTER_ADDR") or _address(launch),
        "MASTER_PORT": os.environ.get("MASTER_PORT") or _port(launch),
    }
    os.environ.update({key: str(value) for key, value in variables.items()})
    if launch.rank == 0:
        log.info(
            "%s started %d processes, which form one world; they meet at %s:%s",
            name,
            launch.world_size,
            variables["MASTER_ADDR"],
            variables["MASTER_PORT"],
        )


def _check_torch_variables(launch: Launch) -> None:
    """Check that the variables that torchrun or the user set do not divide the processes of an
    outer launcher into worlds that do not know of each other.

    Raises:
        MeshError: if they do.
    """
    name = launch.launcher.name
    if "TORCHELASTIC_RUN_ID" in os.environ:
        _check_agents(launch)
        return
    if int(os.environ["WORLD_SIZE"]) < launch.world_size:
        raise MeshError(
            f"{name} started {launch.world_size} processes, but WORLD_SIZE is"
            f" {os.environ['WORLD_SIZE']}",
            remedy=f"unset RANK and WORLD_SIZE, which are then set from {name}; {_INDEPENDENT}",
        )


def _check_agents(launch: Launch) -> None:
    """Check that the torchruns that an outer launcher started have met.

    Raises:
        MeshError: if each of them started a world of its own.
    """
    if int(os.environ.get("GROUP_WORLD_SIZE", 1)) > 1:
        return
    name, count = launch.launcher.name, launch.world_size
    what = (
        f"{name} started {count} launchers, and each of them started a world of its own with"
        f" {os.environ['WORLD_SIZE']} processes"
    )
    # The number of machines may be a range, and the others may join later.
    if os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0") != "0":
        log.warning("%s, unless the number of machines is a range and others join later", what)
        return
    raise MeshError(
        what,
        remedy=(
            f"start the script with {name} alone, or let the launchers meet: autopar run --nodes"
            f" {count} --meet HOST:PORT SCRIPT (torchrun --nnodes {count} --rdzv-backend c10d"
            f" --rdzv-endpoint HOST:PORT SCRIPT); {_INDEPENDENT}"
        ),
    )


def _address(launch: Launch) -> str:
    """Return the address at which the processes meet.

    Raises:
        MeshError: if the processes are on several nodes, and the launcher does not list them.
    """
    if launch.local_world_size == launch.world_size and launch.launcher.local_world_size:
        return "127.0.0.1"
    if launch.launcher.hosts in os.environ:
        return first_host(os.environ[launch.launcher.hosts])
    assignment = launch.launcher.passing.format("MASTER_ADDR=HOST")
    raise MeshError(
        f"{launch.launcher.name} started {launch.world_size} processes, and does not tell them the"
        " host of rank 0",
        remedy=f"pass its name or address to all processes: {assignment}",
    )


def _port(launch: Launch) -> int:
    """Return the port at which the processes meet: the same for all processes of a run, and with
    high probability another one for another run on the same machine."""
    identity = ":".join(os.environ.get(name, "") for name in launch.launcher.job)
    return _FIRST_PORT + zlib.crc32(identity.encode()) % _NUM_PORTS


def launched_shape(world_size: int, environ: Mapping[str, str]) -> tuple[int, int] | int:
    """Return how the processes of this job are distributed over nodes. All processes of a job get
    the same answer.

    Args:
        world_size: number of processes.
        environ: environment variables, after `adopt_launch`.

    Returns:
        (nodes, processes per node); the number of processes if nodes have different numbers of
        processes.
    """
    launch = find_launch(environ)
    if "LOCAL_WORLD_SIZE" in environ:
        per_node = int(environ["LOCAL_WORLD_SIZE"])
        num_nodes = int(environ.get("GROUP_WORLD_SIZE", -(-world_size // per_node)))
    elif launch is not None and launch.world_size == world_size:
        per_node, num_nodes = launch.local_world_size, launch.num_nodes
    elif _is_one_process_per_container(environ):
        per_node, num_nodes = 1, world_size
    else:
        per_node, num_nodes = world_size, 1
    return (num_nodes, per_node) if num_nodes * per_node == world_size else world_size


def _is_one_process_per_container(environ: Mapping[str, str]) -> bool:
    """Return whether a PyTorchJob started this process: it sets RANK and WORLD_SIZE, and starts one
    process per pod."""
    return "KUBERNETES_SERVICE_HOST" in environ and "LOCAL_RANK" not in environ
