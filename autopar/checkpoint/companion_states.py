"""`others.json`: the states of what is saved with a model and its optimizer, by name. Their tensors
are in `others.safetensors`.

    {"format": "autopar-others", "version": 1, "states": {"scheduler": {"last_epoch": 3}}, "parts":
    {"average": "module"}}

What is under "parts" is in parts, in the files of all ranks (`saved_beside`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autopar.checkpoint.parts import Copy, write_bytes
from autopar.checkpoint.safetensors_files import TensorFile, damage_error, unsafe, write_tensors
from autopar.checkpoint.values import Tensors, decode, encode
from autopar.core.json_text import read_json

OTHERS, TENSORS, OLD_OTHERS = "others.json", "others.safetensors", "others.pt"
_FORMAT, _VERSION = "autopar-others", 1


VALUE, MODULE, OPTIMIZER = "value", "module", "optimizer"
Target = Callable[[str, torch.dtype, torch.Size], Tensor]


@dataclass(frozen=True, slots=True)
class Others:
    """What is written of them.

    Attributes:
        states: values as JSON data, by name.
        tensors: their tensors, by path.
        parts: the kind of what is in parts, by name.
    """

    states: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    parts: Mapping[str, str]

    @staticmethod
    def of(states: Mapping[str, Any], parts: Mapping[str, str]) -> Others:
        """Encode states.

        Args:
            states: what their `state_dict` returned, by name.
            parts: the kind of what is in parts, by name.

        Raises:
            RuntimeStateError: if a state cannot be written as JSON and tensors. The message names
                the part.
        """
        tensors = Tensors()
        return Others(
            {name: encode(state, (name,), tensors) for name, state in states.items()},
            tensors,
            parts,
        )

    def copied(self, copy: Copy) -> Others:
        """The same with copies of its tensors, each of which `copy` makes of a name and a
        tensor."""
        return replace(
            self, tensors={name: copy(name, tensor) for name, tensor in self.tensors.items()}
        )

    def texts(self) -> dict[str, str]:
        """What is said of each, as JSON."""
        return {name: json.dumps(state, allow_nan=False) for name, state in self.states.items()}

    def write(self, place: Path) -> dict[str, int]:
        """Write them into a folder; the CRC-32 of each file, by its name."""
        data = {"format": _FORMAT, "version": _VERSION, "states": self.states, "parts": self.parts}
        sums = {
            OTHERS: write_bytes(place / OTHERS, (json.dumps(data, allow_nan=False) + "\n").encode())
        }
        return (
            {**sums, TENSORS: write_tensors(place / TENSORS, self.tensors)}
            if self.tensors
            else sums
        )


@dataclass(frozen=True, slots=True)
class SavedOthers:
    """What a checkpoint has of them.

    Attributes:
        kinds: "value", "module" or "optimizer", by name.
        value: makes the value of a name. It asks for tensors to put in the place of those that are
            in parts, by their path, dtype and shape, and raises RuntimeStateError as `read_others`.
    """

    kinds: Mapping[str, str]
    value: Callable[[str, Target], Any]


def read_others(place: Path) -> SavedOthers:
    """Read the states of a checkpoint, also of one of an earlier version.

    Args:
        place: the checkpoint's folder.

    Raises:
        RuntimeStateError: if a file is damaged, or would run code.
        OSError: if a file cannot be read.
    """
    path = place / OTHERS
    if not path.is_file() and (place / OLD_OTHERS).is_file():
        path = place / OLD_OTHERS
        with _damage_of(path):
            old = _read_old(path)
        return SavedOthers(dict.fromkeys(old, VALUE), lambda name, _: old[name])
    with _damage_of(path):
        states, parts = _read_json(path)
    opened: list[TensorFile] = []

    def value(name: str, target: Target) -> Any:
        def find(name: str, dtype: torch.dtype, shape: torch.Size, is_sharded: bool) -> Tensor:
            if is_sharded:
                return target(name, dtype, shape)
            if not opened:
                opened.append(TensorFile(place / TENSORS))
            return opened[0].read(name, dtype, shape)

        with _damage_of(path):
            return decode(states[name], (name,), find)

    return SavedOthers({**dict.fromkeys(states, VALUE), **parts}, value)


def read_all_others(place: Path) -> dict[str, Any]:
    """Read all states that are not in parts.

    Args:
        place: the checkpoint's folder.

    Returns:
        The states, by name; distributed tensors are on meta.

    Raises:
        RuntimeStateError, OSError: as `read_others`.
    """
    saved = read_others(place)
    return {
        name: saved.value(name, _on_meta) for name, kind in saved.kinds.items() if kind == VALUE
    }


def _on_meta(name: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Say of which file it is that its content is not what it should be."""
    try:
        yield
    except ValueError as error:
        raise damage_error(f"{path.name} of the checkpoint is damaged: {error}", path) from error


def _read_json(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    data = read_json(path.read_text(encoding="utf-8"))
    known = data if isinstance(data, dict) else {}
    states, parts = known.get("states"), known.get("parts", {})
    if (
        known.get("format") != _FORMAT
        or known.get("version") != _VERSION
        or not isinstance(states, dict)
    ):
        raise ValueError(f"it is not of format {_FORMAT}, version {_VERSION}")
    if (
        not isinstance(parts, dict)
        or not set(parts.values()) <= {MODULE, OPTIMIZER}
        or parts.keys() & states.keys()
    ):
        raise ValueError("it does not say what is in parts")
    return states, parts


def _read_old(path: Path) -> dict[str, Any]:
    """What an earlier version wrote, by torch's reader of weights, which runs no code."""
    try:
        found = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # pickle and torch raise many classes for what they do not take
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise unsafe(f"{path.name} of the checkpoint is refused: {said}", path) from error
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    return found
