"""Replacements of ATen ops whose kernels require a memory format; they accept operands in any
format.

The kernels assume contiguous operands; for others, they fail or return wrong results. torch copies
the operands in code that is not part of a graph: above the dispatcher (`group_norm`, `pdist`,
`embedding_bag`), or in the formulas of autograd. If a value is contiguous during the capture, no
copy is recorded. In a program, it may have other strides: inputs, parameters and results of
collectives are always contiguous, so a view of them that was contiguous during the capture may not
be. Therefore each function of this module copies the operands when it runs, if necessary.
`ANY_FORMAT` maps each op to its function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def _of_contiguous(op: Any) -> Callable[..., Any]:
    """Wrap `op` so that it copies operands that are not contiguous."""

    def call(*args: Any, **kwargs: Any) -> Any:
        """Call `op` with contiguous operands."""
        return op(
            *map(_contiguous, args), **{name: _contiguous(value) for name, value in kwargs.items()}
        )

    name = op._schema.name.partition("::")[2]
    call.__name__ = call.__qualname__ = name
    call.__doc__ = f"Compute torch's `{name}` of operands in any memory format."
    parameters = [_parameter(argument) for argument in op._schema.arguments]
    call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return call


def _parameter(argument: Any) -> inspect.Parameter:
    kind = (
        inspect.Parameter.KEYWORD_ONLY
        if argument.kwarg_only
        else inspect.Parameter.POSITIONAL_OR_KEYWORD
    )
    default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
    return inspect.Parameter(argument.name, kind, default=default)


def _contiguous(value: Any) -> Any:
    return value.contiguous() if isinstance(value, Tensor) else value


def _format_of(x: Tensor) -> torch.memory_format:
    """Return the memory format in which image kernels read `x`: channels-last if `x` has that
    format, else contiguous."""
    layout = {4: torch.channels_last, 5: torch.channels_last_3d}.get(
        x.dim(), torch.contiguous_format
    )
    return (
        layout
        if not x.is_contiguous() and x.is_contiguous(memory_format=layout)
        else torch.contiguous_format
    )


def native_group_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute torch's `native_group_norm` of operands in any memory format.

    Args:
        x: the operand, ``[N, C, ...]`` with HxW elements in the other dims.
        weight: the weight, ``[C]``, or None.
        bias: the bias, ``[C]``, or None.
        N: batch size.
        C: number of channels.
        HxW: number of elements in the other dims.
        group: number of groups.
        eps: the epsilon.
    """
    x = x.contiguous(memory_format=_format_of(x))
    result: tuple[Tensor, Tensor, Tensor] = aten.native_group_norm.default(
        x, _contiguous(weight), _contiguous(bias), N, C, HxW, group, eps
    )
    return result


def native_group_norm_backward(
    grad: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    N: int,
    C: int,
    HxW: int,
    group: int,
    output_mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Compute torch's `native_group_norm_backward` of operands in any memory format; its kernel
    assumes that `grad` has the format of `x`.

    Args:
        grad: gradient of the result, ``[N, C, ...]``.
        x: the operand, ``[N, C, ...]`` with HxW elements in the other dims.
        mean: means, ``[N, group]``.
        rstd: reciprocal standard deviations, ``[N, group]``.
        weight: the weight, ``[C]``, or None.
        N: batch size.
        C: number of channels.
        HxW: number of elements in the other dims.
        group: number of groups.
        output_mask: which of the three gradients to compute.
    """
    layout = _format_of(x)
    grad, x = grad.contiguous(memory_format=layout), x.contiguous(memory_format=layout)
    operands = grad, x, *map(_contiguous, (mean, rstd, weight))
    result: tuple[Tensor | None, Tensor | None, Tensor | None]
    result = aten.native_group_norm_backward.default(*operands, N, C, HxW, group, output_mask)
    return result


native_layer_norm_backward = _of_contiguous(aten.native_layer_norm_backward.default)
_weight_norm_interface = _of_contiguous(aten._weight_norm_interface.default)
_weight_norm_interface_backward = _of_contiguous(aten._weight_norm_interface_backward.default)
_pdist_forward = _of_contiguous(aten._pdist_forward.default)
_pdist_backward = _of_contiguous(aten._pdist_backward.default)
_embedding_bag = _of_contiguous(aten._embedding_bag.default)
_embedding_bag_forward_only = _of_contiguous(aten._embedding_bag_forward_only.default)
_embedding_bag_backward = _of_contiguous(aten._embedding_bag_backward.default)
_embedding_bag_per_sample_weights_backward = _of_contiguous(
    aten._embedding_bag_per_sample_weights_backward.default
)
adaptive_max_pool3d_backward = _of_contiguous(aten.adaptive_max_pool3d_backward.default)
fractional_max_pool2d_backward = _of_contiguous(aten.fractional_max_pool2d_backward.default)
fractional_max_pool3d_backward = _of_contiguous(aten.fractional_max_pool3d_backward.default)

ANY_FORMAT: Mapping[Any, Callable[..., Any]] = {
    aten.native_group_norm.default: native_group_norm,
    aten.native_group_norm_backward.default: native_group_norm_backward,
    aten.native_layer_norm_backward.default: native_layer_norm_backward,
    aten._weight_norm_interface.default: _weight_norm_interface,
    aten._weight_norm_interface_backward.default: _weight_norm_interface_backward,
    aten._pdist_forward.default: _pdist_forward,
    aten._pdist_backward.default: _pdist_backward,
    aten._embedding_bag.default: _embedding_bag,
    aten._embedding_bag_forward_only.default: _embedding_bag_forward_only,
    aten._embedding_bag_backward.default: _embedding_bag_backward,
    aten._embedding_bag_per_sample_weights_backward.default: (
        _embedding_bag_per_sample_weights_backward
    ),
    aten.adaptive_max_pool3d_backward.default: adaptive_max_pool3d_backward,
    aten.fractional_max_pool2d_backward.default: fractional_max_pool2d_backward,
    aten.fractional_max_pool3d_backward.default: fractional_max_pool3d_backward,
}
"""ATen op → the function that replaces it in normal form."""

_ORIGINAL = {function: op for op, function in ANY_FORMAT.items()}


def aten_op_of(target: Callable[..., Any]) -> Callable[..., Any]:
    """Return the ATen op that a function of this module replaces; return other targets
    unchanged."""
    aten_op: Callable[..., Any] = _ORIGINAL.get(target, target)
    return aten_op
