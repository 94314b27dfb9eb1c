"""Steps whose gradients are all truly zero, and hold rounding noise alone: the loss sees no parameter, as the sum of a softmax does not.

There is no gradient then against which an error could be measured. What is there is measured by what backward adds up instead: the largest
magnitude of what follows from the loss' tangent, times that of parameters and inputs where this is larger than 1. All are zero where none
is more than a rounding of that, and where the traced graph's, at weights that are rounded otherwise, are not what they were: a true
gradient, however small, hardly changes then.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar.verification.case import Case
from autopar.verification.comparison import Results, magnitude

_ROUNDINGS = 3  # of the weights; noise of few numbers may be the same by chance
_SAME = 0.1  # a share of gradients by which noise changes at least


def scale_of_zeros(case: Case, reference: Results, rounding: float) -> float:
    """The magnitude by which gradients are measured that are all zero; 0 where one of the reference's is not.

    Args:
        rounding: the share of that magnitude that is a rounding.
    """
    largest, follows = 0.0, {case.trace.node(o.tangent) for o in case.trace.differentiable}

    def observe(node: fx.Node, value: Any) -> None:
        nonlocal largest
        if node in follows or follows.intersection(node.all_input_nodes):
            follows.add(node)
            parts = value if isinstance(value, tuple | list) else (value,)
            largest = max((largest, *(magnitude(part) for part in parts if isinstance(part, Tensor))))

    gradients = case.run_traced(observe).gradients
    read = [x for x in (*(case.tensors[p.name] for p in case.trace.parameters), *case.inputs) if x.is_floating_point() or x.is_complex()]
    scale = largest * max((1.0, *(magnitude(x) for x in read)))
    if any(magnitude(x) > rounding * scale for x in (*reference.gradients.values(), *gradients.values())):
        return 0.0
    size = sum(float(x.abs().sum()) for x in gradients.values())
    share = torch.finfo(case.computed).eps ** 0.5  # the lower half of the digits
    moved = [_rounded(case, seed, share).run_traced().gradients for seed in range(_ROUNDINGS if size else 0)]
    changes = [sum(float((there[name] - x).abs().sum()) for name, x in gradients.items()) for there in moved]
    return scale if not size or max(changes) > _SAME * size else 0.0


def noise_of_rounding(case: Case) -> dict[str, float]:
    """By parameter, how far its gradient moves if each weight is changed by one rounding.

    Every order of summation rounds in another way, so no two programs agree more closely than that. A gradient that is
    zero up to rounding, in a step where others are not, is such a case: of the bias of a batch norm whose result is
    normed again. Noise grows there through each norm of nearly equal numbers.

    Returns:
        The largest change of an element, by the name of a parameter.
    """
    eps = torch.finfo(case.computed).eps
    gradients = case.run_traced().gradients
    moved = [_rounded(case, seed, 2 * eps).run_traced().gradients for seed in range(_ROUNDINGS)]
    return {name: max(magnitude(there[name] - x) for there in moved) for name, x in gradients.items()}


def _rounded(case: Case, seed: int, share: float) -> Case:
    """The case with weights that differ by at most half of `share`."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name in (p.name for p in case.trace.parameters):
        x = case.tensors[name]
        factor = 1 + share * (torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5)
        changed[name] = x * factor.to(x.device, case.computed)
    return replace(case, tensors={**case.tensors, **changed})
