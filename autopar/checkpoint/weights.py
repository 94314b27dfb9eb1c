"""Weights of compiled modules as safetensors files, and creation of models without weights.

When loading, each rank reads only its shards, so that no process holds the full model. When saving,
ranks first write their shards like the files of a checkpoint. Then each rank assembles some of the
safetensors files from these shards.
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

from autopar.checkpoint.files import SEEN_WITHIN_S, seen_by_all
from autopar.checkpoint.loading import load_parts, read_metadata
from autopar.checkpoint.rank_parts import save_parts
from autopar.checkpoint.run_folder import as_integer, fault_of_folder
from autopar.checkpoint.safetensors_files import DTYPES, keeps_values
from autopar.checkpoint.weight_files import (
    Piece,
    WeightFiles,
    put_in_place,
    split_into_files,
    write_file,
)
from autopar.core.terminal import progress_of_long
from autopar.core.text_files import reason_of
from autopar.errors import RuntimeStateError
from autopar.runtime.dtensor_checkpoints import CheckpointTensor
from autopar.runtime.parameter_module import Holder, holder_of
from autopar.runtime.rank_comm import by_all, by_first, num_ranks, of_all, rank

log = logging.getLogger("autopar")
MAX_FILE_BYTES = 5_000_000_000
_PART = ".autopar.part"
_FIT = (
    "pass the model's own weights; rename= maps its names to names in the files, and strict=False"
    " leaves missing weights unchanged"
)
_HALF = "download or copy the file again, and load it: some weights are already overwritten"
_KEPT = "Existing weights are unchanged"
_FORMATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
        holder.model_hooks.log_not_run("load_weights", saves=False)
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
    Every rank must call this. The files contain the values of parameters and buffers under their
    names. State dict hooks of the model, which expect full tensors, do not run, which is logged.

    Args:
        module: the result of `autopar.compile`.
        folder: a folder that all ranks see. It is created if it does not exist. Weights with the
            same file names are replaced.
        dtype: the dtype in which floating-point tensors are written: ``torch.float64``,
            ``torch.float32``, ``torch.float16`` or ``torch.bfloat16``. By default, their dtypes are
            unchanged.
        max_file_bytes: the largest size of a file, in bytes, an integer of at least 1. Larger
            weights are split into several files with an index.

    Raises:
        RuntimeStateError: on all ranks, if the module has no values yet, the folder is not shared
            or not writable, or `dtype` or `max_file_bytes` is not such a value.
    """
    holder, into = holder_of(module), Path(folder)
    holder.check_values()
    if rank() == 0:
        holder.model_hooks.log_not_run("save_weights", saves=True)
    by_all(lambda: _check_format(dtype, max_file_bytes), str(into))
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
    by_all(lambda: _check_format(dtype, max_file_bytes), str(folder))
    with _writing_into(folder):
        put_together(place, keys, folder, dtype, max_file_bytes)


def _check_format(dtype: torch.dtype | None, max_file_bytes: int) -> None:
    """Raise RuntimeStateError if weights cannot be written in this form. Other dtypes, such as
    integers and float8 without scales, would lose the values."""
    if dtype is not None and dtype not in _FORMATS:
        what = f"dtype={dtype!r:.80}: weights are not written in this dtype"
        raise RuntimeStateError(what, remedy=f"pass {', '.join(map(str, _FORMATS))}, or None")
    num_bytes = as_integer(max_file_bytes)
    if num_bytes is None or num_bytes < 1:
        what = f"max_file_bytes={max_file_bytes!r:.80} is not a size of a file"
        raise RuntimeStateError(what, remedy="pass a positive number of bytes as an integer")


@contextmanager
def _writing_into(folder: Path) -> Iterator[Path]:
    """Create an empty temporary subfolder that all ranks see, and remove it at the end."""
    written = folder / _PART

    def begin() -> str:
        """Create the subfolder on the first rank. Return the reason if this is not possible."""
        if fault := fault_of_folder(folder):
            return fault
        try:
            shutil.rmtree(written, ignore_errors=True)
            written.mkdir(parents=True)
        except OSError as error:
            return reason_of(error)
        return ""

    if fault := by_first(begin, str(folder)):
        raise RuntimeStateError(
            f"weights cannot be written into this folder: {fault}",
            where=str(folder),
            remedy="choose a writable folder",
        )
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
        elif not keeps_values(DTYPES.get(files.dtypes[there]), tensor.dtype):
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
