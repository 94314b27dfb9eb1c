"""Remove nodes without effect from a functional graph, and write equivalent nodes in one form.

Sizes become explicit. ``t``, ``reshape`` and ``_unsafe_view`` become ``transpose`` and ``view``.
Equal views of one value within a module and phase become one node. If a tensor is split and joined
again in the same order, the result is replaced by the tensor. Ops that need certain strides or a
memory format get operands that have them in any layout.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import torch
from torch import fx
from torch._ops import OpOverload

from autopar import ops
from autopar.capture.graphs import aten, calls, dtype_of, emit, is_tensor, shape_of, sweep, view
from autopar.errors import CaptureError, Where
from autopar.ops.formats import ANY_FORMAT

_MOST_ELEMENTS = 2**14  # of a constant, which is part of the code of the program
_VIEWS = frozenset(
    {
        aten.view.default,
        aten.transpose.int,
        aten.permute.default,
        aten.unsqueeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.expand.default,
        aten.slice.Tensor,
        aten.select.int,
    }
)
_COMPUTED: dict[
    Callable[..., object], Callable[..., object]
] = {  # a lazy conjugation or negation of a view → the op that computes it
    aten._conj.default: aten.conj_physical.default,
    aten._neg_view.default: aten.neg.default,
}


def clean(graph: fx.Graph) -> None:
    """Simplify every node once, in graph order, so that its operands are simplified before."""
    first_nodes: dict[tuple[str, ...], fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or not is_tensor(node):
            continue
        respell(node)
        _set_dtype(node)
        simpler = _SIMPLER.get(node.target, _itself)(node)
        if simpler is node and node.target in _VIEWS:
            simpler = first_nodes.setdefault(
                (str(node.target), str(node.args), node.meta["module"], node.meta["phase"]), node
            )
        if simpler is not node:
            node.replace_all_uses_with(simpler)
            graph.erase_node(node)
    sweep(graph)


def fold_views(graph: fx.Graph) -> None:
    """Replace a view of a view with one view, if the original value is contiguous and thus can be
    viewed in any shape."""
    for node in calls(graph, aten.view.default):
        source = node.args[0]
        if source.target is aten.view.default and source.args[0].meta["val"].is_contiguous():
            node.args = (source.args[0], node.args[1])
    sweep(graph)


def inline_constants(graph: fx.Graph, constants: dict[str, torch.Tensor]) -> None:
    """Replace constant tensors of the graph with factory calls.

    A constant is a tensor that forward creates from numbers (``torch.tensor([1.0, 2.0])``), or a
    plain attribute of the model, with its current values. A graph does not change it.

    Args:
        graph: the graph; the targets of its `get_attr` nodes are names of constants.
        constants: name → tensor.

    Raises:
        CaptureError: a constant has more than 16384 elements, or no values.
    """
    for node in [node for node in graph.nodes if node.op == "get_attr"]:
        value = constants[node.target]
        if (
            value.numel() > _MOST_ELEMENTS
            or value.is_meta
            or getattr(value, "fake_mode", None) is not None
        ):
            reader = next(iter(node.users), node)
            raise CaptureError(
                f"forward creates a constant tensor of shape {tuple(value.shape)}, which is too"
                " large for the code of a program",
                where=Where(module=reader.meta["module"], source=reader.meta["source"]),
                remedy=(
                    "make it a buffer of the module (register_buffer), or create it with"
                    " torch.arange, full or ones"
                ),
            )
        with graph.inserting_before(node):
            factory = _factory(graph, value)
        factory.meta = dict(node.meta, val=value)
        node.replace_all_uses_with(factory)


def _factory(graph: fx.Graph, value: torch.Tensor) -> fx.Node:
    """Insert a call that creates `value`."""
    settings = {"dtype": value.dtype, "device": value.device}
    if value.numel() == 1:
        return graph.call_function(aten.full.default, (list(value.shape), value.item()), settings)
    return graph.call_function(
        ops.constant, (value.flatten().tolist(), list(value.shape)), settings
    )


def respell(node: fx.Node) -> None:
    """Write a view or cast in its normal form, with explicit sizes."""
    rewrite = _SPELLINGS.get(node.target)
    if rewrite is not None:
        rewrite(node)


def _set_dtype(node: fx.Node) -> None:
    """Make the dtype of a factory call explicit; otherwise, it would depend on the default dtype of
    the process that runs the graph."""
    takes = isinstance(node.target, torch._ops.OpOverload) and any(
        a.name == "dtype" for a in node.target._schema.arguments
    )
    if takes and not node.all_input_nodes and node.kwargs.get("dtype") is None:
        node.kwargs = {**node.kwargs, "dtype": dtype_of(node)}


def _respell_view(node: fx.Node) -> None:
    _become_view(node, node.args[0])


def _become_view(node: fx.Node, source: fx.Node) -> None:
    shape = list(shape_of(node))
    node.target, node.args, node.kwargs = aten.view.default, (source, shape), {}


def _respell_expand(node: fx.Node) -> None:
    node.args, node.kwargs = (node.args[0], list(shape_of(node))), {}


def _respell_t(node: fx.Node) -> None:
    if len(shape_of(node)) == 2:
        node.target, node.args = aten.transpose.int, (node.args[0], 0, 1)


def _respell_transpose(node: fx.Node) -> None:
    first, second = sorted(dim % len(shape_of(node)) for dim in node.args[1:])
    node.args = (node.args[0], first, second)


def _respell_slice(node: fx.Node) -> None:
    source, arguments = (
        node.args[0],
        dict(zip(("dim", "start", "end", "step"), node.args[1:], strict=False)),
    )
    dim = arguments.get("dim", 0) % len(shape_of(source))
    start, end, _ = slice(arguments.get("start"), arguments.get("end")).indices(
        shape_of(source)[dim]
    )
    node.args = (source, dim, start, end, arguments.get("step", 1))


def _respell_empty(node: fx.Node) -> None:
    """Drop the strides of an empty tensor."""
    is_new = node.target is aten.new_empty_strided.default
    node.target = aten.new_empty.default if is_new else aten.empty.memory_format
    node.args = (*node.args[: len(node.args) - 2], list(shape_of(node)))


def _respell_strided(node: fx.Node) -> None:
    if _in_order(node, node.args[0]):
        _become_view(node, node.args[0])


def _respell_strided_scatter(node: fx.Node) -> None:
    if _in_order(node, node.args[1]):
        _become_view(node, node.args[1])


def _respell_mark(node: fx.Node) -> None:
    """Replace a lazy conjugation or negation with an op that computes it; the operand may be a
    number."""
    operand = node.args[0]
    if isinstance(operand, fx.Node):
        node.target = _COMPUTED[node.target]
        return
    number = operand.conjugate() if node.target is aten._conj.default else -operand
    settings = {"dtype": dtype_of(node), "device": node.meta["val"].device}
    node.target, node.args, node.kwargs = aten.full.default, ([], number), settings


def _respell_copy(node: fx.Node) -> None:
    keeps_order = node.kwargs.get("memory_format") in (None, torch.preserve_format)
    if keeps_order and _keeps_device(node):
        node.kwargs = {"dtype": dtype_of(node)}


def _in_order(node: fx.Node, source: fx.Node) -> bool:
    """Return whether ``as_strided(base, size, stride)`` reads all elements of a contiguous base in
    order, and `source` has the same number of elements."""
    base, other = node.args[0].meta["val"], source.meta["val"]
    size, stride, *offset = node.args[2 if node.target is aten.as_strided_scatter.default else 1 :]
    viewed = torch.empty_strided(size, stride, device="meta")
    in_order = base.is_contiguous() and viewed.is_contiguous() and not any(offset)
    return in_order and viewed.numel() == base.numel() == other.numel()


def _keeps_device(node: fx.Node) -> bool:
    return node.meta["val"].device == node.args[0].meta["val"].device


_SPELLINGS: dict[Callable[..., object], Callable[[fx.Node], None]] = {
    **dict.fromkeys(
        (aten.view.default, aten._unsafe_view.default, aten.reshape.default), _respell_view
    ),
    aten.expand.default: _respell_expand,
    aten.t.default: _respell_t,
    aten.transpose.int: _respell_transpose,
    aten.slice.Tensor: _respell_slice,
    **dict.fromkeys((aten.new_empty_strided.default, aten.empty_strided.default), _respell_empty),
    aten.as_strided.default: _respell_strided,
    aten.as_strided_scatter.default: _respell_strided_scatter,
    **dict.fromkeys(_COMPUTED, _respell_mark),
    aten._to_copy.default: _respell_copy,
}


def _itself(node: fx.Node) -> fx.Node:
    return node


def _operand(node: fx.Node) -> fx.Node:
    return node.args[0]


def _cast(node: fx.Node) -> fx.Node:
    """Return the operand of a cast to a wider dtype and back; return other casts unchanged."""
    node = _copy(node)
    source = node.args[0] if node.target is aten._to_copy.default else node
    if (
        source is node
        or source.target is not aten._to_copy.default
        or not _only_casts(node)
        or not _only_casts(source)
    ):
        return node
    first = source.args[0]
    widened = dtype_of(first).is_floating_point and torch.promote_types(
        dtype_of(first), dtype_of(source)
    ) == dtype_of(source)
    return first if widened and dtype_of(first) == dtype_of(node) else node


def _only_casts(node: fx.Node) -> bool:
    return set(node.kwargs) == {"dtype"}


def _copy(node: fx.Node) -> fx.Node:
    source, layout = node.args[0], node.kwargs.get("memory_format")
    same_order = layout in (None, torch.preserve_format) or source.meta["val"].is_contiguous(
        memory_format=layout
    )
    return (
        source
        if same_order and dtype_of(node) == dtype_of(source) and _keeps_device(node)
        else node
    )


def _same_shape(node: fx.Node) -> fx.Node:
    source = node.args[0]
    if (
        node.target is aten.view.default
        and source.target is aten.view.default
        and shape_of(source.args[0]) == shape_of(node)
    ):
        return source.args[0]
    return source if shape_of(source) == shape_of(node) else node


def _double_transpose(node: fx.Node) -> fx.Node:
    source = node.args[0]
    return (
        source.args[0]
        if source.target is aten.transpose.int and source.args[1:] == node.args[1:]
        else node
    )


def _neutral(neutral: float) -> Callable[[fx.Node], fx.Node]:
    def simplify(node: fx.Node) -> fx.Node:
        """Return the tensor if the other operand is neutral and the tensor is neither cast nor
        broadcast."""
        source, other = node.args
        if not is_tensor(source) or isinstance(other, fx.Node) or other != neutral:
            return node
        return (
            source
            if shape_of(source) == shape_of(node) and dtype_of(source) == dtype_of(node)
            else node
        )

    return simplify


_SIMPLER: dict[Callable[..., object], Callable[[fx.Node], fx.Node]] = {
    aten.detach.default: _operand,
    aten.alias.default: _operand,
    aten.lift_fresh_copy.default: _operand,
    aten.clone.default: _copy,
    aten._to_copy.default: _cast,
    aten.view.default: _same_shape,
    aten.expand.default: _same_shape,
    aten.slice.Tensor: _same_shape,
    aten.transpose.int: _double_transpose,
    aten.add.Tensor: _neutral(0),
    aten.sub.Tensor: _neutral(0),
    aten.mul.Tensor: _neutral(1),
    aten.mul.Scalar: _neutral(1),
    aten.div.Tensor: _neutral(1),
    aten.div.Scalar: _neutral(1),
    aten.pow.Tensor_Scalar: _neutral(1),
}


# --------------------------------------------------------------------------------------------------
# If a tensor is split and joined again in the same order, the result is replaced by the tensor.
#
# Loops over samples or time steps select one entry of a dim at a time, and fused projections are
# sliced. These ops, and the sums of padded gradients in their backward, would require that the dim
# is not sharded. The *parts* of a dim are its entries (`select`, `unbind`) or consecutive slices.


def rejoin(graph: fx.Graph) -> None:
    """Replace sums of padded gradients of all parts of a dim with one `cat` or `stack` of the
    gradients, and each `cat` or `stack` of all parts of a dim with a view of the tensor."""
    for node in calls(graph, aten.add.Tensor):
        pieces = None if _is_term(node) else _parts_summed(node)
        if pieces is not None:
            join, dim, parts = pieces
            with graph.inserting_before(node):
                node.replace_all_uses_with(emit(node, join, (parts, dim), shape_of(node)))
    sweep(graph)
    for node in calls(graph, aten.stack.default, aten.cat.default):
        dim = (node.args[1] if len(node.args) > 1 else 0) % len(shape_of(node))
        joined = _joined_source(node.args[0], dim)
        if joined is not None:
            with graph.inserting_before(node):
                node.replace_all_uses_with(_viewed_as(node, joined))
    sweep(graph)


def _viewed_as(node: fx.Node, whole: fx.Node) -> fx.Node:
    """Return `whole` viewed in the shape of `node`; `clean` removes the copy if the view is
    possible without it."""
    if shape_of(whole) == shape_of(node):
        return whole
    order = {"memory_format": torch.contiguous_format}
    return view(
        node,
        emit(node, aten.clone.default, (whole,), shape_of(whole), kwargs=order),
        shape_of(node),
    )


def _joined_source(parts: Sequence[fx.Node], dim: int) -> fx.Node | None:
    """Return the tensor whose parts of dim `dim` are `parts`, in order; None if there is none."""
    sources, end = set(), 0
    for part in parts:
        sliced = _part(part)
        if sliced is None or sliced[1:3] != (dim, end):
            return None
        sources.add(sliced[0])
        end = sliced[3]
    source = sources.pop()
    return (
        source
        if not sources
        and end == shape_of(source)[dim]
        and len({shape_of(part) for part in parts}) == 1
        else None
    )


def _part(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """Return (tensor, dim, first, end) of a part, where an entry has length 1; None if `node` is
    not a part."""
    if node.target is operator.getitem and node.args[0].target is aten.unbind.int:
        source, at = node.args[0].args[0], node.args[1]
        dim = node.args[0].args[1] if len(node.args[0].args) > 1 else 0
        return source, dim % len(shape_of(source)), at, at + 1
    if node.target is aten.select.int:
        source, dim, at = node.args
        dim %= len(shape_of(source))
        return source, dim, at % shape_of(source)[dim], at % shape_of(source)[dim] + 1
    if (
        node.target is aten.slice.Tensor and len(node.args) == 5 and node.args[4] == 1
    ):  # the form that `clean` writes
        return node.args[:4]
    return None


def _is_term(node: fx.Node) -> bool:
    """Return whether a longer sum is the only user of the sum."""
    return len(node.users) == 1 and next(iter(node.users)).target is aten.add.Tensor


def _parts_summed(node: fx.Node) -> tuple[OpOverload, int, list[fx.Node]] | None:
    """Return (op that joins the gradients, dim, gradients in order) if the terms of the sum are the
    padded gradients of all parts of a dim; else None."""
    terms, parts, dims = [node], {}, set()
    while terms:
        term = terms.pop()
        if not isinstance(term, fx.Node):
            return None
        if term.target is aten.add.Tensor and (term is node or _is_term(term)) and not term.kwargs:
            terms += term.args
            continue
        padded = _match_padding(term)
        if padded is None or shape_of(term) != shape_of(node) or padded[2] in parts:
            return None
        join, dim, first, end = padded
        dims.add((join, dim))
        parts[first] = end, term.args[0]
    if len(dims) != 1:
        return None
    (join, dim), ends = dims.pop(), [0, *(parts[first][0] for first in sorted(parts))]
    if ends != [*sorted(parts), shape_of(node)[dim]]:
        return None
    return join, dim, [parts[first][1] for first in sorted(parts)]


def _match_padding(node: fx.Node) -> tuple[OpOverload, int, int, int] | None:
    """Return (op that joins the gradients, dim, first, end) if `node` pads the gradient of one part
    with zeros; else None."""
    if node.target is aten.select_backward.default:
        _, sizes, dim, at = node.args
        return aten.stack.default, dim % len(sizes), at % sizes[dim], at % sizes[dim] + 1
    if node.target is aten.slice_backward.default and node.args[5] == 1:
        _, sizes, dim, first, end, _ = node.args
        size = sizes[dim]
        first, end = (min(at if at >= 0 else at + size, size) for at in (first, end))
        return (aten.cat.default, dim % len(sizes), first, end) if first < end else None
    return None


# --------------------------------------------------------------------------------------------------
# ``as_strided`` reads the memory of a tensor. A shard of the tensor, or a gathered tensor, may have
# a different order in memory.


def copy_before_strided(graph: fx.Graph) -> None:
    """Make ``as_strided`` read a copy whose elements have the same order in memory as in the
    captured call.

    Raises:
        CaptureError: the elements are not contiguous in the captured call, or overlap.
    """
    for node in calls(graph, aten.as_strided.default):
        x = node.args[0]
        strides = x.meta["val"].stride()
        order = sorted(range(len(strides)), key=[-stride for stride in strides].__getitem__)
        if not x.meta["val"].permute(order).is_contiguous():
            raise CaptureError(
                "forward calls as_strided on a tensor that is a slice or an expansion of another"
                " tensor",
                where=Where(
                    op=str(node.target), module=node.meta["module"], source=node.meta["source"]
                ),
                remedy=(
                    "use a copy: `x.contiguous().as_strided(...)`; or use `x.unfold(dim, size,"
                    " step)` for windows"
                ),
            )
        shape = tuple(shape_of(x)[dim] for dim in order)
        with graph.inserting_before(node):
            laid = (
                x
                if order == list(range(len(order)))
                else emit(node, aten.permute.default, (x, order), shape, dtype=dtype_of(x))
            )
            how = {"memory_format": torch.contiguous_format}
            copied = emit(node, aten.clone.default, (laid,), shape, dtype=dtype_of(x), kwargs=how)
        node.args = (copied, *node.args[1:])


# --------------------------------------------------------------------------------------------------
# Ops whose kernels require a memory format are replaced by functions that accept any format
# (`autopar.ops.formats`).


def take_any_format(graph: fx.Graph) -> None:
    """Replace ops that require a memory format with functions that accept any format, with the same
    arguments."""
    for node in graph.nodes:
        if node.op == "call_function":
            node.target = ANY_FORMAT.get(node.target, node.target)
