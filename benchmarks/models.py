"""The models that benchmarks run on, as plain data, so that every row builds its model in a process of its own.

`autopar.hf` knows published sizes; here are the four tiny ones beside them, whose 8 heads and batch of 8 suit every mesh.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from autopar import hf

Batch = dict[str, torch.Tensor]
_SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
_TOKENS = {"vocab_size": 128, "max_position_embeddings": 64}
_GPT2 = {"bos_token_id": 0, "eos_token_id": 0, "n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 128, "n_positions": 64}
TINY: Mapping[str, str] = {
    "tiny-gpt2": f"gpt2:{json.dumps(_GPT2)}",
    "tiny-llama": f"llama:{json.dumps({**_SIZES, **_TOKENS, 'num_key_value_heads': 4})}",
    "tiny-bert": f"bert/AutoModelForMaskedLM:{json.dumps({**_SIZES, **_TOKENS})}",
    "tiny-vit": f"vit/AutoModelForImageClassification:{json.dumps({**_SIZES, 'image_size': 32, 'patch_size': 8, 'num_labels': 16})}",
}


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How to build a model and a batch.

    Attributes:
        name: for tables. text: a spec of `autopar.hf`. module: ``FILE.py:FUNCTION`` instead, which returns (model, batch).
    """

    name: str
    text: str = ""
    module: str = ""

    @staticmethod
    def known(name: str) -> ModelSpec:
        """A tiny model, or a published size.

        Raises:
            AutoparError: where there is none of that name.
        """
        text = TINY.get(name, name)
        hf.parse(text)
        return ModelSpec(name, text)

    @staticmethod
    def parse_hf(text: str) -> ModelSpec:
        """Read ``TYPE:JSON`` or ``TYPE/AutoClass:JSON``."""
        return ModelSpec(hf.parse(text)[0], text)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def build(
        self, *, batch: int = 8, seq: int = 16, dtype: torch.dtype = torch.float32, meta: bool = False, seed: int = 0
    ) -> tuple[nn.Module, Batch]:
        """The model in training mode without dropout, and a batch of `batch` samples of length `seq`; on meta without values.

        A module's function decides for itself about all of this but the dtype.
        """
        if not self.module:
            return hf.build(self.text, dtype=dtype, device="meta" if meta else "cpu", batch=batch, seq=seq, seed=seed)
        model, made = hf.load_function(self.module)
        return model.to(dtype), {name: x.to(dtype) if x.is_floating_point() else x for name, x in made.items()}
