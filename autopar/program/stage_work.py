"""One rank's work in a pipeline: the pieces of a stage that a schedule runs, microbatch by
microbatch, without communication.

A schedule says when to receive, run forward, send, run backward. `StageWork` does each on the
graphs of its stage; nothing runs through autograd. Receive buffers are made when they are requested
and released by their last reader, so that only those of the microbatches in flight are held.
`StageWorker` runs it under the schedules of torch.distributed.pipelining;
`autopar.program.stage_memory` runs it on fake tensors.
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
    """A stage's program on this rank; `executor` runs it."""

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
        """Begin a step. If the model returns no loss, `answer` gives the tangents before backward.

        Args:
            wanted: paths of the outputs that are collected.
            parameters, buffers: local tensors as they rest. parts: the inputs of each microbatch,
                by path.
            weight: tangent of each microbatch's loss. keep: whether backward follows.
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
        """Forget everything that is received, saved or to be sent."""
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
        """Set the tangents of outputs, between forwards and backwards, if the model returns no
        loss.

        Args:
            tangents: of each microbatch, by path of an output, whole. absent: outputs without a
                tangent, including those that cross. unsent: inputs from the stage before that get
                no gradient.
        """
        self._answers, self._absent, self._unsent = tangents, absent, unsent

    def saved_values(self) -> list[Any]:
        """Return the values that are saved for backward, of all microbatches."""
        return [value for values in self._saved.values() for value in values]

    def named(self) -> list[tuple[str, Tensor]]:
        """Return the tensors that the user holds, with names for messages."""
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
        """Return the tensors whose memory outputs may share: parameters as forward takes them,
        buffers and the batch."""
        return [
            *self._parameters,
            *self._buffers,
            *(x for part in self._parts for x in part.values()),
        ]

    def finish(self) -> list[Tensor]:
        """End a step: return one gradient per parameter that has one, and release everything."""
        sums, gradients = self._sums, self._gradients
        self.clear()
        with torch.no_grad():
            return self.executor.end(sums) if sums else gradients

    def clear(self) -> None:
        """Release everything."""
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
        """Return new buffers for a microbatch's inputs from the stage before."""
        self._received[number] = [self._empty(t) for t in self._arriving]
        return self._received[number]

    def leaving_outputs(self, number: int) -> list[Tensor]:
        """Return and release a microbatch's outputs for the next stage."""
        return self._made.pop(number, [])

    def arriving_gradients(self, number: int) -> list[Tensor]:
        """Return new buffers for the gradients of a microbatch's outputs, from the next stage."""
        self._tangents[number] = [
            self._empty(t) for t in self._leaving if t.has_gradient and t.name not in self._absent
        ]
        return self._tangents[number]

    def leaving_gradients(self, number: int) -> list[Tensor]:
        """Return and release the gradients of a microbatch's inputs, for the stage before."""
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
        """Run backward on one microbatch and add up its gradients."""
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
            self._gradients = [] if self._sums else _apart(results)

    def _tangent(self, output: ProgramTensor, number: int) -> Tensor:
        """Return a microbatch's tangent of an output; zeros, which nothing should read, if the
        output has no part in the loss."""
        if output.name in self._absent:
            return self._empty(output).zero_()
        if output.is_loss:
            return torch.full(output.shape, self._weight, dtype=output.dtype, device=self.device)
        whole = self._answers[number][output.name]
        return local_part(
            whole, output.layout, self.program.mesh.shape, output.view, self._coordinate
        ).contiguous()

    def _empty(self, tensor: ProgramTensor) -> Tensor:
        shape = local_shape(tensor.view, tensor.layout, self.program.mesh.shape, self._coordinate)
        return torch.empty(shape, dtype=tensor.dtype, device=self.device)


def outputs_kept(
    program: StageProgram, outputs: Outputs, num_microbatches: int
) -> tuple[ProgramTensor, ...]:
    """Return the outputs of a stage that a call returns.

    These are all with ``"full"``, or if one stage runs one microbatch, whose parts are those of the
    whole batch; else the loss.

    Args:
        program: of the stage. outputs: which the user asked for. num_microbatches: of a step.
    """
    is_whole = num_microbatches == 1 and not any(
        t.crosses for t in (*program.inputs, *program.outputs)
    )
    return tuple(
        t for t in program.outputs if not t.crosses and (is_whole or is_returned(t, outputs))
    )


def _apart(gradients: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Return the gradients, each in memory of its own: one may share memory with another, or with
    an operand of the graph."""
    seen: set[int] = set()
    result: list[Tensor | None] = []
    for gradient in gradients:
        if gradient is None:  # nothing that has a part in the loss reaches the parameter
            result.append(gradient)
            continue
        key = gradient.untyped_storage()._cdata
        own = (
            key not in seen
            and gradient.is_contiguous()
            and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        )
        seen.add(key)
        result.append(gradient if own else gradient.clone())
    return result
