"""Methods of torch in eager mode: checkpoints around layers, whole or selective, and a loss in
chunks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from autopar.errors import AutoparError

aten = torch.ops.aten
MATMULS = (aten.mm.default, aten.addmm.default, aten.bmm.default, aten.baddbmm.default)
ATTENTION = (aten._scaled_dot_product_flash_attention_for_cpu.default,)
IGNORED = -100
Patch = Callable[[], AbstractContextManager[object]]


def layers_of(model: nn.Module) -> list[nn.Module]:
    """Return the longest list of modules of one class.

    Raises:
        AutoparError: if there is none.
    """
    lists = [
        list(m)
        for m in model.modules()
        if isinstance(m, nn.ModuleList) and len(m) > 1 and len({type(x) for x in m}) == 1
    ]
    if not lists:
        raise AutoparError(
            "the model has no list of equal layers",
            remedy="the other methods checkpoint layers; pass a model with a list of equal layers",
        )
    return max(lists, key=len)


def checkpointed(layers: Sequence[nn.Module], context_fn: Callable[[], Any] | None = None) -> Patch:
    """Return a patch that puts each of `layers` under a separate checkpoint."""
    return partial(
        _forwards, {layer: _under_checkpoint(layer.forward, context_fn) for layer in layers}
    )


def in_segments(layers: Sequence[nn.Module], size: int) -> Patch:
    """Return a patch that puts `size` layers under one checkpoint. The first of them runs all, and
    the others return their operands."""
    forwards: dict[nn.Module, Callable[..., Any]] = {}
    for start in range(0, len(layers), size):
        members = layers[start : start + size]
        forwards[members[0]] = _under_checkpoint(
            partial(_in_turn, [m.forward for m in members]), None
        )
        forwards |= {member: _pass_on for member in members[1:]}
    return partial(_forwards, forwards)


def _under_checkpoint(
    forward: Callable[..., Any], context_fn: Callable[[], Any] | None
) -> Callable[..., Any]:
    how = {} if context_fn is None else {"context_fn": context_fn}
    return partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False, **how)


def _in_turn(forwards: Sequence[Callable[..., Any]], x: Any, *args: Any, **kwargs: Any) -> Any:
    for forward in forwards:
        x = forward(x, *args, **kwargs)
    return x


def _pass_on(x: Any, *args: Any, **kwargs: Any) -> Any:
    return x


@contextmanager
def _forwards(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the `forward` functions of some modules."""
    for module, forward in forwards.items():
        module.__dict__["forward"] = forward
    try:
        yield
    finally:
        for module in forwards:
            del module.__dict__["forward"]


def keeping(ops: Sequence[Any]) -> Callable[[], Any]:
    """Return a selective checkpoint policy that keeps the results of `ops`."""
    return partial(create_selective_checkpoint_contexts, list(ops))


def keeping_every_second_matmul() -> Any:
    """Return torchtitan's policy per op (torchtitan/distributed/activation_checkpoint.py): keep
    attention, and the first, third, … matmul."""
    counts: Counter[bool] = Counter()

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        counts[context.is_recompute] += op in MATMULS
        saved = op in ATTENTION or (op in MATMULS and counts[context.is_recompute] % 2 == 1)
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def methods(model: nn.Module) -> Mapping[str, Patch]:
    """Return the variants by name."""
    layers = layers_of(model)
    every = {f"ckpt_every{k}": checkpointed(layers[::k]) for k in (2, 3)}
    segments = {f"ckpt_seg{k}": in_segments(layers, k) for k in (2, 3)}
    return {
        "eager": nullcontext,
        "ckpt_layer": checkpointed(layers),
        **every,
        **segments,
        "sac_mm_sdpa": checkpointed(layers, keeping((*MATMULS, *ATTENTION))),
        "sac_titan": checkpointed(layers, keeping_every_second_matmul),
        "sac_sdpa": checkpointed(layers, keeping(ATTENTION)),
    }


class _ChunkedLoss(torch.autograd.Function):
    """Cross entropy of ``hidden @ weightᵀ``, several rows at a time. Forward computes the
    gradients, so that no logits are kept."""

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, num_chunks: int
    ) -> Tensor:
        """Return the mean loss over rows whose label is not ignored.

        Args:
            ctx: the context of autograd.
            hidden: [n, d].
            weight: [v, d].
            labels: [n].
            num_chunks: number of chunks of rows.
        """
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        seen = labels != IGNORED
        count, total = seen.sum(), hidden.new_zeros(())
        parts = (x.chunk(num_chunks) for x in (hidden, labels, seen, d_hidden))
        for rows, targets, wanted, d_rows in zip(*parts, strict=True):
            logits, index = rows @ weight.t(), targets.clamp(min=0).unsqueeze(1)
            sums = logits.logsumexp(1, keepdim=True)
            total += ((sums - logits.gather(1, index)).squeeze(1) * wanted).sum()
            logits.sub_(sums).exp_().scatter_add_(1, index, -torch.ones_like(sums)).mul_(
                (wanted / count).unsqueeze(1)
            )
            torch.mm(logits, weight, out=d_rows)
            torch.addmm(d_weight, logits.t(), rows, out=d_weight)
        ctx.gradients = d_hidden, d_weight
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, tangent: Tensor) -> tuple[Any, ...]:
        d_hidden, d_weight = ctx.gradients
        ctx.gradients = None
        return d_hidden.mul_(tangent), d_weight.mul_(tangent), None, None


def chunked_loss(model: Any, batch: Mapping[str, Tensor], num_chunks: int = 8) -> Tensor:
    """Return the loss of a causal language model of transformers.

    Raises:
        AutoparError: if the model is not one, or if its head has a bias.
    """
    head = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if (
        not type(model).__name__.endswith(("ForCausalLM", "LMHeadModel"))
        or head is None
        or head.bias is not None
    ):
        raise AutoparError(
            "the loss in chunks supports only causal language models of transformers",
            remedy="omit the method",
        )
    rest = {name: x for name, x in batch.items() if name != "labels"}
    hidden = model.base_model(**rest).last_hidden_state
    labels = nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[..., 1:]
    loss: Tensor = _ChunkedLoss.apply(
        hidden.flatten(0, 1), head.weight, labels.flatten(), num_chunks
    )
    return loss
