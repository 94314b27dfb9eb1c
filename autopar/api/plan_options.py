"""Read the options of a plan back from it, and check that it fits a model."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from autopar.capture import Trace
from autopar.constraints import read_constraint
from autopar.core.hardware import Hardware, HardwareProfile, Mixed, profile_of
from autopar.core.mesh import Mesh
from autopar.errors import PlanError
from autopar.plans import Plan
from autopar.request import OPTIONS, PlanOptions


def options_of(plan: Plan, hardware: Hardware, memory_bytes: int | None) -> PlanOptions:
    """Return the options that a plan was made with, for some hardware.

    Args:
        memory_bytes: another budget in bytes. By default the plan's if the user set it or the
            hardware is the same, otherwise the hardware's.

    Raises:
        ConstraintError: if a constraint cannot be read.
    """
    options = recorded_options(plan)
    return replace(
        options,
        memory_bytes=memory_bytes
        or (options.memory_bytes if _is_requested(plan, hardware) else None),
    )


def recorded_options(plan: Plan) -> PlanOptions:
    """Return the options of a plan on the hardware that it was made for, with its budget.

    If the devices of the stages have separate budgets, the options have none.
    """
    known: Mapping[str, Any] = {"outputs": "dtensor", **plan.options}
    settings = {
        name: known[name]
        for name, option in OPTIONS.items()
        if option.is_recorded and name in known
    }
    rank_budgets = plan.as_pipeline.rank_budgets
    settings["memory_bytes"] = None if rank_budgets else known.get("memory_bytes")
    return PlanOptions(
        **{
            **settings,
            "constraints": tuple(read_constraint(c) for c in known.get("constraints", ())),
        }
    )


def _is_requested(plan: Plan, hardware: Hardware) -> bool:
    """Return whether the plan's budget applies: the hardware is the same, or the budget is not the
    default of the plan's hardware.
    """
    mark = plan.fingerprint
    if mark.profile_hash == hardware.hash:
        return True
    named = [name for name, _ in mark.profiles] or [mark.profile]
    if not set(named) <= set(HardwareProfile.names()):
        return False
    profiles = tuple(map(HardwareProfile.load, named))
    recorded: Hardware = Mixed(mark.axis, profiles) if mark.axis else profiles[0]
    if mark.profile_hash != recorded.hash:
        return False
    budgets = (
        PlanOptions().budget(profile_of(recorded, plan.stage_axis, rank))
        for rank in range(len(profiles))
    )
    return plan.options.get("memory_bytes") not in set(budgets)


# --------------------------------------------------------------------------------------------------
# Check that a plan fits a model, batch and mesh, and list the differences.

log = logging.getLogger("autopar")
_SHOWN = 3  # names that only the plan or only the model has
_INDEX = re.compile(r"(?<![^.])\d+(?=[./]|$)")  # index of a repeated module in a path


def check_fits(plan: Plan, trace: Trace, mesh: Mesh, name: str = "") -> None:
    """Check that a plan fits this model and mesh.

    Args:
        plan: the plan to check.
        trace: the captured call of the model.
        mesh: the mesh to run on.
        name: name of the model's class, for the error text.

    Raises:
        PlanError: with one line per difference.
    """
    differs = list(_differences(plan, trace, mesh, name))
    if plan.fingerprint.torch != torch.__version__.split("+")[0]:
        log.warning(
            "the plan was made with torch %s, this is torch %s: entries are matched by key",
            plan.fingerprint.torch,
            torch.__version__,
        )
    if differs:
        alone = mesh.num_devices == 1 < plan.mesh.num_devices
        start = (
            f"start the script with `autopar run -n {plan.mesh.num_devices} SCRIPT`, or "
            if alone
            else ""
        )
        message = "\n    ".join(("the plan does not fit this call:", *differs))
        raise PlanError(
            message, remedy=f"{start}plan again, or pass the plan of this model and mesh"
        )


def _differences(plan: Plan, trace: Trace, mesh: Mesh, name: str) -> Iterator[str]:
    """Yield one line per difference."""
    if plan.mesh.shape != mesh.shape or plan.mesh.names != mesh.names:
        yield f"mesh: the plan is for {plan.mesh}, but the mesh is {mesh}"
    if plan.fingerprint.model != trace.fingerprint:
        if name and plan.fingerprint.model_name not in ("", name):
            yield f"model: the plan is for {plan.fingerprint.model_name}, but the model is {name}"
        other = plan.fingerprint.other_batch(trace.batch_in_words)
        named = [
            *([other] if other else []),
            *_gradient_differences(plan, trace),
            *_of_model(plan, trace),
        ]
        yield from named or [
            "model: the names agree, but shapes, dtypes or arguments of ops differ"
        ]


def _of_model(plan: Plan, trace: Trace) -> Iterator[str]:
    """Yield the parameters and ops that only one of plan and model has."""
    planned = {
        key.removesuffix("/parameter")
        for p in plan.stages
        for key in p.node_choices()
        if key.endswith("/parameter")
    }
    here = {p.name for p in trace.parameters}
    nodes = {n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
    entries = {
        c.node.format(*i)
        for p in plan.stages
        for e in p.entries
        if e.kind == "compute"
        for c in e.nodes
        for i in e.instances
    }
    for kind, in_plan, in_model in (("parameter", planned, here), ("op", entries, nodes)):
        for place, names in (
            ("in the plan, not in the model", in_plan - in_model),
            ("in the model, not in the plan", in_model - in_plan),
        ):
            if names:
                yield f"{len(names)} {kind}{'s' if len(names) > 1 else ''} {place}: {_first(names)}"


def _first(names: Collection[str]) -> str:
    """Return some of the names, with equal names of repeated modules merged, and the number of the
    others.
    """
    names_by_pattern: dict[str, list[str]] = {}
    for name in sorted(names):
        path, slash, rest = name.partition("/")
        names_by_pattern.setdefault(f"{_INDEX.sub('*', path)}{slash}{rest}", []).append(name)
    texts = [
        f"{pattern} ({len(found)} times)" if len(found) > 1 else found[0]
        for pattern, found in list(names_by_pattern.items())[:_SHOWN]
    ]
    num_more = sum(len(found) for found in list(names_by_pattern.values())[_SHOWN:])
    return f"{', '.join(texts)}{f' and {num_more} more' if num_more else ''}"


def _gradient_differences(plan: Plan, trace: Trace) -> Iterator[str]:
    """Yield the inputs that have a gradient in only one of plan and call. With stages or
    microbatches, no input has a gradient.
    """
    chosen = (c for e in plan.entries if e.kind == "input" for c in e.nodes)
    planned = {c.node.removesuffix("/input") for c in chosen if c.strategy.inputs}
    here = {i.path for i in trace.given_back}
    yield from (
        f"input {path} has a gradient in the plan, but does not require one"
        for path in sorted(planned - here)
    )
    yield from (
        f"input {path} requires a gradient, but has none in the plan"
        for path in sorted(here - planned)
    )
