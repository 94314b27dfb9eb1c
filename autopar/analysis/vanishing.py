"""Whether a sum is 0 where a count is 0, since it adds up only what the count counts.

A loss ``Σa / Σf`` over microbatches is Σ w·(Σa / Σf of each) with w its share of Σf. One whose Σf is 0 has no such quotient, and may be
left out only where its Σa is 0, too. So it is where every a has a factor that is one of the counted f, or is masked by it: f ≥ 0, so that
where they add up to 0, each of them is 0. That negative weights of classes add up to 0 with positive ones is not looked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.rules import operands_of

aten = torch.ops.aten
_SAME = frozenset(
    (
        aten._to_copy.default, aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim,
        aten.squeeze.dims, aten.squeeze.default, aten.expand.default, aten.permute.default, aten.transpose.int, aten.clone.default,
        aten.alias.default, aten.neg.default, aten.detach.default,
    )
)  # fmt: skip
_SUMS = frozenset((aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim))
_BOTH = frozenset((aten.add.Tensor, aten.sub.Tensor))
_FIRST = frozenset((aten.div.Tensor, aten.div.Scalar, aten.mul.Scalar))
_NOT = frozenset((aten.logical_not.default, aten.bitwise_not.default))
_OPPOSITE = {
    aten.eq.Scalar: aten.ne.Scalar, aten.gt.Scalar: aten.le.Scalar, aten.lt.Scalar: aten.ge.Scalar,
    aten.eq.Tensor: aten.ne.Tensor, aten.gt.Tensor: aten.le.Tensor, aten.lt.Tensor: aten.ge.Tensor,
}  # fmt: skip
_ZEROS = frozenset((aten.zeros.default, aten.zeros_like.default, aten.new_zeros.default))
_FILLED = {aten.scalar_tensor.default: 0, aten.full.default: 1, aten.full_like.default: 1}  # operand that says with what


def vanishes(sum_of: fx.Node, count: fx.Node) -> bool:
    """Whether `sum_of` is 0 where `count` is 0, as far as can be seen."""
    counted = _bare(count)
    return counted.target in _SUMS and _goes(sum_of, _bare(counted.args[0]))


def equal(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes compute the same of the same placeholders."""
    if a is b:
        return True
    if not (a.op == b.op == "call_function" and a.target is b.target):
        return False
    literals = [fx.map_arg((n.args, n.kwargs), lambda _: None) for n in (a, b)]
    return literals[0] == literals[1] and all(map(equal, operands_of(a), operands_of(b)))


def _goes(x: Any, counted: fx.Node) -> bool:
    """Whether every element of `x` has one of `counted` as a factor, or is masked by one."""
    if not isinstance(x, fx.Node) or x.op != "call_function":
        return x is counted
    if equal(_bare(x), counted):
        return True
    if x.target in _SAME or x.target in _SUMS or x.target in _FIRST:
        return _goes(x.args[0], counted)
    if x.target is aten.mul.Tensor:
        return any(_goes(factor, counted) for factor in x.args[:2])
    if x.target in _BOTH:
        return all(_goes(term, counted) for term in x.args[:2])
    if x.target is aten.masked_fill.Scalar:
        return x.args[2] == 0 and (_negates(x.args[1], counted) or _goes(x.args[0], counted))
    if x.target is aten.where.self:
        mask, there, elsewhere = x.args
        either = [is_zero or _goes(term, counted) for term, is_zero in ((there, _is_zero(there)), (elsewhere, _is_zero(elsewhere)))]
        masked = (equal(_bare(mask), counted) and either[1]) or (_negates(mask, counted) and either[0])  # type: ignore[arg-type]
        return masked or all(either)
    return False


def _negates(mask: Any, counted: fx.Node) -> bool:
    """Whether a mask is true just where what is counted is 0."""
    bare = _bare(mask)
    if bare.target in _NOT:
        return equal(_bare(bare.args[0]), counted)
    opposite = _OPPOSITE.get(bare.target) or next((a for a, b in _OPPOSITE.items() if b is bare.target), None)  # type: ignore[arg-type]
    return opposite is not None and counted.target is opposite and _same_operands(bare, counted)


def _same_operands(a: fx.Node, b: fx.Node) -> bool:
    pairs = list(zip(a.args, b.args, strict=True))
    return all(equal(x, y) if isinstance(x, fx.Node) and isinstance(y, fx.Node) else x == y for x, y in pairs)


def _is_zero(x: Any) -> bool:
    if not isinstance(x, fx.Node):
        return bool(x == 0)
    bare = _bare(x)
    return bare.target in _ZEROS or (bare.target in _FILLED and bare.args[_FILLED[bare.target]] == 0)  # type: ignore[index]


def _bare(x: Any) -> fx.Node:
    """Without casts, views and signs: these do not change where it is 0."""
    while x.op == "call_function" and x.target in _SAME:
        x = x.args[0]
    return x  # type: ignore[no-any-return]
