"""Measurement of this machine, which becomes the profile ``local``.

On a CPU, `world_size` processes of one thread each measure every figure at the same time, since the
ranks of one machine share its cores. The profile is therefore valid only for that number of ranks
on that machine.

A GPU is measured by one process without competition; ranks on other GPUs of the same kind are
assumed to be as fast. Links cannot be measured with one GPU. Their figures, each with its own
source, are taken from another profile, by default that of the chip.
"""

from __future__ import annotations

import copy
import errno
import json
import math
import os
import platform
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
from rich.progress import Progress

from autopar.core.hardware import FLOP_KINDS, FORMAT, MEMORY_KINDS, VERSION, HardwareProfile
from autopar.core.text_files import convert_write_errors, why_unwritable, write_file
from autopar.errors import HardwareError

# --------------------------------------------------------------------------------------------------
# Conversion of measured points to a profile's JSON. Each figure names its source: the machine and
# the command that measured it, or, for figures that one device cannot measure (links), the source
# in the profile that they were taken from.

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")
Points = Mapping[str, list[dict[str, Any]]]
Json = dict[str, Any]
_LINKED = ("links", "overlap_slowdown", "kernels", "host")  # cannot be measured with one device


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine that was measured.

    Attributes:
        device_type: ``"cpu"`` or ``"cuda"``.
        text: device, host, versions, and the number of processes that measured at once.
        command: the call that measured it.
        date: the date of the measurement, in ISO format.
        memory_bytes: the memory of one device, in bytes.
        memory_source: the source of `memory_bytes`.
    """

    device_type: str
    text: str
    command: str
    date: str
    memory_bytes: int
    memory_source: str

    @property
    def source(self) -> str:
        """The source that measured figures name."""
        return f"measured by {self.command}: {self.text}"

    def figure(self, value: float, unit: str, how: str) -> Json:
        """Return the JSON of a measured figure.

        Args:
            value: the number; a float is rounded to four significant digits, an int is exact.
            unit: the unit, such as ``"bytes/s"``.
            how: the way in which the number was derived; it is part of the source.
        """
        rounded = value if isinstance(value, int) else float(f"{value:.4g}")
        return {
            "value": rounded,
            "unit": unit,
            "source": f"{self.source}; {how}",
            "date": self.date,
        }

    def curves(self, points: Points, kinds: tuple[str, ...]) -> Json:
        """Return the JSON of the measured points of each kind, in seconds."""
        return {
            kind: {"unit": "s", "source": self.source, "date": self.date, "points": points[kind]}
            for kind in kinds
        }


def profile_json(points: Points, machine: Machine, name: str, linked: Json, note: str = "") -> Json:
    """Return the JSON of a profile.

    Args:
        points: kind → measured points, in ascending size.
        machine: the machine that was measured.
        name: the name of the profile.
        linked: the fields of links, from `measured_links` or `links_from`.
        note: a note on the links, appended to the description.
    """
    figure = machine.figure
    peaks = _best_rates(points["matmul"], lambda p: 2.0 * p["m"] * p["n"] * p["k"])
    rates = {kind: points[kind][-1]["bytes"] / points[kind][-1]["time_s"] for kind in MEMORY_KINDS}
    bandwidth = max(rates.values())
    return {
        "format": FORMAT,
        "version": VERSION,
        "name": name,
        "description": f"this machine: {machine.text}{note}",
        "device_type": machine.device_type,
        "device_memory_bytes": figure(machine.memory_bytes, "bytes", machine.memory_source),
        "memory_bandwidth_bytes_per_s": figure(
            bandwidth, "bytes/s", "best of the kinds of work that memory bounds, largest size"
        ),
        "launch_overhead_s": figure(
            min(p["time_s"] for p in points["elementwise"]), "s", "smallest addition"
        ),
        "matmul_half_flops": figure(
            0, "flops", "0, since the measured points show the speed of small sizes"
        ),
        "peak_flops_per_s": {
            d: figure(rate, "flops/s", "best matmul measured") for d, rate in peaks.items()
        },
        "efficiency": {
            "matmul": {d: figure(1, "1", "1, since the peak is what was measured") for d in peaks},
            **{kind: _attention(points[kind], peaks, figure) for kind in FLOP_KINDS[1:]},
            **{
                kind: figure(rates[kind] / bandwidth, "1", "largest size over the best kind")
                for kind in MEMORY_KINDS
            },
        },
        "measured": machine.curves(points, (*FLOP_KINDS, *MEMORY_KINDS)),
        **linked,
    }


def measured_links(points: Points, machine: Machine, world_size: int) -> Json:
    """Return the JSON of both links, which are the same: the latency of the smallest all_reduce and
    the bandwidth of the largest all_gather over all ranks.

    Args:
        points: kind → measured points, in ascending size.
        machine: the machine that was measured.
        world_size: the number of ranks.
    """
    points_by_kind = {
        kind: [p for p in points[kind] if p["num_devices"] == world_size] for kind in COLLECTIVES
    }
    steps = 2 * math.ceil(math.log2(world_size))
    gather, exchange = points_by_kind["all_gather"][-1], points_by_kind["all_to_all"][-1]
    bandwidth = (world_size - 1) / world_size * gather["bytes"] / gather["time_s"]
    efficiency = min(1.0, gather["time_s"] / exchange["time_s"])
    note = "; the processes share one machine, which stands for both links"
    link = {
        "latency_s": machine.figure(
            points_by_kind["all_reduce"][0]["time_s"] / steps,
            "s",
            f"smallest all_reduce over {steps} steps{note}",
        ),
        "bandwidth_bytes_per_s": machine.figure(bandwidth, "bytes/s", f"largest all_gather{note}"),
        "all_to_all_efficiency": machine.figure(
            efficiency, "1", f"largest all_to_all over all_gather{note}"
        ),
        "measured": machine.curves(points, COLLECTIVES),
    }
    return {"links": {"intra": link, "inter": link}}


def links_from(base: Json) -> Json:
    """Copy from another profile the links and the other fields that one device cannot measure.
    Every figure keeps its own source."""
    return {name: copy.deepcopy(base[name]) for name in _LINKED if name in base}


def measured_host(
    base: Json, found: Mapping[str, float], machine: Machine, memory_bytes: int, num_gpus: int
) -> Json:
    """Return the JSON of a GPU's share of its host.

    Args:
        base: the host of the base profile, which supplies the latency of a copy.
        found: the result of `autopar.profiler.worker.measure_host`, in bytes per second.
        machine: the machine that was measured.
        memory_bytes: the memory of the whole host, in bytes.
        num_gpus: the number of GPUs of the host, which share it evenly.
    """
    share = f"; shared evenly by {num_gpus} GPUs" if num_gpus > 1 else ""
    return {
        "memory_bytes": machine.figure(
            memory_bytes // num_gpus, "bytes", f"the host's memory{share}"
        ),
        "memory_bandwidth_bytes_per_s": machine.figure(
            found["step_bytes_per_s"] / num_gpus, "bytes/s", f"fused AdamW on all cores{share}"
        ),
        "latency_s": copy.deepcopy(base["latency_s"]),
        "bandwidth_bytes_per_s": machine.figure(
            found["copy_bytes_per_s"], "bytes/s", "a copy of page-locked memory, the slower way"
        ),
    }


def _attention(
    points: list[Json], peaks: Mapping[str, float], figure: Callable[[float, str, str], Json]
) -> Json:
    rates = _best_rates(points, lambda p: p["flops"])
    return {
        d: figure(min(1.0, rate / peaks[d]), "1", "best measured over best matmul")
        for d, rate in rates.items()
    }


def _best_rates(points: list[Json], size: Callable[[Json], float]) -> dict[str, float]:
    """Return the best rate in size per second, by dtype."""
    dtypes = dict.fromkeys(p["dtype"] for p in points)
    return {d: max(size(p) / p["time_s"] for p in points if p["dtype"] == d) for d in dtypes}


def dumps(data: Json) -> str:
    """Return indented JSON with each measured point on one line."""
    lines: list[str] = []

    def mark(value: Any) -> Any:
        """Replace each measured point by a marker, and note its line."""
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


LIMIT_S = 300.0


def measure(
    device: str = "cpu",
    world_size: int | None = None,
    out: str | os.PathLike[str] | None = None,
    name: str = "local",
    links: str | os.PathLike[str] | None = None,
) -> HardwareProfile:
    """Measure this machine and write its profile, in less than a minute on two idle cores or one
    GPU.

    Args:
        device: ``"cpu"``, or ``"cuda"`` for the first GPU that this process sees. float32 is
            measured without TF32, which is torch's default.
        world_size: on ``cpu`` the number of processes, 2 or more, by default 4. With another number
            of ranks, the cores are shared differently than measured. On ``cuda`` 1, the default.
        out: the file to write; by default the one that ``hardware="local"`` loads.
        name: the name of the profile.
        links: on ``cuda`` the name or path of the profile whose links are used; by default that of
            this GPU, or of an H100 if there is none.

    Raises:
        HardwareError: if the device is unknown or missing, the number of processes or the links do
            not suit the device, or a process fails, in which case the message includes its error.
    """
    if device not in ("cpu", "cuda"):
        known = ", ".join(HardwareProfile.names())
        raise HardwareError(
            f"device {device!r} cannot be measured",
            remedy=(
                "pass cpu, or cuda with CUDA_VISIBLE_DEVICES set, or use an existing profile: "
                f"{known}"
            ),
        )
    path = Path(out) if out is not None else HardwareProfile.local_path()
    _make_folder(path)
    data = (
        _measure_cpu(4 if world_size is None else world_size, name, links)
        if device == "cpu"
        else _measure_gpu(world_size, name, links)
    )
    profile = HardwareProfile.from_json(data)
    write_file(path, dumps(data), "the profile", HardwareError)
    return profile


def _make_folder(path: Path) -> None:
    """Create the folder of a file, and check that the file can be written."""
    with convert_write_errors(path, "the profile", HardwareError):
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        if why := why_unwritable(path):
            raise OSError(errno.EINVAL, why)


def _measure_cpu(world_size: int, name: str, links: str | os.PathLike[str] | None) -> Json:
    if world_size < 2:
        raise HardwareError(
            f"cannot measure collectives with world_size={world_size}", remedy="use 2 or more"
        )
    if links is not None:
        raise HardwareError(
            "the links of CPUs are measured, not taken from a profile", remedy="omit links"
        )
    with tempfile.TemporaryDirectory() as folder:
        points = _run_workers("cpu", world_size, Path(folder))
    text = (
        f"{_cpu_name()}, {os.cpu_count()} cores, {world_size} processes of one thread at once,"
        f" gloo, torch {torch.__version__}"
    )
    command = f"autopar.profiler.measure.measure(world_size={world_size})"
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // world_size
    machine = Machine(
        "cpu",
        text,
        command,
        date.today().isoformat(),
        memory_bytes,
        "the machine's memory over the processes",
    )
    return profile_json(points, machine, name, measured_links(points, machine, world_size))


def _measure_gpu(world_size: int | None, name: str, links: str | os.PathLike[str] | None) -> Json:
    if world_size not in (None, 1):
        message = (
            f"collectives between GPUs are not measured, so world_size={world_size} is not "
            "supported"
        )
        raise HardwareError(
            message,
            remedy=(
                "omit world_size: one GPU is measured, and the links come from the profile named "
                "by `links`"
            ),
        )
    if not torch.cuda.is_available():
        raise HardwareError(
            "no CUDA device to measure",
            remedy="run this on a machine with a GPU, with a CUDA build of torch",
        )
    base_name = (
        HardwareProfile.of_gpu(torch.cuda.get_device_name(0))[0]
        if links is None
        else os.fspath(links)
    )
    base = HardwareProfile.read(base_name)
    HardwareProfile.from_json(base, where=base_name)
    with tempfile.TemporaryDirectory() as folder:
        points = _run_workers("cuda", 1, Path(folder))
    machine = _gpu(links)
    profile = gpu_json(points, machine, name, base, base_name)
    if "host" in base:
        memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        profile["host"] = measured_host(
            base["host"], points["host"][0], machine, memory_bytes, torch.cuda.device_count()
        )
    return profile


def gpu_json(points: Points, machine: Machine, name: str, base: Json, base_name: str) -> Json:
    """Return the JSON of a GPU's profile with the links and the host of another profile.

    Args:
        points: kind → measured points, in ascending size.
        machine: the machine that was measured.
        name: the name of the profile.
        base: the JSON of the other profile.
        base_name: the name of the other profile, for the description.
    """
    return profile_json(
        points,
        machine,
        name,
        links_from(base),
        f"; links, and what they cost compute, are those of {base_name}",
    )


def _gpu(links: str | os.PathLike[str] | None) -> Machine:
    """Describe the first GPU, and its host, which determines the time of small ops."""
    properties = torch.cuda.get_device_properties(0)
    host = f"{_cpu_name()}, {os.cpu_count()} cores"
    text = (
        f"{properties.name}, measured alone; {host}; torch {torch.__version__}, CUDA"
        f" {torch.version.cuda}"
    )
    argument = "" if links is None else f", links={os.fspath(links)!r}"
    command = f'autopar.profiler.measure.measure(device="cuda"{argument})'
    return Machine(
        "cuda",
        text,
        command,
        date.today().isoformat(),
        properties.total_memory,
        "torch.cuda.get_device_properties, total_memory",
    )


def _run_workers(device: str, world_size: int, folder: Path) -> Points:
    """Start the processes, show their progress, and return the points that rank 0 wrote. All
    processes are ended, also if one fails."""
    package = str(Path(__file__).parent.parent.parent)
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    workers = []
    try:
        for rank in range(world_size):
            with (folder / f"stderr{rank}").open("wb") as stderr:
                command = [
                    sys.executable,
                    "-m",
                    "autopar.profiler.worker",
                    str(rank),
                    str(world_size),
                    str(folder),
                    device,
                ]
                stdout = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
                workers.append(
                    subprocess.Popen(
                        command, env=environment, stdout=stdout, stderr=stderr, text=True
                    )
                )
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
    """Wait until all processes have ended without an error.

    Raises:
        HardwareError: as soon as one fails, with the end of its stderr, or after `LIMIT_S`.
    """
    deadline = time.monotonic() + LIMIT_S
    while any(
        (codes := [worker.poll() for worker in workers])[rank] is None
        for rank in range(len(workers))
    ):
        if any(codes):
            break
        if time.monotonic() > deadline:
            raise HardwareError(
                f"measuring took longer than {LIMIT_S:.0f} s",
                remedy="use fewer processes, or an idle machine",
            )
        time.sleep(0.05)
    for rank, code in enumerate(codes):
        if code:
            output = (
                (folder / f"stderr{rank}")
                .read_text(encoding="utf-8", errors="replace")
                .strip()[-2000:]
            )
            raise HardwareError(
                f"measuring process {rank} ended with code {code}:\n{output}",
                remedy="correct the reported error, and measure again",
            )


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
