"""`others.json`: the states of what is saved with a model and its optimizer, by name. Their tensors are in `others.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.errors import RuntimeStateError
from autopar.json_text import read_json
from autopar.run.saved_parts import Copy, write_bytes
from autopar.run.saved_tensors import TensorFile, write_tensors
from autopar.run.saved_values import decode, encode

OTHERS, TENSORS, OLD_OTHERS = "others.json", "others.safetensors", "others.pt"
_FORMAT, _VERSION = "autopar-others", 1
_REMEDY = "do not use it unless you know who wrote it; take another checkpoint, or save anew"


@dataclass(frozen=True, slots=True)
class Others:
    """What is written of them: the text of the JSON file, and the tensors by name."""

    text: str
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(states: Mapping[str, Any], copy: Copy | None = None) -> Others:
        """Encode states.

        Args:
            states: what their `state_dict` returned, by name.
            copy: makes a copy of a tensor of this name; by default tensors are taken as they are.

        Raises:
            RuntimeStateError: if a state cannot be written as JSON and tensors. The message names the part.
        """
        tensors: dict[str, Tensor] = {}
        encoded = {name: encode(state, (name,), tensors) for name, state in states.items()}
        text = json.dumps({"format": _FORMAT, "version": _VERSION, "states": encoded}, allow_nan=False) + "\n"
        return Others(text, tensors if copy is None else {name: copy(name, tensor) for name, tensor in tensors.items()})

    def write(self, place: Path) -> dict[str, int]:
        """Write them into a folder; the CRC-32 of each file, by its name."""
        sums = {OTHERS: write_bytes(place / OTHERS, self.text.encode())}
        return {**sums, TENSORS: write_tensors(place / TENSORS, self.tensors)} if self.tensors else sums


def read_all_others(place: Path) -> dict[str, Any]:
    """Read the states of a checkpoint, also of one of an earlier version.

    Args:
        place: the checkpoint's folder.

    Returns:
        The states, by name.

    Raises:
        RuntimeStateError: if a file is damaged, or would run code.
        OSError: if a file cannot be read.
    """
    path = place / OTHERS
    try:
        if not path.is_file() and (place / OLD_OTHERS).is_file():
            path = place / OLD_OTHERS
            return _read_old(path)
        return _states_of(read_json(path.read_text(encoding="utf-8")), place)
    except ValueError as error:
        what = f"{path.name} of the checkpoint is damaged: {error}"
        raise RuntimeStateError(what, where=str(path), remedy="take another checkpoint, or copy it again") from error


def _states_of(data: Any, place: Path) -> dict[str, Any]:
    known = data if isinstance(data, dict) else {}
    states = known.get("states")
    if known.get("format") != _FORMAT or known.get("version") != _VERSION or not isinstance(states, dict):
        raise ValueError(f"it is not of format {_FORMAT}, version {_VERSION}")
    opened: list[TensorFile] = []

    def find(name: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
        if not opened:
            opened.append(TensorFile(place / TENSORS))
        return opened[0].read(name, dtype, shape)

    return {name: decode(state, (name,), find) for name, state in states.items()}


def _read_old(path: Path) -> dict[str, Any]:
    """What an earlier version wrote, by torch's reader of weights, which runs no code."""
    try:
        found = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # pickle and torch raise many classes for what they do not take
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise RuntimeStateError(f"{path.name} of the checkpoint is refused: {said}", where=str(path), remedy=_REMEDY) from error
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    return found
