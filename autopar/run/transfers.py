"""What stages of a pipeline send each other, and how a rank starts it.

Stages lie on ranks in turns: stage s on rank s mod P. Between two ranks of a group, what one sends comes in the order in which the other
receives it, whatever stages it is of; so both have to start their transfers in one order (`autopar.validation.transfers` checks it).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor

Started = list[dist.Work]
"""Transfers on their way, one per tensor; each holds its tensor, and so do not keep what was waited for."""


def peer(kind: str, stage: int) -> int:
    """The other stage of a transfer.

    Args:
        kind: ``send forward``, ``send backward``, ``receive forward`` or ``receive backward``, as of `autopar.run.orders.Action`.
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
        return [_started(call(tensor, other, self._group)) for tensor in tensors]

    def start_together(self, kind: str, tensors: Sequence[Tensor], stage: int) -> Started:
        """As `start`, as one batch."""
        moves = self.moves(kind, tensors, stage)
        found: Started = dist.batch_isend_irecv(moves) if moves else []
        return found

    def moves(self, kind: str, tensors: Sequence[Tensor], stage: int) -> list[dist.P2POp]:
        """The transfers, not started."""
        call: Any = dist.irecv if kind.startswith("receive") else dist.isend
        return [dist.P2POp(call, tensor, self._rank_of(kind, stage), self._group) for tensor in tensors]

    def _rank_of(self, kind: str, stage: int) -> int:
        return dist.get_global_rank(self._group, peer(kind, stage) % self.size)


def wait(started: Started) -> None:
    """Until all are done; then none of them is held, nor what it moved."""
    while started:
        started.pop(0).wait()


def _started(transfer: dist.Work | None) -> dist.Work:
    assert transfer is not None, "this process is one of the group"
    return transfer
