"""Capture equal layers of a deep model a few at a time, and repeat them in the graph.

The cost of a capture then does not depend on the depth of the model.

::

    find_runs ─→ cut ─→ tell ─→ compare with the full model ─→ raw_joint of the short one ─→ passes
    ─→ repeat
    runs         cutting  shortened, stream                    shortened
                                                               units, repeating

A run of equal units is cut to its first two and its last two units. Three ways of cutting are tried
(`shorten.CutWay`): forward may iterate over the layers, count them, or name each. The shortened
model is captured and brought into normal form, and the pattern that its interior units share is
repeated in the graph. Two conditions are checked:

- the full model's forward, op by op, is the shortened model's with the interior unit repeated
  (`compare`);
- in the joint graph, the interior units are alike, and only their neighbours read them (`repeat`).

If one fails, the run is replaced by others (`Run.others`) or left out. If no run remains, the model
is captured in full, and the trace states why.
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
