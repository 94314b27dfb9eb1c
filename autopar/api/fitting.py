"""Whether a plan is for the model, batch and mesh at hand, and what differs where it is not."""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterator

import torch

from autopar.capture import Trace
from autopar.errors import PlanError
from autopar.mesh import Mesh
from autopar.plans import Plan

log = logging.getLogger("autopar")
_SHOWN = 3  # of what is in one of both alone
_INDEX = re.compile(r"(?<![^.])\d+(?=[./]|$)")  # of a repeated module, in a path


def check_fits(plan: Plan, trace: Trace, mesh: Mesh, name: str = "") -> None:
    """That a plan is for this model and mesh; `name` is that of the model's class, for the refusal.

    Raises:
        PlanError: saying what differs, a line each.
    """
    differs = list(_differences(plan, trace, mesh, name))
    if plan.fingerprint.torch != torch.__version__.split("+")[0]:
        log.warning("plan made with torch %s, this is %s: entries are matched by key", plan.fingerprint.torch, torch.__version__)
    if differs:
        alone = mesh.num_devices == 1 < plan.mesh.num_devices
        start = f"start the script with: autopar run -n {plan.mesh.num_devices} SCRIPT; or " if alone else ""
        what = "\n    ".join(("the plan was made for something else:", *differs))
        raise PlanError(what, remedy=f"{start}plan again, or pass the plan of this model and mesh")


def _differences(plan: Plan, trace: Trace, mesh: Mesh, name: str) -> Iterator[str]:
    """A line each."""
    if plan.mesh.shape != mesh.shape or plan.mesh.names != mesh.names:
        yield f"mesh: the plan is for {plan.mesh}, this is {mesh}"
    if plan.fingerprint.model != trace.fingerprint:
        if name and plan.fingerprint.model_name not in ("", name):
            yield f"model: the plan is for a {plan.fingerprint.model_name}, this is a {name}"
        other = plan.fingerprint.other_batch(trace.batch_in_words)
        named = [*([other] if other else []), *_asked(plan, trace), *_of_model(plan, trace)]
        yield from named or ["model: names agree, but shapes, dtypes or arguments of ops differ"]


def _of_model(plan: Plan, trace: Trace) -> Iterator[str]:
    """Parameters and ops that only one of both has."""
    plans = plan.pipeline.stages if plan.pipeline else (plan,)
    planned = {key.removesuffix("/parameter") for p in plans for key in p.node_choices() if key.endswith("/parameter")}
    here = {p.name for p in trace.parameters}
    nodes = {n.meta["key"] for n in trace.graph.nodes if n.op == "call_function"}
    entries = {c.node.format(*i) for p in plans for e in p.entries if e.kind == "compute" for c in e.nodes for i in e.instances}
    for kind, in_plan, in_model in (("parameter", planned, here), ("op", entries, nodes)):
        for place, names in (("in the plan, not in the model", in_plan - in_model), ("in the model, not in the plan", in_model - in_plan)):
            if names:
                yield f"{len(names)} {kind}{'s' if len(names) > 1 else ''} {place}: {_first(names)}"


def _first(names: Collection[str]) -> str:
    """Some of the names, those of repeated modules as one, and how many there are beside them."""
    alike: dict[str, list[str]] = {}
    for name in sorted(names):
        path, slash, rest = name.partition("/")
        alike.setdefault(f"{_INDEX.sub('*', path)}{slash}{rest}", []).append(name)
    told = [f"{pattern} ({len(found)} of them)" if len(found) > 1 else found[0] for pattern, found in list(alike.items())[:_SHOWN]]
    num_more = sum(len(found) for found in list(alike.values())[_SHOWN:])
    return f"{', '.join(told)}{f' and {num_more} more' if num_more else ''}"


def _asked(plan: Plan, trace: Trace) -> Iterator[str]:
    """Inputs that have a gradient in one of the two; none has in stages and microbatches."""
    chosen = () if plan.pipeline else [c for e in plan.entries if e.kind == "input" for c in e.nodes]
    planned = {c.node.removesuffix("/input") for c in chosen if c.strategy.inputs}
    here = {i.path for i in trace.given_back}
    yield from (f"input {path} has a gradient in the plan, and requires none" for path in sorted(planned - here))
    yield from (f"input {path} requires a gradient, which the plan does not give" for path in sorted(here - planned))
