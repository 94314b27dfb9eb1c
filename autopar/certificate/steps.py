"""What is done once per step of several microbatches: parameters gathered before the first, sums of gradients reduced after the last.

A parameter rests in one layout. On each mesh axis microbatches read it as it rests, or whole; its gradients add up as it rests, or as
partial sums. Collectives lead from where it rests to what is read, and from the sums to where it rests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch.distributed.tensor import Partial, Replicate

from autopar.capture.trace import Parameter, Trace
from autopar.certificate.facts import Claims, Tensor
from autopar.certificate.moves import Walk
from autopar.certificate.report import Finding
from autopar.emit.choices import parameter_key, storage_key
from autopar.layout import Layout, Strategy

PHASE = "step"


def held_so(rests: Layout, strategies: Sequence[Strategy], *, accumulates: bool) -> bool:
    """Whether a parameter that rests so may be read and added up as its strategies say: that of microbatches, then that of storage."""
    seen, stored = strategies[0], strategies[-1]
    if any(at != rests for at in (*stored.inputs, *stored.outputs)) and len(strategies) > 1:
        return False
    if not accumulates:
        return len(strategies) == 1 and all(at == rests for at in (*seen.inputs, *seen.outputs))
    if (seen.outputs[0].host and seen.outputs[0] != rests) or any(at.host for at in seen.inputs):
        return False
    reads = zip(rests.placements, seen.outputs[0].placements, strict=True)
    sums = [pair for at in seen.inputs for pair in zip(rests.placements, at.placements, strict=True)]
    whole = all(new in (old, Replicate()) for old, new in reads)
    return whole and all(new == old or new == Partial("sum") for old, new in sums)


def steps_per_step(trace: Trace, walk: Walk, claims: Claims) -> Iterator[Finding]:
    """Every collective of the begin and the end of a step, and whether they lead where they should."""
    for p in trace.parameters:
        key = storage_key(p.name)
        seen = claims.chosen[parameter_key(p.name)]
        rests = claims.chosen[key].outputs[0] if key in claims.chosen else seen.outputs[0]
        yield from _led(p, walk, claims, 0, rests, seen.outputs[0])
        yield from _led(p, walk, claims, 1, seen.inputs[0].plain if seen.inputs else rests, rests)


def _led(p: Parameter, walk: Walk, claims: Claims, result: int, source: Layout, target: Layout) -> Iterator[Finding]:
    """From one layout to the other, by collectives that each start where one before it ended."""
    key = storage_key(p.name)
    wide = p.compute_dtype
    if result:
        wide = torch.float32 if p.dtype.is_floating_point and p.dtype.itemsize < 4 else p.dtype
    tensor = Tensor(key, result, PHASE, p.view, wide, wide, False, ())
    left = list(claims.steps.get(((key, result), PHASE), ()))
    at = source
    while at != target:
        step = next((s for s in left if s.source == at), None)
        if step is None:
            yield Finding("moves", f"nothing leads from {at} to {target} {'at the end' if result else 'at the begin'} of a step", key)
            return
        left.remove(step)
        yield from walk.steps_of(tensor, step)
        at = step.target
    if left:
        yield Finding("moves", f"{len(left)} collectives of a step make what nobody reads", key)
