"""Architectures outside the zoo, to test whether a first run works. ``unseen.json`` describes its
contents."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopar import hf
from autopar.errors import AutoparError

LIST = json.loads((Path(__file__).parent / "unseen.json").read_text(encoding="utf-8"))
NAMES: tuple[str, ...] = tuple(LIST["models"])
REFUSED: dict[str, str] = LIST["refused"]


def build(name: str, **how: Any) -> tuple[nn.Module, dict[str, Any]]:
    """Return the model `name` and a batch, as `autopar.hf.build` does. Parameters that are
    initialized as zeros are drawn at random, since zeros would hide lost values.

    Raises:
        AutoparError: if the list has no such name.
    """
    if name not in NAMES:
        raise AutoparError(
            f"the list of unseen architectures has no {name!r}",
            remedy=f"use one of {', '.join(NAMES)}",
        )
    model, batch = hf.build(
        LIST["models"][name], seq=LIST["seq"].get(name, LIST["length"]), image=LIST["image"], **how
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.is_meta and not parameter.any():
                parameter.normal_(std=0.02)
    return model, batch
