"""`certify_stage`: derive every claim of a stage's plan, or of a plan without stages, from the
traced model, the plan's mesh and the hardware profile."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.distributed.tensor import Shard

from autopar.capture.trace import Trace
from autopar.certificate.bucket_claims import BucketWalk
from autopar.certificate.decisions import Decisions, crossing_keys
from autopar.certificate.facts import Claims, Context, Facts, Tensor
from autopar.certificate.intra_op import OwnWalk
from autopar.certificate.kernel_claims import KernelWalk
from autopar.certificate.marks import notes
from autopar.certificate.memory_and_time import (
    emission,
    memory,
    overlap,
    seconds_of,
    sum_resting,
    times,
)
from autopar.certificate.multiplier_proof import StoredMultipliers, check_proof
from autopar.certificate.redistributions import MoveWalk, steps_per_step
from autopar.certificate.report import NEAR, Certificate, Finding, list_unverified
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout
from autopar.core.placements import Halo
from autopar.cost.priced import OPTIMIZERS, Priced
from autopar.emit import apply_overlap, emit_stage, least_overlap, simulate_program
from autopar.emit.context import parameter_key, storage_key
from autopar.errors import AutoparError
from autopar.plans import KERNELS_BUFFERS, Entry, Overlap, Plan, beyond_shares_s
from autopar.program.program import StageProgram
from autopar.rules import call_of, is_discovered, is_fallback
from autopar.rules.call import op_name
from autopar.validation.shards import held_bytes

# --------------------------------------------------------------------------------------------------
# The timeline of a plan, derived from the program that is emitted from it.
#
# If communication overlaps compute or shares buckets, the bars of forward and backward are those of
# the simulated program. Bars around them cover what the graphs do not run: inputs, values from
# other stages, the collectives of parameters once per step, and the optimizer. Otherwise the bars
# add up to the times of entries and collectives, and their division among parts of the model is not
# derived.


Bar = tuple[str, str, str, float, float]  # label, phase, kind, start, seconds
_GRAPHS = ("forward", "backward")


def is_simulated(plan: Plan) -> bool:
    """Return whether the timeline of a plan is that of its simulated program."""
    beyond = bool(plan.prediction.beyond_shares_s)
    return plan.overlap.slowdown < 1.0 or bool(plan.buckets) or beyond


def bars(plan: Plan, program: StageProgram, crossing: frozenset[str]) -> Iterator[Finding]:
    """Yield a finding for the first difference between the timeline of a plan and that of its
    program.

    Args:
        plan: the plan whose `prediction.timeline` is checked.
        program: the program, emitted under the overlap of the plan.
        crossing: keys of values that come from, or go to, other stages.
    """
    if not is_simulated(plan):
        return
    derived, claimed_bars = tuple(_derived_bars(plan, program, crossing)), plan.prediction.timeline
    if len(derived) != len(claimed_bars):
        yield Finding("time", f"the timeline has {len(derived)} bars, not {len(claimed_bars)}")
        return
    end_s = max((start_s + time_s for *_, start_s, time_s in derived), default=0.0)
    for bar, claimed in zip(derived, claimed_bars, strict=True):
        difference_s = max(abs(bar[3] - claimed[3]), abs(bar[4] - claimed[4]))
        if bar[:3] != claimed[:3] or difference_s > NEAR * end_s:
            yield Finding("time", f"the timeline has {_shown(bar)}, not {_shown(claimed)}")
            return


def _derived_bars(plan: Plan, program: StageProgram, crossing: frozenset[str]) -> Iterator[Bar]:
    """Yield the bars of the timeline, in order."""
    phases = dict(zip(_GRAPHS, simulate_program(program, plan), strict=True))
    now_s = 0.0
    for phase in (*_GRAPHS, "step"):
        for label, kind, time_s in _outside_of_graph(plan, phase, crossing):
            if time_s > 0.0:
                yield label, phase, kind, now_s, time_s
                now_s += time_s
        if phase == "step":
            return
        lanes: dict[str, list[Bar]] = {"compute": [], "communication": []}
        for key, kind, at_s, time_s in phases[phase].spans:
            _add(lanes[kind], (_layer(key), phase, kind, now_s + at_s, time_s))
        inside = sorted((*lanes["compute"], *lanes["communication"]), key=lambda bar: bar[3])
        yield from inside
        now_s = max([now_s, *(start_s + time_s for *_, start_s, time_s in inside)])
        if phases[phase].missing_s:
            yield "priced, and not run", phase, "compute", now_s, phases[phase].missing_s
            now_s += phases[phase].missing_s


def _outside_of_graph(
    plan: Plan, phase: str, crossing: frozenset[str]
) -> Iterator[tuple[str, str, float]]:
    """Yield (label, kind, seconds) of the parts of a phase that its graph does not run."""
    if phase == "forward":
        yield "inputs", "compute", _sum(plan, "input", crossing, crosses=False)
        yield "from the stage before", "communication", _sum(plan, "input", crossing, crosses=True)
    elif phase == "backward":
        yield "from the stage behind", "communication", _sum(plan, "output", crossing, crosses=True)
    else:
        moves = [c for c in plan.communications if c.phase == "step"]
        moved_s = sum(len(c.instances) * c.time_s for c in moves) + beyond_shares_s(moves)
        saved_s = sum(bucket.saved_s for bucket in plan.buckets if bucket.phase == "step")
        yield "parameters", "communication", moved_s - saved_s
        yield "optimizer", "compute", _sum(plan, "parameter", crossing, crosses=False)


def _sum(plan: Plan, kind: str, crossing: frozenset[str], *, crosses: bool) -> float:
    """Return the seconds of all entries of a kind."""
    entries = (e for e in plan.entries if e.kind == kind and _crosses(e, crossing) == crosses)
    return sum(len(entry.instances) * entry.time_s for entry in entries)


def _crosses(entry: Entry, crossing: frozenset[str]) -> bool:
    return entry.nodes[0].node.format(*entry.instances[0]) in crossing


def _add(lane: list[Bar], bar: Bar) -> None:
    """Add a bar to a lane. Merge it with the previous bar if both belong to the same layer and are
    adjacent."""
    last = lane[-1] if lane else None
    if last and last[:3] == bar[:3] and abs(last[3] + last[4] - bar[3]) <= NEAR * bar[3]:
        lane[-1] = (*last[:4], last[4] + bar[4])
    else:
        lane.append(bar)


def _layer(key: str) -> str:
    """Return the module path of a node up to its first index, or its first two parts if it has no
    index."""
    parts: Sequence[str] = key.partition("/")[0].split(".")
    index = next((place for place, part in enumerate(parts) if part.isdigit()), 1)
    return ".".join(parts[: index + 1])


def _shown(bar: Bar) -> str:
    label, phase, kind, start_s, time_s = bar
    named = f"{kind} of {label or 'the model'} in {phase}"
    return f"{named}, {time_s:.6g} s starting at {start_s:.6g} s"


# --------------------------------------------------------------------------------------------------


# --------------------------------------------------------------------------------------------------
# Layouts must fit their tensors: one placement per mesh axis, and no dim that the tensor does not
# have.


def beyond(facts: Facts, claims: Claims, num_axes: int) -> Iterator[Finding]:
    """Yield a finding for each tensor with a layout that does not fit its shape. No size can be
    derived for such a tensor.

    Args:
        facts: the tensors of the traced model.
        claims: the layouts that the plan claims.
        num_axes: number of axes of the mesh.
    """
    for tensor in facts.tensors.values():
        wrong = sorted(
            {
                str(at)
                for at in _claimed_layouts(tensor, claims)
                if not _fits_shape(at, tensor.shape, num_axes)
            }
        )
        if wrong:
            named = f"{', '.join(wrong)} cannot be {'layouts' if wrong[1:] else 'a layout'}"
            message = f"{named} of a tensor of shape {tensor.shape} on {num_axes} axes"
            yield Finding(
                "layouts",
                message,
                f"{tensor.key}, result {tensor.result}" if tensor.result else tensor.key,
            )


def _claimed_layouts(tensor: Tensor, claims: Claims) -> Iterator[Layout]:
    here = tensor.key, tensor.result
    for strategies in (claims.chosen, claims.recomputed):
        if tensor.key in strategies:
            yield from strategies[tensor.key].outputs[tensor.result : tensor.result + 1]
        for reader in tensor.readers:
            if reader.key in strategies:
                yield from strategies[reader.key].inputs[reader.operand : reader.operand + 1]
    yield from claims.kept.get(here, ())
    for phase in ("forward", "backward", "step"):
        for step in claims.steps.get((here, phase), ()):
            yield from (step.source, step.target)


def _fits_shape(layout: Layout, shape: Sequence[int], num_axes: int) -> bool:
    dims = [placement.dim for placement in layout.placements if isinstance(placement, Shard | Halo)]
    return len(layout.placements) == num_axes and all(0 <= dim < len(shape) for dim in dims)


# --------------------------------------------------------------------------------------------------
# Texts of a plan that its explanations and figures show: decisions, modules, ops, and the bars of
# its timeline.

_FIELD = re.compile(r"\{\d+\}")  # the index of a layer
_OUTSIDE = (
    "",
    "inputs",
    "from the stage before",
    "from the stage behind",
    "parameters",
    "optimizer",
    "priced, and not run",
)
_LANES = ("compute", "communication")
_PHASES = ("forward", "backward", "step")


def words(plan: Plan, trace: Trace, facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each text of a plan that does not follow from the nodes it describes:
    ops, module paths, source lines and rules.

    Args:
        plan: the plan whose texts are checked.
        trace: the traced model.
        facts: the tensors and nodes of `trace`.
    """
    yield from _decisions(plan, facts.nodes)
    for c in plan.communications:
        if c.module != _module(c.node):
            yield Finding(
                "words",
                f"a collective of {_module(c.node) or 'the model'} is attributed to"
                f" {c.module or 'the model'}",
                c.node,
            )
    yield from _bars(plan, trace, facts)


def _decisions(plan: Plan, nodes: Mapping[str, fx.Node]) -> Iterator[Finding]:
    counts: Counter[str] = Counter()
    for entry in plan.entries:
        key = _FIELD.sub("*", entry.nodes[0].node)
        counts[key] += 1
        unique = key if counts[key] == 1 else f"{key} ({counts[key]})"
        figures = {
            "key": unique,
            "module": _module(key),
            "op": key.split("/")[1],
            **_rules(entry, nodes),
        }
        ops, derived_ops = tuple(f.op for f in entry.fallbacks), _ops_without_rule(entry, nodes)
        if ops and ops != derived_ops:  # plans of earlier versions do not list these ops
            yield Finding(
                "words", f"the ops without a rule are {derived_ops}, not {ops}", entry.key
            )
        for name, derived in figures.items():
            if getattr(entry, name) != derived:
                yield Finding(
                    "words", f"its {name} is {derived!r}, not {getattr(entry, name)!r}", entry.key
                )


def _rules(entry: Entry, nodes: Mapping[str, fx.Node]) -> dict[str, object]:
    """Return whether a decision has no rule, and which of its rules were discovered by
    experiment."""
    keys = (choice.node.format(*entry.instances[0]) for choice in entry.nodes)
    calls = [call_of(nodes[key]) for key in keys if key in nodes]
    names = dict.fromkeys(op_name(call.target) for call in calls if is_discovered(call))
    return {"replicated": any(map(is_fallback, calls)), "discovered": tuple(names)}


def _ops_without_rule(entry: Entry, nodes: Mapping[str, fx.Node]) -> tuple[str, ...]:
    keys = (choice.node.format(*entry.instances[0]) for choice in entry.nodes)
    calls = [call_of(nodes[key]) for key in keys if key in nodes]
    return tuple(dict.fromkeys(op_name(call.target) for call in calls if is_fallback(call)))


def _module(pattern: str) -> str:
    return _FIELD.sub("*", pattern.partition("/")[0])


def _bars(plan: Plan, trace: Trace, facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each bar that is not labelled with a part of the model or of its inputs,
    or overlaps the previous bar of its lane."""
    modules = {key.partition("/")[0] for key in facts.keys} | {
        str(node.meta.get("module", "")) for node in trace.graph.nodes
    }
    known = {
        *_OUTSIDE,
        *(
            ".".join(parts[:n])
            for parts in (m.split(".") for m in modules)
            for n in range(len(parts) + 1)
        ),
    }
    ends = dict.fromkeys(_LANES, 0.0)
    for label, phase, kind, start_s, duration_s in plan.prediction.timeline:
        bar = f"{kind} of {label or 'the model'} in {phase} on the timeline"
        if label not in known or kind not in _LANES or phase not in _PHASES:
            yield Finding("words", f"the plan has no {bar}")
        elif duration_s < 0.0 or start_s < ends[kind] * (1.0 - NEAR):
            yield Finding("words", f"{bar} starts at {start_s:.6g} s, before the previous bar ends")
        else:
            ends[kind] = start_s + duration_s


# --------------------------------------------------------------------------------------------------
# Host memory: the sum over the parameters, optimizer state and saved values that are stored there.


def on_hosts(
    trace: Trace, facts: Facts, claims: Claims, plan: Plan, context: Context
) -> dict[str, int]:
    """Return the bytes that a plan stores in host memory, per device.

    Args:
        trace: the traced model or stage.
        facts: the tensors of `trace`.
        claims: the layouts that the plan claims.
        plan: the plan; its mesh and optimizer are read.
        context: context of the stage; a saved value counts once for each microbatch in flight.

    Returns:
        Kind of memory → bytes.
    """
    state, _ = OPTIMIZERS[str(plan.options.get("optimizer"))]
    sizes = dict.fromkeys(("parameters", "optimizer", "gradients", "copies", "activations"), 0)
    for p in trace.parameters:
        rests = claims.chosen.get(
            storage_key(p.name), claims.chosen[parameter_key(p.name)]
        ).outputs[0]
        if rests.host:
            wide = torch.float32 if context.accumulates and p.dtype.itemsize < 4 else p.dtype
            size = held_bytes(p.view, p.dtype, rests, plan.mesh.shape)
            sizes["parameters"] += size
            sizes["optimizer"] += state * size if p.gradient is not None else 0
            sizes["gradients"] += (
                held_bytes(p.view, wide, rests, plan.mesh.shape) if p.gradient is not None else 0
            )
            sizes["copies"] += (
                held_bytes(p.view, p.compute_dtype, rests, plan.mesh.shape)
                if p.compute_dtype != p.dtype
                else 0
            )
    for ref, layouts in claims.kept.items():
        tensor = facts.tensors[ref]
        produced = claims.chosen[tensor.key].outputs[tensor.result]
        stored = [at for at in layouts if at.host and not produced.host]
        size = sum(held_bytes(tensor.shape, tensor.dtype, at, plan.mesh.shape) for at in stored)
        sizes["activations"] += size * context.num_in_flight
    return {kind: size for kind, size in sizes.items() if size}


def host_memory(plan: Plan, derived: Mapping[str, int], budget_bytes: int) -> Iterator[Finding]:
    """Yield a finding for each claim about host memory that does not hold.

    Args:
        plan: the plan whose host memory is checked.
        derived: bytes by kind, as `on_hosts` derives them.
        budget_bytes: host memory per device.
    """
    claimed = plan.prediction.host_bytes
    for kind in sorted({*derived, *claimed}):
        if derived.get(kind) != claimed.get(kind):
            yield Finding(
                "memory",
                f"host memory for {kind}: {derived.get(kind, 0)} bytes, not {claimed.get(kind, 0)}",
            )
    if sum(derived.values()) > budget_bytes:
        yield Finding(
            "memory",
            f"host memory is {sum(derived.values())} bytes, over the budget of {budget_bytes}",
        )


def initial_certificate(plan: Plan, findings: Iterable[Finding]) -> Certificate:
    """Return a certificate with the claims of a plan.

    Args:
        plan: the plan, or the plan of a stage.
        findings: findings about its fingerprint and options. If there are any, nothing else is
            checked.
    """
    num = len(plan.stages)
    parts = f" in {num} stages" if num > 1 else f" ({plan.mesh.num_devices} devices)"
    return Certificate(
        f"{plan.fingerprint.model_name or 'model'} on mesh {plan.mesh}{parts},"
        f" {plan.fingerprint.profile}",
        tuple(findings),
        tuple(notes(plan)),
        claimed_step_s=plan.prediction.step_s,
        claimed_peak_bytes=plan.prediction.peak_bytes,
        budget_bytes=int(plan.options.get("memory_bytes", 0)),
        objective_s=plan.proof.objective_s,
        claimed_bound_s=plan.proof.bound_s,
        unverified=list_unverified(
            plan, but=("prediction.timeline",) if all(map(is_simulated, plan.stages)) else ()
        ),
    )


def certify_stage(
    report: Certificate,
    trace: Trace,
    plan: Plan,
    profile: HardwareProfile,
    context: Context,
) -> Certificate:
    """Check every claim of a stage's plan.

    Claims on which other claims depend are checked first. If one of them fails, the dependent
    claims are not checked.

    Args:
        report: the certificate that `initial_certificate` returned.
        trace: the trace of the stage.
        plan: the plan of the stage.
        profile: the profile of its devices.
        context: the context of the stage.
    """
    if not report.ok:
        return report
    try:
        priced = context.problem(trace, plan, profile)
    except AutoparError as error:
        return replace(
            report, findings=(Finding("layouts", f"the problem cannot be stated: {error.what}"),)
        )
    facts = Facts.of(trace, accumulates=context.accumulates)
    return _StageCheck(trace, plan, profile, context, priced, facts, Claims.of(plan)).certificate(
        report
    )


@dataclass
class _StageCheck:
    """The certification of one stage."""

    trace: Trace
    plan: Plan
    profile: HardwareProfile
    context: Context
    priced: Priced
    facts: Facts
    claims: Claims

    def certificate(self, report: Certificate) -> Certificate:
        """Return the report with everything that can be derived."""
        plan = self.plan
        stored = StoredMultipliers(self.trace, plan, self.priced, self.facts)
        bound_s = stored.bound_s()
        findings = [*stored.findings, *check_proof(plan.proof, bound_s)]
        report = replace(
            report,
            certified_bound_s=bound_s,
            num_multipliers=stored.num_multipliers,
            num_decisions=len(plan.entries),
            num_nodes=len(self.facts.keys),
            num_steps=len(plan.steps()),
        )
        decisions = Decisions(
            plan, self.trace, self.facts, self.priced, plan.mesh, self.profile, self.context
        )
        rests = (
            frozenset(storage_key(p.name) for p in self.trace.parameters)
            if self.context.accumulates
            else frozenset[str]()
        )
        recomputable = frozenset(
            n for n, op in enumerate(self.priced.problem.ops) if op.recomputable
        )
        walk = MoveWalk(
            self.facts,
            self.claims,
            plan.mesh,
            self.profile,
            decisions.owner,
            recomputable,
            rests,
            self.context.num_microbatches,
        )
        strangers = [
            *decisions.strangers(),
            *walk.strangers(),
            *beyond(self.facts, self.claims, len(plan.mesh.axes)),
        ]
        if strangers:
            return replace(report, findings=(*strangers, *findings))
        once = steps_per_step(self.trace, walk, self.claims) if self.context.accumulates else ()
        kernels = KernelWalk(self.facts, self.claims, plan.mesh, self.profile)
        inner_walk = OwnWalk(self.facts, self.claims, plan.mesh, self.profile)
        shared = BucketWalk(
            self.trace, plan, self.facts, self.claims, self.profile, self.context.num_microbatches
        )
        findings = [
            *decisions.findings(),
            *walk.findings(),
            *inner_walk.findings(),
            *kernels.findings(),
            *shared.findings(),
            *once,
            *findings,
        ]
        findings += words(plan, self.trace, self.facts)
        if not any(f.claim == "layouts" for f in findings):
            seconds = seconds_of(plan, decisions, self.profile.overlap_slowdown)
            report = replace(report, step_s=seconds.step_s)
            findings += times(plan, seconds)
        return self._check_program(
            report, findings, sum((*kernels.shared.values(), *inner_walk.shared.values()))
        )

    def _check_program(
        self, report: Certificate, findings: list[Finding], shared_bytes: int
    ) -> Certificate:
        """Add the figures and findings that follow from the emitted program.

        `shared_bytes` is the memory that kernels share with their peers on a device.
        """
        try:
            serial = emit_stage(
                self.trace,
                replace(self.plan, overlap=Overlap()),
                accumulates=self.context.accumulates,
            )
            program, overlapped = (
                apply_overlap(serial, self.plan)[0],
                least_overlap(serial, self.plan),
            )
            findings += emission(self.plan, self.claims, program)
            findings += overlap(self.plan, program, overlapped, self.profile.overlap_slowdown)
            findings += bars(self.plan, program, crossing_keys(self.trace))
            sizes = sum_resting(
                self.trace, self.facts, self.claims, self.plan, accumulates=self.context.accumulates
            )
            sizes |= {KERNELS_BUFFERS: shared_bytes} if shared_bytes else {}
            peak, wrong = memory(self.plan, program, self.facts, sizes, self.context)
        except AutoparError as error:
            place = "" if error.where is None else str(error.where)
            return replace(report, findings=(*findings, Finding("emission", error.what, place)))
        on_host = on_hosts(self.trace, self.facts, self.claims, self.plan, self.context)
        wrong += host_memory(self.plan, on_host, self.priced.problem.host_budget_bytes)
        if peak > self.profile.device_memory_bytes:
            message = (
                f"the peak of {peak} bytes is over the device's memory of"
                f" {self.profile.device_memory_bytes}"
            )
            wrong.append(Finding("memory", message))
        return replace(report, findings=(*findings, *wrong), peak_bytes=peak)
