"""The work of one rank in a pipeline: the actions of a stage that a schedule runs on each
microbatch, without communication.

A schedule determines when to receive, run forward, send, and run backward. `StageWork` runs these
actions with the graphs of its stage, without autograd. Receive buffers are created when they are
requested and freed by their last reader, so that only those of the microbatches in flight exist.
`autopar.runtime.pipeline_runtime.StageWorker` runs `StageWork` under the schedules of
torch.distributed.pipelining; `autopar.program.stage_memory` runs it on fake tensors.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.core.layout import local_shape
from autopar.program.executor import Executor, is_returned
from autopar.program.program import ProgramTensor, StageProgram
from autopar.program.splitting import local_part
from autopar.request import Outputs


class StageWork:
    """The work of a stage on this rank.

    Args:
        program: the program of the stage.
        executor: runs the graphs of the program.
        device: the device of this rank.
    """

    def __init__(self, program: StageProgram, executor: Executor, device: torch.device) -> None:
        self.program, self.executor, self.device = program, executor, device
        self._coordinate = [g.coordinate for g in executor.groups]
        self._arriving = [t for t in program.inputs if t.crosses]
        self._leaving = [t for t in program.outputs if t.crosses]
        self._trained = sum(t.has_gradient for t in program.parameters)

    def begin(
        self,
        wanted: Collection[str],
        parameters: Sequence[Tensor],
        buffers: Sequence[Tensor],
        parts: Sequence[Mapping[str, Tensor]],
        weight: float,
        *,
        keep: bool,
    ) -> None:
        """Begin a step. If the model returns no loss, call `answer` before backward.

        Args:
            wanted: the paths of the outputs that are collected.
            parameters, buffers: local tensors in their storage layouts.
            parts: the inputs of each microbatch, by path.
            weight: the tangent of each microbatch's loss.
            keep: whether backward follows.
        """
        self._resting, self._buffers, self._parts, self._weight, self._keep = (
            parameters,
            buffers,
            parts,
            weight,
            keep,
        )
        with torch.no_grad():
            self._parameters = self.executor.begin(parameters)
        self._sums = self.executor.new_sums() if keep else []
        self._added = False
        self.answer(())
        self._gradients: list[Tensor] = []
        self.outputs: dict[str, list[Tensor]] = {
            t.name: [] for t in self.program.outputs if not t.crosses and t.name in wanted
        }
        self._forget()

    def _forget(self) -> None:
        """Release all tensors that were received, are saved, or will be sent."""
        self._received: dict[int, list[Tensor]] = {}
        self._made: dict[int, list[Tensor]] = {}
        self._saved: dict[int, list[Any]] = {}
        self._tangents: dict[int, list[Tensor]] = {}
        self._returning: dict[int, list[Tensor]] = {}

    def answer(
        self,
        tangents: Sequence[Mapping[str, Tensor]],
        absent: frozenset[str] = frozenset(),
        unsent: frozenset[str] = frozenset(),
    ) -> None:
        """Set the tangents of outputs of a model without a loss, after all forwards.

        Args:
            tangents: the full tangents of each microbatch, by output path.
            absent: the outputs without a tangent, including those for the next stage.
            unsent: the inputs from the previous stage that get no gradient.
        """
        self._answers, self._absent, self._unsent = tangents, absent, unsent

    def saved_values(self) -> list[Any]:
        """Return the saved values of all microbatches."""
        return [value for values in self._saved.values() for value in values]

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that the user holds, with their names for messages."""
        named = [
            (f"parameter {t.name!r}", x)
            for t, x in zip(self.program.parameters, self._resting, strict=True)
        ]
        named += [
            (f"buffer {t.name!r}", x)
            for t, x in zip(self.program.buffers, self._buffers, strict=True)
        ]
        return named + [(f"input {name!r}", x) for part in self._parts for name, x in part.items()]

    def read_by_all(self) -> list[Tensor]:
        """Return the tensors with which outputs may share memory: parameters in the layouts of
        forward, buffers, and the batch."""
        return [
            *self._parameters,
            *self._buffers,
            *(x for part in self._parts for x in part.values()),
        ]

    def finish(self) -> list[Tensor]:
        """End a step. Return the gradients of trained parameters, and release all tensors."""
        sums, gradients = self._sums, self._gradients
        self.clear()
        with torch.no_grad():
            return self.executor.end(sums) if sums else gradients

    def clear(self) -> None:
        """Release all tensors."""
        self._parameters, self._buffers, self._parts, self._sums, self._gradients = (
            [],
            (),
            (),
            [],
            [],
        )
        self._resting = ()
        self.answer(())
        self._forget()

    def arriving_inputs(self, number: int) -> list[Tensor]:
        """Return new buffers for a microbatch's inputs from the previous stage."""
        self._received[number] = [self._empty(t) for t in self._arriving]
        return self._received[number]

    def leaving_outputs(self, number: int) -> list[Tensor]:
        """Return and release a microbatch's outputs for the next stage."""
        return self._made.pop(number, [])

    def arriving_gradients(self, number: int) -> list[Tensor]:
        """Return new buffers for the gradients of a microbatch's outputs from the next stage."""
        self._tangents[number] = [
            self._empty(t) for t in self._leaving if t.has_gradient and t.name not in self._absent
        ]
        return self._tangents[number]

    def leaving_gradients(self, number: int) -> list[Tensor]:
        """Return and release the gradients of a microbatch's inputs for the previous stage."""
        return self._returning.pop(number, [])

    def forward(self, number: int) -> None:
        """Run forward on one microbatch."""
        received = iter(self._received.pop(number, []))
        part = self._parts[number]
        inputs = [next(received) if t.crosses else part[t.name] for t in self.program.inputs]
        del received
        with torch.no_grad():
            outputs, saved = self.executor.forward(
                self._parameters, self._buffers, inputs, keep=self._keep
            )
        del inputs
        for tensor, value in zip(self.program.outputs, outputs, strict=True):
            if tensor.name in self.outputs:
                self.outputs[tensor.name].append(value)
        self._made[number] = [
            v.contiguous() for t, v in zip(self.program.outputs, outputs, strict=True) if t.crosses
        ]
        if self._keep:
            self._saved[number] = saved

    def backward(self, number: int) -> None:
        """Run backward on one microbatch, and accumulate its gradients."""
        arrived = iter(self._tangents.pop(number, []))
        ends = [t for t in self.program.outputs if t.has_gradient]
        tangents = [
            next(arrived) if t.crosses and t.name not in self._absent else self._tangent(t, number)
            for t in ends
        ]
        absent = frozenset(place for place, t in enumerate(ends) if t.name in self._absent)
        del arrived
        with torch.no_grad():
            first = not self._added and bool(self._sums)
            results = self.executor.backward(
                self._saved.pop(number), tangents, self._sums, first=first, absent=absent
            )
            self._added = True
            ends = [t for t in self.program.inputs if t.has_gradient]
            pairs = zip(ends, results[self._trained :], strict=True)
            self._returning[number] = [
                g.contiguous() for t, g in pairs if t.crosses and t.name not in self._unsent
            ]
            del results[self._trained :], pairs
            self._gradients = [] if self._sums else _copy_shared_gradients(results)

    def _tangent(self, output: ProgramTensor, number: int) -> Tensor:
        """Return a microbatch's tangent of an output. It is zero if the loss does not depend on the
        output."""
        if output.name in self._absent:
            return self._empty(output).zero_()
        if output.is_loss:
            return torch.full(output.shape, self._weight, dtype=output.dtype, device=self.device)
        tangent = self._answers[number][output.name]
        return local_part(
            tangent, output.layout, self.program.mesh.shape, output.view, self._coordinate
        ).contiguous()

    def _empty(self, tensor: ProgramTensor) -> Tensor:
        shape = local_shape(tensor.view, tensor.layout, self.program.mesh.shape, self._coordinate)
        return torch.empty(shape, dtype=tensor.dtype, device=self.device)


def outputs_kept(
    program: StageProgram, outputs: Outputs, num_microbatches: int
) -> tuple[ProgramTensor, ...]:
    """Return the outputs of a stage that a call returns. These are all outputs with ``"full"``, or
    if there is one stage and one microbatch; otherwise only the loss.

    Args:
        program: the program of the stage.
        outputs: the form of outputs that the user selected.
        num_microbatches: the number of microbatches per step.
    """
    is_whole = num_microbatches == 1 and not any(
        t.crosses for t in (*program.inputs, *program.outputs)
    )
    return tuple(
        t for t in program.outputs if not t.crosses and (is_whole or is_returned(t, outputs))
    )


def _copy_shared_gradients(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients in separate memory. A gradient that shares memory with another one, or
    with an operand of the graph, is copied."""
    known: set[int] = set()
    result: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is None:  # the parameter does not affect the loss
            result.append(gradient)
            continue
        key = gradient.untyped_storage()._cdata
        is_separate = (
            key not in known
            and gradient.is_contiguous()
            and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        )
        known.add(key)
        result.append(gradient if is_separate else gradient.clone())
    return result
