"""Weights in and out of compiled modules, as safetensors, and models without weights.

Each rank reads from the files the boxes that it holds, and no more: no process ever has the whole
model. Out they go by way of the files of a checkpoint, whose parts, wherever ranks and stages hold
them, ranks then put together, each some of the files.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.checkpoint.files import SEEN_WITHIN_S, seen_by_all
from autopar.checkpoint.loading import load_parts, read_metadata
from autopar.checkpoint.parts import save_parts
from autopar.core.terminal import progress_of_long
from autopar.errors import RuntimeStateError
from autopar.runtime.dtensor_checkpoints import CheckpointTensor
from autopar.runtime.parameter_module import Holder, holder_of
from autopar.runtime.rank_comm import by_all, by_first, num_ranks, of_all, rank

# --------------------------------------------------------------------------------------------------
# Weights in safetensors files, as Hugging Face lays them out: one file, or several with an index
# that says which holds what.

SUFFIX, INDEX_SUFFIX = ".safetensors", ".safetensors.index.json"
_NAME = "model"
_OURS = re.compile(rf"{_NAME}(-\d{{5}}-of-\d{{5}})?\{SUFFIX}")
_UNREAD = ("*.bin", "*.pt", "*.pth", "*.ckpt")

Box = tuple[slice, ...]
"""A part of a whole tensor."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor in a file, and the tensor that it is read into, cast to that one's
    dtype."""

    name: str
    box: Box
    target: Tensor


@dataclass(frozen=True, slots=True)
class WeightFiles:
    """The files at a path.

    Attributes:
        files: name of a tensor → the file that holds it.
        shapes, dtypes: name of a tensor → its shape, and its dtype in the format's words
            (``"BF16"``).
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
            RuntimeStateError: where there is nothing to read, an index does not fit its files, or a
                file is none.
        """
        files, indexed = _files_of(path)
        known: dict[str, Path] = {}
        shapes, dtypes = dict[str, tuple[int, ...]](), dict[str, str]()
        for file in files:
            with _opened(file) as content:
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
                f"the index says that {missing[0]!r} is in a file that does not hold it", path
            )
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
                    part = (
                        content.get_slice(piece.name)[piece.box]
                        if piece.box
                        else content.get_tensor(piece.name)
                    )
                    piece.target.copy_(part)


def _files_of(path: Path) -> tuple[Sequence[Path], Mapping[str, str] | None]:
    """Which files are read, and what their index says each tensor is in, if they have one."""
    if path.is_dir():
        indices, single = sorted(path.glob(f"*{INDEX_SUFFIX}")), sorted(path.glob(f"*{SUFFIX}"))
        preferred = [
            each
            for each in (path / f"{_NAME}{SUFFIX}", path / f"{_NAME}{INDEX_SUFFIX}")
            if each.is_file()
        ]
        choices = preferred[:1] or indices or single
        if len(choices) != 1:
            raise _none_of(path, choices)
        path = choices[0]
    if not path.is_file():
        raise RuntimeStateError(
            "there are no weights",
            where=str(path),
            remedy="name a .safetensors file, or a folder that holds some",
        )
    if not path.name.endswith(INDEX_SUFFIX):
        return [path], None
    try:
        index = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        files = [path.parent / name for name in sorted(set(index.values()))]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _weights_damage_error(
            f"the index cannot be read ({type(error).__name__}: {error})", path
        ) from error
    return files, index


def _weights_damage_error(what: str, path: Path) -> RuntimeStateError:
    """The error of a file that is not what was written."""
    return RuntimeStateError(
        what, where=str(path), remedy="download or copy it again, and the files that it goes with"
    )


def _none_of(folder: Path, choices: Sequence[Path]) -> RuntimeStateError:
    if choices:
        what, remedy = (
            f"there are several: {', '.join(each.name for each in choices[:4])}",
            "name one of them",
        )
        return RuntimeStateError(what, where=str(folder), remedy=remedy)
    others = [each.name for pattern in _UNREAD for each in sorted(folder.glob(pattern))]
    if others:
        what = (
            f"there are weights in pickles alone ({others[0]}), which are not read, since reading"
            " one may run what is in it"
        )
        remedy = (
            "load them into the plain model, and model.save_pretrained(...) or"
            " safetensors.torch.save_model(...) it"
        )
        return RuntimeStateError(what, where=str(folder), remedy=remedy)
    return RuntimeStateError(
        "there are no .safetensors files",
        where=str(folder),
        remedy="name a folder that holds weights",
    )


class _opened:
    """A file's content; what cannot be read is refused by its name."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __enter__(self) -> Any:
        try:
            self._content = safe_open(self._file, framework="pt")
            return self._content.__enter__()
        except (OSError, SafetensorError) as error:
            raise _weights_damage_error(
                f"it cannot be read ({type(error).__name__}: {error})", self._file
            ) from error

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
    return {
        f"{_NAME}-{number:05d}-of-{len(groups):05d}{SUFFIX}": group
        for number, group in enumerate(groups, start=1)
    }


def write_file(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """One file of whole tensors on the CPU."""
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        path,
        metadata={"format": "pt"},
    )


def put_in_place(
    written: Path, folder: Path, files: Mapping[str, Sequence[str]], total_bytes: int
) -> None:
    """Move what was written into a folder, with its index, in the place of the weights that were
    there."""
    earlier = [
        each
        for each in folder.glob(f"*{SUFFIX}")
        if _OURS.fullmatch(each.name) and each.name not in files
    ]
    index = folder / f"{_NAME}{INDEX_SUFFIX}"
    if earlier or any((folder / name).exists() for name in files):
        index.unlink(
            missing_ok=True
        )  # so that what is there meanwhile is no model of which some files are old
    for name in files:
        (written / name).replace(folder / name)
    if len(files) > 1:
        weight_map = {name: file for file, names in files.items() for name in names}
        begun = written / index.name
        begun.write_text(
            json.dumps(
                {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2
            )
            + "\n"
        )
        begun.replace(index)
    else:
        index.unlink(missing_ok=True)
    for each in earlier:
        each.unlink()


log = logging.getLogger("autopar")
MAX_FILE_BYTES = 5_000_000_000
_PART = ".autopar.part"
_FIT = (
    "name the model's own weights; rename= maps its names to theirs, strict=False leaves what is"
    " missing as it is"
)
_HALF = "download or copy the file again, and load it: some weights have changed already"
_KEPT = "Weights that were there are as they were"
_FLOATS = ("F64", "F32", "F16", "BF16")


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Models that are built here have their parameters on meta, each from when a module has it.
    They are for planning, or get their values once they are compiled (`load_weights`). Buffers are
    made as ever, since no file holds those that are not saved.

        with autopar.weights_on_meta():
            model = AutoModelForCausalLM.from_config(config)
    """
    made = WeakIdKeyDictionary()

    def on_meta(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        if parameter is None or type(parameter) is not nn.Parameter or parameter.is_meta:
            return parameter  # what is not there yet, or is there in a way of its own, stays so
        if parameter not in made:  # one that two modules share stays one
            made[parameter] = nn.Parameter(
                parameter.detach().to("meta"), requires_grad=parameter.requires_grad
            )
        found: nn.Parameter = made[parameter]
        return found

    hook = register_module_parameter_registration_hook(on_meta)
    try:
        yield
    finally:
        hook.remove()


def load_weights(
    module: nn.Module,
    path: str | Path,
    *,
    rename: Callable[[str], str] | None = None,
    strict: bool = True,
    names: Collection[str] | None = None,
) -> tuple[str, ...]:
    """Read a compiled module's weights from safetensors; every rank calls it, and reads its own
    parts of them.

    Args:
        module: what `autopar.compile` returned.
        path: a ``.safetensors`` file, or a folder that holds one, or several with their index, as
            `save_weights` and Hugging Face's ``save_pretrained`` write it.
        rename: the model's name of a parameter or buffer → its name in the files; by default they
            are the same.
        strict: whether the files must have all that the module has; else what they do not have
            stays as it is. Of tied ones one name does.
        names: parameters and buffers to read; the others stay as they are. By default all of them.

    Returns:
        The names of what was not there.

    Raises:
        RuntimeStateError: on all ranks, where something is missing, of another shape or kind of
            dtype, or a file cannot be read. Nothing is changed then, but where a file turns out to
            be damaged while it is read.
    """
    holder, found = holder_of(module), dict[str, Any]()
    if names is not None:
        _check_known(holder, names)

    def match() -> tuple[set[str], tuple[str, ...]]:
        found["files"] = files = WeightFiles.of(Path(path))
        found["pieces"], missing = _match_names(
            holder, files, rename or _same, strict=strict, wanted=names
        )
        return {piece.name for piece in found["pieces"]}, missing

    matched = by_all(match, str(path))
    with progress_of_long("reading weights"):
        by_all(lambda: found["files"].read(found["pieces"]), str(path), _HALF)
    missing = tuple(dict.fromkeys(name for _, names in matched for name in names))
    if rank() == 0:
        read = (
            set(found["files"].files)
            if names is not None
            else set().union(*(each for each, _ in matched))
        )
        _tell(found["files"], read, missing)
    return missing


def _check_known(holder: Holder, names: Collection[str]) -> None:
    """Raises RuntimeStateError on all ranks where no rank holds one of these."""
    known = set().union(
        *of_all({name for of_one in holder.same_names().values() for name in of_one})
    )
    if unknown := sorted(set(names) - known):
        raise RuntimeStateError(
            f"the model has no {unknown[0]!r}",
            remedy="pass names of its parameters and saved buffers",
        )


def save_weights(
    module: nn.Module,
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a compiled module's weights as safetensors, which ``from_pretrained`` reads; every rank
    calls it.

    Args:
        module: what `autopar.compile` returned.
        folder: made where it is not there; all ranks see it. Weights that are there under the same
            names are replaced.
        dtype: that floating tensors are written in, such as ``torch.bfloat16``; by default their
            own.
        max_file_bytes: where there are more, they go into several files with an index.

    Raises:
        RuntimeStateError: on all ranks, where the module has no values yet, or the folder is not
            shared or cannot be written to.
    """
    holder, into = holder_of(module), Path(folder)
    holder.check_values()
    with _writing_into(into) as written:
        here, state = (
            {names[0] for names in holder.same_names().values()},
            holder.state_dict(),
        )  # of tied ones one
        keys = {name: name for names in of_all(here) for name in sorted(names)}
        save_parts(
            {name: x for name, x in state.items() if name in here}, written, "the model", _KEPT
        )
        put_together(written, keys, into, dtype, max_file_bytes)


def export(
    place: Path,
    keys: Mapping[str, str],
    folder: Path,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    """Write what lies in a checkpoint as safetensors; every rank calls it, or one process alone.

    Args:
        place: the checkpoint's folder. keys: name of a tensor → its key there. The others: as of
            `save_weights`.

    Raises:
        RuntimeStateError: as `save_weights`.
    """
    with _writing_into(folder):
        put_together(place, keys, folder, dtype, max_file_bytes)


@contextmanager
def _writing_into(folder: Path) -> Iterator[Path]:
    """A folder in it, empty at first, which all ranks see, and which is removed in the end."""
    written = folder / _PART

    def begin() -> None:
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)

    by_first(begin, str(folder), "name a folder that can be written to")
    seen_by_all(written, SEEN_WITHIN_S)
    try:
        yield written
    finally:
        if rank() == 0:
            shutil.rmtree(written, ignore_errors=True)


def put_together(
    place: Path,
    keys: Mapping[str, str],
    folder: Path,
    dtype: torch.dtype | None,
    max_file_bytes: int,
) -> None:
    """Whole tensors of a checkpoint, in files; each rank writes some of these."""
    known = by_first(lambda: read_metadata(place).state_dict_metadata, str(place))
    written, facts = (
        folder / _PART,
        {name: cast(TensorStorageMetadata, known[key]) for name, key in keys.items()},
    )
    dtypes = {name: _written_in(fact.properties.dtype, dtype) for name, fact in facts.items()}
    sizes = {name: math.prod(facts[name].size) * of.itemsize for name, of in dtypes.items()}
    files = in_files(sizes, max_file_bytes)

    def write() -> None:
        for file, names in list(files.items())[rank() :: num_ranks()]:
            state = {
                keys[name]: torch.empty(facts[name].size, dtype=facts[name].properties.dtype)
                for name in names
            }
            load_parts(state, place, alone=True)
            write_file(written / file, {name: state[keys[name]].to(dtypes[name]) for name in names})

    with progress_of_long("writing weights"):
        by_all(write, str(folder), _KEPT)
    by_first(lambda: put_in_place(written, folder, files, sum(sizes.values())), str(folder))


def _written_in(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and own.is_floating_point else own


def _same(name: str) -> str:
    return name


def _match_names(
    holder: Holder,
    files: WeightFiles,
    rename: Callable[[str], str],
    *,
    strict: bool,
    wanted: Collection[str] | None,
) -> tuple[list[Piece], tuple[str, ...]]:
    """What this rank reads, and the names of what is not there.

    Raises:
        RuntimeStateError: naming what does not fit.
    """
    pieces, missing, wrong = list[Piece](), list[str](), list[str]()
    for names in holder.same_names().values():
        if wanted is not None and not any(name in wanted for name in names):
            continue
        there = next((rename(name) for name in names if rename(name) in files.files), None)
        tensor = holder.stored(names[0]).detach()
        if there is None:
            missing.append(names[0])
        elif tuple(tensor.shape) != files.shapes[there]:
            wrong.append(f"{there} is {files.shapes[there]} there, {tuple(tensor.shape)} here")
        elif tensor.is_floating_point() != (files.dtypes[there] in _FLOATS):
            wrong.append(f"{there} is {files.dtypes[there]} there, {tensor.dtype} here")
        else:
            pieces += _pieces(there, tensor)
    if strict:
        wrong += [f"{rename(name)} is not there" for name in missing]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RuntimeStateError(
            f"the weights do not fit the model: {'; '.join(wrong[:3])}{more}",
            where=str(files.path),
            remedy=_FIT,
        )
    return pieces, tuple(missing)


def _pieces(name: str, tensor: Tensor) -> list[Piece]:
    """The boxes of a tensor that lie on this rank, and where."""
    if not isinstance(tensor, DTensor):
        return [Piece(name, tuple(slice(0, size) for size in tensor.shape), tensor)]
    local, found = tensor.to_local(), []
    for box in CheckpointTensor.of(tensor).boxes():
        target = local
        for dim, (_, start, length) in enumerate(box):
            target = target.narrow(dim, start, length)
        found.append(
            Piece(name, tuple(slice(start, start + length) for start, _, length in box), target)
        )
    return found


def _tell(files: WeightFiles, wanted: Collection[str], missing: Sequence[str]) -> None:
    """Say what was not there, and what was there and is not in the model."""
    beyond = [name for name in files.files if name not in wanted]
    for names, what in (
        (missing, "not in the files, and left as they are"),
        (beyond, "in the files, and not in the model"),
    ):
        if names:
            log.warning(
                "%d weights are %s: %s",
                len(names),
                what,
                ", ".join(names[:3]) + (", …" if len(names) > 3 else ""),
            )
