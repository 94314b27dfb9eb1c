"""Convert matrix products and sums to ops on unflattened tensors.

ATen flattens batch and sequence around every product: ``view → mm → view``. A tensor that is
sharded over batch and sequence has no simple layout once these dims are merged. Therefore each
``mm``, ``addmm`` and ``bmm`` becomes `autopar.ops.dot` on the values behind the views and
transposes of its operands, and sums also read these values. The bias of an ``addmm`` remains an
operand of the product (see `autopar.ops.products`). A bias that torch adds in a separate op, such
as after a product of a non-contiguous tensor, is rounded separately and remains a separate op.
`clean` removes unused views to the flattened shape.
"""

from __future__ import annotations

import math
import operator
import string
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, dtype_of, emit, shape_of, sweep, view

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Behind:
    """The source of an operand, behind transposes, copies and at most one view that merges dims.

    Attributes:
        source: the source.
        groups: for each dim of the operand, the dims of `source` that it merges, in order.
    """

    source: fx.Node
    groups: tuple[Group, ...]

    def sizes(self, dim: int) -> tuple[int, ...]:
        """Return the sizes of the dims of the source that dim `dim` of the operand merges."""
        return tuple(shape_of(self.source)[d] for d in self.groups[dim])


def merged_dims(before: tuple[int, ...], after: tuple[int, ...]) -> tuple[Group, ...] | None:
    """Return the dims of `before` that each dim of `after` merges, if a view from `before` to
    `after` only merges adjacent dims; else None."""
    groups: list[Group] = []
    position = 0
    for number, size in enumerate(after):
        start, product = position, 1
        while position < len(before) and (position == start or product < size):
            product *= before[position]
            position += 1
        if product != size or position == start:
            return None
        while (
            position < len(before)
            and before[position] == 1
            and len(before) - position > len(after) - number - 1
        ):
            position += 1
        groups.append(tuple(range(start, position)))
    return tuple(groups) if position == len(before) else None


def source_behind(node: fx.Node) -> Behind:
    """Return the source of an operand behind its outer transposes and copies, and then one view
    that merges dims."""
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
    """Replace every ``mm``, ``bmm`` and plain ``addmm`` with `dot`. The bias of an ``addmm``
    becomes that of the `dot`; a bias that is broadcast over columns is added separately."""
    for node in calls(graph, aten.mm.default, aten.bmm.default, aten.addmm.default):
        with graph.inserting_before(node):
            result = (
                _addmm(node) if node.target is aten.addmm.default else _product(node, *node.args)
            )
            if result is not None:
                node.replace_all_uses_with(view(node, result, shape_of(node)))
    sweep(graph)


def unflatten_sums(graph: fx.Graph) -> None:
    """Replace sums over merged dims with sums over the original dims, and do not keep reduced dims
    that a following view removes."""
    for node in calls(graph, aten.sum.dim_IntList):
        source, dims, keepdim = (*node.args, False)[:3]
        operand = _behind_view(source)
        if (
            not dims
            or node.kwargs
            or (operand.source is source and not (keepdim and _drops_kept_dims(node)))
        ):
            continue
        gone = sorted(inner for dim in dims for inner in operand.groups[dim % len(operand.groups)])
        shape = [size for dim, size in enumerate(shape_of(operand.source)) if dim not in gone]
        with graph.inserting_before(node):
            total = emit(
                node, aten.sum.dim_IntList, (operand.source, gone), shape, dtype=dtype_of(node)
            )
            node.replace_all_uses_with(view(node, total, shape_of(node)))
    sweep(graph)


def _behind_view(node: fx.Node) -> Behind:
    unviewed = Behind(node, tuple((dim,) for dim in range(len(shape_of(node)))))
    if node.target is not aten.view.default:
        return unviewed
    merged = merged_dims(shape_of(node.args[0]), shape_of(node))
    return unviewed if merged is None else Behind(node.args[0], merged)


def _drops_kept_dims(node: fx.Node) -> bool:
    rank = len(shape_of(node))
    gone = {dim % rank for dim in node.args[1]}
    short = tuple(size for dim, size in enumerate(shape_of(node)) if dim not in gone)
    drops = (aten.view.default, aten.squeeze.dim, aten.squeeze.dims)
    return all(user.target in drops and shape_of(user) == short for user in node.users)


def _addmm(node: fx.Node) -> fx.Node | None:
    bias, left_factor, right = node.args
    if node.kwargs or len(shape_of(bias)) > 1:
        return None
    if shape_of(bias) == shape_of(node)[1:]:
        return _product(node, left_factor, right, bias)
    product = _product(node, left_factor, right)
    if shape_of(product)[-1:] != shape_of(node)[-1:]:
        product = view(node, product, shape_of(node))
    return emit(node, aten.add.Tensor, (product, bias), shape_of(product))


def _product(node: fx.Node, left: fx.Node, right: fx.Node, bias: fx.Node | None = None) -> fx.Node:
    """Return the `dot` of the sources of both operands, with unflattened dims; `bias` is added
    along the columns."""
    a, b = source_behind(left), source_behind(right)
    batch = len(a.groups) - 2
    for left_dim, right_dim in [*((dim, dim) for dim in range(batch)), (batch + 1, batch)]:
        if a.sizes(left_dim) != b.sizes(right_dim):
            a, b = _merge(node, a, left_dim), _merge(node, b, right_dim)
    letters = iter(string.ascii_lowercase)
    terms = {dim: next(letters) for group in a.groups for dim in group}
    other = {
        y: terms[x]
        for dim in range(batch)
        for x, y in zip(a.groups[dim], b.groups[dim], strict=True)
    }
    other |= {y: terms[x] for x, y in zip(a.groups[batch + 1], b.groups[batch], strict=True)}
    other |= {dim: next(letters) for dim in b.groups[batch + 1]}
    result_letters = [terms[dim] for group in a.groups[: batch + 1] for dim in group] + [
        other[dim] for dim in b.groups[batch + 1]
    ]
    sizes = {terms[d]: n for d, n in enumerate(shape_of(a.source))} | {
        other[d]: n for d, n in enumerate(shape_of(b.source))
    }
    equation = f"{_term(terms)},{_term(other)}->{''.join(result_letters)}"
    further = () if bias is None else (view(node, bias, b.sizes(batch + 1)),)
    return emit(
        node,
        ops.dot,
        (equation, a.source, b.source, *further),
        [sizes[letter] for letter in result_letters],
        dtype=dtype_of(node),
    )


def _term(letters: dict[int, str]) -> str:
    return "".join(letters[dim] for dim in sorted(letters))


def _merge(node: fx.Node, operand: Behind, dim: int) -> Behind:
    """Merge the dims of the source behind dim `dim` of the operand with a view."""
    group = operand.groups[dim]
    if len(group) == 1:
        return operand
    shape = shape_of(operand.source)
    first, last = group[0], group[-1]
    merged = (*shape[:first], math.prod(shape[first : last + 1]), *shape[last + 1 :])
    moved = {d: d if d <= first else max(first, d - len(group) + 1) for d in range(len(shape))}
    groups = tuple(
        (first,) if number == dim else tuple(moved[d] for d in other)
        for number, other in enumerate(operand.groups)
    )
    source = operand.source
    if not source.meta["val"].is_contiguous():
        source = emit(
            node,
            aten.clone.default,
            (source,),
            shape,
            kwargs={"memory_format": torch.contiguous_format},
        )
    return Behind(view(node, source, merged), groups)


# --------------------------------------------------------------------------------------------------
# Fused projections get a separate dim for the parts.
#
# A fused weight for query, key and value is stored as ``[d, 3 e]`` (or ``[3 e, d]``), and its
# product is split into three parts. A shard of ``3 e`` would contain different heads of the parts.
# Therefore the parameter is viewed as ``[d, 3, e]``: the product has dims ``[..., 3, e]``, a part
# is a `select`, and sharding ``e`` shards the heads of all three equally. In backward, the
# gradients of the parts are stacked, and weight and bias get gradients of the viewed shape.


@dataclass(frozen=True, slots=True)
class _LinearSite:
    """One fused projection.

    Attributes:
        product: the product.
        weight: its weight.
        bias: its bias; None if there is none.
        value: the product with its bias; the last dim is `num_parts` times the size of a part.
        split: the node that splits `value`.
        num_parts: number of equal parts.
        joined: gradients of `value`, each a concatenation of the gradients of the parts.
    """

    product: fx.Node
    weight: fx.Node
    bias: fx.Node | None
    value: fx.Node
    split: fx.Node
    num_parts: int
    joined: tuple[fx.Node, ...]

    @property
    def letter(self) -> str:
        """Letter of the fused dim in the equation of the product."""
        return self.product.args[0][-1]

    def split_dim(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """Return `shape` with dim `dim` split into (parts, size of a part)."""
        dim %= len(shape)
        return (*shape[:dim], self.num_parts, shape[dim] // self.num_parts, *shape[dim + 1 :])


def separate_fused_projections(graph: fx.Graph) -> None:
    """Give every fused projection with equal parts a separate dim for the parts."""
    for product in calls(graph, ops.dot):
        _split_slices(graph, product)
    for split in calls(graph, aten.split.Tensor, aten.split_with_sizes.default):
        site = _site(split)
        if site is not None:
            _rewrite(graph, site)
    sweep(graph)


def _split_slices(graph: fx.Graph, product: fx.Node) -> None:
    """Replace slices of a product (plus bias) with one split, if they cover its last dim without
    gaps or overlaps."""
    value = product
    if len(product.users) == 1 and (only := next(iter(product.users))).target is aten.add.Tensor:
        value = only
    last = len(shape_of(value)) - 1
    slices = sorted(
        (user for user in value.users if _is_slice(user, last)), key=lambda user: user.args[2]
    )
    ends = [0, *(user.args[3] for user in slices)]
    if (
        len(slices) < 2
        or len(slices) < len(value.users)
        or ends != [*(user.args[2] for user in slices), shape_of(value)[last]]
    ):
        return
    sizes = [user.args[3] - user.args[2] for user in slices]
    with graph.inserting_after(value):
        split = emit(value, aten.split_with_sizes.default, (value, sizes, last), ())
        split.meta["val"] = [user.meta["val"] for user in slices]
    for number, user in enumerate(slices):
        with graph.inserting_before(user):
            user.replace_all_uses_with(
                emit(user, operator.getitem, (split, number), shape_of(user))
            )
        graph.erase_node(user)


def _is_slice(node: fx.Node, dim: int) -> bool:
    return (
        node.target is aten.slice.Tensor
        and len(node.args) == 5
        and node.args[1] == dim
        and node.args[4] == 1
    )


def _site(split: fx.Node) -> _LinearSite | None:
    num_parts = _equal_parts(split)
    value = split.args[0]
    product, bias = _summands(value)
    if num_parts is None or product.target is not ops.dot:
        return None
    if any(len(node.users) > 1 for node in (product, value)):
        return None
    equation, x, weight, *biases = product.args
    if biases and value is not product:
        return None
    bias = biases[0] if biases else bias
    left_term = equation.split(",")[0]
    if weight.op != "placeholder" or equation[-1] in left_term:
        return None
    joined = tuple(_find_concatenations(x, weight, shape_of(value), num_parts))
    site = _LinearSite(product, weight, bias, value, split, num_parts, joined)
    return site if _is_closed(site) else None


def _summands(value: fx.Node) -> tuple[fx.Node, fx.Node | None]:
    """Return the two operands of a sum; for other nodes, the node and None."""
    if value.target is aten.add.Tensor and not value.kwargs and len(value.args) == 2:
        return value.args
    return value, None


def _equal_parts(split: fx.Node) -> int | None:
    """Return the number of parts of a split of the last dim, if they have equal sizes and only
    `getitem` nodes read them; else None."""
    source = shape_of(split.args[0])
    dim = split.args[2] if len(split.args) > 2 else 0
    sizes = [tuple(part.shape) for part in split.meta["val"]]
    if dim % len(source) != len(source) - 1 or len(sizes) < 2 or len(set(sizes)) > 1:
        return None
    return len(sizes) if all(user.target is operator.getitem for user in split.users) else None


def _find_concatenations(
    x: fx.Node, weight: fx.Node, shape: tuple[int, ...], num_parts: int
) -> Iterator[fx.Node]:
    """Yield the concatenations of shape `shape` that are multiplied with the projection's input or
    weight and with no other weight, which would belong to another projection of the same input."""
    visited = set()
    for user in (*x.users, *weight.users):
        for operand in user.args[1:] if user.target is ops.dot else ():
            if operand in visited or not _is_concatenation(operand, shape, num_parts):
                continue
            factors = [node for reader in operand.users for node in reader.all_input_nodes]
            if not any(node.op == "placeholder" and node not in (x, weight) for node in factors):
                visited.add(operand)
                yield operand


def _is_concatenation(node: fx.Node, shape: tuple[int, ...], num_parts: int) -> bool:
    """Return whether a node concatenates `num_parts` tensors along the last dim to a tensor of
    shape `shape`."""
    if node.target is not aten.cat.default or shape_of(node) != shape:
        return False
    dim = node.args[1] if len(node.args) > 1 else 0
    return len(node.args[0]) == num_parts and dim % len(shape) == len(shape) - 1


def _is_closed(site: _LinearSite) -> bool:
    """Return whether all nodes with the fused dim belong to the projection and can be rewritten."""
    inside = {site.product, *site.joined}
    if site.bias is not None and not _is_own_bias(site.bias, site.value):
        return False
    if any(user not in inside and not _reads_joined(user, site) for user in site.weight.users):
        return False
    for joined in site.joined:
        parts = {tuple(shape_of(part)) for part in joined.args[0]}
        if len(parts) > 1 or not all(_reads_joined(user, site) for user in joined.users):
            return False
        for user in joined.users:
            if not _contracts_last(user, joined) and any(
                reader.op != "output" for reader in user.users
            ):
                return False
    return True


def _is_own_bias(bias: fx.Node, value: fx.Node) -> bool:
    """Return whether a bias is a parameter or buffer with one dim that only `value` reads."""
    is_vector = bias.op == "placeholder" and len(shape_of(bias)) == 1
    return is_vector and set(bias.users) == {value}


def _reads_joined(user: fx.Node, site: _LinearSite) -> bool:
    if user.target is ops.dot:
        return any(operand in site.joined for operand in user.args[1:])
    return (
        user.target is aten.sum.dim_IntList and user.args[0] in site.joined and len(user.args) == 2
    )


def _contracts_last(user: fx.Node, joined: fx.Node) -> bool:
    """Return whether a reader sums over the fused dim, as the gradient of the input does and those
    of weight and bias do not."""
    if user.target is not ops.dot:
        return len(shape_of(joined)) - 1 in [dim % len(shape_of(joined)) for dim in user.args[1]]
    terms, result = user.args[0].split("->")
    return terms.split(",")[user.args.index(joined) - 1][-1] not in result


def _rewrite(graph: fx.Graph, site: _LinearSite) -> None:
    weight_dim = site.product.args[0].split("->")[0].split(",")[1].index(site.letter)
    _resize(site.weight, site.split_dim(shape_of(site.weight), weight_dim))
    if site.bias is not None:
        _resize(site.bias, site.split_dim(shape_of(site.bias), 0))
    _reletter(site.product, site.letter)
    for node in {site.product, site.value}:
        _resize(node, site.split_dim(shape_of(node), -1))
    parts_dim = len(shape_of(site.value)) - 2
    for part in list(site.split.users):
        with graph.inserting_before(part):
            part.replace_all_uses_with(
                emit(part, aten.select.int, (site.value, parts_dim, part.args[1]), shape_of(part))
            )
    for joined in site.joined:
        _rewrite_backward(graph, joined, site)


def _rewrite_backward(graph: fx.Graph, joined: fx.Node, site: _LinearSite) -> None:
    rank = len(shape_of(joined))
    with graph.inserting_before(joined):
        stacked = emit(
            joined,
            aten.stack.default,
            (joined.args[0], rank - 1),
            site.split_dim(shape_of(joined), -1),
        )
    for user in list(joined.users):
        keeps = not _contracts_last(user, joined)
        if user.target is ops.dot:
            terms, result = user.args[0].split("->")
            letter = terms.split(",")[user.args.index(joined) - 1][-1]
            if keeps:
                _resize(user, site.split_dim(shape_of(user), result.index(letter)))
            _reletter(user, letter)
        elif keeps:
            _resize(user, site.split_dim(shape_of(user), -1))
    joined.replace_all_uses_with(stacked)


def _reletter(dot: fx.Node, letter: str) -> None:
    """Replace one letter of the equation with two: a new one for the parts, and the letter itself
    for the dim within a part."""
    parts = next(new for new in string.ascii_letters if new not in dot.args[0])
    dot.args = (dot.args[0].replace(letter, parts + letter), *dot.args[1:])


def _resize(node: fx.Node, shape: tuple[int, ...]) -> None:
    node.meta["val"] = node.meta["val"].new_empty(shape)
