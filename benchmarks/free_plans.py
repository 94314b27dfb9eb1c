"""Comparison of free plans with named plans: simulated steps on one mesh.

Each case plans a model freely, as `autopar.plan` does by default, and with `ddp`, `fsdp`, tensor,
context and pipeline parallelism: one of them on each axis of the mesh, data parallelism with ZeRO
stages 0 and 3. `ratio` is the step of the free plan divided by that of the fastest named one. It is
at most 1 if the free plan is not slower. Named plans that do not fit, or that the model does not
support, are counted. Times are predictions.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch

import autopar
from autopar.constraints import Constraint, context_parallel, ddp, fsdp, pipeline, tensor_parallel
from autopar.core.mesh import Mesh
from autopar.errors import AutoparError
from autopar.plans import Plan
from benchmarks.common import Row, load_profile, run_rows
from benchmarks.models import ModelSpec

COLUMNS = ("batch", "seq", "hardware", "free_s", "named_s", "ratio", "named", "tried", "refused")
# (model, mesh, batch, length, hardware)
CASES = (
    ("gpt2", "gpu=8", 64, 1024, "h100-sxm"),
    ("gpt2", "gpu=4", 32, 1024, "a100-sxm-80gb"),
    ("gpt2", "node=2,gpu=4", 64, 1024, "a100-sxm-80gb"),
    ("gpt2", "node=4,gpu=2", 512, 512, "a100-sxm-80gb"),
    ("gpt2-xl", "gpu=4", 32, 1024, "a100-sxm-80gb"),
    ("gpt2-xl", "node=2,gpu=8", 128, 1024, "h100-sxm"),
    ("bert-large", "gpu=8", 256, 512, "h100-sxm"),
    ("llama3-8b", "gpu=8", 16, 8192, "h100-sxm"),
    ("llama3-8b", "node=2,gpu=8", 32, 4096, "h100-sxm"),
    ("llama3-8b", "gpu=8", 1, 65536, "h100-sxm"),
    ("llama2-13b", "node=2,gpu=8", 32, 4096, "a100-sxm-80gb"),
    ("mixtral-8x7b", "node=4,gpu=8", 128, 4096, "h100-sxm"),
)
LIMIT_S = 3600.0
_ROLES = ("ddp", "fsdp", "tensor", "sequence", "context", "pipeline")


def named_plans(mesh: Mesh) -> Iterator[tuple[str, list[Constraint]]]:
    """Yield the named plans on a mesh: their roles by axis, and the constraints."""
    axes = [name for name, size in zip(mesh.names, mesh.shape, strict=True) if size > 1]
    for roles in itertools.product(_ROLES, repeat=len(axes)):
        if all(roles.count(role) <= 1 for role in _ROLES[2:]):
            pairs = list(zip(axes, roles, strict=True))
            name = " + ".join(f"{role}({axis})" for axis, role in pairs)
            yield name, [_constraint(axis, role) for axis, role in pairs]


def _constraint(axis: str, role: str) -> Constraint:
    if role in ("tensor", "sequence"):
        return tensor_parallel("1d", axes=axis, sequence=role == "sequence")
    if role == "pipeline":
        return pipeline(axis)
    return {"ddp": ddp, "fsdp": fsdp, "context": context_parallel}[role](axis)


def row(spec: dict[str, Any], mesh: str, batch: int, seq: int, hardware: str) -> Row:
    """Return the free plan of a case, and the fastest named one."""
    built, data = ModelSpec(**spec).build(batch=batch, seq=seq, dtype=torch.float32, meta=True)
    grid, profile = Mesh.parse(mesh), load_profile(hardware)

    def plan(**options: Any) -> tuple[Plan, float]:
        start = time.process_time()
        found = autopar.plan(
            built,
            grid,
            example_inputs=data,
            hardware=profile,
            precision="bf16",
            outputs="loss",
            **options,
        )
        return found, time.process_time() - start

    free, cpu_s = plan()
    found: dict[str, float] = {}
    refused = 0
    for name, constraints in named_plans(grid):
        try:
            found[name] = plan(constraints=constraints)[0].prediction.simulated_s
        except AutoparError:  # it does not fit, or the model does not support it
            refused += 1
    best = min(found, key=found.__getitem__)
    free_s = free.prediction.simulated_s
    return {
        "ok": free_s <= found[best] * (1 + 1e-6),
        "error": None,
        "batch": batch,
        "seq": seq,
        "hardware": hardware,
        "free_s": free_s,
        "free_stages": len(free.pipeline.stages) if free.pipeline else 1,
        "free_gap": free.proof.gap,
        "free_cpu_s": cpu_s,
        "named": best,
        "named_s": found[best],
        "ratio": free_s / found[best],
        "tried": len(found),
        "refused": refused,
        "steps_s": found,
    }


def main(arguments: list[str]) -> int:
    """Compare all cases, or those whose numbers are given."""
    flags = argparse.ArgumentParser(
        prog="python -m benchmarks.free_plans",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags.add_argument("--json", metavar="FILE", help="write {env, rows} to this file")
    flags.add_argument("--cases", type=int, nargs="*", help="numbers of the cases, from 0")
    options = flags.parse_args(arguments)
    chosen = CASES if not options.cases else [CASES[number] for number in options.cases]
    names = ("mesh", "batch", "seq", "hardware")
    cases = [
        {"spec": ModelSpec.known(model).to_json(), **dict(zip(names, case, strict=True))}
        for model, *case in chosen
    ]
    return run_rows("free_plans", cases, COLUMNS, options.json, LIMIT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
