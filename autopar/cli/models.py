"""Build and plan the models that the options of a command name."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, overload

import torch

from autopar import constraints, hf
from autopar.api import as_call, flips
from autopar.api.options import PlanRequest
from autopar.api.planning import PlanResult, find_plan
from autopar.cli.shared_options import BATCH, DTYPE, RESTING, NamedModel, as_flags, check_dtype
from autopar.constraints import Constraint
from autopar.core.hardware import Hardware
from autopar.core.mesh import Mesh, Unshaped
from autopar.core.schedules import AUTO
from autopar.core.terminal import PHASES, progress, say
from autopar.core.units import seconds
from autopar.errors import AutoparError
from autopar.explanation import explain
from autopar.plans import Flips, Plan
from autopar.request import PlanOptions


class ModelOptions(TypedDict):
    """Options of a plan that `built` reads."""

    inference: bool
    precision: str | None


@overload
def read_dtype(name: str) -> torch.dtype: ...


@overload
def read_dtype(name: str | None) -> torch.dtype | None: ...


def read_dtype(name: str | None) -> torch.dtype | None:
    """Return the torch dtype with a name; None for None.

    Raises:
        AutoparError: if the name is not one of `options.DTYPES`.
    """
    check_dtype(name)
    return None if name is None else getattr(torch, name)


def turning_of(plan: Plan, num: int, named: NamedModel) -> Flips:
    """Return the hardware changes that would change close choices of a plan; empty if `num` is 0.

    Args:
        plan: the plan.
        num: number of choices to examine.
        named: the model.

    Raises:
        AutoparError: if no model is named, or the model cannot be built.
    """
    if not num:
        return Flips()
    if (named.hf, named.model, named.module) == (None, None, None):
        message = "--flips needs the model of the plan"
        raise AutoparError(message, remedy="pass one of --hf, --model and --module")
    with progress("building the model") as tell:
        network, example = built(named, "meta", **model_options(plan))
        tell("pricing other hardware")
        return flips(plan, network, example, most=num)


def model_options(plan: Plan) -> ModelOptions:
    """Return the plan options that affect how the model is built: whether there is no backward, and
    the precision in which parameters are read.
    """
    return {
        "inference": bool(plan.options.get("inference")),
        "precision": plan.options.get("precision"),
    }


def say_if_none(found: Flips) -> None:
    """Print why no hardware change changes the requested choices, if so."""
    if found.why:
        say(found.why)


def built(
    named: NamedModel,
    device: str,
    *,
    inference: bool = False,
    precision: str | None = None,
) -> tuple[torch.nn.Module, Any]:
    """Build the named model and a batch for it.

    Args:
        named: the model and its batch.
        device: device of the weights; "meta" for no storage.
        inference: whether to set eval mode and omit labels from the batch.
        precision: precision of the plan; if set, parameters have a wider dtype by default.

    Raises:
        AutoparError: if none or several are named, or the model cannot be built.
    """
    named.check()
    if named.module is not None:
        sizes = {"--batch": named.batch, "--seq": named.seq, "--dtype": named.dtype}
        ignored = [option for option, value in sizes.items() if value is not None]
        if ignored:
            remedy = (
                f"omit {' and '.join(ignored)}; the function of --module returns the model and "
                "the batch"
            )
            raise AutoparError(
                f"{' and '.join(ignored)} cannot be combined with --module, whose function makes "
                "the batch",
                remedy=remedy,
            )
        return hf.load_function(named.module)
    try:
        rests = read_dtype(named.dtype or (RESTING if precision else DTYPE))
        network, example = hf.build(
            named.hf or named.model or "",
            dtype=rests,
            device=device,
            batch=BATCH if named.batch is None else named.batch,
            seq=named.seq,
        )
        logging.getLogger("transformers").setLevel(
            logging.ERROR
        )  # transformers warns about configurations that it made itself
        return (
            (network.eval(), hf.unlabelled(network, example)) if inference else (network, example)
        )
    except ModuleNotFoundError as error:
        raise AutoparError(
            f"{error.name} is not installed", remedy='pip install "autopar[hf]", or pass --module'
        ) from error


# --------------------------------------------------------------------------------------------------
# Run ``autopar plan``: plan a named model and print the result.


_TOLD = 0.01  # share of the total time from which the time of rejected plans is printed


def with_stages(
    options: PlanOptions,
    axis: str | None,
    schedule: str | None,
    chunks: int | None,
    *,
    offload: bool,
) -> PlanOptions:
    """Return the options with the pipeline and the offloading that the flags request.

    Args:
        options: options with the constraints of other flags.
        axis: --pipeline; None for no stages, "auto" for an axis of the planner's choice.
        schedule, chunks: --schedule and --chunks.
        offload: whether parameters and saved activations may be offloaded to host memory.

    Raises:
        ConstraintError: if constraints contradict each other.
    """
    requested: list[Constraint] = []
    if axis is not None:
        num = None if options.num_microbatches == "auto" else options.num_microbatches
        requested.append(
            constraints.pipeline(
                None if axis == AUTO else axis, microbatches=num, schedule=schedule, chunks=chunks
            )
        )
    if offload:
        requested.append(constraints.offload())
    return replace(options, constraints=(*options.constraints, *requested))


def plan_named(
    named: NamedModel,
    mesh: Mesh | Unshaped,
    devices: Hardware,
    options: PlanOptions,
    out_file: Path | None,
    lp_file: Path | None = None,
) -> None:
    """Build a model on meta, plan it, print the summary of the plan and write the requested files.

    Args:
        named: the model.
        mesh: a mesh, or devices from which the planner chooses a mesh.
        devices: the hardware.
        options: options of planning.
        out_file: file to write the plan to; None to write no plan.
        lp_file: file to write the integer program to; None to write none.

    Raises:
        AutoparError: if the model cannot be built or planned, or a file cannot be written.
    """
    clock, options = _Clock(), options.begun()
    with progress("building the model") as tell:
        network, example = built(
            named, "meta", inference=options.inference, precision=options.precision
        )
        tell("capturing")
        args, kwargs = as_call(example)
        if lp_file is not None:  # a plan from the cache has no integer program
            options = replace(options, cache=False)
        result = find_plan(
            PlanRequest(network, mesh, devices, options),
            args,
            kwargs,
            progress=lambda p: tell(clock.at(p)),
        )
    _tell(result, clock, out_file)
    if lp_file is not None and result.planned is not None:
        result.planned.write_lp(lp_file)
        say(f"integer program written to {lp_file}")


def _tell(found: PlanResult, clock: _Clock, out_file: Path | None) -> None:
    """Print the summary of the plan and the planning time, and write the plan."""
    plan = found.plan
    for line in explain(plan).summary():
        say(as_flags(line))
    if found.planned is None:
        say("plan loaded from the cache; pass --no-cache to plan again")
    else:
        phases = clock.phases(found.planned.seconds)
        say(
            f"planned in {seconds(sum(phases.values()))}:"
            f" {', '.join(f'{phase} {seconds(value)}' for phase, value in phases.items())}"
        )
    if out_file is not None:
        plan.save(out_file)
        say(f"written to {out_file}; `autopar explain {out_file}` shows the details")


class _Clock:
    """Measures the phases of planning."""

    def __init__(self) -> None:
        self._start = time.perf_counter()
        self._captured = math.inf

    def at(self, phase: str) -> str:
        """Record the start of a phase, and return its name."""
        self._captured = min(self._captured, time.perf_counter() - self._start)
        return PHASES.get(phase, phase)

    def phases(self, of_plan: Mapping[str, float]) -> dict[str, float]:
        """Return the seconds of each phase. Time spent on rejected plans is a separate phase."""
        total_s = time.perf_counter() - self._start
        captured_s = min(self._captured, total_s)
        others_s = max(total_s - captured_s - sum(of_plan.values()), 0.0)
        return {
            "capture": captured_s,
            **of_plan,
            **({"rejected plans": others_s} if others_s > _TOLD * total_s else {}),
        }
