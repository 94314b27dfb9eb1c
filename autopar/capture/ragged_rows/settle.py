"""Rewrite a graph of torch functions so that sizes that depend on values become fixed, and numbers
that are read from tensors remain tensors."""

from __future__ import annotations

import logging
import operator
import os
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from autopar.capture.diagnostics import reads_a_value, user_line
from autopar.capture.graphs import is_in_place
from autopar.capture.ragged_rows.reductions import end_rows, is_loss, put_back, reduction_of
from autopar.capture.ragged_rows.rows import (
    Mask,
    Writer,
    count_symbol,
    first_dim,
    refusal,
    tensor_of,
    value_of,
)
from autopar.capture.ragged_rows.rowwise import (
    COMPUTING,
    SHAPING,
    SIZED,
    is_tame,
    keeps_rows,
    name_of,
)
from autopar.errors import CaptureError, Where

# --------------------------------------------------------------------------------------------------
# Masks in a graph of torch functions: equal masks are merged, and masks with a fixed number of
# selected rows are rewritten to fixed shapes.
#
# A mask that is computed twice, as in ``out[~mask] = f(x[~mask])``, becomes one mask, so that both
# uses have the same number of rows.


_COMPARING = frozenset(
    [
        "eq",
        "ne",
        "lt",
        "le",
        "gt",
        "ge",
        "invert",
        "logical_not",
        "logical_and",
        "logical_or",
        "logical_xor",
        "and_",
        "or_",
        "xor",
        "bitwise_and",
        "bitwise_or",
        "bitwise_not",
        "isnan",
        "isfinite",
        "isinf",
        "isin",
        "bool",
        "long",
        "int",
        "to",
        "squeeze",
        "unsqueeze",
        "getitem",
        "any",
        "all",
        "argmax",
        "roll",
        *SHAPING,
    ]
)
"""Ops that compute masks; their results are equal for equal operands."""


def join_equal_masks(graph: fx.Graph) -> None:
    """Replace masks that the same ops compute from the same values with the first of them.

    Masks that are written to are not replaced. All results of one mask get the same symbol for
    their number of rows. The replaced nodes remain in the graph, without users.
    """
    writes = [written for node in graph.nodes for written in _storages_written(node)]
    version: dict[int, int] = {}
    descriptions: dict[fx.Node, Any] = {}
    firsts: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        for storage in _storages_written(node):
            version[storage] = version.get(storage, 0) + 1
        value = tensor_of(node)
        if (
            value is None
            or name_of(node) not in _COMPARING
            or node.op == "placeholder"
            or _storages_written(node)
        ):
            continue
        try:
            descriptions[node] = _describe(node, descriptions, version)
            first = (
                firsts.setdefault(descriptions[node], node) if value.dtype is torch.bool else node
            )
        except TypeError:
            continue  # an argument is not hashable
        if first is not node and not {_storage(value), _storage(tensor_of(first))} & set(writes):
            node.replace_all_uses_with(first)
    _unify_counts(graph)


def _describe(node: fx.Node, made: dict[fx.Node, Any], version: dict[int, int]) -> Any:
    """Return a hashable description of how a value is computed.

    Operands that are not computed by ops of `_COMPARING` are identified by their node and the
    number of writes to their storage so far.

    Raises:
        TypeError: an argument is not hashable.
    """

    def part(x: Any) -> Any:
        """Return the description of one argument."""
        if isinstance(x, slice):
            return "slice", part(x.start), part(x.stop), part(x.step)
        if isinstance(x, fx.Node):
            return made.get(x, x), version.get(_storage(tensor_of(x)), 0)
        return tuple(map(part, x)) if isinstance(x, tuple | list) else (type(x), x)

    settings = tuple((name, part(x)) for name, x in sorted(node.kwargs.items()))
    description = node.op, node.target, tuple(part(x) for x in node.args), settings
    hash(description)
    return description


def _storage(value: torch.Tensor | None) -> int:
    return 0 if value is None else value.untyped_storage()._cdata


def _storages_written(node: fx.Node) -> set[int]:
    """Return the storages that a node writes to."""
    first = node.args[:1] if is_in_place(node) else ()
    return {
        _storage(tensor_of(x)) for x in (*first, node.kwargs.get("out")) if tensor_of(x) is not None
    }


def _unify_counts(graph: fx.Graph) -> None:
    """Give all results of one mask the same symbol for their number of rows."""
    sizes: dict[fx.Node, Any] = {}
    for node in graph.nodes:
        index = node.args[1] if name_of(node) == "getitem" and len(node.args) > 1 else None
        flags = index[0] if isinstance(index, tuple) and index else index
        picks, value = tensor_of(flags), tensor_of(node)
        if (
            picks is None
            or picks.dtype is not torch.bool
            or value is None
            or not value.dim()
            or count_symbol(value.shape[0]) is None
        ):
            continue
        first = sizes.setdefault(flags, value.shape[0])
        if count_symbol(first) != count_symbol(value.shape[0]):
            node_of_size = value.shape[0].node
            node_of_size.shape_env._set_replacement(
                node_of_size.expr, first.node.expr, "of one mask"
            )


# --------------------------------------------------------------------------------------------------
# Masks that must select a fixed number of rows: ``x[mask] + given`` and ``x[mask] = given``, where
# `given` has that number of rows.
#
# With another number, the plain model raises an error. Therefore shapes are fixed: rows are read by
# the positions that the mask selects, and written back in their order.


def is_required(node: fx.Node) -> bool:
    """Return whether `node` reads or writes rows by a mask that must select a fixed number of
    rows."""
    return name_of(node) in ("getitem", "setitem") and _match_picked(node) is not None


def settle_required(graph: fx.Graph) -> None:
    """Rewrite reads and writes by masks with a fixed number of rows to fixed shapes.

    A symbolic number that equals an integer is replaced by that integer.
    """
    for node in list(graph.nodes):
        number = node.meta.get("example_value")
        if isinstance(number, torch.SymInt) and number.node.expr.is_Integer:
            node.replace_all_uses_with(int(number.node.expr))
            graph.erase_node(node)
        elif name_of(node) == "getitem" and (picked := _match_picked(node)):
            _replace_read(node, *picked, Writer(graph, node))
        elif name_of(node) == "setitem" and (picked := _match_picked(node)):
            _replace_write(node, *picked, Writer(graph, node))


def _match_picked(node: fx.Node) -> tuple[fx.Node, tuple[Any, ...], int] | None:
    """Match ``x[mask]`` or ``x[mask] = rows`` with a fixed number of rows.

    Returns:
        (mask, other indices, number of rows); None if the number is not fixed, or the index is not
        a mask.
    """
    source_tensor, index = tensor_of(node.args[0]), node.args[1]
    flags, *others = index if isinstance(index, tuple) else (index,)
    picks = tensor_of(flags)
    if source_tensor is None or picks is None or picks.dtype is not torch.bool or not picks.dim():
        return None
    if any(isinstance(x, fx.Node) for x in others):
        return None
    rank = 1 + source_tensor.dim() - picks.dim()
    rows = _picked_rows(node, others, rank)
    num = None if rows is None else rows.shape[0]
    if isinstance(num, torch.SymInt):
        num = int(num.node.expr) if num.node.expr.is_Integer else None
    elif num == 1:  # one row is broadcast to all selected rows
        num = None
    return None if num is None else (flags, tuple(others), num)


def _picked_rows(node: fx.Node, others: Sequence[Any], rank: int) -> torch.Tensor | None:
    """Return the rows that an index reads or writes; None if it only writes parts of rows.

    Args:
        node: a call of ``getitem`` or ``setitem``.
        others: the indices after the mask.
        rank: rank of the selected rows.
    """
    if name_of(node) == "getitem":
        return tensor_of(node)
    rows = tensor_of(node.args[2])
    if rows is None or rows.dim() != rank or any(x != slice(None) for x in others):
        return None
    return rows


def _replace_read(
    node: fx.Node, flags: fx.Node, others: tuple[Any, ...], num: int, write: Writer
) -> None:
    first = write.method("to", write.method("reshape", flags, -1), torch.int8)
    order = write.call(torch.argsort, first, descending=True, stable=True)
    rows = write.method("flatten", node.args[0], 0, _rank(flags) - 1)
    selected = write.call(torch.index_select, rows, 0, write.method("narrow", order, 0, 0, num))
    if others:
        selected = write.call(operator.getitem, selected, (slice(None), *others))
    _replace(node, selected, write)


def _replace_write(
    node: fx.Node, flags: fx.Node, _: tuple[Any, ...], num: int, write: Writer
) -> None:
    target, shape = tensor_of(node.args[0]), tuple(getattr(tensor_of(flags), "shape", ()))
    assert (
        target is not None
        and isinstance(node.args[0], fx.Node)
        and isinstance(node.args[2], fx.Node)
    ), "the operands are a tensor and rows"
    number = write.method(
        "cumsum", write.method("to", write.method("reshape", flags, -1), torch.int64), 0
    )
    number = write.method("clamp", write.call(torch.sub, number, 1), 0, num - 1)
    rest = tuple(target.shape[len(shape) :])
    rows = write.method(
        "view", write.call(torch.index_select, node.args[2], 0, number), *shape, *rest
    )
    wide_flags = write.method("view", flags, *shape, *[1] * len(rest))
    write.method(
        "copy_",
        node.args[0],
        write.call(torch.where, wide_flags, write.method("to", rows, target.dtype), node.args[0]),
    )
    node.graph.erase_node(node)


def _replace(node: fx.Node, made: fx.Node, write: Writer) -> None:
    write.replace(made)
    node.graph.erase_node(node)


def _rank(node: fx.Node) -> int:
    tensor = tensor_of(node)
    return 0 if tensor is None else tensor.dim()


# --------------------------------------------------------------------------------------------------


_log = logging.getLogger("autopar")
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DIVIDING = ("truediv", "sym_float")  # results are floats
_ARITHMETIC = ("add", "sub", "mul", "neg", *_DIVIDING)


def settle_rows(graph: fx.Graph) -> None:
    """Compute all rows instead of those that a mask selects (see `autopar.capture.ragged_rows`).

    A number that forward reads from a tensor and computes with (`loss / mask.sum().item()`) is
    replaced by the tensor. A graph without such rows and numbers is not changed.

    Raises:
        CaptureError: an op on selected rows is not row-wise, or a number determines a shape.
    """
    if not any(_depends(value_of(node)) or is_required(node) for node in graph.nodes):
        return
    join_equal_masks(graph)
    settle_required(graph)
    _Settling(graph).run()


def _depends(value: Any) -> bool:
    """Return whether a size in `value` depends on values of tensors."""
    if isinstance(value, torch.Tensor):
        return any(count_symbol(size) for size in value.shape)
    return (
        any(_depends(x) for x in value)
        if isinstance(value, tuple | list)
        else isinstance(value, _NUMBERS)
    )


def _is_number(x: Any) -> bool:
    """Return whether x is a node whose result is a number that is read from tensors."""
    return isinstance(x, fx.Node) and isinstance(value_of(x), _NUMBERS)


def _symbol_of(node: fx.Node) -> tuple[str, int] | None:
    """Return (symbol, factor) of the first dim of a node's tensor if it depends on values, else
    None."""
    tensor = tensor_of(node)
    return count_symbol(tensor.shape[0]) if tensor is not None and tensor.dim() else None


class _Settling:
    """One run of `settle_rows`: the masks by symbol, the replaced nodes, and the symbols whose rows
    are operands or results of an op that is not tame."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._masks: dict[str, Mask] = {}
        self._replaced: set[fx.Node] = set()
        self._tensors: dict[fx.Node, fx.Node] = {}
        self._not_tame = {
            first[0]
            for node in graph.nodes
            if not is_tame(node)
            for n in (node, *node.all_input_nodes)
            if (first := _symbol_of(n))
        }

    def run(self) -> None:
        """Rewrite the nodes in order, and erase the replaced ones."""
        for node in list(self._graph.nodes):
            if node not in self._replaced and node.op != "placeholder":
                self._settle(node)
        for node in reversed(list(self._graph.nodes)):
            if node in self._replaced or isinstance(value_of(node), _NUMBERS):
                for user in node.users:
                    raise self._number_error(user, node)
                self._graph.erase_node(node)
        self._warn()

    def _settle(self, node: fx.Node) -> None:
        """Rewrite one node: first the numbers that it reads, then rows that it selects or reads."""
        value, operands = value_of(node), node.all_input_nodes
        if isinstance(value, _NUMBERS):
            return  # numbers are replaced in the nodes that read them
        numbers = [n for n in operands if isinstance(value_of(n), _NUMBERS)]
        rows = [n for n in operands if _depends(value_of(n)) and n not in numbers]
        if node.op == "output":
            self._check_output(rows, numbers)
        write = Writer(self._graph, node)
        if numbers:
            self._replace_numbers(node, numbers, write)
        if rows:
            self._settle_rows_of(node, rows, write)
        elif _depends(value) and not numbers:
            self._pick(node, write)
        elif _depends(value):
            self._keep(node, rows)

    def _check_output(self, rows: Sequence[fx.Node], numbers: Sequence[fx.Node]) -> None:
        """Raise CaptureError if forward returns selected rows or numbers."""
        if rows:
            raise refusal(rows[0])
        if numbers:
            raise self._number_error(numbers[0], numbers[0])

    def _settle_rows_of(self, node: fx.Node, rows: Iterable[fx.Node], write: Writer) -> None:
        """Rewrite a node that reads rows: one that writes them back, reduces them, or is
        row-wise."""
        if name_of(node) == "setitem":
            if not put_back(node, self._masks, write):
                raise refusal(node)
            self._replaced.add(node)
        elif not _depends(value_of(node)):
            self._replace(node, end_rows(node, self._masks, write), write)
        else:
            self._keep(node, rows)

    def _keep(self, node: fx.Node, rows: Iterable[fx.Node]) -> None:
        """Check that a node is row-wise and its results have the rows of its operands, or parts of
        them."""
        symbols = {
            self._counts(leaf)[0]
            for leaf in tree_leaves(value_of(node))
            if isinstance(leaf, torch.Tensor)
        }
        symbols |= {first[0] for n in rows if tensor_of(n) is not None and (first := first_dim(n))}
        first_dim(node)
        if len(symbols) != 1 or not symbols <= self._masks.keys():
            raise refusal(node)
        if not (reduction_of(node) == "none" if is_loss(node) else keeps_rows(node)):
            raise refusal(node)

    @staticmethod
    def _counts(tensor: torch.Tensor) -> tuple[str, int]:
        return (count_symbol(tensor.shape[0]) if tensor.dim() else None) or ("", 0)

    def _pick(self, node: fx.Node, write: Writer) -> None:
        """Rewrite a node that selects rows."""
        name = name_of(node)
        if name == "getitem" and tensor_of(node.args[0]) is not None:
            replacement = self._by_index(node, write)
        elif name == "masked_select":
            replacement = self._select(node, write)
        elif name in ("nonzero", "argwhere", "where") and len(node.args) == 1:
            replacement = self._places(node, write)
        else:
            replacement = None
        if replacement is None:
            raise refusal(node)
        if replacement is not node:
            self._replace(node, replacement, write)

    def _mask(self, symbol: str, node: fx.Node, shape: tuple[int, ...], write: Writer) -> Mask:
        if symbol not in self._masks:
            self._masks[symbol] = Mask.of(node, shape, symbol not in self._not_tame, write)
        return self._masks[symbol]

    def _by_index(self, node: fx.Node, write: Writer) -> fx.Node | None:
        source, index = node.args
        flags, *others = index if isinstance(index, tuple) else (index,)
        tensor, picks = tensor_of(source), tensor_of(flags)
        if tensor is None or picks is None or picks.dtype is not torch.bool or not picks.dim():
            return None
        if any(isinstance(other, fx.Node) for other in others):
            return None
        counts = first_dim(node)
        assert counts is not None and isinstance(source, fx.Node) and isinstance(flags, fx.Node), (
            "the first dim of the result counts rows"
        )
        mask = self._mask(counts[0], flags, tuple(picks.shape), write)
        flat = write.method("flatten", source, 0, picks.dim() - 1) if picks.dim() > 1 else source
        rank = tensor.dim() - picks.dim() + 1
        rows = mask.choose_rows(write.method("clone", flat), tensor, rank, write)
        return write.call(operator.getitem, rows, (slice(None), *others)) if others else rows

    def _select(self, node: fx.Node, write: Writer) -> fx.Node | None:
        source, flags = node.args[:2]
        tensor, picks, counts = tensor_of(source), tensor_of(flags), first_dim(node)
        if tensor is None or picks is None or counts is None:
            return None
        shape = tuple(torch.broadcast_shapes(tensor.shape, picks.shape))
        wide_flags = write.method("expand", flags, *shape) if tuple(picks.shape) != shape else flags
        assert isinstance(wide_flags, fx.Node), "the mask is a node"
        mask = self._mask(counts[0], wide_flags, shape, write)
        flat = write.method("reshape", write.method("expand", source, *shape), -1)
        return mask.choose_rows(write.method("clone", flat), tensor, 1, write)

    def _places(self, node: fx.Node, write: Writer) -> fx.Node | None:
        """Rewrite ``nonzero``: return one tensor of indices per dim of the mask, or all of them
        stacked."""
        flags = node.args[0]
        picks, value = tensor_of(flags), value_of(node)
        if picks is None or not picks.dim() or not isinstance(flags, fx.Node):
            return None
        several = isinstance(value, tuple | list)
        counts = self._counts(value[0] if several else value)
        true = flags if picks.dtype is torch.bool else write.call(torch.ne, flags, 0)
        mask = self._mask(counts[0], true, tuple(picks.shape), write)
        along = [mask.places(dim, write) for dim in range(picks.dim())]
        if not several:
            indices = write.call(torch.stack, along, -1)
            if len(along) == 1:
                mask.numbers.add(indices)
            return indices
        for user in list(node.users):
            number = user.args[1]
            if name_of(user) != "getitem" or not isinstance(number, int):
                raise refusal(user)
            along[number].meta["example_value"] = value_of(user)
            mask.numbers.add(along[number])
            user.replace_all_uses_with(along[number])
            self._replaced.add(user)
        self._replaced.add(node)
        return node

    def _replace_numbers(self, node: fx.Node, numbers: list[fx.Node], write: Writer) -> None:
        """Replace the numbers that `node` reads: in a shape by the number of all rows, else by a
        tensor."""
        name = name_of(node)
        for number in numbers:
            symbol, factor = count_symbol(value_of(number)) or ("", 0)
            if name in SIZED and symbol in self._masks:
                self._substitute_size(node, number, factor * self._masks[symbol].num_rows)
            elif name in COMPUTING:
                node.replace_input_with(number, self._as_tensor(number, node, write))
            else:
                raise self._number_error(node, number)

    def _as_tensor(self, number: fx.Node, reader: fx.Node, write: Writer) -> fx.Node:
        """Return a number as a scalar tensor, in float64 after a division as in Python."""
        if number in self._tensors:
            return self._tensors[number]
        symbol, factor = count_symbol(value_of(number)) or ("", 0)
        name = name_of(number)
        if symbol in self._masks:
            scalar = self._masks[symbol].count(factor, write)
        elif name == "item" and tensor_of(number.args[0]) is not None:
            scalar = write.method("reshape", write.method("detach", number.args[0]), ())
        elif name in _ARITHMETIC and any(_is_number(x) for x in number.args):
            operands = number.args
            args = [self._as_tensor(x, reader, write) if _is_number(x) else x for x in operands]
            if name in _DIVIDING:
                pairs = list(zip(operands, args, strict=True))
                args = [write.method("double", arg) if _is_number(x) else arg for x, arg in pairs]
            assert callable(number.target), "the target is a Python operator"
            scalar = args[0] if name == "sym_float" else write.call(number.target, *args)
        else:
            raise self._number_error(reader, number)
        self._tensors[number] = scalar
        return scalar

    def _number_error(self, reader: fx.Node, number: fx.Node) -> CaptureError:
        """Return the error for a number that cannot be replaced by a tensor."""
        symbol, _ = count_symbol(value_of(number)) or ("", 0)
        if symbol in self._masks:
            return refusal(reader)
        return reads_a_value(
            Where(op=name_of(reader), source=user_line(reader.meta.get("stack_trace") or ""))
        )

    @staticmethod
    def _substitute_size(node: fx.Node, number: fx.Node, size: int) -> None:
        def substitute(x: Any) -> Any:
            """Return the size instead of the number."""
            return size if x is number else x

        node.args, node.kwargs = (
            fx.map_arg(node.args, substitute),
            fx.map_arg(node.kwargs, substitute),
        )

    def _replace(self, node: fx.Node, made: fx.Node, write: Writer) -> None:
        write.replace(made)
        if any(node in mask.numbers for mask in self._masks.values()):
            raise refusal(node)
        self._replaced.add(node)

    def _warn(self) -> None:
        if self._masks and os.environ.get("RANK", "0") == "0":  # every rank captures
            lines = dict.fromkeys(
                user_line(mask.node.meta.get("stack_trace") or "") for mask in self._masks.values()
            )
            num = max(mask.num_rows for mask in self._masks.values())
            sources = "; ".join(line for line in lines if line) or "masks"
            _log.warning(
                "forward selects rows by values (%s): a program computes all %d rows and excludes"
                " the other rows from sums",
                sources,
                num,
            )
