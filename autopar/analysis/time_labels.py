"""Labels: what a microbatch's tensor is of the batch's, on the axis of microbatches.

Microbatches are an axis in time. The M microbatches run one after another as the ranks of a
data-parallel axis run beside one another, and a tensor lies on the axis as on an axis of a mesh.
With ``w`` the batch's value and a power e, microbatch m has M^e times as much as

    split(d)    the m-th of M parts of w along dim d
    whole       w itself
    term        a term: the M terms add up to w
    place(d)    positions of samples along dim d, which the microbatch counts from its own first
                sample. They are good for looking up along the batch, and for nothing else
    zero        zeros, which are a part, a term and a copy of zeros

A mean over the samples of a microbatch is a term with e = 1. Since the sum of M equal values is M
times one of them, a whole value with power e is a term with power e + 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

Kind = Literal["split", "whole", "term", "place", "zero", "open"]
Shape = Sequence[int]


@dataclass(frozen=True, slots=True)
class Label:
    """What a microbatch's tensor is of the batch's (see the module's docstring).

    Of kind ``open`` nothing is known; that occurs only under the user's promise that samples do not
    depend on each other.

    Attributes:
        dim: along which it is cut, else -1. power: e.
    """

    kind: Kind
    dim: int = -1
    power: int = 0

    @property
    def as_term(self) -> int | None:
        """The power with which it is a term, None if it is none."""
        return {"term": self.power, "whole": self.power + 1}.get(self.kind)

    @property
    def is_count(self) -> bool:
        """Whether the batch's value is the sum or the average of the microbatches' values."""
        return self.as_term in (0, 1) and self != WHOLE

    @property
    def joined(self) -> str:
        """How the batch's output is put together of outputs with this label: ``split``, ``whole``,
        ``sum`` or ``mean``.
        """
        return {"term": "mean" if self.power else "sum"}.get(self.kind, self.kind)

    def raised(self, power: int) -> Label:
        """With M^`power` times as much."""
        return replace(self, power=self.power + power) if power else self

    def __str__(self) -> str:
        if self.kind == "split":
            return f"a part of the samples, along dim {self.dim}"
        if self.kind == "term":
            return "a sum over samples" if self.power == 0 else f"{_of(self.power)} over samples"
        if self.kind == "whole" and self.power:
            return "what no sample is part of, but of which each microbatch has another share"
        return _WORDS[self.kind]


def _of(power: int) -> str:
    return "an average" if power > 0 else "a share of a sum"


_WORDS = {
    "whole": "what no sample is part of",
    "place": "positions of samples in the batch",
    "zero": "zeros",
    "open": "what no rule knows",
}
WHOLE, TERM, MEAN, ZERO, OPEN = (
    Label("whole"),
    Label("term"),
    Label("term", power=1),
    Label("zero"),
    Label("open"),
)


def cut_dim(whole: Shape, part: Shape, num: int) -> int | None:
    """The dim along which `whole` is `num` times as long as `part`; -1 if the shapes are equal, and
    None if they differ otherwise.
    """
    if tuple(whole) == tuple(part):
        return -1
    differs = [dim for dim, (a, b) in enumerate(zip(whole, part, strict=False)) if a != b]
    cut = (
        len(whole) == len(part)
        and len(differs) == 1
        and whole[differs[0]] == num * part[differs[0]]
    )
    return differs[0] if cut else None


def label_by_shape(whole: Shape, part: Shape, num: int) -> Label | None:
    """A part or the same, as shapes alone have it; None where they say neither."""
    dim = cut_dim(whole, part, num)
    return None if dim is None else WHOLE if dim < 0 else Label("split", dim)
