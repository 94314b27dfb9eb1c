"""The models that benchmarks run on: known sizes by name, any Hugging Face configuration, any function of a file.

A `ModelSpec` is plain data, so that every row can build its model in a process of its own.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError

Batch = dict[str, torch.Tensor]
_HEADS = {"bert": "AutoModelForMaskedLM", "vit": "AutoModelForImageClassification"}


def _llama3(hidden: int, intermediate: int, layers: int, heads: int) -> Mapping[str, Any]:
    """Sizes as published with the Llama 3 models."""
    shared = {"vocab_size": 128256, "num_key_value_heads": 8, "max_position_embeddings": 8192, "rope_theta": 500000.0}
    return {**shared, "hidden_size": hidden, "intermediate_size": intermediate, "num_hidden_layers": layers, "num_attention_heads": heads}


_TINY_HEADS = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}
_QUIET_TOKENS = {"bos_token_id": 0, "eos_token_id": 0}
KNOWN: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama3-8b": ("llama", _llama3(4096, 14336, 32, 32)),
    "llama3-70b": ("llama", _llama3(8192, 28672, 80, 64)),
    "llama3-405b": ("llama", _llama3(16384, 53248, 126, 128)),
    "gpt2": ("gpt2", {}),
    "gpt2-medium": ("gpt2", {"n_embd": 1024, "n_layer": 24, "n_head": 16}),
    "gpt2-large": ("gpt2", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gpt2-xl": ("gpt2", {"n_embd": 1600, "n_layer": 48, "n_head": 25}),
    "bert-base": ("bert", {}),
    "bert-large": ("bert", {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16}),
    "vit-base": ("vit", {"num_labels": 1000}),
    "tiny-gpt2": ("gpt2", {**_QUIET_TOKENS, "n_embd": 64, "n_layer": 2, "n_head": 8, "vocab_size": 128, "n_positions": 64}),
    "tiny-llama": ("llama", {**_TINY_HEADS, "num_key_value_heads": 4, "vocab_size": 128, "max_position_embeddings": 64}),
    "tiny-bert": ("bert", {**_TINY_HEADS, "vocab_size": 128, "max_position_embeddings": 64}),
    "tiny-vit": ("vit", {**_TINY_HEADS, "image_size": 32, "patch_size": 8, "num_labels": 16}),
}
FOUR = ("tiny-gpt2", "tiny-llama", "tiny-bert", "tiny-vit")
_DROPOUTS = ("dropout", "_pdrop", "dropout_prob", "drop_rate")


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How to build a model and a batch.

    Attributes:
        name: for tables.
        hf_type, head, settings: a Hugging Face configuration's type, the auto class, and its settings.
        module: ``FILE.py:FUNCTION`` instead, whose FUNCTION() returns (model, batch).
    """

    name: str
    hf_type: str = ""
    head: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    module: str = ""

    @staticmethod
    def known(name: str) -> ModelSpec:
        """Raises `AutoparError` where there is no model of that name."""
        if name not in KNOWN:
            raise AutoparError(f"there is no model {name!r}", remedy=f"name one of {', '.join(KNOWN)}, or pass --hf or --module")
        hf_type, settings = KNOWN[name]
        return ModelSpec(name, hf_type, _HEADS.get(hf_type, "AutoModelForCausalLM"), settings)

    @staticmethod
    def parse_hf(text: str) -> ModelSpec:
        """Read ``TYPE:JSON`` or ``TYPE/AutoClass:JSON``."""
        kind, _, settings = text.partition(":")
        hf_type, _, head = kind.partition("/")
        try:
            parsed = json.loads(settings or "{}")
        except ValueError as error:
            raise AutoparError(f"cannot read --hf {text!r}: {error}", remedy="""write --hf llama:'{"hidden_size": 64}'""") from error
        return ModelSpec(hf_type, hf_type, head or _HEADS.get(hf_type, "AutoModelForCausalLM"), parsed)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def build(
        self, *, batch: int = 8, seq: int = 16, dtype: torch.dtype = torch.float32, meta: bool = False, seed: int = 0
    ) -> tuple[nn.Module, Batch]:
        """The model in training mode without dropout, and a batch of `batch` samples of length `seq`.

        With `meta` neither has values. FUNCTION() of a module decides for itself about all of this, but for the dtype.
        """
        if self.module:
            model, made = _load(self.module)()
            return model.to(dtype), {name: _cast(x, dtype) for name, x in made.items()}
        import transformers

        transformers.logging.set_verbosity_error()
        config = transformers.AutoConfig.for_model(self.hf_type, **self.settings)
        _without_dropout(config, self.settings)
        with torch.random.fork_rng(), torch.device("meta" if meta else "cpu"):
            torch.manual_seed(seed)
            model = getattr(transformers, self.head).from_config(config).to(dtype).train()
        return model, {name: _cast(x, dtype) for name, x in _batch(config, self.head, batch, seq, meta, seed).items()}


def _without_dropout(config: Any, given: Mapping[str, Any]) -> None:
    for name in dir(config):
        if name.endswith(_DROPOUTS) and name not in given and isinstance(getattr(config, name), float):
            setattr(config, name, 0.0)


def _batch(config: Any, head: str, batch: int, seq: int, meta: bool, seed: int) -> Batch:
    generator = torch.Generator().manual_seed(seed + 1)

    def integers(high: int, *shape: int) -> torch.Tensor:
        if meta:
            return torch.empty(shape, dtype=torch.int64, device="meta")
        return torch.randint(0, high, shape, generator=generator)

    if hasattr(config, "image_size"):
        shape = (batch, config.num_channels, config.image_size, config.image_size)
        images = torch.empty(shape, device="meta") if meta else torch.randn(shape, generator=generator)
        return {"pixel_values": images, "labels": integers(config.num_labels, batch)}
    labels = integers(config.num_labels, batch) if head.endswith("SequenceClassification") else integers(config.vocab_size, batch, seq)
    return {"input_ids": integers(config.vocab_size, batch, seq), "labels": labels}


def _cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if x.is_floating_point() else x


def _load(text: str) -> Any:
    path, _, function = text.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(path).stem, path) if path.endswith(".py") else None
    if spec is None or spec.loader is None:
        raise AutoparError(f"cannot read --module {text!r}", remedy="write --module FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return getattr(module, function)
