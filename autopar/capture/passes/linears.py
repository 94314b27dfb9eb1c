"""Matrix products and sums on unflattened tensors.

ATen flattens batch and sequence around every product: ``view → mm → view``. A tensor that is sharded over batch and
sequence has no plain layout once they are merged, so each ``mm``, ``addmm`` and ``bmm`` becomes `autopar.ops.dot` on what
is behind the views and transposes of its operands, and a sum reads behind them too. The bias of an ``addmm`` stays with its product
(`autopar.ops.products` says why); one that torch adds apart, as it does after a product of more dims in memory of another order, is
rounded apart by the model, and so it is here. Views back to the flattened shape
that nobody needs disappear in cleaning.
"""

from __future__ import annotations

import math
import string
from dataclasses import dataclass

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, dtype_of, emit, shape_of, sweep, view

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Behind:
    """A value behind transposes, copies and at most one merging view.

    `groups` has one entry per dim of the operand: the dims of `source` that it merges, in order.
    """

    source: fx.Node
    groups: tuple[Group, ...]

    def sizes(self, dim: int) -> tuple[int, ...]:
        """Sizes of the source's dims behind dim `dim` of the operand."""
        return tuple(shape_of(self.source)[d] for d in self.groups[dim])


def merged_dims(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Group, ...] | None:
    """For a view that only merges neighbouring dims, the dims of `before` behind each dim of `after`; otherwise None."""
    groups: list[Group] = []
    position = 0
    for number, size in enumerate(after):
        start, product = position, 1
        while position < len(before) and (position == start or product < size):
            product *= before[position]
            position += 1
        if product != size or position == start:
            return None
        while position < len(before) and before[position] == 1 and len(before) - position > len(after) - number - 1:
            position += 1
        groups.append(tuple(range(start, position)))
    return tuple(groups) if position == len(before) else None


def behind(node: fx.Node) -> Behind:
    """Look behind the outer transposes and copies of an operand, and then one merging view."""
    groups: tuple[Group, ...] = tuple((dim,) for dim in range(len(shape_of(node))))
    while True:
        if node.target is aten.transpose.int:
            swap = {node.args[1]: node.args[2], node.args[2]: node.args[1]}
            groups = tuple((swap.get(dim, dim),) for (dim,) in groups)
        elif node.target is aten.permute.default:
            groups = tuple((node.args[1][dim] % len(groups),) for (dim,) in groups)
        elif node.target is not aten.clone.default:
            break
        node = node.args[0]
    if node.target is aten.view.default:
        source = _without_copies(node.args[0])
        merged = merged_dims(shape_of(source), shape_of(node))
        if merged is not None:
            return Behind(source, tuple(merged[dim] for (dim,) in groups))
    return Behind(node, groups)


def _without_copies(node: fx.Node) -> fx.Node:
    while node.target is aten.clone.default:
        node = node.args[0]
    return node


def unflatten_products(graph: fx.Graph) -> None:
    """Every ``mm``, ``bmm`` and plain ``addmm`` becomes `dot`, an addmm's bias its bias; one that is broadcast becomes an addition."""
    for node in calls(graph, aten.mm.default, aten.bmm.default, aten.addmm.default):
        with graph.inserting_before(node):
            result = _addmm(node) if node.target is aten.addmm.default else _product(node, *node.args)
            if result is not None:
                node.replace_all_uses_with(view(node, result, shape_of(node)))
    sweep(graph)


def unflatten_sums(graph: fx.Graph) -> None:
    """Sums over merged dims become sums over all of them, and lose kept dims that are dropped right after."""
    for node in calls(graph, aten.sum.dim_IntList):
        source, dims, keepdim = (*node.args, False)[:3]
        operand = _behind_view(source)
        if not dims or node.kwargs or (operand.source is source and not (keepdim and _drops_kept_dims(node))):
            continue
        gone = sorted(inner for dim in dims for inner in operand.groups[dim % len(operand.groups)])
        shape = [size for dim, size in enumerate(shape_of(operand.source)) if dim not in gone]
        with graph.inserting_before(node):
            total = emit(node, aten.sum.dim_IntList, (operand.source, gone), shape, dtype=dtype_of(node))
            node.replace_all_uses_with(view(node, total, shape_of(node)))
    sweep(graph)


def _behind_view(node: fx.Node) -> Behind:
    own = Behind(node, tuple((dim,) for dim in range(len(shape_of(node)))))
    if node.target is not aten.view.default:
        return own
    merged = merged_dims(shape_of(node.args[0]), shape_of(node))
    return own if merged is None else Behind(node.args[0], merged)


def _drops_kept_dims(node: fx.Node) -> bool:
    rank = len(shape_of(node))
    gone = {dim % rank for dim in node.args[1]}
    short = tuple(size for dim, size in enumerate(shape_of(node)) if dim not in gone)
    drops = (aten.view.default, aten.squeeze.dim, aten.squeeze.dims)
    return all(user.target in drops and shape_of(user) == short for user in node.users)


def _addmm(node: fx.Node) -> fx.Node | None:
    bias, left, right = node.args
    if node.kwargs or len(shape_of(bias)) > 1:
        return None
    if shape_of(bias) == shape_of(node)[1:]:
        return _product(node, left, right, bias)
    product = _product(node, left, right)
    if shape_of(product)[-1:] != shape_of(node)[-1:]:
        product = view(node, product, shape_of(node))
    return emit(node, aten.add.Tensor, (product, bias), shape_of(product))


def _product(node: fx.Node, left: fx.Node, right: fx.Node, bias: fx.Node | None = None) -> fx.Node:
    """`dot` of what is behind both operands, and a bias of its columns; its result has their unflattened dims."""
    a, b = behind(left), behind(right)
    batch = len(a.groups) - 2
    for left_dim, right_dim in [*((dim, dim) for dim in range(batch)), (batch + 1, batch)]:
        if a.sizes(left_dim) != b.sizes(right_dim):
            a, b = _merge(node, a, left_dim), _merge(node, b, right_dim)
    letters = iter(string.ascii_lowercase)
    terms = {dim: next(letters) for group in a.groups for dim in group}
    other = {y: terms[x] for dim in range(batch) for x, y in zip(a.groups[dim], b.groups[dim], strict=True)}
    other |= {y: terms[x] for x, y in zip(a.groups[batch + 1], b.groups[batch], strict=True)}
    other |= {dim: next(letters) for dim in b.groups[batch + 1]}
    kept = [terms[dim] for group in a.groups[: batch + 1] for dim in group] + [other[dim] for dim in b.groups[batch + 1]]
    sizes = {terms[d]: n for d, n in enumerate(shape_of(a.source))} | {other[d]: n for d, n in enumerate(shape_of(b.source))}
    equation = f"{_term(terms)},{_term(other)}->{''.join(kept)}"
    further = () if bias is None else (view(node, bias, b.sizes(batch + 1)),)
    return emit(node, ops.dot, (equation, a.source, b.source, *further), [sizes[letter] for letter in kept], dtype=dtype_of(node))


def _term(letters: dict[int, str]) -> str:
    return "".join(letters[dim] for dim in sorted(letters))


def _merge(node: fx.Node, operand: Behind, dim: int) -> Behind:
    """The operand with the dims behind `dim` merged by a view of its source."""
    group = operand.groups[dim]
    if len(group) == 1:
        return operand
    shape = shape_of(operand.source)
    first, last = group[0], group[-1]
    merged = (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])
    moved = {d: d if d <= first else max(first, d - len(group) + 1) for d in range(len(shape))}
    groups = tuple((first,) if number == dim else tuple(moved[d] for d in other) for number, other in enumerate(operand.groups))
    source = operand.source
    if not source.meta["val"].is_contiguous():
        source = emit(node, aten.clone.default, (source,), shape, kwargs={"memory_format": torch.contiguous_format})
    return Behind(view(node, source, merged), groups)
