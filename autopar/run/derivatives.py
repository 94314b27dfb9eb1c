"""Backward of what programs compute: once, and of first derivatives only."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from autopar.errors import RuntimeStateError


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
