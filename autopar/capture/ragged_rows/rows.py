"""Masks, the symbols of shapes that count what they pick, and writing nodes of a graph of torch
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

_BINDING = "unbacked_bindings"  # torch's note that a node gives a symbol its value


def value_of(node: Any) -> Any:
    """What Dynamo noted that a node gives: a tensor without values, or a number."""
    return node.meta.get("example_value") if isinstance(node, fx.Node) else None


def tensor_of(node: Any) -> torch.Tensor | None:
    value = value_of(node)
    return value if isinstance(value, torch.Tensor) else None


def count_symbol(size: Any) -> tuple[str, int] | None:
    """(symbol, factor) of a size that depends on values, ``("", 0)`` where it is no multiple of one
    symbol; None of a plain number, and of one that has to be a certain number (`required`)."""
    if not isinstance(size, torch.SymInt) or size.node.expr.is_Integer:
        return None
    factor, symbol = size.node.expr.as_coeff_Mul()
    return (str(symbol), int(factor)) if symbol.is_Symbol and factor.is_Integer else ("", 0)


def first_dim(node: Any) -> tuple[str, int] | None:
    """(symbol, factor) of a tensor's first dim, where that is its only one that depends on values;
    None where none does.

    Raises:
        CaptureError: another does.
    """
    tensor = tensor_of(node)
    sizes = [] if tensor is None else [count_symbol(size) for size in tensor.shape]
    if not any(sizes):
        return None
    if sizes[0] is None or not sizes[0][0] or any(sizes[1:]):
        raise refusal(node)
    return sizes[0]


def refusal(node: fx.Node) -> CaptureError:
    """Rows that were picked cannot be followed through a node."""
    name = (
        node.target
        if isinstance(node.target, str)
        else getattr(node.target, "__name__", str(node.target))
    )
    return of_changing_shapes(Where(op=name, source=user_line(node.meta.get("stack_trace") or "")))


class Writer:
    """Writes nodes before `here`, which they stand for in what is said of lines and modules."""

    def __init__(self, graph: fx.Graph, here: fx.Node) -> None:
        self._graph, self._here = graph, here

    @contextmanager
    def _insert_here(self) -> Iterator[None]:
        with self._graph.inserting_before(self._here):
            yield

    def call(self, target: Callable[..., Any], /, *args: Any, **kwargs: Any) -> fx.Node:
        with self._insert_here():
            return self._copy_notes(self._graph.call_function(target, args, kwargs))

    def method(self, name: str, /, *args: Any, **kwargs: Any) -> fx.Node:
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
        """`node` takes the place of the one written before, also in what Dynamo noted of it."""
        node.meta = {name: value for name, value in self._here.meta.items() if name != _BINDING}
        self._here.replace_all_uses_with(node)


@dataclass
class Mask:
    """What one symbol counts.

    Attributes:
        node: the mask as the model has it. shape: its shape. flat: it as one dim.
        first: the number of the first row that is picked, the number of rows where none is; None
            where it need not stand for those that are not picked, as it depends on all samples.
        numbers: nodes that hold the numbers of the rows.
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
        flat = write.method("reshape", node, -1)
        if tame:
            return Mask(node, shape, flat, None)
        numbers = write.call(torch.arange, math.prod(shape), device=_device(node))
        first = write.method("amin", write.call(torch.where, flat, numbers, math.prod(shape)))
        return Mask(node, shape, flat, first)

    @property
    def num_rows(self) -> int:
        return math.prod(self.shape)

    def rows(self, factor: int, dims: int, write: Writer) -> fx.Node:
        """The mask of rows that were each split into `factor`, as the first of `dims` dims."""
        if factor not in self.repeated:
            made = (
                self.flat if factor == 1 else write.method("repeat_interleave", self.flat, factor)
            )
            self.repeated[factor] = made
        return write.method("view", self.repeated[factor], -1, *[1] * (dims - 1))

    def count(self, factor: int, write: Writer) -> fx.Node:
        """How many rows are picked, as a tensor."""
        if self.num is None:
            self.num = write.method("sum", self.flat)
        return self.num if factor == 1 else write.method("mul", self.num, factor)

    def choose_rows(self, rows: fx.Node, sample: torch.Tensor, dims: int, write: Writer) -> fx.Node:
        """All `rows`, of that many dims and of the dtype of `sample`; in place of each that is
        not picked the first that is, or zeros."""
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
        """Of all rows their index along a dim of the mask; of each that is not picked that of
        the first that is, or its own."""
        rows = numbers = write.call(torch.arange, self.num_rows, device=_device(self.node))
        if self.first is not None:
            inside = write.call(
                torch.clamp, self.first, max=self.num_rows - 1
            )  # where none is picked
            rows = write.call(torch.where, self.flat, numbers, inside)
        stride = math.prod(self.shape[dim + 1 :])
        whole = write.call(torch.div, rows, stride, rounding_mode="floor") if stride > 1 else rows
        return write.call(torch.remainder, whole, self.shape[dim]) if dim else whole


def _device(node: fx.Node) -> torch.device:
    """Of a mask that the model has; one that was written here is of tensors of the CPU, as all
    of a capture is."""
    tensor = tensor_of(node)
    return torch.device("cpu") if tensor is None else tensor.device


Masks = Mapping[str, Mask]
