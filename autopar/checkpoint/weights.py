"""Weights of compiled modules as safetensors files, and creation of models without weights.

When loading, each rank reads only its shards, so that no process holds the full model. When saving,
ranks first write their shards like the files of a checkpoint. Then each rank assembles some of the
safetensors files from these shards.
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
from autopar.checkpoint.rank_parts import save_parts
from autopar.core.terminal import progress_of_long
from autopar.errors import RuntimeStateError
from autopar.runtime.dtensor_checkpoints import CheckpointTensor
from autopar.runtime.parameter_module import Holder, holder_of
from autopar.runtime.rank_comm import by_all, by_first, num_ranks, of_all, rank

# --------------------------------------------------------------------------------------------------
# Files of weights in the layout of Hugging Face: one safetensors file, or several with an index.

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
    if not path.is_file():
        raise RuntimeStateError(
            "no weights found",
            where=str(path),
            remedy="pass a .safetensors file, or a folder with such files",
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
        try:
            self._content = safe_open(self._file, framework="pt")
            return self._content.__enter__()
        except (OSError, SafetensorError) as error:
            raise _weights_damage_error(
                f"it cannot be read ({type(error).__name__}: {error})", self._file
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


log = logging.getLogger("autopar")
MAX_FILE_BYTES = 5_000_000_000
_PART = ".autopar.part"
_FIT = (
    "pass the model's own weights; rename= maps its names to names in the files, and strict=False"
    " leaves missing weights unchanged"
)
_HALF = "download or copy the file again, and load it: some weights are already overwritten"
_KEPT = "Existing weights are unchanged"
_FLOATS = ("F64", "F32", "F16", "BF16")


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Create models without weights. Inside the context, each parameter is moved to the meta device
    when a module registers it. Such a model can be compiled, and gets its values afterwards
    (`load_weights`). Buffers are created as usual, since files do not contain non-persistent
    buffers.

        with autopar.weights_on_meta():
            model = AutoModelForCausalLM.from_config(config)
    """
    made = WeakIdKeyDictionary()

    def on_meta(
        module: nn.Module, name: str, parameter: nn.Parameter | None
    ) -> nn.Parameter | None:
        """Return the parameter on the meta device. torch calls this at each registration.

        Args:
            module, name: the module that registers the parameter, and the name.
            parameter: the parameter.
        """
        if parameter is None or type(parameter) is not nn.Parameter or parameter.is_meta:
            return parameter  # lazy parameters and those of other classes are unchanged
        if parameter not in made:  # a parameter that two modules share remains shared
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
    """Read a compiled module's weights from safetensors files. Every rank must call this, and reads
    only its shards.

    Args:
        module: the result of `autopar.compile`.
        path: a ``.safetensors`` file, or a folder that contains such a file or several with an
            index, as written by `save_weights` and Hugging Face's ``save_pretrained``.
        rename: maps the model's name of a parameter or buffer to its name in the files. By default,
            the names are equal.
        strict: whether the files must contain all parameters and buffers of the module. If False,
            those that are missing in the files are unchanged. For tied parameters, one name is
            sufficient.
        names: the parameters and buffers to read; all others are unchanged. By default, all are
            read.

    Returns:
        The names of parameters and buffers that are missing in the files.

    Raises:
        RuntimeStateError: on all ranks, if a tensor is missing, has another shape, or is
            floating-point only in the files or only in the model, or if a file cannot be read. In
            this case, the module is unchanged, unless damage is detected only while a file is read.
    """
    holder, found = holder_of(module), dict[str, Any]()
    if names is not None:
        _check_known(holder, names)

    def match() -> tuple[set[str], tuple[str, ...]]:
        """Return the names in the files that this rank reads, and the names that are missing."""
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
        _log_mismatches(found["files"], read, missing)
    return missing


def _check_known(holder: Holder, names: Collection[str]) -> None:
    """Raise RuntimeStateError on all ranks if no rank holds one of the names."""
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
    """Write a compiled module's weights as safetensors files, which ``from_pretrained`` reads.
    Every rank must call this.

    Args:
        module: the result of `autopar.compile`.
        folder: a folder that all ranks see. It is created if it does not exist. Weights with the
            same file names are replaced.
        dtype: the dtype in which floating-point tensors are written, such as ``torch.bfloat16``. By
            default, their dtypes are unchanged.
        max_file_bytes: the largest size of a file, in bytes. Larger weights are split into several
            files with an index.

    Raises:
        RuntimeStateError: on all ranks, if the module has no values yet, or the folder is not
            shared or not writable.
    """
    holder, into = holder_of(module), Path(folder)
    holder.check_values()
    with _writing_into(into) as written:
        # of tied parameters, only the first name is written
        here = {names[0] for names in holder.same_names().values()}
        state = holder.state_dict()
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
    """Write the weights of a checkpoint as safetensors files. Either every rank calls this, or a
    single process.

    Args:
        place: the checkpoint's folder.
        keys: the key of each tensor in the checkpoint, by name.
        folder, dtype, max_file_bytes: see `save_weights`.

    Raises:
        RuntimeStateError: under the conditions of `save_weights`.
    """
    with _writing_into(folder):
        put_together(place, keys, folder, dtype, max_file_bytes)


@contextmanager
def _writing_into(folder: Path) -> Iterator[Path]:
    """Create an empty temporary subfolder that all ranks see, and remove it at the end."""
    written = folder / _PART

    def begin() -> None:
        """Create the subfolder on the first rank."""
        shutil.rmtree(written, ignore_errors=True)
        written.mkdir(parents=True)

    by_first(begin, str(folder), "choose a writable folder")
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
    """Assemble the tensors of a checkpoint into files. Each rank writes some of the files. Every
    rank must call this.

    Args:
        place: the folder of the checkpoint or of the shards that ranks wrote.
        keys: the key of each tensor in this folder, by name.
        folder, dtype, max_file_bytes: see `save_weights`.

    Raises:
        RuntimeStateError: on all ranks, if a file cannot be read or written.
    """
    known = by_first(lambda: read_metadata(place).state_dict_metadata, str(place))
    written, facts = (
        folder / _PART,
        {name: cast(TensorStorageMetadata, known[key]) for name, key in keys.items()},
    )
    dtypes = {name: _dtype_in_file(fact.properties.dtype, dtype) for name, fact in facts.items()}
    sizes = {name: math.prod(facts[name].size) * of.itemsize for name, of in dtypes.items()}
    files = split_into_files(sizes, max_file_bytes)

    def write() -> None:
        """Write this rank's share of the files."""
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


def _dtype_in_file(own: torch.dtype, requested: torch.dtype | None) -> torch.dtype:
    return requested if requested is not None and own.is_floating_point else own


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
    """Return the boxes that this rank reads, and the names that are missing in the files.

    Raises:
        RuntimeStateError: if the weights do not match the model. The message names the tensors.
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
            wrong.append(
                f"{there} is {files.shapes[there]} in the files, {tuple(tensor.shape)} here"
            )
        elif tensor.is_floating_point() != (files.dtypes[there] in _FLOATS):
            wrong.append(f"{there} is {files.dtypes[there]} in the files, {tensor.dtype} here")
        else:
            pieces += _pieces(there, tensor)
    if strict:
        wrong += [f"{rename(name)} is missing" for name in missing]
    if wrong:
        more = f" and {len(wrong) - 3} more" if len(wrong) > 3 else ""
        raise RuntimeStateError(
            f"the weights do not fit the model: {'; '.join(wrong[:3])}{more}",
            where=str(files.path),
            remedy=_FIT,
        )
    return pieces, tuple(missing)


def _pieces(name: str, tensor: Tensor) -> list[Piece]:
    """Return the boxes of a tensor that this rank holds, with the local tensors to read into."""
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


def _log_mismatches(files: WeightFiles, wanted: Collection[str], missing: Sequence[str]) -> None:
    """Log the names that are missing in the files, and those that are missing in the model."""
    beyond = [name for name in files.files if name not in wanted]
    for names, what in (
        (missing, "missing in the files, so left unchanged"),
        (beyond, "in the files but not in the model"),
    ):
        if names:
            log.warning(
                "%d weights are %s: %s",
                len(names),
                what,
                ", ".join(names[:3]) + (", …" if len(names) > 3 else ""),
            )
