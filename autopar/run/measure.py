"""Measuring the machine at hand: the profile ``local``.

Every figure is measured while `world_size` processes, one thread each, do the same thing at once, since the ranks of one
machine share its cores. So the profile holds for that number of ranks on that machine, and for no other.
"""

from __future__ import annotations

import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from autopar.errors import HardwareError
from autopar.hardware import FLOP_KINDS, FORMAT, MEMORY_KINDS, VERSION, HardwareProfile

LIMIT_S = 300.0
Points = Mapping[str, list[dict[str, Any]]]


def measure(device: str = "cpu", world_size: int = 4, out: str | os.PathLike[str] | None = None, name: str = "local") -> HardwareProfile:
    """Measure this machine and write its profile, in less than a minute on two idle cores.

    Args:
        device: ``"cpu"``, the only one so far.
        world_size: number of processes, at least 2; plans for other numbers share the cores otherwise than measured.
        out: the file to write, by default the one that ``hardware="local"`` loads.

    Raises:
        HardwareError: for another device, fewer than 2 processes, or where a process fails; its message is passed on.
    """
    if device != "cpu":
        known = ", ".join(HardwareProfile.names())
        raise HardwareError(f"device {device!r} cannot be measured", remedy=f"measure cpu, or take a profile that is there: {known}")
    if world_size < 2:
        raise HardwareError(f"cannot measure collectives with world_size={world_size}", remedy="use 2 or more")
    with tempfile.TemporaryDirectory() as folder:
        points = _run_workers(world_size, Path(folder))
    data = _profile(points, name, world_size)
    profile = HardwareProfile.from_json(data)
    path = Path(out) if out is not None else HardwareProfile.local_path()
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(_dumps(data), encoding="utf-8")
    return profile


def _run_workers(world_size: int, folder: Path) -> Points:
    """Start the processes, show their progress, and return what rank 0 wrote. None is left behind, whatever happens."""
    package = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    workers = []
    try:
        for rank in range(world_size):
            with (folder / f"stderr{rank}").open("wb") as stderr:
                command = [sys.executable, "-m", "autopar.run.measure_worker", str(rank), str(world_size), str(folder)]
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


def _profile(points: Points, name: str, world_size: int) -> dict[str, Any]:
    """The profile's JSON from the measured points."""
    today, cores = date.today().isoformat(), os.cpu_count()
    machine = f"{_cpu_name()}, {cores} cores, {world_size} processes of one thread at once, gloo, torch {torch.__version__}"
    command = f"autopar.run.measure.measure(world_size={world_size})"
    origin = {"source": f"measured by {command}: {machine}", "date": today}

    def figure(value: float, unit: str, how: str) -> dict[str, Any]:
        return {"value": float(f"{value:.4g}"), "unit": unit, **origin, "source": f"{origin['source']}; {how}"}

    peaks = _best_rates(points["matmul"], lambda p: 2.0 * p["m"] * p["n"] * p["k"])
    attention = {kind: _best_rates(points[kind], lambda p: p["flops"]) for kind in FLOP_KINDS[1:]}
    rates = {kind: points[kind][-1]["bytes"] / points[kind][-1]["time_s"] for kind in MEMORY_KINDS}
    bandwidth = max(rates.values())
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    link = _link(points, world_size, figure)
    link["measured"] = {kind: {"unit": "s", **origin, "points": points[kind]} for kind in _COLLECTIVES}
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "description": f"this machine: {machine}",
        "device_memory_bytes": figure(memory_bytes // world_size, "bytes", "the machine's memory over the processes"),
        "memory_bandwidth_bytes_per_s": figure(bandwidth, "bytes/s", "best of the kinds of work that memory bounds, largest size"),
        "launch_overhead_s": figure(min(p["time_s"] for p in points["elementwise"]), "s", "smallest addition"),
        "matmul_half_flops": figure(0, "flops", "0, since the measured points show the speed of small sizes"),
        "peak_flops_per_s": {d: figure(rate, "flops/s", "best matmul measured") for d, rate in peaks.items()},
        "efficiency": {
            "matmul": {d: figure(1, "1", "1, since the peak is what was measured") for d in peaks},
            **{
                kind: {d: figure(min(1.0, rate / peaks[d]), "1", "best measured over best matmul") for d, rate in by_dtype.items()}
                for kind, by_dtype in attention.items()
            },
            **{kind: figure(rates[kind] / bandwidth, "1", "largest size over the best kind") for kind in MEMORY_KINDS},
        },
        "measured": {kind: {"unit": "s", **origin, "points": points[kind]} for kind in (*FLOP_KINDS, *MEMORY_KINDS)},
        "links": {"intra": link, "inter": link},
    }


_COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


def _best_rates(points: list[dict[str, Any]], size: Any) -> dict[str, float]:
    """Dtype → best size per second."""
    dtypes = dict.fromkeys(p["dtype"] for p in points)
    return {d: max(size(p) / p["time_s"] for p in points if p["dtype"] == d) for d in dtypes}


def _link(points: Points, world_size: int, figure: Any) -> dict[str, Any]:
    """Latency of the smallest all_reduce and bandwidth of the largest all_gather, over all ranks; both links are this one."""
    whole = {kind: [p for p in points[kind] if p["num_devices"] == world_size] for kind in _COLLECTIVES}
    steps = 2 * math.ceil(math.log2(world_size))
    gather, exchange = whole["all_gather"][-1], whole["all_to_all"][-1]
    share = (world_size - 1) / world_size
    note = "; the processes share one machine, which stands for both links"
    return {
        "latency_s": figure(whole["all_reduce"][0]["time_s"] / steps, "s", f"smallest all_reduce over {steps} steps{note}"),
        "bandwidth_bytes_per_s": figure(share * gather["bytes"] / gather["time_s"], "bytes/s", f"largest all_gather{note}"),
        "all_to_all_efficiency": figure(min(1.0, gather["time_s"] / exchange["time_s"]), "1", f"largest all_to_all over all_gather{note}"),
    }


def _dumps(data: dict[str, Any]) -> str:
    """Indented JSON with one measured point a line."""
    lines: list[str] = []

    def mark(value: Any) -> Any:
        if isinstance(value, dict) and "time_s" in value:
            lines.append(json.dumps(value))
            return f"@{len(lines) - 1}@"
        if isinstance(value, dict):
            return {key: mark(v) for key, v in value.items()}
        return [mark(v) for v in value] if isinstance(value, list) else value

    text = json.dumps(mark(data), indent=2)
    for i, line in enumerate(lines):
        text = text.replace(f'"@{i}@"', line, 1)
    return text + "\n"
