"""Companions: the modules, optimizers and other stateful objects that are saved with a model and
its optimizer.

    module                     its parameters and buffers, by name; each rank writes its shards
    optimizer over             its state, by parameter name; if the state has lists (LBFGS), it is
      distributed parameters   saved like any other object
    any other object, dict     the value that `state_dict` returns: plain values in `others.json`,
                               plain tensors in `others.safetensors`; each rank writes its shards of
                               distributed tensors, named by their path in the value

Values that are not distributed must be equal on all ranks, since only one rank writes them. This is
checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from autopar.checkpoint.rank_parts import Copy, write_bytes
from autopar.checkpoint.safetensors_files import TensorFile, damage_error, unsafe, write_tensors
from autopar.checkpoint.state import ModuleState, OptimizerState, Saved, has_lists, tensors_of
from autopar.checkpoint.values import Tensors, decode, encode
from autopar.core.json_text import read_json
from autopar.errors import RuntimeStateError
from autopar.runtime.dtensor_checkpoints import checkpointable
from autopar.runtime.parameter_module import Holder
from autopar.runtime.rank_comm import by_all, num_ranks, of_all
from autopar.runtime.tensor_guards import sample_checksum

# --------------------------------------------------------------------------------------------------
# The file `others.json` contains states that are saved with a model and its optimizer, by name.
# Their tensors are in `others.safetensors`.
#
#     {"format": "autopar-others", "version": 1, "states": {"scheduler": {"last_epoch": 3}},
#      "parts": {"average": "module"}}
#
# The names under "parts" are distributed objects. Each rank writes its shards of them into its
# file.

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
        RuntimeStateError: if a file is damaged, or reading it would run code.
        OSError: if a file cannot be read.
    """
    path = place / OTHERS
    if not path.is_file() and (place / OLD_OTHERS).is_file():
        path = place / OLD_OTHERS
        with _reporting_damage(path):
            old = _read_old(path)
        return SavedOthers(dict.fromkeys(old, VALUE), lambda name, _: old[name])
    with _reporting_damage(path):
        states, parts = _read_json(path)
    opened: list[TensorFile] = []

    def value(name: str, target: Target) -> Any:
        """Decode the state of a name. `target` creates its distributed tensors."""

        def find(name: str, dtype: torch.dtype, shape: torch.Size, is_sharded: bool) -> Tensor:
            """Read a plain tensor from its file, or create the target of a distributed tensor.

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

        with _reporting_damage(path):
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
def _reporting_damage(path: Path) -> Iterator[None]:
    """Convert a ValueError to a RuntimeStateError that names the damaged file."""
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
        raise ValueError("it does not list its sharded entries")
    return states, parts


def _read_old(path: Path) -> dict[str, Any]:
    """Read the file of an earlier version with `torch.load(weights_only=True)`, which runs no
    code."""
    try:
        found = torch.load(path, weights_only=True)
    except OSError:
        raise
    except Exception as error:  # pickle and torch raise many classes for invalid files
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise unsafe(f"{path.name} of the checkpoint is refused: {reason}", path) from error
    if not isinstance(found, dict):
        raise ValueError(f"it is a {type(found).__name__}")
    return found


# --------------------------------------------------------------------------------------------------
# The states themselves.

_ALIKE = (
    "pass an object that is the same on all ranks, or gather one: found = [None] * world_size; "
    "torch.distributed.all_gather_object(found, mine); save(..., mine={'of ranks': found})"
)


@dataclass
class ValueState:
    """The state of a dict, or of an object with `state_dict` and `load_state_dict`.

    Args:
        name: the name under which the state is saved.
        other: the object.
        saved: the states of the checkpoint that is loaded; None while saving.
    """

    name: str
    other: Any
    saved: SavedOthers | None = None
    _value: Any = field(default=None, init=False)

    def value(self) -> Any:
        """Return the state of the object."""
        return self.other if isinstance(self.other, dict) else self.other.state_dict()

    def state(self) -> dict[str, Any]:
        """Return the distributed tensors of the state, by key.

        Raises:
            RuntimeStateError: if a tensor is a partial sum, or belongs to one pipeline stage.
        """
        tensors = Tensors()
        encode(self.value(), (self.name,), tensors)
        for name, tensor in tensors.sharded.items():
            if any(p.is_partial() for p in tensor.placements):
                what = f"{name} of {self.name} is a partial sum: each rank holds one term"
                raise RuntimeStateError(
                    what, remedy="save the result of x.full_tensor(), called on every rank"
                )
            if tensor.device_mesh.size() != num_ranks():
                what = (
                    f"{name} of {self.name} belongs to one pipeline stage, on"
                    f" {tensor.device_mesh.size()} of {num_ranks()} ranks"
                )
                remedy = (
                    "save its module or optimizer under a separate name; pass copies of weights as"
                    " AveragedModel(pm)"
                )
                raise RuntimeStateError(what, remedy=remedy)
        return {_key(name): checkpointable(tensor) for name, tensor in tensors.sharded.items()}

    def prepare_read(self, saved: Metadata) -> dict[str, Any]:
        """Create the tensors to read into, by key. Each has the layout of the tensor that the state
        currently has at the same path. If there is no such tensor of the same shape, it is a full
        tensor."""
        assert self.saved is not None
        now = Tensors()
        encode(self.value(), (self.name,), now)
        found: dict[str, Any] = {}

        def target(name: str, dtype: torch.dtype, shape: torch.Size) -> Tensor:
            """Create the tensor to read into, and add it to `found`.

            Args:
                name: the path of the tensor in the state.
                dtype, shape: its dtype and shape.
            """
            like = now.sharded.get(name)
            is_alike = like is not None and like.shape == shape
            made = (
                torch.empty_like(like.detach(), dtype=dtype)
                if like is not None and is_alike
                else torch.empty(shape, dtype=dtype)
            )
            found[_key(name)] = checkpointable(made)
            return made

        self._value = self.saved.value(self.name, target)
        return found

    def faults(self, wanted: Mapping[str, Any], saved: Metadata) -> list[str]:
        """Return a line for each tensor that the checkpoint lacks."""
        return [f"{key} is not in it" for key in wanted if key not in saved.state_dict_metadata]

    def undo(self) -> None:
        """Do nothing, since `prepare_read` changes nothing."""

    def take(self, read: Mapping[str, Any]) -> None:
        """Load the value that was read into the object."""
        if isinstance(self.other, dict):
            self.other.clear()
            self.other.update(self._value)
        else:
            self.other.load_state_dict(self._value)


def parts_of(holder: Holder, optimizer: Optimizer | None, *, weights: bool) -> list[Saved]:
    """Return the states of a model and its optimizer. Every rank must call this.

    Args:
        holder: the model.
        optimizer: the optimizer over its parameters, or None.
        weights: whether the state of the model is included.

    Raises:
        RuntimeStateError: on all ranks, if the optimizer also has parameters of another module, or
            its state has lists of tensors.
    """
    parts: list[Saved] = [ModuleState(holder)] if weights else []
    if optimizer is None:
        return parts
    by_all(lambda: _check_own(holder, optimizer), "what is saved")
    return [*parts, OptimizerState(optimizer, holder)]


def _check_own(holder: Holder, optimizer: Optimizer) -> None:
    own = set(holder.parameters())
    if not hasattr(optimizer, "param_groups"):
        what = f"a {type(optimizer).__name__} is in the place of the optimizer"
        remedy = "pass the optimizer, or None; pass other objects by name: save(step, pm, extra=x)"
        raise RuntimeStateError(what, remedy=remedy)
    if any(p not in own for group in optimizer.param_groups for p in group["params"]):
        what = "the optimizer has parameters that do not belong to the model"
        remedy = (
            "pass the optimizer and the modules of the other parameters by name: save(step, pm,"
            " head=head, optimizer_of_both=optimizer)"
        )
        raise RuntimeStateError(what, remedy=remedy)
    if has_lists(optimizer):
        what = (
            f"the state of {type(optimizer).__name__} has lists of tensors that do not belong to"
            " one parameter each"
        )
        raise RuntimeStateError(
            what, remedy="pass it by name, also when loading: save(step, pm, lbfgs=optimizer)"
        )


def others_of(holder: Holder, others: Mapping[str, Any]) -> dict[str, Saved]:
    """Return the states of companions, by name.

    Args:
        holder: the model.
        others: the companions, by name.

    Raises:
        RuntimeStateError: if a companion has no state, or is an optimizer over parameters of a
            module that is neither the model nor a companion.
    """
    modules = {
        name: _unwrap_module(other)
        for name, other in others.items()
        if isinstance(other, nn.Module)
    }
    found: dict[str, Saved] = {}
    for name, other in others.items():
        prefix = f"others.{name}."
        if name in modules and _is_of_tensors(modules[name]):
            found[name] = ModuleState(modules[name], prefix, name)
        elif isinstance(other, Optimizer) and _is_of_distributed(other) and not has_lists(other):
            root = _Root(
                {"model": holder, **{f"others_{n}": module for n, module in modules.items()}}
            )
            known = set(root.parameters())
            if any(p not in known for group in other.param_groups for p in group["params"]):
                what = (
                    f"{name}={type(other).__name__} has parameters of a module that is not saved"
                    " in this checkpoint"
                )
                raise RuntimeStateError(
                    what,
                    remedy=(
                        f"pass that module by name as well: save(step, pm, optimizer, {name}=...,"
                        " critic=...)"
                    ),
                )
            found[name] = OptimizerState(other, root, prefix, name)
        elif isinstance(other, dict) or (
            hasattr(other, "state_dict") and hasattr(other, "load_state_dict")
        ):
            found[name] = ValueState(name, other)
        else:
            what = f"{name}={type(other).__name__} has no state_dict or no load_state_dict"
            raise RuntimeStateError(
                what,
                remedy=(
                    "pass an object with both, such as a scheduler or a StatefulDataLoader, or a"
                    " dict of values"
                ),
            )
    return found


def collect_companions(
    holder: Holder, others: Mapping[str, Any]
) -> tuple[dict[str, Saved], Others]:
    """Return the states of companions, and the content that only one rank writes. Every rank must
    call this.

    Args:
        holder: the model.
        others: the companions, by name.

    Raises:
        RuntimeStateError: on all ranks, if a state cannot be written as JSON and tensors, is
            incomplete on a rank that writes it, or differs between ranks. The message names the
            part of the state.
    """
    made: list[tuple[dict[str, Saved], Others]] = []

    def collect() -> None:
        """Encode the states of this rank."""
        parts = others_of(holder, others)
        for part in parts.values():
            part.state()
        made.append((parts, _encode_parts(parts)))

    by_all(collect, "what is saved with the model")
    parts, written = made[0]
    for part in parts.values():
        if isinstance(part, ModuleState) and isinstance(part.module, Holder):
            part.module.check_values()
    _check_alike(parts, written)
    return parts, written


def _encode_parts(parts: Mapping[str, Saved]) -> Others:
    values = {name: part.value() for name, part in parts.items() if isinstance(part, ValueState)}
    return Others.of(
        values, {name: _kind_of(part) for name, part in parts.items() if name not in values}
    )


def _check_alike(parts: Mapping[str, Saved], written: Others) -> None:
    """Check that the content that only one rank writes is equal on all ranks. Every rank must call
    this.

    Raises:
        RuntimeStateError: on all ranks, naming the value that differs.
    """
    marks: dict[str, int | None] = {
        name: crc32(text.encode()) for name, text in written.texts().items()
    }
    marks |= {name: sample_checksum(tensor) for name, tensor in written.tensors.items()}
    for part in parts.values():
        if isinstance(part, ModuleState):
            marks |= {
                key: sample_checksum(x)
                for key, x in part.state().items()
                if isinstance(x, Tensor) and not isinstance(x, DTensor)
            }
    everywhere = of_all(marks)
    for name in dict.fromkeys(name for each in everywhere for name in each):
        marks_of = {rank: each[name] for rank, each in enumerate(everywhere) if name in each}
        if different := [
            rank for rank, mark in marks_of.items() if mark != next(iter(marks_of.values()))
        ]:
            what = (
                f"{name} differs between ranks {next(iter(marks_of))} and {different[0]}, and only"
                " one value can be saved"
            )
            raise RuntimeStateError(what, where="what is saved with the model", remedy=_ALIKE)


def with_saved(
    parts: Mapping[str, Saved], saved: SavedOthers, place: Path, others: Mapping[str, Any]
) -> list[Saved]:
    """Return the state through which each companion is read, depending on how it was saved.

    Args:
        parts: the states of the companions, by name.
        saved: the states of the checkpoint.
        place: the checkpoint's folder, for error messages.
        others: the companions, by name.

    Raises:
        RuntimeStateError: if a companion was not saved, or was saved as another kind.
    """
    found: list[Saved] = []
    for name, part in parts.items():
        if name not in saved.kinds:
            what = f"the checkpoint has no {name!r}" + (
                f"; it has {', '.join(saved.kinds)}" if saved.kinds else ""
            )
            raise RuntimeStateError(
                what, where=str(place), remedy="save and load with the same names"
            )
        kind = saved.kinds[name]
        if kind == VALUE:  # earlier versions also saved modules and optimizers as values
            found.append(ValueState(name, others[name], saved))
        elif kind == _kind_of(part):
            found.append(part)
        else:
            what = (
                f"{name!r} of the checkpoint is the state of a {kind}, not of a"
                f" {type(others[name]).__name__}"
            )
            raise RuntimeStateError(
                what, where=str(place), remedy="load it into an object of the class that was saved"
            )
    return found


class _Root(nn.Module):
    """A module with the given submodules, so that parameter names begin with the submodule's
    name."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)


def _kind_of(part: Saved) -> str:
    return {ModuleState: MODULE, OptimizerState: OPTIMIZER}.get(type(part), VALUE)


def _key(name: str) -> str:
    return f"others{name}"


def _unwrap_module(module: nn.Module) -> nn.Module:
    """Return the compiled module behind a module that is planned at its first call. A module that
    was not called yet raises its error here."""
    if _has_own_state(module):
        return module
    next(iter(module.named_parameters()), None)
    inner = module._modules.get("module")
    return inner if isinstance(inner, Holder) else module


def _has_own_state(module: nn.Module) -> bool:
    """Return whether the module uses the state dict of `nn.Module` or of a compiled module."""
    cls = type(module)
    is_torchs = (
        cls.state_dict is nn.Module.state_dict and cls.load_state_dict is nn.Module.load_state_dict
    )
    return is_torchs or isinstance(module, Holder)


def _is_of_tensors(module: nn.Module) -> bool:
    """Return whether the module's state consists only of parameters and buffers."""
    return _has_own_state(module) and all(
        isinstance(x, Tensor) for x in tensors_of(module).values()
    )


def _is_of_distributed(optimizer: Optimizer) -> bool:
    return any(isinstance(p, DTensor) for group in optimizer.param_groups for p in group["params"])
