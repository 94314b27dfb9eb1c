"""The file `others.json`: states that are saved with a model and its optimizer, by name. Their
tensors are in `others.safetensors`.

    {"format": "autopar-others", "version": 1, "states": {"scheduler": {"last_epoch": 3}}, "parts":
    {"average": "module"}}

The names under "parts" are distributed objects. Each rank writes its part of them into its own
file (`autopar.checkpoint.companions`).
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

from autopar.checkpoint.rank_parts import Copy, write_bytes
from autopar.checkpoint.safetensors_files import TensorFile, damage_error, unsafe, write_tensors
from autopar.checkpoint.values import Tensors, decode, encode
from autopar.core.json_text import read_json

OTHERS, TENSORS, OLD_OTHERS = "others.json", "others.safetensors", "others.pt"
_FORMAT, _VERSION = "autopar-others", 1


VALUE, MODULE, OPTIMIZER = "value", "module", "optimizer"
Target = Callable[[str, torch.dtype, torch.Size], Tensor]


@dataclass(frozen=True, slots=True)
class Others:
    """The content of `others.json` and `others.safetensors` before it is written.

    Attributes:
        states: values as JSON data, by name.
        tensors: the tensors of the values, by path.
        parts: the kind of each distributed object, by name.
    """

    states: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    parts: Mapping[str, str]

    @staticmethod
    def of(states: Mapping[str, Any], parts: Mapping[str, str]) -> Others:
        """Encode states.

        Args:
            states: the results of `state_dict`, by name.
            parts: the kind of each distributed object, by name.

        Raises:
            RuntimeStateError: if a state cannot be written as JSON and tensors. The message names
                part of the state.
        """
        tensors = Tensors()
        return Others(
            {name: encode(state, (name,), tensors) for name, state in states.items()},
            tensors,
            parts,
        )

    def with_copies(self, copy: Copy) -> Others:
        """Return the same states with copied tensors; `copy` takes the name and the tensor."""
        return replace(
            self, tensors={name: copy(name, tensor) for name, tensor in self.tensors.items()}
        )

    def texts(self) -> dict[str, str]:
        """Return each state as JSON text, by name."""
        return {name: json.dumps(state, allow_nan=False) for name, state in self.states.items()}

    def write(self, place: Path) -> dict[str, int]:
        """Write the files into a folder and return the CRC-32 of each file, by file name."""
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
    """The states that a checkpoint holds.

    Attributes:
        kinds: "value", "module" or "optimizer", by name.
        value: reads the value of a name. It calls its second argument with the path, dtype and
            shape of each distributed tensor, and puts the result into the value. It raises
            RuntimeStateError like `read_others`.
    """

    kinds: Mapping[str, str]
    value: Callable[[str, Target], Any]


def read_others(place: Path) -> SavedOthers:
    """Read the states of a checkpoint of this or an earlier version.

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
        """Decode the state of a name; `target` makes its distributed tensors."""

        def find(name: str, dtype: torch.dtype, shape: torch.Size, is_sharded: bool) -> Tensor:
            """Read a plain tensor from its file, or make the target of a distributed one.

            Args:
                name: the path of the tensor in the value.
                dtype, shape: its dtype and shape.
                is_sharded: whether it is distributed.
            """
            if is_sharded:
                return target(name, dtype, shape)
            if not opened:
                opened.append(TensorFile(place / TENSORS))
            return opened[0].read(name, dtype, shape)

        with _damage_of(path):
            return decode(states[name], (name,), find)

    return SavedOthers({**dict.fromkeys(states, VALUE), **parts}, value)


def read_all_others(place: Path) -> dict[str, Any]:
    """Read all states that are not distributed objects.

    Args:
        place: the checkpoint's folder.

    Returns:
        The states, by name; distributed tensors are on the meta device.

    Raises:
        RuntimeStateError, OSError: under the conditions of `read_others`.
    """
    saved = read_others(place)
    return {
        name: saved.value(name, _on_meta) for name, kind in saved.kinds.items() if kind == VALUE
    }


def _on_meta(name: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@contextmanager
def _damage_of(path: Path) -> Iterator[None]:
    """Turn a ValueError into a RuntimeStateError that names the damaged file."""
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
    """Read the file of an earlier version with `torch.load(weights_only=True)`, which runs no
    code."""
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
