"""Models of other libraries (torchvision, timm, diffusers), which are imported when a model is
built. ``libraries.json`` describes its contents."""

from __future__ import annotations

import importlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from autopar.errors import AutoparError

LIST = json.loads((Path(__file__).parent / "libraries.json").read_text(encoding="utf-8"))
NAMES: tuple[str, ...] = tuple(LIST["models"])
LIBRARIES: tuple[str, ...] = tuple(dict.fromkeys(name.partition("/")[0] for name in NAMES))


class WithLoss(nn.Module):
    """A model with the loss of all its outputs: cross entropies of class labels if there are any,
    else mean squares."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, labels: Tensor | None = None, **inputs: Any) -> dict[str, Any]:
        returned = self.model(**inputs)
        numbers = [
            x for x in tree_leaves(returned) if isinstance(x, Tensor) and x.is_floating_point()
        ]
        losses = [
            x.square().mean() if labels is None else F.cross_entropy(x, labels) for x in numbers
        ]
        return {"loss": torch.stack(losses).sum(), "outputs": returned}


def build(
    name: str, *, batch: int, dtype: torch.dtype, device: str, seed: int
) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model `name` in training mode without dropout, with its loss, and a batch.
    Parameters that are initialized as zeros are drawn.

    Raises:
        AutoparError: if the list has no such name, or if its library is not installed.
    """
    if name not in NAMES:
        raise AutoparError(
            f"the list of libraries' models has no {name!r}",
            remedy=f"use one of {', '.join(NAMES)}",
        )
    entry = LIST["models"][name]
    with torch.random.fork_rng([]), torch.device(device):
        torch.manual_seed(seed)
        model = WithLoss(build_model(entry["make"], entry["settings"])).train()
        made = {key: _drawn(shape, batch) for key, shape in entry["inputs"].items()}
        for module in model.modules():
            _without_dropout(module)
        with torch.no_grad():
            for parameter in model.parameters():
                if not parameter.is_meta and not parameter.any():
                    parameter.normal_(std=0.02)
    floats = {
        key: x.to(dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
        for key, x in made.items()
    }
    return model.to(dtype), floats


def build_model(path: str, settings: Mapping[str, Any]) -> nn.Module:
    """Return the model of a class, given its import path and settings.

    Raises:
        AutoparError: if the library is not installed.
    """
    package, _, name = path.rpartition(".")
    _operators_of_torchvision()
    try:
        made: nn.Module = getattr(importlib.import_module(package), name)(**settings)
    except ImportError as error:
        raise AutoparError(
            f"{path} cannot be imported: {error}", remedy=f"pip install {package.partition('.')[0]}"
        ) from error
    return made


def _operators_of_torchvision() -> None:
    """Define torchvision's operators if they cannot be loaded.

    Its wheel is built for torch with CUDA. With torch for CPUs its operators do not load, and it
    cannot be imported without their names. No model here calls them.
    """
    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(
                f"torchvision::{name}",
                "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            )


def _drawn(spec: Any, batch: int) -> Any:
    """Return a tensor of a sample's shape and the batch, or integers below `below`. Other values
    are returned unchanged."""
    if isinstance(spec, list):
        return torch.randn(batch, *spec)
    if isinstance(spec, dict) and "below" in spec:
        return torch.randint(spec.get("from", 0), spec["below"], (batch, *spec["shape"]))
    if isinstance(spec, dict) and "count" in spec:
        return torch.arange(math.prod(spec["count"]), dtype=torch.float32).reshape(spec["count"])
    if isinstance(spec, dict):
        return spec["value"]
    return spec


def _without_dropout(module: nn.Module) -> None:
    for name in ("p", "drop_prob", "dropout", "attn_drop", "dropout_p"):
        if isinstance(getattr(module, name, None), float):
            setattr(module, name, 0.0)
