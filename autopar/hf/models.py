"""Creation of a model in training mode and a matching batch from a spec."""

from __future__ import annotations

import difflib
import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar.errors import AutoparError, Where
from autopar.hf.batches import make_batch
from autopar.hf.specs import parse

Built = tuple[nn.Module, dict[str, Any]]

# The default head is the first of these that the model type supports.
_HEADS = (
    "AutoModelForCausalLM",
    "AutoModelForImageClassification",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSpeechSeq2Seq",
    "AutoModelForMaskedLM",
    "AutoModelForImageTextToText",
    "AutoModelForSemanticSegmentation",
    "AutoModelForAudioClassification",
)
# settings that transformers reads although configurations do not list them
_READ_ELSEWHERE = ("attn_implementation", "experts_implementation", "decoder_start_token_id")


def build(
    spec: str,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "meta",
    batch: int = 8,
    seq: int | None = None,
    image: int = 224,
    dropout: float | None = 0.0,
    seed: int = 0,
) -> Built:
    """Build a model and a matching batch from a spec.

    Args:
        spec: ``TYPE:JSON``, ``TYPE/AutoClass:JSON`` or one of `KNOWN`.
        dtype: the dtype of parameters and floating-point inputs.
        device: the device of the model and the batch. Tensors on the meta device have no values.
        batch: the number of samples in the global batch.
        seq: the number of tokens of a sample; by default 512, or the number of positions of the
            model if that is smaller. It is ignored for images. For raw sound, it is the number of
            sound samples.
        image: the height and width of images, if the configuration does not specify them.
        dropout: the probability of every dropout that the spec does not set; None keeps the
            defaults of the type. Layer dropout is always disabled.
        seed: the seed of weights and batch.

    Returns:
        The model in training mode, and the batch with labels as keyword arguments of its forward.

    Raises:
        AutoparError: if the spec is malformed, or names a type, a head or a setting that
            transformers does not have.
    """
    kind, head, settings = parse(spec)
    config = _config(kind, settings)
    _zero_dropout(config, settings, dropout)
    if config.is_encoder_decoder and getattr(config, "pad_token_id", None) is None:
        config.pad_token_id = 0  # labels are shifted, and ignored ones become padding
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        # as in T5's checkpoints, since the configuration does not specify it
        config.decoder_start_token_id = config.pad_token_id or 0
    # transformers searches this list for names if a head has several classes
    config.architectures = config.architectures or []
    builder = _head(kind, head, config)
    # other GPUs are not used
    gpu = [torch.cuda.current_device()] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(gpu), torch.device(device):
        for generator in (
            torch.default_generator,
            *(torch.cuda.default_generators[number] for number in gpu),
        ):
            generator.manual_seed(seed)
        try:
            model = builder.from_config(config, dtype=dtype)
        except (
            ValueError,
            TypeError,
            LookupError,
            AttributeError,
            AssertionError,
            ImportError,
        ) as error:
            remedy = "correct the head or the settings, or pass --module"
            raise AutoparError(
                f"transformers cannot build {spec!r}: {error}", remedy=remedy
            ) from error
        example = make_batch(model, builder.__name__, dtype, batch, seq, image)
    return model.train(), example


def _config(kind: str, settings: Mapping[str, Any]) -> Any:
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        default = AutoConfig.for_model(kind)
    except ValueError as error:
        raise AutoparError(
            f"transformers has no model type {kind!r}",
            remedy="pass a type such as llama, gpt2, bert, vit, t5 or mixtral",
        ) from error
    known = default.to_dict()
    # transformers would silently store an unknown setting as an attribute
    for name in settings:
        # `known` is checked first, since `hasattr` raises for settings that differ between layers
        if name not in known and not hasattr(default, name) and name not in _READ_ELSEWHERE:
            close = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
            remedy = (
                f"did you mean {' or '.join(close)}?"
                if close
                else f"name an attribute of transformers.{type(default).__name__}"
            )
            raise AutoparError(f"a {kind} configuration has no setting {name!r}", remedy=remedy)
    try:
        return AutoConfig.for_model(kind, **settings)
    except (StrictDataclassError, ValueError, TypeError, AttributeError) as error:
        raise AutoparError(
            f"transformers cannot build {kind}: {error}", remedy="correct the settings"
        ) from error


def _zero_dropout(config: Any, settings: Mapping[str, Any], dropout: float | None) -> None:
    """Set every dropout that the settings do not contain, also in nested configurations, and
    disable all other random operations."""
    for name, value in list(vars(config).items()):
        if hasattr(value, "model_type"):
            nested = settings.get(name)
            _zero_dropout(value, nested if isinstance(nested, Mapping) else {}, dropout)
        elif name not in settings:
            changed = _without_draws(name, value, dropout)
            if changed is not value:
                setattr(config, name, changed)


def _without_draws(name: str, value: Any, dropout: float | None) -> Any:
    """Return the value of a setting that disables random operations, or sets dropout to the rate
    `dropout` if that is given. Values of other settings are unchanged."""
    if name.endswith(("layerdrop", "layer_drop")) and isinstance(value, float):
        return 0.0  # dropping a layer at random requires control flow
    if name == "apply_spec_augment":
        return False  # numpy would draw masks in forward
    if name in ("mask_time_prob", "mask_feature_prob"):
        return 0.0  # the same masks, for types without `apply_spec_augment`
    if "drop" not in name or dropout is None:
        return value
    if isinstance(value, float):
        return dropout
    is_list = isinstance(value, list | tuple) and all(isinstance(rate, float) for rate in value)
    return [dropout] * len(value) if is_list else value


def _head(kind: str, head: str, config: Any) -> Any:
    import transformers

    if head:
        builder = getattr(transformers, head, None)
        if not head.startswith("AutoModel") or builder is None:
            raise AutoparError(
                f"transformers has no class {head!r}",
                remedy="pass a class such as AutoModelForMaskedLM",
            )
        return builder
    for name in sorted(
        _HEADS, key=lambda name: config.is_encoder_decoder and "Seq2Seq" not in name
    ):
        builder = getattr(transformers, name)
        if type(config) in builder._model_mapping:
            return builder
    remedy = f"specify the head: {kind}/AutoModelFor...:JSON, or {kind}/AutoModel:JSON"
    raise AutoparError(f"{kind} has none of the heads {', '.join(_HEADS)}", remedy=remedy)


# --------------------------------------------------------------------------------------------------
# Models of the user, which a function in a file returns: ``FILE.py:FUNCTION``.


def load_function(spec: str) -> tuple[nn.Module, Any]:
    """Call a function of a Python file, and return the model and the batch that it returns.

    Args:
        spec: ``FILE.py:FUNCTION``.

    Raises:
        AutoparError: if the file or the function does not exist, the function raises an error, or
            it does not return (model, batch).
    """
    file, _, name = spec.rpartition(":")
    path = Path(file)
    if not file or not name:
        raise AutoparError(
            f"{spec!r} is not of the form FILE.py:FUNCTION",
            remedy="pass a Python file and a function in it that returns (model, batch)",
        )
    if not os.path.isfile(path):  # unlike `Path.is_file`, not an error for a name that is too long
        raise AutoparError(
            f"file {file!r} does not exist",
            remedy="pass a Python file, a colon and a function in it that returns (model, batch)",
        )
    module_spec = importlib.util.spec_from_file_location(f"autopar_function_{path.stem}", path)
    if module_spec is None or module_spec.loader is None:
        raise AutoparError(f"{file!r} is not a Python file", remedy="pass a file that ends in .py")
    module = importlib.util.module_from_spec(module_spec)
    folder = str(path.resolve().parent)
    if folder not in sys.path:  # as for a script, modules in the same folder can be imported
        sys.path.insert(0, folder)
    sys.modules[module_spec.name] = module  # dataclasses look up their module
    load = module_spec.loader.exec_module
    _run_user_code(spec, lambda: load(module))
    function: Callable[[], Any] | None = getattr(module, name, None)
    if not callable(function):
        raise AutoparError(
            f"{file} has no function {name!r}", remedy="name a function that returns (model, batch)"
        )
    built = _run_user_code(spec, function)
    if not isinstance(built, tuple) or len(built) != 2 or not isinstance(built[0], nn.Module):
        raise AutoparError(
            f"{spec} returned {type(built).__name__}, not (model, batch)",
            remedy="return an nn.Module and its example inputs",
        )
    return built


def _run_user_code(spec: str, run: Callable[[], Any]) -> Any:
    """Run code of the user's file. If it raises an error, report the last line of the file in the
    traceback."""
    try:
        return run()
    except AutoparError:
        raise
    except Exception as error:
        file = Path(spec.rpartition(":")[0]).resolve()
        frames = [
            f
            for f in traceback.extract_tb(error.__traceback__)
            if Path(f.filename).resolve() == file
        ]
        line = f"{file.name}:{frames[-1].lineno}: {frames[-1].line}" if frames else str(file)
        where = Where(source=line)
        raise AutoparError(
            f"{spec} raised {type(error).__name__}: {error}",
            where=where,
            remedy="correct the function",
        ) from error
