"""Ops that sum or average selected rows, or write them back into the tensor that they were selected
from."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx
from torch.nn import functional

from autopar.capture.ragged_rows.rows import Mask, Masks, Writer, first_dim, refusal, tensor_of
from autopar.capture.ragged_rows.rowwise import argument, dims_of, name_of
from autopar.ops import ctc

_Ending = Callable[[fx.Node, Masks, Writer], fx.Node | None]

_OF_ELEMENTS = frozenset(
    [
        "mse_loss",
        "l1_loss",
        "smooth_l1_loss",
        "huber_loss",
        "binary_cross_entropy",
        "binary_cross_entropy_with_logits",
        "kl_div",
        "poisson_nll_loss",
        "soft_margin_loss",
        "hinge_embedding_loss",
        "margin_ranking_loss",
    ]
)
_OF_ROWS = frozenset(
    ("cosine_embedding_loss", "triplet_margin_loss", "multilabel_soft_margin_loss")
)
"""Losses with one number per row of a matrix."""
_OF_CLASSES = frozenset(("cross_entropy", "nll_loss"))


def is_loss(node: fx.Node) -> bool:
    """Return whether `node` calls a torch loss that may sum over rows."""
    return name_of(node) in _OF_ELEMENTS | _OF_ROWS | _OF_CLASSES


def reduction_of(node: fx.Node) -> str:
    """Return the ``reduction`` of a torch loss: ``"mean"`` (the default), ``"sum"`` or
    ``"none"``."""
    return str(_settings(node).get("reduction", "mean"))


def end_rows(node: fx.Node, masks: Masks, write: Writer) -> fx.Node:
    """Insert the replacement of a node whose operands contain selected rows, but not its result.

    Args:
        node: the node to replace; it remains in the graph.
        masks: masks by the symbol of their number of rows.
        write: inserts nodes before `node`.

    Returns:
        A node with the same result, computed from all rows.

    Raises:
        CaptureError: `node` is not a supported reduction.
    """
    ending = _loss if is_loss(node) else _ENDINGS.get(name_of(node))
    replacement = ending(node, masks, write) if ending is not None else None
    if replacement is None:
        raise refusal(node)
    return replacement


def _mask_of(node: Any, masks: Masks) -> tuple[Mask, int]:
    symbol, factor = first_dim(node) or ("", 0)
    if symbol not in masks:
        raise refusal(node)
    return masks[symbol], factor


def _method(node: fx.Node) -> str:
    """Return the method name of an op, with the underscore of in-place forms."""
    return str(node.target) if node.op == "call_method" else name_of(node)


def _fill_others(
    rows: fx.Node, value: Any, masks: Masks, write: Writer, rank: int | None = None
) -> fx.Node:
    """Return `rows` with `value` in the rows that are not selected."""
    mask, factor = _mask_of(rows, masks)
    tensor = tensor_of(rows)
    dims = rank if rank is not None else 1 if tensor is None else tensor.dim()
    return write.call(torch.where, mask.rows(factor, dims, write), rows, value)


def _along(node: fx.Node) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return the operand and the reduced dims; None if `node` does not reduce rows."""
    tensor = tensor_of(node.args[0])
    position_given = argument(node, 1, "dim")
    if tensor is None or isinstance(position_given, fx.Node):
        return None
    dims = (
        tuple(range(tensor.dim()))
        if position_given is None
        else dims_of(node, name_of(node), tensor.dim())
    )
    return None if dims is None or 0 not in dims else (tensor, dims)


def _sum(node: fx.Node, masks: Masks, write: Writer) -> fx.Node | None:
    along = _along(node)
    if along is None:
        return None
    filled = _fill_others(node.args[0], False if along[0].dtype is torch.bool else 0, masks, write)
    return write.method("sum", filled, *node.args[1:], **node.kwargs)


def _mean(node: fx.Node, masks: Masks, write: Writer) -> fx.Node | None:
    along = _along(node)
    total = _sum(node, masks, write)
    if along is None or total is None:
        return None
    mask, factor = _mask_of(node.args[0], masks)
    within = math.prod(int(along[0].shape[dim]) for dim in along[1] if dim)
    return write.call(torch.div, total, mask.count(factor * within, write))


def _extreme(sign: int) -> _Ending:
    def end_extreme(node: fx.Node, masks: Masks, write: Writer) -> fx.Node | None:
        """Reduce with the identity in the rows that are not selected; return None if the reduction
        also returns indices.

        Args:
            node: the reduction.
            masks: masks by the symbol of their number of rows.
            write: inserts nodes before `node`.
        """
        along = _along(node)
        if along is None:
            return None
        name = name_of(node)
        if name in ("max", "min") and argument(node, 1, "dim") is not None:
            return None  # the index of the extreme is ambiguous if rows are equal
        least = sign * math.inf if along[0].is_floating_point() else _bound(along[0].dtype, sign)
        return write.method(
            name, _fill_others(node.args[0], least, masks, write), *node.args[1:], **node.kwargs
        )

    return end_extreme


def _bound(dtype: torch.dtype, sign: int) -> int:
    return torch.iinfo(dtype).max if sign > 0 else torch.iinfo(dtype).min


def _boolean(every: bool) -> _Ending:
    def end_flags(node: fx.Node, masks: Masks, write: Writer) -> fx.Node | None:
        """Reduce booleans with the identity in the rows that are not selected.

        Args:
            node: the reduction.
            masks: masks by the symbol of their number of rows.
            write: inserts nodes before `node`.
        """
        if _along(node) is None:
            return None
        return write.method(
            name_of(node),
            _fill_others(node.args[0], every, masks, write),
            *node.args[1:],
            **node.kwargs,
        )

    return end_flags


def _settings(node: fx.Node) -> dict[str, Any]:
    """Return the arguments of a loss by name."""
    try:
        return dict(
            inspect.signature(getattr(functional, name_of(node)))
            .bind(*node.args, **node.kwargs)
            .arguments
        )
    except TypeError:
        raise refusal(node) from None


def _loss(node: fx.Node, masks: Masks, write: Writer) -> fx.Node | None:
    name, settings = name_of(node), _settings(node)
    operands = [x for x in settings.values() if isinstance(x, fx.Node) and first_dim(x)]
    is_old = any(settings.get(name) is not None for name in ("size_average", "reduce"))
    if is_old or not operands:
        return None
    tensors = [tensor for x in operands if (tensor := tensor_of(x)) is not None]
    if name in _OF_CLASSES:
        if tensors[-1].is_floating_point() or len(operands) < 2:
            return None
        ignored = settings.get("ignore_index", -100)
        target = _fill_others(settings["target"], ignored, masks, write)
        return write.call(getattr(functional, name), **{**settings, "target": target})
    if name in _OF_ROWS and max(tensor.dim() for tensor in tensors) != 2:
        return None
    inner = torch.broadcast_shapes(*(t.shape[1:] for t in tensors)) if name in _OF_ELEMENTS else ()
    return _reduce_loss(node, operands[0], (1, *inner), masks, write)


def _reduce_loss(
    node: fx.Node, operand: fx.Node, shape: tuple[int, ...], masks: Masks, write: Writer
) -> fx.Node:
    """Sum or average a loss over the selected rows.

    Args:
        node: the call of the loss.
        operand: an operand with the selected rows.
        shape: shape of the loss of one row without reduction, ``[1, ...]``.
        masks: masks by the symbol of their number of rows.
        write: inserts nodes before `node`.
    """
    settings = _settings(node)
    row_losses = write.call(getattr(functional, name_of(node)), **{**settings, "reduction": "none"})
    mask, factor = _mask_of(operand, masks)
    selected = write.call(torch.where, mask.rows(factor, len(shape), write), row_losses, 0)
    total = write.method("sum", selected)
    how = settings.get("reduction", "mean")
    if how == "sum":
        return total
    num = factor * (math.prod(shape) if how == "mean" else 1)
    return write.call(torch.div, total, mask.count(num, write))


def _index_add(node: fx.Node, masks: Masks, write: Writer) -> fx.Node | None:
    """Add rows, with zeros in the rows that are not selected."""
    target, dim, index, rows = (
        argument(node, i, name) for i, name in enumerate(("input", "dim", "index", "source"))
    )
    if dim != 0 or first_dim(target) or not first_dim(rows) or first_dim(index) != first_dim(rows):
        return None
    return write.method(
        _method(node), target, 0, index, _fill_others(rows, 0, masks, write), **node.kwargs
    )


def _index_put(node: fx.Node, masks: Masks, write: Writer) -> fx.Node | None:
    target, indices, rows = node.args[:3]
    adds = bool(argument(node, 3, "accumulate", False))
    if not adds or first_dim(target) or not all(first_dim(i) == first_dim(rows) for i in indices):
        return None
    return write.method(_method(node), target, indices, _fill_others(rows, 0, masks, write), True)


def put_back(node: fx.Node, masks: Masks, write: Writer) -> bool:
    """Rewrite ``x[mask] = rows`` if the same mask selected `rows`.

    Args:
        node: the call of ``setitem``.
        masks: masks by the symbol of their number of rows.
        write: inserts nodes before `node`.

    Returns:
        Whether the node was rewritten.
    """
    target, index, rows = node.args
    if not first_dim(rows) or first_dim(target):
        return False
    mask, factor = _mask_of(rows, masks)
    is_mask = isinstance(index, fx.Node) and index is mask.node
    numbers = isinstance(index, fx.Node) and index in mask.numbers and len(mask.shape) == 1
    tensor, rows_tensor = tensor_of(target), tensor_of(rows)
    if (
        factor != 1
        or not (is_mask or numbers)
        or tensor is None
        or rows_tensor is None
        or rows_tensor.dim() != 1 + tensor.dim() - len(mask.shape)
    ):
        return False
    flags = write.method("view", mask.flat, *mask.shape, *[1] * (tensor.dim() - len(mask.shape)))
    back = write.method("view", rows, *mask.shape, *rows_tensor.shape[1:])
    write.method(
        "copy_",
        target,
        write.call(torch.where, flags, write.method("to", back, tensor.dtype), target),
    )
    return True


def _masked_scatter(node: fx.Node, masks: Masks, write: Writer) -> fx.Node | None:
    """Rewrite ``x.masked_scatter(mask, rows)`` if the same mask, up to expansion, selected
    `rows`."""
    target, flags, rows = node.args[:3]
    mask, factor = _mask_of(rows, masks)
    tensor, rows_tensor, flags_tensor = tensor_of(target), tensor_of(rows), tensor_of(flags)
    if (
        tensor is None
        or rows_tensor is None
        or flags_tensor is None
        or factor != 1
        or _mask_origin(flags) != _mask_origin(mask.node)
    ):
        return None
    rest = tuple(tensor.shape[len(mask.shape) :])
    fits = tuple(tensor.shape) == (*mask.shape, *rest) and tuple(rows_tensor.shape[1:]) == rest
    if not fits or tuple(flags_tensor.shape) not in (
        (*mask.shape, *[1] * len(rest)),
        tuple(tensor.shape),
    ):
        return None
    flags = write.method("view", mask.flat, *mask.shape, *[1] * len(rest))
    replaced = write.call(
        torch.where, flags, write.method("view", rows, *mask.shape, *rest), target
    )
    return write.method("copy_", target, replaced) if str(node.target).endswith("_") else replaced


def _mask_origin(flags: Any) -> tuple[int, Any]:
    """Return the number of negations of a mask modulo 2, and the node that it is derived from; dims
    of length 1 are ignored."""
    negated = 0
    while isinstance(flags, fx.Node):
        name = name_of(flags)
        if name in ("invert", "logical_not"):
            negated ^= 1
        elif name not in _SAME_FLAGS and not (
            name == "getitem" and flags.args[1] == (Ellipsis, None)
        ):
            break
        flags = flags.args[0]
    return negated, flags


def _ctc(node: fx.Node, masks: Masks, write: Writer) -> fx.Node | None:
    """Pad targets that a mask selects from one row per sample: the selected elements of each row
    are moved to its front."""
    log_probs, targets, frames, lengths, *rest = node.args
    mask, factor = _mask_of(targets, masks)
    if factor != 1 or len(mask.shape) != 2 or not _counts(lengths, mask):
        return None
    flags = write.method("to", write.method("view", mask.flat, *mask.shape), torch.int8)
    order = write.call(torch.argsort, flags, dim=1, descending=True, stable=True)
    padded = write.call(torch.gather, write.method("view", targets, *mask.shape), 1, order)
    return write.call(ctc, log_probs, padded, frames, lengths, *rest)


def _counts(lengths: Any, mask: Mask) -> bool:
    """Return whether `lengths` is the number of elements that `mask` selects from each row."""
    while isinstance(lengths, fx.Node) and name_of(lengths) in (
        "reshape",
        "as_tensor",
        "to",
        "long",
    ):
        lengths = lengths.args[0]
    if (
        not isinstance(lengths, fx.Node)
        or name_of(lengths) != "sum"
        or argument(lengths, 1, "dim") not in (-1, 1, (-1,), (1,))
    ):
        return False
    return _mask_origin(lengths.args[0]) == _mask_origin(mask.node)


_SAME_FLAGS = ("unsqueeze", "expand", "expand_as", "to", "bool")
_ENDINGS: Mapping[str, _Ending] = {
    "sum": _sum,
    "mean": _mean,
    "max": _extreme(-1),
    "amax": _extreme(-1),
    "min": _extreme(1),
    "amin": _extreme(1),
    "any": _boolean(False),
    "all": _boolean(True),
    "index_add": _index_add,
    "index_put": _index_put,
    "masked_scatter": _masked_scatter,
    "ctc_joined.default": _ctc,
}
