"""Names of models: ``TYPE:JSON`` or a known size. This file does not import torch, so that the
command line reports a mistyped name immediately.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from autopar.errors import AutoparError

_SPEC = re.compile(r"^(?P<type>[\w.-]+)(?:/(?P<head>\w+))?(?::(?P<settings>.*))?$", re.DOTALL)


def _gpt2(num_layers: int, hidden_size: int, num_heads: int) -> tuple[str, dict[str, Any]]:
    return "gpt2", {"n_layer": num_layers, "n_embd": hidden_size, "n_head": num_heads}


def _llama3(
    num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int
) -> tuple[str, dict[str, Any]]:
    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": intermediate_size,
    }
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": 8, "vocab_size": 128256}
    rope = {
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0},
    }
    return "llama", {**sizes, **heads, **rope}


def _encoder(
    kind: str, num_layers: int, hidden_size: int, num_heads: int
) -> tuple[str, dict[str, Any]]:
    sizes = {
        "num_hidden_layers": num_layers,
        "hidden_size": hidden_size,
        "intermediate_size": 4 * hidden_size,
    }
    return kind, {**sizes, "num_attention_heads": num_heads}


_MIXTRAL = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 32000,
}
_T5_11B = {
    "d_model": 1024,
    "d_kv": 128,
    "d_ff": 65536,
    "num_layers": 24,
    "num_heads": 128,
    "vocab_size": 32128,
}

# Published sizes: GPT-2 (Radford et al., 2019), BERT (Devlin et al., 2018), ViT (Dosovitskiy et
# al., 2020), Llama 3 (Grattafiori et al., 2024, table 3), Mixtral (Jiang et al., 2024, table 1), T5
# (Raffel et al., 2020, section 3.7).
KNOWN: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "llama3-8b": _llama3(32, 4096, 14336, 32),
        "llama3-70b": _llama3(80, 8192, 28672, 64),
        "llama3-405b": _llama3(126, 16384, 53248, 128),
        "mixtral-8x7b": ("mixtral", _MIXTRAL),
        "t5-11b": ("t5/AutoModelForSeq2SeqLM", _T5_11B),
        "bert-base": _encoder("bert/AutoModelForMaskedLM", 12, 768, 12),
        "bert-large": _encoder("bert/AutoModelForMaskedLM", 24, 1024, 16),
        "vit-base": _encoder("vit/AutoModelForImageClassification", 12, 768, 12),
        "vit-large": _encoder("vit/AutoModelForImageClassification", 24, 1024, 16),
    }
)


def parse(spec: str) -> tuple[str, str, dict[str, Any]]:
    """Parse the spec of a model.

    Args:
        spec: the spec.

    Returns:
        The model type, the auto class or ``""``, and the settings of the configuration.

    Raises:
        AutoparError: if the spec is neither a known name nor ``TYPE:JSON`` or
            ``TYPE/AutoClass:JSON``.
    """
    if spec in KNOWN:
        kind, known = KNOWN[spec]
        return kind.partition("/")[0], kind.partition("/")[2], dict(known)
    match = _SPEC.match(spec)
    if match is None or match["settings"] is None:
        names = ", ".join(KNOWN)
        raise AutoparError(
            f"{spec!r} is not a model",
            remedy=f"pass TYPE:JSON, as in llama:'{{\"hidden_size\": 64}}', or one of {names}",
        )
    try:
        settings = json.loads(match["settings"] or "{}")
    except ValueError as error:
        raise AutoparError(
            f"the settings of {spec!r} are not JSON: {error}",
            remedy="quote the spec, and write names and texts in double quotes",
        ) from error
    if not isinstance(settings, dict):
        raise AutoparError(
            f"the settings of {spec!r} are not a JSON object", remedy='write {"name": value, ...}'
        )
    return match["type"], match["head"] or "", settings
