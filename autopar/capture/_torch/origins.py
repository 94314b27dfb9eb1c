"""Of which inputs of the call the values are that forward reads: ``sizes.tolist()``, ``int(n)``, a branch.

An input of whole numbers in rows of two to four, as sizes of images and films are given, may be *known*: forward reads what the batch
holds, as it reads plain numbers (`autopar.capture._torch.constants`), and the graph is for these values alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from autopar.capture._torch.fakes import give_value

_ELSEWHERE = -1  # what is no input: parameters, buffers
_MOST = 1 << 10  # elements of an input that may be known
_IN_A_ROW = range(2, 5)
_READING = torch.Tag.data_dependent_output  # not what a mask picks, whose rows may all be computed (`autopar.capture.picked`)


def may_be_known(value: Any) -> bool:
    """Whether an input of the call holds rows of a few whole numbers, which are there."""
    return (
        type(value) is torch.Tensor
        and value.dtype in (torch.int32, torch.int64)
        and value.ndim > 1
        and value.shape[-1] in _IN_A_ROW
        and 0 < value.numel() <= _MOST
        and not value.is_meta
    )


class Origins:
    """From which inputs each tensor of a capture was computed, and what was read that is not known.

    Attributes:
        read: in the order of reading, flat positions of the inputs that a value followed from.

    Args:
        inputs: flat position → the call's fake tensor. known: flat position → what it holds, for those that forward may read.
    """

    def __init__(self, inputs: Mapping[int, torch.Tensor], known: Mapping[int, torch.Tensor]) -> None:
        self.read: list[frozenset[int]] = []
        self._known = known
        self._of = WeakIdKeyDictionary()
        for position, fake in inputs.items():
            self._of[fake] = frozenset((position,))

    def of_inputs_alone(self) -> list[frozenset[int]]:
        """What was read that follows from inputs, and from nothing that is trained or kept."""
        return [positions for positions in self.read if positions and _ELSEWHERE not in positions]

    def last_of_inputs_alone(self) -> frozenset[int]:
        """What the value that was read last follows from; nothing where that is not inputs alone."""
        return self.read[-1] if self.read and _ELSEWHERE not in self.read[-1] else frozenset()

    def note(self, func: Any, operands: Sequence[FakeTensor], result: Any) -> None:
        """That an op computed `result`."""
        positions = frozenset().union(*map(self._positions, operands))
        for made in tree_leaves(result):
            if isinstance(made, FakeTensor):
                self._of[made] = positions
        if _READING in func.tags:
            self.note_read(operands)

    def note_read(self, operands: Sequence[FakeTensor]) -> None:
        """That what these hold decides a number, a shape or a branch."""
        if any(operand.constant is None for operand in operands):
            self.read.append(frozenset().union(*map(self._positions, operands)))

    def _positions(self, tensor: FakeTensor) -> frozenset[int]:
        found = self._of.get(tensor)
        if found is not None:
            return frozenset(found)
        return frozenset() if tensor.constant is not None else frozenset((_ELSEWHERE,))

    @contextlib.contextmanager
    def followed(self) -> Iterator[None]:
        """A mode's own tensor for an input is that input, and holds what is known of it."""
        make = FakeTensorMode.from_tensor

        def made(mode: FakeTensorMode, tensor: torch.Tensor, **how: Any) -> FakeTensor:
            fake = make(mode, tensor, **how)
            positions = self._of.get(tensor)
            if positions is not None:
                self._of[fake] = positions
                for position in positions & self._known.keys():
                    give_value(fake, self._known[position])
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
