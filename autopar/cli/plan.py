"""``autopar plan``: its options; `planning` does it."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from autopar.cli.options import Batch, Constraints, DevicesPerNode, Dtype, Hf, ModelName, Module, Seq, check_named
from autopar.devices import hardware_of, read_mesh
from autopar.errors import AutoparError
from autopar.schedules import AUTO, INTERLEAVED, SCHEDULES
from autopar.terminal import check_writable, parse_size

if TYPE_CHECKING:
    from autopar.run.executor import Outputs

Solver = Annotated[str, typer.Option(metavar="NAME", help="highs, or a solver that PuLP finds here, such as cbc, scip or gurobi; slower.")]
LpFile = Annotated[Path | None, typer.Option("--write-lp", metavar="FILE", help="Where the integer program is written, in LP format.")]


def plan_command(
    mesh: Annotated[
        str, typer.Option(help="Axes from the slowest to the fastest, node=4,gpu=8; or, to be shaped, nodes × devices, 4x8, or a count.")
    ],
    devices_per_node: DevicesPerNode = None,
    hf: Hf = None,
    model: ModelName = None,
    module: Module = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    hardware: Annotated[
        str, typer.Option(help="Name or path of a hardware profile; of unequal devices, along an axis: stage=h100-sxm,a100-sxm-80gb.")
    ] = "h100-sxm",
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget per device, as 72GiB; by default the device's less 10 %.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state rests: adamw, adam, sgd, momentum or none.")] = "adamw",
    gap: Annotated[float, typer.Option(help="Relative distance to the proven bound at which the search stops.")] = 0.01,
    time_limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="Of planning; then the best plan so far is taken, with its gap. By default none."),
    ] = None,
    strict: Annotated[bool, typer.Option(help="Refuse ops that run replicated for want of a rule.")] = False,
    constraint: Constraints = None,
    pipeline: Annotated[
        str | None,
        typer.Option(metavar="AXIS", help="Cut the model into stages along this axis; auto: any, or none, the default on GPUs of a loss."),
    ] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Into how many the batch is cut.")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"Of the stages: {', '.join(SCHEDULES)} or {AUTO}.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help=f"Stages per device of {INTERLEAVED}, 2 by default.")] = None,
    outputs: Annotated[
        str, typer.Option(help="loss, if a step needs no other: a language model's logits need never be there at once. Or full, dtensor.")
    ] = "auto",
    inference: Annotated[bool, typer.Option("--inference", help="Forward alone, no labels: no gradients, no optimizer state.")] = False,
    precision: Annotated[
        str | None, typer.Option(help="bf16 or fp16: what wider parameters, which rest as they are, are gathered and computed with in.")
    ] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Let what is worth it lie in the hosts' memory.")] = False,
    solver: Solver = "highs",
    lp_file: LpFile = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Where the plan is written.")] = None,
) -> None:
    """Plan a model for a mesh: no GPU, no process group, weights on meta."""
    check_writable(out_file)
    check_writable(lp_file)
    check_named(hf, model, module, dtype)
    _check_stages(pipeline, schedule, chunks)
    budget = parse_size(memory)
    axes = read_mesh(mesh, devices_per_node)
    devices = hardware_of(hardware, axes)
    from autopar.cli import planning  # with torch, for which nothing above waits

    forced = planning.forced(constraint or (), pipeline, microbatches, schedule, chunks, offload=offload)
    options = planning.PlanOptions(
        budget, optimizer, forced, strict, gap, math.inf if time_limit is None else time_limit, solver=solver,
        num_microbatches=microbatches or "auto", outputs=cast("Outputs", outputs), precision=precision, inference=inference,
    )  # fmt: skip
    planning.plan_named((hf, model, module, batch, seq, dtype), axes, devices, options, out_file, lp_file)


def _check_stages(axis: str | None, schedule: str | None, chunks: int | None) -> None:
    """That stages are asked for where something is said of them. Raises AutoparError."""
    for option, value in (("--schedule", schedule), ("--chunks", chunks)):
        if axis is None and value is not None:
            what = f"{option} {value} is of stages, and none are asked for"
            raise AutoparError(what, remedy=f"pass --pipeline AXIS or --pipeline {AUTO} too, or leave {option} out")
