"""What stages of a pipeline send each other, and how a rank starts it.

Stages lie on ranks in turns: stage s on rank s mod P. Between two ranks of a group, what one sends
comes in the order in which the other receives it, whatever stages it is of; so both have to start
their transfers in one order (`autopar.validation.in_order` checks it).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

from autopar.program.schedule import interleaved_schedule
from autopar.program.stage_work import StageWork

Started = list[dist.Work]
"""Transfers on their way, one per tensor; each holds its tensor, and so do not keep what was
waited for."""


def peer(kind: str, stage: int) -> int:
    """The other stage of a transfer.

    Args:
        kind: ``send forward``, ``send backward``, ``receive forward`` or ``receive backward``, as
            of `autopar.program.schedule.Action`.
        stage: the one that sends or receives.
    """
    what, _, phase = kind.partition(" ")
    return stage + 1 if (what == "send") == (phase == "forward") else stage - 1


class Transfers:
    """Starts what one rank sends and receives.

    Args:
        group: the ranks of the pipeline in order.

    Attributes:
        size: how many ranks there are. rank: this one's place among them.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.size, self.rank = group.size(), group.rank()

    def start(self, kind: str, tensors: Sequence[Tensor], stage: int) -> Started:
        """Start the transfers of a stage, one after another; arguments as of `peer`."""
        call = dist.irecv if kind.startswith("receive") else dist.isend
        other = self._rank_of(kind, stage)
        return [_require_transfer(call(tensor, other, self._group)) for tensor in tensors]

    def start_together(self, kind: str, tensors: Sequence[Tensor], stage: int) -> Started:
        """As `start`, as one batch."""
        moves = self.moves(kind, tensors, stage)
        found: Started = dist.batch_isend_irecv(moves) if moves else []
        return found

    def moves(self, kind: str, tensors: Sequence[Tensor], stage: int) -> list[dist.P2POp]:
        """The transfers, not started."""
        call: Any = dist.irecv if kind.startswith("receive") else dist.isend
        return [
            dist.P2POp(call, tensor, self._rank_of(kind, stage), self._group) for tensor in tensors
        ]

    def _rank_of(self, kind: str, stage: int) -> int:
        return dist.get_global_rank(self._group, peer(kind, stage) % self.size)


def wait(started: Started) -> None:
    """Until all are done; then none of them is held, nor what it moved."""
    while started:
        started.pop(0).wait()


def _require_transfer(transfer: dist.Work | None) -> dist.Work:
    assert transfer is not None, "this process is one of the group"
    return transfer


# --------------------------------------------------------------------------------------------------
# All forwards of a stage, then, when what they begin with is there, all backwards: GPipe (Huang
# et al., 2019) in two halves.
#
# So run stages of a model that returns no loss, whose backward waits for one that the user
# computes of the whole batch's outputs; and calls that have no backward. A stage waits for what
# it sent before it sends the next, so that no more than one microbatch's is held for it:
# `autopar.program.stage_memory` counts on it.


class ForwardsFirst:
    """Runs one stage's work on a batch; `begin` of the work came before, and `finish` comes after.

    Args:
        number: which stage it is. transfers: of this rank, of which each has one stage; None for a
            single stage.
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
        """Of all microbatches."""
        for started in self.steps("forward"):
            wait(started)

    def backward(self) -> None:
        """Of all microbatches, in the same order."""
        for started in self.steps("backward"):
            wait(started)

    def steps(self, phase: str) -> Iterator[Started]:
        """``forward`` or ``backward`` of all microbatches, in pieces: each time the transfers
        that have to be done before it goes on."""
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
        sending: Started = []  # they hold what they send
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
# torch makes the order; it is run here, since torch's own runtime of several stages keeps all that
# it has sent until the step ends. Here a stage waits for what it sent before it sends the next of
# the same kind, and holds what it sends until then: `autopar.program.stage_memory` counts on it.
# Every transfer stands at one place of a common order of all ranks, as the last thing that its
# sender and the first that its receiver does there; so nobody waits for a rank that waits for it,
# and between two ranks all transfers start in one order.


class Interleaving:
    """Runs the steps of one rank's stages.

    Args:
        works: stage → its work; their sum over ranks are stages 0 to S − 1. transfers: of this
            rank.
    """

    def __init__(
        self, works: Mapping[int, StageWork], transfers: Transfers, num_microbatches: int
    ) -> None:
        self._chunks = {number: _Chunk(work, number, transfers) for number, work in works.items()}
        self._actions = interleaved_schedule(transfers.size, len(works), num_microbatches)[
            transfers.rank
        ]

    def run(self, *, backward: bool) -> None:
        """One step; `begin` of each work came before. Without `backward` the order of what is
        left is the same."""
        for started in self.steps(backward=backward):
            wait(started)

    def steps(self, *, backward: bool) -> Iterator[Started]:
        """One step, in pieces: each time the transfers that have to be done before it goes on."""
        for kind, stage, microbatch in self._actions:
            if backward or kind.endswith("forward"):
                yield from self._chunks[stage].act(kind, microbatch)
        for chunk in self._chunks.values():
            yield from chunk.close()


class _Chunk:
    """One stage's work with its transfers."""

    def __init__(self, work: StageWork, number: int, transfers: Transfers) -> None:
        self.work, self._number, self._transfers = work, number, transfers
        self._arriving: dict[tuple[str, int], Started] = {}
        self._sent: dict[str, tuple[Sequence[Tensor], Started]] = {}

    def act(self, kind: str, microbatch: int) -> Iterator[Started]:
        """One action of the order (`autopar.program.schedule.Action`), and what it waits for."""
        what, _, phase = kind.rpartition(" ")
        if what == "receive":
            tensors = (
                self.work.arriving_inputs(microbatch)
                if phase == "forward"
                else self.work.arriving_gradients(microbatch)
            )
            self._arriving[phase, microbatch] = self._transfers.start(kind, tensors, self._number)
        elif what == "send":
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
        """At the end of a step."""
        for phase in ("forward", "backward"):
            yield from self._finish_sending(phase)

    def _finish_sending(self, phase: str) -> Iterator[Started]:
        _, transfers = self._sent.pop(phase, ((), []))
        yield transfers
