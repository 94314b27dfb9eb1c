"""`what_if`: evaluate a plan on other hardware or under other constraints, and compare it with a
new plan.

`flips`: find the hardware changes that would change a plan's choices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Unpack

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
from autopar.api.options import PlanRequest, takes_options
from autopar.api.plan_options import check_fits, options_of, recorded_options
from autopar.api.planning import plan_call, shown_progress
from autopar.api.tracing import planned_part, traced_for
from autopar.capture import Trace
from autopar.constraints import Constraint
from autopar.constraints.text import parse_constraint
from autopar.constraints.together import rewrite_for_mesh
from autopar.constraints.words import in_words
from autopar.core.garbage import collected_seldom
from autopar.core.hardware import Hardware, profile_of
from autopar.core.keywords import named
from autopar.core.mesh import HardwareLike, Mesh
from autopar.core.units import seconds, share, size
from autopar.emit import returned_of
from autopar.errors import ConstraintError, PlanError
from autopar.planner.reprice import reprice_plan
from autopar.planner.sensitivity import all_flips
from autopar.planner.transfer_plan import TransferredPlan, carry_plan, notes
from autopar.plans import Flips, Plan
from autopar.request import PlanOptions, WhatIfKeywords, as_constraints

# --------------------------------------------------------------------------------------------------
# The constraints of a plan, with some removed and others added.

_NUMBER = "num_microbatches"


@dataclass(frozen=True, slots=True)
class ConstraintChange:
    """The options without the removed constraints, and the added constraints; both also as the user
    writes them.
    """

    options: PlanOptions
    more: tuple[Constraint, ...]
    left_out: tuple[str, ...]

    def __str__(self) -> str:
        """Return ``without fsdp(), with ddp(axes=['gpu'])``; empty if nothing changes."""
        parts = (("without", self.left_out), ("with", tuple(map(in_words, self.more))))
        return ", ".join(f"{word} {' and '.join(said)}" for word, said in parts if said)


def change_options(
    options: PlanOptions, without: Iterable[str | Constraint], more: Iterable[Constraint]
) -> ConstraintChange:
    """Remove some constraints of a plan and add others.

    Args:
        options: options of a plan.
        without: constraints to remove, or texts: the name of all constraints of a kind (``fsdp``,
            ``num_microbatches``), or a constraint as a call (``layout("*.up", weight="R S(0)")``).
        more: constraints to add.

    Raises:
        ConstraintError: if the plan does not have a constraint to remove, or already has one to
            add, or a text cannot be read.
    """
    left_out: list[str] = []
    for removed in without:
        options, gone = _without(options, removed)
        left_out += gone
    obeyed, more = obeyed_by(options), tuple(more)
    for constraint in more:
        if in_words(constraint) in obeyed:
            raise ConstraintError(
                f"the plan already has the constraint {in_words(constraint)}",
                remedy="pass another constraint, or none",
            )
    return ConstraintChange(options, more, tuple(left_out))


def obeyed_by(options: PlanOptions) -> tuple[str, ...]:
    """Return all constraints as the user writes them."""
    number = (
        () if options.num_microbatches == "auto" else (f"{_NUMBER}={options.num_microbatches}",)
    )
    return (*map(in_words, options.constraints), *number)


def _without(options: PlanOptions, what: str | Constraint) -> tuple[PlanOptions, Sequence[str]]:
    """Return the options without a constraint, and the removed constraint as the user writes it."""
    is_name = isinstance(what, str) and "(" not in what
    label = (
        in_words(what if isinstance(what, Constraint) else parse_constraint(what))
        if not is_name
        else str(what).strip()
    )
    gone = [each for each in obeyed_by(options) if label == (_name(each) if is_name else each)]
    if not gone:
        there = obeyed_by(options)
        remedy = (
            f"name one of its constraints: {', '.join(there)}"
            if there
            else "the plan has no constraints: omit without="
        )
        raise ConstraintError(f"the plan has no constraint {label}", remedy=remedy)
    constraints = tuple(c for c in options.constraints if in_words(c) not in gone)
    free = any(_name(each) == _NUMBER for each in gone)
    return (
        replace(
            options,
            constraints=constraints,
            num_microbatches="auto" if free else options.num_microbatches,
        ),
        gone,
    )


def _name(said: str) -> str:
    return said.partition("(")[0].partition("=")[0]


@dataclass(frozen=True, slots=True)
class WhatIf:
    """A plan on other hardware.

    Attributes:
        plan: the plan. hardware: name of the other profile. step_s, peak_bytes: step time and peak
            memory of the plan's decisions there.
        best: the plan made there, with the same options and constraints. budget_bytes: budget per
            device there. If the devices of stages have different budgets, peak and budget are those
            of the device with the least memory left.
        flips: if requested, the choices of `best` that the smallest hardware changes would change,
            or the reason why there are none.
        notes: remarks on axes that only one of the meshes has.
        change: the constraints of the plan that `best` does not have, and those that it has in
            addition.
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
        """Whether the plan's peak memory, which does not depend on times, is within the budget
        there.
        """
        return self.peak_bytes <= self.budget_bytes

    @property
    def regret(self) -> float:
        """Relative slowdown of the plan against the one made there. Negative by at most the gap,
        unless the plan does not fit.
        """
        return self.step_s / self.best.prediction.step_s - 1

    @property
    def most_regret(self) -> float:
        """Upper bound of the relative slowdown against any plan there, from the proven bound."""
        return self.step_s / self.best.proof.bound_s - 1

    def __str__(self) -> str:
        peak, budget = size(self.peak_bytes), size(self.budget_bytes)
        hardware = (
            self.hardware
            if self.best.mesh.axes == self.plan.mesh.axes
            else f"{self.hardware} and mesh {self.best.mesh}"
        )
        before, prediction = self.plan.prediction.step_s, self.best.prediction
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
                    f"{self.plan.fingerprint.model_name or 'model'} on mesh {self.plan.mesh}: "
                    f"planned for {self.plan.fingerprint.profile}, evaluated on "
                    f"{' '.join(filter(None, (hardware, self.change)))}"
                ),
                (
                    f"the plan takes {seconds(self.step_s)} per step there ({seconds(before)} on "
                    f"{self.plan.fingerprint.profile}) and "
                    f"{'fits' if self.fits else 'does not fit'}: {peak} of {budget} per device"
                ),
                (
                    f"the plan made for {hardware}{under} takes {seconds(prediction.step_s)} with "
                    f"a peak of {size(prediction.peak_bytes)}"
                ),
                (
                    f"regret {share(self.regret, signed=True)}; at most "
                    f"{share(self.most_regret, signed=True)} against the proven bound"
                ),
                *self.notes,
                *filter(None, (str(self.flips),)),
            )
        )


@named("autopar.what_if", "docs/planning.md")
@takes_options("what_if")
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
    **options: Unpack[WhatIfKeywords],
) -> WhatIf:
    """Return the step time of a plan on other hardware, and the gain of a plan made there or under
    other constraints.

    The plan's layouts, recomputation and collectives are priced again on that hardware. Then the
    model is planned there with the options that the plan records, with the given constraints
    removed or added.

    Args:
        batch: the example inputs that the plan was made with.
        hardware: see `plan`; by default that of the plan.
        mesh: a mesh with other links, axes or axis sizes; by default that of the plan. Axes are
            matched by name. A new axis repeats the same work. A missing axis counts as size 1, so
            tensors split over it are whole. Stages are unchanged, so their axis keeps its size.
            Collectives between the plan's layouts are the cheapest there.
        memory_bytes: budget per device in bytes; by default the plan's if the user set it or the
            hardware is the same, otherwise the memory of the device less 10 %.
        constraints: constraints of the new plan in addition to those of the plan, as in `plan`;
            over the axes of the mesh there.
        without: constraints of the plan to remove: constraints, or texts: ``fsdp`` for all of that
            name, ``num_microbatches``, or one constraint as written, ``pipeline("node")``.
        num_flips: number of choices of the new plan (of each of its stages) with the closest
            runner-ups, for which to find the hardware change that would change them.
        options: how the new plan is searched; `help` lists the options.

    Raises:
        PlanError: if the plan is for another model, or does not apply to that
            mesh: no axis name matches, the axis of the stages has another size, or a microbatch
            cannot be split as in the plan.
        ConstraintError: if a constraint cannot hold there, or the plan has none of the constraints
            to remove.
        InfeasibleError: if no plan fits the other hardware.
    """
    args, kwargs = as_call(batch)
    there = plan.mesh if mesh is None else as_mesh(mesh)
    devices = as_hardware(planned_for(plan) if hardware is None else hardware, there)
    trace = traced_for(plan, model, args, kwargs)
    check_fits(plan, trace, plan.mesh, type(model).__name__)
    new_options = replace(options_of(plan, devices, memory_bytes), **options)
    part, how = planned_part(plan, model, trace, args, kwargs)
    change = change_options(
        new_options,
        (without,) if isinstance(without, str | Constraint) else without,
        as_constraints(constraints),
    )
    if there.axes == plan.mesh.axes:
        peaks = plan.as_pipeline.peaks
        result = TransferredPlan(reprice_plan(plan, part, there, devices, new_options), peaks)
    else:
        outputs = plan.options.get("outputs", "dtensor")
        returned = returned_of(part, how, outputs)
        result = carry_plan(plan, part, there, devices, new_options, _bytes_of(trace), returned)
    peak_bytes, budget_bytes = _tightest(plan, result, devices, new_options)
    new_options = (
        change.options if there.axes == plan.mesh.axes else _elsewhere(plan, there, change.options)
    )
    new_options = replace(new_options, constraints=(*new_options.constraints, *change.more))
    request = PlanRequest(model, there, devices, new_options)
    with shown_progress() as progress:
        best = plan_call(request, args, kwargs, progress=progress)[1].plan
    turning = Flips()
    if num_flips:
        turning = all_flips(
            best,
            planned_part(best, model, trace, args, kwargs)[0],
            there,
            devices,
            new_options,
            most=num_flips,
        )
    return WhatIf(
        plan,
        devices.name,
        result.step_s,
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
    """Return the hardware changes that would change close choices of a plan, the smallest change
    first. `autopar.explain` shows them. The result is a tuple; if it is empty, `why` and its text
    give the reason.

    The chosen strategy of an op and its runner-up are priced again with faster or slower links or
    compute; everything else is as in the plan. A plan made for that hardware may change other
    choices sooner.

    Args:
        batch: the example inputs that the plan was made with.
        most: number of choices to examine, those with the closest runner-ups; per stage if the plan
            has stages.
        hardware: the profile that the plan was made for, if it is not found by name.

    Raises:
        PlanError: if the plan is for another model or profile.
    """
    args, kwargs = as_call(batch)
    devices = of_plan(plan, hardware)
    if devices.hash != plan.fingerprint.profile_hash:
        message = f"the plan was not made for this profile {devices.name}"
        raise PlanError(
            message,
            remedy=(
                "pass the profile that it was made for as hardware=, or call autopar.what_if "
                "with this one"
            ),
        )
    trace = traced_for(plan, model, args, kwargs)
    check_fits(plan, trace, plan.mesh, type(model).__name__)
    part, _ = planned_part(plan, model, trace, args, kwargs)
    return all_flips(plan, part, plan.mesh, devices, options_of(plan, devices, None), most=most)


def _tightest(
    plan: Plan, found: TransferredPlan, devices: Hardware, options: PlanOptions
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
    """Return the options for another mesh, as the user would write them there."""
    axis = plan.stage_axis
    constraints = rewrite_for_mesh(
        options.constraints, plan.mesh.without(axis), mesh.without(axis), axis
    )
    return replace(options, constraints=constraints)
