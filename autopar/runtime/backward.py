"""Backward of compiled programs, and the clipping of distributed gradients.

Each call supports one backward, and only first derivatives. Function transforms, tracing and export
are refused.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from autopar.errors import RuntimeStateError
from autopar.kernels.collectives import AxisGroup, all_reduce, use_groups
from autopar.runtime.device_mesh import groups_of


def refuse_transforms() -> None:
    """Raise an error under a transform of torch.func (`grad`, `vmap`), since a program runs only on
    real tensors.

    Raises:
        RuntimeStateError: if a transform is active.
    """
    if torch._C._are_functorch_transforms_active():
        message = (
            "called under a transform of torch.func (grad, vjp, jvp, vmap, jacrev, ...): a compiled"
            " program cannot be transformed"
        )
        remedy = (
            "use backward: torch.autograd.grad(pm(x), list(pm.parameters())) also works under"
            " functional_call; compute other derivatives and per-sample gradients with the plain"
            " model"
        )
        raise RuntimeStateError(message, remedy=remedy)


def refuse_tracing(args: object) -> None:
    """Raise an error under torch.jit.trace, torch.export or torch.fx, which would record the
    program of one rank without its collectives.

    Args:
        args: the positional arguments of the call; torch.fx passes a proxy instead of a tuple.

    Raises:
        RuntimeStateError: if the call is traced.
    """
    is_fx = not isinstance(args, tuple)
    if is_fx or torch.jit.is_tracing() or torch.compiler.is_exporting():
        tracer = "torch.fx" if is_fx else "torch.jit" if torch.jit.is_tracing() else "torch.export"
        message = (
            f"a compiled module cannot be traced by {tracer}: it is already a program of several"
            " processes"
        )
        remedy = (
            "trace the plain model instead: autopar.save_weights(pm, folder) writes the trained"
            " weights for it"
        )
        raise RuntimeStateError(message, remedy=remedy)


def which_are_plain(given: Iterable[Tensor]) -> tuple[bool, ...]:
    """Return whether each tensor is a plain tensor, not a DTensor. Plain tensors are inputs and
    parameters that `torch.func.functional_call` replaced."""
    return tuple(not isinstance(x, DTensor) for x in given)


def as_given(
    gradients: Iterable[Tensor | None], are_plain: Iterable[bool]
) -> tuple[Tensor | None, ...]:
    """Convert the gradients of plain tensors to plain tensors; other gradients are unchanged."""
    pairs = zip(gradients, are_plain, strict=True)
    return tuple(
        gradient.to_local() if plain and isinstance(gradient, DTensor) else gradient
        for gradient, plain in pairs
    )


def ran_twice() -> RuntimeStateError:
    """Return the error for a second backward through one call."""
    message = "backward ran a second time for one call, whose saved tensors are already freed"
    return RuntimeStateError(
        message,
        remedy="call the module again before each backward; each call supports one backward",
    )


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the `backward` of an autograd function to raise an error if its result would be
    differentiated again.

    torch's `once_differentiable` returns gradients without a graph if no incoming gradient has a
    graph, for example the gradient of a scalar loss. A gradient penalty on them would train nothing
    and raise no error.
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def refuse_create_graph(ctx: Any, *tangents: Any) -> Any:
        """Raise RuntimeStateError under `create_graph`, which enables gradients during backward;
        otherwise run backward."""
        if torch.is_grad_enabled():
            message = (
                "backward with create_graph=True: a program computes first derivatives only, and"
                " these gradients would have no graph"
            )
            remedy = (
                "leave create_graph out; if the loss uses gradients of gradients (a gradient"
                " penalty), train the plain model"
            )
            raise RuntimeStateError(message, remedy=remedy)
        return once(ctx, *tangents)

    return refuse_create_graph


# --------------------------------------------------------------------------------------------------
# The norm of gradients with different placements on a mesh.
#
# torch's multi-tensor operators read all gradients in place with one call.
# `autopar.kernels.packing.pack` also computes sums of squares, but it would write a bucket of all
# gradients that is not needed here.


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients in place so that their norm, over all parameters and ranks, is at most
    `max_norm`.

    Every element of every gradient counts once, even if it is replicated: along an axis that
    replicates a gradient, only the rank with coordinate 0 counts it. The norm is computed in fp32,
    or in fp64 if a gradient is in fp64.

    Args:
        parameters: the parameters; those without a gradient are skipped.
        max_norm: the largest norm.
        norm_type: the order of the norm; `math.inf` selects the largest element.

    Returns:
        The norm before scaling, a scalar that is equal on all ranks.

    Raises:
        RuntimeStateError: if `norm_type` is not positive.
    """
    _refuse_no_norm(norm_type)
    gradients = [p.grad for p in parameters if p.grad is not None]
    if not gradients:
        return torch.tensor(0.0)
    total = _norm(gradients, float(norm_type))
    _scale(gradients, max_norm, total)
    return total


@torch.no_grad()
def clip_over_stages(
    parameters: Sequence[tuple[Tensor, bool]],
    max_norm: float,
    norm_type: float,
    pipeline: dist.ProcessGroup | None,
    devices: DeviceMesh,
) -> Tensor:
    """Scale gradients like `clip_grad_norm_`, with the norm over the parameters of all stages.

    Args:
        parameters: pairs of a parameter and whether it counts on this rank; a parameter that is
            used by several stages counts in one of them.
        max_norm, norm_type: as for `clip_grad_norm_`.
        pipeline: the group of ranks with the same coordinate in all stages; None for one stage.
        devices: the mesh of the stage.

    Returns:
        The norm before scaling, a scalar that is equal on all ranks.
    """
    _refuse_no_norm(norm_type)
    counted = [p.grad for p, counts in parameters if counts and p.grad is not None]
    here = _norm(counted, float(norm_type)) if counted else torch.tensor(0.0)
    total = here.double().to(devices.device_type)
    if pipeline is not None and math.isinf(norm_type):
        dist.all_reduce(total, dist.ReduceOp.MAX, pipeline)
    elif pipeline is not None:
        total = total.pow(norm_type)
        dist.all_reduce(total, dist.ReduceOp.SUM, pipeline)
        total = total.pow(1.0 / norm_type)
    _scale([p.grad for p, _ in parameters if p.grad is not None], max_norm, total)
    return total.to(here.dtype)


def _refuse_no_norm(norm_type: float) -> None:
    """Raise an error if `norm_type` is not positive. Such a norm counts nonzero tensors or takes
    the smallest elements, which cannot be computed from shards."""
    if not norm_type > 0:
        raise RuntimeStateError(
            f"norm_type={norm_type} is not a norm",
            remedy="pass a positive number, or math.inf for the largest element",
        )


def _scale(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    locals = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    kinds = dict.fromkeys(
        (local.dtype, local.device) for local in locals
    )  # gradients of offloaded parameters are on the host
    for dtype, device in kinds:  # the factor keeps its dtype; a 16-bit factor would be rounded
        torch._foreach_mul_(
            [x for x in locals if (x.dtype, x.device) == (dtype, device)], scale.to(device)
        )


def _norm(gradients: Sequence[Tensor], norm_type: float) -> Tensor:
    groups: tuple[AxisGroup, ...] = next(
        (groups_of(g.device_mesh) for g in gradients if isinstance(g, DTensor)), ()
    )
    dtype = (
        torch.float64
        if any(g.dtype.to_real() == torch.float64 for g in gradients)
        else torch.float32
    )
    locals = [
        g.to_local() if isinstance(g, DTensor) else g for g in gradients if _counts_here(g, groups)
    ]
    device = _device(gradients)
    if math.isinf(norm_type):
        largest = [local.abs().max().to(device, dtype) for local in locals if local.numel()]
        return _reduce_over_axes(
            torch.stack(largest or [_zero(gradients, dtype)]).max(), "max", groups
        )
    norms: list[Tensor] = []
    for is_complex, at in dict.fromkeys((local.is_complex(), local.device) for local in locals):
        same_kind = [
            local for local in locals if (local.is_complex(), local.device) == (is_complex, at)
        ]
        device_norms = torch._foreach_norm(
            same_kind, norm_type, dtype=dtype.to_complex() if is_complex else dtype
        )
        norms += [norm.to(device) for norm in device_norms]
    return _reduce_over_axes(
        torch.stack(norms or [_zero(gradients, dtype)]).pow(norm_type).sum(), "sum", groups
    ).pow(1.0 / norm_type)


def _zero(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=_device(gradients))


def _device(gradients: Sequence[Tensor]) -> torch.device:
    """Return the device on which ranks communicate, which is the device of the mesh. Gradients of
    offloaded parameters are on the host."""
    kind = next(
        (g.device_mesh.device_type for g in gradients if isinstance(g, DTensor)),
        gradients[0].device.type,
    )
    return next((g.device for g in gradients if g.device.type == kind), torch.device(kind))


def _counts_here(gradient: Tensor, groups: Sequence[AxisGroup]) -> bool:
    """Return whether this rank is the first of the ranks that hold the same shard. Gradients may
    have different meshes over the same devices."""
    if not isinstance(gradient, DTensor):
        return all(group.coordinate == 0 for group in groups)
    coordinate = gradient.device_mesh.get_coordinate() or ()
    return all(
        at == 0 or not isinstance(p, Replicate)
        for p, at in zip(gradient.placements, coordinate, strict=True)
    )


def _reduce_over_axes(value: Tensor, reduce_op: str, groups: Sequence[AxisGroup]) -> Tensor:
    with use_groups(groups):
        for axis in range(len(groups)):
            value = all_reduce(value, reduce_op, axis)
    return value
