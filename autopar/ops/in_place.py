"""The in-place forms of ops, which write their result into an operand: ATen ops with ``out=``, and
functions of autopar."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autopar.ops.vocabulary import cross_entropy_backward, cross_entropy_backward_

_aten = torch.ops.aten
_OWN: dict[Callable[..., Any], Callable[..., Any]] = {
    cross_entropy_backward: cross_entropy_backward_
}
_BY_ELEMENT = (  # pointwise ops that torch does not tag as such
    _aten.elu_backward.default,
    _aten.leaky_relu_backward.default,
    _aten.softplus_backward.default,
    _aten.hardtanh_backward.default,
)


@cache
def in_place_form(target: Callable[..., Any]) -> tuple[Callable[..., Any], str] | None:
    """Return the in-place form of an op and the keyword of the operand to write into.

    The keyword is empty if the form always writes into its first operand. The result is None for an
    op that may read an element after it has written another element of the result.
    """
    if target in _OWN:
        return _OWN[target], ""
    if not isinstance(target, torch._ops.OpOverload) or (
        torch.Tag.pointwise not in target.tags and target not in _BY_ELEMENT
    ):
        return None
    packet = target.overloadpacket
    for form in (getattr(packet, name) for name in packet.overloads()):
        outs = [a.name for a in form._schema.arguments if a.is_out]
        # a generated form computes a new tensor and copies it
        if (
            len(outs) == 1
            and torch.Tag.generated not in form.tags
            and _arguments(form) == _arguments(target)
        ):
            return form, outs[0]
    return None


@cache
def functional_form(target: Callable[..., Any]) -> tuple[Callable[..., Any], str] | None:
    """Return the functional form of an in-place form (`in_place_form`), and the keyword to remove;
    None for any other op."""
    for own_form, into in _OWN.items():
        if into == target:
            return own_form, ""
    if isinstance(target, torch._ops.OpOverload) and any(
        a.is_out for a in target._schema.arguments
    ):
        packet = target.overloadpacket
        for functional in (getattr(packet, name) for name in packet.overloads()):
            form = in_place_form(functional)
            if form is not None and form[0] == target:
                return functional, form[1]
    return None


def _arguments(op: torch._ops.OpOverload) -> list[tuple[str, str]]:
    return [(a.name, str(a.type)) for a in op._schema.arguments if not a.is_out]
