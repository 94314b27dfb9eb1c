"""The transfers between stages of a pipeline, and the order in which a rank starts them.

Stage s is on rank s mod P. Between two ranks of a group, tensors are received in the order in which
they are sent, regardless of their stages. Both ranks must therefore start their transfers in the
same order (`autopar.validation.in_order` checks this).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autopar.program.schedule import interleaved_schedule
from autopar.program.stage_work import StageWork

Started = list[dist.Work]
"""Transfers that were started, one per tensor. Each keeps its tensor alive until it is released."""


def peer(kind: str, stage: int) -> int:
    """Return the other stage of a transfer.

    Args:
        kind: ``send forward``, ``send backward``, ``receive forward`` or ``receive backward``, see
            `autopar.program.schedule.Action`.
        stage: the stage that sends or receives.
    """
    direction, _, phase = kind.partition(" ")
    return stage + 1 if (direction == "send") == (phase == "forward") else stage - 1


class Transfers:
    """Starts the transfers of one rank.

    Args:
        group: the ranks of the pipeline, in order.

    Attributes:
        size: the number of ranks.
        rank: the index of this rank in the group.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self.rank = group.size(), group.rank()

    def start(self, kind: str, tensors: Sequence[Tensor], stage: int) -> Started:
        """Start the transfers of a stage, one after another.

        Args:
            kind, stage: see `peer`.
            tensors: the tensors to send or to receive into.
        """
        call = dist.irecv if kind.startswith("receive") else dist.isend
        other = self._rank_of(kind, stage)
        return [_require_transfer(call(tensor, other, self._group)) for tensor in tensors]

    def start_together(self, kind: str, tensors: Sequence[Tensor], stage: int) -> Started:
        """Start the transfers of a stage as one batch.

        Args:
            kind, tensors, stage: see `start`.
        """
        moves = self.moves(kind, tensors, stage)
        transfers: Started = dist.batch_isend_irecv(moves) if moves else []
        return transfers

    def moves(self, kind: str, tensors: Sequence[Tensor], stage: int) -> list[dist.P2POp]:
        """Return the transfers of a stage without starting them.

        Args:
            kind, tensors, stage: see `start`.
        """
        call: Any = dist.irecv if kind.startswith("receive") else dist.isend
        return [
            dist.P2POp(call, tensor, self._rank_of(kind, stage), self._group) for tensor in tensors
        ]

    def _rank_of(self, kind: str, stage: int) -> int:
        return dist.get_global_rank(self._group, peer(kind, stage) % self.size)


def wait(started: Started) -> None:
    """Wait until all transfers have finished, and release them with their tensors."""
    while started:
        started.pop(0).wait()


def _require_transfer(transfer: dist.Work | None) -> dist.Work:
    assert transfer is not None, "this process is in the group"
    return transfer


# --------------------------------------------------------------------------------------------------
# All forwards of a stage, then all backwards: GPipe (Huang et al., 2019) in two halves.
#
# This order is used for calls without backward, and for models that return no loss: their backward
# begins with a loss that the user computes from the outputs of the whole batch. A stage waits for
# its previous send before it starts the next one, so that it holds the sent tensors of at most one
# microbatch. `autopar.program.stage_memory` relies on this.


class ForwardsFirst:
    """Runs the work of one stage on a batch, between `begin` and `finish` of the work.

    Args:
        work: the work of the stage.
        number: the index of the stage.
        transfers: the transfers of this rank; None if the pipeline has a single stage.
        num_microbatches: the number of microbatches per step.
    """

    def __init__(
        self, work: StageWork, number: int, transfers: Transfers | None, num_microbatches: int
    ) -> None:
        self.work, self._number, self._transfers, self._num = (
            work,
            number,
            transfers,
            num_microbatches,
        )

    def forward(self) -> None:
        """Run forward on all microbatches."""
        for started in self.steps("forward"):
            wait(started)

    def backward(self) -> None:
        """Run backward on all microbatches, in the same order."""
        for started in self.steps("backward"):
            wait(started)

    def steps(self, phase: str) -> Iterator[Started]:
        """Run a phase, ``forward`` or ``backward``, on all microbatches. Yield the transfers that
        the caller must wait for before the next iteration."""
        work = self.work
        if phase == "forward":
            return self._each(phase, work.arriving_inputs, work.forward, work.leaving_outputs)
        return self._each(phase, work.arriving_gradients, work.backward, work.leaving_gradients)

    def _each(
        self,
        phase: str,
        arriving: Callable[[int], Sequence[Tensor]],
        run: Callable[[int], None],
        leaving: Callable[[int], Sequence[Tensor]],
    ) -> Iterator[Started]:
        sending: Started = []  # keeps the tensors alive while they are sent
        for number in range(self._num):
            yield self._start(f"receive {phase}", arriving(number))
            run(number)
            yield sending
            sending = self._start(f"send {phase}", leaving(number))
        yield sending

    def _start(self, kind: str, tensors: Sequence[Tensor]) -> Started:
        if not tensors:
            return []
        assert self._transfers is not None, "several stages have a group"
        return self._transfers.start_together(kind, tensors, self._number)


# --------------------------------------------------------------------------------------------------
# Several stages of one rank, run in the interleaved order (`autopar.program.schedule`).
#
# torch computes the order, but torch's runtime is not used, since it keeps all sent tensors until
# the step ends. Here, a stage waits for its previous send of the same phase before it starts the
# next one, and holds the tensors until then. `autopar.program.stage_memory` relies on this. All
# ranks share a common order in which every transfer has one position: the last action of its sender
# and the first action of its receiver at that position. Therefore no two ranks wait for each other,
# and between two ranks all transfers start in the same order.


class Interleaving:
    """Runs the steps of one rank's stages.

    Args:
        works: the work of each stage of this rank, by the index of the stage.
        transfers: the transfers of this rank.
        num_microbatches: the number of microbatches per step.
    """

    def __init__(
        self, works: Mapping[int, StageWork], transfers: Transfers, num_microbatches: int
    ) -> None:
        self._chunks = {number: _Chunk(work, number, transfers) for number, work in works.items()}
        self._actions = interleaved_schedule(transfers.size, len(works), num_microbatches)[
            transfers.rank
        ]

    def run(self, *, backward: bool) -> None:
        """Run one step, after `begin` of each work. Without `backward`, the other actions run in
        the same order."""
        for started in self.steps(backward=backward):
            wait(started)

    def steps(self, *, backward: bool) -> Iterator[Started]:
        """Run one step. Yield the transfers that the caller must wait for before the next
        iteration."""
        for kind, stage, microbatch in self._actions:
            if backward or kind.endswith("forward"):
                yield from self._chunks[stage].act(kind, microbatch)
        for chunk in self._chunks.values():
            yield from chunk.close()


class _Chunk:
    """The work of one stage and its transfers."""

    def __init__(self, work: StageWork, number: int, transfers: Transfers) -> None:
        self.work, self._number, self._transfers = work, number, transfers
        self._arriving: dict[tuple[str, int], Started] = {}
        self._sent: dict[str, tuple[Sequence[Tensor], Started]] = {}

    def act(self, kind: str, microbatch: int) -> Iterator[Started]:
        """Run one action (`autopar.program.schedule.Action`). Yield the transfers to wait for."""
        work, _, phase = kind.rpartition(" ")
        if work == "receive":
            tensors = (
                self.work.arriving_inputs(microbatch)
                if phase == "forward"
                else self.work.arriving_gradients(microbatch)
            )
            self._arriving[phase, microbatch] = self._transfers.start(kind, tensors, self._number)
        elif work == "send":
            yield from self._finish_sending(phase)
            tensors = (
                self.work.leaving_outputs(microbatch)
                if phase == "forward"
                else self.work.leaving_gradients(microbatch)
            )
            self._sent[phase] = tensors, self._transfers.start(kind, tensors, self._number)
        else:
            yield self._arriving.pop((phase, microbatch), [])
            run = self.work.forward if phase == "forward" else self.work.backward
            run(microbatch)

    def close(self) -> Iterator[Started]:
        """End a step. Yield the remaining transfers."""
        for phase in ("forward", "backward"):
            yield from self._finish_sending(phase)

    def _finish_sending(self, phase: str) -> Iterator[Started]:
        _, transfers = self._sent.pop(phase, ((), []))
        yield transfers
