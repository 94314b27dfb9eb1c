"""Capture that costs the same for deep models: equal layers in a row are captured a few at a time,
and repeated.

::

    find_runs ─→ cut ─→ tell ─→ compare with the full model ─→ raw_joint of the short one ─→ passes
    ─→ repeat
    runs,        cutting  checking, stream, entries             shortened
                                                                units, repeating
    likeness

A run of equal units is cut to its first two and its last two. Three ways of cutting are tried
(`cutting.Way`): forward may iterate over the layers, count them, or name each. The shortened model
is captured and brought into normal form, and the pattern that its interior units share is repeated
in the graph. Two things must hold, or the run is replaced by others (`Run.others`) or left out; if
none remains, the model is captured in full and the trace says why: the full model's forward, op by
op, is the shortened one's with the interior unit repeated (`compare`); and in the joint graph the
interior units are alike and read by their neighbours only (`repeat`).
"""

from __future__ import annotations

from autopar.capture.folding.repeating import renumber_path, repeat, repeat_attributes
from autopar.capture.folding.runs import Run
from autopar.capture.folding.shortened import Shortened, capture_shortened
from autopar.capture.folding.stream import NotFoldable

__all__ = [
    "NotFoldable",
    "Run",
    "Shortened",
    "capture_shortened",
    "renumber_path",
    "repeat",
    "repeat_attributes",
]
