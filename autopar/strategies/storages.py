"""Which tensors of a trace lie in the same memory, and where more is kept for backward than that memory holds."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

from autopar.analysis.work import is_view
from autopar.rules import Call, TensorInfo

Ref = tuple[str, int]  # a tensor: node name, result index


class Storages:
    """The memory that the tensors of a trace lie in, by the tensor that it was made for.

    A view of what is kept, kept as well, takes no memory, but counts as a tensor; where each may be made again by itself, a plan that keeps
    one of them and makes the others again is counted as what it is.
    """

    def __init__(self) -> None:
        self._owner: dict[Ref, Ref] = {}
        self._free: dict[Ref, int] = {}  # bytes of a memory less those of what is kept in it
        self._viewing: set[str] = set()

    def add(self, name: str, call: Call, reads: Sequence[Ref]) -> None:
        """A node, after those that it reads."""
        views = bool(reads) and is_view(call.target) and (call.target is not operator.getitem or reads[0][0] in self._viewing)
        self._viewing |= {name} if views else set()
        for result, info in enumerate(call.outputs):
            self._owner[name, result] = self._owner.get(reads[0], reads[0]) if views else (name, result)
            self._free.update({} if views else {(name, result): size_of(info)})

    def keep(self, kept: Mapping[Ref, TensorInfo]) -> None:
        """What backward reads of forward's tensors."""
        for ref, info in kept.items():
            owner = self._owner.get(ref, ref)
            self._free[owner] = self._free.get(owner, 0) - size_of(info)  # what the model is given rests: a view of it takes none

    def is_view(self, name: str) -> bool:
        """Whether a node's results lie in its operand's memory."""
        return name in self._viewing

    def are_full(self, refs: Sequence[Ref]) -> bool:
        """Whether more is kept in the memory of one of these than it holds."""
        return any(self._free.get(self._owner.get(ref, ref), 0) < 0 for ref in refs)


def size_of(info: TensorInfo) -> int:
    """Bytes of a whole tensor."""
    return info.dtype.itemsize * math.prod(info.shape)
