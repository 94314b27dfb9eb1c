"""Measuring the machine at hand: the profile ``local``.

On a CPU every figure is measured while `world_size` processes, one thread each, do the same thing at once, since the ranks of one
machine share its cores. So the profile holds for that number of ranks on that machine, and for no other.

A GPU is measured by one process, which has it to itself; ranks on other GPUs of the kind are taken to be as fast. One GPU says
nothing of links: these come, each figure with its own source, from another profile, by default the one of that chip.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from datetime import date
from pathlib import Path

import torch
from rich.progress import Progress

from autopar.errors import HardwareError
from autopar.hardware import HardwareProfile
from autopar.run.measure_profile import Json, Machine, Points, dumps, links_from, measured_host, measured_links, profile_json

LIMIT_S = 300.0


def measure(
    device: str = "cpu",
    world_size: int | None = None,
    out: str | os.PathLike[str] | None = None,
    name: str = "local",
    links: str | os.PathLike[str] | None = None,
) -> HardwareProfile:
    """Measure this machine and write its profile, in less than a minute on two idle cores or one GPU.

    Args:
        device: ``"cpu"``, or ``"cuda"``: the first GPU that this process sees, float32 without TF32, torch's default.
        world_size: on ``cpu`` the number of processes, 2 or more, by default 4; plans for other numbers share the cores otherwise
            than measured. On ``cuda`` 1, the default.
        out: the file to write, by default the one that ``hardware="local"`` loads.
        links: on ``cuda`` the profile, by name or path, whose links are taken; by default the one of this GPU, or else of an H100.

    Raises:
        HardwareError: for another device or one that is not there, for a number of processes or for links that it cannot have, or
            where a process fails; its message is passed on.
    """
    if device not in ("cpu", "cuda"):
        known = ", ".join(HardwareProfile.names())
        raise HardwareError(
            f"device {device!r} cannot be measured",
            remedy=f"measure cpu, or cuda with CUDA_VISIBLE_DEVICES saying which, or take a profile that is there: {known}",
        )
    data = _measure_cpu(4 if world_size is None else world_size, name, links) if device == "cpu" else _measure_gpu(world_size, name, links)
    profile = HardwareProfile.from_json(data)
    path = Path(out) if out is not None else HardwareProfile.local_path()
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_text(dumps(data), encoding="utf-8")
    return profile


def _measure_cpu(world_size: int, name: str, links: str | os.PathLike[str] | None) -> Json:
    if world_size < 2:
        raise HardwareError(f"cannot measure collectives with world_size={world_size}", remedy="use 2 or more")
    if links is not None:
        raise HardwareError("the links of CPUs are measured, not taken from a profile", remedy="leave links out")
    with tempfile.TemporaryDirectory() as folder:
        points = _run_workers("cpu", world_size, Path(folder))
    text = f"{_cpu_name()}, {os.cpu_count()} cores, {world_size} processes of one thread at once, gloo, torch {torch.__version__}"
    command = f"autopar.run.measure.measure(world_size={world_size})"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world_size
    machine = Machine("cpu", text, command, date.today().isoformat(), memory_bytes, "the machine's memory over the processes")
    return profile_json(points, machine, name, measured_links(points, machine, world_size))


def _measure_gpu(world_size: int | None, name: str, links: str | os.PathLike[str] | None) -> Json:
    if world_size not in (None, 1):
        what = f"collectives between GPUs are not measured, so world_size={world_size} cannot be"
        raise HardwareError(what, remedy="leave world_size out: one GPU is measured, and links come from a profile, which `links` names")
    if not torch.cuda.is_available():
        raise HardwareError("there is no CUDA device to measure", remedy="run this on a machine with a GPU and a torch with CUDA")
    base_name = HardwareProfile.of_gpu(torch.cuda.get_device_name(0))[0] if links is None else os.fspath(links)
    base = HardwareProfile.read(base_name)
    HardwareProfile.from_json(base, where=base_name)
    with tempfile.TemporaryDirectory() as folder:
        points = _run_workers("cuda", 1, Path(folder))
    machine = _gpu(links)
    found = gpu_json(points, machine, name, base, base_name)
    if "host" in base:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        found["host"] = measured_host(base["host"], points["host"][0], machine, memory_bytes, torch.cuda.device_count())
    return found


def gpu_json(points: Points, machine: Machine, name: str, base: Json, base_name: str) -> Json:
    """The JSON of a GPU that was measured alone, with the links of `base`, and what it says of the host."""
    return profile_json(points, machine, name, links_from(base), f"; links, and what they cost compute, are those of {base_name}")


def _gpu(links: str | os.PathLike[str] | None) -> Machine:
    """The first GPU, with its host, whose time it is that small ops take."""
    found = torch.cuda.get_device_properties(0)
    host = f"{_cpu_name()}, {os.cpu_count()} cores"
    text = f"{found.name}, measured alone; {host}; torch {torch.__version__}, CUDA {torch.version.cuda}"
    command = f'autopar.run.measure.measure(device="cuda"{"" if links is None else f", links={os.fspath(links)!r}"})'
    return Machine("cuda", text, command, date.today().isoformat(), found.total_memory, "torch.cuda.get_device_properties, total_memory")


def _run_workers(device: str, world_size: int, folder: Path) -> Points:
    """Start the processes, show their progress, and return what rank 0 wrote. None is left behind, whatever happens."""
    package = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    workers = []
    try:
        for rank in range(world_size):
            with (folder / f"stderr{rank}").open("wb") as stderr:
                command = [sys.executable, "-m", "autopar.run.measure_worker", str(rank), str(world_size), str(folder), device]
                stdout = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                workers.append(subprocess.Popen(command, env=environment, stdout=stdout, stderr=stderr, text=True))
        watcher = threading.Thread(target=_show_progress, args=(workers[0],), daemon=True)
        watcher.start()
        _wait(workers, folder)
        watcher.join()
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    points: Points = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    return points


def _wait(workers: list[subprocess.Popen[str]], folder: Path) -> None:
    """Until all have ended well.

    Raises:
        HardwareError: as soon as one fails, with the end of what it said, or when the time is up.
    """
    deadline = time.monotonic() + LIMIT_S
    while any((codes := [worker.poll() for worker in workers])[rank] is None for rank in range(len(workers))):
        if any(codes):
            break
        if time.monotonic() > deadline:
            raise HardwareError(f"measuring took longer than {LIMIT_S:.0f} s", remedy="measure with fewer processes, on an idle machine")
        time.sleep(0.05)
    for rank, code in enumerate(codes):
        if code:
            said = (folder / f"stderr{rank}").read_text(encoding="utf-8", errors="replace").strip()[-2000:]
            raise HardwareError(f"measuring process {rank} ended with code {code}:\n{said}", remedy="mend what it says, and measure again")


def _show_progress(worker: subprocess.Popen[str]) -> None:
    assert worker.stdout is not None
    with worker.stdout, Progress(transient=True) as progress:
        task = progress.add_task("measuring", total=None)
        for line in worker.stdout:
            if line.startswith("total "):
                progress.update(task, total=int(line.split()[1]))
            elif line == "measured\n":
                progress.advance(task)


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
