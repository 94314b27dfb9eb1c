"""Pipelines over the zoo: each model is cut into stages, and every rank in lockstep is compared
with the plain model in float64.

If samples depend on each other (batch statistics, contrastive losses, tokens sorted by expert),
there is one microbatch, and the row names the op that prevents more. The planner chooses the cuts.
Data parallelism is forced on the other axis if the model supports it.

``--use outputs`` calls models without labels: all forwards run first, and backward starts from all
outputs. Models that need labels are left out. ``--use inference`` runs forward alone, in eval mode.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

import autopar
from autopar.api.planning import plan_model
from autopar.constraints import ddp, pipeline
from autopar.errors import ConstraintError
from autopar.planner import Planned
from benchmarks import zoo
from benchmarks.common import Row, parser, run_rows, specs_of
from benchmarks.models import ModelSpec
from benchmarks.parity import may_lack_labels, used

MESHES = ("stage=2,data=2",)
MICROBATCHES = 2
COLUMNS = (
    "microbatches",
    "stages",
    "cuts",
    "crossing",
    "num_collectives",
    "gap",
    "max_rel_err",
    "note",
)


def row(
    spec: dict[str, Any], mesh: str, hardware: str, batch: int, seq: int, use: str = "step"
) -> Row:
    """Run one model on one mesh. The first axis is that of the stages."""
    model, example = ModelSpec(**spec).build(batch=batch, seq=seq)
    example = used(model, example, use)
    made, note = _planned(model, example, autopar.Mesh.parse(mesh), hardware, use == "inference")
    pipe, program = made.plan.pipeline, made.program
    assert pipe is not None, "a pipeline was requested"
    report = autopar.verify(made.plan, model, example)
    return {
        "ok": report.ok,
        "error": None,
        "use": use,
        "microbatches": pipe.num_microbatches,
        "stages": len(pipe.stages),
        "cuts": list(pipe.modules),
        "crossing": [sum(t.crosses for t in stage.outputs) for stage in program.stages[:-1]],
        "num_collectives": report.num_collectives,
        "gap": made.plan.proof.gap,
        "tolerance": report.tolerance,
        "max_rel_err": report.max_error,
        "traced_rel_err": report.traced,
        "note": note,
    }


def _planned(
    model: nn.Module, batch: Any, mesh: autopar.Mesh, hardware: str, inference: bool
) -> tuple[Planned, str]:
    """Return the plan with the most microbatches and parallelism that the model supports, and a
    description of the rest."""
    stage, data = mesh.names
    refused: list[str] = []
    for num in (MICROBATCHES, 1):
        for others in ((ddp(data),), ()):
            force = (pipeline(stage, microbatches=num), *others)
            try:
                options: dict[str, Any] = {
                    "hardware": hardware,
                    "constraints": force,
                    "inference": inference,
                    "outputs": "full",
                }
                return plan_model(model, mesh, example_inputs=batch, **options)[1], "; ".join(
                    refused
                )
            except ConstraintError as error:
                refused.append(
                    error.what.split(": at ")[-1]
                    if "microbatches" in error.what
                    else f"ddp: {error.what}"
                )
                if "microbatches" in error.what:
                    break
    raise ConstraintError("; ".join(refused))


def main(arguments: list[str]) -> int:
    flags = parser("pipelines", __doc__ or "", meshes=MESHES)
    flags.add_argument("--hardware", default="h100-sxm")
    flags.add_argument("--use", choices=("step", "outputs", "inference"), default="step")
    options = flags.parse_args(arguments)
    specs = specs_of(options, ()) or [ModelSpec.of("zoo", name) for name in zoo.NAMES]
    if options.use == "outputs":
        specs = [
            spec
            for spec in specs
            if may_lack_labels(spec.build(batch=options.batch, seq=options.seq, meta=True)[0])
        ]
    shared = {
        "hardware": options.hardware,
        "batch": options.batch,
        "seq": options.seq,
        "use": options.use,
    }
    cases = [
        {"spec": spec.to_json(), "mesh": mesh, **shared}
        for spec in specs
        for mesh in options.mesh or MESHES
    ]
    return run_rows("pipelines", cases, COLUMNS, options.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
