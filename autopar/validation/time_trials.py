"""Trials of an op on small numbers: one call for the batch, and one for each microbatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from autopar.rules.call import NO_TENSOR, Call
from autopar.rules.small_calls import (
    LARGEST,
    in_double,
    index_bound,
    made_on,
    num_elements,
    scalings,
    tensors_for,
)
from autopar.rules.trial import run
from autopar.validation.samples import SAMPLES

# --------------------------------------------------------------------------------------------------
# Placements of tensors on the axis in time, as defined in `autopar.validation.microbatch_graphs`.

Kind = Literal["split", "whole", "term", "place", "zero", "wrong", "open"]


@dataclass(frozen=True, slots=True)
class TimePlacement:
    """The placement of a microbatch's tensor relative to the batch's (see
    `autopar.validation.microbatch_graphs`).

    Attributes:
        kind: kind of the placement.
        dim: the split dim, or the dim of positions; −1 for other kinds.
        power: exponent of the number of microbatches.
        origin: key of the node at which a ``wrong`` or an ``open`` placement originates.
    """

    kind: Kind
    dim: int = -1
    power: int = 0
    origin: str = ""

    @property
    def is_known(self) -> bool:
        """Whether the kind is neither ``wrong`` nor ``open``."""
        return self.kind not in ("wrong", "open")

    def __str__(self) -> str:
        times = f" · M^{self.power}" if self.power else ""
        return f"{self.kind}{f'({self.dim})' if self.dim >= 0 else ''}{times}"


WHOLE, TERM = TimePlacement("whole"), TimePlacement("term")


def split_dim(whole: Sequence[int], part: Sequence[int], num: int) -> int:
    """Return the single dim along which a shape is `num` times shorter; −1 if there is none.

    Args:
        whole: shape of the batch's tensor.
        part: shape of the microbatch's tensor.
        num: number of microbatches.
    """
    differs = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    cut = (
        len(whole) == len(part)
        and len(differs) == 1
        and whole[differs[0]] == num * part[differs[0]]
    )
    return differs[0] if cut else -1


_SIZES = (6, 12, 18, 24, 30, 36, 42, 48)  # divisible by 2 and 3
_RECIPES = (("mixed", "positive"), ("unit",))  # the second for ops that reject the first
_POWERS = (0, 1, -1, 2, -2, 3, -3)
_SEED = 7
Tensors = list[torch.Tensor]


def try_on_numbers(
    whole: Call, part: Call, reads: Sequence[TimePlacement], num: int
) -> tuple[TimePlacement, ...]:
    """Return the placements of a call's results, from trials with two and three microbatches.

    Args:
        whole: the call in the graph of the batch.
        part: the call in the graph of one microbatch.
        reads: placements of the operands.
        num: number of microbatches.
    """
    placements: list[tuple[TimePlacement, ...]] = []
    for many in (2, 3):
        for small, tensors in _small_calls(whole, many):
            settings = _part_settings(whole, part, small, num, many)
            if settings is None or not _splits(small, reads, many):
                continue
            trial_placements = _answer(small, settings, tensors, reads, many)
            if trial_placements:
                placements.append(trial_placements)
    return _agree_on_trials(placements, len(whole.outputs))


def _agree_on_trials(
    found: Sequence[tuple[TimePlacement, ...]], num: int
) -> tuple[TimePlacement, ...]:
    """Return the placements on which all trials agree. Zeros agree with every placement."""
    results = []
    for place in range(num):
        answers = {made[place] for made in found} - {TimePlacement("open")}
        if any(placement.kind != "zero" for placement in answers):
            answers = {
                placement for placement in answers if placement.kind != "zero"
            }  # zeros have every placement in zeros
        results.append(
            answers.pop() if len(answers) == 1 else TimePlacement("wrong" if answers else "open")
        )
    return tuple(results) if found else ()


def _small_calls(whole: Call, many: int) -> Iterator[tuple[Call, Tensors]]:
    """Iterate over small calls with numbers."""
    make_samples = SAMPLES.get(whole.target)
    if make_samples is not None:
        yield from make_samples(whole) if many == 2 else ()
        return
    if num_elements(whole.outputs) > LARGEST >= num_elements(whole.inputs):
        return  # its results do not shrink with its operands
    for scaled in scalings(whole, _SIZES):
        for infos in dict.fromkeys((in_double(scaled.inputs), scaled.inputs)):
            for recipes in _RECIPES:
                trials = list(
                    _trials(replace(scaled, inputs=infos), recipes, index_bound(scaled, whole))
                )
                if trials:
                    yield from trials
                    return


def _trials(small: Call, recipes: Sequence[str], bound: int) -> Iterator[tuple[Call, Tensors]]:
    """Iterate over a small call with the numbers of each recipe that it accepts. Conditions are
    also tried inverted."""
    for recipe in recipes:
        tensors = tensors_for(small.inputs, recipe, bound)
        variants = [tensors]
        if any(x.dtype == torch.bool for x in tensors):
            variants.append([~x if x.dtype == torch.bool else x for x in tensors])
        for numbers in variants:
            small_call = made_on(small, numbers)
            if small_call is not None and len(small_call.outputs) == len(small.outputs):
                yield small_call, numbers


def _part_settings(
    whole: Call, part: Call, small: Call, num: int, many: int
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Return the settings of a microbatch's small call: those of the batch's small call, changed as
    between the large calls. Return None if the change is unclear."""
    if len(whole.args) != len(part.args) or whole.kwargs.keys() != part.kwargs.keys():
        return None
    try:
        args = tuple(
            _change_sizes(*each, num, many)
            for each in zip(whole.args, part.args, small.args, strict=True)
        )
        named = {
            name: _change_sizes(value, part.kwargs[name], small.kwargs[name], num, many)
            for name, value in whole.kwargs.items()
        }
    except _UnclearError:
        return None
    return args, named


class _UnclearError(Exception):
    """Raised if two settings are neither equal nor related by the number of microbatches as a
    factor."""


def _change_sizes(whole: Any, part: Any, small: Any, num: int, many: int) -> Any:
    if isinstance(whole, tuple):
        if not isinstance(part, tuple) or len(whole) != len(part):
            raise _UnclearError
        return tuple(
            _change_sizes(*each, num, many) for each in zip(whole, part, small, strict=True)
        )
    if whole == part or (whole != whole and part != part):
        return small
    if isinstance(whole, bool) or not (_is_number(whole) and _is_number(part)):
        raise _UnclearError
    return _scale(whole, part, small, num, many)


def _scale(whole: float, part: float, small: Any, num: int, many: int) -> Any:
    """Return a setting divided by `many` if the batch's setting is `num` times the microbatch's, or
    multiplied by `many` in the reverse case.

    Args:
        whole: the setting in the large call of the batch.
        part: the setting in the large call of one microbatch.
        small: the setting in the batch's small call.
        num: number of microbatches of the large calls.
        many: number of microbatches of the small calls.

    Raises:
        _UnclearError: in all other cases.
    """
    if _is_near(whole, part * num) and not (isinstance(small, int) and small % many):
        return small // many if isinstance(small, int) else small / many
    if _is_near(whole * num, part):
        return small * many
    raise _UnclearError


def _is_number(x: Any) -> bool:
    return isinstance(x, int | float)


def _is_near(a: float, b: float) -> bool:
    return abs(a - b) <= 1e-12 * max(abs(a), abs(b))


def _splits(small: Call, reads: Sequence[TimePlacement], many: int) -> bool:
    pairs = zip(small.inputs, reads, strict=True)
    return all(r.dim < 0 or info.shape[r.dim] % many == 0 for info, r in pairs)


def _answer(
    small: Call,
    settings: tuple[tuple[Any, ...], dict[str, Any]],
    tensors: Tensors,
    reads: Sequence[TimePlacement],
    many: int,
) -> tuple[TimePlacement, ...]:
    """Return the placements of the results; empty if the calls of microbatches fail."""
    tensors = [_made_for(x, r) for x, r in zip(tensors, reads, strict=True)]
    expected = run(small.target, small.args, small.kwargs, tensors, (), ())
    parts = [
        _parts(x, r, many, number) for number, (x, r) in enumerate(zip(tensors, reads, strict=True))
    ]
    try:
        results_of_parts = [
            run(small.target, *settings, [p[m] for p in parts], (), ()) for m in range(many)
        ]
    except Exception:  # an op may raise anything
        return ()
    zeros = any(r.kind == "zero" for r in reads)
    return tuple(
        WHOLE
        if small.outputs[i] == NO_TENSOR
        else _placement(w, [results[i] for results in results_of_parts], many, zeros=zeros)
        for i, w in enumerate(expected)
    )


def _made_for(x: torch.Tensor, read: TimePlacement) -> torch.Tensor:
    """Return numbers that fit a placement."""
    if read.kind == "zero":
        return torch.zeros_like(x)
    if read.kind == "place":
        places = torch.arange(x.shape[read.dim], dtype=x.dtype)
        return places.view(-1, *[1] * (x.dim() - 1 - read.dim)).expand(x.shape).contiguous()
    return x


def _parts(x: torch.Tensor, read: TimePlacement, many: int, number: int) -> Tensors:
    """Return the tensor of each of M microbatches."""
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
    terms = [
        (torch.randint(1, 9, x.shape, generator=random) / (2 if x.is_floating_point() else 1)).to(
            x.dtype
        )
        for _ in range(many - 1)
    ]
    return [*terms, scaled - sum(terms, torch.zeros_like(x))]


def _placement(whole: torch.Tensor, parts: Tensors, many: int, *, zeros: bool) -> TimePlacement:
    """Return the placement of the microbatches' tensors relative to the batch's tensor."""
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
            return (
                TimePlacement("zero", dim) if none else TimePlacement("open")
            )  # zeros have every placement in zeros
        for power in _POWERS:
            due = b * float(many) ** power
            if bool(((a - due).abs() <= _tolerance(whole) * float(due.abs().max())).all()):
                return TimePlacement(kind, dim, power)
    return TimePlacement("wrong")


def _tolerance(x: torch.Tensor) -> float:
    return {torch.float64: 1e-9, torch.float32: 1e-5, torch.complex128: 1e-9}.get(x.dtype, 3e-2)


def _readings(
    whole: torch.Tensor, parts: Tensors, many: int
) -> Iterator[tuple[Kind, int, torch.Tensor]]:
    """Iterate over the placements that the microbatches' tensors may have, each with the batch's
    tensor that would follow from it."""
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
