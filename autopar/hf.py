"""Models by name: a Hugging Face configuration, a known size or a function of the user's, each with a batch that fits it.

A *spec* is ``TYPE:JSON`` (``llama:{"hidden_size": 64}``), ``TYPE/AutoClass:JSON`` for another head than the causal LM's, or
one of the names in `KNOWN`. Nothing is downloaded: a model is built from its configuration, on meta unless asked otherwise.
transformers is imported at the first build.
"""

from __future__ import annotations

import difflib
import importlib.util
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from autopar.errors import AutoparError

Built = tuple[nn.Module, dict[str, Tensor]]


def _gpt2(num_layers: int, hidden_size: int, num_heads: int) -> tuple[str, dict[str, Any]]:
    return "gpt2", {"n_layer": num_layers, "n_embd": hidden_size, "n_head": num_heads}


def _llama3(num_layers: int, hidden_size: int, intermediate_size: int, num_heads: int) -> tuple[str, dict[str, Any]]:
    sizes = {"num_hidden_layers": num_layers, "hidden_size": hidden_size, "intermediate_size": intermediate_size}
    heads = {"num_attention_heads": num_heads, "num_key_value_heads": 8, "vocab_size": 128256}
    rope = {"max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}}
    return "llama", {**sizes, **heads, **rope}


def _encoder(kind: str, num_layers: int, hidden_size: int, num_heads: int) -> tuple[str, dict[str, Any]]:
    sizes = {"num_hidden_layers": num_layers, "hidden_size": hidden_size, "intermediate_size": 4 * hidden_size}
    return kind, {**sizes, "num_attention_heads": num_heads}


# Sizes as published: GPT-2 (Radford et al., 2019), BERT (Devlin et al., 2018), ViT (Dosovitskiy et al., 2020), Llama 3
# (Grattafiori et al., 2024, table 3).
KNOWN: Mapping[str, tuple[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "gpt2": _gpt2(12, 768, 12),
        "gpt2-medium": _gpt2(24, 1024, 16),
        "gpt2-large": _gpt2(36, 1280, 20),
        "gpt2-xl": _gpt2(48, 1600, 25),
        "llama3-8b": _llama3(32, 4096, 14336, 32),
        "llama3-70b": _llama3(80, 8192, 28672, 64),
        "llama3-405b": _llama3(126, 16384, 53248, 128),
        "bert-base": _encoder("bert/AutoModelForMaskedLM", 12, 768, 12),
        "bert-large": _encoder("bert/AutoModelForMaskedLM", 24, 1024, 16),
        "vit-base": _encoder("vit/AutoModelForImageClassification", 12, 768, 12),
        "vit-large": _encoder("vit/AutoModelForImageClassification", 24, 1024, 16),
    }
)

_HEADS = ("AutoModelForCausalLM", "AutoModelForImageClassification", "AutoModelForSeq2SeqLM")  # the first that the type has
_PER_TOKEN = ("CausalLM", "MaskedLM", "Seq2SeqLM", "PreTraining", "TokenClassification")
_PER_SAMPLE = ("ImageClassification", "SequenceClassification")
_IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")  # settings that are read, then renamed
_SPEC = re.compile(r"^(?P<type>[\w.-]+)(?:/(?P<head>\w+))?(?::(?P<settings>.*))?$", re.DOTALL)


def build(
    spec: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "meta",
    batch: int = 8,
    seq: int | None = None,
    seed: int = 0,
) -> Built:
    """The model of `spec`, in training mode, and a batch with labels: keyword arguments of its forward.

    Every dropout that the spec does not set is 0, since its type's default would make each run another. Weights and
    batch are drawn from `seed`, or hold nothing on meta.

    Args:
        batch: samples in the global batch.
        seq: tokens of a sample; by default 512 or the most that the model has positions for. Images have no length.

    Raises:
        AutoparError: where the spec cannot be read, or names a type, a head or a setting that transformers does not know.
    """
    kind, head, settings = parse(spec)
    config = _config(kind, settings)
    builder = _head(kind, head, config)
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(seed)
        try:
            model = builder.from_config(config, dtype=dtype)
        except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
            raise AutoparError(f"transformers cannot build {spec!r}: {error}", remedy="mend the settings, or pass --module") from error
        example = _batch(model, builder.__name__, dtype, batch, seq)
    return model.train(), example


def parse(spec: str) -> tuple[str, str, dict[str, Any]]:
    """(model type, auto class or ``""``, settings) of a spec.

    Raises:
        AutoparError: where it is neither a known name nor ``TYPE:JSON`` or ``TYPE/AutoClass:JSON``.
    """
    if spec in KNOWN:
        kind, known = KNOWN[spec]
        return kind.partition("/")[0], kind.partition("/")[2], dict(known)
    match = _SPEC.match(spec)
    if match is None or match["settings"] is None:
        names = ", ".join(KNOWN)
        raise AutoparError(f"{spec!r} is no model", remedy=f"""write TYPE:JSON, as in llama:'{{"hidden_size": 64}}', or one of {names}""")
    try:
        settings = json.loads(match["settings"] or "{}")
    except ValueError as error:
        raise AutoparError(
            f"the settings of {spec!r} are no JSON: {error}", remedy="quote the spec, names and texts in double quotes"
        ) from error
    if not isinstance(settings, dict):
        raise AutoparError(f"the settings of {spec!r} are no JSON object", remedy='write {"name": value, ...}')
    return match["type"], match["head"] or "", settings


def load_function(spec: str) -> tuple[nn.Module, Any]:
    """(model, batch) as ``FILE.py:FUNCTION`` returns them.

    Raises:
        AutoparError: where the file or the function is missing, or it returns something else.
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not name or not path.is_file():
        raise AutoparError(f"{spec!r} is no FILE.py:FUNCTION", remedy="name a Python file and a function in it that returns (model, batch)")
    module_spec = importlib.util.spec_from_file_location(path.stem, path)
    if module_spec is None or module_spec.loader is None:
        raise AutoparError(f"{file!r} is no Python file", remedy="name a file that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise AutoparError(f"{file} has no function {name!r}", remedy="name a function that returns (model, batch)")
    built = function()
    if not isinstance(built, tuple) or len(built) != 2 or not isinstance(built[0], nn.Module):
        raise AutoparError(
            f"{spec} returned {type(built).__name__}, not (model, batch)", remedy="return an nn.Module and its example inputs"
        )
    return built


def _config(kind: str, settings: Mapping[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        default = AutoConfig.for_model(kind)
    except ValueError as error:
        raise AutoparError(
            f"transformers knows no model type {kind!r}", remedy="name one, for example llama, gpt2, bert, vit, t5, mixtral"
        ) from error
    for name in settings:  # transformers would keep an unknown one as an attribute that nothing reads
        if not hasattr(default, name) and name not in _IMPLEMENTATIONS:
            close = difflib.get_close_matches(name, default.to_dict(), n=3, cutoff=0.4)
            raise AutoparError(
                f"a {kind} configuration has no setting {name!r}", remedy=f"did you mean {' or '.join(close) or 'another type'}?"
            )
    quiet = {name: 0.0 for name, value in default.to_dict().items() if _is_dropout(name, value) and name not in settings}
    try:
        return AutoConfig.for_model(kind, **{**quiet, **settings})
    except (StrictDataclassError, ValueError, TypeError) as error:
        raise AutoparError(f"transformers cannot build {kind}: {error}", remedy="mend the settings") from error


def _is_dropout(name: str, value: Any) -> bool:
    return "drop" in name and isinstance(value, float)


def _head(kind: str, head: str, config: Any) -> Any:
    import transformers

    if head:
        builder = getattr(transformers, head, None)
        if not head.startswith("AutoModel") or builder is None:
            raise AutoparError(f"transformers has no class {head!r}", remedy="name one, for example AutoModelForMaskedLM")
        return builder
    for name in _HEADS:
        builder = getattr(transformers, name)
        if type(config) in builder._model_mapping:
            return builder
    raise AutoparError(f"{kind} has none of the heads {', '.join(_HEADS)}", remedy=f"name its head: {kind}/AutoModelFor...:JSON")


def _batch(model: Any, head: str, dtype: torch.dtype, batch: int, seq: int | None) -> dict[str, Tensor]:
    """Inputs and labels on the device of the context."""
    config = model.config
    shape: tuple[int, ...]
    if model.main_input_name == "pixel_values":
        sides = config.image_size if isinstance(config.image_size, list | tuple) else (config.image_size,) * 2
        inputs, shape = {"pixel_values": torch.randn(batch, config.num_channels, *sides).to(dtype)}, (batch,)
    elif model.main_input_name == "input_ids":
        shape = (batch, _length(config, seq))
        inputs = {"input_ids": torch.randint(0, config.vocab_size, shape)}
    else:
        raise AutoparError(f"no batch is known for {model.main_input_name!r}", remedy="pass --module FILE.py:FUNCTION, which makes its own")
    return {**inputs, "labels": _labels(config, head, shape)}


def _labels(config: Any, head: str, shape: tuple[int, ...]) -> Tensor:
    if head.endswith(_PER_TOKEN):
        return torch.randint(0, config.num_labels if head.endswith("TokenClassification") else config.vocab_size, shape)
    if head.endswith(_PER_SAMPLE):
        return torch.randint(0, config.num_labels, shape[:1])
    raise AutoparError(f"no labels are known for {head}", remedy="pass --module FILE.py:FUNCTION, which makes its own batch")


def _length(config: Any, seq: int | None) -> int:
    most = getattr(config, "max_position_embeddings", None) or 0
    if seq is not None and 0 < most < seq and getattr(config, "rope_parameters", None) is None:
        raise AutoparError(
            f"the model has {most} positions, the batch {seq}", remedy="pass a smaller --seq, or set max_position_embeddings"
        )
    return seq or min(512, most or 512)
