"""What a tensor of one microbatch is of the batch's: placements on an axis in time, found op by op by numbers, forward and backward.

With M microbatches, and w the batch's value of a tensor, a microbatch m has, up to a power of M,

    split(d)    the m-th of M parts of w along dim d
    whole       w
    term        a term: the M terms add up to w
    place(d)    positions along dim d, which w counts from the batch's first sample and each microbatch from its own

and `power` e says that it has M^e times as much: a mean over a microbatch's samples is a term with e = 1. No rule of the op says which of
these a result is. The op is run on small numbers: on the batch's, and on those of M microbatches, whose operands are what their labels say
and whose settings are what stands in the graph of one microbatch. A result has a label if, for M = 2 and for M = 3, the M results are that
of the batch's result. It has none where they are not; then it must not reach an output or a gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.layout import PARTIAL, REPLICATE, Layout, Strategy
from autopar.rules import AxisOption, axis_options, localize
from autopar.rules.call import NO_TENSOR, Call, KeyedCall
from autopar.rules.samples import tensors_for
from autopar.rules.scaling import in_double, index_bound, made_on, scalings
from autopar.rules.trial import run
from autopar.validation.law import DRAWS, VIEWS, leading_dims
from autopar.validation.samples import SAMPLES

aten = torch.ops.aten
Kind = Literal["split", "whole", "term", "place", "zero", "wrong", "open"]
_SIZES = (6, 12, 18, 24, 30, 36, 42, 48)  # two and three divide them
_RECIPES = (("mixed", "positive"), ("unit",))  # the second for ops that refuse the first
_POWERS = (0, 1, -1, 2, -2, 3, -3)
_SEED = 7
_CONSTANTS = frozenset(
    (
        aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format, aten.new_zeros.default, aten.new_ones.default,
        aten.new_full.default, aten.new_empty.default, aten.zeros_like.default, aten.ones_like.default, aten.full_like.default,
        aten.empty_like.default, aten.scalar_tensor.default,
    )
)  # fmt: skip
Tensors = list[torch.Tensor]


@dataclass(frozen=True, slots=True)
class TimePlacement:
    """What a microbatch's tensor is of the batch's (see the module's docstring).

    Attributes:
        origin: key of the node from which a ``wrong`` or an ``open`` one follows.
    """

    kind: Kind
    dim: int = -1
    power: int = 0
    origin: str = ""

    @property
    def is_known(self) -> bool:
        """Whether it is one of the four."""
        return self.kind not in ("wrong", "open")

    def __str__(self) -> str:
        times = f" · M^{self.power}" if self.power else ""
        return f"{self.kind}{f'({self.dim})' if self.dim >= 0 else ''}{times}"


WHOLE, TERM = TimePlacement("whole"), TimePlacement("term")


def placements_in_time(whole: Call, part: Call, reads: Sequence[TimePlacement], num: int) -> tuple[TimePlacement, ...]:
    """What a node of one of `num` microbatches makes of what it reads; of kind ``open`` where nothing can be said.

    Args:
        whole, part: the calls in the graphs of the batch and of one microbatch.
    """
    found = _placed(KeyedCall(whole), KeyedCall(part), tuple(reads), num)
    return found if found else tuple(TimePlacement("open") for _ in whole.outputs)


@lru_cache(maxsize=16384)
def _placed(keyed: KeyedCall, of_part: KeyedCall, reads: tuple[TimePlacement, ...], num: int) -> tuple[TimePlacement, ...]:
    whole, part = keyed.call, of_part.call
    if whole.target is not part.target or len(whole.outputs) != len(part.outputs):
        return ()
    if whole.target in DRAWS:
        return _drawn(whole, part, reads, num)
    if whole.target in _CONSTANTS:
        return _constant(whole, part, num)
    if whole.key == part.key and all(r == WHOLE for r in reads):
        return tuple(WHOLE for _ in whole.outputs)
    if whole.target is aten.arange.default:
        counts = whole.args == (part.args[0] * num,) and dict(whole.kwargs) == dict(part.kwargs)
        return (TimePlacement("place", 0),) if counts else ()
    if whole.target in VIEWS:
        return _viewed(whole, part, reads[0], num)
    tried = _tried(whole, part, reads, num)
    known = bool(tried) and all(found.kind != "open" for found in tried)
    return tried if known else _by_rule(whole, part, reads, num)


def _by_rule(whole: Call, part: Call, reads: Sequence[TimePlacement], num: int) -> tuple[TimePlacement, ...]:
    """What the op's rule says of an axis of so many ranks, where no small call can be made: microbatches are like ranks.

    A power of one operand goes through where the rule has the op linear in that operand alone.
    """
    scaled = [number for number, r in enumerate(reads) if r.power]
    if len(scaled) > 1 or any(r.kind == "place" for r in reads):
        return ()
    options = axis_options(whole)
    linear = AxisOption(tuple(PARTIAL if n in scaled else REPLICATE for n in range(len(reads))), (PARTIAL,) * len(whole.outputs))
    if scaled and linear not in options:
        return ()
    for option in options:
        if all(map(_may_lie, reads, option.inputs)) and _is_called(whole, part, option, num):
            power = reads[scaled[0]].power if scaled else 0
            return tuple(
                TimePlacement("split", p.dim, power) if isinstance(p, Shard) else TimePlacement("term" if p == PARTIAL else "whole", -1, power)
                for p in option.outputs
            )
    return ()


def _may_lie(read: TimePlacement, placement: Placement) -> bool:
    """Whether a tensor is placed so, on an axis of ranks that stand for microbatches."""
    if read.dim >= 0:
        return placement == Shard(read.dim)
    return placement in {"term": (PARTIAL,), "zero": (PARTIAL, REPLICATE)}.get(read.kind, (REPLICATE,))


def _is_called(whole: Call, part: Call, option: AxisOption, num: int) -> bool:
    """Whether a microbatch calls what a rank would call."""
    strategy = Strategy(tuple(Layout((p,)) for p in option.inputs), tuple(Layout((p,)) for p in option.outputs))
    local = localize(whole, strategy, (num,))
    return (local.target, tuple(local.args), dict(local.kwargs)) == (part.target, part.args, dict(part.kwargs))


def _drawn(whole: Call, part: Call, reads: Sequence[TimePlacement], num: int) -> tuple[TimePlacement, ...]:
    """Each microbatch draws anew; the batch's numbers are as good as any.

    Numbers that no sample has (of dropout of a weight) count as the batch's, although each microbatch draws its own.
    """
    if any(r != WHOLE for r in reads):
        return ()
    if whole.outputs[0].shape == part.outputs[0].shape:
        return (WHOLE,)
    dim = split_dim(whole.outputs[0].shape, part.outputs[0].shape, num)
    return (TimePlacement("split", dim),) if dim >= 0 else ()


def _constant(whole: Call, part: Call, num: int) -> tuple[TimePlacement, ...]:
    """Tensors of one value: by their shapes, if the value is the same."""
    values = [[a for a in call.args if isinstance(a, int | float) and not isinstance(a, bool)] for call in (whole, part)]
    if values[0] != values[1]:
        return ()
    dim = split_dim(whole.outputs[0].shape, part.outputs[0].shape, num)
    same = whole.outputs[0].shape == part.outputs[0].shape
    if same or dim >= 0:
        return (TimePlacement("zero" if _is_zero(whole) else "split" if dim >= 0 else "whole", dim),)
    return ()


def _is_zero(call: Call) -> bool:
    name = call.target.__name__
    filled = next((a for a in reversed(call.args) if type(a) in (int, float)), 1) if "full" in name or "scalar" in name else 1
    return "zeros" in name or filled == 0


def split_dim(whole: Sequence[int], part: Sequence[int], num: int) -> int:
    """The one dim along which a shape is `num` times shorter, else −1."""
    differs = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    cut = len(whole) == len(part) and len(differs) == 1 and whole[differs[0]] == num * part[differs[0]]
    return differs[0] if cut else -1


def _viewed(whole: Call, part: Call, read: TimePlacement, num: int) -> tuple[TimePlacement, ...]:
    source, target = whole.inputs[0].shape, whole.outputs[0].shape
    if read.dim < 0:
        return (read,) if target == part.outputs[0].shape else ()
    pairs = dict(leading_dims(source, target))
    dim = pairs.get(read.dim, -1)
    if dim < 0:
        return (TimePlacement("wrong"),)
    return (replace(read, dim=dim),) if split_dim(target, part.outputs[0].shape, num) == dim else ()


def _tried(whole: Call, part: Call, reads: Sequence[TimePlacement], num: int) -> tuple[TimePlacement, ...]:
    """By numbers, for M = 2 and M = 3."""
    found: list[tuple[TimePlacement, ...]] = []
    for many in (2, 3):
        for small, tensors in _small(whole, many):
            settings = _part_settings(whole, part, small, num, many)
            if settings is None or not _splits(small, reads, many):
                continue
            made = _answer(small, settings, tensors, reads, many)
            if made:
                found.append(made)
    return _agreed(found, len(whole.outputs))


def _agreed(found: Sequence[tuple[TimePlacement, ...]], num: int) -> tuple[TimePlacement, ...]:
    """What all trials say; numbers that say less than others (all zeros) say nothing against them."""
    results = []
    for place in range(num):
        said = {made[place] for made in found} - {TimePlacement("open")}
        if any(placement.kind != "zero" for placement in said):
            said = {placement for placement in said if placement.kind != "zero"}  # zeros are any part of zeros
        results.append(said.pop() if len(said) == 1 else TimePlacement("wrong" if said else "open"))
    return tuple(results) if found else ()


def _small(whole: Call, many: int) -> Iterator[tuple[Call, Tensors]]:
    """Small calls with numbers."""
    made = SAMPLES.get(whole.target)
    if made is not None:
        yield from made(whole) if many == 2 else ()
        return
    for scaled in scalings(whole, _SIZES):
        for infos in dict.fromkeys((in_double(scaled.inputs), scaled.inputs)):
            for recipes in _RECIPES:
                trials = list(_trials(replace(scaled, inputs=infos), recipes, index_bound(scaled, whole)))
                if trials:
                    yield from trials
                    return


def _trials(small: Call, recipes: Sequence[str], bound: int) -> Iterator[tuple[Call, Tensors]]:
    """A small call with the numbers of each recipe that it accepts; conditions also the other way round."""
    for recipe in recipes:
        tensors = tensors_for(small.inputs, recipe, bound)
        made = [tensors]
        if any(x.dtype == torch.bool for x in tensors):
            made.append([~x if x.dtype == torch.bool else x for x in tensors])
        for numbers in made:
            found = made_on(small, numbers)
            if found is not None and len(found.outputs) == len(small.outputs):
                yield found, numbers


def _part_settings(whole: Call, part: Call, small: Call, num: int, many: int) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The settings of a microbatch's small call: those of the batch's, changed as the large ones are; None where that is unclear."""
    if len(whole.args) != len(part.args) or whole.kwargs.keys() != part.kwargs.keys():
        return None
    try:
        args = tuple(_changed(*each, num, many) for each in zip(whole.args, part.args, small.args, strict=True))
        named = {name: _changed(value, part.kwargs[name], small.kwargs[name], num, many) for name, value in whole.kwargs.items()}
    except _UnclearError:
        return None
    return args, named


class _UnclearError(Exception):
    """A setting that is neither the same nor as many times smaller or larger as there are microbatches."""


def _changed(whole: Any, part: Any, small: Any, num: int, many: int) -> Any:
    if isinstance(whole, tuple):
        if not isinstance(part, tuple) or len(whole) != len(part):
            raise _UnclearError
        return tuple(_changed(*each, num, many) for each in zip(whole, part, small, strict=True))
    if whole == part or (whole != whole and part != part):
        return small
    if isinstance(whole, int | float) and isinstance(part, int | float) and not isinstance(whole, bool):
        if _is_near(whole, part * num) and not (isinstance(small, int) and small % many):
            return small // many if isinstance(small, int) else small / many
        if _is_near(whole * num, part):
            return small * many
    raise _UnclearError


def _is_near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-12 * max(abs(a), abs(b))


def _splits(small: Call, reads: Sequence[TimePlacement], many: int) -> bool:
    pairs = zip(small.inputs, reads, strict=True)
    return all(r.dim < 0 or info.shape[r.dim] % many == 0 for info, r in pairs)


def _answer(
    small: Call, settings: tuple[tuple[Any, ...], dict[str, Any]], tensors: Tensors, reads: Sequence[TimePlacement], many: int
) -> tuple[TimePlacement, ...]:
    """What the results of microbatches are of the batch's; nothing where microbatches cannot be run."""
    tensors = [_made_for(x, r) for x, r in zip(tensors, reads, strict=True)]
    expected = run(small.target, small.args, small.kwargs, tensors, (), ())
    parts = [_parts(x, r, many, number) for number, (x, r) in enumerate(zip(tensors, reads, strict=True))]
    try:
        made = [run(small.target, *settings, [p[m] for p in parts], (), ()) for m in range(many)]
    except Exception:  # an op may raise anything
        return ()
    zeros = any(r.kind == "zero" for r in reads)
    return tuple(
        WHOLE if small.outputs[i] == NO_TENSOR else _placement(w, [results[i] for results in made], many, zeros=zeros) for i, w in enumerate(expected)
    )


def _made_for(x: torch.Tensor, read: TimePlacement) -> torch.Tensor:
    """Numbers of the kind that a label says."""
    if read.kind == "zero":
        return torch.zeros_like(x)
    if read.kind == "place":
        places = torch.arange(x.shape[read.dim], dtype=x.dtype)
        return places.view(-1, *[1] * (x.dim() - 1 - read.dim)).expand(x.shape).contiguous()
    return x


def _parts(x: torch.Tensor, read: TimePlacement, many: int, number: int) -> Tensors:
    """What M microbatches have of a tensor."""
    times = float(many) ** read.power
    scaled = x * times if read.power and (x.is_floating_point() or x.is_complex()) else x
    if read.kind == "whole" or (read.kind == "zero" and read.dim < 0):
        return [scaled] * many
    if read.kind in ("split", "zero"):
        return [part.contiguous() for part in scaled.chunk(many, read.dim)]
    if read.kind == "place":
        length = x.shape[read.dim] // many
        return [part - m * length for m, part in enumerate(x.chunk(many, read.dim))]
    random = torch.Generator().manual_seed(_SEED + number)
    terms = [(torch.randint(1, 9, x.shape, generator=random) / (2 if x.is_floating_point() else 1)).to(x.dtype) for _ in range(many - 1)]
    return [*terms, scaled - sum(terms, torch.zeros_like(x))]


def _placement(whole: torch.Tensor, parts: Tensors, many: int, *, zeros: bool) -> TimePlacement:
    """What parts are of a whole."""
    for kind, dim, joined in _readings(whole, parts, many):
        if not whole.is_floating_point() and not whole.is_complex():
            if torch.equal(joined, whole):
                return TimePlacement(kind, dim)
            continue
        wide = torch.complex128 if whole.is_complex() else torch.float64
        a, b = joined.to(wide), whole.to(wide)
        size = float(max(b.abs().max(), 0.0)) if b.numel() else 0.0
        if not size:
            dim = split_dim(whole.shape, parts[0].shape, many)
            none = zeros and not any(bool(part.any()) for part in parts)
            return TimePlacement("zero", dim) if none else TimePlacement("open")  # they are any part of zeros
        for power in _POWERS:
            due = b * float(many) ** power
            if bool(((a - due).abs() <= _tolerance(whole) * float(due.abs().max())).all()):
                return TimePlacement(kind, dim, power)
    return TimePlacement("wrong")


def _tolerance(x: torch.Tensor) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-5, torch.complex128: 1e-9}.get(x.dtype, 3e-2)


def _readings(whole: torch.Tensor, parts: Tensors, many: int) -> Iterator[tuple[Kind, int, torch.Tensor]]:
    """What parts may be of a whole, with what they would join to."""
    shape, first = tuple(whole.shape), parts[0]
    if tuple(first.shape) == shape:
        if all(torch.equal(first, part) for part in parts):
            yield "whole", -1, first
        if whole.dtype != torch.bool:
            yield "term", -1, sum(parts[1:], first)
        return
    dim = split_dim(shape, tuple(first.shape), many)
    if dim >= 0:
        yield "split", dim, torch.cat(parts, dim)
        if whole.dtype == torch.int64:
            length = first.shape[dim]
            yield "place", dim, torch.cat([part + m * length for m, part in enumerate(parts)], dim)


