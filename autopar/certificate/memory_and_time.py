"""Memory and time as the sums over entries and collectives."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.capture.trace import Parameter, Trace
from autopar.certificate.bucket_claims import count_issued
from autopar.certificate.decisions import Decisions
from autopar.certificate.facts import Claims, Context, Facts
from autopar.certificate.report import Finding, near
from autopar.core.collective import HOST_KINDS
from autopar.cost.priced import OPTIMIZERS
from autopar.emit import simulate_program
from autopar.emit.context import buffer_key, input_key, parameter_key, storage_key
from autopar.kernels import collectives as kernels
from autopar.kernels import dispatched, fused
from autopar.plans import KERNELS_BUFFERS, RESTING, Kept, Overlap, Plan, beyond_shares_s
from autopar.program.peak_memory import trace_peak
from autopar.program.program import StageProgram
from autopar.program.stage_memory import chunk_memory, rank_peak, trace_stage_peak
from autopar.validation.shards import held_bytes

_CALLS: dict[Any, str] = {
    kernels.all_gather: "all_gather",
    kernels.reduce_scatter: "reduce_scatter",
    kernels.all_reduce: "all_reduce",
    kernels.all_to_all: "all_to_all",
    kernels.swap: "swap",
    kernels.halo: "halo",
    kernels.shard: "slice",
    kernels.fetch: "fetch",
    kernels.store: "store",
    **fused.KERNELS,
}


def emission(plan: Plan, claims: Claims, program: StageProgram) -> Iterator[Finding]:
    """Yield a finding for each difference between the collectives of the emitted graphs and those
    of the plan: number and bytes by phase, kind and axis.

    Args:
        plan: the plan that lists collectives.
        claims: the claims of the same plan about each tensor.
        program: the program emitted from the plan.
    """
    both = count_issued(plan, claims)
    listed = Counter({where: num for where, (num, _) in both.items()})
    sizes = Counter({where: size for where, (_, size) in both.items()})
    graphs = [
        ("forward", program.forward),
        ("backward", program.backward),
        ("step", program.begin),
        ("step", program.end),
    ]
    for phase, module in graphs:
        for node in module.graph.nodes if module is not None else ():
            if (node.target in dispatched.TOGETHER) != bool(node.meta.get("own")):
                yield Finding(
                    "emission",
                    f"it does not run in {phase}, but the plan has its communication there",
                    node.meta["key"],
                )
            for kind, axis, num_bytes in _read_collectives(node):
                listed[phase, kind, axis] -= 1
                sizes[phase, kind, axis] -= num_bytes
    for key in sorted(where for where in sizes if listed[where] or sizes[where]):
        phase, kind, axis = key
        along = f" along axis {plan.mesh.names[axis]}" if axis >= 0 else ""
        amount = f"{abs(listed[key])} {kind} ({abs(sizes[key])} bytes) in {phase}{along}"
        more = (listed[key], sizes[key]) > (0, 0)
        excess = (
            "the plan lists, but the program does not run"
            if more
            else "the program runs, but the plan does not list"
        )
        yield Finding("emission", f"{amount} {excess}")


def _read_collectives(node: fx.Node) -> Iterator[tuple[str, int, int]]:
    """Yield kind, mesh axis and bytes of each collective that an emitted node issues; the axis is
    −1 between host and device."""
    for inner_step in node.meta.get("own", ()):
        yield inner_step.collective.kind, inner_step.collective.axis, inner_step.collective.bytes
    kind = _kind_of(node)
    if node.target in fused.KERNELS and kind:
        inside = node.meta["kernel"].collective
        yield kind, inside.axis, inside.bytes
    elif kind:
        axis = -1 if kind in HOST_KINDS else int(kernels.positional(node)[-1])
        yield kind, axis, node.meta["collective"].bytes


def _kind_of(node: fx.Node) -> str:
    """Return the kind of collective that a node issues by a kernel; ``""`` if it issues none."""
    if node.op != "call_function":
        return ""
    return str(node.args[1]) if node.target is kernels.start else _CALLS.get(node.target, "")


def overlap(plan: Plan, program: StageProgram, held: Overlap, slowdown: float) -> Iterator[Finding]:
    """Yield a finding for each wrong claim about overlap of communication and compute.

    Args:
        plan: the plan whose overlap and timeline are checked.
        program: the program emitted under `plan.overlap`.
        held: the largest bytes that its early collectives hold.
        slowdown: the slowdown in the hardware profile.
    """
    if plan.overlap.slowdown != slowdown:
        yield Finding(
            "overlap",
            f"a hidden second costs compute {slowdown} s on this hardware, not"
            f" {plan.overlap.slowdown} s",
        )
    if held != plan.overlap:
        claimed_bytes, bytes_held = (
            (o.forward_bytes, o.backward_bytes) for o in (plan.overlap, held)
        )
        yield Finding(
            "overlap",
            (
                f"early collectives hold at most {bytes_held} bytes in forward and backward, not "
                f"{claimed_bytes}"
            ),
        )
    hidden_s = (
        sum(phase.hidden_s for phase in simulate_program(program, plan))
        if plan.overlap.slowdown < 1.0
        else 0.0
    )
    predicted = plan.prediction
    saved_s = (
        predicted.in_kernels_s
        + sum(bucket.saved_s for bucket in plan.buckets)
        + (1.0 - plan.overlap.slowdown) * hidden_s
    )
    step = (
        predicted.compute_s
        + predicted.communication_s
        + beyond_shares_s(plan.communications)
        - saved_s
    )
    for name, derived, claimed in (
        ("hides", hidden_s, plan.prediction.hidden_s),
        ("takes", step, plan.prediction.simulated_s),
    ):
        if not near(derived, claimed):
            yield Finding(
                "overlap", f"simulated, the step {name} {derived:.9g} s, not {claimed:.9g} s"
            )


def sum_resting(
    trace: Trace, facts: Facts, claims: Claims, plan: Plan, *, accumulates: bool
) -> dict[str, int]:
    """Return the bytes stored on a device by kind, from layouts alone.

    Args:
        trace: the trace of the model, or of the stage.
        facts: its tensors.
        claims: the plan's layouts.
        plan: its mesh and optimizer are read.
        accumulates: whether a step has several microbatches, whose gradients are accumulated.

    Returns:
        Bytes by kind; "copies" only if parameters are also held in another dtype or layout.
    """
    sizes = Counter(
        dict.fromkeys(
            ("parameters", "optimizer", "buffers", "inputs", "gradients", "activations"), 0
        )
    )
    tensors = [("buffers", b.view, b.dtype, buffer_key(b.name)) for b in trace.buffers]
    tensors += [
        ("inputs", i.shape, i.dtype, input_key(i.path)) for i in trace.inputs if not i.crosses
    ]
    for kind, shape, dtype, key in tensors:
        sizes[kind] += held_bytes(shape, dtype, claims.chosen[key].outputs[0], plan.mesh.shape)
    for p in trace.parameters:
        for kind, num_bytes in _measure_parameter(p, claims, plan, accumulates=accumulates):
            sizes[kind] += num_bytes
    for ref, layouts in claims.kept.items():
        tensor = facts.tensors[ref]
        free = claims.chosen[tensor.key].outputs[tensor.result] if tensor.resident else None
        here = [at for at in layouts if at != free and not at.host]
        sizes["activations"] += sum(
            held_bytes(tensor.shape, tensor.dtype, at, plan.mesh.shape) for at in here
        )
    return {kind: num_bytes for kind, num_bytes in sizes.items() if num_bytes or kind != "copies"}


def _measure_parameter(
    p: Parameter, claims: Claims, plan: Plan, *, accumulates: bool
) -> Iterator[tuple[str, int]]:
    """Yield the bytes of a parameter on a device by kind, without host memory.

    A stored parameter of P bytes takes P bytes; a copy if ops read it in another layout or, with
    several microbatches, in another dtype; and, if it is trained, its gradient (accumulated over
    microbatches in at least fp32) and the state of the optimizer, a multiple of P.
    """
    sizes, state = plan.mesh.shape, OPTIMIZERS[str(plan.options.get("optimizer"))][0]
    strategy = claims.chosen[parameter_key(p.name)]
    rests = claims.chosen.get(storage_key(p.name), strategy).outputs[0]
    at_rest = 0 if rests.host else held_bytes(p.view, p.dtype, rests, sizes)
    yield "parameters", at_rest
    is_copied = (accumulates and p.compute_dtype != p.dtype) or strategy.outputs[0] != rests
    if is_copied and not strategy.outputs[0].host:
        yield "copies", held_bytes(p.view, p.compute_dtype, strategy.outputs[0], sizes)
    if p.gradient is not None:
        wide = torch.float32 if accumulates and p.dtype.itemsize < 4 else p.dtype
        yield (
            "gradients",
            0 if strategy.inputs[0].host else held_bytes(p.view, wide, strategy.inputs[0], sizes),
        )
        yield "optimizer", state * at_rest


def _check_kept(kept: Kept, plan: Plan, facts: Facts) -> Iterator[Finding]:
    """Yield a finding for each wrong claim about a kept value: its instances, its bytes, and
    whether it is a parameter's copy in another dtype."""
    if not kept.instances:
        yield Finding("kept values", "it has no tensors", kept.node)
        return
    tensor = facts.tensors[kept.node.format(*kept.instances[0]), kept.result]
    if kept.is_copy != (tensor.given and not tensor.resident):
        message = "is not" if kept.is_copy else "is"
        message = f"it {message} a parameter's copy in another dtype, contrary to the plan"
        yield Finding("kept values", message, kept.node)
    derived = sum(
        held_bytes(tensor.shape, tensor.dtype, at, plan.mesh.shape)
        for at in kept.layouts
        if not at.host
    )
    if derived != kept.bytes:
        message = f"one instance holds {derived} bytes, not {kept.bytes}"
        yield Finding("kept values", message, kept.node)


def memory(
    plan: Plan, program: StageProgram, facts: Facts, sizes: Mapping[str, int], context: Context
) -> tuple[int, list[Finding]]:
    """Derive the peak of memory, and the findings about memory.

    Args:
        plan: the plan whose memory is checked.
        program: the program emitted from it.
        facts: the tensors of the traced model.
        sizes: bytes stored on a device, by kind.
        context: the context of the plan or the stage.

    Returns:
        The peak in bytes on a device, including stored tensors, and the findings.
    """
    findings = [finding for k in plan.kept for finding in _check_kept(k, plan, facts)]
    peak, budget = (
        _peak(plan, program, context) + sizes["optimizer"] + sizes.get(KERNELS_BUFFERS, 0),
        plan.options.get("memory_bytes"),
    )
    static = sum(sizes.get(kind, 0) for kind in RESTING)
    expected = {
        **sizes,
        "transient": max(peak - static - max(sizes["activations"], sizes["gradients"]), 0),
    }
    claimed = plan.prediction
    for kind in sorted({*expected, *claimed.memory_bytes}):
        if expected.get(kind) != claimed.memory_bytes.get(kind):
            findings.append(
                Finding(
                    "memory",
                    f"{kind}: {expected.get(kind, 0)} bytes, not {claimed.memory_bytes.get(kind)}",
                )
            )
    if peak != claimed.peak_bytes:
        findings.append(Finding("memory", f"the peak is {peak} bytes, not {claimed.peak_bytes}"))
    if not isinstance(budget, int):
        findings.append(Finding("memory", "the plan records no budget"))
    elif peak > budget:
        findings.append(
            Finding("memory", f"the peak of {peak} bytes is over the budget of {budget}")
        )
    return peak, findings


def _peak(plan: Plan, program: StageProgram, context: Context) -> int:
    """Return the peak of a step of the program, in bytes."""
    outputs = plan.options.get("outputs", "dtensor")
    if not context.schedule:
        return trace_peak(
            program, batch=plan.options.get("batch", "global"), outputs=outputs
        ).peak_bytes
    if context.actions:
        chunk = {context.stage: chunk_memory(program, outputs)}
        return rank_peak(chunk, context.actions, context.num_microbatches) + context.batch_bytes
    stage = trace_stage_peak(
        program,
        context.schedule,
        context.num_in_flight,
        context.num_microbatches,
        outputs,
        context.returned,
    )
    return stage.peak_bytes + context.batch_bytes


@dataclass(frozen=True, slots=True)
class Seconds:
    """The seconds of a step: compute, communication, the lower bound of both together, and the
    savings of kernels."""

    compute_s: float
    communication_s: float
    step_s: float
    in_kernels_s: float


def seconds_of(plan: Plan, decisions: Decisions, slowdown: float) -> Seconds:
    """Return the seconds of a step, from entries, collectives and values that cross between stages.

    A phase takes max(C + s·P, P) + K. C is compute and slices, minus the savings of kernels. P is
    the communication that counts as overlapped. K is all other time, which overlaps with nothing.
    Collectives count with their claimed times, which are checked elsewhere.

    Args:
        plan: its entries and collectives are summed.
        decisions: derives the seconds of each entry.
        slowdown: s, from the hardware profile.
    """
    compute, communication, saved = 0.0, 0.0, 0.0
    overlapped, sent = (
        dict.fromkeys(("forward", "backward"), 0.0),
        dict.fromkeys(("forward", "backward"), 0.0),
    )
    for entry in plan.entries:
        for choices, phase in ((entry.nodes, entry.phase), (entry.recompute, "backward")):
            time_s = len(entry.instances) * decisions.time_s(entry, choices) if choices else 0.0
            if decisions.crosses(entry):
                communication += time_s
            else:
                compute += time_s
            overlapped[phase] += time_s if entry.kind == "compute" else 0.0
    for c in plan.communications:
        time_s = len(c.instances) * c.time_s
        communication += time_s
        if c.phase in overlapped:
            overlapped[c.phase] += time_s if c.collective.kind == "slice" else 0.0
            in_kernel = len(c.instances) * c.kernel.saved_s if c.kernel else 0.0
            overlapped[c.phase] -= in_kernel
            saved += in_kernel
            sent[c.phase] += time_s if c.beside else 0.0
    alone = compute + communication - saved - sum(overlapped.values()) - sum(sent.values())
    return Seconds(
        compute,
        communication,
        alone + sum(max(overlapped[p] + slowdown * sent[p], sent[p]) for p in overlapped),
        saved,
    )


def times(plan: Plan, found: Seconds) -> Iterator[Finding]:
    """Yield a finding for each predicted or proven time that differs from the sums."""
    claimed, compute_s, communication_s, step = (
        plan.prediction,
        found.compute_s,
        found.communication_s,
        found.step_s,
    )
    figures = [
        ("compute", compute_s, claimed.compute_s),
        ("communication", communication_s, claimed.communication_s),
        ("what kernels save", found.in_kernels_s, claimed.in_kernels_s),
        (
            "time in addition to shares of buckets",
            beyond_shares_s(plan.communications),
            claimed.beyond_shares_s,
        ),
        ("the step", step, claimed.step_s),
        ("the objective", step, plan.proof.objective_s),
        *_bars(plan, compute_s, communication_s),
    ]
    for name, derived, figure in figures:
        if not near(derived, figure):
            yield Finding("time", f"{name} takes {derived:.9g} s, not {figure:.9g} s")


def _bars(
    plan: Plan, compute_s: float, communication_s: float
) -> Iterator[tuple[str, float, float]]:
    claimed = plan.prediction
    beyond_s = beyond_shares_s(plan.communications)
    # in the simulation, hidden seconds stretch compute, and local slices count as compute
    if plan.overlap.slowdown < 1.0 or plan.buckets or beyond_s:
        moved = [
            c for c in plan.communications if c.phase != "step"
        ]  # the graphs do not include the work once per step
        local_s = sum(len(c.instances) * c.time_s for c in moved if c.collective.kind == "slice")
        saved_s = sum(bucket.saved_s for bucket in plan.buckets)  # of communication
        compute_s += (
            local_s + claimed.simulated_s - claimed.serial_s - beyond_s + claimed.hidden_s + saved_s
        )
        communication_s += beyond_s - local_s - saved_s
    for kind, derived in (("compute", compute_s), ("communication", communication_s)):
        yield (
            f"{kind} on the timeline",
            derived,
            sum(bar[4] for bar in claimed.timeline if bar[2] == kind),
        )
