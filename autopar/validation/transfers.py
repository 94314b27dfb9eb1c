"""`run_ranks`: what runs a rank's stages, on symbols, with transfers that go from rank to rank in
one process.

A transfer is one start of as many tensors as a stage hands over at once. Between two ranks the n-th
start of one has to meet the n-th of the other, of which one sends and one receives: that is how
process groups pair them. What is received is there once it was waited for, and nothing that was
started may be left without being waited for.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.run import transfers
from autopar.validation.states import invalid

Steps = Iterator[list[Any]]
"""A rank's step in pieces: each time what it waits for."""


@dataclass(eq=False)
class _Transfer:
    """One side of a transfer.

    Attributes:
        rank, other: of this side, and of the one that it names. tensors: symbols, or what they are
            received into. is_done: whether it was waited for.
    """

    rank: int
    other: int
    kind: str
    stage: int
    tensors: list[Any]
    is_done: bool = False
    meets: _Transfer | None = None

    def __str__(self) -> str:
        way = "to" if self.sends else "from"
        return f"{self.kind} of stage {self.stage}, {way} rank {self.other}"

    @property
    def sends(self) -> bool:
        return self.kind.startswith("send")


@dataclass
class Wires:
    """All transfers of a step.

    Attributes:
        size: the number of ranks. in_one_order: whether sends and receives between two ranks are
            paired together; else each direction by itself, as where they are started as a batch.
    """

    size: int
    in_one_order: bool
    started: list[_Transfer] = field(default_factory=list)
    _open: dict[tuple[int, int, bool | None], deque[_Transfer]] = field(
        default_factory=lambda: defaultdict(deque)
    )

    def of(self, rank: int) -> _Transfers:
        """What a rank starts its transfers with."""
        return _Transfers(self, rank)

    def start(self, rank: int, kind: str, tensors: list[Any], stage: int) -> list[_Transfer]:
        if not tensors:
            return []
        made = _Transfer(rank, transfers.peer(kind, stage) % self.size, kind, stage, tensors)
        self.started.append(made)
        facing = self._open[made.other, rank, self._way(not made.sends)]
        if facing:
            self._pair(facing.popleft(), made)
        else:
            self._open[rank, made.other, self._way(made.sends)].append(made)
        return [made]

    def _way(self, sends: bool) -> bool | None:
        return None if self.in_one_order else sends

    def _pair(self, one: _Transfer, made: _Transfer) -> None:
        if one.sends == made.sends:
            what = f"rank {one.rank} starts {one}, and rank {made.rank} {made}, at the same place"
            raise invalid(f"ranks wait for each other: {what}")
        if len(one.tensors) != len(made.tensors):
            sent, taken = (one, made) if one.sends else (made, one)
            what = f"{len(sent.tensors)} tensors come, and it takes {len(taken.tensors)}"
            raise invalid(f"stage {taken.stage}: {what}")
        one.meets, made.meets = made, one


@dataclass(frozen=True)
class _Transfers:
    """As `autopar.run.transfers.Transfers`, of one rank."""

    wires: Wires
    rank: int

    @property
    def size(self) -> int:
        return self.wires.size

    def start(self, kind: str, tensors: Sequence[Any], stage: int) -> list[_Transfer]:
        return self.wires.start(self.rank, kind, list(tensors), stage)

    start_together = start


def run_ranks(wires: Wires, steps: Mapping[int, Callable[[], Steps]]) -> None:
    """Run all ranks, each as far as what it waits for is there.

    Args:
        steps: rank → makes its step.

    Raises:
        ValidationError: where ranks wait for each other, or leave a transfer.
    """
    running = {rank: make() for rank, make in steps.items()}
    pending: dict[int, list[_Transfer]] = {rank: [] for rank in running}
    while running:
        ready = [rank for rank in running if all(t.meets for t in pending[rank])]
        if not ready:
            waiting = (f"rank {rank} for {pending[rank][0]}" for rank in running)
            what = f"ranks wait for each other: {'; '.join(waiting)}"
            raise invalid(what)
        for rank in ready:
            _advance(rank, running, pending)
    for each in wires.started:
        if not each.is_done or each.meets is None:
            raise invalid(f"rank {each.rank} does not wait for {each}")


def _advance(rank: int, running: dict[int, Steps], pending: dict[int, list[_Transfer]]) -> None:
    for each in pending[rank]:
        each.is_done = True
        if not each.sends and each.meets is not None:
            for buffer, symbol in zip(each.tensors, each.meets.tensors, strict=True):
                buffer.came = symbol
    try:
        pending[rank] = next(running[rank])
    except StopIteration:
        running.pop(rank)
