"""The measured peak memory of a step of one rank, with process groups that do nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.layout import local_shape
from autopar.kernels import host
from autopar.kernels.collectives import fake_groups
from autopar.program.abstract_executor import LiveBytes
from autopar.program.executor import Executor
from autopar.program.program import ProgramTensor, StageProgram
from autopar.request import Outputs


def measured_peak(
    program: StageProgram,
    batch: Mapping[str, Any],
    outputs: Outputs = "full",
    *,
    train: bool = True,
    coordinate: Sequence[int] | None = None,
) -> tuple[int, list[Tensor]]:
    """Return the peak in bytes, defined as in `autopar.program.peak_memory.trace_peak`, and the
    gradients of the rank at a coordinate, by default the origin."""
    executor, memory = (
        Executor(program, fake_groups(program.mesh, coordinate), outputs=outputs),
        LiveBytes(),
    )

    def local(tensors: tuple[ProgramTensor, ...]) -> list[Tensor]:
        shapes = [local_shape(t.view, t.layout, program.mesh.shape, coordinate) for t in tensors]
        return [
            (host.empty if t.layout.host else torch.empty)(s, dtype=t.dtype).zero_()
            for t, s in zip(tensors, shapes, strict=True)
        ]

    with memory, torch.no_grad():
        parameters, buffers = local(program.parameters), local(program.buffers)
        inputs = [batch[t.name].clone() for t in program.inputs]
        memory.reset_peak()
        results, saved = executor.forward(parameters, buffers, inputs, keep=train)
        if not train:
            return memory.peak_bytes, []
        tangents = [
            torch.ones_like(r)
            for r, t in zip(results, program.outputs, strict=True)
            if t.has_gradient
        ]
        gradients = executor.backward(saved, list(tangents))
        return memory.peak_bytes, gradients
