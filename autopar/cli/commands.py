"""The command line: ``autopar
plan|explain|diff|check|verify|what-if|profile|report|export|run|cache``.

`plan`, `explain`, `diff`, `check` and `report` need no process group and no GPU. Autopar errors are
printed without a traceback, and the command exits with status 1. Commands import torch lazily, so
that help texts and usage errors appear at once.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cache import store
from autopar.cli.shared_options import (
    DTYPES,
    NO_MODEL,
    Constraints,
    DevicesPerNode,
    Flips,
    NamedModel,
    PlanFile,
    check_dtype,
    check_files_exist,
    read_options,
    takes_model,
    takes_options,
)
from autopar.core.mesh import hardware_of, read_mesh
from autopar.core.private_folder import find_sharing, is_cache_on
from autopar.core.schedules import AUTO, INTERLEAVED, SCHEDULES
from autopar.core.terminal import check_writable, parse_size, progress, say, show
from autopar.core.text_files import open_text, write_file
from autopar.core.units import size
from autopar.errors import AutoparError
from autopar.request import PlanOptions
from autopar.version import VERSION

# --------------------------------------------------------------------------------------------------
# The command ``autopar plan``: its options. `autopar.cli.models` runs it.

LpFile = Annotated[
    Path | None,
    typer.Option(
        "--write-lp", metavar="FILE", help="File to write the integer program to, in LP format."
    ),
]


@takes_model
@takes_options("plan")
def plan_command(
    mesh: Annotated[
        str,
        typer.Option(
            help=(
                "Mesh axes from slowest to fastest, as node=4,gpu=8; or nodes × devices per "
                "node, as 4x8, or a device count; the planner then chooses the axes."
            )
        ),
    ],
    devices_per_node: DevicesPerNode = None,
    named: NamedModel = NO_MODEL,
    hardware: Annotated[
        str,
        typer.Option(
            help=(
                "Name or path of a hardware profile. For unequal devices, one profile per index "
                "of an axis: stage=h100-sxm,a100-sxm-80gb."
            )
        ),
    ] = "h100-sxm",
    *,
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS",
            help=(
                "Mesh axis of the pipeline stages. auto: the planner chooses the axis and "
                "whether to use stages (default on GPUs if the model returns a loss)."
            ),
        ),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help=f"Pipeline schedule: {', '.join(SCHEDULES)} or {AUTO}.")
    ] = None,
    chunks: Annotated[
        int | None,
        typer.Option(min=1, help=f"Stages per device of the {INTERLEAVED} schedule, 2 by default."),
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help="Allow offloading to host memory where it pays off.")
    ] = False,
    lp_file: LpFile = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="File to write the plan to.")
    ] = None,
    **options: Any,
) -> None:
    """Plan a model for a mesh. Needs no GPU and no process group; weights are on meta."""
    check_writable(out_file)
    check_writable(lp_file)
    named.check()
    _check_stages(pipeline, schedule, chunks)
    axes = read_mesh(mesh, devices_per_node)
    devices = hardware_of(hardware, axes)
    chosen = PlanOptions(**read_options(options))
    from autopar.cli import models  # imported here because it loads torch

    chosen = models.with_stages(chosen, pipeline, schedule, chunks, offload=offload)
    models.plan_named(named, axes, devices, chosen, out_file, lp_file)


def _check_stages(axis: str | None, schedule: str | None, chunks: int | None) -> None:
    """Check that a pipeline is requested if an option applies to pipelines only.

    Raises:
        AutoparError: if no pipeline is requested.
    """
    for option, value in (("--schedule", schedule), ("--chunks", chunks)):
        if axis is None and value is not None:
            message = f"{option} {value} applies to pipelines only, and no pipeline is requested"
            raise AutoparError(
                message, remedy=f"pass --pipeline AXIS or --pipeline {AUTO} too, or omit {option}"
            )


# --------------------------------------------------------------------------------------------------
# ``autopar cache info|list|clear``: the plans and captures that are cached on this machine.

cache_app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    help="Manage the cache of plans and captures on this machine.",
)
_UNITS = ((86400.0, "day"), (3600.0, "hour"), (60.0, "minute"))


@cache_app.command("info")
def info_command() -> None:
    """Print the folder of the cache, its number of entries, and whether it is in use."""
    folder, entries = store.entry_folder(), store.entries()
    say(f"folder: {folder}")
    say(f"entries: {len(entries)}, {size(sum(e.num_bytes for e in entries))}")
    say(f"limit: {size(store.MAX_BYTES)}; the least recently used entries are removed first")
    if entries:
        say(
            f"last used: {_ago(entries[0].used_s)}; least recently used: {_ago(entries[-1].used_s)}"
        )
    if not is_cache_on("plans"):
        say("the cache is off: the environment variable AUTOPAR_CACHE does not include plans")
    elif os.path.isdir(folder) and (reason := find_sharing(folder.resolve())):
        say(f"the folder is not used: {reason}")


@cache_app.command("list")
def list_command() -> None:
    """List the cached plans and captures, the most recently used first."""
    for entry in store.entries():
        say(f"{entry.path.stem[:16]}  {size(entry.num_bytes)}  {_ago(entry.used_s)}  {_of(entry)}")


@cache_app.command("clear")
def clear_command() -> None:
    """Remove all cached plans and captures."""
    try:
        num, num_bytes = store.clear()
    except OSError as error:
        raise AutoparError(
            f"cannot remove a cache entry: {error}",
            remedy=f"remove the folder: {store.entry_folder()}",
        ) from error
    say(f"removed {num} {'entry' if num == 1 else 'entries'}, {size(num_bytes)}")


def _of(entry: store.EntryFile) -> str:
    """Describe an entry of the cache; "damaged" if it cannot be read."""
    try:
        with open_text(entry.path) as lines:
            head = json.loads(next(lines))
        return f"{head['kind']}: {head['about']}"
    except (OSError, ValueError, LookupError, TypeError, StopIteration):
        return "damaged"


def _ago(used_s: float) -> str:
    age_s = max(time.time() - used_s, 0.0)
    for unit_s, name in _UNITS:
        if age_s >= unit_s:
            num = int(age_s // unit_s)
            return f"{num} {name}{'s' if num > 1 else ''} ago"
    return "less than a minute ago"


# --------------------------------------------------------------------------------------------------
# All commands.

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Plan the parallel execution of a PyTorch model, and run it.",
)


def _say_version(asked: bool) -> None:
    if asked:
        say(f"autopar {VERSION}")
        raise typer.Exit


@app.callback()
def app_options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_say_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Handle the options that precede a command."""


app.command("plan")(plan_command)
app.add_typer(cache_app, name="cache")


@app.command("explain")
@takes_model
def explain_command(
    plan: PlanFile,
    only: Annotated[
        str | None,
        typer.Option(
            metavar="PATTERN", help="Show only these modules of the model, with every decision."
        ),
    ] = None,
    flips: Flips = 0,
    named: NamedModel = NO_MODEL,
    function: Annotated[
        str | None, typer.Option(hidden=True)
    ] = None,  # the former name of --module
) -> None:
    """Show what each module of a plan does and costs, and why. With --flips and a model, also show
    which hardware changes would change the plan.
    """
    check_files_exist(plan)
    module = named.module
    if module is not None and ":" not in module:
        # a module pattern (the former meaning of --module), not a function in a file
        only, module = only or module, None
    from autopar.cli.models import say_if_none, turning_of
    from autopar.explanation import explain
    from autopar.plans import Plan

    loaded = Plan.load(plan)
    turning = turning_of(loaded, flips, replace(named, module=module or function))
    explanation = explain(loaded, module=only, flips=turning)
    show(explanation)
    say_if_none(turning)
    if turning and not explanation.flips:
        say(
            f"none of the {len(turning)} choices that would change is in {only!r}: omit --only to "
            "see them"
        )


@app.command("diff")
def diff_command(first: PlanFile, second: PlanFile) -> None:
    """Show the differences between two plans, module by module."""
    check_files_exist(first)
    check_files_exist(second)
    from autopar.explanation import diff
    from autopar.plans import Plan

    show(diff(Plan.load(first), Plan.load(second)))


@app.command("check")
@takes_model
def check_command(
    plan: PlanFile,
    named: NamedModel = NO_MODEL,
    hardware: Annotated[
        str | None,
        typer.Option(help="Name or path of a profile; by default the profile that the plan names."),
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="File to write the certificate to, as JSON.")
    ] = None,
) -> None:
    """Certify a plan without a solver: legality, collectives, memory, time and the lower bound."""
    check_writable(json_file)
    check_files_exist(plan, hardware)
    from autopar.api import check
    from autopar.cli.models import built, model_options
    from autopar.plans import Plan

    loaded = Plan.load(plan)
    with progress("building the model") as tell:
        network, example = built(named, "meta", **model_options(loaded))
        tell("deriving every claim again")
        certificate = check(loaded, network, example, hardware=hardware)
    if json_file is not None:
        write_file(json_file, json.dumps(certificate.to_json(), indent=1) + "\n", "the certificate")
    say(str(certificate))
    if not certificate.ok:
        raise typer.Exit(1)


@app.command("verify")
@takes_model
def verify_command(
    plan: PlanFile,
    named: NamedModel = NO_MODEL,
) -> None:
    """Run all ranks of a plan in this process in float64. Compare loss, outputs and gradients with
    the plain model.
    """
    check_files_exist(plan)
    from autopar.api import verify
    from autopar.cli.models import built, model_options
    from autopar.plans import Plan

    loaded = Plan.load(plan)
    with progress("building the model") as tell:
        network, example = built(named, "cpu", **model_options(loaded))
        tell(f"running {loaded.mesh.num_devices} ranks")
        verification = verify(loaded, network, example)
    say(str(verification))
    if not verification.ok:
        raise typer.Exit(1)


@app.command("what-if")
@takes_model
@takes_options("what_if")
def what_if_command(
    plan: PlanFile,
    hardware: Annotated[
        str | None,
        typer.Option(
            help="Name or path of the other hardware profile; by default that of the plan."
        ),
    ] = None,
    mesh: Annotated[
        str | None,
        typer.Option(
            help="Another mesh, as node=4,gpu=8. Axes are matched with those of the plan by name."
        ),
    ] = None,
    devices_per_node: DevicesPerNode = None,
    memory: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Memory budget per device, as 72GiB; by default that of the plan, or the memory "
            "of the device less 10 %.",
        ),
    ] = None,
    constraint: Constraints = None,
    without: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help=(
                "Constraint of the plan to leave out: a name (fsdp) or a whole call. May be "
                "repeated."
            ),
        ),
    ] = None,
    named: NamedModel = NO_MODEL,
    flips: Flips = 0,
    **options: Any,
) -> None:
    """Show the step time of a plan on other hardware, and the gain of planning again there or under
    other constraints.
    """
    check_files_exist(plan, hardware)
    there, budget = None if mesh is None else read_mesh(mesh, devices_per_node), parse_size(memory)
    from autopar.api import what_if
    from autopar.cli.models import built, model_options
    from autopar.constraints.text import parse_constraint
    from autopar.plans import Plan

    loaded = Plan.load(plan)
    with progress("building the model") as tell:
        network, example = built(named, "meta", **model_options(loaded))
        tell(f"planning for {hardware or loaded.fingerprint.profile}")
        more = [parse_constraint(text) for text in constraint or ()]
        answer = what_if(
            loaded,
            network,
            example,
            hardware=hardware,
            mesh=there,
            memory_bytes=budget,
            constraints=more,
            without=without or (),
            num_flips=flips,
            **read_options(options),
        )
    say(str(answer))


@app.command("profile")
def profile_command(
    device: Annotated[
        str,
        typer.Option(
            help="cpu or cuda. cuda measures one GPU; the links come from another profile."
        ),
    ] = "cpu",
    world_size: Annotated[
        int | None,
        typer.Option(min=1, help="Number of processes of a run on CPUs, 4 by default."),
    ] = None,
    links: Annotated[
        str | None,
        typer.Option(
            help="With cuda: the profile to take the links from; by default that of the GPU model."
        ),
    ] = None,
    out_file: Annotated[
        Path | None,
        typer.Option(
            "--out",
            help="File to write the profile to; by default the one that --hardware local loads.",
        ),
    ] = None,
) -> None:
    """Measure this machine in about half a minute. Use the result with --hardware local."""
    from autopar.core.hardware import HardwareProfile
    from autopar.profiler.measure import measure

    profile = measure(device, world_size, out_file, links=links)
    say(profile.description)
    say(f"written to {out_file or HardwareProfile.local_path()}")


@app.command("report")
@takes_model
def report_command(
    plan: PlanFile,
    out_file: Annotated[
        Path,
        typer.Option("--out", help="Output file: a .png, .svg or .pdf picture, or an .html page."),
    ] = Path("plan.png"),
    flips: Flips = 0,
    named: NamedModel = NO_MODEL,
) -> None:
    """Draw a plan: layouts per module, memory by kind, and the timeline; for pipelines also the
    schedule and the memory of each stage.
    """
    check_writable(out_file)
    check_files_exist(plan)
    from autopar.cli.models import say_if_none, turning_of
    from autopar.plans import Plan
    from autopar.report import report

    loaded = Plan.load(plan)
    turning = turning_of(loaded, flips, named)
    say(f"written to {report(loaded, out_file, flips=turning)}")
    say_if_none(turning)


@app.command("export")
def export_command(
    checkpoints: Annotated[
        Path, typer.Argument(help="Folder that autopar.Checkpoints saved into.")
    ],
    folder: Annotated[Path, typer.Argument(help="Folder to write the weights to.")],
    step: Annotated[
        int | None, typer.Option(min=0, help="Step of the checkpoint; by default the newest.")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            help=f"Dtype of the written weights: {', '.join(DTYPES)}; by default that of the "
            "checkpoint."
        ),
    ] = None,
    max_file: Annotated[
        str,
        typer.Option(
            metavar="SIZE",
            help="Maximum size of a file; larger models are split into several files with an "
            "index.",
        ),
    ] = "5GB",
) -> None:
    """Write the weights of a checkpoint as safetensors for from_pretrained. Needs no mesh and no
    GPU.
    """
    check_dtype(dtype)
    max_file_bytes = parse_size(max_file) or 1
    from autopar.checkpoint.manager import Checkpoints
    from autopar.cli.models import read_dtype

    with progress("assembling the weights"):
        exported_step = Checkpoints(checkpoints).export(
            folder, step=step, dtype=read_dtype(dtype), max_file_bytes=max_file_bytes
        )
    say(f"weights of step {exported_step} written to {folder}")


@app.command("run", context_settings={"allow_extra_args": True, "allow_interspersed_args": False})
def run_command(
    context: typer.Context,
    script: Annotated[Path, typer.Argument(help="A Python file that calls autopar.compile.")],
    num_processes: Annotated[
        int | None,
        typer.Option(
            "-n",
            "--num-processes",
            min=1,
            help="Processes on this machine; by default one per GPU, or one.",
        ),
    ] = None,
    nodes: Annotated[
        str,
        typer.Option(
            help="Number of machines that run this command, or the minimum and maximum, as 2:4."
        ),
    ] = "1",
    meet: Annotated[
        str | None, typer.Option(help="HOST:PORT of the machine that the others connect to.")
    ] = None,
    restarts: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="How often to restart all processes after a failure; 0 by default, 10 with a "
            "range of machines.",
        ),
    ] = None,
) -> None:
    """Start SCRIPT with its arguments in several processes, using torchrun. If machines join or
    leave, the remaining ones restart it.
    """
    from autopar.runtime.launching import launch

    launch(
        script, context.args, num_processes=num_processes, nodes=nodes, meet=meet, restarts=restarts
    )
