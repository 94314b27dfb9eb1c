"""A batch that fits a transformers model: its inputs by what it reads first, its labels by its head."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError

_OWN = "pass --module FILE.py:FUNCTION, which makes its own batch"
_PER_TOKEN = ("CausalLM", "MaskedLM", "Seq2SeqLM", "PreTraining", "SpeechSeq2Seq", "ImageTextToText")
_PER_SAMPLE = ("ImageClassification", "SequenceClassification", "AudioClassification")


class _Sizes:
    """What a batch is made from: the model, its configuration and that of its text part, and the sizes asked for."""

    def __init__(self, model: Any, dtype: torch.dtype, batch: int, seq: int | None, image: int) -> None:
        self.model, self.dtype, self.batch, self.seq, self.image = model, dtype, batch, seq, image
        self.config = model.config
        self.text = self.config.get_text_config()
        self.reads_images = getattr(self.config, "vision_config", None) is not None

    def length(self) -> int:
        """Tokens of a sample."""
        most = getattr(self.text, "max_position_embeddings", None) or getattr(self.text, "max_target_positions", None) or 0
        if self.seq is not None and 0 < most < self.seq and getattr(self.text, "rope_parameters", None) is None:
            raise AutoparError(
                f"the model has {most} positions, the batch {self.seq}", remedy="pass a smaller --seq, or set max_position_embeddings"
            )
        return self.seq or min(512, most or 512)

    def sides(self) -> tuple[int, ...]:
        """Height and width of an image."""
        config = self.config.vision_config if self.reads_images else self.config
        given = getattr(config, "image_size", None) or self.image
        return tuple(given) if isinstance(given, list | tuple) else (given,) * 2

    def channels(self) -> int:
        config = self.config.vision_config if self.reads_images else self.config
        return getattr(config, "num_channels", 3)


def make_batch(model: Any, head: str, dtype: torch.dtype, batch: int, seq: int | None, image: int) -> dict[str, Any]:
    """Inputs and labels on the device of the context.

    Raises:
        AutoparError: for a model or a head that nothing is known of.
    """
    sizes = _Sizes(model, dtype, batch, seq, image)
    make = _INPUTS.get(model.main_input_name)
    if make is None:
        raise AutoparError(f"no batch is known for {model.main_input_name!r}", remedy=_OWN)
    inputs = make(sizes)
    if sizes.reads_images and "pixel_values" not in inputs:
        inputs |= _pixels(sizes)
    return {**inputs, **_targets(sizes, head)}


def _tokens(sizes: _Sizes) -> dict[str, Tensor]:
    """Token ids; of a model that reads images, the first are the image's own."""
    ids = torch.randint(0, sizes.text.vocab_size, (sizes.batch, sizes.length()))
    mark = getattr(sizes.config, "image_token_id", None)
    if mark is None:
        return {"input_ids": ids}
    vision = sizes.config.vision_config
    num_patches = (vision.image_size // vision.patch_size) ** 2
    if num_patches >= sizes.length():
        raise AutoparError(f"an image takes {num_patches} tokens, a sample has {sizes.length()}", remedy="pass a larger --seq")
    ids = torch.where(ids == mark, (mark + 1) % sizes.text.vocab_size, ids)
    ids[:, :num_patches] = mark
    return {"input_ids": ids}


def _pixels(sizes: _Sizes) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(sizes.batch, sizes.channels(), *sizes.sides()).to(sizes.dtype)}


def _spectrum(sizes: _Sizes) -> dict[str, Tensor]:
    """Two frames per source position: the encoder's second convolution halves them."""
    config = sizes.config
    frames = 2 * config.max_source_positions
    return {"input_features": torch.randn(sizes.batch, config.num_mel_bins, frames).to(sizes.dtype)}


def _sound(sizes: _Sizes) -> dict[str, Tensor]:
    """Samples, or of a model that names them, frames of a spectrum."""
    config = sizes.config
    framed = hasattr(config, "max_length") and hasattr(config, "num_mel_bins")
    shape = (config.max_length, config.num_mel_bins) if framed else (sizes.seq or 16000,)
    return {"input_values": torch.randn(sizes.batch, *shape).to(sizes.dtype)}


_INPUTS: Mapping[str, Callable[[_Sizes], dict[str, Tensor]]] = MappingProxyType(
    {"input_ids": _tokens, "pixel_values": _pixels, "input_features": _spectrum, "input_values": _sound}
)


def _targets(sizes: _Sizes, head: str) -> dict[str, Any]:
    """Labels, or what else makes the model compute its loss."""
    shape, num_labels = (sizes.batch,), sizes.config.num_labels
    if head.endswith("TokenClassification"):
        return {"labels": torch.randint(0, num_labels, (*shape, sizes.length()))}
    if head.endswith(_PER_TOKEN):
        return {"labels": torch.randint(0, sizes.text.vocab_size, (*shape, sizes.length()))}
    if head.endswith(_PER_SAMPLE):
        return {"labels": torch.randint(0, num_labels, shape)}
    if head.endswith("SemanticSegmentation"):
        return {"labels": torch.randint(0, num_labels, (*shape, *sizes.sides()))}
    if head.endswith("QuestionAnswering"):
        return {name: torch.randint(0, sizes.length(), shape) for name in ("start_positions", "end_positions")}
    if head == "AutoModel" and "return_loss" in inspect.signature(sizes.model.forward).parameters:
        return {"return_loss": True}  # pairs of texts and images
    raise AutoparError(f"no labels are known for {head}", remedy=_OWN)
