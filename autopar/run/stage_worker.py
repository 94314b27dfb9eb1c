"""One rank's work in a pipeline, as torch.distributed.pipelining's schedules ask for it.

A schedule says when to receive, run forward, send, run backward; `StageWorker` does each for one microbatch, on the graphs of its stage.
Nothing runs through autograd. Buffers for what arrives are made when they are asked for and go with their last reader, so that no
more than the microbatches in flight are held.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from autopar.layout import local_shape
from autopar.run.executor import Executor
from autopar.run.program import Program, ProgramTensor


class StageWorker(PipelineStage):
    """A stage's program on this rank.

    Args:
        program, executor: of this stage. number, num_stages: which of how many.
        group: the ranks of the pipeline, one per stage in order; None for a single stage.
    """

    def __init__(
        self, program: Program, executor: Executor, number: int, num_stages: int, device: torch.device, group: dist.ProcessGroup | None
    ) -> None:
        nothing = torch.empty(0, device=device)  # shapes are the program's own; the schedule needs no inference of them
        super().__init__(nn.Module(), number, num_stages, device, input_args=(nothing,), output_args=(nothing,), group=group)
        self.program, self.executor = program, executor
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
        weights: Sequence[float],
        *,
        keep: bool,
    ) -> None:
        """Before a step.

        Args:
            wanted: paths of the outputs that are collected.
            parameters, buffers: local tensors as the graphs see them. parts: the inputs of each microbatch, by path.
            weights: tangent of each microbatch's loss. keep: whether backward follows.
        """
        self._parameters, self._buffers, self._parts, self._weights, self._keep = parameters, buffers, parts, weights, keep
        self.outputs: dict[str, list[Tensor]] = {t.name: [] for t in self.program.outputs if not t.crosses and t.name in wanted}
        self.gradients: list[Tensor] = []
        self._received: dict[int, list[Tensor]] = {}
        self._made: dict[int, list[Tensor]] = {}
        self._saved: dict[int, list[Any]] = {}
        self._tangents: dict[int, list[Tensor]] = {}
        self._returning: dict[int, list[Tensor]] = {}

    def finish(self) -> list[Tensor]:
        """After a step: one gradient per parameter that has one. Lets go of everything."""
        gradients = self.gradients
        self.begin((), (), (), (), (), keep=False)
        return gradients

    # What schedules call.

    def clear_runtime_states(self) -> None:
        """`begin` and `finish` do."""

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Weights of losses do."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive what crosses from the stage before."""
        if not self.is_first:
            self._received[fwd_chunk_id] = [self._empty(t) for t in self._arriving]
        return self._moves(dist.irecv, self._received.get(fwd_chunk_id, []), -1)

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send what crosses to the stage after."""
        return self._moves(dist.isend, self._made.pop(fwd_chunk_id, []), 1)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of what was sent."""
        if not self.is_last:
            self._tangents[bwd_chunk_id] = [self._empty(t) for t in self._leaving if t.has_gradient]
        return self._moves(dist.irecv, self._tangents.get(bwd_chunk_id, []), 1)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of what was received."""
        return self._moves(dist.isend, self._returning.pop(bwd_chunk_id, []), -1)

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Tensor:
        """Run forward on one microbatch. What is returned is only for the schedule to hand back."""
        received = iter(self._received.pop(fwd_chunk_id, []))
        part = self._parts[fwd_chunk_id]
        inputs = [next(received) if t.crosses else part[t.name] for t in self.program.inputs]
        del received
        with torch.no_grad():
            outputs, saved = self.executor.forward(self._parameters, self._buffers, inputs, keep=self._keep)
        del inputs
        for tensor, value in zip(self.program.outputs, outputs, strict=True):
            if tensor.name in self.outputs:
                self.outputs[tensor.name].append(value)
        self._made[fwd_chunk_id] = [v.contiguous() for t, v in zip(self.program.outputs, outputs, strict=True) if t.crosses]
        if self._keep:
            self._saved[fwd_chunk_id] = saved
        return torch.empty(0)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        """Run backward on one microbatch and add up its gradients."""
        arrived = iter(self._tangents.pop(bwd_chunk_id, []))
        tangents = [
            next(arrived) if t.crosses else torch.full(t.shape, self._weights[bwd_chunk_id], dtype=t.dtype, device=self.device)
            for t in self.program.outputs
            if t.has_gradient
        ]
        del arrived
        with torch.no_grad():
            results = self.executor.backward(self._saved.pop(bwd_chunk_id), tangents)
            self._returning[bwd_chunk_id] = [g.contiguous() for g in results[self._trained :]]
            del results[self._trained :]
            if self.gradients:
                for total, gradient in zip(self.gradients, results, strict=True):
                    total.add_(gradient)
            else:  # a gradient may share memory with another, or with what the graph was given
                self.gradients = _apart(results)

    def _empty(self, tensor: ProgramTensor) -> Tensor:
        shape = local_shape(tensor.view, tensor.layout, self.program.mesh.shape, self._coordinate)
        return torch.empty(shape, dtype=tensor.dtype, device=self.device)

    def _moves(self, kind: Any, tensors: Sequence[Tensor], step: int) -> list[dist.P2POp]:
        if not tensors:
            return []
        assert self.group is not None, "a pipeline of several stages has a group"
        peer = dist.get_global_rank(self.group, self.stage_index + step)
        return [dist.P2POp(kind, tensor, peer, self.group) for tensor in tensors]


def _apart(gradients: Sequence[Tensor]) -> list[Tensor]:
    """The gradients, each with memory of its own, so that each can be added to."""
    seen: set[int] = set()
    result = []
    for gradient in gradients:
        key = gradient.untyped_storage()._cdata
        own = (
            key not in seen
            and gradient.is_contiguous()
            and gradient.untyped_storage().nbytes() == gradient.numel() * gradient.element_size()
        )
        seen.add(key)
        result.append(gradient if own else gradient.clone())
    return result
