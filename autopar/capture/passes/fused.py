"""Fused projections seen with a dim of their own for the parts.

A weight that makes query, key and value at once is stored ``[d, 3 e]`` (or ``[3 e, d]``), and its product is split into
three. Sharding ``3 e`` would cut across the parts. So the parameter is seen as ``[d, 3, e]``: the product has dims
``[..., 3, e]``, a part is a `select`, and sharding ``e`` shards the heads of all three alike. The same happens in
backward: the parts' gradients are stacked, and weight and bias get gradients of the seen shape.
"""

from __future__ import annotations

import operator
import string
from collections.abc import Iterator
from dataclasses import dataclass

from torch import fx

from autopar import ops
from autopar.capture.graphs import aten, calls, emit, shape_of, sweep


@dataclass(frozen=True, slots=True)
class _Site:
    """One fused projection.

    `value` is the product, with its `bias` or that added to it, of last dim `num_parts * size`; `joined` are its gradients, concatenated
    parts.
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
        return self.product.args[0][-1]

    def seen(self, shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
        """`shape` with its dim `dim` seen as parts."""
        dim %= len(shape)
        return (*shape[:dim], self.num_parts, shape[dim] // self.num_parts, *shape[dim + 1 :])


def separate_fused_projections(graph: fx.Graph) -> None:
    """Give every fused projection whose parts are equal its dim for the parts."""
    for product in calls(graph, ops.dot):
        _split_slices(graph, product)
    for split in calls(graph, aten.split.Tensor, aten.split_with_sizes.default):
        site = _site(split)
        if site is not None:
            _rewrite(graph, site)
    sweep(graph)


def _split_slices(graph: fx.Graph, product: fx.Node) -> None:
    """One split, where a product (plus bias) is read by slices of its last dim that leave nothing out and do not overlap."""
    value = product
    if len(product.users) == 1 and (only := next(iter(product.users))).target is aten.add.Tensor:
        value = only
    last = len(shape_of(value)) - 1
    slices = sorted((user for user in value.users if _is_slice(user, last)), key=lambda user: user.args[2])
    ends = [0, *(user.args[3] for user in slices)]
    if len(slices) < 2 or len(slices) < len(value.users) or ends != [*(user.args[2] for user in slices), shape_of(value)[last]]:
        return
    sizes = [user.args[3] - user.args[2] for user in slices]
    with graph.inserting_after(value):
        split = emit(value, aten.split_with_sizes.default, (value, sizes, last), ())
        split.meta["val"] = [user.meta["val"] for user in slices]
    for number, user in enumerate(slices):
        with graph.inserting_before(user):
            user.replace_all_uses_with(emit(user, operator.getitem, (split, number), shape_of(user)))
        graph.erase_node(user)


def _is_slice(node: fx.Node, dim: int) -> bool:
    return node.target is aten.slice.Tensor and len(node.args) == 5 and node.args[1] == dim and node.args[4] == 1


def _site(split: fx.Node) -> _Site | None:
    num_parts = _equal_parts(split)
    value, bias = split.args[0], None
    product = value
    if value.target is aten.add.Tensor and not value.kwargs and len(value.args) == 2:
        product, bias = value.args
    if num_parts is None or product.target is not ops.dot or any(len(node.users) > 1 for node in {product, value}):
        return None
    equation, x, weight, *own = product.args
    if own and value is not product:
        return None
    bias = own[0] if own else bias
    left = equation.split(",")[0]
    if weight.op != "placeholder" or equation[-1] in left:
        return None
    joined = tuple(_joined(x, weight, shape_of(value), num_parts))
    site = _Site(product, weight, bias, value, split, num_parts, joined)
    return site if _is_closed(site) else None


def _equal_parts(split: fx.Node) -> int | None:
    """Number of parts of a split of the last dim, where they are equal and taken one by one."""
    source = shape_of(split.args[0])
    dim = split.args[2] if len(split.args) > 2 else 0
    sizes = [tuple(part.shape) for part in split.meta["val"]]
    if dim % len(source) != len(source) - 1 or len(sizes) < 2 or len(set(sizes)) > 1:
        return None
    return len(sizes) if all(user.target is operator.getitem for user in split.users) else None


def _joined(x: fx.Node, weight: fx.Node, shape: tuple[int, ...], num_parts: int) -> Iterator[fx.Node]:
    """Concatenations, of the value's shape, that are multiplied with the projection's input or weight, and with no other weight:
    another projection of the same input has gradients of its own."""
    seen = set()
    for user in (*x.users, *weight.users):
        for operand in user.args[1:] if user.target is ops.dot else ():
            whole = operand.target is aten.cat.default and shape_of(operand) == shape and len(operand.args[0]) == num_parts
            foreign = whole and any(w.op == "placeholder" and w not in (x, weight) for u in operand.users for w in u.all_input_nodes)
            if whole and not foreign and operand not in seen and (operand.args[1:] or (0,))[0] % len(shape) == len(shape) - 1:
                seen.add(operand)
                yield operand


def _is_closed(site: _Site) -> bool:
    """Whether everything that touches the fused dim is part of the site, so that all of it can be rewritten."""
    inside = {site.product, *site.joined}
    if site.bias is not None and (site.bias.op != "placeholder" or len(shape_of(site.bias)) != 1 or set(site.bias.users) != {site.value}):
        return False
    if any(user not in inside and not _reads_joined(user, site) for user in site.weight.users):
        return False
    for joined in site.joined:
        parts = {tuple(shape_of(part)) for part in joined.args[0]}
        if len(parts) > 1 or not all(_reads_joined(user, site) for user in joined.users):
            return False
        for user in joined.users:
            if not _contracts_last(user, joined) and any(reader.op != "output" for reader in user.users):
                return False
    return True


def _reads_joined(user: fx.Node, site: _Site) -> bool:
    if user.target is ops.dot:
        return any(operand in site.joined for operand in user.args[1:])
    return user.target is aten.sum.dim_IntList and user.args[0] in site.joined and len(user.args) == 2


def _contracts_last(user: fx.Node, joined: fx.Node) -> bool:
    """Whether a reader sums over the fused dim (the input's gradient does, those of weight and bias do not)."""
    if user.target is not ops.dot:
        return len(shape_of(joined)) - 1 in [dim % len(shape_of(joined)) for dim in user.args[1]]
    terms, result = user.args[0].split("->")
    return terms.split(",")[user.args.index(joined) - 1][-1] not in result


def _rewrite(graph: fx.Graph, site: _Site) -> None:
    weight_dim = site.product.args[0].split("->")[0].split(",")[1].index(site.letter)
    _resize(site.weight, site.seen(shape_of(site.weight), weight_dim))
    if site.bias is not None:
        _resize(site.bias, site.seen(shape_of(site.bias), 0))
    _reletter(site.product, site.letter)
    for node in {site.product, site.value}:
        _resize(node, site.seen(shape_of(node), -1))
    parts_dim = len(shape_of(site.value)) - 2
    for part in list(site.split.users):
        with graph.inserting_before(part):
            part.replace_all_uses_with(emit(part, aten.select.int, (site.value, parts_dim, part.args[1]), shape_of(part)))
    for joined in site.joined:
        _rewrite_backward(graph, joined, site)


def _rewrite_backward(graph: fx.Graph, joined: fx.Node, site: _Site) -> None:
    rank = len(shape_of(joined))
    with graph.inserting_before(joined):
        stacked = emit(joined, aten.stack.default, (joined.args[0], rank - 1), site.seen(shape_of(joined), -1))
    for user in list(joined.users):
        keeps = not _contracts_last(user, joined)
        if user.target is ops.dot:
            terms, result = user.args[0].split("->")
            letter = terms.split(",")[user.args.index(joined) - 1][-1]
            if keeps:
                _resize(user, site.seen(shape_of(user), result.index(letter)))
            _reletter(user, letter)
        elif keeps:
            _resize(user, site.seen(shape_of(user), -1))
    joined.replace_all_uses_with(stacked)


def _reletter(dot: fx.Node, letter: str) -> None:
    """One letter of the equation becomes two: that of the parts, and the old one for the dim within a part."""
    parts = next(new for new in string.ascii_letters if new not in dot.args[0])
    dot.args = (dot.args[0].replace(letter, parts + letter), *dot.args[1:])


def _resize(node: fx.Node, shape: tuple[int, ...]) -> None:
    node.meta["val"] = node.meta["val"].new_empty(shape)
