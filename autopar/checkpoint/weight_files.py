"""Files of weights in the layout of Hugging Face: one safetensors file, or several with an index.

Files may come from anywhere. An index names files of its own folder only, and every path is checked
before it is opened, since opening a named pipe would wait for another process.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from autopar.core.json_text import read_json
from autopar.core.text_files import read_text, why_unreadable
from autopar.errors import RuntimeStateError

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_NAME = "model"
_OURS = re.compile(rf"{_NAME}(-\d{{5}}-of-\d{{5}})?\{SUFFIX}")
_UNREAD = ("*.bin", "*.pt", "*.pth", "*.ckpt")

Box = tuple[slice, ...]
"""A part of a tensor, as a slice for each dim."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor in a file, and the target tensor. Reading casts to the target's dtype."""

    name: str
    box: Box
    target: Tensor


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The weights at a path.

    Attributes:
        path: the file, index or folder.
        files: the file of each tensor, by name.
        shapes: the shape of each tensor, by name.
        dtypes: the safetensors name of each tensor's dtype (``"BF16"``), by name.
    """

    path: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    @staticmethod
    def of(path: Path) -> WeightFiles:
        """Read the headers of the files at a path.

        Args:
            path: a ``.safetensors`` file, an index, or a folder that contains one of these.

        Raises:
            RuntimeStateError: if there are no weights, an index does not match its files, or a file
                cannot be read.
        """
        files, indexed = _files_of(path)
        known: dict[str, Path] = {}
        shapes, dtypes = dict[str, tuple[int, ...]](), dict[str, str]()
        for file in files:
            with _OpenFile(file) as content:
                for name in tuple(content.keys()):
                    if indexed is None or indexed.get(name) == file.name:
                        part = content.get_slice(name)
                        known[name], shapes[name], dtypes[name] = (
                            file,
                            tuple(part.get_shape()),
                            part.get_dtype(),
                        )
        missing = [name for name in indexed or () if name not in known]
        if missing:
            raise _weights_damage_error(
                f"the index lists {missing[0]!r} in a file that does not contain it", path
            )
        return WeightFiles(path, known, shapes, dtypes)

    def read(self, pieces: Iterable[Piece]) -> None:
        """Read boxes into their targets. Each file is opened once.

        Raises:
            RuntimeStateError: if a file cannot be read.
        """
        by_file: dict[Path, list[Piece]] = {}
        for piece in pieces:
            by_file.setdefault(self.files[piece.name], []).append(piece)
        for file, here in by_file.items():
            with _OpenFile(file) as content, torch.no_grad():
                for piece in here:
                    part = (
                        content.get_slice(piece.name)[piece.box]
                        if piece.box
                        else content.get_tensor(piece.name)
                    )
                    piece.target.copy_(part)


def _files_of(path: Path) -> tuple[Sequence[Path], Mapping[str, str] | None]:
    """Return the files to read, and the index from tensor names to file names; None without an
    index."""
    if path.is_dir():
        indices, single = sorted(path.glob(f"*{INDEX_SUFFIX}")), sorted(path.glob(f"*{SUFFIX}"))
        preferred = [
            each
            for each in (path / f"{_NAME}{SUFFIX}", path / f"{_NAME}{INDEX_SUFFIX}")
            if each.is_file()
        ]
        choices = preferred[:1] or indices or single
        if len(choices) != 1:
            raise _weights_choice_error(path, choices)
        path = choices[0]
    if fault := why_unreadable(path):
        raise RuntimeStateError(
            f"no weights found: {fault}",
            where=str(path),
            remedy="pass a .safetensors file, or a folder with such files",
        )
    if not path.name.endswith(INDEX_SUFFIX):
        return [path], None
    try:
        index = _read_index(path)
    except (OSError, ValueError) as error:
        raise _weights_damage_error(
            f"the index cannot be read ({type(error).__name__}: {error})", path
        ) from error
    return [path.parent / name for name in sorted(set(index.values()))], index


def _read_index(path: Path) -> Mapping[str, str]:
    """Read the file name of each tensor from an index.

    Raises:
        ValueError: if the index has another structure, or names a file outside its folder.
        OSError: if the index cannot be read.
    """
    data = read_json(read_text(path))
    index = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(index, dict) or not all(isinstance(name, str) for name in index.values()):
        raise ValueError("it has no weight_map from names of tensors to names of files")
    outside = (name for name in index.values() if Path(name).name != name)
    if (name := next(outside, None)) is not None:
        raise ValueError(f"it names {name!r}, which is not the name of a file in its folder")
    return index


def _weights_damage_error(what: str, path: Path) -> RuntimeStateError:
    """Return the error for a damaged file of weights."""
    return RuntimeStateError(
        what, where=str(path), remedy="download or copy it and the other weight files again"
    )


def _weights_choice_error(folder: Path, choices: Sequence[Path]) -> RuntimeStateError:
    if choices:
        what, remedy = (
            f"several sets of weights found: {', '.join(each.name for each in choices[:4])}",
            "pass the path of one of them",
        )
        return RuntimeStateError(what, where=str(folder), remedy=remedy)
    others = [each.name for pattern in _UNREAD for each in sorted(folder.glob(pattern))]
    if others:
        what = (
            f"the weights are only in pickle files ({others[0]}), which are not read because"
            " reading a pickle can run code"
        )
        remedy = (
            "load them into the plain model, and save it with model.save_pretrained(...) or"
            " safetensors.torch.save_model(...)"
        )
        return RuntimeStateError(what, where=str(folder), remedy=remedy)
    return RuntimeStateError(
        "no .safetensors files found",
        where=str(folder),
        remedy="pass a folder with weights",
    )


class _OpenFile:
    """A context manager that opens a safetensors file. For an unreadable file, it raises
    RuntimeStateError with the name of the file."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> Any:
        if fault := why_unreadable(self._file):
            raise _weights_damage_error(f"{self._file.name} cannot be read: {fault}", self._file)
        try:
            self._content = safe_open(self._file, framework="pt")
            return self._content.__enter__()
        except (OSError, SafetensorError) as error:
            raise _weights_damage_error(
                f"{self._file.name} cannot be read ({type(error).__name__}: {error})", self._file
            ) from error

    def __exit__(self, *raised: Any) -> None:
        self._content.__exit__(*raised)


def split_into_files(sizes: Mapping[str, int], max_file_bytes: int) -> Mapping[str, Sequence[str]]:
    """Assign tensors to files in order. A file with several tensors has at most `max_file_bytes`.

    Args:
        sizes: the size of each tensor in bytes, by name.
        max_file_bytes: the largest size of a file with several tensors, in bytes.

    Returns:
        The names of the tensors in each file, by file name.
    """
    groups: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if groups[-1] and filled + size > max_file_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(name)
        filled += size
    if len(groups) == 1:
        return {f"{_NAME}{SUFFIX}": groups[0]}
    return {
        f"{_NAME}-{number:05d}-of-{len(groups):05d}{SUFFIX}": group
        for number, group in enumerate(groups, start=1)
    }


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write one file of full tensors on the CPU."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )


def put_in_place(
    written: Path, folder: Path, files: Mapping[str, Sequence[str]], total_bytes: int
) -> None:
    """Move files of weights into a folder, write their index, and remove earlier weights.

    Args:
        written: the folder with the new files.
        folder: the folder to move them into.
        files: the names of the tensors in each file, by file name.
        total_bytes: the size of all tensors, in bytes.
    """
    earlier = [
        each
        for each in folder.glob(f"*{SUFFIX}")
        if _OURS.fullmatch(each.name) and each.name not in files
    ]
    index = folder / f"{_NAME}{INDEX_SUFFIX}"
    if earlier or any((folder / name).exists() for name in files):
        # without an index, a mixture of old and new files cannot be loaded by mistake
        index.unlink(missing_ok=True)
    for name in files:
        (written / name).replace(folder / name)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        temporary = written / index.name
        temporary.write_text(
            json.dumps(
                {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2
            )
            + "\n"
        )
        temporary.replace(index)
    else:
        index.unlink(missing_ok=True)
    for each in earlier:
        each.unlink()
