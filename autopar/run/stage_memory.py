"""The peak of a stage under its schedule: the stage's work on fake tensors, in the order and with the names held of the real schedule.

What torch's schedules hold in local variables is held here in the same ones: the buffers of the last receive, the tensors of the last send.
Beyond two microbatches in flight each further one adds what it saves, and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.ambient import as_written
from autopar.capture._torch.fakes import new_fake_mode
from autopar.kernels import host
from autopar.kernels.collectives import fake_groups
from autopar.layout import local_shape
from autopar.request import Outputs
from autopar.run.effects import flat, lie_of, lying
from autopar.run.live import LiveBytes
from autopar.run.program import Program
from autopar.run.rehearsal import Rehearsal
from autopar.run.returned import Returned, parts_of
from autopar.run.stage_work import StageWork, outputs_kept

SIMULATED = 2  # microbatches in flight


@dataclass(frozen=True, slots=True)
class StagePeak:
    """Live tensor bytes of a stage on one rank, without the optimizer's state and the batch, which is the user's.

    Attributes:
        peak_bytes: over a step of all microbatches, parameters and buffers included. held_bytes: what each one in flight holds.
    """

    peak_bytes: int
    held_bytes: int


def trace_stage_peak(
    program: Program, schedule: str, num_in_flight: int, num_microbatches: int, outputs: Outputs, returned: Returned | None = None
) -> StagePeak:
    """Predict the memory of a stage by running its schedule on fake tensors.

    Args:
        num_in_flight: of this stage under this schedule. outputs: as in `autopar.run.staged_module`.
        returned: of the whole pipeline; where it waits, outputs are there, whole, from the last forward on, and the gradients by them
            through all backwards. What computing a loss of them takes is not counted.
    """
    waiting = returned if returned is not None and returned.waits else None
    trained = waiting is None or any(t.has_gradient for t in waiting.outputs)
    flying = min(num_in_flight, SIMULATED)
    num = flying if schedule == "gpipe" else min(num_microbatches, flying + 1)
    memory = LiveBytes()
    with new_fake_mode(), as_written():
        work, tensors = stage_work(program, outputs, memory)
        parts, given = batch_of(program, num)
        with memory:
            memory.register(x for part in parts for x in part.values())
            batch_bytes = memory.live_bytes  # the user's: parts are views of the batch
            memory.register((*tensors, *given.values()))
            parts = [{**part, **given} for part in parts]
            parameters, buffers = tensors[: len(program.parameters)], tensors[len(program.parameters) :]
            collected = {t.name for t in outputs_kept(program, outputs, num_microbatches)}
            work.begin((), parameters, buffers, parts, 1.0, keep=trained)
            held = _held(work, memory, sends=schedule == "gpipe" and waiting is None)
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
    return StagePeak(memory.peak_bytes - batch_bytes + (num_in_flight - flying) * held, held)


def batch_of(program: Program, num: int) -> tuple[list[dict[str, Tensor]], dict[str, Tensor]]:
    """The inputs of `num` microbatches by path, those of each, and those that all are given."""
    own = [t for t in program.inputs if not t.crosses]
    parts = [{t.name: torch.empty(t.shape, dtype=t.dtype) for t in own if not t.given} for _ in range(num)]
    return parts, {t.name: torch.empty(t.shape, dtype=t.dtype) for t in own if t.given}


def stage_work(program: Program, outputs: Outputs, memory: LiveBytes) -> tuple[StageWork, list[Tensor]]:
    """The stage's work on one rank, its parameters and buffers."""
    groups = fake_groups(program.mesh)
    place = tuple(group.coordinate for group in groups)
    executor = Rehearsal(program, groups, memory, outputs="full" if outputs == "full" else "local", last_queries=True)
    tensors = (*program.parameters, *program.buffers)
    shapes = [local_shape(t.view, t.layout, program.mesh.shape, place) for t in tensors]
    empty = [(host.empty if t.layout.host else torch.empty)(shape, dtype=t.dtype) for t, shape in zip(tensors, shapes, strict=True)]
    return StageWork(program, executor, torch.device("cpu")), empty


def _held(work: StageWork, memory: LiveBytes, *, sends: bool) -> int:
    """What one microbatch holds after its forward; under GPipe what it sent is held until the end."""
    before = memory.live_bytes
    work.arriving(0)
    work.forward(0)
    sent = work.leaving(0)
    if not sends:
        sent = []
    held = memory.live_bytes - before
    del sent
    return held


def put_together(work: StageWork) -> list[Tensor]:
    """Tensors as large as the batch's outputs, which are put together from those that were collected; a loss is a number in any case."""
    counted = [values if values[0].dim() else values[:1] for values in work.outputs.values()]
    return [torch.empty(sum(x.numel() for x in values), dtype=values[0].dtype, device=work.device) for values in counted]


def _collected(work: StageWork, num_more: int) -> None:
    """What microbatches that are not simulated leave until the step ends: outputs, which lie as those of the first one do."""
    shared = {x.untyped_storage()._cdata for x in work.read_by_all()}
    for _ in range(num_more):
        made: dict[int, Tensor] = {}
        for values in filter(None, work.outputs.values()):
            storage = values[0].untyped_storage()
            if storage._cdata in shared:
                values.append(values[0])
                continue
            base = made.setdefault(storage._cdata, flat(storage.nbytes(), values[0].dtype))
            values.append(lying(base, lie_of(values[0])))


def _forwards_first(work: StageWork, num: int, num_more: int, returned: Returned, *, trained: bool) -> None:
    """As `autopar.run.forwards_first` and `autopar.run.answered`, with what they hold."""
    for number in range(num):
        if number == num - 1:
            _collected(work, num_more)
        work.arriving(number)
        work.forward(number)
        sent = work.leaving(number)
    del sent
    made = {path: returned.how.join(path, values).contiguous() for path, values in work.outputs.items()}
    work.outputs.clear()
    for t in returned.outputs:  # those of other stages
        if t.name not in made:
            made[t.name] = torch.empty(t.shape, dtype=t.dtype, device=work.device)
    if trained:
        tangents = {t.name: torch.empty(t.shape, dtype=t.dtype, device=work.device) for t in returned.outputs if t.has_gradient}
        work.answer(parts_of(tangents, returned.how)[:num])
        for number in range(num):
            work.arriving_back(number)
            work.backward(number)
            sent = work.leaving_back(number)
        del sent
    work.finish()


# The names below are those of torch's schedules, for what they hold.


def _gpipe(work: StageWork, num: int, num_more: int) -> None:
    fwd_sends_to_wait, bwd_sends_to_wait = [], []
    for number in range(num):
        if number == num - 1:
            _collected(work, num_more)
        ops = work.arriving(number)
        work.forward(number)
        ops = work.leaving(number)
        fwd_sends_to_wait.append(ops)
    for number in range(num):
        ops = work.arriving_back(number)
        work.backward(number)
        ops = work.leaving_back(number)
        bwd_sends_to_wait.append(ops)


def _one_forward_one_backward(work: StageWork, num: int, warmup: int, num_more: int) -> None:
    fwd_sends: list[Tensor] = []
    bwd_sends: list[Tensor] = []
    send_work: list[Tensor] = []  # of the last send that was fired alone: gloo's holds what it has sent
    forwarded = 0
    for forwarded in range(1, warmup + 1):
        fwd_recvs = work.arriving(forwarded - 1)
        work.forward(forwarded - 1)
        fwd_sends = work.leaving(forwarded - 1)
        send_work = fwd_sends if forwarded < warmup else send_work
    _collected(work, num_more)
    for number in range(num):
        bwd_recvs = work.arriving_back(number)
        work.backward(number)
        bwd_sends = work.leaving_back(number)
        if forwarded < num:
            fwd_recvs = work.arriving(forwarded)
            work.forward(forwarded)
            fwd_sends = work.leaving(forwarded)
            forwarded += 1
        else:
            send_work = bwd_sends
    del fwd_recvs, fwd_sends, bwd_recvs, bwd_sends, send_work
