"""The command ``autopar plan``: its options. `autopar.cli.planning` runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from autopar.cli.shared_options import (
    NO_MODEL,
    DevicesPerNode,
    NamedModel,
    read_options,
    takes_model,
    takes_options,
)
from autopar.core.mesh import hardware_of, read_mesh
from autopar.core.schedules import AUTO, INTERLEAVED, SCHEDULES
from autopar.core.terminal import check_writable
from autopar.errors import AutoparError
from autopar.request import PlanOptions

LpFile = Annotated[
    Path | None,
    typer.Option(
        "--write-lp", metavar="FILE", help="Where the integer program is written, in LP format."
    ),
]


@takes_model
@takes_options
def plan_command(
    mesh: Annotated[
        str,
        typer.Option(
            help=(
                "Axes from the slowest to the fastest, node=4,gpu=8; or, to be shaped, nodes ×"
                " devices, 4x8, or a count."
            )
        ),
    ],
    devices_per_node: DevicesPerNode = None,
    named: NamedModel = NO_MODEL,
    hardware: Annotated[
        str,
        typer.Option(
            help=(
                "Name or path of a hardware profile; of unequal devices, along an axis:"
                " stage=h100-sxm,a100-sxm-80gb."
            )
        ),
    ] = "h100-sxm",
    *,
    pipeline: Annotated[
        str | None,
        typer.Option(
            metavar="AXIS",
            help=(
                "Cut the model into stages along this axis; auto: any, or none, the default on GPUs"
                " of a loss."
            ),
        ),
    ] = None,
    schedule: Annotated[
        str | None, typer.Option(help=f"Of the stages: {', '.join(SCHEDULES)} or {AUTO}.")
    ] = None,
    chunks: Annotated[
        int | None, typer.Option(min=1, help=f"Stages per device of {INTERLEAVED}, 2 by default.")
    ] = None,
    offload: Annotated[
        bool, typer.Option("--offload", help="Let what is worth it lie in the hosts' memory.")
    ] = False,
    lp_file: LpFile = None,
    out_file: Annotated[
        Path | None, typer.Option("--out", help="Where the plan is written.")
    ] = None,
    **options: Any,
) -> None:
    """Plan a model for a mesh: no GPU, no process group, weights on meta."""
    check_writable(out_file)
    check_writable(lp_file)
    named.check()
    _check_stages(pipeline, schedule, chunks)
    axes = read_mesh(mesh, devices_per_node)
    devices = hardware_of(hardware, axes)
    chosen = PlanOptions(**read_options(options))
    from autopar.cli import planning  # with torch, for which nothing above waits

    chosen = planning.with_stages(chosen, pipeline, schedule, chunks, offload=offload)
    planning.plan_named(named, axes, devices, chosen, out_file, lp_file)


def _check_stages(axis: str | None, schedule: str | None, chunks: int | None) -> None:
    """Check that stages are requested if an option applies to stages only.

    Raises:
        AutoparError: if they are not.
    """
    for option, value in (("--schedule", schedule), ("--chunks", chunks)):
        if axis is None and value is not None:
            what = f"{option} {value} is of stages, and none are asked for"
            raise AutoparError(
                what, remedy=f"pass --pipeline AXIS or --pipeline {AUTO} too, or leave {option} out"
            )
