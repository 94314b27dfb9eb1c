"""Several stages of one rank, run in the interleaved order (`autopar.run.orders`).

torch makes the order; it is run here, since torch's own runtime of several stages keeps all that it has sent until the step ends. Here a
stage waits for what it sent before it sends the next of the same kind, and holds what it sends until then: `autopar.run.rank_memory`
counts on it. Every transfer stands at one place of a common order of all ranks, as the last thing that its sender and the first that its
receiver does there; so nobody waits for a rank that waits for it, and between two ranks all transfers start in one order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from autopar.run.orders import interleaved
from autopar.run.stage_work import StageWork
from autopar.run.transfers import Started, Transfers, wait


class Interleaving:
    """Runs the steps of one rank's stages.

    Args:
        works: stage → its work; their sum over ranks are stages 0 to S − 1. transfers: of this rank.
    """

    def __init__(self, works: Mapping[int, StageWork], transfers: Transfers, num_microbatches: int) -> None:
        self._chunks = {number: _Chunk(work, number, transfers) for number, work in works.items()}
        self._actions = interleaved(transfers.size, len(works), num_microbatches)[transfers.rank]

    def run(self, *, backward: bool) -> None:
        """One step; `begin` of each work came before. Without `backward` the order of what is left is the same."""
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
        """One action of the order (`autopar.run.orders.Action`), and what it waits for."""
        what, _, phase = kind.rpartition(" ")
        if what == "receive":
            tensors = self.work.arriving(microbatch) if phase == "forward" else self.work.arriving_back(microbatch)
            self._arriving[phase, microbatch] = self._transfers.start(kind, tensors, self._number)
        elif what == "send":
            yield from self._finish_sending(phase)
            tensors = self.work.leaving(microbatch) if phase == "forward" else self.work.leaving_back(microbatch)
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
