"""The model zoo. `build(name)` returns (model, batch), by default of a tiny size. The model returns
its own loss.

`NAMES` lists decoders, encoders, sequence to sequence, mixtures of experts, vision, audio,
multimodal, diffusion, recommendation, CNNs with BatchNorm, a 3D U-Net, a state space model and an
LSTM. Nothing is downloaded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from autopar import hf
from autopar.errors import AutoparError
from benchmarks.zoo import sequences, vision
from benchmarks.zoo.published import PUBLISHED, Published

Built = tuple[nn.Module, dict[str, Any]]

# Models with a length, and models without one.
_LONG: Mapping[str, Callable[..., Built]] = MappingProxyType(
    {"nn_transformer": sequences.nn_transformer, "lstm": sequences.lstm}
)
_SHORT: Mapping[str, Callable[..., Built]] = MappingProxyType(
    {
        "unet2d": vision.unet2d,
        "dit": vision.dit,
        "unet3d": vision.unet3d,
        "cnn": vision.cnn,
        "dlrm": sequences.dlrm,
    }
)
NAMES: tuple[str, ...] = (*PUBLISHED, *_LONG, *_SHORT)


def build(
    name: str,
    *,
    batch: int = 8,
    seq: int | None = None,
    dropout: float = 0.0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device = "cpu",
    seed: int = 0,
    **settings: Any,
) -> Built:
    """Return the model `name` in training mode, and a batch as keyword arguments of its forward.

    Weights and batch are drawn from `seed`. Parameters that are initialized as zeros are drawn as
    well, since zeros would hide lost or misplaced values. On meta, tensors have no values.

    Args:
        name: name of the model.
        batch: number of samples.
        seq: tokens per sample (samples of a sound), if the model has a length.
        dropout: probability of every dropout in the model.
        dtype: dtype of the weights and of floating inputs.
        device: device of the model and the batch.
        seed: seed of the random numbers.
        settings: settings that replace those of the tiny size: of the configuration
            (``num_hidden_layers=32``), or of the model's class.

    Raises:
        AutoparError: if there is no model of that name, or if it does not have a setting.
    """
    if name in PUBLISHED:
        return _published(
            PUBLISHED[name],
            settings,
            batch=batch,
            seq=seq,
            dropout=dropout,
            dtype=dtype,
            device=device,
            seed=seed,
        )
    if name not in NAMES:
        raise AutoparError(f"the zoo has no {name!r}", remedy=f"use one of {', '.join(NAMES)}")
    with torch.random.fork_rng([]), torch.device(device):
        torch.manual_seed(seed)
        try:
            if name in _LONG:
                model, made = _LONG[name](batch, seq or 16, dropout=dropout, **settings)
            else:
                model, made = _SHORT[name](batch, dropout=dropout, **settings)
        except TypeError as error:
            raise AutoparError(
                f"{name} does not take these settings: {error}",
                remedy="see its class in benchmarks/zoo",
            ) from error
        model = _without_zeros(model.to(dtype).train())
    return model, {key: cast(value, dtype) for key, value in made.items()}


def spec_of(name: str, **settings: Any) -> str:
    """Return the `autopar.hf` spec of a published architecture, for example for ``--hf``."""
    return f"{PUBLISHED[name].kind}:{json.dumps(_merged(PUBLISHED[name].settings, settings))}"


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` updated with `over`; nested objects are merged entry by entry."""
    nested = {
        k: _merged(base[k], v)
        for k, v in over.items()
        if isinstance(v, Mapping) and isinstance(base.get(k), Mapping)
    }
    return {**base, **over, **nested}


def _published(
    entry: Published,
    settings: Mapping[str, Any],
    *,
    seq: int | None,
    seed: int,
    device: Any,
    **how: Any,
) -> Built:
    spec = f"{entry.kind}:{json.dumps(_merged(entry.settings, settings))}"
    model, made = hf.build(spec, seq=seq or entry.seq, image=32, seed=seed, device=device, **how)
    if entry.masked:
        made["attention_mask"] = _padding(made["input_ids"])
    with torch.random.fork_rng([]):
        torch.manual_seed(seed + 1)
        return _without_zeros(model), made


def _padding(ids: Tensor) -> Tensor:
    """Return a mask of ones, with zeros at the end of every other sample."""
    mask = torch.ones_like(ids)
    mask[::2, -max(ids.shape[1] // 4, 1) :] = 0
    return mask


def _without_zeros(model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        if not parameter.is_meta and not parameter.any():
            nn.init.normal_(parameter, std=0.02)
    return model


def cast(value: Any, dtype: torch.dtype) -> Any:
    """Return `value` in a dtype if it is a floating tensor, else unchanged."""
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value
