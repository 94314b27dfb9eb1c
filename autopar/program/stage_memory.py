"""Prediction of the peak memory of a stage under its schedule. The work of the stage runs on fake
tensors, in the order of the real schedule.

Local variables of torch's schedules that hold tensors, such as the buffers of the last receive and
the tensors of the last send, have counterparts here. At most two microbatches in flight are
simulated; each further one adds only the bytes that it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.capture.dynamo.fakes import new_fake_mode
from autopar.core.autocast_state import as_written
from autopar.core.layout import local_shape
from autopar.kernels import host
from autopar.kernels.collectives import fake_groups
from autopar.program.abstract_executor import LiveBytes, Rehearsal
from autopar.program.executor import ReturnedOutputs, parts_of
from autopar.program.program import StageProgram
from autopar.program.schedule import Action
from autopar.program.stage_work import StageWork, outputs_kept
from autopar.program.strided_views import as_view, flat, view_of
from autopar.request import Outputs

SIMULATED = 2  # largest number of simulated microbatches in flight


@dataclass(frozen=True, slots=True)
class StagePeak:
    """Live tensor bytes of a stage on one rank, without the optimizer state and the user's batch.

    Attributes:
        peak_bytes: the peak of a step of all microbatches, including parameters and buffers.
        held_bytes: the bytes that each microbatch in flight holds.
    """

    peak_bytes: int
    held_bytes: int


def trace_stage_peak(
    program: StageProgram,
    schedule: str,
    num_in_flight: int,
    num_microbatches: int,
    outputs: Outputs,
    returned: ReturnedOutputs | None = None,
) -> StagePeak:
    """Predict the memory of a stage by running its schedule on fake tensors.

    Args:
        program: the program of the stage.
        schedule: the name of the schedule.
        num_in_flight: the number of microbatches in flight in this stage.
        num_microbatches: the number of microbatches per step.
        outputs: see `autopar.runtime.scheduled_calls`.
        returned: the outputs of the pipeline. If `returned.waits`, full outputs live from the last
            forward on, and their gradients live during all backwards. The memory for computing a
            loss from them does not count.
    """
    waiting = returned if returned is not None and returned.waits else None
    trained = waiting is None or any(t.has_gradient for t in waiting.outputs)
    flying = min(num_in_flight, SIMULATED)
    num = flying if schedule == "gpipe" else min(num_microbatches, flying + 1)
    memory = LiveBytes()
    with new_fake_mode(), as_written():
        work, tensors = stage_work(program, outputs, memory)
        parts, shared_inputs = batch_of(program, num)
        with memory:
            memory.register(x for part in parts for x in part.values())
            batch_bytes = memory.live_bytes  # microbatches are views of the user's batch
            memory.register((*tensors, *shared_inputs.values()))
            parts = [{**part, **shared_inputs} for part in parts]
            parameters, buffers = (
                tensors[: len(program.parameters)],
                tensors[len(program.parameters) :],
            )
            collected = {t.name for t in outputs_kept(program, outputs, num_microbatches)}
            work.begin((), parameters, buffers, parts, 1.0, keep=trained)
            held_bytes = _bytes_held(work, memory, sends=schedule == "gpipe" and waiting is None)
            work.clear()
            memory.reset_peak()
            work.begin(collected, parameters, buffers, parts, 1.0, keep=trained)
            if waiting is not None:
                _forwards_first(work, num, num_microbatches - num, waiting, trained=trained)
            else:
                if schedule == "gpipe":
                    _gpipe(work, num, num_microbatches - num)
                else:
                    _one_forward_one_backward(work, num, flying, num_microbatches - num)
                joined = put_together(work)
                work.finish()
                del joined
    return StagePeak(
        memory.peak_bytes - batch_bytes + (num_in_flight - flying) * held_bytes, held_bytes
    )


def batch_of(program: StageProgram, num: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """Return the inputs of each of `num` microbatches, by path, and the inputs that all of them
    share, by path."""
    batch_inputs = [t for t in program.inputs if not t.crosses]
    parts = [
        {t.name: torch.empty(t.shape, dtype=t.dtype) for t in batch_inputs if not t.given}
        for _ in range(num)
    ]
    return parts, {t.name: torch.empty(t.shape, dtype=t.dtype) for t in batch_inputs if t.given}


def stage_work(
    program: StageProgram, outputs: Outputs, memory: LiveBytes
) -> tuple[StageWork, list[Tensor]]:
    """Return the work of a stage on one rank, and its parameters and buffers.

    Args:
        program: the program of the stage.
        outputs: see `trace_stage_peak`.
        memory: the counter of live bytes.
    """
    groups = fake_groups(program.mesh)
    place = tuple(group.coordinate for group in groups)
    executor = Rehearsal(
        program, groups, memory, outputs="full" if outputs == "full" else "local", last_queries=True
    )
    tensors = (*program.parameters, *program.buffers)
    shapes = [local_shape(t.view, t.layout, program.mesh.shape, place) for t in tensors]
    empty = [
        (host.empty if t.layout.host else torch.empty)(shape, dtype=t.dtype)
        for t, shape in zip(tensors, shapes, strict=True)
    ]
    return StageWork(program, executor, torch.device("cpu")), empty


def _bytes_held(work: StageWork, memory: LiveBytes, *, sends: bool) -> int:
    """Return the bytes that one microbatch holds after its forward. With `sends`, they include sent
    tensors, which GPipe holds until the end of the step."""
    before = memory.live_bytes
    work.arriving_inputs(0)
    work.forward(0)
    sent = work.leaving_outputs(0)
    if not sends:
        sent = []
    num_bytes = memory.live_bytes - before
    del sent
    return num_bytes


def put_together(work: StageWork) -> list[Tensor]:
    """Return tensors of the size of the batch's outputs, which are joined from collected outputs.
    Scalars, such as a loss, stay scalars."""
    counted = [values if values[0].dim() else values[:1] for values in work.outputs.values()]
    return [
        torch.empty(sum(x.numel() for x in values), dtype=values[0].dtype, device=work.device)
        for values in counted
    ]


def _collect_unsimulated(work: StageWork, num_more: int) -> None:
    """Add the collected outputs of microbatches that are not simulated. They have the same views as
    those of the first microbatch."""
    shared = {x.untyped_storage()._cdata for x in work.read_by_all()}
    for _ in range(num_more):
        storages: dict[int, Tensor] = {}
        for values in filter(None, work.outputs.values()):
            storage = values[0].untyped_storage()
            if storage._cdata in shared:
                values.append(values[0])
                continue
            base = storages.setdefault(storage._cdata, flat(storage.nbytes(), values[0].dtype))
            values.append(as_view(base, view_of(values[0])))


def _forwards_first(
    work: StageWork, num: int, num_more: int, returned: ReturnedOutputs, *, trained: bool
) -> None:
    """Run the stage like `autopar.program.transfers` and `autopar.runtime.scheduled_calls`, and
    hold the same tensors."""
    for number in range(num):
        if number == num - 1:
            _collect_unsimulated(work, num_more)
        work.arriving_inputs(number)
        work.forward(number)
        sent = work.leaving_outputs(number)
    del sent
    tensors = {
        path: returned.how.join(path, values).contiguous() for path, values in work.outputs.items()
    }
    work.outputs.clear()
    for t in returned.outputs:  # add the outputs of other stages
        if t.name not in tensors:
            tensors[t.name] = torch.empty(t.shape, dtype=t.dtype, device=work.device)
    if trained:
        tangents = {
            t.name: torch.empty(t.shape, dtype=t.dtype, device=work.device)
            for t in returned.outputs
            if t.has_gradient
        }
        work.answer(parts_of(tangents, returned.how)[:num])
        for number in range(num):
            work.arriving_gradients(number)
            work.backward(number)
            sent = work.leaving_gradients(number)
        del sent
    work.finish()


# The variables below have the names of those variables of torch's schedules that hold tensors.


def _gpipe(work: StageWork, num: int, num_more: int) -> None:
    fwd_sends_to_wait, bwd_sends_to_wait = [], []
    for number in range(num):
        if number == num - 1:
            _collect_unsimulated(work, num_more)
        ops = work.arriving_inputs(number)
        work.forward(number)
        ops = work.leaving_outputs(number)
        fwd_sends_to_wait.append(ops)
    for number in range(num):
        ops = work.arriving_gradients(number)
        work.backward(number)
        ops = work.leaving_gradients(number)
        bwd_sends_to_wait.append(ops)


def _one_forward_one_backward(work: StageWork, num: int, warmup: int, num_more: int) -> None:
    fwd_sends: list[Tensor] = []
    bwd_sends: list[Tensor] = []
    send_work: list[Tensor] = []  # gloo holds the tensors of the last send that ran alone
    forwarded = 0
    for forwarded in range(1, warmup + 1):
        fwd_recvs = work.arriving_inputs(forwarded - 1)
        work.forward(forwarded - 1)
        fwd_sends = work.leaving_outputs(forwarded - 1)
        send_work = fwd_sends if forwarded < warmup else send_work
    _collect_unsimulated(work, num_more)
    for number in range(num):
        bwd_recvs = work.arriving_gradients(number)
        work.backward(number)
        bwd_sends = work.leaving_gradients(number)
        if forwarded < num:
            fwd_recvs = work.arriving_inputs(forwarded)
            work.forward(forwarded)
            fwd_sends = work.leaving_outputs(forwarded)
            forwarded += 1
        else:
            send_work = bwd_sends
    del fwd_recvs, fwd_sends, bwd_recvs, bwd_sends, send_work


# --------------------------------------------------------------------------------------------------
# The peak of a rank that holds several stages, its chunks.
#
# Chunks share only parameters and buffers that both read. Each chunk is therefore measured
# separately on fake tensors. The live bytes at any moment are the sum of parameters and buffers,
# the bytes that a step holds for each chunk, and for each microbatch the tensors that were
# received, are saved for backward, or are being sent (see `autopar.program.transfers`).


@dataclass(frozen=True, slots=True)
class Rise:
    """The increase of live bytes during an action: the largest increase, and that at the end."""

    peak: int
    after: int


@dataclass(frozen=True, slots=True)
class ChunkMemory:
    """The bytes that the work of a chunk adds on one rank.

    Attributes:
        resting: the bytes of each parameter, buffer, and input that all microbatches share.
        mutated: the buffers that the chunk changes.
        begin, finish: the increases at the begin and the end of a step.
        received, received_back: the bytes of a microbatch's receive buffers in forward and in
            backward.
        forward, backward: the increases of forward and backward of one microbatch.
        backward_beside: the increase of backward while tensors sent by forward are still held.
        sent: the bytes that are freed when tensors sent by forward are released before backward.
        sent_late: the bytes that are freed when they are released after backward.
        returned: the bytes that are freed when sent gradients are released.
        collected: the bytes of a microbatch's outputs that are held until the step ends.
        joined: the bytes of the batch's outputs, divided by the number of microbatches.
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


def chunk_memory(program: StageProgram, outputs: Outputs) -> ChunkMemory:
    """Measure a chunk's work on fake tensors."""
    memory = LiveBytes()
    with new_fake_mode(), as_written():
        work, tensors = stage_work(program, outputs, memory)
        parts, shared_inputs = batch_of(program, 2)
        parts = [{**part, **shared_inputs} for part in parts]
        with memory:
            memory.register((*tensors, *(x for part in parts for x in part.values())))
            measuring = _Measured(work, memory)
            num = len(program.parameters)
            collected = {t.name for t in outputs_kept(program, outputs, num_microbatches=2)}
            for _ in range(2):  # the first step also creates tensors that graphs keep
                measured = measuring.step(tensors[:num], tensors[num:], parts, collected)
    names = [t.name for t in (*program.parameters, *program.buffers)]
    resting_bytes = {
        name: x.untyped_storage().nbytes() for name, x in zip(names, tensors, strict=True)
    }
    resting_bytes |= {path: x.untyped_storage().nbytes() for path, x in shared_inputs.items()}
    return ChunkMemory(resting_bytes, program.mutated, **measured)


class _Measured:
    def __init__(self, work: StageWork, memory: LiveBytes) -> None:
        self._work, self._memory = work, memory

    def step(
        self,
        parameters: Sequence[Any],
        buffers: Sequence[Any],
        parts: Sequence[Any],
        collected: set[str],
    ) -> dict[str, Any]:
        """Measure a step of two microbatches and return the fields of `ChunkMemory` except the
        first two.

        Args:
            parameters, buffers: the stored tensors.
            parts: the inputs of each microbatch.
            collected: the paths of the outputs that are collected.
        """
        work = self._work
        sizes: dict[str, Any] = {}
        sizes["begin"], _ = self._rise(
            lambda: work.begin(collected, parameters, buffers, parts, 1.0, keep=True)
        )
        before = self._memory.live_bytes
        for number, still_sent in enumerate((False, True)):
            rise, received = self._rise(partial(work.arriving_inputs, number))
            sizes["received"] = rise.after
            del received
            sizes["forward"], _ = self._rise(partial(work.forward, number))
            sent = work.leaving_outputs(number)
            if not still_sent:
                sizes["sent"] = self._free(sent)
            rise, received = self._rise(partial(work.arriving_gradients, number))
            sizes["received_back"] = rise.after
            del received
            sizes["backward_beside" if still_sent else "backward"], _ = self._rise(
                partial(work.backward, number)
            )
            if still_sent:
                sizes["sent_late"] = self._free(sent)
            sizes["returned"] = self._free(work.leaving_gradients(number))
        sizes["collected"] = (self._memory.live_bytes - before) // 2
        before = self._memory.live_bytes
        joined = put_together(work)
        sizes["joined"] = (self._memory.live_bytes - before) // 2
        del joined
        work.outputs.clear()
        sizes["finish"], gradients = self._rise(work.finish)
        del gradients
        return sizes

    def _rise(self, run: Callable[[], Any]) -> tuple[Rise, Any]:
        before = self._memory.live_bytes
        self._memory.reset_peak()
        result = run()
        return Rise(self._memory.peak_bytes - before, self._memory.live_bytes - before), result

    def _free(self, tensors: list[Any]) -> int:
        before = self._memory.live_bytes
        tensors.clear()
        return before - self._memory.live_bytes


def rank_peak(
    chunks: Mapping[int, ChunkMemory], actions: Sequence[Action], num_microbatches: int
) -> int:
    """Return the peak of a step in bytes, including parameters and buffers, without the optimizer
    state and the batch.

    Args:
        chunks: the memory of each chunk, by stage.
        actions: the actions of the rank. Actions of stages that are not in `chunks` do not count.
        num_microbatches: the number of microbatches per step.
    """
    return _Replay(chunks).run(actions, num_microbatches)


class _Replay:
    def __init__(self, chunks: Mapping[int, ChunkMemory]) -> None:
        self._chunks = chunks
        self._live = self._peak = 0
        # the microbatch whose tensors a stage is sending, by stage and phase
        self._sent: dict[tuple[int, str], int] = {}
        # stage and microbatch of backwards that ran while tensors of forward were being sent
        self._late: set[tuple[int, int]] = set()

    def run(self, actions: Sequence[Action], num_microbatches: int) -> int:
        """Return the peak of these actions."""
        resting_bytes: dict[str, int] = {}
        for chunk in self._chunks.values():
            resting_bytes |= chunk.resting
        self._add(sum(resting_bytes.values()))
        changed: set[str] = set()
        for chunk in self._chunks.values():
            self._add(sum(chunk.resting[name] for name in chunk.mutated if name in changed))
            changed |= {*chunk.mutated}
            self._rise(chunk.begin)
        for kind, stage, microbatch in actions:
            if stage in self._chunks:
                self._act(self._chunks[stage], kind, stage, microbatch)
        for stage, phase in list(self._sent):
            self._release_sent(stage, phase)
        self._add(sum(chunk.joined for chunk in self._chunks.values()) * num_microbatches)
        for chunk in self._chunks.values():
            self._rise(chunk.finish)
        return self._peak

    def _act(self, chunk: ChunkMemory, kind: str, stage: int, microbatch: int) -> None:
        work, _, phase = kind.rpartition(" ")
        if work == "receive":
            self._add(chunk.received if phase == "forward" else chunk.received_back)
        elif work == "send":
            self._release_sent(stage, phase)
            self._sent[stage, phase] = microbatch
        elif phase == "forward":
            self._rise(chunk.forward)
        elif self._sent.get((stage, "forward")) == microbatch:
            self._late.add((stage, microbatch))
            self._rise(chunk.backward_beside)
        else:
            self._rise(chunk.backward)

    def _release_sent(self, stage: int, phase: str) -> None:
        """Release the tensors of the last send of a phase."""
        microbatch = self._sent.pop((stage, phase), None)
        if microbatch is not None:
            chunk = self._chunks[stage]
            late = (stage, microbatch) in self._late
            self._add(
                -(
                    chunk.returned
                    if phase == "backward"
                    else chunk.sent_late
                    if late
                    else chunk.sent
                )
            )

    def _add(self, num_bytes: int) -> None:
        self._rise(Rise(num_bytes, num_bytes))

    def _rise(self, rise: Rise) -> None:
        self._peak = max(self._peak, self._live + rise.peak)
        self._live += rise.after
