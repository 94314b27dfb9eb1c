"""Prediction of the peak of live tensor bytes of a step, with fake tensors. The same counter
measures the peak with real tensors (`autopar.program.abstract_executor`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, fx

from autopar.capture.dynamo.fakes import fake_like, new_fake_mode, no_modes
from autopar.core.autocast_state import as_written
from autopar.core.layout import local_shape
from autopar.kernels import host
from autopar.kernels.collectives import fake_groups
from autopar.program.abstract_executor import LiveBytes, Rehearsal, Seen
from autopar.program.program import ProgramTensor, StageProgram
from autopar.request import Batch, Outputs


@dataclass(frozen=True, slots=True)
class PeakMemory:
    """Live tensor bytes of one step on one rank, without optimizer state.

    Attributes:
        peak_bytes: the peak from the start of forward to the end of backward.
        resident_bytes: the bytes of parameters, buffers and the batch, before forward.
        kept_bytes: the additional bytes between forward and backward, including outputs.
        final_bytes: the additional bytes after backward: gradients and outputs.
    """

    peak_bytes: int
    resident_bytes: int
    kept_bytes: int
    final_bytes: int


def trace_peak(
    program: StageProgram,
    *,
    batch: Batch = "global",
    outputs: Outputs = "full",
    coordinate: tuple[int, ...] | None = None,
    train: bool = True,
) -> PeakMemory:
    """Predict the memory of a step by running it on fake tensors, like `ParallelModule` on real
    tensors.

    If the user computes the loss from the outputs, the gradients of outputs count, but the memory
    for computing the loss does not.

    Args:
        program: the program of the step.
        batch, outputs: see `autopar.program.executor.Executor`.
        coordinate: the coordinate of the rank on the mesh. By default, the result is an upper bound
            for all ranks: it assumes the largest shard of every tensor, which the origin of the
            mesh holds, and the last shard of causal attention's queries.
        train: whether backward runs; otherwise forward runs as under ``torch.no_grad()``.
    """
    return _run(program, LiveBytes(), batch, outputs, coordinate, train)


def _run(
    program: StageProgram,
    memory: LiveBytes,
    batch: Batch,
    outputs: Outputs,
    coordinate: tuple[int, ...] | None = None,
    train: bool = True,
    seen: Seen | None = None,
) -> PeakMemory:
    groups = fake_groups(program.mesh, coordinate)
    place = tuple(group.coordinate for group in groups)
    executor = Rehearsal(
        program,
        groups,
        memory,
        batch=batch,
        outputs=outputs,
        seen=seen,
        unread=True,
        last_queries=coordinate is None,
    )
    with new_fake_mode() as mode, memory, as_written():

        def empty(tensor: ProgramTensor) -> Tensor:
            """Return a fake tensor for this rank's shard. It is created without the modes, whose
            dispatch takes ten times as long."""
            if tensor.layout.host:
                return host.empty(_shape(tensor, program, place), tensor.dtype)
            with no_modes():
                plain = torch.empty(
                    _shape(tensor, program, place), dtype=tensor.dtype, device="meta"
                )
                fake = fake_like(plain, torch.device("cpu"), mode)
            memory.register((fake,))
            return fake

        parameters = [empty(t) for t in program.parameters]
        buffers = [empty(t) for t in program.buffers]
        passed_whole = [batch == "global" and not t.crosses for t in program.inputs]
        inputs = [
            torch.empty(t.shape, dtype=t.dtype) if whole else empty(t)
            for t, whole in zip(program.inputs, passed_whole, strict=True)
        ]
        stored = parameters  # stored parameters stay alive next to the gathered ones
        parameters, sums = executor.begin(stored), executor.new_sums()
        resident = memory.live_bytes
        memory.reset_peak()
        results, saved = executor.forward(parameters, buffers, inputs, keep=train)
        saved_bytes = memory.live_bytes - resident
        gradients = []
        if train and any(t.has_gradient for t in (*program.parameters, *program.inputs)):
            # autograd or the schedule holds tangents until backward ends, and so does this variable
            tangents = [empty(t) for t in program.outputs if t.has_gradient]
            gradients = executor.backward(saved, list(tangents), sums)
            del tangents
        final = memory.live_bytes - resident
        del gradients, sums, stored, results
    return PeakMemory(memory.peak_bytes, resident, saved_bytes, final)


class NodePeak(NamedTuple):
    """The peak of live bytes while one node of a program runs."""

    phase: str
    node: fx.Node
    peak_bytes: int


def node_peaks(
    program: StageProgram, *, batch: Batch = "global", outputs: Outputs = "full"
) -> tuple[NodePeak, ...]:
    """Predict the peak while each node of a step runs, in order, without optimizer state.

    The largest of these peaks equals that of `trace_peak`, unless the peak is reached while inputs
    are sharded before the graphs run or outputs are gathered after them.
    """
    return all_peaks(program, batch=batch, outputs=outputs)[1]


def all_peaks(
    program: StageProgram, *, batch: Batch = "global", outputs: Outputs = "full"
) -> tuple[PeakMemory, tuple[NodePeak, ...]]:
    """Return the results of `trace_peak` and `node_peaks` from one run."""
    peaks: list[NodePeak] = []
    step_peak = _run(
        program, LiveBytes(), batch, outputs, seen=lambda *each: peaks.append(NodePeak(*each))
    )
    return step_peak, tuple(peaks)


def _shape(
    tensor: ProgramTensor, program: StageProgram, coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    return local_shape(tensor.view, tensor.layout, program.mesh.shape, coordinate)
