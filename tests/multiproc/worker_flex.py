"""Run by two processes: models with flex attention, compared with the dense reference of torch."""

from __future__ import annotations

import copy
from typing import Any

import torch
from flex import batch_of, model_of
from torch import Tensor, nn

import autopar
from autopar.capture.dynamo.flex_attention import flex_attention_eager
from autopar.constraints import ddp, fsdp, megatron

CASES: dict[str, list[Any]] = {
    "soft cap": [ddp()],
    "alibi": [fsdp()],
    "documents": [megatron(tp=2)],
    "relative bias": [megatron(pp=2, microbatches=2)],
}


def run(rank: int) -> dict[str, dict[str, float]]:
    """Return per case the errors of loss and gradients, and the largest gradient."""
    facts = {
        kind: compared(model_of(kind), batch_of(), constraints)
        for kind, constraints in CASES.items()
    }
    return {**facts, "llama": compared(*llama(), [fsdp()])}


def llama() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(**sizes, **heads, attn_implementation="flex_attention")
    ids = torch.randint(0, 16, (2, 32))
    return LlamaForCausalLM(config).double(), {"input_ids": ids, "labels": ids}


def compared(model: Any, batch: dict[str, Tensor], constraints: list[Any]) -> dict[str, float]:
    plain = copy.deepcopy(model)
    with flex_attention_eager():
        expected = loss_of(plain(**batch))
        expected.backward()
    mesh = autopar.Mesh({"gpu": 2})
    made = autopar.compile(
        model, mesh, example_inputs=batch, hardware="cpu-gloo", constraints=constraints
    )
    loss = loss_of(made(**batch))
    loss.backward()
    due = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    found = {name: p.grad for name, p in made.named_parameters() if p.grad is not None}
    apart = [(whole(gradient) - due[name]).abs().max().item() for name, gradient in found.items()]
    return {
        "loss": abs(loss.item() - expected.item()),
        "gradients": max(apart),
        "largest": max(gradient.abs().max().item() for gradient in due.values()),
        "missing": float(len(due.keys() - found.keys())),
    }


def loss_of(returned: Any) -> Tensor:
    return returned if isinstance(returned, Tensor) else returned.loss


def whole(gradient: Any) -> Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
