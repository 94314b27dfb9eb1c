"""The peak of a rank that holds several stages, its chunks: what each piece of a chunk's work adds, put together in the rank's order.

Chunks share no tensor but parameters and buffers that both read. So each is measured alone on fake tensors, and what lives at a moment is
the sum: parameters and buffers, what a step holds of each chunk, and per microbatch what has arrived, what waits for backward, and what
is being sent (`autopar.run.interleaving` says how long).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from autopar.ambient import as_written
from autopar.capture._torch.fakes import new_fake_mode
from autopar.run.executor import Outputs
from autopar.run.live import LiveBytes
from autopar.run.orders import Action
from autopar.run.program import Program
from autopar.run.stage_memory import batch_of, put_together, stage_work
from autopar.run.stage_work import StageWork, outputs_kept


@dataclass(frozen=True, slots=True)
class Rise:
    """Bytes over what is live before a piece of work: at its peak, and after it."""

    peak: int
    after: int


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """What a chunk's work adds on one rank.

    Attributes:
        resting: parameter, buffer or what microbatches are given → its bytes. mutated: the buffers that it changes.
        begin, finish: of a step. received, received_back: buffers of a microbatch for what arrives, in forward and in backward.
        forward, backward: on one microbatch. backward_beside: where what forward sent is still held.
        sent: what is freed when that is let go before backward. sent_late: after it. returned: the same of the gradients that are sent.
        collected: what a microbatch leaves until the step ends: outputs. joined: what they are of the batch's, put together then.
    """

    resting: Mapping[str, int]
    mutated: tuple[str, ...]
    begin: Rise
    finish: Rise
    received: int
    received_back: int
    forward: Rise
    backward: Rise
    backward_beside: Rise
    sent: int
    sent_late: int
    returned: int
    collected: int
    joined: int


def chunk_memory(program: Program, outputs: Outputs) -> ChunkMemory:
    """Measure a chunk's work on fake tensors."""
    memory = LiveBytes()
    with new_fake_mode(), as_written():
        work, tensors = stage_work(program, outputs, memory)
        parts, given = batch_of(program, 2)
        parts = [{**part, **given} for part in parts]
        with memory:
            memory.register((*tensors, *(x for part in parts for x in part.values())))
            found = _Measured(work, memory)
            num = len(program.parameters)
            collected = {t.name for t in outputs_kept(program, outputs, num_microbatches=2)}
            for _ in range(2):  # what a graph makes once is there the second time
                measured = found.step(tensors[:num], tensors[num:], parts, collected)
    names = [t.name for t in (*program.parameters, *program.buffers)]
    resting = {name: x.untyped_storage().nbytes() for name, x in zip(names, tensors, strict=True)}
    resting |= {path: x.untyped_storage().nbytes() for path, x in given.items()}
    return ChunkMemory(resting, program.mutated, **measured)


class _Measured:
    def __init__(self, work: StageWork, memory: LiveBytes) -> None:
        self._work, self._memory = work, memory

    def step(self, parameters: Sequence[Any], buffers: Sequence[Any], parts: Sequence[Any], collected: set[str]) -> dict[str, Any]:
        work = self._work
        found: dict[str, Any] = {}
        found["begin"], _ = self._rise(lambda: work.begin(collected, parameters, buffers, parts, 1.0, keep=True))
        before = self._memory.live_bytes
        for number, beside in enumerate((False, True)):
            rise, received = self._rise(partial(work.arriving, number))
            found["received"] = rise.after
            del received
            found["forward"], _ = self._rise(partial(work.forward, number))
            sent = work.leaving(number)
            if not beside:
                found["sent"] = self._freed(sent)
            rise, received = self._rise(partial(work.arriving_back, number))
            found["received_back"] = rise.after
            del received
            found["backward_beside" if beside else "backward"], _ = self._rise(partial(work.backward, number))
            if beside:
                found["sent_late"] = self._freed(sent)
            found["returned"] = self._freed(work.leaving_back(number))
        found["collected"] = (self._memory.live_bytes - before) // 2
        before = self._memory.live_bytes
        joined = put_together(work)
        found["joined"] = (self._memory.live_bytes - before) // 2
        del joined
        work.outputs.clear()
        found["finish"], gradients = self._rise(work.finish)
        del gradients
        return found

    def _rise(self, run: Callable[[], Any]) -> tuple[Rise, Any]:
        before = self._memory.live_bytes
        self._memory.reset_peak()
        result = run()
        return Rise(self._memory.peak_bytes - before, self._memory.live_bytes - before), result

    def _freed(self, tensors: list[Any]) -> int:
        before = self._memory.live_bytes
        tensors.clear()
        return before - self._memory.live_bytes


def rank_peak(chunks: Mapping[int, ChunkMemory], actions: Sequence[Action], num_microbatches: int) -> int:
    """The peak of a step in bytes, parameters and buffers included, without the optimizer's state and the batch.

    Args:
        chunks: stage → its memory. actions: of the rank; those of other stages count nothing.
    """
    return _Replay(chunks).run(actions, num_microbatches)


class _Replay:
    def __init__(self, chunks: Mapping[int, ChunkMemory]) -> None:
        self._chunks = chunks
        self._live = self._peak = 0
        self._sent: dict[tuple[int, str], int] = {}  # the microbatch whose tensors a stage is sending
        self._late: set[tuple[int, int]] = set()  # whose backward has run while they were

    def run(self, actions: Sequence[Action], num_microbatches: int) -> int:
        resting: dict[str, int] = {}
        for chunk in self._chunks.values():
            resting |= chunk.resting
        self._add(sum(resting.values()))
        changed: set[str] = set()
        for chunk in self._chunks.values():
            self._add(sum(chunk.resting[name] for name in chunk.mutated if name in changed))
            changed |= {*chunk.mutated}
            self._rise(chunk.begin)
        for kind, stage, microbatch in actions:
            if stage in self._chunks:
                self._act(self._chunks[stage], kind, stage, microbatch)
        for stage, phase in list(self._sent):
            self._let_go(stage, phase)
        self._add(sum(chunk.joined for chunk in self._chunks.values()) * num_microbatches)
        for chunk in self._chunks.values():
            self._rise(chunk.finish)
        return self._peak

    def _act(self, chunk: ChunkMemory, kind: str, stage: int, microbatch: int) -> None:
        what, _, phase = kind.rpartition(" ")
        if what == "receive":
            self._add(chunk.received if phase == "forward" else chunk.received_back)
        elif what == "send":
            self._let_go(stage, phase)
            self._sent[stage, phase] = microbatch
        elif phase == "forward":
            self._rise(chunk.forward)
        elif self._sent.get((stage, "forward")) == microbatch:
            self._late.add((stage, microbatch))
            self._rise(chunk.backward_beside)
        else:
            self._rise(chunk.backward)

    def _let_go(self, stage: int, phase: str) -> None:
        """What was sent last."""
        microbatch = self._sent.pop((stage, phase), None)
        if microbatch is not None:
            chunk = self._chunks[stage]
            late = (stage, microbatch) in self._late
            self._add(-(chunk.returned if phase == "backward" else chunk.sent_late if late else chunk.sent))

    def _add(self, num_bytes: int) -> None:
        self._rise(Rise(num_bytes, num_bytes))

    def _rise(self, rise: Rise) -> None:
        self._peak = max(self._peak, self._live + rise.peak)
        self._live += rise.after
