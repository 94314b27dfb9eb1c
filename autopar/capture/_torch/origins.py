"""Which inputs and buffers the values follow from that forward reads: ``sizes.tolist()``, ``int(n)``, a branch, a mask that picks rows.

An input that describes the structure of a batch may be *known*: forward reads what the batch holds, as it reads plain numbers
(`autopar.capture._torch.constants`), and the graph is for these values alone. Such inputs are

- whole numbers in rows of two to four (sizes of images and films), in two rows (edges of a graph), or in one row (lengths, repeats,
  the graph of each node),
- flags in one row (which nodes are trained),
- square masks of flags, or of numbers that are all zero or as good as minus infinity (attention masks).

Other inputs are data, which differ from batch to batch. A buffer that forward reads may be known, too; tensors that are attributes,
global variables or the like are constants anyway, and known where their values are there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, TypeAlias
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from autopar.capture._torch.fakes import give_value, no_modes

Key: TypeAlias = int | str  # an input's flat position in the call, or the name of a buffer
_ELSEWHERE = -1  # parameters, and inputs and buffers that no capture may know
_MOST_SIZES = 1 << 10  # elements of rows of sizes that may be known
_MOST = 1 << 16  # elements of one or two rows
_MOST_OF_MASKS = 1 << 22  # elements of a square mask, and of a buffer
_IN_A_ROW = range(2, 5)
_MASKED = -1e4  # numbers in an attention mask that hide a position are at most this
_READING = torch.Tag.data_dependent_output
_PICKING = torch.Tag.dynamic_output_shape  # rows that a mask picks may all be computed (`autopar.capture.picked`), unless that is refused


def may_be_known(value: Any) -> bool:
    """Whether an input of the call describes the structure of the batch, and has values."""
    if not _has_values(value):
        return False
    if value.dtype in (torch.int32, torch.int64):
        is_sizes = value.ndim > 1 and value.shape[-1] in _IN_A_ROW and value.numel() <= _MOST_SIZES
        return is_sizes or (_is_in_rows(value) and value.numel() <= _MOST)
    if value.dtype is torch.bool and value.ndim == 1:
        return value.numel() <= _MOST
    return _is_square(value) and value.numel() <= _MOST_OF_MASKS and _is_mask(value)


def buffer_may_be_known(value: torch.Tensor) -> bool:
    """Whether a buffer has values, and few enough to be compared at each call that finds it changed."""
    return _has_values(value) and value.numel() <= _MOST_OF_MASKS


def _has_values(value: Any) -> bool:
    return type(value) in (torch.Tensor, torch.nn.Buffer) and not value.is_meta and not value.is_complex() and value.numel() > 0


def _is_in_rows(value: torch.Tensor) -> bool:
    return value.ndim == 1 or (value.ndim == 2 and value.shape[0] == 2)


def _is_square(value: torch.Tensor) -> bool:
    return value.ndim >= 2 and value.shape[-1] == value.shape[-2] > 1


def _is_mask(value: torch.Tensor) -> bool:
    if value.dtype is torch.bool:
        return True
    with no_modes():
        return value.is_floating_point() and not value.requires_grad and bool(((value == 0) | (value <= _MASKED)).all())


class Origins:
    """From which inputs and buffers each tensor of a capture was computed, and what was read that is not known.

    Attributes:
        read: in the order of reading, the inputs and buffers that a value followed from. picked: the same of what masks pick.
        is_reading: whether large constants are computed, too, since forward is known to read one.

    Args:
        sources: flat position → the call's fake tensor, and name → a buffer's. known: of these, what those hold that forward may read.
    """

    def __init__(self, sources: Mapping[Key, torch.Tensor], known: Mapping[Key, torch.Tensor], *, is_reading: bool = False) -> None:
        self.read: list[frozenset[Key]] = []
        self.picked: list[frozenset[Key]] = []
        self.is_reading = is_reading
        self._known = known
        self._of = WeakIdKeyDictionary()
        for key, fake in sources.items():
            self._of[fake] = frozenset((key,))

    def unknown(self) -> list[frozenset[Key]]:
        """What was read or picked that follows from inputs, buffers and constants, and from nothing that is trained."""
        return [keys for keys in (*self.read, *self.picked) if _ELSEWHERE not in keys]

    def last_read(self) -> frozenset[Key]:
        """What the value that was read last follows from; nothing where that is not inputs and buffers alone."""
        return self.read[-1] if self.read and _ELSEWHERE not in self.read[-1] else frozenset()

    def note(self, func: Any, operands: Sequence[FakeTensor], result: Any) -> None:
        """That an op computed `result`."""
        positions = frozenset().union(*map(self._positions, operands))
        for made in tree_leaves(result):
            if isinstance(made, FakeTensor):
                self._of[made] = positions
        tags = getattr(func, "tags", ())  # a higher-order op has none
        if _READING in tags:
            self.note_read(operands)
        if _PICKING in tags and any(operand.constant is None for operand in operands):
            self.picked.append(positions)

    def note_read(self, operands: Sequence[FakeTensor]) -> None:
        """That what these hold decides a number, a shape or a branch."""
        if any(operand.constant is None for operand in operands):
            self.read.append(frozenset().union(*map(self._positions, operands)))

    def _positions(self, tensor: FakeTensor) -> frozenset[Key]:
        found = self._of.get(tensor)
        if found is not None:
            return frozenset(found)
        return frozenset() if tensor.constant is not None else frozenset((_ELSEWHERE,))

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """A mode's own tensor for an input or a buffer is that, and holds what is known of it; one for a plain tensor holds its values."""
        make = FakeTensorMode.from_tensor

        def made(mode: FakeTensorMode, tensor: torch.Tensor, **how: Any) -> FakeTensor:
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

        before = _FOLLOWED.set(self)
        try:
            with mock.patch.object(FakeTensorMode, "from_tensor", made):
                yield
        finally:
            _FOLLOWED.reset(before)


_FOLLOWED: ContextVar[Origins | None] = ContextVar("_FOLLOWED", default=None)


def note_branch(asked: Any) -> None:
    """That a branch depends on what a tensor holds, in the capture that is followed."""
    origins = _FOLLOWED.get()
    if origins is not None and isinstance(asked, FakeTensor):
        origins.note_read((asked,))
