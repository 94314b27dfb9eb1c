"""Backward of what programs compute: once, and of first derivatives only; and no other way to
derive, trace or export it."""

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
    """Raises RuntimeStateError under one of torch.func (`grad`, `vmap`), whose tensors stand for
    others: a program runs on real ones."""
    if torch._C._are_functorch_transforms_active():
        what = (
            "called under a transform of torch.func (grad, vjp, jvp, vmap, jacrev, ...): a program"
            " is run, and cannot be transformed"
        )
        remedy = (
            "differentiate by backward: torch.autograd.grad(pm(x), list(pm.parameters())), also of"
            " what functional_call passes; other derivatives, and those of each sample, are the"
            " plain model's to compute"
        )
        raise RuntimeStateError(what, remedy=remedy)


def refuse_tracing(args: object) -> None:
    """Raises RuntimeStateError under torch.jit.trace, torch.export and torch.fx, which would record
    one rank's share, without collectives.

    Args:
        args: the call's positional arguments, in the place of which torch.fx passes a proxy.
    """
    is_fx = not isinstance(args, tuple)
    if is_fx or torch.jit.is_tracing() or torch.compiler.is_exporting():
        tracer = "torch.fx" if is_fx else "torch.jit" if torch.jit.is_tracing() else "torch.export"
        what = (
            f"a compiled module is not traced by {tracer}: it is a program of several processes"
            " already"
        )
        remedy = (
            "trace the plain model, with what was trained: autopar.save_weights(pm, folder) writes"
            " what it loads"
        )
        raise RuntimeStateError(what, remedy=remedy)


def which_are_plain(given: Iterable[Tensor]) -> tuple[bool, ...]:
    """Of what autograd gives, which are no DTensors: inputs, and what
    `torch.func.functional_call` puts in the place of parameters."""
    return tuple(not isinstance(x, DTensor) for x in given)


def as_given(
    gradients: Iterable[Tensor | None], are_plain: Iterable[bool]
) -> tuple[Tensor | None, ...]:
    """Gradients as plain tensors where that is what they are of."""
    pairs = zip(gradients, are_plain, strict=True)
    return tuple(
        gradient.to_local() if plain and isinstance(gradient, DTensor) else gradient
        for gradient, plain in pairs
    )


def ran_twice() -> RuntimeStateError:
    """The error of a backward through a call whose backward has run."""
    what = "backward ran a second time through one call, and what it needs has been freed"
    return RuntimeStateError(
        what, remedy="call the module again before each backward; one call gives one backward"
    )


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` of an autograd function that is refused where its result is to be differentiated
    again.

    torch's own `once_differentiable` leaves gradients without a graph there where nothing that
    comes back has one, as of a bare loss: a penalty on them would train nothing, silently.
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def refusing(ctx: Any, *tangents: Any) -> Any:
        """Raises RuntimeStateError under `create_graph`, with which autograd runs backward with
        gradients enabled."""
        if torch.is_grad_enabled():
            what = (
                "backward with create_graph=True: programs have first derivatives only, and these"
                " gradients would have no graph"
            )
            remedy = (
                "leave create_graph out; what needs gradients of gradients, a penalty on them, is"
                " trained as the plain model"
            )
            raise RuntimeStateError(what, remedy=remedy)
        return once(ctx, *tangents)

    return refusing


# --------------------------------------------------------------------------------------------------
# The norm of gradients that lie on a mesh in different placements.
#
# Many gradients are one call of torch's multi-tensor operators, which read them where they lie:
# `autopar.kernels.packing.pack`, which sums squares too, would write a bucket of all gradients
# that nothing here reads.


@torch.no_grad()
def clip_grad_norm_(
    parameters: Iterable[Tensor], max_norm: float, norm_type: float = 2.0
) -> Tensor:
    """Scale the gradients in place so that their norm, over all parameters and ranks, is at most
    `max_norm`.

    Every element of every gradient counts once, however often it is replicated: a rank counts its
    part only where its coordinate is 0 on each axis that replicates it. Computed in fp32, or fp64
    where a gradient is.

    Returns:
        The norm before scaling, a scalar, equal on all ranks.

    Raises:
        RuntimeStateError: where `norm_type` is not positive.
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
    """As `clip_grad_norm_`, over the parameters of all stages.

    Args:
        parameters: each with whether it counts here; one that several stages hold counts in one.
        pipeline: the ranks at this place in all stages. devices: the stage's mesh.
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
    """torch's function counts the tensors that are not zero, or takes their smallest elements,
    of which parts of tensors know nothing."""
    if not norm_type > 0:
        raise RuntimeStateError(
            f"norm_type={norm_type} is no norm",
            remedy="pass a positive number, or math.inf for the largest element",
        )


def _scale(gradients: Sequence[Tensor], max_norm: float, total: Tensor) -> None:
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    locals = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    kinds = dict.fromkeys(
        (local.dtype, local.device) for local in locals
    )  # of offloaded parameters they are on the host
    for dtype, device in kinds:  # the factor stays as wide as it is: a 16-bit one would be rounded
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
        return _total(torch.stack(largest or [_zero(gradients, dtype)]).max(), "max", groups)
    norms: list[Tensor] = []
    for is_complex, at in dict.fromkeys((local.is_complex(), local.device) for local in locals):
        alike = [
            local for local in locals if (local.is_complex(), local.device) == (is_complex, at)
        ]
        found = torch._foreach_norm(
            alike, norm_type, dtype=dtype.to_complex() if is_complex else dtype
        )
        norms += [norm.to(device) for norm in found]
    return _total(
        torch.stack(norms or [_zero(gradients, dtype)]).pow(norm_type).sum(), "sum", groups
    ).pow(1.0 / norm_type)


def _zero(gradients: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.zeros((), dtype=dtype, device=_device(gradients))


def _device(gradients: Sequence[Tensor]) -> torch.device:
    """Where ranks communicate: the mesh's device, on which gradients of offloaded parameters are
    not."""
    kind = next(
        (g.device_mesh.device_type for g in gradients if isinstance(g, DTensor)),
        gradients[0].device.type,
    )
    return next((g.device for g in gradients if g.device.type == kind), torch.device(kind))


def _counts_here(gradient: Tensor, groups: Sequence[AxisGroup]) -> bool:
    """Whether this rank is the first that holds its part; gradients may have different meshes of
    the same devices."""
    if not isinstance(gradient, DTensor):
        return all(group.coordinate == 0 for group in groups)
    coordinate = gradient.device_mesh.get_coordinate() or ()
    return all(
        at == 0 or not isinstance(p, Replicate)
        for p, at in zip(gradient.placements, coordinate, strict=True)
    )


def _total(value: Tensor, reduce_op: str, groups: Sequence[AxisGroup]) -> Tensor:
    with use_groups(groups):
        for axis in range(len(groups)):
            value = all_reduce(value, reduce_op, axis)
    return value
