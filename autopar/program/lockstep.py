"""The lockstep interpreter, which runs a whole step of a program for all ranks in one process.

For each microbatch, it runs forward through the stages, then backward through the stages in reverse
order. A schedule determines when a stage processes a microbatch, but not the results: under every
schedule, gradients accumulate in the order of microbatches, as here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._pytree import tree_map

from autopar.capture.execute import device_of, place_on_device, promote, promoted_dtype
from autopar.capture.graphs import copy_graph
from autopar.capture.normalize.tangents import tangent_of
from autopar.core.autocast_state import as_written
from autopar.core.layout import local_shape
from autopar.kernels.collectives import FIRST
from autopar.ops import random
from autopar.program.executor import parts_of
from autopar.program.interpreter import Observer, Ranks, Record, join_results
from autopar.program.program import (
    LazyGraphModule,
    Microbatches,
    Program,
    ProgramTensor,
    StageProgram,
)
from autopar.program.splitting import split

Locals = list[Any]  # one tensor per rank of a stage


def parts_in(
    how: Microbatches,
    inputs: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    dtype: torch.dtype | None,
) -> list[dict[str, Tensor]]:
    """Return the inputs of each microbatch, including values computed from the whole batch.

    Args:
        how: the microbatches.
        inputs: the inputs of the batch, by path.
        buffers: the buffers, by name.
        dtype: the dtype to compute in; None keeps the dtypes of the tensors.
    """

    def bound(count: fx.GraphModule) -> fx.GraphModule:
        """Return a graph that computes in `dtype` on the inputs' device."""
        graph = copy_graph(count.graph)
        for node in graph.nodes:
            node.args, node.kwargs = tree_map(
                lambda a: promoted_dtype(a, dtype),
                (node.args, place_on_device(node.kwargs, device)),
            )
        return LazyGraphModule(count, graph)

    device = device_of(inputs.values())
    wide = {path: promote(x, dtype) for path, x in inputs.items()}
    return how.bound(bound).parts(wide, {name: promote(x, dtype) for name, x in buffers.items()})


@dataclass(frozen=True, slots=True)
class Lockstep:
    """The results of a program as full tensors.

    Attributes:
        outputs: the outputs, by path.
        gradients: the gradients of parameters in their stored shapes, by name. Gradients of inputs
            are named by `autopar.capture.trace.gradient_name`.
        buffers: the new values of mutated buffers, by name.
        records: the communication steps that ran, as tuples (phase, node key, Collective).
    """

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor]
    records: tuple[Record, ...]


def run_lockstep(
    program: Program,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    inputs: Mapping[str, Tensor] | Sequence[Tensor],
    *,
    tangent: float = 1.0,
    dtype: torch.dtype | None = None,
    observe: Observer | None = None,
    tolerance: float | None = None,
) -> Lockstep:
    """Run a step of all microbatches: forward and, if a parameter or an input has a gradient,
    backward.

    Without a loss, backward begins with generated tangents of the batch's outputs
    (`autopar.capture.normalize.tangents`), which are divided among microbatches.

    Args:
        program: the program of all stages.
        parameters, buffers: full tensors in their stored shapes, by name.
        inputs: full tensors of the batch, by path or in the order of ``program.inputs``.
        tangent: the gradient of the loss; without a loss, the factor of the generated tangents.
        dtype: if given, every floating-point tensor and every floating-point dtype in a node's
            arguments is promoted to this dtype, and complex ones to the corresponding complex
            dtype.
        observe: called with (phase, node, results by rank) after each node.
        tolerance: the largest difference between replicas, relative to the largest magnitude. The
            default is 1e-11 in double precision, 1e-2 for 16-bit dtypes, and 1e-5 otherwise.

    Raises:
        VerificationError: if replicas differ or a node fails. The message names the node, its
            module and the source line.
    """
    if not isinstance(inputs, Mapping):
        inputs = {t.name: x for t, x in zip(program.inputs, inputs, strict=True)}
    how = program.microbatches
    parts = parts_in(how, inputs, buffers, dtype)
    device = device_of((*parameters.values(), *inputs.values()))
    tangents = _tangents_of_parts(program, dtype, device, tangent)
    trained = any(
        t.has_gradient
        for stage in program.stages
        for t in (*stage.parameters, *stage.input_gradients)
    )
    stages = [_StageRun(p, parameters, dtype, observe, tolerance, device) for p in program.stages]
    state = dict(buffers)
    outputs: dict[str, list[Tensor]] = {}
    new_buffers: dict[str, Tensor] = {}
    with as_written():
        for part, answers in zip(parts, tangents, strict=True):
            crossing: dict[str, Locals] = {}
            for stage in stages:
                own_outputs, crossing, changed = stage.forward(part, crossing, state)
                new_buffers |= changed
                for path, value in own_outputs.items():
                    outputs.setdefault(path, []).append(value)
            if random.STATE in new_buffers:
                state[random.STATE] = new_buffers[random.STATE]
            returning: dict[str, Locals] = {}
            for stage in reversed(stages) if trained else ():
                returning = stage.backward(returning, how.weight * tangent, answers)
        gradients = _join_gradients(stages) if trained else {}
    full_outputs = {
        path: how.join(path, values) for path, values in outputs.items() if path in how.outputs
    }
    records: tuple[Record, ...] = tuple(record for stage in stages for record in stage.run.records)
    return Lockstep(full_outputs, gradients, new_buffers, records)


def _join_gradients(stages: Sequence[_StageRun]) -> dict[str, Tensor]:
    """Return the full gradients after the last microbatch, summed over the stages that hold a
    parameter."""
    gradients: dict[str, Tensor] = {}
    for stage in stages:
        stage.end()
        for name, value in stage.joined_gradients().items():
            gradients[name] = gradients[name] + value if name in gradients else value
    return gradients


def _tangents_of_parts(
    program: Program, dtype: torch.dtype | None, device: torch.device, scale: float = 1.0
) -> list[dict[str, Tensor]]:
    """Return the tangents of each microbatch, by output path. The tangent of the loss is left out,
    since it is the weight of the microbatch."""
    ends = [t for t in program.outputs if t.has_gradient and not t.is_loss]
    full_tangents = {
        t.name: tangent_of(
            t.name, t.shape, promoted_dtype(t.dtype, dtype), is_loss=False, scale=scale
        ).to(device)
        for t in ends
    }
    return parts_of(full_tangents, program.microbatches)


class _StageRun:
    """The state of one stage on all ranks: parameters, saved values, and sums of gradients."""

    def __init__(
        self,
        program: StageProgram,
        parameters: Mapping[str, Tensor],
        dtype: torch.dtype | None,
        observe: Observer | None,
        tolerance: float | None,
        device: torch.device,
    ) -> None:
        self.program, self.dtype, self.tolerance = program, dtype, tolerance
        self.run = Ranks(program.mesh, dtype, observe, device)
        self.parameters = [
            split(promote(parameters[t.name], dtype), t.layout, program.mesh, t.view)
            for t in program.parameters
        ]
        if program.begin is not None:
            self.parameters = self.run(program.begin, "step", self.parameters)
        self.saved: list[Locals] = []
        self.sums = [self._unset(t) for t in program.sums]
        self.added = False
        self.gradients: list[Locals] = []
        self.input_gradients: list[Locals] = []

    def forward(
        self,
        part: Mapping[str, Tensor],
        crossing: Mapping[str, Locals],
        state: Mapping[str, Tensor],
    ) -> tuple[dict[str, Tensor], dict[str, Locals], dict[str, Tensor]]:
        """Run forward on one microbatch.

        Args:
            part: the inputs of the microbatch, by path.
            crossing: the tensors from the previous stage, by path.
            state: the buffers, by name.

        Returns:
            The model outputs that this stage computes, the tensors for the next stage by path, and
            the new values of buffers.
        """
        p = self.program
        operands = [*self.parameters]
        operands += [
            split(promote(state[t.name], self.dtype), t.layout, p.mesh, t.view) for t in p.buffers
        ]
        for t in p.inputs:
            operands.append(
                crossing[t.name]
                if t.crosses
                else split(promote(part[t.name], self.dtype), t.layout, p.mesh, t.view)
            )
        results = self.run(p.forward, "forward", operands)
        mutated = [t for name in p.mutated for t in p.buffers if t.name == name]
        num = len(p.outputs)
        self.saved = results[len(results) - p.num_saved :]
        leaving = {t.name: r for t, r in zip(p.outputs, results, strict=False) if t.crosses}
        own_outputs = [t for t in p.outputs if not t.crosses]
        outputs = join_results(
            p.forward, results[: len(own_outputs)], own_outputs, p.mesh, self.tolerance
        )
        changed = join_results(
            p.forward, results[num : num + len(mutated)], mutated, p.mesh, self.tolerance, num
        )
        return outputs, leaving, changed

    def backward(
        self, returning: Mapping[str, Locals], weight: float, answers: Mapping[str, Tensor]
    ) -> dict[str, Locals]:
        """Run backward on one microbatch, and accumulate gradients.

        Args:
            returning: the gradients from the next stage, by path.
            weight: the tangent of the loss.
            answers: the tangents of other outputs, by path.

        Returns:
            The gradients for the previous stage, by path.
        """
        p = self.program
        tangents = [
            returning[t.name] if t.crosses else self._tangent(t, weight, answers)
            for t in p.outputs
            if t.has_gradient
        ]
        results = self.run(
            p.backward,
            "backward",
            [*self.saved, *tangents, *self.sums],
            None if self.added else FIRST,
        )
        self.added = True
        num = sum(t.has_gradient for t in p.parameters)
        self.gradients = results[:num]
        named = zip((t for t in p.inputs if t.has_gradient), results[num:], strict=True)
        returned = {t.name: (t, r) for t, r in named}
        self.input_gradients = [r for t, r in returned.values() if not t.crosses]
        return {name: r for name, (t, r) in returned.items() if t.crosses}

    def joined_gradients(self) -> dict[str, Tensor]:
        """Return the full gradients of parameters, by name, and those of the batch's inputs, named
        by `autopar.capture.trace.gradient_name`."""
        p = self.program
        trained = [t for t in p.parameters if t.has_gradient]
        full_gradients = join_results(
            p.end or p.backward, self.gradients, trained, p.mesh, self.tolerance
        )
        return full_gradients | join_results(
            p.backward,
            self.input_gradients,
            p.input_gradients,
            p.mesh,
            self.tolerance,
            len(trained),
        )

    def end(self) -> None:
        """Convert sums to gradients in the storage layouts of parameters, after the last
        microbatch."""
        if self.program.end is not None:
            self.gradients = self.run(self.program.end, "step", self.sums)

    def _unset(self, tensor: ProgramTensor) -> Locals:
        """Return a separate tensor for each rank, filled with NaN, so that a sum that is not
        written is detected."""
        mesh = self.program.mesh
        places = map(mesh.coordinate, range(mesh.num_devices))
        shapes = [local_shape(tensor.view, tensor.layout, mesh.shape, place) for place in places]
        return [
            promote(
                torch.full(shape, math.nan, dtype=tensor.dtype, device=self.run.device), self.dtype
            )
            for shape in shapes
        ]

    def _tangent(
        self, output: ProgramTensor, weight: float, answers: Mapping[str, Tensor]
    ) -> Locals:
        mesh = self.program.mesh
        if not output.is_loss:
            return split(answers[output.name], output.layout, mesh, output.view)
        return [
            torch.full(
                output.shape, weight, dtype=self.dtype or output.dtype, device=self.run.device
            )
        ] * mesh.num_devices
