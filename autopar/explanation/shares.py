"""What each module takes of a step, in two plans that are cut into stages otherwise, or of which one is not cut.

Terms. With M microbatches and P ranks of a pipeline, P = 1 where there is none, a module that takes t seconds of a microbatch on a device
of its stage has a *share* of M · t / P of the step: seconds per device, summed over microbatches, on average over all devices, of which
those of its stage alone work on it. With τ of a stage's microbatch,

    step = Σ of all shares − M / P · Σ (what a stage's parts take less τ: what is hidden) + what a device waits on average
         + what handing outputs to all stages takes

so shares of plans that are cut otherwise add up to the step, and compare. Copies of a module that are together in both plans share a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from autopar.breakdown import CROSSING, Part, breakdown, copies_of, owner
from autopar.plans import Communication, Entry, Kept, Plan

HIDDEN = "(hidden: communication beside compute, and what kernels save)"
WAITING = "(waiting for other stages)"
HANDING = "(handing outputs to all stages)"
_Place = tuple[tuple[int, int], ...]  # stages, and in each the number of the part
_Split = TypeVar("_Split", Entry, Communication, Kept)


@dataclass(frozen=True, slots=True)
class Share:
    """A module's share of a step, see the module docstring.

    Attributes:
        stages: that it is in; () where the plan has none. kept_bytes: on a device of its stage, for all microbatches in flight there; of
            several stages, where they are the most.
        part, axes: the part that takes the most of it, with its layouts over the axes of these names: those of both plans but the stages'.
    """

    stages: tuple[int, ...]
    compute_s: float
    communication_s: float
    kept_bytes: int
    part: Part
    axes: tuple[str, ...]

    @property
    def time_s(self) -> float:
        return self.compute_s + self.communication_s


@dataclass(frozen=True, slots=True)
class Row:
    """A module, or some of its copies, in two plans; None where one of them has no such."""

    module: str
    first: Share | None
    second: Share | None


@dataclass(frozen=True, slots=True)
class _Piece:
    """A plan without stages, or a stage: how often a device runs it in a step, on average over all, and what it keeps how often."""

    plan: Plan
    runs: float
    flying: int


def rows(first: Plan, second: Plan) -> tuple[Row, ...]:
    """All modules, in the order in which the first plan reaches them, then those of the second alone."""
    places = _places(first), _places(second)

    def cell(module: str, instance: tuple[int, ...]) -> tuple[_Place, _Place]:
        if module in CROSSING:  # named by what crosses there, which is another thing at each cut
            return (), ()
        return places[0].get((module, instance), ()), places[1].get((module, instance), ())

    both, axes = (_collected(first, cell), _collected(second, cell)), axes_of([_pieces(plan)[0].plan for plan in (first, second)])
    keys = list(dict.fromkeys((*both[0], *both[1])))
    several = {module for module, _ in keys if sum(module == other for other, _ in keys) > 1}
    found = []
    for key in keys:
        parts = [part for side in both for _, _, part in side.get(key, ())]
        copies = copies_of(tuple(i for part in parts for i in part.instances)) if key[0] in several else ""
        shares = (_share(plan, side.get(key, []), axes) for plan, side in zip((first, second), both, strict=True))
        module = parts[0].module if len({part.module for part in parts}) == 1 else key[0]  # a stage may have but one of the layers
        found.append(Row(replace(parts[0], module=module, copies=copies).name, *shares))
    return tuple(found)


def beside_modules(plan: Plan) -> dict[str, float]:
    """What of a step is no module's: name → seconds per device, on average over all."""
    pieces = _pieces(plan)
    parts_s = sum(piece.runs * sum(p.compute_s + p.communication_s for p in breakdown(piece.plan)) for piece in pieces)
    busy_s = sum(piece.runs * piece.plan.prediction.step_s for piece in pieces)
    handed_s = plan.pipeline.handed_s if plan.pipeline is not None else 0.0
    return {HIDDEN: busy_s - parts_s, WAITING: plan.prediction.step_s - busy_s - handed_s, HANDING: handed_s}


def _pieces(plan: Plan) -> tuple[_Piece, ...]:
    pipeline = plan.pipeline
    if pipeline is None:
        return (_Piece(plan, 1.0, 1),)
    runs = pipeline.num_microbatches * pipeline.num_chunks / len(pipeline.stages)
    return tuple(_Piece(stage, runs, flying) for stage, flying in zip(pipeline.stages, pipeline.num_in_flight, strict=True))


def _places(plan: Plan) -> Mapping[tuple[str, tuple[int, ...]], _Place]:
    """(module, indices of a copy) → the parts that it is in."""
    found: dict[tuple[str, tuple[int, ...]], _Place] = {}
    for stage, piece in enumerate(_pieces(plan)):
        for number, part in enumerate(breakdown(piece.plan)):
            for instance in part.instances:
                found[part.pattern, instance] = (*found.get((part.pattern, instance), ()), (stage, number))
    return found


_Cell = Callable[[str, tuple[int, ...]], tuple[_Place, _Place]]
_Found = dict[tuple[str, tuple[_Place, _Place]], list[tuple[int, _Piece, Part]]]


def _collected(plan: Plan, cell: _Cell) -> _Found:
    """(module, cell) → the stages that have it, and its part there, split such that copies of a cell are together."""
    found: _Found = {}
    for stage, piece in enumerate(_pieces(plan)):
        for part in breakdown(_split(piece.plan, cell)):
            found.setdefault((part.pattern, cell(part.pattern, part.instances[0])), []).append((stage, piece, part))
    return found


def _split(plan: Plan, cell: _Cell) -> Plan:
    """The plan with decisions, what is kept and what is moved apart for copies of different cells."""

    def each(facts: tuple[_Split, ...], node: Callable[[_Split], str]) -> Iterator[_Split]:
        for fact in facts:
            cells: dict[tuple[_Place, _Place], list[tuple[int, ...]]] = {}
            for instance in fact.instances:
                cells.setdefault(cell(owner(node(fact)), instance), []).append(instance)
            yield from (replace(fact, instances=tuple(instances)) for instances in cells.values())

    entries = tuple(each(plan.entries, lambda entry: entry.nodes[0].node))
    moves, kept = tuple(each(plan.communications, lambda c: c.node)), tuple(each(plan.kept, lambda k: k.node))
    return replace(plan, entries=entries, communications=moves, kept=kept)


def axes_of(plans: Sequence[Plan]) -> tuple[str, ...]:
    """The axes that plans, or stages, run on, if there are more devices than one on them; else those of the first plan."""
    found = (axis for plan in plans for axis in plan.mesh.axes)
    return tuple(dict.fromkeys(axis.name for axis in found if axis.size > 1)) or plans[0].mesh.names


def over_axes(part: Part, names: tuple[str, ...], axes: tuple[str, ...]) -> Part:
    """The part with its layouts over these axes; over those that its own mesh lacks all is whole."""
    own = [names.index(axis) if axis in names else None for axis in axes]
    none = "replicated" if any(part.parallelism) else ""
    enters, leaves = (layout.over(own) if layout is not None else None for layout in (part.enters, part.leaves))
    weights = tuple(
        replace(
            w, storage=w.storage.over(own), compute=tuple(dict.fromkeys(x.over(own) for x in w.compute)), working=w.working.over(own),
            sums=w.sums.over(own),
        )
        for w in part.weights
    )  # fmt: skip
    along = tuple(none if axis is None else part.parallelism[axis] for axis in own)
    sharded = tuple("" if axis is None else part.sharded[axis] for axis in own)
    return replace(part, enters=enters, leaves=leaves, weights=weights, parallelism=along, sharded=sharded)


def _share(plan: Plan, parts: list[tuple[int, _Piece, Part]], axes: tuple[str, ...]) -> Share | None:
    if not parts:
        return None
    staged = plan.pipeline is not None and bool(plan.pipeline.axis)
    _, piece, main = max(parts, key=lambda found: found[2].compute_s + found[2].communication_s)
    return Share(
        tuple(dict.fromkeys(stage for stage, _, _ in parts)) if staged else (),
        sum(piece.runs * part.compute_s for _, piece, part in parts),
        sum(piece.runs * part.communication_s for _, piece, part in parts),
        max(piece.flying * part.kept_bytes for _, piece, part in parts),
        over_axes(main, piece.plan.mesh.names, axes),
        axes,
    )
