"""What a call of stages returns, outputs of the whole batch on every rank, and what backward of a loss outside of the model begins with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from autopar.request import Outputs
from autopar.run.program import Microbatches, ProgramTensor


@dataclass(frozen=True, slots=True)
class Returned:
    """Of a pipeline's call.

    Attributes:
        outputs: those that are returned, of the whole batch. how: how they are put together.
        waits: whether all forwards run first, since backward begins with the user's own loss, or does not come.
    """

    outputs: tuple[ProgramTensor, ...]
    how: Microbatches
    waits: bool

    @property
    def handed_bytes(self) -> int:
        """What the stages that make it hand to all others, once a step; a loss is next to nothing, and not counted."""
        return sum(_bytes(t) for t in self.outputs if not t.is_loss)


def is_returned(output: ProgramTensor, outputs: Outputs) -> bool:
    """Whether several stages, or microbatches, return an output: all with ``"full"``, else the loss."""
    return outputs == "full" or output.is_loss


def parts_of(tangents: Mapping[str, Tensor], how: Microbatches) -> list[dict[str, Tensor]]:
    """Per microbatch the tangents by output path, from those of the whole batch's outputs."""
    found: list[dict[str, Tensor]] = [{} for _ in range(how.num)]
    for path, whole in tangents.items():
        for mine, value in zip(found, how.tangents(path, whole), strict=True):
            mine[path] = value
    return found


def _bytes(tensor: ProgramTensor) -> int:
    size = tensor.dtype.itemsize
    for length in tensor.shape:
        size *= length
    return size
