"""Small models of the families that the tests use: `gpt2()`, `llama()`, `mixtral()`, `bert()`,
`vit()` → (model, batch).

Dropout is 0, caches are off, the model is in training mode, and the batch has more than one sample
and labels with ignored positions.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

Built = tuple[nn.Module, dict[str, torch.Tensor]]
VOCABULARY, BATCH, SEQUENCE = 96, 4, 12


def gpt2(*, num_layers: int = 2, dtype: torch.dtype = torch.float32, **settings: Any) -> Built:
    """GPT-2, 4 heads, hidden size 32, tied embeddings."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {
        "n_layer": num_layers,
        "n_embd": 32,
        "n_head": 4,
        "vocab_size": VOCABULARY,
        "n_positions": 16,
    }
    quiet = {
        "bos_token_id": 0,
        "eos_token_id": 0,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "use_cache": False,
    }
    return _built(GPT2LMHeadModel, GPT2Config(**{**sizes, **quiet, **settings}), dtype), _tokens()


def llama(*, num_layers: int = 2, dtype: torch.dtype = torch.float32, **settings: Any) -> Built:
    """Llama, 4 query heads over 2 key/value heads, hidden size 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": VOCABULARY,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    return _built(LlamaForCausalLM, LlamaConfig(**{**sizes, **heads, **settings}), dtype), _tokens()


def mixtral(
    *,
    num_layers: int = 2,
    num_experts: int = 4,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> Built:
    """Mixtral: the Llama above with experts, of which each token picks 2; by itself it computes
    them in a way that float64 has."""
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": 32,
        "intermediate_size": 48,
        "vocab_size": VOCABULARY,
    }
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "use_cache": False}
    experts = {
        "num_local_experts": num_experts,
        "num_experts_per_tok": 2,
        "experts_implementation": "batched_mm",
    }
    return _built(
        MixtralForCausalLM, MixtralConfig(**{**sizes, **heads, **experts, **settings}), dtype
    ), _tokens()


def bert(*, num_layers: int = 2, dtype: torch.dtype = torch.float32, **settings: Any) -> Built:
    """BERT with its masked-token head, 4 heads, hidden size 32."""
    from transformers import BertConfig, BertForMaskedLM

    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    quiet = {
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 16,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    return _built(BertForMaskedLM, BertConfig(**{**sizes, **quiet, **settings}), dtype), _tokens()


def vit(*, num_layers: int = 2, dtype: torch.dtype = torch.float32, **settings: Any) -> Built:
    """ViT with its classifier, 4 heads, hidden size 32, 16 patches."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
    }
    quiet = {
        "image_size": 16,
        "patch_size": 4,
        "num_labels": 10,
        "hidden_dropout_prob": 0.0,
        "attention_probs_dropout_prob": 0.0,
    }
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(BATCH, 3, 16, 16, generator=generator).to(dtype)
    labels = torch.randint(0, 10, (BATCH,), generator=generator)
    return _built(ViTForImageClassification, ViTConfig(**{**sizes, **quiet, **settings}), dtype), {
        "pixel_values": images,
        "labels": labels,
    }


def _built(kind: Any, config: Any, dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng([]):
        torch.manual_seed(0)
        model = kind(config).to(dtype).train()
        for parameter in model.parameters():  # zero biases would hide a lost or misplaced one
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
    return model


def _tokens() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE), generator=generator)
    labels[0, 3] = labels[2, 5:8] = -100
    return {"input_ids": ids, "labels": labels}
