"""The command line: ``autopar plan|explain|diff|check|verify|what-if|profile|report|run``.

`plan`, `explain`, `diff`, `check` and `report` need no process group and no GPU. What autopar refuses is printed without a traceback,
and the command exits with 1.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, cast

import torch
import typer

from autopar import constraints, hf
from autopar.api import as_call, check, flips, verify, what_if
from autopar.api.arguments import read_mesh
from autopar.api.planning import plan_call
from autopar.constraints.pipelines import SCHEDULES
from autopar.errors import AutoparError, PlanError
from autopar.explanation import diff, explain
from autopar.hardware import HardwareProfile
from autopar.mesh import Mesh
from autopar.planning import PlanOptions
from autopar.plans import NO_FLIP, Flip, Plan
from autopar.run.executor import Outputs
from autopar.run.launching import launch
from autopar.terminal import PHASES, complain, parse_size, progress, say, show
from autopar.units import seconds

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan how a PyTorch model runs on many devices, and run it so.",
)
_DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

PlanFile = Annotated[Path, typer.Argument(help="A plan, as `autopar plan --out` writes it.")]
Hf = Annotated[
    str | None, typer.Option("--hf", metavar="TYPE[/AutoClass]:JSON", help="A Hugging Face configuration, built and not downloaded.")
]
ModelName = Annotated[str | None, typer.Option("--model", metavar="NAME", help=f"A known size: {', '.join(hf.KNOWN)}.")]
Module = Annotated[str | None, typer.Option("--module", metavar="FILE.py:FUNCTION", help="A function that returns (model, batch).")]
Function = Annotated[
    str | None, typer.Option("--function", metavar="FILE.py:FUNCTION", help="A function that returns (model, batch), for --flips.")
]
Flips = Annotated[int, typer.Option(min=0, help="Of so many close choices, in each stage, say at which change of the hardware they turn.")]
_BATCH, _DTYPE = 8, "bfloat16"
Batch = Annotated[int | None, typer.Option(min=1, help=f"Global batch in samples; {_BATCH} unless given. Of --module the function says.")]
Seq = Annotated[int | None, typer.Option(min=1, help="Tokens of a sample.")]
Dtype = Annotated[str | None, typer.Option(help=f"One of {', '.join(_DTYPES)}; {_DTYPE} unless given. Of --module the function says.")]


@app.command("plan")
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
    hardware: Annotated[str, typer.Option(help="Name or path of a hardware profile.")] = "h100-sxm",
    memory: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Budget per device, as 72GiB; by default the device's less 10 %.")
    ] = None,
    optimizer: Annotated[str, typer.Option(help="Whose state rests: adamw, adam, sgd, momentum or none.")] = "adamw",
    gap: Annotated[float, typer.Option(help="Relative distance to the proven bound at which the search stops.")] = 0.01,
    strict: Annotated[bool, typer.Option(help="Refuse ops that run replicated for want of a rule.")] = False,
    pipeline: Annotated[
        str | None, typer.Option(metavar="AXIS", help="Cut the model into stages along this axis of the mesh; auto: any, or none.")
    ] = None,
    microbatches: Annotated[int | None, typer.Option(min=1, help="Into how many the batch is cut.")] = None,
    schedule: Annotated[str | None, typer.Option(help=f"Of the stages: {', '.join(SCHEDULES)} or {constraints.AUTO}.")] = None,
    chunks: Annotated[int | None, typer.Option(min=1, help=f"Stages per device of {constraints.INTERLEAVED}, 2 by default.")] = None,
    outputs: Annotated[
        str, typer.Option(help="loss, if a step needs no other output: a language model's logits need never be there at once. Or dtensor.")
    ] = "dtensor",
    precision: Annotated[
        str | None, typer.Option(help="bf16: what wider parameters, which rest as they are, are gathered and computed with in.")
    ] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Let what is worth it lie in the hosts' memory.")] = False,
    out_file: Annotated[Path | None, typer.Option("--out", help="Where the plan is written.")] = None,
) -> None:
    """Plan a model for a mesh: no GPU, no process group, weights on meta."""
    axes, profile = read_mesh(mesh), HardwareProfile.load(hardware)
    asked = (*_stages(pipeline, microbatches, schedule, chunks), *((constraints.offload(),) if offload else ()))
    options = PlanOptions(
        parse_size(memory), optimizer, asked, strict, gap, num_microbatches=microbatches or "auto", outputs=cast(Outputs, outputs),
        precision=precision,
    )
    start = time.perf_counter()
    with progress("building the model") as tell:
        network, example = _build(hf, model, module, batch, seq, dtype, "meta")
        tell("capturing")
        args, kwargs = as_call(example)
        _, planned = plan_call(network, axes, args, kwargs, profile, options, progress=lambda p: tell(PHASES.get(p, p)))
    phases = {"capture": time.perf_counter() - start - sum(planned.seconds.values()), **planned.seconds}
    for line in explain(planned.plan).summary():
        say(line)
    say(f"planned in {seconds(sum(phases.values()))}: {', '.join(f'{phase} {seconds(value)}' for phase, value in phases.items())}")
    if out_file is not None:
        _save(planned.plan, out_file)
        say(f"written to {out_file}: `autopar explain {out_file}` tells more")


@app.command("explain")
def explain_command(
    plan: PlanFile,
    module: Annotated[str | None, typer.Option(metavar="PATTERN", help="Only these modules, with every decision.")] = None,
    flips: Flips = 0,
    hf: Hf = None,
    model: ModelName = None,
    function: Function = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
) -> None:
    """What a plan does and costs, module by module, and why not otherwise; with --flips and the model also what would turn choices."""
    loaded = Plan.load(plan)
    turning = _turning(loaded, flips, hf, model, function, batch, seq, dtype)
    found = explain(loaded, module=module, flips=turning)
    show(found)
    _say_if_none(flips, turning)
    if turning and not found.flips:
        say(f"of the {len(turning)} choices that would turn none is in {module!r}: leave --module out to see them")


@app.command("diff")
def diff_command(first: PlanFile, second: PlanFile) -> None:
    """What changed from one plan to another, module by module."""
    show(diff(Plan.load(first), Plan.load(second)))


@app.command("check")
def check_command(
    plan: PlanFile,
    hf: Hf = None,
    model: ModelName = None,
    module: Module = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    hardware: Annotated[str | None, typer.Option(help="Name or path of a profile; by default the one that the plan names.")] = None,
) -> None:
    """Certify a plan without a solver: legality, every collective, memory, time, and the bound by arithmetic alone."""
    loaded = Plan.load(plan)
    with progress("building the model") as tell:
        network, example = _build(hf, model, module, batch, seq, dtype, "meta")
        tell("deriving every claim anew")
        found = check(loaded, network, example, hardware=hardware)
    say(str(found))
    if not found.ok:
        raise typer.Exit(1)


@app.command("verify")
def verify_command(
    plan: PlanFile,
    hf: Hf = None,
    model: ModelName = None,
    module: Module = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
) -> None:
    """Run all ranks of a plan in this process, in float64, and compare loss, outputs and every gradient with the plain model."""
    loaded = Plan.load(plan)
    with progress("building the model") as tell:
        network, example = _build(hf, model, module, batch, seq, dtype, "cpu")
        tell(f"running {loaded.mesh.num_devices} ranks")
        found = verify(loaded, network, example)
    say(str(found))
    if not found.ok:
        raise typer.Exit(1)


@app.command("what-if")
def what_if_command(
    plan: PlanFile,
    hardware: Annotated[str | None, typer.Option(help="Name or path of the other hardware profile; by default the plan's.")] = None,
    mesh: Annotated[str | None, typer.Option(help="Another mesh, node=4,gpu=8; an axis is the plan's of its name.")] = None,
    hf: Hf = None,
    model: ModelName = None,
    module: Module = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    flips: Flips = 0,
) -> None:
    """What a plan would take on other hardware, and how much a plan made there would gain."""
    loaded = Plan.load(plan)
    with progress("building the model") as tell:
        network, example = _build(hf, model, module, batch, seq, dtype, "meta")
        tell(f"planning for {hardware or loaded.fingerprint.profile}")
        there = None if mesh is None else Mesh.parse(mesh)
        found = what_if(loaded, network, example, hardware=hardware, mesh=there, num_flips=flips)
    say(str(found))
    _say_if_none(flips, found.flips)


@app.command("profile")
def profile_command(
    device: Annotated[str, typer.Option(help="cpu or cuda: one GPU, whose links come from another profile.")] = "cpu",
    world_size: Annotated[int | None, typer.Option(min=1, help="Processes that a run on CPUs will have, 4 by default.")] = None,
    links: Annotated[str | None, typer.Option(help="Of a GPU: the profile whose links are taken, by default its chip's.")] = None,
    out_file: Annotated[Path | None, typer.Option("--out", help="Where to write; by default what --hardware local loads.")] = None,
) -> None:
    """Measure this machine, half a minute; plans then take --hardware local."""
    from autopar.run.measure import measure

    profile = measure(device, world_size, out_file, links=links)
    say(profile.description)
    say(f"written to {out_file or HardwareProfile.local_path()}")


@app.command("report")
def report_command(
    plan: PlanFile,
    out_file: Annotated[Path, typer.Option("--out", help="A .png, .svg or .pdf picture, or an .html page.")] = Path("plan.png"),
    flips: Flips = 0,
    hf: Hf = None,
    model: ModelName = None,
    module: Module = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
) -> None:
    """Draw a plan: layouts per module, memory by kind, time line; of a pipeline its schedule and its stages' memory too."""
    from autopar.report import report

    loaded = Plan.load(plan)
    turning = _turning(loaded, flips, hf, model, module, batch, seq, dtype)
    say(f"written to {report(loaded, out_file, flips=turning)}")
    _say_if_none(flips, turning)


@app.command("run", context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python file that calls autopar.compile.")],
    num_processes: Annotated[int, typer.Option("-n", "--num-processes", min=1, help="Processes on this machine.")] = 1,
    nodes: Annotated[str, typer.Option(help="Machines that each run this: a number, or the fewest and the most, as 2:4.")] = "1",
    meet: Annotated[str | None, typer.Option(help="HOST:PORT of one of several machines, where they meet.")] = None,
    restarts: Annotated[int | None, typer.Option(min=0, help="How often all start again where one fails; 0, of 2:4 machines 10.")] = None,
) -> None:
    """Start SCRIPT with its arguments in several processes, by torchrun. Where machines come or go those that are there start it again."""
    launch(script, context.args, num_processes=num_processes, nodes=nodes, meet=meet, restarts=restarts)


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


def _turning(
    plan: Plan, num: int, config: str | None, name: str | None, function: str | None, batch: int | None, seq: int | None, dtype: str | None
) -> tuple[Flip, ...]:
    """What would turn close choices; nothing where that is not asked for."""
    if not num:
        return ()
    if (config, name, function) == (None, None, None):
        what = "what would turn choices cannot be told without the model"
        raise AutoparError(what, remedy="pass --hf or --model, or a function: --function of explain, --module of report")
    with progress("building the model") as tell:
        network, example = _build(config, name, function, batch, seq, dtype, "meta")
        tell("pricing other hardware")
        return flips(plan, network, example, most=num)


def _say_if_none(num: int, found: Sequence[Flip]) -> None:
    """That nothing turns the choices that were asked about, if so."""
    if num and not found:
        say(NO_FLIP)


def _build(
    config: str | None, name: str | None, module: str | None, batch: int | None, seq: int | None, dtype: str | None, device: str
) -> tuple[torch.nn.Module, Any]:
    given = [option for option in (config, name, module) if option is not None]
    if len(given) != 1:
        raise AutoparError(f"{len(given)} models are named", remedy="pass one of --hf, --model and --module")
    if module is not None:
        ignored = [option for option, value in (("--batch", batch), ("--seq", seq), ("--dtype", dtype)) if value is not None]
        if ignored:
            raise AutoparError(f"{' and '.join(ignored)} with --module: its function makes the batch", remedy="change what it returns")
        return hf.load_function(module)
    batch, dtype = _BATCH if batch is None else batch, dtype or _DTYPE
    if dtype not in _DTYPES:
        raise AutoparError(f"dtype {dtype!r} is not known", remedy=f"pass one of {', '.join(_DTYPES)}")
    try:
        return hf.build(given[0], dtype=_DTYPES[dtype], device=device, batch=batch, seq=seq)
    except ModuleNotFoundError as error:
        raise AutoparError(f"{error.name} is not installed", remedy='pip install "autopar[hf]", or pass --module') from error


def _save(plan: Plan, path: Path) -> None:
    try:
        plan.save(path)
    except OSError as error:
        raise PlanError(f"cannot write the plan: {error.strerror}", where=str(path), remedy="check the path") from error


def main() -> None:
    """Run the command line; errors of autopar are told without a traceback."""
    try:
        app()
    except AutoparError as error:
        complain(str(error))
        sys.exit(1)
