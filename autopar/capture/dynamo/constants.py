"""Tensors with known values in a capture: those that forward creates from plain numbers, and inputs
and buffers whose values it may read.

Tensors created from plain numbers (``torch.tensor(sizes)``, ``torch.arange(n)``), and tensors
computed only from them, have known values. If forward reads one (`.tolist()`, `.item()`, a mask
that selects rows), it gets the value, and shapes may depend on it. torch supports this for single
numbers; this module extends it to small tensors. A tensor that is written to is no longer known.
"""

from __future__ import annotations

import contextlib
import math
import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import partialmethod
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch import fx
from torch._dynamo.variables import ConstantVariable, LazyVariableTracker, TensorVariable
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from autopar.capture.dynamo.fakes import give_value, no_modes
from autopar.capture.graphs import is_in_place
from autopar.capture.ragged_rows.rows import tensor_of
from autopar.capture.ragged_rows.rowwise import name_of

# --------------------------------------------------------------------------------------------------
# Which inputs and buffers determine the values that forward reads, as in ``sizes.tolist()``,
# ``int(n)``, a branch, or a mask that selects rows.
#
# An input that describes the structure of a batch may be *known*: forward reads its values like
# plain numbers, and the graph is specialized to these values. Such inputs are
#
# - integers with a last dim of two to four (sizes of images and videos), with shape ``[2, n]``
#   (edges of a graph), or with one dim (lengths, repeats, the graph of each node),
# - booleans with one dim (which nodes are trained),
# - square masks of booleans, or of numbers that are all zero or close to minus infinity (attention
#   masks).
#
# Other inputs are data, which differ between batches. A buffer that forward reads may also be
# known. Tensors in attributes, global variables and similar places are constants in any case, and
# known if they have values.

Key: TypeAlias = int | str  # flat position of an input in the call, or name of a buffer
_ELSEWHERE = -1  # anything else, such as parameters
_MOST_SIZES = 1 << 10  # elements of a tensor of sizes
_MOST_ORIGINS = 1 << 16  # elements of a tensor with one dim, or with shape [2, n]
_MOST_OF_MASKS = 1 << 22  # elements of a square mask, or of a buffer
_IN_A_ROW = range(2, 5)
_MASKED = -1e4  # the largest value in an attention mask that hides a position
_READING = torch.Tag.data_dependent_output
# Ops that select rows by a mask may compute all rows instead (`autopar.capture.ragged_rows`).
_PICKING = torch.Tag.dynamic_output_shape


def may_be_known(value: Any) -> bool:
    """Return whether an input of the call has values and describes the structure of the batch."""
    if not _has_values(value):
        return False
    if value.dtype in (torch.int32, torch.int64):
        is_sizes = value.ndim > 1 and value.shape[-1] in _IN_A_ROW and value.numel() <= _MOST_SIZES
        return is_sizes or (_is_in_rows(value) and value.numel() <= _MOST_ORIGINS)
    if value.dtype is torch.bool and value.ndim == 1:
        return value.numel() <= _MOST_ORIGINS
    return _is_square(value) and value.numel() <= _MOST_OF_MASKS and _is_mask(value)


def buffer_may_be_known(value: torch.Tensor) -> bool:
    """Return whether a buffer has values, and is small enough to compare them in each call after it
    changed."""
    return _has_values(value) and value.numel() <= _MOST_OF_MASKS


def _has_values(value: Any) -> bool:
    return (
        type(value) in (torch.Tensor, torch.nn.Buffer)
        and not value.is_meta
        and not value.is_complex()
        and value.numel() > 0
    )


def _is_in_rows(value: torch.Tensor) -> bool:
    return value.ndim == 1 or (value.ndim == 2 and value.shape[0] == 2)


def _is_square(value: torch.Tensor) -> bool:
    return value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 1


def _is_mask(value: torch.Tensor) -> bool:
    if value.dtype is torch.bool:
        return True
    with no_modes():
        return (
            value.is_floating_point()
            and not value.requires_grad
            and bool(((value == 0) | (value <= _MASKED)).all())
        )


class Origins:
    """Records which inputs and buffers each tensor of a capture depends on, and which unknown
    values forward reads.

    Attributes:
        read: for each read in order, the inputs and buffers that the value depends on.
        picked: the same for masks and indices that determine shapes.
        is_reading: whether large constants are computed too, since forward reads one.

    Args:
        sources: flat position → fake tensor of the call, and name → fake tensor of a buffer.
        known: the values of the known inputs and buffers.
    """

    def __init__(
        self,
        sources: Mapping[Key, torch.Tensor],
        known: Mapping[Key, torch.Tensor],
        *,
        is_reading: bool = False,
    ) -> None:
        self.read: list[frozenset[Key]] = []
        self.picked: list[frozenset[Key]] = []
        self.is_reading = is_reading
        self._known = known
        self._of = WeakIdKeyDictionary()
        for key, fake in sources.items():
            self._of[fake] = frozenset((key,))

    def unknown(self) -> list[frozenset[Key]]:
        """Return the inputs and buffers of each read value that depends on nothing else."""
        return [keys for keys in (*self.read, *self.picked) if _ELSEWHERE not in keys]

    def last_read(self) -> frozenset[Key]:
        """Return the inputs and buffers of the value that was read last; empty if it also depends
        on something else."""
        return self.read[-1] if self.read and _ELSEWHERE not in self.read[-1] else frozenset()

    def note(self, func: Any, operands: Sequence[FakeTensor], result: Any) -> None:
        """Record that an op computed `result`.

        Args:
            func: the op.
            operands: the tensors among its arguments.
            result: a tensor, or a structure of tensors.
        """
        positions = frozenset().union(*map(self._positions, operands))
        for leaf in tree_leaves(result):
            if isinstance(leaf, FakeTensor):
                self._of[leaf] = positions
        tags = getattr(func, "tags", ())  # higher-order ops have no tags
        if _READING in tags:
            self.note_read(operands)
        if _PICKING in tags and any(operand.constant is None for operand in operands):
            self.picked.append(positions)

    def note_read(self, operands: Sequence[FakeTensor]) -> None:
        """Record that the values of `operands` determine a number, a shape or a branch."""
        if any(operand.constant is None for operand in operands):
            self.read.append(frozenset().union(*map(self._positions, operands)))

    def _positions(self, tensor: FakeTensor) -> frozenset[Key]:
        positions = self._of.get(tensor)
        if positions is not None:
            return frozenset(positions)
        return frozenset() if tensor.constant is not None else frozenset((_ELSEWHERE,))

    @contextlib.contextmanager
    def track(self) -> Iterator[None]:
        """Track inputs and buffers in other fake modes.

        If another mode converts an input or a buffer, its fake tensor keeps the origins and the
        known value. If it converts a plain tensor, its fake tensor gets the values of that tensor.
        """
        make = FakeTensorMode.from_tensor

        def make_tracked(mode: FakeTensorMode, tensor: torch.Tensor, **how: Any) -> FakeTensor:
            """Convert a tensor to a fake tensor with the same origins and known value."""
            fake = make(mode, tensor, **how)
            positions = self._of.get(tensor)
            if positions is not None:
                self._of[fake] = positions
                for position in positions & self._known.keys():
                    give_value(fake, self._known[position])
            elif buffer_may_be_known(tensor) and not tensor.requires_grad and fake.constant is None:
                self._of[fake] = frozenset()
                if self.is_reading or tensor.numel() <= _MOST_SIZES:
                    with no_modes():
                        value = tensor.detach().cpu()
                    give_value(fake, value)
            return fake

        before = _TRACKED.set(self)
        try:
            with mock.patch.object(FakeTensorMode, "from_tensor", make_tracked):
                yield
        finally:
            _TRACKED.reset(before)


_TRACKED: ContextVar[Origins | None] = ContextVar("_TRACKED", default=None)


def note_branch(condition: Any) -> None:
    """Record that a branch of the tracked capture depends on the values of `condition`."""
    origins = _TRACKED.get()
    if origins is not None and isinstance(condition, FakeTensor):
        origins.note_read((condition,))


_MOST = 1 << 14  # elements of a known tensor, which may become a literal in the graph
_MOST_WORK = (
    1 << 22
    # work of an op on known tensors: elements of the result for pointwise ops, else the product of
    # the elements of all operands
)
_MOST_READ, _MOST_WORK_READ = (
    1 << 24,
    1 << 26,
)  # the same limits if forward reads a value that would be unknown otherwise
_ATEN = torch.ops.aten
_MAKING = frozenset(
    (
        _ATEN.arange.default,
        _ATEN.arange.start,
        _ATEN.arange.start_step,
        _ATEN.full.default,
        _ATEN.zeros.default,
        _ATEN.ones.default,
        _ATEN.scalar_tensor.default,
        _ATEN.eye.default,
        _ATEN.eye.m,
        _ATEN.linspace.default,
    )
)
# These ops take only the shape and dtype from a tensor.
_ZEROS = frozenset((_ATEN.zeros_like.default, _ATEN.new_zeros.default))
_ONES = frozenset((_ATEN.ones_like.default, _ATEN.new_ones.default))
_FILLED = {_ATEN.full_like.default: 1, _ATEN.new_full.default: 2}  # op → position of the value


@contextlib.contextmanager
def known_values(origins: Origins) -> Iterator[None]:
    """Make every fake mode, including that of Dynamo, know the values of tensors created from plain
    numbers; `origins` records reads of other values."""
    dispatch = FakeTensorMode.dispatch
    most, work = (_MOST_READ, _MOST_WORK_READ) if origins.is_reading else (_MOST, _MOST_WORK)

    def dispatch_known(
        mode: FakeTensorMode, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        if func is _ATEN.equal.default and all(x.constant is not None for x in operands):
            with no_dispatch():
                return torch.equal(*(x.constant for x in operands))
        with _unknown_if_large(operands, func, mode, work):
            result = dispatch(mode, func, types, args, kwargs or {})
        if (
            _is_small(result, most)
            and (value := _value_created(func, args, kwargs or {}, result)) is not None
        ):
            result, operands = (
                mode.fake_tensor_converter.from_real_tensor(mode, value, make_constant=True),
                [],
            )
        origins.note(func, operands, result)
        return result

    known = mock.patch.object(
        FakeTensorMode, "may_turn_const", partialmethod(_may_be_known, most=most)
    )
    with mock.patch.object(FakeTensorMode, "dispatch", dispatch_known), known, origins.track():
        yield


def or_its_value(variable: Any) -> Any:
    """Return the truth value of a Dynamo tensor variable with one known element, for a branch;
    return other variables unchanged."""
    known = variable.realize() if isinstance(variable, LazyVariableTracker) else variable
    condition = (
        known.as_proxy().node.meta.get("example_value")
        if isinstance(known, TensorVariable)
        else None
    )
    value = getattr(condition, "constant", None)
    if value is None or value.numel() != 1:
        note_branch(condition)
        return variable
    with no_dispatch():
        return ConstantVariable.create(bool(value))


def _value_created(func: Any, args: Any, kwargs: Any, result: FakeTensor) -> torch.Tensor | None:
    """Return the value of a tensor that an op creates from plain numbers; None for other ops."""
    with no_dispatch():
        if func in _MAKING:
            created: torch.Tensor = func(*args, **kwargs)
            return created
        fill = (
            0
            if func in _ZEROS
            else 1
            if func in _ONES
            else args[_FILLED[func]]
            if func in _FILLED
            else None
        )
        if not isinstance(fill, int | float) or not result.is_contiguous():
            return None
        return torch.full(result.shape, fill, dtype=result.dtype)


def _is_small(result: Any, most: int) -> bool:
    return (
        isinstance(result, FakeTensor)
        and result.device.type == "cpu"
        and all(isinstance(size, int) for size in result.shape)
        and result.numel() <= most
    )


def _may_be_known(mode: FakeTensorMode, value: torch.Tensor, *, most: int) -> bool:
    return (
        value.numel() <= most
        and value.layout is torch.strided
        and not mode.is_our_fake(value)
        and value.device.type != "meta"
    )


@contextlib.contextmanager
def _unknown_if_large(
    operands: list[FakeTensor], func: Any, mode: FakeTensorMode, work: int
) -> Iterator[None]:
    """Treat the operands of a large computation as unknown, so that it is not run."""
    known = [(x, x.constant) for x in operands if x.constant is not None]
    if (
        not isinstance(func, torch._ops.OpOverload)
        or len(known) < len(operands)
        or _work_of(func, [value for _, value in known]) <= work
    ):
        yield
        return
    for operand, value in known:
        operand.constant = None
        if func._schema.is_mutable:
            mode.fake_tensor_converter.invalidate_constant_aliases(value)
    try:
        yield
    finally:
        for operand, value in known if not func._schema.is_mutable else ():
            operand.constant = value


def _work_of(func: Any, values: Sequence[torch.Tensor]) -> int:
    if torch.Tag.pointwise in func.tags:
        return math.prod(torch.broadcast_shapes(*(value.shape for value in values)))
    return math.prod(value.numel() for value in values)


# --------------------------------------------------------------------------------------------------
# Results whose shapes depend on known values become literals in the graph.

_MOST_KNOWN = 1 << 16  # elements of a literal in a graph
_PICKING_OPS = frozenset(
    (
        "nonzero",
        "argwhere",
        "masked_select",
        "unique",
        "unique_consecutive",
        "repeat_interleave",
        "where",
    )
)


def settle_known(graph: fx.Graph) -> None:
    """Replace results that only depend on known values with literals.

    An op whose shape depends on known values becomes a literal, unless its result is written to. A
    number that is read from known values becomes a plain number.
    """
    written = {_storage(x) for node in graph.nodes if is_in_place(node) for x in node.args[:1]} - {
        None
    }
    for node in list(graph.nodes):
        number = node.meta.get("example_value")
        if name_of(node) == "item" and isinstance(number, int | float):
            node.replace_all_uses_with(number)
            graph.erase_node(node)
            continue
        _index_by_numbers(node, written)
        value = _known(node)
        if value is None or not 0 < value.numel() <= _MOST_KNOWN or _storage(node) in written:
            continue
        if not any(map(_picks, (node, *node.all_input_nodes))):
            continue
        with graph.inserting_before(node):
            literal = graph.call_function(torch.tensor, (value.tolist(),), {"dtype": value.dtype})
        literal.meta = dict(node.meta)
        node.replace_all_uses_with(literal)
        picking = [
            operand for operand in node.all_input_nodes if _picks(operand)
        ]  # e.g. the op whose results the node is one of
        graph.erase_node(node)
        for operand in picking:
            if not operand.users:
                graph.erase_node(operand)


def _index_by_numbers(node: fx.Node, written: Collection[int | None]) -> None:
    """Replace known masks and repeats in ``x[mask]``, ``x[mask] = y``, ``masked_select`` and
    ``repeat_interleave`` with indices of rows."""
    name = name_of(node)
    if _known(node) is not None:
        return
    if name in ("getitem", "setitem") and tensor_of(node.args[0]) is not None:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        new_index = tuple(entry for each in index for entry in _numbers(node, each, written))
        if new_index != index:
            node.args = (node.args[0], new_index, *node.args[2:])
    elif name == "masked_select" and not node.kwargs:
        source, mask = node.args
        numbers = _numbers(node, mask, written)
        if numbers != (mask,) and _shape(source) == _shape(mask):
            node.op, node.target, node.args = "call_function", operator.getitem, (source, numbers)
    elif name == "repeat_interleave":
        _repeat_by_numbers(node)


def _shape(node: fx.Node) -> tuple[int, ...]:
    tensor = tensor_of(node)
    assert tensor is not None, f"{node} is a tensor"
    return tuple(tensor.shape)


def _numbers(node: fx.Node, mask: Any, written: Collection[int | None]) -> tuple[Any, ...]:
    """Return the indices along each dim that a known mask selects; return any other index
    unchanged."""
    value = _known(mask)
    if (
        value is None
        or value.dtype is not torch.bool
        or not value.dim()
        or value.numel() > _MOST_KNOWN
        or _storage(mask) in written
    ):
        return (mask,)
    with node.graph.inserting_before(node):
        with no_modes():
            places = value.nonzero(as_tuple=True)
        return tuple(_literal(node, numbers) for numbers in places)


def _repeat_by_numbers(node: fx.Node) -> None:
    arguments = dict(zip(("input", "repeats", "dim"), node.args, strict=False)) | dict(node.kwargs)
    repeats, source, dim = (
        _known(arguments.get("repeats")),
        arguments.get("input"),
        arguments.get("dim"),
    )
    source_tensor = tensor_of(source)
    if (
        repeats is None
        or source_tensor is None
        or not isinstance(source, fx.Node)
        or repeats.numel() > _MOST_KNOWN
    ):
        return
    length = source_tensor.numel() if dim is None else source_tensor.shape[dim]
    with no_modes():
        counts = repeats.expand(length) if repeats.numel() == 1 else repeats
        numbers = torch.arange(length).repeat_interleave(counts)
    with node.graph.inserting_before(node):
        rows = source if dim is not None else node.graph.call_method("reshape", (source, -1))
        rows.meta = dict(rows.meta or node.meta)
        literal = _literal(node, numbers)
    node.op, node.target, node.args, node.kwargs = (
        "call_function",
        torch.index_select,
        (rows, 0 if dim is None else dim, literal),
        {},
    )


def _literal(node: fx.Node, value: torch.Tensor) -> fx.Node:
    constant = node.graph.call_function(torch.tensor, (value.tolist(),), {"dtype": value.dtype})
    constant.meta = {name: held for name, held in node.meta.items() if name != "example_value"}
    return constant


def _picks(node: fx.Node) -> bool:
    """Return whether the shape of the result depends on values of tensors."""
    name = name_of(node)
    if name == "getitem" and tensor_of(node.args[0]) is not None:
        return any(
            (flags := tensor_of(x)) is not None and flags.dtype is torch.bool
            for x in tree_leaves(node.args[1])
        )
    if name == "repeat_interleave":
        return any(tensor_of(x) is not None for x in (*node.args[1:2], node.kwargs.get("repeats")))
    return name in _PICKING_OPS and (name != "where" or len(node.args) == 1)


def _known(node: Any) -> torch.Tensor | None:
    """Return the value of a node; None if it is not known."""
    tensor = tensor_of(node)
    return getattr(tensor, "constant", None)


def _storage(node: Any) -> int | None:
    value = _known(node)
    return None if value is None else value.untyped_storage()._cdata
