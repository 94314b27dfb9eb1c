"""Every redistribution, walked: from what makes a tensor, over the plan's collectives, to all who read it, in both phases.

In the phase that makes a tensor its maker's layout is at hand. In backward, of what forward made: the layouts that are kept,
what rests anyway, and the layout in which backward makes it again. An op that runs again reads what those of its nodes read
that backward has a use for (`autopar.certificate.facts`). A collective is legal where its source is at hand and it
leads to its target; its bytes follow from the source and the dtype, its time from the profile. Nothing is made or kept that
nobody reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from autopar.certificate.facts import Claims, Facts, Tensor
from autopar.certificate.rates import Rates
from autopar.certificate.report import Finding, near
from autopar.collective import HOST_KINDS
from autopar.hardware import HardwareProfile
from autopar.layout import Layout
from autopar.mesh import Mesh
from autopar.plans import Communication
from autopar.validation.shards import FLOATS, SHARING, held_bytes, is_even, led_to


@dataclass
class Walk:
    """All tensors of a model under a plan.

    Attributes:
        owner: key → the decision it belongs to. again: the decisions that backward may run again.
        rests: keys under which plans say where parameters rest, if these may move once per step. num_microbatches: among which the time
            of that is shared.
    """

    facts: Facts
    claims: Claims
    mesh: Mesh
    profile: HardwareProfile
    owner: Mapping[str, int]
    again: frozenset[int]
    rests: frozenset[str] = frozenset()
    num_microbatches: int = 1
    rates: Rates = field(init=False)

    def __post_init__(self) -> None:
        self.rates = Rates(self.mesh, self.profile)

    def strangers(self) -> Iterator[Finding]:
        """Tensors that the plan speaks of and the model does not make; nothing can be derived of them."""
        for (tensor, phase), steps in self.claims.steps.items():
            once = phase == "step" and tensor[0] in self.rests and tensor[1] in (0, 1)
            if not once and (tensor not in self.facts.tensors or phase not in ("forward", "backward")):
                yield Finding("moves", f"{len(steps)} collectives are of a tensor that the model does not make in {phase}", _name(*tensor))
        for tensor in self.claims.kept:
            if tensor not in self.facts.tensors:
                yield Finding("kept values", "the model makes no such tensor", _name(*tensor))

    def findings(self) -> Iterator[Finding]:
        """What does not hold."""
        for each in self.facts.tensors.values():
            yield from self._tensor(each)

    def _tensor(self, tensor: Tensor) -> Iterator[Finding]:
        claims, here = self.claims, (tensor.key, tensor.result)
        made = {claims.chosen[tensor.key].outputs[tensor.result]}
        now = [r for r in tensor.readers if r.phase == tensor.phase]
        steps = claims.steps.get((here, tensor.phase), ())
        at_hand = _reached(made, steps)
        wanted = {claims.chosen[r.key].inputs[r.operand] for r in now}
        kept = claims.kept.get(here, ())
        yield from self._steps(tensor, steps, made, wanted | set(kept))
        waited = {claims.chosen[r.key].inputs[r.operand] for r in now if r.key in self.facts.nodes}
        yield from _slacks(tensor, steps, set() if tensor.key in self.facts.nodes else made, waited)
        others = [r for r in now if self.owner[r.key] != self.owner[tensor.key]]
        yield from self._beside(tensor, steps, tensor.given or all(r.key.endswith("/parameter") for r in others))
        if missing := wanted - at_hand:
            yield self._missing(tensor, tensor.phase, missing, at_hand)
        if tensor.phase == "backward":
            if kept or claims.steps.get((here, "forward")):
                yield Finding("kept values", "forward cannot keep or move what backward makes", _name(*here))
            return
        yield from self._later(tensor, made, at_hand, kept)

    def _later(self, tensor: Tensor, made: set[Layout], at_hand: set[Layout], kept: Sequence[Layout]) -> Iterator[Finding]:
        """What backward reads of what forward made."""
        claims, here = self.claims, (tensor.key, tensor.result)
        then = [r for r in tensor.readers if r.phase == "backward"]
        again = [r for r in tensor.readers if r.phase == "forward" and r.key in claims.again and r.key in self.facts.asked]
        wanted = {claims.chosen[r.key].inputs[r.operand] for r in then} | {claims.again[r.key].inputs[r.operand] for r in again}
        sources = set(kept) | (made if tensor.resident else set())
        if tensor.key in claims.again:
            sources.add(claims.again[tensor.key].outputs[tensor.result])
        steps = claims.steps.get((here, "backward"), ())
        waited = {claims.chosen[r.key].inputs[r.operand] for r in then if r.key in self.facts.nodes}
        waited |= {claims.again[r.key].inputs[r.operand] for r in again}
        yield from _slacks(tensor, steps, set(kept) | (made if tensor.resident else set()), waited)
        only_kept = tensor.key in self.facts.nodes and self.owner[tensor.key] not in self.again
        yield from self._beside(tensor, steps, tensor.given or only_kept)
        yield from self._steps(tensor, steps, sources, wanted)
        if missing := wanted - _reached(sources, steps):
            yield self._missing(tensor, "backward", missing, _reached(sources, steps))
        for layout in kept:
            if layout not in at_hand or (layout.host and layout.on_device() in kept):
                yield Finding("kept values", f"{layout} is kept, which forward does not make", _name(*here))
            if layout not in wanted and all(step.source != layout for step in steps):
                yield Finding("kept values", f"{layout} is kept, which backward does not read", _name(*here))
        if len(set(kept)) < len(kept):
            yield Finding("kept values", "a layout is kept twice", _name(*here))
        read = wanted | {step.source for step in steps}
        for layout in sorted((made & read) - set(kept), key=str) if tensor.resident else ():
            yield Finding("kept values", f"backward reads it where it rests, as {layout}, which is not said to be kept", _name(*here))

    def _beside(self, tensor: Tensor, steps: Sequence[Communication], always: bool) -> Iterator[Finding]:
        """Whether steps count as running beside compute where, whatever is chosen, they have slack, and nowhere else."""
        for step in steps:
            counts = (always or step.collective.kind in HOST_KINDS) and step.collective.kind != "slice"
            if step.beside != counts:
                said = f"{step.collective.kind} from {step.source} to {step.target} in {step.phase}"
                what = f"{said} {'counts' if counts else 'does not count'} as running beside compute"
                yield Finding("moves", f"{what}, and the plan says otherwise", _name(tensor.key, tensor.result))

    def _missing(self, tensor: Tensor, phase: str, missing: set[Layout], at_hand: set[Layout]) -> Finding:
        what = f"{phase} reads it as {_list(missing)}, and nothing makes that: at hand is {_list(at_hand) or 'nothing'}"
        claim = "kept values" if phase != tensor.phase and not at_hand else "moves"
        return Finding(claim, what, _name(tensor.key, tensor.result))  # type: ignore[arg-type]

    def _steps(self, tensor: Tensor, steps: Sequence[Communication], sources: set[Layout], wanted: set[Layout]) -> Iterator[Finding]:
        where, at_hand = _name(tensor.key, tensor.result), _reached(sources, steps)
        targets = [step.target for step in steps]
        for step in steps:
            said = f"{step.collective.kind} from {step.source} to {step.target} in {step.phase}"
            if step.source not in at_hand:
                yield Finding("moves", f"{said} starts from what nothing makes", where)
            if step.target not in wanted and all(other.source != step.target for other in steps):
                yield Finding("moves", f"{said} makes what nobody reads", where)
            if step.target in sources or targets.count(step.target) > 1:
                yield Finding("moves", f"{said} makes what is at hand already", where)
            yield from self.steps_of(tensor, step)

    def steps_of(self, tensor: Tensor, step: Communication) -> Iterator[Finding]:
        """What is wrong with one collective, wherever it starts."""
        said = f"{step.collective.kind} from {step.source} to {step.target} in {step.phase}"
        for what in self._step(tensor, step):
            yield Finding("moves", f"{said}: {what}", _name(tensor.key, tensor.result))

    def _step(self, tensor: Tensor, step: Communication) -> Iterator[str]:
        """What is wrong with one collective."""
        c, shape, sizes = step.collective, tensor.shape, self.mesh.shape
        if not all(layout.fits(shape, sizes) for layout in (step.source, step.target)):
            yield f"a tensor of shape {shape} cannot lie so on mesh {self.mesh}"
            return
        if led_to(step.source, c, step.target) != step.target or (c.axis >= 0 and sizes[c.axis] == 1):
            along = f" of dim {c.dim} along axis {self.mesh.names[c.axis]}" if c.axis >= 0 else ""
            yield f"a {c.kind}{along} does not lead there"
            return
        dtype = tensor.sum_dtype if c.reduce_op else tensor.dtype
        if c.dtype != str(dtype).removeprefix("torch."):
            yield f"it moves {c.dtype}, the tensor asks for {dtype}"
        put_in = held_bytes(shape, dtype, step.source, sizes)
        if c.bytes != put_in:
            yield f"a device puts in {put_in} bytes, not {c.bytes}"
        taken = held_bytes(shape, dtype, step.target, sizes) - put_in if c.kind == "halo" else 0
        if c.halo_bytes != taken:
            yield f"a device takes {taken} bytes from its neighbours, not {c.halo_bytes}"
        num = self.num_microbatches if step.phase == "step" else 1
        alone_s = self.rates.alone_s(c) / num
        shares = (step.beside or step.phase == "step") and self._may_share(tensor, step)
        counted_s = min(alone_s, self.rates.share_s(c) / num) if shares else alone_s
        if shares != (step.alone_s is not None):
            yield f"it {'counts as a share of a bucket' if shares else 'has no share of a bucket'}, and the plan says otherwise"
        for when, time_s, said_s in (("", counted_s, step.time_s), (" by itself", alone_s, step.by_itself_s)):
            if not near(said_s, time_s):
                yield f"it takes {time_s:.6g} s{when}, not {said_s:.6g} s"

    def _may_share(self, tensor: Tensor, step: Communication) -> bool:
        """Whether it may be in a bucket: of equal parts of a floating tensor, that are gathered or reduced."""
        even = all(is_even(layout, tensor.shape, self.mesh.shape) for layout in (step.source, step.target))
        return even and step.collective.kind in SHARING and step.collective.dtype in FLOATS


def _slacks(tensor: Tensor, steps: Sequence[Communication], at_start: set[Layout], waited: set[Layout]) -> Iterator[Finding]:
    """Whether steps have the slack that follows from what is there when the phase starts, and from what ops wait for."""
    there, needed = _reached(at_start, steps), set(waited)
    while further := {step.source for step in steps if step.target in needed} - needed:
        needed |= further
    for step in steps:
        slack = "prefetchable" if step.source in there else "critical" if step.target in needed else "deferrable"
        if step.slack != slack:
            what = f"{step.collective.kind} from {step.source} to {step.target} in {step.phase} is {slack}, not {step.slack}"
            yield Finding("moves", what, _name(tensor.key, tensor.result))


def _reached(sources: set[Layout], steps: Sequence[Communication]) -> set[Layout]:
    """Everything that the steps make from the sources."""
    found, left = set(sources), list(steps)
    while ready := [step for step in left if step.source in found]:
        found |= {step.target for step in ready}
        left = [step for step in left if step not in ready]
    return found


def _name(key: str, result: int) -> str:
    return f"{key} result {result}" if result else key


def _list(layouts: set[Layout]) -> str:
    return ", ".join(sorted(f"{str(layout)!r}" for layout in layouts))
