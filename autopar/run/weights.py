"""Weights in and out of compiled modules, as safetensors, and models without weights.

Each rank reads from the files the boxes that it holds, and no more: no process ever has the whole model. Out they go by way of
the files of a checkpoint, whose parts, wherever ranks and stages hold them, ranks then put together, each some of the files.
"""

from __future__ import annotations

import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils.weak import WeakIdKeyDictionary

from autopar.errors import RuntimeStateError
from autopar.run.checkpoints import CheckpointTensor
from autopar.run.holder import Holder, holder_of
from autopar.run.ranks import by_all, by_first, num_ranks, of_all, rank
from autopar.run.saved_files import SEEN_WITHIN_S, seen_by_all
from autopar.run.saved_loading import load_parts, read_metadata
from autopar.run.saved_parts import save_parts
from autopar.run.weight_files import Piece, WeightFiles, in_files, put_in_place, write_file
from autopar.terminal import progress_of_long

log = logging.getLogger("autopar")
MAX_FILE_BYTES = 5_000_000_000
_PART = ".autopar.part"
_FIT = "name the model's own weights; rename= maps its names to theirs, strict=False leaves what is missing as it is"
_HALF = "download or copy the file again, and load it: some weights have changed already"
_KEPT = "Weights that were there are as they were"
_FLOATS = ("F64", "F32", "F16", "BF16")


@contextmanager
def weights_on_meta() -> Iterator[None]:
    """Models that are built here have their parameters on meta, each from when a module has it. They are for planning, or get their values
    once they are compiled (`load_weights`). Buffers are made as ever, since no file holds those that are not saved.

        with autopar.weights_on_meta():
            model = AutoModelForCausalLM.from_config(config)
    """
    made = WeakIdKeyDictionary()

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> nn.Parameter | None:
        if parameter is None or type(parameter) is not nn.Parameter or parameter.is_meta:
            return parameter  # what is not there yet, or is there in a way of its own, stays so
        if parameter not in made:  # one that two modules share stays one
            made[parameter] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
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
    """Read a compiled module's weights from safetensors; every rank calls it, and reads its own parts of them.

    Args:
        module: what `autopar.compile` returned.
        path: a ``.safetensors`` file, or a folder that holds one, or several with their index, as `save_weights` and Hugging Face's
            ``save_pretrained`` write it.
        rename: the model's name of a parameter or buffer → its name in the files; by default they are the same.
        strict: whether the files must have all that the module has; else what they do not have stays as it is. Of tied ones one name does.
        names: parameters and buffers to read; the others stay as they are. By default all of them.

    Returns:
        The names of what was not there.

    Raises:
        RuntimeStateError: on all ranks, where something is missing, of another shape or kind of dtype, or a file cannot be read. Nothing is
            changed then, but where a file turns out to be damaged while it is read.
    """
    holder, found = holder_of(module), dict[str, Any]()
    if names is not None:
        _check_known(holder, names)

    def match() -> tuple[set[str], tuple[str, ...]]:
        found["files"] = files = WeightFiles.of(Path(path))
        found["pieces"], missing = _matched(holder, files, rename or _same, strict=strict, wanted=names)
        return {piece.name for piece in found["pieces"]}, missing

    matched = by_all(match, str(path))
    with progress_of_long("reading weights"):
        by_all(lambda: found["files"].read(found["pieces"]), str(path), _HALF)
    missing = tuple(dict.fromkeys(name for _, names in matched for name in names))
    if rank() == 0:
        read = set(found["files"].files) if names is not None else set().union(*(each for each, _ in matched))
        _tell(found["files"], read, missing)
    return missing


def _check_known(holder: Holder, names: Collection[str]) -> None:
    """Raises RuntimeStateError on all ranks where no rank holds one of these."""
    known = set().union(*of_all({name for of_one in holder.same_names().values() for name in of_one}))
    if unknown := sorted(set(names) - known):
        raise RuntimeStateError(f"the model has no {unknown[0]!r}", remedy="pass names of its parameters and saved buffers")


def save_weights(
    module: nn.Module, folder: str | Path, *, dtype: torch.dtype | None = None, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write a compiled module's weights as safetensors, which ``from_pretrained`` reads; every rank calls it.

    Args:
        module: what `autopar.compile` returned.
        folder: made where it is not there; all ranks see it. Weights that are there under the same names are replaced.
        dtype: that floating tensors are written in, such as ``torch.bfloat16``; by default their own.
        max_file_bytes: where there are more, they go into several files with an index.

    Raises:
        RuntimeStateError: on all ranks, where the module has no values yet, or the folder is not shared or cannot be written to.
    """
    holder, into = holder_of(module), Path(folder)
    holder.check_values()
    with _writing_into(into) as written:
        here, state = {names[0] for names in holder.same_names().values()}, holder.state_dict()  # of tied ones one
        keys = {name: name for names in of_all(here) for name in sorted(names)}
        save_parts({name: x for name, x in state.items() if name in here}, written, "the model", _KEPT)
        put_together(written, keys, into, dtype, max_file_bytes)


def export(place: Path, keys: Mapping[str, str], folder: Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    """Write what lies in a checkpoint as safetensors; every rank calls it, or one process alone.

    Args:
        place: the checkpoint's folder. keys: name of a tensor → its key there. The others: as of `save_weights`.

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


def put_together(place: Path, keys: Mapping[str, str], folder: Path, dtype: torch.dtype | None, max_file_bytes: int) -> None:
    """Whole tensors of a checkpoint, in files; each rank writes some of these."""
    known = by_first(lambda: read_metadata(place).state_dict_metadata, str(place))
    written, facts = folder / _PART, {name: cast(TensorStorageMetadata, known[key]) for name, key in keys.items()}
    dtypes = {name: _written_in(fact.properties.dtype, dtype) for name, fact in facts.items()}
    sizes = {name: math.prod(facts[name].size) * of.itemsize for name, of in dtypes.items()}
    files = in_files(sizes, max_file_bytes)

    def write() -> None:
        for file, names in list(files.items())[rank() :: num_ranks()]:
            state = {keys[name]: torch.empty(facts[name].size, dtype=facts[name].properties.dtype) for name in names}
            load_parts(state, place, alone=True)
            write_file(written / file, {name: state[keys[name]].to(dtypes[name]) for name in names})

    with progress_of_long("writing weights"):
        by_all(write, str(folder), _KEPT)
    by_first(lambda: put_in_place(written, folder, files, sum(sizes.values())), str(folder))


def _written_in(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    return asked if asked is not None and own.is_floating_point else own


def _same(name: str) -> str:
    return name


def _matched(
    holder: Holder, files: WeightFiles, rename: Callable[[str], str], *, strict: bool, wanted: Collection[str] | None
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
        raise RuntimeStateError(f"the weights do not fit the model: {'; '.join(wrong[:3])}{more}", where=str(files.path), remedy=_FIT)
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
        found.append(Piece(name, tuple(slice(start, start + length) for start, _, length in box), target))
    return found


def _tell(files: WeightFiles, wanted: Collection[str], missing: Sequence[str]) -> None:
    """Say what was not there, and what was there and is not in the model."""
    beyond = [name for name in files.files if name not in wanted]
    for names, what in ((missing, "not in the files, and left as they are"), (beyond, "in the files, and not in the model")):
        if names:
            log.warning("%d weights are %s: %s", len(names), what, ", ".join(names[:3]) + (", …" if len(names) > 3 else ""))
