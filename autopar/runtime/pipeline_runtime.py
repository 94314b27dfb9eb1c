"""The calls of one rank of a pipeline: its schedule, its transfers, and the exchange of gradients
and outputs. `autopar.runtime.scheduled_calls` runs them for the module that the user sees."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from autopar.program.executor import UnusedGradients
from autopar.program.program import Microbatches, Program, ProgramTensor
from autopar.program.stage_work import StageWork
from autopar.program.transfers import ForwardsFirst, Interleaving, Transfers
from autopar.runtime.dtensor import hold_value
from autopar.runtime.loss_scaling import Backwards, computes_in_fp16
from autopar.runtime.parameters import Storage
from autopar.runtime.rank_comm import by_all
from autopar.runtime.rank_consistency import check_tangents
from autopar.runtime.tensor_guards import WatchedTensors

# --------------------------------------------------------------------------------------------------
# Communication between the ranks of a pipeline once per step: gradients of parameters that several
# ranks hold, and outputs.


@dataclass(frozen=True, slots=True)
class StageExchange:
    """The exchange of one rank.

    Attributes:
        program: the program of all stages.
        group: the ranks of the pipeline; None for one rank.
        rank: this rank's index in the pipeline.
        device: the type of the devices on which ranks communicate.
        shared: the ranks that hold each parameter that this rank shares with others, by the name of
            the parameter.
    """

    program: Program
    group: dist.ProcessGroup | None
    rank: int
    device: str
    shared: Mapping[str, tuple[int, ...]]

    @staticmethod
    def of(
        program: Program, group: dist.ProcessGroup | None, rank: int, device: str
    ) -> StageExchange:
        """Create the exchange of a rank. Stage n is on rank n modulo the number of ranks.

        Args:
            program: the program of all stages.
            group: the ranks of the pipeline; None for one rank.
            rank: this rank's index in the pipeline.
            device: the type of the devices.
        """
        num_ranks = 1 if group is None else group.size()
        trained = {t.name for s in program.stages for t in s.parameters if t.has_gradient}
        holders = {
            name: tuple(dict.fromkeys(s % num_ranks for s in held_by))
            for name, held_by in program.shared.items()
        }
        shared = {
            name: ranks
            for name, ranks in holders.items()
            if rank in ranks and len(ranks) > 1 and name in trained
        }
        return StageExchange(program, group, rank, device, shared)

    def counted_elsewhere(self) -> set[str]:
        """Return the names of parameters that an earlier rank also holds."""
        return {name for name, ranks in self.shared.items() if ranks[0] != self.rank}

    def add_shared(self, gradients: Mapping[str, Tensor]) -> None:
        """Sum the gradients of shared parameters in place over the ranks that hold them. The first
        of these ranks adds the gradients in rank order and sends the sum back.

        Args:
            gradients: the local gradients, by name.
        """
        for name, ranks in sorted(self.shared.items()):
            assert self.group is not None, "several ranks have a group"
            there = gradients[name]
            mine = there.to(self.device)  # ranks communicate on the device, not on the host
            owner, others = dist.get_global_rank(self.group, ranks[0]), ranks[1:]
            if self.rank != ranks[0]:
                dist.send(mine, owner, self.group)
                dist.recv(mine, owner, self.group)
                _write_back(there, mine)
                continue
            for other in others:
                part = torch.empty_like(mine)
                dist.recv(part, dist.get_global_rank(self.group, other), self.group)
                mine.add_(part)
            for other in others:
                dist.send(mine, dist.get_global_rank(self.group, other), self.group)
            _write_back(there, mine)

    def spread(
        self, outputs: Sequence[ProgramTensor], own: Mapping[str, Tensor]
    ) -> dict[str, Tensor]:
        """Broadcast outputs from the ranks whose stages compute them to all ranks.

        Args:
            outputs: the outputs.
            own: the contiguous outputs of this rank, by name.
        """
        if self.group is None:
            return dict(own)
        values = {}
        for tensor in outputs:
            stages = enumerate(self.program.stages)
            made_by = next(
                i
                for i, s in stages
                if any(t.name == tensor.name for t in s.outputs if not t.crosses)
            )
            here = tensor.name in own
            value = (
                own[tensor.name]
                if here
                else torch.empty(tensor.shape, dtype=tensor.dtype, device=self.device)
            )
            dist.broadcast(
                value, dist.get_global_rank(self.group, made_by % self.group.size()), self.group
            )
            values[tensor.name] = value
        return values


def _write_back(there: Tensor, mine: Tensor) -> None:
    """Copy the sum on the device into the gradient if the gradient is on the host."""
    if there is not mine:
        there.copy_(mine)


# --------------------------------------------------------------------------------------------------
# `StageWorker`: a stage's work under the schedules of torch.distributed.pipelining.


class StageWorker(PipelineStage):
    """An adapter of a stage for the schedules of torch. `work` does the computation.

    Args:
        work: the work of the stage.
        number: the index of the stage.
        num_stages: the number of stages.
        group: the ranks of the pipeline, one per stage in order.
    """

    def __init__(
        self, work: StageWork, number: int, num_stages: int, group: dist.ProcessGroup
    ) -> None:
        # the schedule does not need to infer shapes, since the program defines them
        nothing = torch.empty(0, device=work.device)
        super().__init__(
            nn.Module(),
            number,
            num_stages,
            work.device,
            input_args=(nothing,),
            output_args=(nothing,),
            group=group,
        )
        self.work, self._transfers = work, Transfers(group)

    def clear_runtime_states(self) -> None:
        """Do nothing, since `begin` and `finish` of the work clear its state."""

    def _prepare_forward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def _prepare_backward_infra(self, num_microbatches: int, *_: Any, **__: Any) -> None:
        self.chunks = num_microbatches

    def scale_grads(self, grad_scale_factor: int) -> None:
        """Do nothing, since the losses of microbatches are already weighted."""

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the ops that receive the tensors of a microbatch from the previous stage."""
        return (
            []
            if self.is_first
            else self._moves("receive forward", self.work.arriving_inputs(fwd_chunk_id))
        )

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the ops that send the tensors of a microbatch to the next stage."""
        return self._moves("send forward", self.work.leaving_outputs(fwd_chunk_id))

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the ops that receive the gradients of the tensors that were sent."""
        return (
            []
            if self.is_last
            else self._moves("receive backward", self.work.arriving_gradients(bwd_chunk_id))
        )

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the ops that send the gradients of the tensors that were received."""
        return self._moves("send backward", self.work.leaving_gradients(bwd_chunk_id))

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Tensor:
        """Run forward on one microbatch.

        Args:
            fwd_chunk_id: the index of the microbatch.
            args, kwargs, save_forward_output: ignored; `work` already has the inputs.

        Returns:
            An empty tensor, since the schedule expects a result.
        """
        self.work.forward(fwd_chunk_id)
        return torch.empty(0)

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        """Run backward on one microbatch, and accumulate its gradients.

        Args:
            bwd_chunk_id: the index of the microbatch.
            loss, full_backward, last_backward: ignored; `work` already has the loss.
        """
        self.work.backward(bwd_chunk_id)

    def _moves(self, kind: str, tensors: Sequence[Tensor]) -> list[dist.P2POp]:
        return self._transfers.moves(kind, tensors, self.stage_index)


_SCHEDULES = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}


class StageCalls:
    """The pipeline of one rank.

    Args:
        exchange: the exchange between the ranks of the pipeline.
        works: the work of each stage of this rank, by the index of the stage.
        how: the microbatches, with their weights bound to this rank.
        kept: the outputs of the batch that a call returns.
        parameters: the parameters of this rank.
        storages: the storage of parameters and buffers, by name.
        world: the whole mesh.
    """

    def __init__(
        self,
        exchange: StageExchange,
        works: Mapping[int, StageWork],
        how: Microbatches,
        kept: Sequence[ProgramTensor],
        parameters: Sequence[ProgramTensor],
        storages: Mapping[str, Storage],
        world: DeviceMesh,
    ) -> None:
        self.exchange, self.how, self.kept, self.parameters = exchange, how, kept, parameters
        self._works, self._storages, self.world = works, storages, world
        self._schedule = self._make_schedule()
        self.backwards = Backwards()
        self._unused: dict[frozenset[str], UnusedGradients] = {}

    @property
    def program(self) -> Program:
        """The program of all stages."""
        return self.exchange.program

    @property
    def rank(self) -> int:
        """This rank's index in the pipeline."""
        return self.exchange.rank

    @property
    def _group(self) -> dist.ProcessGroup | None:
        return self.exchange.group

    @functools.cached_property
    def is_fp16(self) -> bool:
        """Whether any value of any stage is in float16."""
        return computes_in_fp16(self.program.trace)

    @functools.cached_property
    def mutates(self) -> bool:
        """Whether any stage changes buffers."""
        return any(stage.mutated for stage in self.program.stages)

    @functools.cached_property
    def mutated_buffers(self) -> tuple[str, ...]:
        """The buffers that stages of this rank change."""
        names = (name for work in self._works.values() for name in work.program.mutated)
        return tuple(dict.fromkeys(names))

    @property
    def device_type(self) -> str:
        """The type of all devices."""
        return self.world.device_type

    def _make_schedule(self) -> Any:
        """Create the schedule. It is None for a single rank, which runs microbatches one after
        another, and for one stage per rank if all forwards run before the first backward."""
        if self._group is None:
            return None
        if len(self._works) > 1:
            return Interleaving(self._works, Transfers(self._group), self.how.num)
        if not self.program.begins_backward:
            return None
        worker = StageWorker(
            self._works[self.rank], self.rank, len(self.program.stages), self._group
        )
        return _SCHEDULES[self.program.schedule](
            worker, self.how.num, loss_fn=lambda output, _: output, scale_grads=False
        )

    def step(
        self,
        parts: list[dict[str, Tensor]],
        buffers: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
        *,
        scale: float,
        keep: bool,
        returns: bool = True,
    ) -> tuple[dict[str, Tensor], list[Tensor | None]]:
        """Run a step of all microbatches.

        Args:
            parts: the inputs of each microbatch, by name.
            buffers: the local buffers, by name.
            parameters: the parameters of this rank.
            scale: the factor of losses in backward.
            keep: whether backward also runs.
            returns: whether outputs are collected.

        Returns:
            The outputs of the batch by path, and the gradients of this rank. Outputs are equal on
            all ranks. Gradients are equal on all ranks that hold the parameter.
        """
        returned = self.kept if returns else ()
        self.begin(
            self._works,
            parts,
            self.how.weight * scale,
            buffers,
            parameters,
            keep=keep,
            kept=returned,
        )
        if isinstance(self._schedule, Interleaving):
            self._schedule.run(backward=keep)
        elif keep and self._schedule is not None:
            with torch.enable_grad():  # torch's schedule requires it, though autograd is not used
                self._schedule.step(target=torch.zeros(self.how.num), return_outputs=False)
        elif keep:
            for number in range(self.how.num):
                self._works[self.rank].forward(number)
                self._works[self.rank].backward(number)
        else:
            self.runner(self._works).forward()
        joined = self._join_outputs(self._works)
        gradients = self.finish(self._works, parameters, keep=keep)
        return self.exchange.spread(returned, joined), gradients

    def new_works(self) -> dict[int, StageWork]:
        """Return new works for one call. Its backward may run after other calls have started."""
        return {
            number: StageWork(work.program, work.executor, work.device)
            for number, work in self._works.items()
        }

    def runner(self, works: Mapping[int, StageWork]) -> ForwardsFirst:
        """Return the schedule that runs all forwards and then all backwards of this rank's
        stage."""
        transfers = None if self._group is None else Transfers(self._group)
        return ForwardsFirst(works[self.rank], self.rank, transfers, self.how.num)

    def begin(
        self,
        works: Mapping[int, StageWork],
        parts: list[dict[str, Tensor]],
        weight: float,
        buffers: Mapping[str, Tensor],
        parameters: Sequence[Tensor],
        *,
        keep: bool,
        kept: Sequence[ProgramTensor] | None = None,
    ) -> None:
        """Begin a step in the work of each stage. If several stages change the same buffer, only
        the first stage changes the buffer itself; the others change a copy.

        Args:
            works: the work of each stage, by the index of the stage.
            parts: the inputs of each microbatch, by name.
            weight: the factor of losses in backward.
            buffers: the local buffers, by name.
            parameters: the parameters of this rank.
            keep: whether backward follows.
            kept: the outputs that are collected; by default those that a call returns.
        """
        with torch.no_grad():  # instead of `detach`, which fails under torch.inference_mode
            locals = {
                t.name: self._storages[t.name].local(p)
                for p, t in zip(parameters, self.parameters, strict=True)
            }
        changed: set[str] = set()
        for work in works.values():
            program = work.program
            mine = {
                t.name: buffers[t.name].clone()
                if t.name in changed & {*program.mutated}
                else buffers[t.name]
                for t in program.buffers
            }
            changed |= {*program.mutated}
            changed_names = [t.name for t in (self.kept if kept is None else kept)]
            work.begin(
                changed_names,
                [locals[t.name] for t in program.parameters],
                list(mine.values()),
                parts,
                weight,
                keep=keep,
            )

    def gather_outputs(self, works: Mapping[int, StageWork]) -> dict[str, Tensor]:
        """Return the outputs of the batch on all ranks. This is called after all forwards of a
        model without a loss."""
        return self.exchange.spread(self.kept, self._join_outputs(works))

    def _join_outputs(self, works: Mapping[int, StageWork]) -> dict[str, Tensor]:
        """Join the outputs of microbatches that this rank's stages computed, and free them."""
        values_by_path = [
            (path, values) for work in works.values() for path, values in work.outputs.items()
        ]
        joined = {path: self.how.join(path, values).contiguous() for path, values in values_by_path}
        del values_by_path
        for work in works.values():
            work.outputs.clear()
        return joined

    def finish(
        self, works: Mapping[int, StageWork], parameters: Sequence[Tensor], *, keep: bool
    ) -> list[Tensor | None]:
        """Finish a step, and sum the gradients of shared parameters.

        Args:
            works: the work of each stage, by the index of the stage.
            parameters: the parameters of this rank.
            keep: whether backward has run.

        Returns:
            The local gradients of this rank's trained parameters; None for a parameter that does
            not affect the loss. The list is empty if backward has not run.
        """
        sums: dict[str, Tensor] = {}
        for work in works.values():
            named = [t.name for t in work.program.parameters if t.has_gradient]
            # without backward, `finish` returns no gradients
            for name, gradient in zip(named, work.finish(), strict=False):
                if gradient is None:
                    continue
                sums[name] = sums[name].add_(gradient) if name in sums else gradient
        if not keep:
            return []
        for t, parameter in zip(self.parameters, parameters, strict=True):
            if t.name in self.exchange.shared and t.name not in sums:  # zero on this stage
                with torch.no_grad():
                    sums[t.name] = torch.zeros_like(self._storages[t.name].local(parameter))
        self.exchange.add_shared(sums)
        return [sums.get(t.name) for t in self.parameters if t.has_gradient]

    def wrap_gradients(
        self, gradients: Sequence[Tensor | None], without: frozenset[str] = frozenset()
    ) -> list[DTensor | None]:
        """Return the gradients of this rank's parameters as DTensors.

        Args:
            gradients: the local gradients of trained parameters.
            without: parameters that get no gradient.

        Returns:
            One gradient per parameter of this rank; None for a parameter without a gradient.
        """
        named = zip((t.name for t in self.parameters if t.has_gradient), gradients, strict=True)
        by_name = {name: gradient for name, gradient in named if name not in without}
        shown = [(t.name, by_name.get(t.name)) for t in self.parameters]
        return [
            None if gradient is None else hold_value(self._storages[name].wrap(gradient))
            for name, gradient in shown
        ]

    def find_unused(self, absent: frozenset[str]) -> UnusedGradients:
        """Return the parameters and transfers that affect only outputs on which the loss does not
        depend.

        Args:
            absent: the names of these outputs.
        """
        if absent not in self._unused:
            self._unused[absent] = UnusedGradients.of(self.program, absent)
        return self._unused[absent]

    def watched_of(
        self,
        works: Mapping[int, StageWork],
        parameters: Sequence[Tensor],
        outputs: Mapping[str, Tensor],
    ) -> WatchedTensors:
        """Watch the tensors that the user holds and backward reads.

        Args:
            works: the work of each stage, by the index of the stage.
            parameters: the parameters of this rank.
            outputs: the outputs of the call, by name.
        """
        watched = WatchedTensors()
        for work in works.values():
            watched.watch(
                [*work.named(), *((f"output {name!r}", x) for name, x in outputs.items())],
                work.saved_values(),
            )
        watched.follow(
            zip((f"parameter {t.name!r}" for t in self.parameters), parameters, strict=True)
        )
        return watched

    def check_returned(self, tangents: Sequence[Tensor | None], watched: WatchedTensors) -> None:
        """Check that no tensor read by backward has changed, and that every rank computed the same
        loss.

        In backward calls 1, 2, 4, 8 and so on, all ranks check both together. In other backward
        calls, each rank checks only its own tensors, without communication.

        Raises:
            RuntimeStateError: if a check fails.
        """
        if not self.backwards.begin():
            watched.check()
            return
        by_all(watched.check, "backward")
        check_tangents(
            [(t.name, x) for t, x in zip(self.kept, tangents, strict=True) if t.has_gradient],
            self.world,
        )
