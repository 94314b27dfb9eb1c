"""Small models, data with a smaller last batch, and settings, shared by the tests of training with
transformers, accelerate and peft."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, TrainingArguments

CLIPPED = 0.05
"""The norm that gradients are clipped to, which all of them exceed."""
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}


def base(*, tied: bool = True) -> Any:
    torch.manual_seed(0)
    sizes = {
        "n_embd": 16,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "vocab_size": 32,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    return AutoModelForCausalLM.from_config(
        GPT2Config(**sizes, **NO_DROPOUT, loss_type="ForCausalLM", tie_word_embeddings=tied)
    )


def adapted(*, tied: bool = True, **options: Any) -> Any:
    """Return the base model with LoRA, whose B is not zero."""
    config = {
        "r": 2,
        "target_modules": ["c_attn"],
        "task_type": "CAUSAL_LM",
        "init_lora_weights": False,
        **options,
    }
    return get_peft_model(base(tied=tied), LoraConfig(fan_in_fan_out=True, **config))


class Tagger(nn.Module):
    """A small model that is not from transformers and returns its loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm, self.head = nn.Embedding(32, 8), nn.LayerNorm(8), nn.Linear(8, 32)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.head(self.norm(self.embed(input_ids)))
        return {
            "loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()),
            "logits": logits,
        }


def adapted_tagger() -> Any:
    torch.manual_seed(0)
    return get_peft_model(
        Tagger(), LoraConfig(r=2, target_modules=["head"], init_lora_weights=False)
    )


BUILD = {"tagger": (Tagger, adapted_tagger), "gpt2": (base, adapted)}
"""Of each kind the base and the model with adapters."""


def samples(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    """Return samples of eight tokens. Some labels, different in each sample, are ignored."""
    generator = torch.Generator().manual_seed(seed)
    examples = []
    for _ in range(count):
        ids = torch.randint(0, 32, (8,), generator=generator)
        ignored = int(torch.randint(0, 5, (), generator=generator))
        examples.append(
            {"input_ids": ids, "labels": torch.where(torch.arange(8) < ignored, -100, ids)}
        )
    return examples


def settings(folder: Any, **changes: Any) -> TrainingArguments:
    """Return arguments for three batches of four samples and one of two, in steps of two batches,
    with clipping, weight decay and a changing learning rate."""
    defaults = {
        "per_device_train_batch_size": 4,
        "per_device_eval_batch_size": 4,
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 1,
        "learning_rate": 1e-2,
        "lr_scheduler_type": "cosine",
        "weight_decay": 0.1,
        "max_grad_norm": CLIPPED,
        "logging_steps": 1,
        "save_strategy": "no",
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return TrainingArguments(output_dir=str(folder), **{**defaults, **changes})


def data() -> dict[str, Any]:
    return {"train_dataset": samples(14, 1), "eval_dataset": samples(6, 2)}


def log_of(trainer: Any) -> list[dict[str, float]]:
    """Return the log of a trainer without times."""
    time_keys = ("runtime", "per_second", "preparation_time")
    return [
        {name: x for name, x in each.items() if not any(word in name for word in time_keys)}
        for each in trainer.state.log_history
    ]


def sum_of_logits(prediction: Any) -> Mapping[str, float]:
    return {
        "logits": float(abs(prediction.predictions).sum()),
        "samples": len(prediction.predictions),
    }
