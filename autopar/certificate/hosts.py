"""The host's memory, summed up anew from what rests and what is kept there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from autopar.capture.trace import Trace
from autopar.certificate.context import Context
from autopar.certificate.facts import Claims, Facts
from autopar.certificate.report import Finding
from autopar.cost.priced import OPTIMIZERS
from autopar.emit.choices import parameter_key, storage_key
from autopar.plans import Plan
from autopar.validation.shards import held_bytes


def on_hosts(trace: Trace, facts: Facts, claims: Claims, plan: Plan, context: Context) -> dict[str, int]:
    """Bytes of the host's memory by kind: of parameters that rest there, and of what is kept there, once per microbatch in flight."""
    state, _ = OPTIMIZERS[str(plan.options.get("optimizer"))]
    found = dict.fromkeys(("parameters", "optimizer", "gradients", "copies", "activations"), 0)
    for p in trace.parameters:
        rests = claims.chosen.get(storage_key(p.name), claims.chosen[parameter_key(p.name)]).outputs[0]
        if rests.host:
            wide = torch.float32 if context.accumulates and p.dtype.itemsize < 4 else p.dtype
            size = held_bytes(p.view, p.dtype, rests, plan.mesh.shape)
            found["parameters"] += size
            found["optimizer"] += state * size if p.gradient is not None else 0
            found["gradients"] += held_bytes(p.view, wide, rests, plan.mesh.shape) if p.gradient is not None else 0
            found["copies"] += held_bytes(p.view, p.compute_dtype, rests, plan.mesh.shape) if p.compute_dtype != p.dtype else 0
    for where, layouts in claims.kept.items():
        tensor = facts.tensors[where]
        made = claims.chosen[tensor.key].outputs[tensor.result]
        stored = [at for at in layouts if at.host and not made.host]
        size = sum(held_bytes(tensor.shape, tensor.dtype, at, plan.mesh.shape) for at in stored)
        found["activations"] += size * context.num_in_flight
    return {kind: size for kind, size in found.items() if size}


def host_memory(plan: Plan, derived: Mapping[str, int], budget_bytes: int) -> Iterator[Finding]:
    """What is claimed of the host's memory and does not hold."""
    claimed = plan.prediction.host_bytes
    for kind in sorted({*derived, *claimed}):
        if derived.get(kind) != claimed.get(kind):
            yield Finding("memory", f"{kind} on the host are {derived.get(kind, 0)} bytes, not {claimed.get(kind, 0)}")
    if sum(derived.values()) > budget_bytes:
        yield Finding("memory", f"on the host are {sum(derived.values())} bytes, over the budget of {budget_bytes}")
