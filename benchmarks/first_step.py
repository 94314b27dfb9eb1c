"""CPU time until the first training step has finished, and of the first call of each further kind:
an evaluation, and a training step with another batch size.

Each row is one rank of one model, in a new process without any imports. Times are the CPU time of
the process (`time.process_time`), so that other load on the machine matters little. Modules that
are imported during a phase count as imports, not as a part of the phase.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist

import autopar
from autopar import constraints
from benchmarks.common import ROOT, Row, parser, run_rows, specs_of
from benchmarks.models import ModelSpec

GPT = (
    'gpt2:{"n_layer": 3, "n_embd": 192, "n_head": 6, "vocab_size": 512, "n_positions": 64,'
    ' "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.1, "embd_pdrop": 0.1,'
    ' "resid_pdrop": 0.1}'
)
MESHES = ("2",)
WAYS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "whole batch": {},
        "microbatches": {"num_microbatches": 4},
        "stages": {"constraints": [constraints.pipeline()]},
    }
)
PHASES = ("compile", "first_step", "second_step", "first_eval", "other_batch")
COLUMNS = (
    "way",
    "rank",
    "import_s",
    *(f"{phase}_s" for phase in PHASES),
    "to_first_step_s",
    "import_later_s",
    "eval_rel_err",
)
TOLERANCE = 1e-4
LIMIT_S = 600.0
_RANK = """
import time, torch, transformers, autopar
autopar.compile
imported_s = time.process_time()
from benchmarks.first_step import rank
rank(imported_s)
"""


class Phases:
    """CPU seconds by phase of this process, and the seconds of imports within them."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.import_s = 0.0
        self._depth = 0
        bootstrap: Any = importlib._bootstrap  # type: ignore[attr-defined]
        self._load, bootstrap._find_and_load = bootstrap._find_and_load, self._timed_load

    def _timed_load(self, name: str, import_: Any) -> Any:
        self._depth += 1
        begin = time.process_time()
        try:
            return self._load(name, import_)
        finally:
            self._depth -= 1
            if not self._depth:
                self.import_s += time.process_time() - begin

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Measure a phase."""
        begin, imported_s = time.process_time(), self.import_s
        yield
        spent_s = time.process_time() - begin
        self.seconds[f"{name}_s"] = round(spent_s - (self.import_s - imported_s), 3)


def rank(imported_s: float) -> None:
    """Run one process of a case, and write its row.

    Args:
        imported_s: CPU time (seconds) that the process took to start and to import torch,
            transformers and autopar.
    """
    case = json.loads(os.environ["FIRST_STEP_CASE"])
    number, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(case["store"], num_ranks), rank=number, world_size=num_ranks
    )
    row = {"way": case["way"], "rank": number, "import_s": round(imported_s, 3), **_measured(case)}
    dist.barrier()
    dist.destroy_process_group()
    Path(case["out"].format(number)).write_text(json.dumps(row), encoding="utf-8")


def _measured(case: dict[str, Any]) -> Row:
    """Compile a model and make the calls. Return the row without earlier imports."""
    spec = ModelSpec(**case["spec"])
    model, batch = spec.build(batch=case["batch"], seq=case["seq"])
    _, larger = spec.build(batch=2 * case["batch"], seq=case["seq"])
    phase, first = Phases(), batch if case["at_once"] else None
    with phase("compile"):
        module: Any = autopar.compile(
            model,
            autopar.Mesh.parse(case["mesh"]),
            hardware=case["hardware"],
            example_inputs=first,
            **WAYS[case["way"]],
        )

    def train(on: dict[str, Any], optimizer: Any) -> Any:
        """Take a training step."""
        loss = module(**on).loss
        loss.backward()
        made = optimizer or torch.optim.AdamW(module.parameters())
        made.step()
        made.zero_grad()
        return made

    with phase("first_step"):
        optimizer = train(batch, None)
    with phase("second_step"):
        train(batch, optimizer)
    module.eval()
    with phase("first_eval"), torch.no_grad():
        loss = module(**batch).loss
    state = module.full_state_dict()
    module.train()
    with phase("other_batch"):
        train(larger, optimizer)
    model.load_state_dict(state)
    with torch.no_grad():
        plain = model.eval()(**batch).loss
    error = abs(loss.item() - plain.item()) / abs(plain.item())
    return {
        **phase.seconds,
        "to_first_step_s": round(phase.seconds["compile_s"] + phase.seconds["first_step_s"], 3),
        "import_later_s": round(phase.import_s, 3),
        "eval_rel_err": error,
        "ok": error <= TOLERANCE,
        "error": None,
    }


def row(
    spec: dict[str, Any], mesh: str, way: str, hardware: str, batch: int, seq: int, at_once: bool
) -> list[Row]:
    """Return the rows of all ranks of one model."""
    num_ranks = autopar.Mesh.parse(mesh).num_devices
    with tempfile.TemporaryDirectory() as folder:
        case: dict[str, Any] = {
            "spec": spec,
            "mesh": mesh,
            "way": way,
            "hardware": hardware,
            "batch": batch,
            "seq": seq,
            "at_once": at_once,
            "store": f"{folder}/store",
            "out": f"{folder}/{{}}.json",
        }
        shared = {**os.environ, "FIRST_STEP_CASE": json.dumps(case), "WORLD_SIZE": str(num_ranks)}
        command = [sys.executable, "-c", _RANK]
        processes = [
            subprocess.Popen(
                command,
                cwd=ROOT,
                env={**shared, "RANK": str(number)},
                stderr=subprocess.PIPE,
                text=True,
            )
            for number in range(num_ranks)
        ]
        try:
            errors = [process.communicate(timeout=LIMIT_S)[1] for process in processes]
        finally:
            for process in processes:
                process.kill()
        failed = [e for p, e in zip(processes, errors, strict=True) if p.returncode]
        if failed:
            raise RuntimeError(failed[0].strip()[-2000:])
        return [
            json.loads(Path(case["out"].format(number)).read_text(encoding="utf-8"))
            for number in range(num_ranks)
        ]


def main(arguments: list[str]) -> int:
    flags = parser("first_step", __doc__ or "", seq=32, meshes=MESHES)
    flags.add_argument("--hardware", default="cpu-gloo")
    flags.add_argument(
        "--at-once", action="store_true", help="pass example_inputs, so that `compile` plans"
    )
    flags.add_argument("--way", action="append", default=[], choices=list(WAYS))
    options = flags.parse_args(arguments)
    shared = {
        "hardware": options.hardware,
        "batch": options.batch,
        "seq": options.seq,
        "at_once": options.at_once,
    }
    cases = [
        {"spec": spec.to_json(), "mesh": mesh, "way": way, **shared}
        for spec in specs_of(options, ()) or [ModelSpec("gpt2-3x192", GPT)]
        for mesh in options.mesh or MESHES
        for way in options.way or WAYS
    ]
    return run_rows("first_step", cases, COLUMNS, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
