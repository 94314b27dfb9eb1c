"""Random batches that fit a transformers model: the inputs follow from its main input, the labels
from its head."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from autopar.errors import AutoparError

# --------------------------------------------------------------------------------------------------
# The form in which a model that reads texts and images takes its images. It is found by calling the
# model with one image, on the meta device and, if that fails, on its own device.

Form = Mapping[str, Any]
"""Argument → shape of a sample; for `image_sizes` the numbers of a sample."""


def forms(model: Any, channels: int, sides: Sequence[int]) -> Iterator[Form]:
    """Yield the forms in which a model may take images, the most common first: an image, one of
    several images, or an image with its size. For models that cut an image into tiles, the whole
    image precedes its tiles.

    Args:
        model: the model.
        channels: channels of an image.
        sides: its height and width.
    """
    image = (channels, *sides)
    if "image_sizes" in inspect.signature(model.get_image_features).parameters:
        for shape in (image, (2, *image)):
            yield {"pixel_values": shape, "image_sizes": list(sides)}
    else:
        yield {"pixel_values": image}
        yield {"pixel_values": (1, *image)}


def build_batch(form: Form, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """Make random images of a form on the device of the context.

    Args:
        form: the form.
        batch: number of samples.
        dtype: dtype of the images.
    """
    return {
        name: (
            torch.randn(batch, *sample).to(dtype)
            if name == "pixel_values"
            else [list(sample) for _ in range(batch)]
        )
        for name, sample in form.items()
    }


def form_and_tokens(
    model: Any, dtype: torch.dtype, channels: int, sides: Sequence[int], width: int
) -> tuple[Form, int]:
    """Find the form in which a model takes images.

    Args:
        model: the model.
        dtype: dtype of the images.
        channels: channels of an image.
        sides: its height and width.
        width: features of a token.

    Returns:
        The form, and the number of tokens of the text that stand for an image: one per vector of
        image features.

    Raises:
        AutoparError: if the model takes none of the known forms.
    """
    refusals = []
    for device in ("meta", str(next(model.parameters()).device)):
        with torch.device(device), torch.no_grad():
            # A copy on meta costs nothing; models that read values need the model itself.
            asked = type(model)(model.config).to(dtype).eval() if device == "meta" else model
            for form in forms(model, channels, sides):
                try:
                    found = asked.get_image_features(**build_batch(form, 1, dtype))
                except (
                    Exception
                ) as error:  # a model may raise any error for a form that it does not accept
                    refusals.append(f"{type(error).__name__}: {error}")
                    continue
                pooled = getattr(found, "pooler_output", None)
                return (
                    form,
                    sum(
                        x.numel()
                        for x in tree_leaves(found if pooled is None else pooled)
                        if x is not None
                    )
                    // width,
                )
    raise not_known(
        f"unknown image inputs of {type(model).__name__}; the first form that was tried raised "
        f"{refusals[0]}"
    )


def not_known(what: str) -> AutoparError:
    """Return the error for a model whose batches are not known."""
    return AutoparError(
        what,
        remedy="pass --module FILE.py:FUNCTION with a function that returns (model, batch)",
    )


LABELS = "labels"
_SAMPLES, _SAMPLES_PER_TOKEN = 16000, 4000  # a second of sound, of which speech fills four tokens
_PER_TOKEN = (
    "CausalLM",
    "MaskedLM",
    "Seq2SeqLM",
    "PreTraining",
    "SpeechSeq2Seq",
    "ImageTextToText",
)
_PER_SAMPLE = (
    "ImageClassification",
    "SequenceClassification",
    "AudioClassification",
    "VideoClassification",
)
# The caller computes the loss of these heads, or it needs a matching of boxes and masks that cannot
# be captured, so they have no labels.
_UNLABELLED = (
    "AutoModel",
    "AutoBackbone",
    "DepthEstimation",
    "ImageToImage",
    "KeypointDetection",
    "ObjectDetection",
    "InstanceSegmentation",
    "UniversalSegmentation",
    "TimeSeriesPrediction",
)
_WIDTHS = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins")


def unlabelled(model: Any, batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch without labels, from which the model would compute its loss. A decoder that
    would read the labels, shifted, gets them as its input ids."""
    left = {name: x for name, x in batch.items() if name != LABELS}
    if LABELS in batch and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        left.setdefault("decoder_input_ids", batch[LABELS].clamp(min=0))
    return left


class _Sizes:
    """The sizes of a batch, from the model, its configuration, that of its text part, and the
    requested sizes."""

    def __init__(
        self, model: Any, dtype: torch.dtype, batch: int, seq: int | None, image: int
    ) -> None:
        self.model, self.dtype, self.batch, self.seq, self.image = model, dtype, batch, seq, image
        self.config = model.config
        self.text = self.config.get_text_config()
        self.reads_images = getattr(self.config, "vision_config", None) is not None

    def length(self) -> int:
        """Return the number of tokens of a sample; for raw sound those of its transcript."""
        if self.model.main_input_name == "input_values":
            return max(1, (self.seq or _SAMPLES) // _SAMPLES_PER_TOKEN)
        name = next(
            (
                name
                for name in ("max_position_embeddings", "max_target_positions")
                if getattr(self.text, name, None)
            ),
            "",
        )
        most = getattr(self.text, name, 0)
        if (
            self.seq is not None
            and 0 < most < self.seq
            and getattr(self.text, "rope_parameters", None) is None
        ):
            remedy = (
                f'pass --seq of at most {most}, or set "{name}": {self.seq} in the configuration'
            )
            raise AutoparError(
                f"the model has {most} positions, but the batch has {self.seq}", remedy=remedy
            )
        return self.seq or min(512, most or 512)

    def vocabulary(self) -> int:
        """Return the number of different tokens; a model without a vocabulary reads characters, and
        gets ASCII."""
        return getattr(self.text, "vocab_size", None) or 128

    def sides(self) -> tuple[int, ...]:
        """Return height and width of an image."""
        config = self.config.vision_config if self.reads_images else self.config
        return _pair(
            getattr(config, "image_size", None) or getattr(config, "crop_size", None) or self.image
        )

    def frames(self) -> tuple[int, ...]:
        """Return the number of images of a video, for a model that reads videos; else nothing."""
        config = self.config.vision_config if self.reads_images else self.config
        found = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
        return (found,) if found else ()

    def channels(self) -> int:
        """Return the number of channels of an image."""
        config = self.config.vision_config if self.reads_images else self.config
        return getattr(config, "num_channels", 3)

    def images(self) -> tuple[Form, int]:
        """Return the form in which the model takes an image with a text, and the number of the
        text's tokens that stand for the image."""
        if not hasattr(self.model, "get_image_features"):
            patches = _pair(self.config.vision_config.patch_size)
            num_tokens = math.prod(
                side // patch for side, patch in zip(self.sides(), patches, strict=True)
            )
            return {"pixel_values": (self.channels(), *self.sides())}, num_tokens
        return form_and_tokens(
            self.model, self.dtype, self.channels(), self.sides(), self.text.hidden_size
        )


def _pair(sizes: int | Sequence[int]) -> tuple[int, ...]:
    return (sizes, sizes) if isinstance(sizes, int) else tuple(sizes)


def make_batch(
    model: Any, head: str, dtype: torch.dtype, batch: int, seq: int | None, image: int
) -> dict[str, Any]:
    """Make random inputs and labels on the device of the context.

    Args:
        model: the model.
        head: name of its auto class, which determines the labels.
        dtype: dtype of floating inputs.
        batch: number of samples.
        seq: length of a sample; None for the model's default.
        image: height and width of images if the configuration does not state them.

    Raises:
        AutoparError: if the batches of the model, or the labels of the head, are not known.
    """
    sizes = _Sizes(model, dtype, batch, seq, image)
    make = _INPUTS.get(model.main_input_name)
    if make is None:
        raise not_known(f"no batch is known for the main input {model.main_input_name!r}")
    inputs = make(sizes)
    if sizes.reads_images and "input_ids" not in inputs and sizes.text is not sizes.config:
        inputs |= _tokens(sizes)  # a model that reads both may call either its main input
    if sizes.reads_images and "pixel_values" not in inputs:
        inputs |= _pixels(sizes)
    return {**inputs, **_targets(sizes, head)}


def _tokens(sizes: _Sizes) -> dict[str, Any]:
    """Token ids. For a model that reads images, the first tokens stand for an image, which is part
    of the batch."""
    ids = torch.randint(0, sizes.vocabulary(), (sizes.batch, sizes.length()))
    mark = getattr(sizes.config, "image_token_id", None)
    if mark is None or not sizes.reads_images:
        return {"input_ids": ids}
    form, num_tokens = sizes.images()
    if num_tokens >= sizes.length():
        what = f"an image takes {num_tokens} tokens, but a sample has {sizes.length()}"
        raise AutoparError(what, remedy=f"pass --seq with more than {num_tokens}")
    ids = torch.where(ids == mark, (mark + 1) % sizes.vocabulary(), ids)
    ids[:, :num_tokens] = mark
    return {"input_ids": ids, **build_batch(form, sizes.batch, sizes.dtype)}


def _pixels(sizes: _Sizes) -> dict[str, Tensor]:
    return {
        "pixel_values": (
            torch.randn(sizes.batch, *sizes.frames(), sizes.channels(), *sizes.sides()).to(
                sizes.dtype
            )
        )
    }


def _film(sizes: _Sizes) -> dict[str, Tensor]:
    return {"pixel_values_videos": _pixels(sizes)["pixel_values"]}


def _spectrum(sizes: _Sizes) -> dict[str, Tensor]:
    """Spectra of sounds: of the length that the configuration requires, channels first, or of any
    length."""
    config = sizes.config
    inside = getattr(config, "encoder_config", None)
    if inside is not None and not any(hasattr(config, name) for name in _WIDTHS):
        config = inside
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        shape = (
            config.num_mel_bins,
            2 * config.max_source_positions,
        )  # the encoder's second convolution halves them
    else:
        width = next((getattr(config, name) for name in _WIDTHS if hasattr(config, name)), None)
        if width is None:
            raise not_known(
                f"the configuration does not specify the width of a {config.model_type} spectrum"
            )
        most = getattr(config, "max_source_positions", None) or 512
        shape = min(sizes.seq or 512, most), width * getattr(config, "input_channels", 1)
    return {"input_features": torch.randn(sizes.batch, *shape).to(sizes.dtype)}


def _sound(sizes: _Sizes) -> dict[str, Tensor]:
    """Raw sound, or, for a model whose configuration has them, frames of a spectrum."""
    config = sizes.config
    framed = hasattr(config, "max_length") and hasattr(config, "num_mel_bins")
    shape = (config.max_length, config.num_mel_bins) if framed else (sizes.seq or _SAMPLES,)
    return {"input_values": torch.randn(sizes.batch, *shape).to(sizes.dtype)}


def _series(sizes: _Sizes) -> dict[str, Tensor]:
    """Past values of time series, and the further arguments that forward has: features of time,
    future values and masks."""
    config, names = sizes.config, inspect.signature(sizes.model.forward).parameters
    past = config.context_length + max(getattr(config, "lags_sequence", None) or [0])
    channels = getattr(config, "num_input_channels", None) or getattr(config, "input_size", 1)
    width = () if channels == 1 and not hasattr(config, "num_input_channels") else (channels,)
    parts: dict[str, tuple[int, ...]] = {"past_values": (past, *width)}
    for name, length in (("past", past), ("future", getattr(config, "prediction_length", 0))):
        parts[f"{name}_time_features"] = (length, getattr(config, "num_time_features", 0))
        parts[f"{name}_values"] = (length, *width)
    made = {
        name: torch.randn(sizes.batch, *shape).to(sizes.dtype)
        for name, shape in parts.items()
        if name in names and all(shape)
    }
    if "past_observed_mask" in names:
        made["past_observed_mask"] = torch.ones(sizes.batch, past, *width)
    return made


def _perceiver_inputs(sizes: _Sizes) -> dict[str, Any]:
    return {"inputs": _tokens(sizes)["input_ids"]}


_INPUTS: Mapping[str, Callable[[_Sizes], dict[str, Any]]] = MappingProxyType(
    {
        "input_ids": _tokens,
        "pixel_values": _pixels,
        "pixel_values_videos": _film,
        "input_features": _spectrum,
        "input_values": _sound,
        "past_values": _series,
        "inputs": _perceiver_inputs,
    }
)


def _targets(sizes: _Sizes, head: str) -> dict[str, Any]:
    """Labels, or the argument that makes the model compute its loss."""
    shape, num_labels = (sizes.batch,), sizes.config.num_labels
    if head.endswith("TokenClassification"):
        return {"labels": torch.randint(0, num_labels, (*shape, sizes.length()))}
    if head.endswith(_PER_TOKEN):
        return {"labels": torch.randint(0, sizes.vocabulary(), (*shape, sizes.length()))}
    if head.endswith("TextToSpectrogram"):
        return {
            "labels": torch.randn(*shape, sizes.length(), sizes.config.num_mel_bins).to(sizes.dtype)
        }
    if head.endswith("CTC"):  # shorter than the sound; 0 is mostly the blank
        return {"labels": torch.randint(1, sizes.vocabulary(), (*shape, 2))}
    if head.endswith(_PER_SAMPLE):
        return {"labels": torch.randint(0, num_labels, shape)}
    if head.endswith("SemanticSegmentation"):
        return {"labels": torch.randint(0, num_labels, (*shape, *sizes.sides()))}
    if head.endswith("QuestionAnswering"):
        return {
            name: torch.randint(0, sizes.length(), shape)
            for name in ("start_positions", "end_positions")
        }
    if head == "AutoModel" and "return_loss" in inspect.signature(sizes.model.forward).parameters:
        return {"return_loss": True}  # pairs of texts and images
    if head.endswith(_UNLABELLED):
        return {}
    raise not_known(f"no labels are known for {head}")
