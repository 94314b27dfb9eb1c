"""Training steps of one Llama on several gloo processes: autopar's programs and their counterparts
in torch."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import autopar
from autopar import constraints

Batch = Mapping[str, Tensor]
Run = Callable[[], Tensor | None]
AXIS = "gpu"
DDP, FSDP, PIPELINE, FREE = "ddp", "fsdp", "1f1b", "free"
COUNTERPARTS: Mapping[str, str] = {
    f"autopar {DDP}": f"torch {DDP}",
    f"autopar {FREE}": f"torch {DDP}",
    f"autopar {FSDP}": f"torch {FSDP}",
    f"autopar {PIPELINE}": f"torch {PIPELINE}",
}
METHODS = (*dict.fromkeys(COUNTERPARTS.values()), *COUNTERPARTS)


@dataclass(frozen=True, slots=True)
class Trained:
    """A model that is trained with one method.

    Attributes:
        run: runs forward and backward of one batch and leaves the gradients in the parameters.
            Returns the loss of this rank's part; None on ranks without a loss.
        optimizer: the optimizer of this rank's parameters.
    """

    run: Run
    optimizer: torch.optim.Optimizer

    def step(self) -> None:
        """Run one training step, and release the gradients."""
        self.run()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def trained(method: str, model: nn.Module, batch: Batch, microbatches: int) -> Trained:
    """Set up a method of `METHODS` on the processes of this job.

    Args:
        method: name of the method.
        model: a Llama of transformers, which is not kept unless the method trains it in place.
        batch: the whole batch, ``input_ids`` and ``labels``.
        microbatches: number of microbatches of the pipelines, which have one stage per process.
    """
    whose, way = method.split()
    if whose == "torch":
        run, parts = _TORCH[way](model, batch, microbatches)
    else:
        run, parts = _autopar(way, model, batch, microbatches)
    return Trained(run, torch.optim.AdamW(parts.parameters(), lr=1e-4))


def _autopar(way: str, model: nn.Module, batch: Batch, microbatches: int) -> tuple[Run, nn.Module]:
    size = dist.get_world_size()
    forced: Mapping[str, tuple[constraints.Constraint, ...]] = {
        FREE: (),
        DDP: (constraints.ddp(),),
        FSDP: (constraints.fsdp(),),
        PIPELINE: (
            constraints.pipeline(
                AXIS,
                microbatches=microbatches,
                schedule="1f1b",
                cuts=[f"model.layers.{at}" for at in _cuts(model, size)],
            ),
        ),
    }
    module = autopar.compile(
        model, autopar.Mesh({AXIS: size}), example_inputs=batch, constraints=forced[way]
    )

    def run() -> Tensor:
        outputs = module(**batch)  # held until backward ends, as in a training loop
        outputs["loss"].backward()
        return outputs["loss"].detach()  # type: ignore[no-any-return]

    return run, module


def _data_parallel(model: nn.Module, batch: Batch, microbatches: int) -> tuple[Run, nn.Module]:
    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    return _on_its_part(wrapped, batch), wrapped


def _fully_sharded(model: nn.Module, batch: Batch, microbatches: int) -> tuple[Run, nn.Module]:
    for layer in model.model.layers:  # type: ignore[union-attr]
        fully_shard(layer)
    fully_shard(model)
    return _on_its_part(model, batch), model


def _on_its_part(module: nn.Module, batch: Batch) -> Run:
    mine = {
        name: x.chunk(dist.get_world_size())[dist.get_rank()].clone() for name, x in batch.items()
    }

    def run() -> Tensor:
        outputs = module(**mine)
        outputs["loss"].backward()
        return outputs["loss"].detach()  # type: ignore[no-any-return]

    return run


def _pipelined(model: nn.Module, batch: Batch, microbatches: int) -> tuple[Run, nn.Module]:
    rank, size = dist.get_rank(), dist.get_world_size()
    part = _StageOfLlama(model, [0, *_cuts(model, size), len(model.model.layers)], rank)  # type: ignore[union-attr, arg-type]
    stage = PipelineStage(part, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, microbatches, loss_fn=_loss)
    ids, labels = batch["input_ids"], batch["labels"]

    def run() -> Tensor | None:
        given = (ids,) if rank == 0 else ()
        target: dict[str, Any] = {"target": labels} if rank == size - 1 else {}
        losses: list[Tensor] = []
        schedule.step(*given, **target, losses=losses, return_outputs=False)
        return torch.stack(losses).mean().detach() if losses else None

    return run, part


def _cuts(model: Any, num_stages: int) -> list[int]:
    """Return the first layers of the later stages. The head counts as a layer, and each stage has
    at least one layer."""
    num = len(model.model.layers)
    sizes = [
        (num + 1) // num_stages + (stage < (num + 1) % num_stages) for stage in range(num_stages)
    ]
    return [min(sum(sizes[:stage]), num - num_stages + stage) for stage in range(1, num_stages)]


class _StageOfLlama(nn.Module):
    """The layers of one stage, with the embedding or with the last norm and the head."""

    def __init__(self, model: Any, bounds: Sequence[int], stage: int) -> None:
        super().__init__()
        first, last = stage == 0, stage == len(bounds) - 2
        self.embedding = model.model.embed_tokens if first else None
        self.layers = nn.ModuleList(model.model.layers[bounds[stage] : bounds[stage + 1]])
        self.rotary = model.model.rotary_emb
        self.norm = model.model.norm if last else None
        self.head = model.lm_head if last else None

    def forward(self, x: Tensor) -> Tensor:
        """Run the stage on token ids [batch, seq] (first stage) or hidden states [batch, seq,
        hidden]."""
        hidden = x if self.embedding is None else self.embedding(x)
        positions = torch.arange(hidden.shape[1])[None]
        angles = self.rotary(hidden, position_ids=positions)
        for layer in self.layers:
            hidden = layer(
                hidden, attention_mask=None, position_ids=positions, position_embeddings=angles
            )
        return hidden if self.head is None else self.head(self.norm(hidden))  # type: ignore[misc]


def _loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1).float(), labels[:, 1:].flatten()
    )


_TORCH: Mapping[str, Callable[..., tuple[Run, nn.Module]]] = {
    DDP: _data_parallel,
    FSDP: _fully_sharded,
    PIPELINE: _pipelined,
}


class StorageBytes(TorchDispatchMode):
    """Bytes of the live storages of tensors that were created while the mode was active. Tensors
    without memory (meta and fake tensors) do not count.

    Unlike `autopar.program.abstract_executor.LiveBytes`, it reads the sizes of storages after each
    op, since FSDP2 resizes them.

    Args:
        ignored: tensors whose storages do not count.

    Attributes:
        peak_bytes: the peak so far.
    """

    def __init__(self, ignored: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._ignored = [x.untyped_storage() for x in ignored]  # kept, so that no address is reused
        self._not_counted = {storage._cdata for storage in self._ignored}
        self._known: dict[int, weakref.ref[torch.UntypedStorage]] = {}

    @property
    def live_bytes(self) -> int:
        """The bytes of all live storages."""
        return sum(storage.nbytes() for storage in self._alive())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented  # its ops on local tensors are dispatched again
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, Tensor):
                self._see(leaf)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return result

    def _alive(self) -> Iterator[torch.UntypedStorage]:
        for key, ref in list(self._known.items()):
            storage = ref()
            if storage is None:
                del self._known[key]
            else:
                yield storage

    def _see(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage.device.type == "meta" or storage._cdata in self._not_counted:
            return
        known = self._known.get(storage._cdata)
        if known is None or known() is None:
            self._known[storage._cdata] = weakref.ref(storage)


def memory_of(
    method: str, model: nn.Module, batch: Batch, microbatches: int
) -> tuple[Trained, dict[str, int]]:
    """Set up a method on a copy of a model, and measure its memory.

    Returns:
        The method, and figures of this rank: ``resting_bytes``, the storages that were created
            since and are live between steps (parameters, state of the optimizer, buckets, the
            method's part of the batch); and ``peak_bytes``, the peak from the start of forward to
            the end of backward.
    """
    memory = StorageBytes([*model.parameters(), *model.buffers(), *batch.values()])
    with memory:
        given = [copy.deepcopy(model)]
        made = trained(method, given.pop(), batch, microbatches)
        for _ in range(2):  # in the second step all buckets and buffers exist
            made.step()
        gc.collect()
        resting_bytes = memory.live_bytes
        peaks = []
        for _ in range(3):  # a thread of gloo may hold an operand for a moment after the wait
            memory.peak_bytes = 0
            made.run()
            peaks.append(memory.peak_bytes)
            made.optimizer.step()
            made.optimizer.zero_grad(set_to_none=True)
    return made, {"resting_bytes": resting_bytes, "peak_bytes": min(peaks)}
