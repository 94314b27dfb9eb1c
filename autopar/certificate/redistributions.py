"""Check every redistribution: from the node that computes a tensor, over the plan's collectives, to
all its readers, in both phases.

In the phase that computes a tensor, the layout of its strategy is available. In backward of a
forward value, these layouts are available: the kept layouts, the storage layout, and the layout in
which backward recomputes it. A recomputed op reads only the operands of those of its nodes that
backward needs (`autopar.certificate.facts`). A collective is legal if its source is available and
it leads to its target. Its bytes follow from the source and the dtype, and its time from the
profile. Every layout that is computed or kept must have a reader.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch.distributed.tensor import Partial, Replicate

from autopar.capture.trace import Parameter, Trace
from autopar.certificate.facts import Claims, Facts, Tensor
from autopar.certificate.rates import Rates
from autopar.certificate.report import Finding, near
from autopar.core.collective import HOST_KINDS
from autopar.core.hardware import HardwareProfile
from autopar.core.layout import Layout, Strategy
from autopar.core.mesh import Mesh
from autopar.emit.context import parameter_key, storage_key
from autopar.plans import Communication
from autopar.validation.shards import FLOATS, SHARING, apply_collective, held_bytes, is_even


@dataclass
class MoveWalk:
    """All tensors of a model under a plan.

    Attributes:
        owner: key → its decision.
        recomputable: the decisions that backward may recompute.
        rests: keys of the storage of parameters, if parameters may be moved once per step.
        num_microbatches: number of microbatches that share the time of these collectives.
    """

    facts: Facts
    claims: Claims
    mesh: Mesh
    profile: HardwareProfile
    owner: Mapping[str, int]
    recomputable: frozenset[int]
    rests: frozenset[str] = frozenset()
    num_microbatches: int = 1
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.rates = Rates(self.mesh, self.profile)

    def strangers(self) -> Iterator[Finding]:
        """Yield the tensors that the plan lists and the model does not compute. Nothing can be
        derived about them."""
        for (tensor, phase), steps in self.claims.steps.items():
            once = phase == "step" and tensor[0] in self.rests and tensor[1] in (0, 1)
            if not once and (
                tensor not in self.facts.tensors or phase not in ("forward", "backward")
            ):
                yield Finding(
                    "moves",
                    f"{len(steps)} collectives are for a tensor that the model does not compute in"
                    f" {phase}",
                    _name(*tensor),
                )
        for tensor in self.claims.kept:
            if tensor not in self.facts.tensors:
                yield Finding("kept values", "the model has no such tensor", _name(*tensor))

    def findings(self) -> Iterator[Finding]:
        """Yield a finding for each claim about redistribution that does not hold."""
        for tensor in self.facts.tensors.values():
            yield from self._check_tensor(tensor)

    def _check_tensor(self, tensor: Tensor) -> Iterator[Finding]:
        """Check that all readers of a tensor in its own phase, and its kept versions, get their
        layouts."""
        here = (tensor.key, tensor.result)
        produced = {self.claims.chosen[tensor.key].outputs[tensor.result]}
        steps = self.claims.steps.get((here, tensor.phase), ())
        kept_layouts = self.claims.kept.get(here, ())
        at_hand, read_layouts = _reach(produced, steps), self._read_in(tensor, tensor.phase)
        is_computed = tensor.key in self.facts.nodes
        yield from self._check_steps(tensor, steps, produced, read_layouts | set(kept_layouts))
        waited = self._read_in(tensor, tensor.phase, by_ops=True)
        yield from _check_slacks(tensor, steps, set() if is_computed else produced, waited)
        others = [
            r
            for r in tensor.readers
            if r.phase == tensor.phase and self.owner[r.key] != self.owner[tensor.key]
        ]
        only_gradient = all(r.key.endswith("/parameter") for r in others)
        yield from self._check_overlap(tensor, steps, tensor.given or only_gradient)
        if missing := read_layouts - at_hand:
            yield self._report_missing(tensor, tensor.phase, missing, at_hand)
        if tensor.phase == "forward":
            yield from self._check_backward(tensor, produced, at_hand, kept_layouts)
        elif kept_layouts or self.claims.steps.get((here, "forward")):
            yield Finding(
                "kept values",
                ("forward cannot keep or communicate a value of backward"),
                _name(*here),
            )

    def _check_backward(
        self, tensor: Tensor, produced: set[Layout], at_hand: set[Layout], kept: Sequence[Layout]
    ) -> Iterator[Finding]:
        """Check that backward gets the layouts in which it reads a forward tensor.

        Available in backward are ``kept ∪ rests ∪ again``: the kept layouts, the storage layout,
        and the layout in which backward recomputes the tensor. These and the results of collectives
        that start from them must include all layouts that are read.

        Args:
            tensor: the tensor.
            produced: the layout in which forward computes it.
            at_hand: all layouts that it has in forward.
            kept: layouts that are kept for backward.
        """
        rests, read_again = (
            produced if tensor.resident else set[Layout](),
            self._read_by_recomputation(tensor),
        )
        again = self.claims.recomputed.get(tensor.key)
        sources = {*kept, *rests, *(() if again is None else (again.outputs[tensor.result],))}
        read_layouts = self._read_in(tensor, "backward") | read_again
        steps = self.claims.steps.get(((tensor.key, tensor.result), "backward"), ())
        yield from _check_slacks(
            tensor,
            steps,
            {*kept, *rests},
            self._read_in(tensor, "backward", by_ops=True) | read_again,
        )
        only_kept = (
            tensor.key in self.facts.nodes and self.owner[tensor.key] not in self.recomputable
        )
        yield from self._check_overlap(tensor, steps, tensor.given or only_kept)
        yield from self._check_steps(tensor, steps, sources, read_layouts)
        if missing := read_layouts - _reach(sources, steps):
            yield self._report_missing(tensor, "backward", missing, _reach(sources, steps))
        read = read_layouts | {step.source for step in steps}
        for fault in _find_wrongly_kept(kept, at_hand, read, rests):
            yield Finding("kept values", fault, _name(tensor.key, tensor.result))

    def _read_in(self, tensor: Tensor, phase: str, *, by_ops: bool = False) -> set[Layout]:
        """Return the layouts in which readers in a phase read a tensor: only ops, or also outputs
        and parameters."""
        readers = [
            r
            for r in tensor.readers
            if r.phase == phase and (r.key in self.facts.nodes or not by_ops)
        ]
        return {self.claims.chosen[r.key].inputs[r.operand] for r in readers}

    def _read_by_recomputation(self, tensor: Tensor) -> set[Layout]:
        """Return the layouts in which forward ops read a tensor when backward recomputes them."""
        again = self.claims.recomputed
        readers = [
            r
            for r in tensor.readers
            if r.phase == "forward" and r.key in again and r.key in self.facts.needed
        ]
        return {again[r.key].inputs[r.operand] for r in readers}

    def _check_overlap(
        self, tensor: Tensor, steps: Sequence[Communication], always: bool
    ) -> Iterator[Finding]:
        """Yield a finding if steps do not count as overlapping with compute exactly if they have
        slack in every plan."""
        for step in steps:
            counts = (
                always or step.collective.kind in HOST_KINDS
            ) and step.collective.kind != "slice"
            if step.beside != counts:
                text = f"{step.collective.kind} from {step.source} to {step.target} in {step.phase}"
                message = (
                    f"{text} {'counts' if counts else 'does not count'} as overlapping compute"
                )
                yield Finding(
                    "moves",
                    f"{message}, which differs from the plan",
                    _name(tensor.key, tensor.result),
                )

    def _report_missing(
        self, tensor: Tensor, phase: str, missing: set[Layout], at_hand: set[Layout]
    ) -> Finding:
        """Return the finding that a phase reads layouts that are not available."""
        message = (
            f"{phase} reads it as {_list(missing)}, which no collective returns; available:"
            f" {_list(at_hand) or 'nothing'}"
        )
        claim = "kept values" if phase != tensor.phase and not at_hand else "moves"
        return Finding(claim, message, _name(tensor.key, tensor.result))  # type: ignore[arg-type]

    def _check_steps(
        self,
        tensor: Tensor,
        steps: Sequence[Communication],
        sources: set[Layout],
        wanted: set[Layout],
    ) -> Iterator[Finding]:
        name, at_hand = _name(tensor.key, tensor.result), _reach(sources, steps)
        targets = [step.target for step in steps]
        for step in steps:
            text = f"{step.collective.kind} from {step.source} to {step.target} in {step.phase}"
            if step.source not in at_hand:
                yield Finding("moves", f"{text} reads a layout that does not exist", name)
            if step.target not in wanted and all(other.source != step.target for other in steps):
                yield Finding("moves", f"{text} returns a layout that is never read", name)
            if step.target in sources or targets.count(step.target) > 1:
                yield Finding("moves", f"{text} returns a layout that already exists", name)
            yield from self.steps_of(tensor, step)

    def steps_of(self, tensor: Tensor, step: Communication) -> Iterator[Finding]:
        """Yield the faults of one collective, regardless of its source."""
        text = f"{step.collective.kind} from {step.source} to {step.target} in {step.phase}"
        for fault in self._find_faults(tensor, step):
            yield Finding("moves", f"{text}: {fault}", _name(tensor.key, tensor.result))

    def _find_faults(self, tensor: Tensor, step: Communication) -> Iterator[str]:
        """Yield the faults of one collective: its target, its bytes, and its time."""
        c, shape, sizes = step.collective, tensor.shape, self.mesh.shape
        if not all(layout.fits(shape, sizes) for layout in (step.source, step.target)):
            yield f"a tensor of shape {shape} cannot have this layout on mesh {self.mesh}"
            return
        if apply_collective(step.source, c, step.target) != step.target or (
            c.axis >= 0 and sizes[c.axis] == 1
        ):
            along = f" of dim {c.dim} along axis {self.mesh.names[c.axis]}" if c.axis >= 0 else ""
            yield f"a {c.kind}{along} does not return this layout"
            return
        yield from self._check_bytes(tensor, step)
        yield from self._check_time(tensor, step)

    def _check_bytes(self, tensor: Tensor, step: Communication) -> Iterator[str]:
        """Yield a fault if a collective does not move the tensor's dtype or the dtype of its sums,
        or the bytes that follow from it."""
        c, shape, sizes = step.collective, tensor.shape, self.mesh.shape
        dtype = tensor.sum_dtype if c.reduce_op else tensor.dtype
        if c.dtype != str(dtype).removeprefix("torch."):
            yield f"it moves {c.dtype}, but the tensor is {dtype}"
        put_in = held_bytes(shape, dtype, step.source, sizes)
        if c.bytes != put_in:
            yield f"a device contributes {put_in} bytes, not {c.bytes}"
        received_bytes = (
            held_bytes(shape, dtype, step.target, sizes) - put_in if c.kind == "halo" else 0
        )
        if c.halo_bytes != received_bytes:
            yield f"a device receives {received_bytes} bytes from its neighbors, not {c.halo_bytes}"

    def _check_time(self, tensor: Tensor, step: Communication) -> Iterator[str]:
        """Yield a fault if a collective does not take the time from the profile, alone or as a
        share of a bucket.

        A collective that runs once per step counts 1/M in each of M microbatches.
        """
        num = self.num_microbatches if step.phase == "step" else 1
        alone_s = self.rates.alone_s(step.collective) / num
        shares = (step.beside or step.phase == "step") and self._may_share(tensor, step)
        counted_s = min(alone_s, self.rates.share_s(step.collective) / num) if shares else alone_s
        if shares != (step.alone_s is not None):
            yield (
                f"it {'counts as a share of a bucket' if shares else 'has no share of a bucket'},"
                " which differs from the plan"
            )
        for when, time_s, said_s in (
            ("", counted_s, step.time_s),
            (" by itself", alone_s, step.by_itself_s),
        ):
            if not near(said_s, time_s):
                yield f"it takes {time_s:.6g} s{when}, not {said_s:.6g} s"

    def _may_share(self, tensor: Tensor, step: Communication) -> bool:
        """Return whether a collective may be in a bucket: it gathers or reduces equal parts of a
        floating tensor."""
        even = all(
            is_even(layout, tensor.shape, self.mesh.shape) for layout in (step.source, step.target)
        )
        return even and step.collective.kind in SHARING and step.collective.dtype in FLOATS


def _find_wrongly_kept(
    kept: Sequence[Layout], at_hand: set[Layout], read: set[Layout], rests: set[Layout]
) -> Iterator[str]:
    """Yield kept layouts that are not computed or not read, or are kept twice, and storage layouts
    that are read and not listed as kept.

    Args:
        kept: layouts that are kept for backward.
        at_hand: layouts that the tensor has in forward.
        read: layouts that ops or collectives of backward read.
        rests: the storage layout of a stored tensor; empty for others.
    """
    for layout in kept:
        if layout not in at_hand or (layout.host and layout.on_device() in kept):
            yield f"{layout} is kept, but forward does not compute it"
        if layout not in read:
            yield f"{layout} is kept, but backward does not read it"
    if len(set(kept)) < len(kept):
        yield "a layout is kept twice"
    for layout in sorted((rests & read) - set(kept), key=str):
        yield f"backward reads its storage layout {layout}, which is not listed as kept"


def _check_slacks(
    tensor: Tensor, steps: Sequence[Communication], at_start: set[Layout], waited: set[Layout]
) -> Iterator[Finding]:
    """Yield a finding for each step without the slack that follows from the tensors that exist when
    the phase starts, and from the results that ops wait for."""
    there, needed = _reach(at_start, steps), set(waited)
    while further := {step.source for step in steps if step.target in needed} - needed:
        needed |= further
    for step in steps:
        slack = (
            "prefetchable"
            if step.source in there
            else "critical"
            if step.target in needed
            else "deferrable"
        )
        if step.slack != slack:
            message = (
                f"{step.collective.kind} from {step.source} to {step.target} in {step.phase} is"
                f" {slack}, not {step.slack}"
            )
            yield Finding("moves", message, _name(tensor.key, tensor.result))


def _reach(sources: set[Layout], steps: Sequence[Communication]) -> set[Layout]:
    """Return all layouts that the steps produce from the sources."""
    reached, remaining = set(sources), list(steps)
    while ready := [step for step in remaining if step.source in reached]:
        reached |= {step.target for step in ready}
        remaining = [step for step in remaining if step not in ready]
    return reached


def _name(key: str, result: int) -> str:
    return f"{key} result {result}" if result else key


def _list(layouts: set[Layout]) -> str:
    return ", ".join(sorted(f"{str(layout)!r}" for layout in layouts))


# --------------------------------------------------------------------------------------------------
# Collectives that run once per step of several microbatches: parameters are gathered before the
# first microbatch, and sums of gradients are reduced after the last.
#
# A parameter has one storage layout. On each mesh axis, microbatches read it in that placement or
# replicated, and its gradients are summed in that placement or as partial sums. Collectives lead
# from the storage layout to the layout that is read, and from the layout of the sums to the storage
# layout.

PHASE = "step"


def held_so(rests: Layout, strategies: Sequence[Strategy], *, accumulates: bool) -> bool:
    """Return whether a parameter in a storage layout may be read and accumulated as its strategies
    state.

    Args:
        rests: the storage layout.
        strategies: the strategies of a microbatch, then of the storage.
        accumulates: whether a step has several microbatches.
    """
    read_strategy, stored = strategies[0], strategies[-1]
    if any(at != rests for at in (*stored.inputs, *stored.outputs)) and len(strategies) > 1:
        return False
    if not accumulates:
        return len(strategies) == 1 and all(
            at == rests for at in (*read_strategy.inputs, *read_strategy.outputs)
        )
    if (read_strategy.outputs[0].host and read_strategy.outputs[0] != rests) or any(
        at.host for at in read_strategy.inputs
    ):
        return False
    reads = zip(rests.placements, read_strategy.outputs[0].placements, strict=True)
    sums = [
        pair
        for at in read_strategy.inputs
        for pair in zip(rests.placements, at.placements, strict=True)
    ]
    may_read = all(new in (old, Replicate()) for old, new in reads)
    return may_read and all(new == old or new == Partial("sum") for old, new in sums)


def steps_per_step(trace: Trace, walk: MoveWalk, claims: Claims) -> Iterator[Finding]:
    """Yield the faults of the collectives at the beginning and the end of a step: of each
    collective, and whether they lead to the required layouts.

    Args:
        trace: its parameters are checked.
        walk: the collectives of the same model and plan.
        claims: the plan's layouts.
    """
    for p in trace.parameters:
        key = storage_key(p.name)
        strategy = claims.chosen[parameter_key(p.name)]
        rests = claims.chosen[key].outputs[0] if key in claims.chosen else strategy.outputs[0]
        yield from _check_path(p, walk, claims, 0, rests, strategy.outputs[0])
        yield from _check_path(
            p, walk, claims, 1, strategy.inputs[0].plain if strategy.inputs else rests, rests
        )


def _check_path(
    p: Parameter, walk: MoveWalk, claims: Claims, result: int, source: Layout, target: Layout
) -> Iterator[Finding]:
    """Yield the faults of the collectives from one layout to another. Each must start from the
    result of a previous one."""
    key = storage_key(p.name)
    wide = p.compute_dtype
    if result:
        wide = torch.float32 if p.dtype.is_floating_point and p.dtype.itemsize < 4 else p.dtype
    tensor = Tensor(key, result, PHASE, p.view, wide, wide, False, ())
    unused = list(claims.steps.get(((key, result), PHASE), ()))
    at = source
    while at != target:
        step = next((s for s in unused if s.source == at), None)
        if step is None:
            yield Finding(
                "moves",
                f"no collectives lead from {at} to {target}"
                f" {'at the end' if result else 'at the start'} of a step",
                key,
            )
            return
        unused.remove(step)
        yield from walk.steps_of(tensor, step)
        at = step.target
    if unused:
        yield Finding(
            "moves",
            (f"{len(unused)} collectives of a step return layouts that are never read"),
            key,
        )
