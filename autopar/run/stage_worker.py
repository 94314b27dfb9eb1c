"""`StageWorker`: a stage's work under the schedules of torch.distributed.pipelining."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from autopar.run.stage_work import StageWork
from autopar.run.transfers import Transfers


class StageWorker(PipelineStage):
    """What schedules call; the work is `work`.

    Args:
        number, num_stages: which stage of how many. group: the ranks of the pipeline, one per stage in order.
    """

    def __init__(self, work: StageWork, number: int, num_stages: int, group: dist.ProcessGroup) -> None:
        nothing = torch.empty(0, device=work.device)  # shapes are the program's own; the schedule needs no inference of them
        super().__init__(nn.Module(), number, num_stages, work.device, input_args=(nothing,), output_args=(nothing,), group=group)
        self.work, self._transfers = work, Transfers(group)

    def clear_runtime_states(self) -> None:
        """The work's `begin` and `finish` do."""

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Weights of losses do."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive what crosses from the stage before."""
        return [] if self.is_first else self._moves("receive forward", self.work.arriving(fwd_chunk_id))

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send what crosses to the stage after."""
        return self._moves("send forward", self.work.leaving(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the gradients of what was sent."""
        return [] if self.is_last else self._moves("receive backward", self.work.arriving_back(bwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the gradients of what was received."""
        return self._moves("send backward", self.work.leaving_back(bwd_chunk_id))

    def forward_one_chunk(
        self, fwd_chunk_id: int, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None, save_forward_output: bool = True
    ) -> Tensor:
        """Run forward on one microbatch. What is returned is only for the schedule to hand back."""
        self.work.forward(fwd_chunk_id)
        return torch.empty(0)

    def backward_one_chunk(self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False) -> None:
        """Run backward on one microbatch and add up its gradients."""
        self.work.backward(bwd_chunk_id)

    def _moves(self, kind: str, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        return self._transfers.moves(kind, tensors, self.stage_index)
