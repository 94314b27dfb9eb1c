"""The raw joint graph of a shortened model that was checked against the full one."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from autopar.capture._torch.constants import known_values
from autopar.capture._torch.joint import RawJoint, raw_joint
from autopar.capture._torch.preparing import Prepared
from autopar.capture.folding.checking import compare, tag, tell
from autopar.capture.folding.closures import closures_repeated
from autopar.capture.folding.cutting import cut, preserved
from autopar.capture.folding.entries import NotFoldable
from autopar.capture.folding.known_buffers import know_all_copies
from autopar.capture.folding.repeating import attributes_repeated, renumbered
from autopar.capture.folding.runs import Run, find_runs
from autopar.capture.refusals import ReadsInputs
from autopar.errors import CaptureError


@dataclass(frozen=True, slots=True)
class Shortened:
    """A short capture.

    Attributes:
        raw: the joint graph, whose placeholders and results have the full model's names; its nodes' paths are still short.
        runs: what was shortened. kept: for each list's path, the full model's positions of the layers that stay.
    """

    raw: RawJoint
    runs: tuple[Run, ...]
    kept: Mapping[str, tuple[int, ...]]


def capture_shortened(model: nn.Module, call: Prepared) -> Shortened:
    """Shorten, check, and capture a prepared model, which is as before afterwards.

    Raises:
        NotFoldable: there is nothing to shorten, or the full model is not the shortened one with units repeated.
    """
    runs, reason = find_runs(model)
    if not runs:
        raise NotFoldable(reason)
    call = know_all_copies(call, runs)
    counts = _check(model, call, runs)
    with preserved(model):
        kept = cut(model, runs, counts=counts)
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


def _check(model: nn.Module, call: Prepared, runs: tuple[Run, ...]) -> bool:
    """Compare both models, at first with the numbers of layers as they are; whether they must be cut too."""
    tag(model, call, runs)
    refusal = None
    for counts in (False, True):
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                with preserved(model), known_values(call.origins()):
                    story = tell(model, call, runs, cut(model, runs, counts=counts))
                with preserved(model):
                    compare(story, model, call, runs)
            return counts
        except NotFoldable as error:
            refusal = refusal or error
    assert refusal is not None
    raise refusal


def _renamed(entry: tuple[str, Any], kept: Mapping[str, tuple[int, ...]]) -> tuple[str, Any]:
    kind, name = entry
    return kind, renumbered(name, kept) if isinstance(name, str) else name
