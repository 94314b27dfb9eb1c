"""Weights in safetensors files, as Hugging Face lays them out: one file, or several with an index that says which holds what."""

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

from autopar.errors import RuntimeStateError

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_NAME = "model"
_OURS = re.compile(rf"{_NAME}(-\d{{5}}-of-\d{{5}})?\{SUFFIX}")
_UNREAD = ("*.bin", "*.pt", "*.pth", "*.ckpt")

Box = tuple[slice, ...]
"""A part of a whole tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor in a file, and the tensor that it is read into, cast to that one's dtype."""

    name: str
    box: Box
    target: Tensor


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files at a path.

    Attributes:
        files: name of a tensor → the file that holds it.
        shapes, dtypes: name of a tensor → its shape, and its dtype in the format's words (``"BF16"``).
    """

    path: Path
    files: Mapping[str, Path]
    shapes: Mapping[str, tuple[int, ...]]
    dtypes: Mapping[str, str]

    @staticmethod
    def of(path: Path) -> WeightFiles:
        """What there is.

        Args:
            path: a ``.safetensors`` file, an index, or a folder that has one of these.

        Raises:
            RuntimeStateError: where there is nothing to read, an index does not fit its files, or a file is none.
        """
        files, indexed = _files_of(path)
        known: dict[str, Path] = {}
        shapes, dtypes = dict[str, tuple[int, ...]](), dict[str, str]()
        for file in files:
            with _opened(file) as content:
                for name in tuple(content.keys()):
                    if indexed is None or indexed.get(name) == file.name:
                        part = content.get_slice(name)
                        known[name], shapes[name], dtypes[name] = file, tuple(part.get_shape()), part.get_dtype()
        missing = [name for name in indexed or () if name not in known]
        if missing:
            raise _damaged(f"the index says that {missing[0]!r} is in a file that does not hold it", path)
        return WeightFiles(path, known, shapes, dtypes)

    def read(self, pieces: Iterable[Piece]) -> None:
        """Read boxes, each file once, in any dtype.

        Raises:
            RuntimeStateError: where a file cannot be read.
        """
        by_file: dict[Path, list[Piece]] = {}
        for piece in pieces:
            by_file.setdefault(self.files[piece.name], []).append(piece)
        for file, here in by_file.items():
            with _opened(file) as content, torch.no_grad():
                for piece in here:
                    part = content.get_slice(piece.name)[piece.box] if piece.box else content.get_tensor(piece.name)
                    piece.target.copy_(part)


def _files_of(path: Path) -> tuple[Sequence[Path], Mapping[str, str] | None]:
    """Which files are read, and what their index says each tensor is in, if they have one."""
    if path.is_dir():
        indices, single = sorted(path.glob(f"*{INDEX_SUFFIX}")), sorted(path.glob(f"*{SUFFIX}"))
        preferred = [each for each in (path / f"{_NAME}{SUFFIX}", path / f"{_NAME}{INDEX_SUFFIX}") if each.is_file()]
        choices = preferred[:1] or indices or single
        if len(choices) != 1:
            raise _none_of(path, choices)
        path = choices[0]
    if not path.is_file():
        raise RuntimeStateError("there are no weights", where=str(path), remedy="name a .safetensors file, or a folder that holds some")
    if not path.name.endswith(INDEX_SUFFIX):
        return [path], None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = [path.parent / name for name in sorted(set(index.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(f"the index cannot be read ({type(error).__name__}: {error})", path) from error
    return files, index


def _damaged(what: str, path: Path) -> RuntimeStateError:
    """The error of a file that is not what was written."""
    return RuntimeStateError(what, where=str(path), remedy="download or copy it again, and the files that it goes with")


def _none_of(folder: Path, choices: Sequence[Path]) -> RuntimeStateError:
    if choices:
        what, remedy = f"there are several: {', '.join(each.name for each in choices[:4])}", "name one of them"
        return RuntimeStateError(what, where=str(folder), remedy=remedy)
    others = [each.name for pattern in _UNREAD for each in sorted(folder.glob(pattern))]
    if others:
        what = f"there are weights in pickles alone ({others[0]}), which are not read, since reading one may run what is in it"
        remedy = "load them into the plain model, and model.save_pretrained(...) or safetensors.torch.save_model(...) it"
        return RuntimeStateError(what, where=str(folder), remedy=remedy)
    return RuntimeStateError("there are no .safetensors files", where=str(folder), remedy="name a folder that holds weights")


class _opened:
    """A file's content; what cannot be read is refused by its name."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> Any:
        try:
            self._content = safe_open(self._file, framework="pt")
            return self._content.__enter__()
        except (OSError, SafetensorError) as error:
            raise _damaged(f"it cannot be read ({type(error).__name__}: {error})", self._file) from error

    def __exit__(self, *raised: Any) -> None:
        self._content.__exit__(*raised)


def in_files(sizes: Mapping[str, int], max_file_bytes: int) -> Mapping[str, Sequence[str]]:
    """Into which files tensors of these bytes go, in their order: file name → names of tensors.

    Each file has at most `max_file_bytes`, or one tensor.
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
    return {f"{_NAME}-{number:05d}-of-{len(groups):05d}{SUFFIX}": group for number, group in enumerate(groups, start=1)}


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file of whole tensors on the CPU."""
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, metadata={"format": "pt"})


def put_in_place(written: Path, folder: Path, files: Mapping[str, Sequence[str]], total_bytes: int) -> None:
    """Move what was written into a folder, with its index, in the place of the weights that were there."""
    earlier = [each for each in folder.glob(f"*{SUFFIX}") if _OURS.fullmatch(each.name) and each.name not in files]
    index = folder / f"{_NAME}{INDEX_SUFFIX}"
    if earlier or any((folder / name).exists() for name in files):
        index.unlink(missing_ok=True)  # so that what is there meanwhile is no model of which some files are old
    for name in files:
        (written / name).replace(folder / name)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        begun = written / index.name
        begun.write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2) + "\n")
        begun.replace(index)
    else:
        index.unlink(missing_ok=True)
    for each in earlier:
        each.unlink()
