"""How a model that reads texts and images takes its images: it is asked with one image and no values."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from autopar.errors import AutoparError

Form = Mapping[str, Any]
"""Argument → shape of a sample, or, of `image_sizes`, the plain numbers of a sample."""


def forms(model: Any, channels: int, sides: Sequence[int]) -> Iterator[Form]:
    """What models take, the most common first: an image, one of several images, or an image with its size; of an image that is cut into
    tiles, the whole of it comes before the tiles."""
    image = (channels, *sides)
    if "image_sizes" in inspect.signature(model.get_image_features).parameters:
        for shape in (image, (2, *image)):
            yield {"pixel_values": shape, "image_sizes": list(sides)}
    else:
        yield {"pixel_values": image}
        yield {"pixel_values": (1, *image)}


def made(form: Form, batch: int, dtype: torch.dtype) -> dict[str, Any]:
    """`batch` samples of a form, on the device of the context."""
    return {
        name: torch.randn(batch, *sample).to(dtype) if name == "pixel_values" else [list(sample) for _ in range(batch)]
        for name, sample in form.items()
    }


def form_and_tokens(model: Any, dtype: torch.dtype, channels: int, sides: Sequence[int], width: int) -> tuple[Form, int]:
    """The form that a model takes, and the number of a text's tokens that an image stands for: one for each feature made of it.

    Args:
        width: of a token.

    Raises:
        AutoparError: it takes none of those known.
    """
    refusals = []
    for device in ("meta", str(next(model.parameters()).device)):
        with torch.device(device), torch.no_grad():
            # On meta a twin is free; some models look at values, which the model itself has.
            asked = type(model)(model.config).to(dtype).eval() if device == "meta" else model
            for form in forms(model, channels, sides):
                try:
                    found = asked.get_image_features(**made(form, 1, dtype))
                except Exception as error:  # whatever a model raises of a form that it does not take
                    refusals.append(f"{type(error).__name__}: {error}")
                    continue
                pooled = getattr(found, "pooler_output", None)
                return form, sum(x.numel() for x in tree_leaves(found if pooled is None else pooled) if x is not None) // width
    raise not_known(f"how {type(model).__name__} takes images is not known; the first form that was tried raised {refusals[0]}")


def not_known(what: str) -> AutoparError:
    """The error of a model of which it is not known what its batches hold."""
    return AutoparError(what, remedy="pass --module FILE.py:FUNCTION, a function of yours that returns (model, batch)")
