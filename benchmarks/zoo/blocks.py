"""One layer of a published model in its true size: a block class in the problem of a deep model."""

from __future__ import annotations

import json
from typing import Any

import torch
from torch import Tensor, nn

from autopar import hf

BATCH, SEQ = 64, 4096


class Block(nn.Module):
    """A layer in the middle of a decoder. Gradients continue to earlier layers; `before` represents
    their last op."""

    def __init__(self, layer: nn.Module, rotary: nn.Module, width: int) -> None:
        super().__init__()
        self.before, self.layer, self.rotary = nn.Parameter(torch.empty(width)), layer, rotary

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.before
        positions = torch.arange(hidden.shape[1], device=hidden.device)[None]
        made: Any = self.layer(hidden, position_embeddings=self.rotary(hidden, positions))
        return (made[0] if isinstance(made, tuple) else made).square().mean()


Made = tuple[Block, dict[str, Tensor]]


def block_of(name: str, *, batch: int = BATCH, seq: int = SEQ) -> Made:
    """Return the layer of a size that `autopar.hf` knows, on meta, and its inputs."""
    kind, settings = hf.KNOWN[name]
    spec = f"{kind}:{json.dumps({**settings, 'num_hidden_layers': 1})}"
    model: Any = hf.build(spec, dtype=torch.float32, device="meta", batch=1, seq=8)[0]
    with torch.device("meta"):
        width = model.config.hidden_size
        block = Block(model.model.layers[0], model.model.rotary_emb, width)
        return block.train(), {"hidden": torch.empty(batch, seq, width)}


def llama3_8b() -> Made:
    """Return a layer of Llama-3 8B."""
    return block_of("llama3-8b")


def mixtral_8x7b() -> Made:
    """Return a layer of Mixtral 8×7B: eight experts, of which each token picks two."""
    return block_of("mixtral-8x7b")
