"""Tangents for backward in checks and in `execute`, which have no user code that computes them, and
the position of tangents in sums of gradients."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence

import torch
from torch import fx

from autopar.capture.graphs import dtype_of, is_tensor, shape_of


def tangent_of(
    path: str, shape: Sequence[int], dtype: torch.dtype, *, is_loss: bool, scale: float = 1.0
) -> torch.Tensor:
    """Return a tangent for an output.

    The tangent of the model's loss is `scale`. That of any other output is `scale` times normally
    distributed numbers, which only depend on its path and shape. Ones would not suffice: the
    gradient through a softmax would always be zero. The numbers are drawn in float64 or complex128
    and rounded.

    Args:
        path: path of the output in the returned structure.
        shape: shape of the output and of the tangent.
        dtype: dtype of the output and of the tangent.
        is_loss: whether the output is the model's loss.
        scale: the factor.
    """
    if is_loss:
        return torch.full(tuple(shape), scale, dtype=dtype)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{path} {tuple(shape)}".encode()))
    drawn = torch.randn(
        tuple(shape),
        generator=generator,
        dtype=torch.complex128 if dtype.is_complex else torch.float64,
    )
    return (scale * drawn).to(dtype)


# --------------------------------------------------------------------------------------------------
# In a sum of gradients, the tangent of an output is added last, after the gradients from ops that
# read the output.
#
# Autograd adds the tangent first: `(t + a) + b`. If the model is cut into stages and `a` and `b`
# are from later stages, two tensors would then be sent to the earlier stage. With the tangent last,
# one tensor is sent: the sum of all gradients from later stages.

_add = torch.ops.aten.add.Tensor


def add_tangents_last(graph: fx.Graph, tangents: Iterable[fx.Node]) -> None:
    """Reorder sums of gradients so that tangents are added last, and update ``val`` of the nodes.

    Args:
        graph: the joint graph.
        tangents: placeholders of the tangents.
    """
    for tangent in tangents:
        for first in [user for user in tangent.users if _is_sum(user)]:
            _move_down(tangent, first)


def _move_down(tangent: fx.Node, here: fx.Node) -> None:
    """Move the tangent from the sum `here` to the next sum, as long as that is its only user."""
    while len(here.users) == 1:
        (behind,) = here.users
        others = [term for term in behind.args if term is not here]
        mine = [term for term in here.args if term is not tangent]
        if not (
            _is_sum(behind)
            and len(others) == len(mine) == 1
            and _have_same_form(here, behind, *mine, *others)
        ):
            return
        behind.prepend(here)  # after the other operand of `behind`
        here.args = (*mine, *others)
        here.meta["val"] = _add(*(term.meta["val"] for term in here.args))
        behind.args = (here, tangent)
        here = behind


def _is_sum(node: fx.Node) -> bool:
    return (
        node.target is _add
        and not node.kwargs
        and len(node.args) == 2
        and all(isinstance(term, fx.Node) for term in node.args)
    )


def _have_same_form(*nodes: fx.Node) -> bool:
    return (
        all(map(is_tensor, nodes))
        and len({(shape_of(node), dtype_of(node)) for node in nodes}) == 1
    )
