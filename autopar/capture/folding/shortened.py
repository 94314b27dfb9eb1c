"""The raw joint graph of a shortened model that was checked against the full one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.capture._torch.constants import known_values
from autopar.capture._torch.joint import RawJoint, raw_joint
from autopar.capture._torch.preparing import Prepared
from autopar.capture.folding.checking import compare, order_of_calls, tag, tell
from autopar.capture.folding.closures import closures_repeated
from autopar.capture.folding.cutting import Kept, Way, cut, preserved
from autopar.capture.folding.entries import NotFoldable, NotInTurn
from autopar.capture.folding.known_buffers import know_all_copies
from autopar.capture.folding.repeating import attributes_repeated, renumbered
from autopar.capture.folding.runs import Order, Run, find_runs
from autopar.capture.folding.stream import places
from autopar.capture.refusals import ReadsInputs
from autopar.errors import CaptureError

Replaced = Mapping[Run, Sequence[Run]]


@dataclass(frozen=True, slots=True)
class Shortened:
    """A short capture.

    Attributes:
        raw: the joint graph, whose placeholders and results have the full model's names; its nodes' paths are still short.
        runs: what was shortened. kept: names of modules in the shortened model → those in the full one (`cut`).
    """

    raw: RawJoint
    runs: tuple[Run, ...]
    kept: Kept


def capture_shortened(model: nn.Module, call: Prepared, replaced: Replaced) -> Shortened:
    """Shorten, check, and capture a prepared model, which is as before afterwards.

    Args:
        replaced: runs that are not to be folded → those in their place.

    Raises:
        NotFoldable: there is nothing to shorten, or the full model is not the shortened one with units repeated.
    """
    runs = _runs(model, None, replaced)
    try:
        return _captured(model, call, runs)
    except NotInTurn:
        with warnings.catch_warnings(), preserved(model):
            warnings.simplefilter("ignore")
            order = order_of_calls(model, call)
        in_turn = _runs(model, order, replaced)
        if in_turn == runs:
            raise
        return _captured(model, call, in_turn)


def _runs(model: nn.Module, order: Order | None, replaced: Replaced) -> tuple[Run, ...]:
    runs, reason = find_runs(model, order)
    if not runs:
        raise NotFoldable(reason)
    while any(run in replaced for run in runs):
        runs = tuple(piece for run in runs for piece in replaced.get(run, (run,)))
    if not runs:
        raise NotFoldable("no other layers are equal")
    return runs


def _captured(model: nn.Module, call: Prepared, runs: tuple[Run, ...]) -> Shortened:
    call = know_all_copies(call, runs)
    way = _check(model, call, runs)
    with preserved(model):
        kept = cut(model, runs, way)
        try:
            raw = raw_joint(model, call)
        except ReadsInputs:
            raise
        except CaptureError as error:
            raise NotFoldable(f"the shortened model cannot be captured: {error.what}") from error
    names = [tuple(_renamed(entry, kept) for entry in entries) for entries in (raw.placeholders, raw.results)]
    attributes = tuple(replace(each, path=renumbered(each.path, kept)) for each in raw.attributes)
    outside = raw.outside
    for run in runs:
        attributes, outside = attributes_repeated(attributes, run), closures_repeated(outside, model, run)
    unkept = tuple(renumbered(name, kept) for name in raw.unkept)
    full = replace(raw, placeholders=names[0], results=names[1], attributes=attributes, outside=outside, unkept=unkept)
    return Shortened(full, runs, kept)


def _check(model: nn.Module, call: Prepared, runs: tuple[Run, ...]) -> Way:
    """Compare both models; the way in which the model is shortened that makes them the same."""
    tag(model, call, runs)
    layers = dict(places(runs, model, short=True))
    refusals = []
    for way in Way:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with preserved(model), known_values(call.origins()):
                    cut(model, runs, way)
                    story = tell(model, call, runs, layers)
                with preserved(model):
                    compare(story, model, call, runs)
            return way
        except NotFoldable as error:
            refusals.append(error)
    raise next((refusal for refusal in refusals if refusal.run is not None), refusals[0])


def _renamed(entry: tuple[str, Any], kept: Kept) -> tuple[str, Any]:
    kind, name = entry
    return kind, renumbered(name, kept) if isinstance(name, str) else name
