"""What a forward does, written down: ops with their operands, and how to make their results again without computing."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from autopar.capture._torch.fakes import FakeMode, fake_like, is_fake, no_modes
from autopar.capture.folding.runs import Run


class NotFoldable(Exception):
    """Why a model has to be captured in full.

    Args:
        run: the run to which it is due, if it is known: others may be folded without it. unit: the unit that differs, if it is known.
    """

    def __init__(self, why: str, run: Run | None = None, unit: int | None = None) -> None:
        super().__init__(why)
        self.run, self.unit = run, unit


class NotInTurn(NotFoldable):
    """Forward calls the layers in another order."""


@dataclass(slots=True)
class Entry:
    """One op: `what` must be equal, `results` say how to make its results again."""

    what: tuple[Any, ...]
    results: Any


@dataclass
class Shape:
    """A strided tensor without data; `sample` is made when it is first needed."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    sample: torch.Tensor | None = None

    def make(self, mode: FakeMode) -> torch.Tensor:
        """A fake tensor of this look."""
        if self.sample is None:
            with no_modes():
                self.sample = torch.empty_strided(self.size, self.stride, dtype=self.dtype, device="meta")
        return fake_like(self.sample, self.device, mode)


@dataclass(frozen=True, slots=True)
class Operand:
    """A result that is the op's own operand (in-place ops): its number among the tensors that the op reads."""

    number: int


Place = tuple[int, int]  # run or OUTSIDE, unit


@dataclass
class Story:
    """The entries of a forward by place, and its results."""

    entries: dict[Place, list[Entry]] = field(default_factory=lambda: defaultdict(list))
    results: tuple[Any, ...] = ()


def recorded(results: Any, numbers: Mapping[int, int]) -> Any:
    """An op's results without their tensors; `numbers` are those of its operands, by id.

    Raises:
        NotFoldable: one is no strided fake tensor.
    """
    if isinstance(results, torch.Tensor):
        if id(results) in numbers:
            return Operand(numbers[id(results)])
        if not is_fake(results) or results.layout is not torch.strided:
            raise NotFoldable("an op of forward makes no plain tensor")
        return Shape(tuple(results.shape), results.stride(), results.dtype, results.device)
    if isinstance(results, (tuple, list)):
        return type(results)([recorded(item, numbers) for item in results])
    return results


def remade(results: Any, tensors: Sequence[torch.Tensor], mode: FakeMode) -> Any:
    """Results again from what was recorded; `tensors` are the op's operands."""
    if isinstance(results, Shape):
        return results.make(mode)
    if isinstance(results, Operand):
        return tensors[results.number]
    if isinstance(results, (tuple, list)):
        return type(results)([remade(item, tensors, mode) for item in results])
    return results
