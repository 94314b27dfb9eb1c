"""Rewrite a graph of torch functions whose sizes and numbers depend on values to fixed sizes and
tensors."""

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
from autopar.capture.ragged_rows.masks import is_required, join_equal_masks, settle_required
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
from autopar.capture.ragged_rows.rowwise import COMPUTING, SIZED, is_tame, keeps_rows, name_of
from autopar.errors import CaptureError, Where

_log = logging.getLogger("autopar")
_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_DIVIDING = ("truediv", "sym_float")  # they make floats
_ARITHMETIC = ("add", "sub", "mul", "neg", *_DIVIDING)


def settle_rows(graph: fx.Graph) -> None:
    """Compute all rows in place of the rows that a mask picks (see `autopar.capture.ragged_rows`).

    A number that forward reads from a tensor and computes with (`loss / mask.sum().item()`) becomes
    the tensor. A graph without such rows and numbers is left as it is.

    Raises:
        CaptureError: an op on picked rows does not treat them alike and apart, or a number decides
            a shape.
    """
    if not any(_depends(value_of(node)) or is_required(node) for node in graph.nodes):
        return
    join_equal_masks(graph)
    settle_required(graph)
    _Settling(graph).run()


def _depends(value: Any) -> bool:
    """Whether a size in `value` depends on values of tensors."""
    if isinstance(value, torch.Tensor):
        return any(count_symbol(size) for size in value.shape)
    return (
        any(_depends(x) for x in value)
        if isinstance(value, tuple | list)
        else isinstance(value, _NUMBERS)
    )


def _is_number(x: Any) -> bool:
    """Whether x is a node that gives a number read from tensors."""
    return isinstance(x, fx.Node) and isinstance(value_of(x), _NUMBERS)


def _symbol_of(node: fx.Node) -> tuple[str, int] | None:
    """Return (symbol, factor) of the first dim of a node's tensor, if that dim depends on
    values."""
    tensor = tensor_of(node)
    return count_symbol(tensor.shape[0]) if tensor is not None and tensor.dim() else None


class _Settling:
    """One run of `settle_rows`: the masks by symbol, the replaced nodes, and the symbols whose rows
    pass an op that is not tame."""

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._masks: dict[str, Mask] = {}
        self._gone: set[fx.Node] = set()
        self._tensors: dict[fx.Node, fx.Node] = {}
        self._wild = {
            first[0]
            for node in graph.nodes
            if not is_tame(node)
            for n in (node, *node.all_input_nodes)
            if (first := _symbol_of(n))
        }

    def run(self) -> None:
        """Settle the nodes in order, and erase the replaced ones."""
        for node in list(self._graph.nodes):
            if node not in self._gone and node.op != "placeholder":
                self._settle(node)
        for node in reversed(list(self._graph.nodes)):
            if node in self._gone or isinstance(value_of(node), _NUMBERS):
                for user in node.users:
                    raise self._misread(user, node)
                self._graph.erase_node(node)
        self._tell()

    def _settle(self, node: fx.Node) -> None:
        """Rewrite one node: the numbers that it reads first, then rows that it picks or reads."""
        value, operands = value_of(node), node.all_input_nodes
        if isinstance(value, _NUMBERS):
            return  # sizes are put in where they are read
        numbers = [n for n in operands if isinstance(value_of(n), _NUMBERS)]
        rows = [n for n in operands if _depends(value_of(n)) and n not in numbers]
        if node.op == "output":
            self._check_output(rows, numbers)
        write = Writer(self._graph, node)
        if numbers:
            self._put_sizes_in(node, numbers, write)
        if rows:
            self._settle_rows_of(node, rows, write)
        elif _depends(value) and not numbers:
            self._pick(node, write)
        elif _depends(value):
            self._keep(node, rows)

    def _check_output(self, rows: Sequence[fx.Node], numbers: Sequence[fx.Node]) -> None:
        """Raise CaptureError if forward returns picked rows or numbers."""
        if rows:
            raise refusal(rows[0])
        if numbers:
            raise self._misread(numbers[0], numbers[0])

    def _settle_rows_of(self, node: fx.Node, rows: Iterable[fx.Node], write: Writer) -> None:
        """Rewrite a node that reads rows: one that puts them back, ends them, or keeps them."""
        if name_of(node) == "setitem":
            if not put_back(node, self._masks, write):
                raise refusal(node)
            self._gone.add(node)
        elif not _depends(value_of(node)):
            self._replace(node, end_rows(node, self._masks, write), write)
        else:
            self._keep(node, rows)

    def _keep(self, node: fx.Node, rows: Iterable[fx.Node]) -> None:
        """Check that all results have the rows of the operands, or parts of them."""
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
        """Rewrite the node that picks rows."""
        name = name_of(node)
        if name == "getitem" and tensor_of(node.args[0]) is not None:
            made = self._by_index(node, write)
        elif name == "masked_select":
            made = self._select(node, write)
        elif name in ("nonzero", "argwhere", "where") and len(node.args) == 1:
            made = self._places(node, write)
        else:
            made = None
        if made is None:
            raise refusal(node)
        if made is not node:
            self._replace(node, made, write)

    def _mask(self, symbol: str, node: fx.Node, shape: tuple[int, ...], write: Writer) -> Mask:
        if symbol not in self._masks:
            self._masks[symbol] = Mask.of(node, shape, symbol not in self._wild, write)
        return self._masks[symbol]

    def _by_index(self, node: fx.Node, write: Writer) -> fx.Node | None:
        held, index = node.args
        flags, *others = index if isinstance(index, tuple) else (index,)
        tensor, picks = tensor_of(held), tensor_of(flags)
        if tensor is None or picks is None or picks.dtype is not torch.bool or not picks.dim():
            return None
        if any(isinstance(other, fx.Node) for other in others):
            return None
        counts = first_dim(node)
        assert counts is not None and isinstance(held, fx.Node) and isinstance(flags, fx.Node), (
            "a tensor whose first dim counts rows"
        )
        mask = self._mask(counts[0], flags, tuple(picks.shape), write)
        flat = write.method("flatten", held, 0, picks.dim() - 1) if picks.dim() > 1 else held
        rank = tensor.dim() - picks.dim() + 1
        rows = mask.choose_rows(write.method("clone", flat), tensor, rank, write)
        return write.call(operator.getitem, rows, (slice(None), *others)) if others else rows

    def _select(self, node: fx.Node, write: Writer) -> fx.Node | None:
        held, flags = node.args[:2]
        tensor, picks, counts = tensor_of(held), tensor_of(flags), first_dim(node)
        if tensor is None or picks is None or counts is None:
            return None
        shape = tuple(torch.broadcast_shapes(tensor.shape, picks.shape))
        whole = write.method("expand", flags, *shape) if tuple(picks.shape) != shape else flags
        assert isinstance(whole, fx.Node), "a mask"
        mask = self._mask(counts[0], whole, shape, write)
        flat = write.method("reshape", write.method("expand", held, *shape), -1)
        return mask.choose_rows(write.method("clone", flat), tensor, 1, write)

    def _places(self, node: fx.Node, write: Writer) -> fx.Node | None:
        """Rewrite ``nonzero``: one tensor of indices along each dim of the mask, or all of them
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
            made = write.call(torch.stack, along, -1)
            if len(along) == 1:
                mask.numbers.add(made)
            return made
        for user in list(node.users):
            number = user.args[1]
            if name_of(user) != "getitem" or not isinstance(number, int):
                raise refusal(user)
            along[number].meta["example_value"] = value_of(user)
            mask.numbers.add(along[number])
            user.replace_all_uses_with(along[number])
            self._gone.add(user)
        self._gone.add(node)
        return node

    def _put_sizes_in(self, node: fx.Node, numbers: list[fx.Node], write: Writer) -> None:
        """Replace the numbers that `node` reads: by the number of all rows in a shape, else by a
        tensor."""
        name = name_of(node)
        for number in numbers:
            symbol, factor = count_symbol(value_of(number)) or ("", 0)
            if name in SIZED and symbol in self._masks:
                self._swap(node, number, factor * self._masks[symbol].num_rows)
            elif name in COMPUTING:
                node.replace_input_with(number, self._as_tensor(number, node, write))
            else:
                raise self._misread(node, number)

    def _as_tensor(self, number: fx.Node, reader: fx.Node, write: Writer) -> fx.Node:
        """Return a number as a scalar tensor, in float64 after a division, as in Python."""
        if number in self._tensors:
            return self._tensors[number]
        symbol, factor = count_symbol(value_of(number)) or ("", 0)
        name = name_of(number)
        if symbol in self._masks:
            made = self._masks[symbol].count(factor, write)
        elif name == "item" and tensor_of(number.args[0]) is not None:
            made = write.method("reshape", write.method("detach", number.args[0]), ())
        elif name in _ARITHMETIC and any(_is_number(x) for x in number.args):
            operands = number.args
            args = [self._as_tensor(x, reader, write) if _is_number(x) else x for x in operands]
            if name in _DIVIDING:
                pairs = list(zip(operands, args, strict=True))
                args = [write.method("double", arg) if _is_number(x) else arg for x, arg in pairs]
            assert callable(number.target), "an operator of Python"
            made = args[0] if name == "sym_float" else write.call(number.target, *args)
        else:
            raise self._misread(reader, number)
        self._tensors[number] = made
        return made

    def _misread(self, reader: fx.Node, number: fx.Node) -> CaptureError:
        """Return the error for a number that cannot be replaced by a tensor."""
        symbol, _ = count_symbol(value_of(number)) or ("", 0)
        if symbol in self._masks:
            return refusal(reader)
        return reads_a_value(
            Where(op=name_of(reader), source=user_line(reader.meta.get("stack_trace") or ""))
        )

    @staticmethod
    def _swap(node: fx.Node, number: fx.Node, size: int) -> None:
        def substitute(x: Any) -> Any:
            """Return the size in place of the number."""
            return size if x is number else x

        node.args, node.kwargs = (
            fx.map_arg(node.args, substitute),
            fx.map_arg(node.kwargs, substitute),
        )

    def _replace(self, node: fx.Node, made: fx.Node, write: Writer) -> None:
        write.replace(made)
        if any(node in mask.numbers for mask in self._masks.values()):
            raise refusal(node)
        self._gone.add(node)

    def _tell(self) -> None:
        if self._masks and os.environ.get("RANK", "0") == "0":  # every rank captures
            lines = dict.fromkeys(
                user_line(mask.node.meta.get("stack_trace") or "") for mask in self._masks.values()
            )
            num = max(mask.num_rows for mask in self._masks.values())
            said = "; ".join(line for line in lines if line) or "masks"
            _log.warning(
                "forward picks rows by values (%s): a program computes all %d, and leaves the"
                " others out of sums",
                said,
                num,
            )
