"""Masks, the symbols of their numbers of selected rows, and a writer of nodes in a graph of torch
functions."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from autopar.capture.diagnostics import of_changing_shapes, user_line
from autopar.errors import CaptureError, Where

_BINDING = "unbacked_bindings"  # torch's metadata of nodes that define a symbol


def value_of(node: Any) -> Any:
    """Return the example value of a node that Dynamo recorded, a tensor without data or a number;
    None if there is none."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def tensor_of(node: Any) -> torch.Tensor | None:
    """Return the example value of a node if it is a tensor, else None."""
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) else None


def count_symbol(size: Any) -> tuple[str, int] | None:
    """Return (symbol, factor) of a size that depends on values.

    The result is ``("", 0)`` if the size is not a multiple of one symbol. It is None for a plain
    number, and for a symbolic size that equals an integer.
    """
    if not isinstance(size, torch.SymInt) or size.node.expr.is_Integer:
        return None
    factor, symbol = size.node.expr.as_coeff_Mul()
    return (str(symbol), int(factor)) if symbol.is_Symbol and factor.is_Integer else ("", 0)


def first_dim(node: Any) -> tuple[str, int] | None:
    """Return (symbol, factor) of the first dim of a tensor if only that dim depends on values; None
    if no dim does.

    Raises:
        CaptureError: another dim depends on values.
    """
    tensor = tensor_of(node)
    sizes = [] if tensor is None else [count_symbol(size) for size in tensor.shape]
    if not any(sizes):
        return None
    if sizes[0] is None or not sizes[0][0] or any(sizes[1:]):
        raise refusal(node)
    return sizes[0]


def refusal(node: fx.Node) -> CaptureError:
    """Return the error for a node that is not supported for selected rows."""
    name = (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", str(node.target))
    )
    return of_changing_shapes(Where(op=name, source=user_line(node.meta.get("stack_trace") or "")))


class Writer:
    """Inserts nodes before `here`, with its source lines and module path."""

    def __init__(self, graph: fx.Graph, here: fx.Node) -> None:
        self._graph, self._here = graph, here

    @contextmanager
    def _insert_here(self) -> Iterator[None]:
        with self._graph.inserting_before(self._here):
            yield

    def call(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of the function `target` and return its node."""
        with self._insert_here():
            return self._copy_notes(self._graph.call_function(target, args, kwargs))

    def method(self, name: str, /, *args: Any, **kwargs: Any) -> fx.Node:
        """Insert a call of the tensor method `name` and return its node."""
        with self._insert_here():
            return self._copy_notes(self._graph.call_method(name, args, kwargs))

    def _copy_notes(self, node: fx.Node) -> fx.Node:
        node.meta = {
            name: value
            for name, value in self._here.meta.items()
            if name not in ("example_value", _BINDING)
        }
        return node

    def replace(self, node: fx.Node) -> None:
        """Replace `here` with `node` for all users, and copy its metadata."""
        node.meta = {name: value for name, value in self._here.meta.items() if name != _BINDING}
        self._here.replace_all_uses_with(node)


@dataclass
class Mask:
    """A mask whose number of selected rows is one symbol.

    Attributes:
        node: the mask as the model computes it.
        shape: its shape.
        flat: the mask with one dim.
        first: index of the first selected row, or the number of rows if none is selected; None if
            the other rows may be zeros.
        repeated: factor → `flat` with each element repeated that many times.
        num: number of selected rows, once it is computed.
        numbers: nodes that contain the indices of the rows.
    """

    node: fx.Node
    shape: tuple[int, ...]
    flat: fx.Node
    first: fx.Node | None
    repeated: dict[int, fx.Node] = field(default_factory=dict)
    num: fx.Node | None = None
    numbers: set[fx.Node] = field(default_factory=set)

    @staticmethod
    def of(node: fx.Node, shape: tuple[int, ...], tame: bool, write: Writer) -> Mask:
        """Create the `Mask` of a node.

        Args:
            node: the mask, a boolean tensor of shape `shape`.
            shape: its shape.
            tame: whether the rows that are not selected may be zeros (`rowwise.is_tame`).
            write: inserts nodes.
        """
        flat = write.method("reshape", node, -1)
        if tame:
            return Mask(node, shape, flat, None)
        numbers = write.call(torch.arange, math.prod(shape), device=_device(node))
        first = write.method("amin", write.call(torch.where, flat, numbers, math.prod(shape)))
        return Mask(node, shape, flat, first)

    @property
    def num_rows(self) -> int:
        """Number of all rows, selected or not."""
        return math.prod(self.shape)

    def rows(self, factor: int, dims: int, write: Writer) -> fx.Node:
        """Return the mask with each element repeated `factor` times, as the first of `dims` dims.

        Args:
            factor: number of rows that each original row was split into.
            dims: rank of the result; all dims after the first have length 1.
            write: inserts nodes.
        """
        if factor not in self.repeated:
            repeated = (
                self.flat if factor == 1 else write.method("repeat_interleave", self.flat, factor)
            )
            self.repeated[factor] = repeated
        return write.method("view", self.repeated[factor], -1, *[1] * (dims - 1))

    def count(self, factor: int, write: Writer) -> fx.Node:
        """Return `factor` times the number of selected rows, as a scalar tensor."""
        if self.num is None:
            self.num = write.method("sum", self.flat)
        return self.num if factor == 1 else write.method("mul", self.num, factor)

    def choose_rows(self, rows: fx.Node, sample: torch.Tensor, dims: int, write: Writer) -> fx.Node:
        """Return all rows, with those that are not selected replaced by the first selected row, or
        by zeros.

        Args:
            rows: all rows, ``[num_rows, ...]``.
            sample: a tensor with the dtype and device of `rows`.
            dims: rank of `rows`.
            write: inserts nodes.
        """
        if sample.dtype is torch.bool:
            return rows
        if self.first is None:
            return write.call(torch.where, self.rows(1, dims, write), rows, 0)
        numbers = write.call(torch.arange, self.num_rows, device=sample.device)
        is_first = write.method(
            "view", write.call(torch.eq, numbers, self.first), -1, *[1] * (dims - 1)
        )
        alone = write.call(torch.where, is_first, write.method("detach", rows), 0)
        first = write.method("sum", alone, 0, keepdim=True, dtype=sample.dtype)
        return write.call(torch.where, self.rows(1, dims, write), rows, first)

    def places(self, dim: int, write: Writer) -> fx.Node:
        """Return the index of every row along dim `dim` of the mask; rows that are not selected get
        the index of the first selected row, or keep their own."""
        rows = numbers = write.call(torch.arange, self.num_rows, device=_device(self.node))
        if self.first is not None:
            inside = write.call(
                torch.clamp, self.first, max=self.num_rows - 1
            )  # if no row is selected
            rows = write.call(torch.where, self.flat, numbers, inside)
        stride = math.prod(self.shape[dim + 1 :])
        quotient = (
            write.call(torch.div, rows, stride, rounding_mode="floor") if stride > 1 else rows
        )
        return write.call(torch.remainder, quotient, self.shape[dim]) if dim else quotient


def _device(node: fx.Node) -> torch.device:
    """Return the device of a mask; masks inserted by this package are on the CPU, like all tensors
    of a capture."""
    tensor = tensor_of(node)
    return torch.device("cpu") if tensor is None else tensor.device


Masks = Mapping[str, Mask]
