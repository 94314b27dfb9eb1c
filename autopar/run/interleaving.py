"""Several stages of one rank, run in the interleaved order (`autopar.run.orders`).

torch makes the order; it is run here, since torch's own runtime of several stages keeps all that it has sent until the step ends. Here a
stage waits for what it sent before it sends the next of the same kind, and holds what it sends until then: `autopar.run.rank_memory`
counts on it. Every transfer stands at one place of a common order of all ranks, as the last thing that its sender and the first that its
receiver does there; so nobody waits for a rank that waits for it, and between two ranks all transfers start in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch.distributed as dist
from torch import Tensor

from autopar.run.orders import interleaved
from autopar.run.stage_work import StageWork


class Interleaving:
    """Runs the steps of one rank's stages.

    Args:
        works: stage → its work; their sum over ranks are stages 0 to S − 1. group: the ranks of the pipeline in order.
    """

    def __init__(self, works: Mapping[int, StageWork], group: dist.ProcessGroup, num_microbatches: int) -> None:
        self._group = group
        self._chunks = {number: _Chunk(work, number, group) for number, work in works.items()}
        self._actions = interleaved(group.size(), len(works), num_microbatches)[group.rank()]

    def run(self, *, backward: bool) -> None:
        """One step; `begin` of each work came before. Without `backward` the order of what is left is the same."""
        for kind, stage, microbatch in self._actions:
            if backward or kind.endswith("forward"):
                self._chunks[stage].act(kind, microbatch)
        for chunk in self._chunks.values():
            chunk.close()


class _Chunk:
    """One stage's work with its transfers."""

    def __init__(self, work: StageWork, number: int, group: dist.ProcessGroup) -> None:
        self.work, self._group = work, group
        ranks = dist.get_process_group_ranks(group)
        before, behind = ranks[(number - 1) % len(ranks)], ranks[(number + 1) % len(ranks)]
        self._source = {"forward": before, "backward": behind}
        self._target = {"forward": behind, "backward": before}
        self._arriving: dict[tuple[str, int], list[dist.Work]] = {}
        self._sent: dict[str, tuple[Sequence[Tensor], list[dist.Work]]] = {}

    def act(self, kind: str, microbatch: int) -> None:
        """One action of the order (`autopar.run.orders.Action`)."""
        what, _, phase = kind.rpartition(" ")
        if what == "receive":
            tensors = self.work.arriving(microbatch) if phase == "forward" else self.work.arriving_back(microbatch)
            self._arriving[phase, microbatch] = [_started(dist.irecv(t, self._source[phase], self._group)) for t in tensors]
        elif what == "send":
            self._finish_sending(phase)
            tensors = self.work.leaving(microbatch) if phase == "forward" else self.work.leaving_back(microbatch)
            self._sent[phase] = tensors, [_started(dist.isend(t, self._target[phase], self._group)) for t in tensors]
        else:
            _wait(self._arriving.pop((phase, microbatch), []))
            run = self.work.forward if phase == "forward" else self.work.backward
            run(microbatch)

    def close(self) -> None:
        """At the end of a step."""
        for phase in ("forward", "backward"):
            self._finish_sending(phase)

    def _finish_sending(self, phase: str) -> None:
        _, transfers = self._sent.pop(phase, ((), []))
        _wait(transfers)


def _wait(transfers: Sequence[dist.Work]) -> None:
    """No name is left of any: a transfer holds its tensor."""
    for transfer in transfers:
        transfer.wait()


def _started(transfer: dist.Work | None) -> dist.Work:
    assert transfer is not None, "this process is one of the group"
    return transfer
