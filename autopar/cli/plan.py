"""``autopar plan``."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, cast

import typer

from autopar import constraints
from autopar.api import as_call
from autopar.api.arguments import read_mesh
from autopar.api.hardware import as_hardware
from autopar.api.planning import plan_call
from autopar.cli.models import Batch, Dtype, Hf, ModelName, Module, Seq, built, check_named
from autopar.constraints import Constraint
from autopar.constraints.pipelines import SCHEDULES
from autopar.constraints.written import parse_constraint
from autopar.errors import AutoparError, PlanError
from autopar.explanation import explain
from autopar.planning import PlanOptions
from autopar.plans import Plan
from autopar.run.executor import Outputs
from autopar.terminal import PHASES, check_writable, parse_size, progress, say
from autopar.units import seconds

_TOLD = 0.01  # share of all seconds, from which on those of plans that were not taken are told


def plan_command(
    mesh: Annotated[
        str, typer.Option(help="Axes from the slowest to the fastest, node=4,gpu=8; or, to be shaped, nodes × devices, 4x8, or a count.")
    ],
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
    strict: Annotated[bool, typer.Option(help="Refuse ops that run replicated for want of a rule.")] = False,
    constraint: Annotated[
        list[str] | None,
        typer.Option(metavar="CALL", help="What is forced, as in Python: 'megatron(tp=8, zero=3)', fsdp; several are given one by one."),
    ] = None,
    pipeline: Annotated[
        str | None, typer.Option(metavar="AXIS", help="Cut the model into stages along this axis of the mesh; auto: any, or none.")
    ] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Into how many the batch is cut.")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"Of the stages: {', '.join(SCHEDULES)} or {constraints.AUTO}.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help=f"Stages per device of {constraints.INTERLEAVED}, 2 by default.")] = None,
    outputs: Annotated[
        str, typer.Option(help="loss, if a step needs no other: a language model's logits need never be there at once. Or full, dtensor.")
    ] = "auto",
    inference: Annotated[
        bool, typer.Option("--inference", help="Forward alone, without labels: no gradients, no optimizer state.")
    ] = False,
    precision: Annotated[
        str | None, typer.Option(help="bf16: what wider parameters, which rest as they are, are gathered and computed with in.")
    ] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Let what is worth it lie in the hosts' memory.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Where the plan is written.")] = None,
) -> None:
    """Plan a model for a mesh: no GPU, no process group, weights on meta."""
    check_writable(out_file)
    check_named(hf, model, module, dtype)
    axes = read_mesh(mesh)
    devices = as_hardware(hardware, axes)
    hosts: tuple[Constraint, ...] = (constraints.offload(),) if offload else ()
    asked = (*map(parse_constraint, constraint or ()), *_stages(pipeline, microbatches, schedule, chunks), *hosts)
    options = PlanOptions(
        parse_size(memory), optimizer, asked, strict, gap, num_microbatches=microbatches or "auto", outputs=cast(Outputs, outputs),
        precision=precision, inference=inference,
    )
    clock = _Clock()
    with progress("building the model") as tell:
        network, example = built(hf, model, module, batch, seq, dtype, "meta", inference=inference)
        tell("capturing")
        args, kwargs = as_call(example)
        _, planned = plan_call(network, axes, args, kwargs, devices, options, progress=lambda p: tell(clock.at(p)))
    _tell(planned.plan, clock.phases(planned.seconds), out_file)


def _tell(plan: Plan, phases: Mapping[str, float], out_file: Path | None) -> None:
    """What the plan is, and what it took to make it; it is written where that is asked for."""
    for line in explain(plan).summary():
        say(line)
    say(f"planned in {seconds(sum(phases.values()))}: {', '.join(f'{phase} {seconds(value)}' for phase, value in phases.items())}")
    if out_file is not None:
        _save(plan, out_file)
        say(f"written to {out_file}: `autopar explain {out_file}` tells more")


class _Clock:
    """What planning took, by phase."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._captured = math.inf

    def at(self, phase: str) -> str:
        """A phase that begins, in words."""
        self._captured = min(self._captured, time.perf_counter() - self._start)
        return PHASES.get(phase, phase)

    def phases(self, of_plan: Mapping[str, float]) -> dict[str, float]:
        """Seconds of all; where plans were tried that are not the one, what they took."""
        total_s = time.perf_counter() - self._start
        captured_s = min(self._captured, total_s)
        others_s = max(total_s - captured_s - sum(of_plan.values()), 0.0)
        return {"capture": captured_s, **of_plan, **({"plans not taken": others_s} if others_s > _TOLD * total_s else {})}


def _stages(axis: str | None, microbatches: int | None, schedule: str | None, chunks: int | None) -> tuple[constraints.Pipelined, ...]:
    """The pipeline that is asked for, if any."""
    if axis is not None:
        named = None if axis == constraints.AUTO else axis
        return (constraints.pipeline(named, microbatches=microbatches, schedule=schedule, chunks=chunks),)
    for option, value in (("--schedule", schedule), ("--chunks", chunks)):
        if value is not None:
            what = f"{option} {value} is of stages, and none are asked for"
            raise AutoparError(what, remedy=f"pass --pipeline AXIS or --pipeline {constraints.AUTO} too, or leave {option} out")
    return ()


def _save(plan: Plan, path: Path) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise PlanError(f"cannot write the plan: {error.strerror}", where=str(path), remedy="check the path") from error
