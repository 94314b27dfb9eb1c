"""Shared parts of all benchmarks: flags, facts about the machine, and rows that run in separate
processes."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from autopar.core.hardware import HardwareProfile
from autopar.version import VERSION
from benchmarks.models import LISTS, TINY, ModelSpec
from benchmarks.zoo import libraries

ROOT = Path(__file__).parent.parent
Row = dict[str, Any]
LIMIT_S = 1800.0  # seconds per case
FRICTIONLESS = "frictionless"


def parser(
    name: str, description: str, *, batch: int = 8, seq: int = 16, meshes: Sequence[str] = ()
) -> argparse.ArgumentParser:
    """Return a parser with the flags of all benchmarks."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    made.add_argument("--json", metavar="FILE", help="write {env, rows} to this file")
    made.add_argument("--model", action="append", default=[], help="a known size; may be repeated")
    made.add_argument(
        "--hf",
        action="append",
        default=[],
        metavar="TYPE[/AutoClass]:JSON",
        help="a Hugging Face configuration",
    )
    made.add_argument(
        "--module",
        action="append",
        default=[],
        metavar="FILE.py:FUNCTION",
        help="FUNCTION() returns (model, batch)",
    )
    made.add_argument(
        "--zoo",
        nargs="*",
        metavar="NAME",
        help="models of benchmarks.zoo; by default all",
    )
    made.add_argument(
        "--unseen",
        nargs="*",
        metavar="NAME",
        help="architectures outside the zoo; by default the whole list",
    )
    made.add_argument(
        "--libraries",
        nargs="*",
        metavar="NAME",
        help="models of torchvision, timm and diffusers; by default all",
    )
    made.add_argument(
        "--mesh",
        action="append",
        default=[],
        help=f"node=4,gpu=8, 4x8 or a count; by default {' '.join(meshes)}",
    )
    made.add_argument("--batch", type=int, default=batch, help="global batch in samples")
    made.add_argument("--seq", type=int, default=seq, help="sequence length")
    return made


def specs_of(options: argparse.Namespace, default: Sequence[str] = tuple(TINY)) -> list[ModelSpec]:
    """Return the models that the flags name."""
    found = [ModelSpec.known(name) for name in options.model] + [
        ModelSpec.parse_hf(text) for text in options.hf
    ]
    found += [ModelSpec(text, module=text) for text in options.module]
    for listed, models in LISTS.items():
        named = getattr(options, listed)
        found += [
            ModelSpec.of(listed, name) for name in (() if named is None else named or models.NAMES)
        ]
    return found or [ModelSpec.known(name) for name in default]


def load_profile(name: str) -> HardwareProfile:
    """Load a profile by name or path. ``NAME-frictionless`` is the same profile without launch
    overheads, latencies and measured points. With it, even a tiny model is worth sharding."""
    if not name.endswith(f"-{FRICTIONLESS}"):
        return HardwareProfile.load(name)
    base = HardwareProfile.load(name.removesuffix(f"-{FRICTIONLESS}"))
    links = {
        k: replace(v, latency_s=0.0, bandwidth_bytes_per_s=v.bandwidth_bytes_per_s * 100, curves={})
        for k, v in base.links.items()
    }
    mark = f"{base.hash}-{FRICTIONLESS}"
    return replace(
        base,
        name=name,
        launch_overhead_s=0.0,
        matmul_half_flops=0.0,
        curves={},
        links=links,
        hash=mark,
    )


def with_inter_gbits(profile: HardwareProfile, gbits: float) -> HardwareProfile:
    """Return the profile with another bandwidth between nodes, without measured points of this
    link.

    Args:
        profile: profile of the device.
        gbits: bandwidth in Gb/s per device and direction.
    """
    inter = replace(profile.links["inter"], bandwidth_bytes_per_s=gbits * 1e9 / 8, curves={})
    links = {**profile.links, "inter": inter}
    return replace(profile, links=links, hash=f"{profile.hash}-{gbits:g}")


def environment() -> dict[str, Any]:
    """Return the date, the machine and the versions of a measurement."""
    return {
        "date": date.today().isoformat(),
        "cpu": _cpu_name(),
        "num_cores": os.cpu_count(),
        "platform": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": _version("transformers"),
        **{name: found for name in libraries.LIBRARIES if (found := _version(name))},
        "autopar": VERSION,
        "commit": _commit(),
    }


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8").splitlines() if info.is_file() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    found = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    return found.stdout.strip()


def run_rows(
    name: str,
    cases: Sequence[Mapping[str, Any]],
    columns: Sequence[str],
    json_path: str | None,
    limit_s: float = LIMIT_S,
    ready: Sequence[Row] = (),
) -> int:
    """Run ``benchmarks.NAME.row(**case)`` for each case in a separate process. Print a table and
    write JSON.

    A case returns a row, or a list of rows. Rows in `ready` need no process; they are added to the
    JSON only.

    Returns:
        The exit status: 1 if a row is not ok. A case that raises gives a row that is not ok and
            contains the error.
    """
    console, rows = console_of(), []
    texts = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total}"),
        TimeElapsedColumn(),
    )
    with Progress(*texts, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task(name, total=len(cases))
        for number, case in enumerate(cases, 1):
            progress.update(task, description=f"{name}: {describe(case)}")
            found = run_case(name, case, limit_s)
            rows += found
            progress.advance(task)
            if not console.is_terminal:
                said = "ok" if all(row["ok"] for row in found) else "NOT OK"
                console.print(f"{number}/{len(cases)} {describe(case)}: {said}", soft_wrap=True)
            if json_path:
                _write(json_path, [*rows, *ready])
    console.print(_table(name, rows, columns))
    for row in rows:
        if row["error"]:
            console.print(f"{row['model']} on {row['mesh']}: {row['error']}", markup=False)
    return 0 if all(row["ok"] for row in rows) else 1


def console_of() -> Console:
    """Return a console that is wide enough for tables if the output is not a terminal."""
    return Console() if Console().is_terminal else Console(width=160)


def describe(case: Mapping[str, Any]) -> str:
    """Return a short description of a case."""
    plain = [
        str(v)
        for k, v in case.items()
        if k not in ("spec", "mesh", "hardware") and isinstance(v, str)
    ]
    return " ".join([case["spec"]["name"], case["mesh"], *plain])


def run_case(name: str, case: Mapping[str, Any], limit_s: float) -> list[Row]:
    """Return the rows of one case, from a separate process."""
    base: Row = {"model": case["spec"]["name"], "mesh": case["mesh"], "ok": False, "error": None}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "benchmarks.common", name, json.dumps(case), str(out)]
        surroundings = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        start = time.perf_counter()
        try:
            done = subprocess.run(
                command,
                cwd=ROOT,
                env=surroundings,
                capture_output=True,
                text=True,
                timeout=limit_s,
                check=False,
            )
            found = (
                json.loads(out.read_text(encoding="utf-8"))
                if out.is_file()
                else [{"error": done.stderr.strip()[-2000:]}]
            )
        except subprocess.TimeoutExpired:
            found = [{"error": f"took longer than {limit_s:.0f} s"}]
    case_s = round((time.perf_counter() - start) / len(found), 2)
    return [{**base, **row, "row_s": case_s} for row in found]


def _write(path: str, rows: Sequence[Row]) -> None:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps({"env": environment(), "rows": rows}, indent=1)
    Path(path).write_text(_portable(text) + "\n", encoding="utf-8")


def _portable(text: str) -> str:
    """Replace paths of files by paths relative to Python's import path, so that the text does not
    depend on the machine."""
    roots = {os.path.join(os.path.abspath(root), "") for root in (*sys.path, str(ROOT))} - {os.sep}
    for root in sorted(roots, key=len, reverse=True):  # import paths may be nested
        text = text.replace(root, "")
    return text


def _table(name: str, rows: Sequence[Row], columns: Sequence[str]) -> Table:
    table = Table(title=f"benchmarks.{name}")
    for column in ("model", "mesh", *columns, "ok"):
        table.add_column(
            column,
            justify="left" if column in ("model", "mesh", "plan") else "right",
            overflow="fold",
        )
    for row in rows:
        table.add_row(
            *(show(row.get(column)) for column in ("model", "mesh", *columns)),
            "yes" if row["ok"] else "[red]NO[/red]",
        )
    return table


def show(value: Any) -> str:
    """Return the text of a cell."""
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: ""}[value]
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def main(name: str, case: str, out: str) -> None:
    """Run one case. If it raises, its row contains the error."""
    torch.set_num_threads(1)
    try:
        found = importlib.import_module(f"benchmarks.{name}").row(**json.loads(case))
    except Exception as error:  # every error is a result of the case
        found = failed(error)
    Path(out).write_text(
        json.dumps(found if isinstance(found, list) else [found]), encoding="utf-8"
    )


def failed(error: Exception) -> Row:
    """Return the row for an error."""
    return {"ok": False, "error": f"{type(error).__name__}: {error}"}


if __name__ == "__main__":
    main(*sys.argv[1:])
