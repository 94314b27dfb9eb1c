"""Scales for the errors of results that are zero up to rounding: the mean of centred values, the
sum of a softmax minus one, or the gradients of a loss that does not depend on the parameters.

An error relative to such a value is meaningless. It is measured relative to the terms that were
summed. Each sum has the scale of its terms, and the scale passes through linear ops: additions,
factors and views. All other ops start again from the magnitude of their results, so that a large
constant before a softmax (the fill value of a mask) does not affect the ops after it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from autopar import ops
from autopar.capture.execute import call_node, device_of
from autopar.core.autocast_state import as_written
from autopar.ops import norms
from autopar.verification.case import Case
from autopar.verification.comparison import Results, magnitude

aten = torch.ops.aten
_AS_READ = frozenset(
    (
        aten.view.default,
        aten.transpose.int,
        aten.permute.default,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.clone.default,
        aten._to_copy.default,
        aten.neg.default,
    )
)
Scales = dict[fx.Node, float]


def scales_of_sums(case: Case) -> dict[str, float]:
    """Return, by name, the scale of the terms that were summed for each output and buffer in the
    traced graph; 0 if it has none."""
    scales: Scales = {}

    def observe(node: fx.Node, value: Any) -> None:
        """Record the scale of the terms that were summed for a node."""
        if isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex()):
            scale = (
                _SCALES.get(node.target, _own_scale) if node.op == "call_function" else _own_scale
            )
            scales[node] = max(
                magnitude(value),
                _as_read(node, value, scales)
                if node.target in _AS_READ
                else scale(node, value, scales),
            )

    case.run_traced(observe)
    trace = case.trace
    results = next(iter(reversed(trace.graph.nodes))).args[0]
    named = {o.path: trace.node(o.node) for o in trace.outputs} | {
        name: results[at] for name, at in trace.mutated.items()
    }
    return {name: scales.get(node, 0.0) for name, node in named.items()}


def _own_scale(node: fx.Node, value: Tensor, scales: Scales) -> float:
    return magnitude(value)


def _as_read(node: fx.Node, value: Tensor, scales: Scales) -> float:
    return _scale(node.args[0], scales)


def _scale_of_addition(node: fx.Node, value: Tensor, scales: Scales) -> float:
    return sum(_scale(arg, scales) for arg in node.args[:2]) * max(
        1.0, abs(_number(node.kwargs.get("alpha", 1)))
    )


def _scale_of_product(node: fx.Node, value: Tensor, scales: Scales) -> float:
    return math.prod(_scale(arg, scales) for arg in node.args[:2])


def _scale_of_quotient(node: fx.Node, value: Tensor, scales: Scales) -> float:
    divisor = node.args[1]
    return (
        _scale(node.args[0], scales) / abs(_number(divisor))
        if isinstance(divisor, int | float) and divisor
        else magnitude(value)
    )


def _scale_of_sum(node: fx.Node, value: Tensor, scales: Scales) -> float:
    """Return the number of terms of a sum times the scale of the largest term."""
    num = node.args[0].meta["val"].numel() / max(value.numel(), 1)
    return _scale(node.args[0], scales) * num


def _scale_of_squares(node: fx.Node, value: Tensor, scales: Scales) -> float:
    return _scale(node.args[0], scales) * _scale_of_sum(node, value, scales)


def _scale_of_contraction(node: fx.Node, value: Tensor, scales: Scales) -> float:
    equation, *operands = node.args
    inputs, result_term = str(equation).split("->")
    sizes = {
        x: size
        for term, read in zip(inputs.split(","), operands, strict=False)
        for x, size in zip(term, read.meta["val"].shape, strict=True)
    }
    product = math.prod(_scale(x, scales) for x in operands[:2]) * math.prod(
        size for x, size in sizes.items() if x not in result_term
    )
    return product + sum(_scale(x, scales) for x in operands[2:])


def _scale(read: Any, scales: Scales) -> float:
    return scales.get(read, 0.0) if isinstance(read, fx.Node) else abs(_number(read))


def _number(x: Any) -> float:
    return float(abs(x)) if isinstance(x, int | float | complex) else 0.0


_SCALES: Mapping[Any, Callable[[fx.Node, Tensor, Scales], float]] = {
    aten.add.Tensor: _scale_of_addition,
    aten.sub.Tensor: _scale_of_addition,
    aten.mul.Tensor: _scale_of_product,
    aten.mul.Scalar: _scale_of_product,
    aten.div.Tensor: _scale_of_quotient,
    aten.div.Scalar: _scale_of_quotient,
    aten.sum.default: _scale_of_sum,
    aten.sum.dim_IntList: _scale_of_sum,
    aten.mean.default: _as_read,
    aten.mean.dim: _as_read,
    norms.channel_sum: _scale_of_sum,
    norms.squared_deviation: _scale_of_squares,
    ops.dot: _scale_of_contraction,
}


# --------------------------------------------------------------------------------------------------
# Steps in which all gradients are exactly zero in theory and contain only rounding noise: the loss
# does not depend on the parameters, as with the sum of a softmax.
#
# No gradient can serve as a scale for errors then. The scale is that of the terms that backward
# sums: the largest magnitude of the values that follow from the tangent of the loss, times the
# largest magnitude of parameters and inputs if this exceeds 1. All gradients count as zero if none
# exceeds a rounding of this scale, and if those of the traced graph change when the weights are
# rounded differently. A true gradient, however small, hardly changes then.

_ROUNDINGS = 3  # trials with other weights; the noise of few numbers may agree by chance
_SAME = 0.1  # least change of noise, as a share of the gradients


def scale_of_zeros(case: Case, reference: Results, rounding: float) -> float:
    """Return the scale for errors of gradients that are all zero; 0 if one of them is not zero.

    Args:
        case: the comparison; its traced graph runs.
        reference: results to compare with.
        rounding: share of the scale that counts as rounding.
    """
    largest, follows = 0.0, {case.trace.node(o.tangent) for o in case.trace.differentiable}

    def observe(node: fx.Node, value: Any) -> None:
        """Record the magnitude of a node that follows from a tangent."""
        nonlocal largest
        if node in follows or follows.intersection(node.all_input_nodes):
            follows.add(node)
            parts = value if isinstance(value, tuple | list) else (value,)
            largest = max(
                (largest, *(magnitude(part) for part in parts if isinstance(part, Tensor)))
            )

    gradients = case.run_traced(observe).gradients
    read = [
        x
        for x in (*(case.tensors[p.name] for p in case.trace.parameters), *case.inputs)
        if x.is_floating_point() or x.is_complex()
    ]
    scale = largest * max((1.0, *(magnitude(x) for x in read)))
    if any(
        magnitude(x) > rounding * scale
        for x in (*reference.gradients.values(), *gradients.values())
    ):
        return 0.0
    size = sum(float(x.abs().sum()) for x in gradients.values())
    share = torch.finfo(case.compute_dtype).eps ** 0.5  # the lower half of the digits of a weight
    moved = [
        _perturb_weights(case, seed, share).run_traced().gradients
        for seed in range(_ROUNDINGS if size else 0)
    ]
    changes = [
        sum(float((there[name] - x).abs().sum()) for name, x in gradients.items())
        for there in moved
    ]
    return scale if not size or max(changes) > _SAME * size else 0.0


def noise_of_rounding(case: Case) -> dict[str, float]:
    """Return the change of each parameter's gradient if every weight changes by one rounding.

    Each order of summation rounds differently, so two programs cannot agree more closely. This
    matters for a gradient that is zero up to rounding in a step with other gradients that are not,
    such as the bias of a batch norm whose result is normed again. There, noise grows with each norm
    of nearly equal numbers.

    Returns:
        The largest change of an element, by parameter name.
    """
    eps = torch.finfo(case.compute_dtype).eps
    gradients = case.run_traced().gradients
    moved = [
        _perturb_weights(case, seed, 2 * eps).run_traced().gradients for seed in range(_ROUNDINGS)
    ]
    return {
        name: max(magnitude(there[name] - x) for there in moved) for name, x in gradients.items()
    }


_ROUNDED = 8  # perturbation of an operand, in roundings of its largest magnitude


def depends_on_rounding(
    node: fx.Node,
    values: Mapping[str, tuple[Any, ...]],
    dtype: torch.dtype | None,
    differs: Callable[[Any], bool],
) -> bool:
    """Return whether the result of a traced node changes if its operands change by their rounding.
    That of a top-k of nearly equal numbers does.

    Args:
        node: the node.
        values: the results of all traced nodes, by name.
        dtype: the dtype in which they were computed; None for the dtypes of the trace.
        differs: returns whether a result of the node differs from the one in `values`.
    """
    if node.op != "call_function" or any(n.name not in values for n in node.all_input_nodes):
        return False

    def result_with(change: Callable[[Any], Any]) -> Any:
        """Return the result of the node with changed operands."""

        def operand(n: fx.Node) -> Any:
            """Return the changed result of an operand's node."""
            parts = tuple(map(change, values[n.name]))
            return parts if len(parts) > 1 else parts[0]

        return call_node(node, operand, dtype, device)

    device = device_of(x for parts in values.values() for x in parts if isinstance(x, Tensor))
    generator = torch.Generator().manual_seed(0)
    with as_written():
        if differs(result_with(_copy)):  # draws random numbers, for example
            return False
        try:
            return any(
                differs(result_with(lambda x: _perturb(x, generator))) for _ in range(_ROUNDINGS)
            )
        except RuntimeError:  # the op checks its operands, and refuses the changed ones
            return False


def _copy(x: Any) -> Any:
    return x.clone() if isinstance(x, Tensor) else x


def _perturb(x: Any, generator: torch.Generator) -> Any:
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return _copy(x)
    change = torch.rand(x.shape, generator=generator, dtype=torch.float64).to(x.device, x.dtype)
    return x + (2 * change - 1) * (_ROUNDED * torch.finfo(x.dtype).eps * magnitude(x))


def _perturb_weights(case: Case, seed: int, share: float) -> Case:
    """Return the case with weights that change by a random share of at most half of `share`."""
    generator = torch.Generator().manual_seed(seed)
    changed = {}
    for name in (p.name for p in case.trace.parameters):
        x = case.tensors[name]
        factor = 1 + share * (torch.rand(x.shape, generator=generator, dtype=torch.float64) - 0.5)
        changed[name] = x * factor.to(x.device, case.compute_dtype)
    return replace(case, tensors={**case.tensors, **changed})
