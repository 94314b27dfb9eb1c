"""All forwards of a stage, then, when what they begin with is there, all backwards: GPipe (Huang et al., 2019) in two halves.

So run stages of a model that returns no loss, whose backward waits for one that the user computes of the whole batch's outputs; and calls
that have no backward. A stage waits for what it sent before it sends the next, so that no more than one microbatch's is held for it:
`autopar.run.stage_memory` counts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autopar.run.stage_work import StageWork


class ForwardsFirst:
    """Runs one stage's work on a batch; `begin` of the work came before, and `finish` comes after.

    Args:
        number: which stage it is. group: the ranks of the pipeline, one per stage in order; None for a single stage.
    """

    def __init__(self, work: StageWork, number: int, group: dist.ProcessGroup | None, num_microbatches: int) -> None:
        self.work, self._number, self._group, self._num = work, number, group, num_microbatches

    def forward(self) -> None:
        """Of all microbatches."""
        self._each(self.work.arriving, self.work.forward, self.work.leaving, 1)

    def backward(self) -> None:
        """Of all microbatches, in the same order."""
        self._each(self.work.arriving_back, self.work.backward, self.work.leaving_back, -1)

    def _each(
        self, arriving: Callable[[int], Sequence[Tensor]], run: Callable[[int], None], leaving: Callable[[int], Sequence[Tensor]], step: int
    ) -> None:
        sending: list[dist.Work] = []  # they hold what they send
        for number in range(self._num):
            _wait(self._started(dist.irecv, arriving(number), -step))
            run(number)
            _wait(sending)
            sending = self._started(dist.isend, leaving(number), step)
        _wait(sending)

    def _started(self, kind: Any, tensors: Sequence[Tensor], step: int) -> list[dist.Work]:
        if not tensors:
            return []
        assert self._group is not None, "several stages have a group"
        peer = dist.get_global_rank(self._group, self._number + step)
        found: list[dist.Work] = dist.batch_isend_irecv([dist.P2POp(kind, tensor, peer, self._group) for tensor in tensors])
        return found


def _wait(works: list[dist.Work]) -> None:
    """Until all are done; then none of them is held, nor what it moved."""
    while works:
        works.pop().wait()
