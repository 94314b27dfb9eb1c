"""Hardware on which attention takes most of the step time, as for long sequences."""

from __future__ import annotations

import copy
from functools import cache

from autopar.core.hardware import HardwareProfile


@cache
def slow_attention() -> HardwareProfile:
    """Return an H100 on which attention has a low efficiency at all sizes."""
    data = copy.deepcopy(HardwareProfile.read("h100-sxm"))
    data["matmul_half_flops"]["value"] = 0
    for kind in ("attention", "attention_backward"):
        for figure in data["efficiency"][kind].values():
            figure["value"] = 1e-6
    return HardwareProfile.from_json(data)
