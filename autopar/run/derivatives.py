"""Backward of what programs compute: once, and of first derivatives only; and no other way to derive, trace or export it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from autopar.errors import RuntimeStateError


def refuse_transforms() -> None:
    """Raises RuntimeStateError under one of torch.func (`grad`, `vmap`), whose tensors stand for others: a program runs on real ones."""
    if torch._C._are_functorch_transforms_active():
        what = "called under a transform of torch.func (grad, vjp, jvp, vmap, jacrev, ...): a program is run, and cannot be transformed"
        remedy = (
            "differentiate by backward: torch.autograd.grad(pm(x), list(pm.parameters())), also of what functional_call passes; other "
            "derivatives, and those of each sample, are the plain model's to compute"
        )
        raise RuntimeStateError(what, remedy=remedy)


def refuse_tracing(args: object) -> None:
    """Raises RuntimeStateError under torch.jit.trace, torch.export and torch.fx, which would record one rank's share, without collectives.

    Args:
        args: the call's positional arguments, in the place of which torch.fx passes a proxy.
    """
    is_fx = not isinstance(args, tuple)
    if is_fx or torch.jit.is_tracing() or torch.compiler.is_exporting():
        tracer = "torch.fx" if is_fx else "torch.jit" if torch.jit.is_tracing() else "torch.export"
        what = f"a compiled module is not traced by {tracer}: it is a program of several processes already"
        remedy = "trace the plain model, with what was trained: autopar.save_weights(pm, folder) writes what it loads"
        raise RuntimeStateError(what, remedy=remedy)


def which_are_plain(given: Iterable[Tensor]) -> tuple[bool, ...]:
    """Of what autograd gives, which are no DTensors: inputs, and what `torch.func.functional_call` puts in the place of parameters."""
    return tuple(not isinstance(x, DTensor) for x in given)


def as_given(gradients: Iterable[Tensor | None], are_plain: Iterable[bool]) -> tuple[Tensor | None, ...]:
    """Gradients as plain tensors where that is what they are of."""
    pairs = zip(gradients, are_plain, strict=True)
    return tuple(gradient.to_local() if plain and isinstance(gradient, DTensor) else gradient for gradient, plain in pairs)


def ran_twice() -> RuntimeStateError:
    """The error of a backward through a call whose backward has run."""
    what = "backward ran a second time through one call, and what it needs has been freed"
    return RuntimeStateError(what, remedy="call the module again before each backward; one call gives one backward")


def first_derivatives_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """A `backward` of an autograd function that is refused where its result is to be differentiated again.

    torch's own `once_differentiable` leaves gradients without a graph there where nothing that comes back has one, as of a bare loss: a
    penalty on them would train nothing, silently.
    """
    once: Callable[..., Any] = once_differentiable(backward)

    @functools.wraps(backward)
    def refusing(ctx: Any, *tangents: Any) -> Any:
        """Raises RuntimeStateError under `create_graph`, with which autograd runs backward with gradients enabled."""
        if torch.is_grad_enabled():
            what = "backward with create_graph=True: programs have first derivatives only, and these gradients would have no graph"
            remedy = "leave create_graph out; what needs gradients of gradients, a penalty on them, is trained as the plain model"
            raise RuntimeStateError(what, remedy=remedy)
        return once(ctx, *tangents)

    return refusing
