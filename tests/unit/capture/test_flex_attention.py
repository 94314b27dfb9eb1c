"""flex_attention is refused by name, wherever a model calls it; the refusal's remedy works."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from autopar.capture import capture
from autopar.errors import CaptureError


def causal(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
    return q >= k


class Attention(nn.Module):
    """Calls flex attention in one of the ways that programs do."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.qkv = kind, nn.Linear(32, 96)
        self.slopes = nn.Parameter(torch.randn(2))
        self.mask = create_block_mask(causal, None, None, 128, 128, device="cpu") if kind == "mask of init" else None
        self.call: Any = torch.compile(flex_attention) if kind == "compiled" else flex_attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)
        if self.kind == "block mask":
            mask = create_block_mask(causal, None, None, 128, 128, device="cpu")
            return self.call(q, k, v, block_mask=mask).square().mean()
        if self.kind == "score function":
            return self.call(q, k, v, score_mod=lambda s, b, h, i, j: s + self.slopes[h] * (i - j)).square().mean()
        return self.call(q, k, v, block_mask=self.mask).square().mean()


KINDS = ["plain", "block mask", "score function", "mask of init", "compiled"]


@pytest.mark.parametrize("kind", KINDS)
def test_each_way_to_call_it_is_refused_with_the_line(kind: str) -> None:
    with pytest.raises(CaptureError, match=r"torch\.nn\.attention\.flex_attention") as caught:
        capture(Attention(kind), (torch.randn(2, 128, 32),), {})
    assert "test_flex_attention.py" in str(caught.value) and "scaled_dot_product_attention" in str(caught.value)


@pytest.mark.parametrize("attention", ["flex_attention", "sdpa"])
def test_a_transformers_model_is_refused_and_its_remedy_works(attention: str) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=16, attn_implementation=attention
    )
    ids = torch.randint(0, 16, (2, 128))
    model, batch = transformers.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
    if attention == "sdpa":
        assert capture(model, (), batch).loss is not None
    else:
        with pytest.raises(CaptureError, match='attn_implementation="sdpa"'):
            capture(model, (), batch)
