"""All forwards of a stage, then, when what they begin with is there, all backwards: GPipe (Huang et al., 2019) in two halves.

So run stages of a model that returns no loss, whose backward waits for one that the user computes of the whole batch's outputs; and calls
that have no backward. A stage waits for what it sent before it sends the next, so that no more than one microbatch's is held for it:
`autopar.run.stage_memory` counts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from autopar.run.stage_work import StageWork
from autopar.run.transfers import Started, Transfers, wait


class ForwardsFirst:
    """Runs one stage's work on a batch; `begin` of the work came before, and `finish` comes after.

    Args:
        number: which stage it is. transfers: of this rank, of which each has one stage; None for a single stage.
    """

    def __init__(self, work: StageWork, number: int, transfers: Transfers | None, num_microbatches: int) -> None:
        self.work, self._number, self._transfers, self._num = work, number, transfers, num_microbatches

    def forward(self) -> None:
        """Of all microbatches."""
        for started in self.steps("forward"):
            wait(started)

    def backward(self) -> None:
        """Of all microbatches, in the same order."""
        for started in self.steps("backward"):
            wait(started)

    def steps(self, phase: str) -> Iterator[Started]:
        """``forward`` or ``backward`` of all microbatches, in pieces: each time the transfers that have to be done before it goes on."""
        work = self.work
        if phase == "forward":
            return self._each(phase, work.arriving, work.forward, work.leaving)
        return self._each(phase, work.arriving_back, work.backward, work.leaving_back)

    def _each(
        self,
        phase: str,
        arriving: Callable[[int], Sequence[Tensor]],
        run: Callable[[int], None],
        leaving: Callable[[int], Sequence[Tensor]],
    ) -> Iterator[Started]:
        sending: Started = []  # they hold what they send
        for number in range(self._num):
            yield self._started(f"receive {phase}", arriving(number))
            run(number)
            yield sending
            sending = self._started(f"send {phase}", leaving(number))
        yield sending

    def _started(self, kind: str, tensors: Sequence[Tensor]) -> Started:
        if not tensors:
            return []
        assert self._transfers is not None, "several stages have a group"
        return self._transfers.start_together(kind, tensors, self._number)
