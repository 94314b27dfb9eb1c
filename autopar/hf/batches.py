"""Random batches for transformers models. The main input of a model determines the inputs, and its
head determines the labels."""

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
# The form of image inputs of a model that reads texts and images. It is determined by calling the
# model with one image, on the meta device and, if that fails, on the device of the model.

Form = Mapping[str, Any]
"""The shape of a sample, by argument. For `image_sizes`, it is the value of a sample."""


def forms(model: Any, channels: int, sides: Sequence[int]) -> Iterator[Form]:
    """Yield the possible forms of a model's image inputs, the most common form first: an image, a
    list of images, or an image with its size. For models that divide an image into tiles, the full
    image precedes its tiles.

    Args:
        model: the model.
        channels: the number of channels of an image.
        sides: the height and width of an image.
    """
    image = (channels, *sides)
    if "image_sizes" in inspect.signature(model.get_image_features).parameters:
        for shape in (image, (2, *image)):
            yield {"pixel_values": shape, "image_sizes": list(sides)}
    else:
        yield {"pixel_values": image}
        yield {"pixel_values": (1, *image)}


def build_batch(form: Form, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """Create random images of a form on the current default device.

    Args:
        form: the form.
        batch: the number of samples.
        dtype: the dtype of the images.
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
    """Find the form of a model's image inputs.

    Args:
        model: the model.
        dtype: the dtype of the images.
        channels: the number of channels of an image.
        sides: the height and width of an image.
        width: the number of features of a token.

    Returns:
        The form, and the number of text tokens that represent an image: one per vector of image
        features.

    Raises:
        AutoparError: if the model accepts none of the known forms.
    """
    refusals = []
    for device in ("meta", str(next(model.parameters()).device)):
        with torch.device(device), torch.no_grad():
            # A copy on meta takes no memory. Models that read values need real tensors.
            tried = type(model)(model.config).to(dtype).eval() if device == "meta" else model
            for form in forms(model, channels, sides):
                try:
                    found = tried.get_image_features(**build_batch(form, 1, dtype))
                # a model may raise any error for a form that it does not accept
                except Exception as error:
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
    """Return the error for a model for which no batch is known."""
    return AutoparError(
        what,
        remedy="pass --module FILE.py:FUNCTION with a function that returns (model, batch)",
    )


LABELS = "labels"
_SAMPLES, _SAMPLES_PER_TOKEN = 16000, 4000  # one second of sound, with four tokens of speech
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
# These heads have no labels: the caller computes their loss, or the loss requires a matching of
# boxes and masks that cannot be captured.
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
    """Return the batch without labels, so that the model computes no loss. A decoder that reads the
    shifted labels gets them as its input ids instead."""
    left = {name: x for name, x in batch.items() if name != LABELS}
    if LABELS in batch and getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        left.setdefault("decoder_input_ids", batch[LABELS].clamp(min=0))
    return left


class _Sizes:
    """The sizes of a batch. They are derived from the model, its configuration, the configuration
    of its text model, and the requested sizes."""

    def __init__(
        self, model: Any, dtype: torch.dtype, batch: int, seq: int | None, image: int
    ) -> None:
        self.model, self.dtype, self.batch, self.seq, self.image = model, dtype, batch, seq, image
        self.config = model.config
        self.text = self.config.get_text_config()
        self.reads_images = getattr(self.config, "vision_config", None) is not None

    def length(self) -> int:
        """Return the number of tokens of a sample; for raw sound, that of its transcript."""
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
        """Return the size of the vocabulary. A model without a vocabulary reads characters; for it,
        this returns the number of ASCII characters."""
        return getattr(self.text, "vocab_size", None) or 128

    def sides(self) -> tuple[int, ...]:
        """Return the height and width of an image."""
        config = self.config.vision_config if self.reads_images else self.config
        return _pair(
            getattr(config, "image_size", None) or getattr(config, "crop_size", None) or self.image
        )

    def frames(self) -> tuple[int, ...]:
        """Return the number of images of a video as a tuple; an empty tuple for a model that does
        not read videos."""
        config = self.config.vision_config if self.reads_images else self.config
        found = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None)
        return (found,) if found else ()

    def channels(self) -> int:
        """Return the number of channels of an image."""
        config = self.config.vision_config if self.reads_images else self.config
        return getattr(config, "num_channels", 3)

    def images(self) -> tuple[Form, int]:
        """Return the form of the image inputs of a model that also reads texts, and the number of
        text tokens that represent an image."""
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
    """Create random inputs and labels on the current default device.

    Args:
        model: the model.
        head: the name of its auto class, which determines the labels.
        dtype: the dtype of floating-point inputs.
        batch: the number of samples.
        seq: the length of a sample; None selects the default of the model.
        image: the height and width of images, if the configuration does not specify them.

    Raises:
        AutoparError: if the inputs of the model or the labels of the head are not known.
    """
    sizes = _Sizes(model, dtype, batch, seq, image)
    make = _INPUTS.get(model.main_input_name)
    if make is None:
        raise not_known(f"no batch is known for the main input {model.main_input_name!r}")
    inputs = make(sizes)
    if sizes.reads_images and "input_ids" not in inputs and sizes.text is not sizes.config:
        inputs |= _tokens(sizes)  # the main input of a model that reads both may be either
    if sizes.reads_images and "pixel_values" not in inputs:
        inputs |= _pixels(sizes)
    return {**inputs, **_targets(sizes, head)}


def _tokens(sizes: _Sizes) -> dict[str, Any]:
    """Create token ids. For a model that reads images, the first tokens represent an image, which
    is also part of the batch."""
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
    """Create spectra of sounds. If the configuration requires a length, they have this length with
    channels first; otherwise, they have any length."""
    config = sizes.config
    inside = getattr(config, "encoder_config", None)
    if inside is not None and not any(hasattr(config, name) for name in _WIDTHS):
        config = inside
    if hasattr(config, "num_mel_bins") and hasattr(config, "max_source_positions"):
        # the second convolution of the encoder halves the length
        shape = (config.num_mel_bins, 2 * config.max_source_positions)
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
    """Create raw sound, or frames of a spectrum if the configuration specifies them."""
    config = sizes.config
    framed = hasattr(config, "max_length") and hasattr(config, "num_mel_bins")
    shape = (config.max_length, config.num_mel_bins) if framed else (sizes.seq or _SAMPLES,)
    return {"input_values": torch.randn(sizes.batch, *shape).to(sizes.dtype)}


def _series(sizes: _Sizes) -> dict[str, Tensor]:
    """Create past values of time series, and the other arguments of forward: time features, future
    values and masks."""
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
    """Return labels, or the argument that makes the model compute its loss."""
    shape, num_labels = (sizes.batch,), sizes.config.num_labels
    if head.endswith("TokenClassification"):
        return {"labels": torch.randint(0, num_labels, (*shape, sizes.length()))}
    if head.endswith(_PER_TOKEN):
        return {"labels": torch.randint(0, sizes.vocabulary(), (*shape, sizes.length()))}
    if head.endswith("TextToSpectrogram"):
        return {
            "labels": torch.randn(*shape, sizes.length(), sizes.config.num_mel_bins).to(sizes.dtype)
        }
    if head.endswith("CTC"):  # shorter than the sound, without 0, which usually is the blank token
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
