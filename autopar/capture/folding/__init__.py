"""Capture a few of the equal layers of a deep model, and repeat them in the graph.

The time of a capture then does not depend on the depth of the model.

::

    find_runs ─→ cut ─→ tell ─→ compare with the full model ─→ raw_joint of the short one ─→ passes
    ─→ repeat
    runs         cutting  shortened, stream                    shortened
                                                               units, repeating

A run of equal units is shortened to its first two and its last two units. Three ways are tried
(`shorten.CutWay`), for models that iterate over the layers, count them, or access them by name. The
shortened model is captured and converted to normal form. The common pattern of its interior units
is then repeated in the graph. Two conditions are checked:

- the ops of the full model's forward are those of the shortened model with the interior unit
  repeated (`compare`);
- in the joint graph, the interior units are equal, and only they and their neighbours read their
  results (`repeat`).

If a check fails, the run is replaced by other runs (`Run.others`) or dropped. If no run remains,
the model is captured in full, and the trace gives the reason.
"""

from __future__ import annotations

from autopar.capture.folding.repeating import renumber_path, repeat, repeat_attributes
from autopar.capture.folding.runs import Run
from autopar.capture.folding.shortened import ShortenedCapture, capture_shortened
from autopar.capture.folding.stream import NotFoldable

__all__ = [
    "NotFoldable",
    "Run",
    "ShortenedCapture",
    "capture_shortened",
    "renumber_path",
    "repeat",
    "repeat_attributes",
]
