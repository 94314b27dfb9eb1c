"""`what_if`: an old plan on other hardware, beside the plan made there, or under other constraints.

`flips`: which hardware would turn a plan's choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from torch import nn

from autopar.api.arguments import (
    Example,
    MeshLike,
    as_call,
    as_hardware,
    as_mesh,
    of_plan,
    planned_for,
)
from autopar.api.options import PlanRequest
from autopar.api.plan_options import check_fits, options_of, recorded_options
from autopar.api.planning import plan_call, shown_progress
from autopar.api.tracing import planned_part, traced_for
from autopar.capture import Trace
from autopar.constraints import Constraint
from autopar.constraints.text import parse_constraint
from autopar.constraints.together import elsewhere
from autopar.constraints.words import in_words
from autopar.core.garbage import collected_seldom
from autopar.core.hardware import Hardware, profile_of
from autopar.core.mesh import HardwareLike, Mesh
from autopar.core.units import seconds, share, size
from autopar.emit import returned_of
from autopar.errors import ConstraintError, PlanError
from autopar.planner.reprice import reprice_plan
from autopar.planner.sensitivity import all_flips
from autopar.planner.transfer_plan import Carried, carry_plan, notes
from autopar.plans import Flips, Plan
from autopar.request import PlanOptions, as_constraints

# --------------------------------------------------------------------------------------------------
# The constraints of a plan, with some left out and others added.

_NUMBER = "num_microbatches"


@dataclass(frozen=True, slots=True)
class ConstraintChange:
    """The options without the constraints that are left out, and the constraints that are added;
    both also as their user writes them."""

    options: PlanOptions
    more: tuple[Constraint, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        """``without fsdp(), with ddp(axes=['gpu'])``; nothing where nothing changes."""
        parts = (("without", self.left_out), ("with", tuple(map(in_words, self.more))))
        return ", ".join(f"{word} {' and '.join(said)}" for word, said in parts if said)


def change_options(
    options: PlanOptions, without: Iterable[str | Constraint], more: Iterable[Constraint]
) -> ConstraintChange:
    """Leave out some constraints of a plan and add others.

    Args:
        options: a plan's.
        without: constraints that it obeys, or texts: the name of all of one kind (``fsdp``,
            ``num_microbatches``), or one as a call (``layout("*.up", weight="R S(0)")``).
        more: constraints to add.

    Raises:
        ConstraintError: if the plan does not obey a constraint to leave out, or already obeys one
            to add, or a text cannot be read.
    """
    left_out: list[str] = []
    for what in without:
        options, gone = _without(options, what)
        left_out += gone
    obeyed, more = obeyed_by(options), tuple(more)
    for constraint in more:
        if in_words(constraint) in obeyed:
            raise ConstraintError(
                f"the plan obeys {in_words(constraint)} already",
                remedy="ask for another constraint, or for none",
            )
    return ConstraintChange(options, more, tuple(left_out))


def obeyed_by(options: PlanOptions) -> tuple[str, ...]:
    """Return all that is forced, as its user writes it."""
    number = (
        () if options.num_microbatches == "auto" else (f"{_NUMBER}={options.num_microbatches}",)
    )
    return (*map(in_words, options.constraints), *number)


def _without(options: PlanOptions, what: str | Constraint) -> tuple[PlanOptions, Sequence[str]]:
    """Return the options without a constraint, and what is left out, as its user writes it."""
    is_name = isinstance(what, str) and "(" not in what
    said = (
        in_words(what if isinstance(what, Constraint) else parse_constraint(what))
        if not is_name
        else str(what).strip()
    )
    gone = [each for each in obeyed_by(options) if said == (_name(each) if is_name else each)]
    if not gone:
        there = obeyed_by(options)
        remedy = (
            f"name one of those that it obeys: {', '.join(there)}"
            if there
            else "the plan obeys none: leave out nothing"
        )
        raise ConstraintError(f"the plan obeys no constraint {said}", remedy=remedy)
    kept = tuple(c for c in options.constraints if in_words(c) not in gone)
    free = any(_name(each) == _NUMBER for each in gone)
    return (
        replace(
            options, constraints=kept, num_microbatches="auto" if free else options.num_microbatches
        ),
        gone,
    )


def _name(said: str) -> str:
    return said.partition("(")[0].partition("=")[0]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A plan on other hardware.

    Attributes:
        plan: the plan. hardware: name of the other profile. step_s, peak_bytes: of the plan's
            decisions there.
        best: the plan made there, with the same options and constraints. budget_bytes: per device
            there; where stages' devices have other budgets, peak and budget are those of the device
            that has least left.
        flips: the choices of `best` that the least change of the hardware would turn, where they
            were asked for, or why there are none.
        notes: what is to be known of axes that only one of the meshes has.
        change: which of the plan's constraints `best` need not obey, and which it obeys beside the
            others.
    """

    plan: Plan
    hardware: str
    step_s: float
    peak_bytes: int
    best: Plan
    budget_bytes: int
    flips: Flips = Flips()  # noqa: RUF009 - immutable
    notes: tuple[str, ...] = ()
    change: str = ""

    @property
    def fits(self) -> bool:
        """Whether the plan's peak, which does not depend on times, is within the budget there."""
        return self.peak_bytes <= self.budget_bytes

    @property
    def regret(self) -> float:
        """By which share the plan is slower than the one made there. Below 0 by the gap at most,
        unless the plan does not fit."""
        return self.step_s / self.best.prediction.step_s - 1

    @property
    def most_regret(self) -> float:
        """By which share the plan is slower than any plan there can be; from the proven bound."""
        return self.step_s / self.best.proof.bound_s - 1

    def __str__(self) -> str:
        peak, budget = size(self.peak_bytes), size(self.budget_bytes)
        where = (
            self.hardware
            if self.best.mesh.axes == self.plan.mesh.axes
            else f"{self.hardware} and mesh {self.best.mesh}"
        )
        before, made = self.plan.prediction.step_s, self.best.prediction
        forced = ", ".join(obeyed_by(recorded_options(self.best)))
        under = (
            f", {forced} forced{'' if self.change else ' as well'},"
            if forced
            else ", nothing forced,"
            if self.change
            else ""
        )
        return "\n".join(
            (
                (
                    f"{self.plan.fingerprint.model_name or 'model'} on mesh {self.plan.mesh}:"
                    f" planned for {self.plan.fingerprint.profile}, asked about"
                    f" {' '.join(filter(None, (where, self.change)))}"
                ),
                (
                    f"the plan takes {seconds(self.step_s)} a step there ({seconds(before)} on"
                    f" {self.plan.fingerprint.profile}) and"
                    f" {'fits' if self.fits else 'does not fit'}: {peak} of {budget} per device"
                ),
                (
                    f"the plan made for {where}{under} takes {seconds(made.step_s)} with a peak of"
                    f" {size(made.peak_bytes)}"
                ),
                (
                    f"regret {share(self.regret, signed=True)}; against the proven bound at most"
                    f" {share(self.most_regret, signed=True)}"
                ),
                *self.notes,
                *filter(None, (str(self.flips),)),
            )
        )


@collected_seldom()
def what_if(
    plan: Plan,
    model: nn.Module,
    batch: Example,
    *,
    hardware: HardwareLike | None = None,
    mesh: MeshLike | None = None,
    memory_bytes: int | None = None,
    constraints: Sequence[Constraint] = (),
    without: Sequence[str | Constraint] = (),
    num_flips: int = 0,
) -> WhatIf:
    """What a plan would take on other hardware, and how much a plan made there, or under other
    constraints, would gain.

    The plan's decisions are priced again there, its layouts, recomputation and collectives as they
    are. Then the model is planned there anew with the options that the plan records, but for the
    constraints that are left out or added.

    Args:
        batch: the example inputs that the plan was made with.
        hardware: as in `plan`; by default the plan's.
        mesh: where links, axes or their sizes are others; by default the plan's. An axis is the
            plan's of the same name. One that is new repeats the same work; one that is not there
            has size 1, and so what the plan splits over it is whole. Stages stay as they are, so
            their axis keeps its size. What moves between the plan's layouts is the cheapest there.
        memory_bytes: budget per device; by default the plan's, where its user set one or the
            hardware is the same, else the device's memory less 10 %.
        constraints: what the plan made there obeys beside the plan's, as in `plan`; over the axes
            of the mesh there.
        without: which of the plan's it need not obey: constraints, or texts: ``fsdp`` for all of
            that name, ``num_microbatches``, or one as it was written, ``pipeline("node")``.
        num_flips: for so many choices of the plan made there, or of each of its stages, those with
            the closest runner-ups, also say at which change of the hardware they turn.

    Raises:
        PlanError: where the plan is for another model, or its decisions cannot be taken on that
            mesh: no axis has a name of the plan's, the stages' has another size, or a microbatch
            cannot be split as the plan splits it.
        ConstraintError: where a constraint cannot hold there, or the plan obeys none of those that
            are to be left out.
        InfeasibleError: where no plan fits the other hardware.
    """
    args, kwargs = as_call(batch)
    there = plan.mesh if mesh is None else as_mesh(mesh)
    devices = as_hardware(planned_for(plan) if hardware is None else hardware, there)
    trace = traced_for(plan, model, args, kwargs)
    check_fits(plan, trace, plan.mesh, type(model).__name__)
    options = options_of(plan, devices, memory_bytes)
    part, how = planned_part(plan, model, trace, args, kwargs)
    change = change_options(
        options,
        (without,) if isinstance(without, str | Constraint) else without,
        as_constraints(constraints),
    )
    if there.axes == plan.mesh.axes:
        peaks = plan.as_pipeline.peaks
        found = Carried(reprice_plan(plan, part, there, devices, options), peaks)
    else:
        outputs = plan.options.get("outputs", "dtensor")
        returned = returned_of(part, how, outputs)
        found = carry_plan(plan, part, there, devices, options, _bytes_of(trace), returned)
    peak_bytes, budget_bytes = _tightest(plan, found, devices, options)
    options = (
        change.options if there.axes == plan.mesh.axes else _elsewhere(plan, there, change.options)
    )
    options = replace(options, constraints=(*options.constraints, *change.more))
    request = PlanRequest(model, there, devices, options)
    with shown_progress() as progress:
        best = plan_call(request, args, kwargs, progress=progress)[1].plan
    turning = Flips()
    if num_flips:
        turning = all_flips(
            best,
            planned_part(best, model, trace, args, kwargs)[0],
            there,
            devices,
            options,
            most=num_flips,
        )
    return WhatIf(
        plan,
        devices.name,
        found.step_s,
        peak_bytes,
        best,
        budget_bytes,
        turning,
        notes(plan, there),
        str(change),
    )


@collected_seldom()
def flips(
    plan: Plan,
    model: nn.Module,
    batch: Example,
    *,
    most: int = 5,
    hardware: HardwareLike | None = None,
) -> Flips:
    """At which change of the hardware close choices of a plan turn, the least change first;
    `autopar.explain` shows them. A tuple, which where it is empty says why, as `why` and when it is
    printed.

    The chosen strategy of an op and its runner-up are priced again where a link, or compute, is
    faster or slower, all else as in the plan. A plan made for that hardware may change other
    choices sooner.

    Args:
        batch: the example inputs that the plan was made with.
        most: so many choices, those with the closest runner-ups, are looked at; in a plan with
            stages, of each stage.
        hardware: the profile that the plan was made for, where it is not found under its name.

    Raises:
        PlanError: where the plan is for another model or profile.
    """
    args, kwargs = as_call(batch)
    devices = of_plan(plan, hardware)
    if devices.hash != plan.fingerprint.profile_hash:
        what = f"the plan was made for another profile than this {devices.name}"
        raise PlanError(
            what,
            remedy=(
                "pass the one that it was made for as hardware=, or ask autopar.what_if about"
                " this one"
            ),
        )
    trace = traced_for(plan, model, args, kwargs)
    check_fits(plan, trace, plan.mesh, type(model).__name__)
    part, _ = planned_part(plan, model, trace, args, kwargs)
    return all_flips(plan, part, plan.mesh, devices, options_of(plan, devices, None), most=most)


def _tightest(
    plan: Plan, found: Carried, devices: Hardware, options: PlanOptions
) -> tuple[int, int]:
    """Return peak and budget (bytes) of the device with the least memory left."""
    pairs = [
        (peak, options.budget(profile_of(devices, plan.stage_axis, rank)))
        for rank, peak in enumerate(found.peaks)
    ]
    return max(pairs, key=lambda pair: pair[0] / pair[1])


def _bytes_of(trace: Trace) -> int:
    """Return the bytes of the whole batch."""
    return sum(math.prod(i.shape) * i.dtype.itemsize for i in trace.inputs)


def _elsewhere(plan: Plan, mesh: Mesh, options: PlanOptions) -> PlanOptions:
    """The options for another mesh, as a user would write them there."""
    axis = plan.stage_axis
    constraints = elsewhere(options.constraints, plan.mesh.without(axis), mesh.without(axis), axis)
    return replace(options, constraints=constraints)
