"""Predict the peak of live tensor bytes of a step, on fake tensors. The same counter measures it on
real ones (`autopar.program.abstract_executor`)."""

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
        peak_bytes: from the start of forward to the end of backward.
        resident_bytes: parameters, buffers and the batch, before forward.
        kept_bytes: what lives between forward and backward beyond these, outputs included.
        final_bytes: what is left after backward beyond these: gradients and outputs.
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
    """Predict the memory of a step by running it on fake tensors, as `ParallelModule` does on real
    ones.

    If the user computes the loss from the outputs, the gradients that come back are counted, but
    not what computing the loss takes.

    Args:
        program: the program of the step. batch, outputs: see `autopar.program.executor.Executor`.
        coordinate: the rank's place in the mesh; by default one that needs as much as any: with the
            largest part of everything, as the origin has, and the last part of causal attention's
            queries.
        train: whether backward runs; else the forward of ``torch.no_grad()``.
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
            """A fake tensor for the part of a tensor at this place. It is made by hand, since the
            dispatch of the modes takes ten times as long."""
            if tensor.layout.host:
                return host.empty(_shape(tensor, program, place), tensor.dtype)
            with no_modes():
                plain = torch.empty(
                    _shape(tensor, program, place), dtype=tensor.dtype, device="meta"
                )
                made = fake_like(plain, torch.device("cpu"), mode)
            memory.register((made,))
            return made

        parameters = [empty(t) for t in program.parameters]
        buffers = [empty(t) for t in program.buffers]
        given = [batch == "global" and not t.crosses for t in program.inputs]
        inputs = [
            torch.empty(t.shape, dtype=t.dtype) if whole else empty(t)
            for t, whole in zip(program.inputs, given, strict=True)
        ]
        resting = parameters  # they rest beside what is gathered of them
        parameters, sums = executor.begin(resting), executor.new_sums()
        resident = memory.live_bytes
        memory.reset_peak()
        results, saved = executor.forward(parameters, buffers, inputs, keep=train)
        kept = memory.live_bytes - resident
        gradients = []
        if train and any(t.has_gradient for t in (*program.parameters, *program.inputs)):
            # autograd, or the schedule, holds tangents until backward ends, and so does this name
            tangents = [empty(t) for t in program.outputs if t.has_gradient]
            gradients = executor.backward(saved, list(tangents), sums)
            del tangents
        final = memory.live_bytes - resident
        del gradients, sums, resting, results
    return PeakMemory(memory.peak_bytes, resident, kept, final)


class NodePeak(NamedTuple):
    """The peak of live bytes while one node of a program runs."""

    phase: str
    node: fx.Node
    peak_bytes: int


def node_peaks(
    program: StageProgram, *, batch: Batch = "global", outputs: Outputs = "full"
) -> tuple[NodePeak, ...]:
    """Predict the peak while each node of a step runs, in order, without optimizer state.

    The largest of these is the peak of `trace_peak`, except for slices before the graphs run and
    gathers after them.
    """
    return all_peaks(program, batch=batch, outputs=outputs)[1]


def all_peaks(
    program: StageProgram, *, batch: Batch = "global", outputs: Outputs = "full"
) -> tuple[PeakMemory, tuple[NodePeak, ...]]:
    """Return the results of `trace_peak` and `node_peaks` from one run."""
    found: list[NodePeak] = []
    whole = _run(
        program, LiveBytes(), batch, outputs, seen=lambda *each: found.append(NodePeak(*each))
    )
    return whole, tuple(found)


def _shape(
    tensor: ProgramTensor, program: StageProgram, coordinate: tuple[int, ...]
) -> tuple[int, ...]:
    return local_shape(tensor.view, tensor.layout, program.mesh.shape, coordinate)
