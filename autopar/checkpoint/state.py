"""States of modules and optimizers in a checkpoint, and the check that they match.

States are flat and keyed by parameter names, so that all stages, which have different parameters,
write into one checkpoint. An optimizer that has made no step has no state. To determine the keys of
the state, torch would make one step with zero gradients, which would change later steps (`step`
becomes 1). Saving therefore makes no such step. Loading removes the state that torch created for
parameters without saved state.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import LBFGS, Optimizer

from autopar.checkpoint.contents import SavedValues
from autopar.checkpoint.loading import load_parts, read_metadata
from autopar.checkpoint.safetensors_files import keeps_values
from autopar.errors import RuntimeStateError
from autopar.runtime.dtensor_checkpoints import checkpointable
from autopar.runtime.parameter_module import Holder
from autopar.runtime.rank_comm import of_all, rank

log = logging.getLogger("autopar")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_MODEL, _OPTIMIZER = "model.", "optimizer."


class Saved(Protocol):
    """An object whose state is saved in a checkpoint."""

    def state(self) -> dict[str, Any]:
        """Return the state to save, by key. Tensors are not copied."""

    def prepare_read(self, saved: Metadata) -> dict[str, Any]:
        """Return the state to read, by key: tensors to read into, and values to replace."""

    def faults(self, wanted: Mapping[str, Any], saved: Metadata) -> list[str]:
        """Return a line for each mismatch between the object and the checkpoint. Every rank must
        call this.

        Args:
            wanted: the result of `prepare_read`.
            saved: the metadata of the checkpoint.
        """

    def undo(self) -> None:
        """Restore the state from before `prepare_read`."""

    def take(self, read: Mapping[str, Any]) -> None:
        """Set the object to the state that was read."""


@dataclass
class ModuleState:
    """The state of a module, compiled or not.

    Args:
        module: the module.
        prefix: the prefix of its keys in the checkpoint.
        label: its name in error messages.
    """

    module: nn.Module
    prefix: str = _MODEL
    label: str = "the model"

    def state(self) -> dict[str, Any]:
        """Return the parameters and buffers, and the random state of a compiled companion."""
        found = {
            self.prefix + name: checkpointable(value)
            for name, value in tensors_of(self.module).items()
        }
        return {**found, **self._random_state()}

    def prepare_read(self, saved: Metadata) -> dict[str, Any]:
        """Return the tensors of the module, and the random state if the checkpoint has one."""
        known = saved.state_dict_metadata
        drawn = {key: value for key, value in self._random_state().items() if key in known}
        return {
            **{key: value for key, value in self.state().items() if key.startswith(self.prefix)},
            **drawn,
        }

    def faults(self, wanted: Mapping[str, Any], saved: Metadata) -> list[str]:
        """Return a line for each tensor that is missing in the checkpoint, has another shape, or is
        missing in the module on all ranks.

        Args:
            wanted: the result of `prepare_read`.
            saved: the metadata of the checkpoint.
        """
        here = set().union(*of_all({key for key in wanted if key.startswith(self.prefix)}))
        beyond = [
            key
            for key in saved.state_dict_metadata
            if key.startswith(self.prefix) and key not in here
        ]
        bare = self.label.removeprefix("the ")
        return [
            *_find_misfits(wanted, saved, self),
            *(f"{key.removeprefix(self.prefix)} of its {bare} is missing here" for key in beyond),
        ]

    def undo(self) -> None:
        """Do nothing, since `prepare_read` changes nothing."""

    def take(self, read: Mapping[str, Any]) -> None:
        """Load the state into a plain module, or set the random state of a compiled module."""
        if not isinstance(self.module, Holder):  # tensors of a compiled module were read in place
            own = {
                key.removeprefix(self.prefix): value
                for key, value in read.items()
                if key.startswith(self.prefix)
            }
            self.module.load_state_dict({**self.module.state_dict(), **own})
        elif (drawn := read.get(self._random_key)) is not None:
            self.module.random_state = drawn

    @property
    def _random_key(self) -> str:
        return f"{self.prefix.removesuffix('.')}!random_state"

    def _random_state(self) -> dict[str, Any]:
        """Return the random state of a compiled companion, by key. The random state of the model is
        in `autopar.json`."""
        if (
            self.prefix == _MODEL
            or not isinstance(self.module, Holder)
            or self.module.random_state is None
        ):
            return {}
        return {self._random_key: self.module.random_state}


@dataclass
class OptimizerState:
    """The state of an optimizer over distributed parameters.

    Args:
        optimizer: the optimizer.
        root: a module whose parameter names are the saved names of the optimizer's parameters.
        prefix, label: see `ModuleState`.
    """

    optimizer: Optimizer
    root: nn.Module
    prefix: str = _OPTIMIZER
    label: str = "the optimizer"
    _before: dict[Any, Any] | None = field(default=None, init=False)
    _made: dict[str, Any] = field(default_factory=dict, init=False)
    _never: frozenset[str] = field(default=frozenset(), init=False)

    def state(self) -> dict[str, Any]:
        """Return the settings and, if the optimizer has made a step, the state tensors."""
        found = {**self._groups(), **(self._flat_state() if self.optimizer.state else {})}
        return {key: _plain(value) for key, value in found.items() if not _is_of_this_run(key)}

    def prepare_read(self, saved: Metadata) -> dict[str, Any]:
        """Have torch create the state of all parameters. Return the part of it that is read, which
        excludes parameters without saved state."""
        parameters = [
            p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad
        ]
        if not all(p in self.optimizer.state for p in parameters):
            # torch creates missing states only if the optimizer has no state at all
            self._before = dict(self.optimizer.state)
            self.optimizer.state.clear()
        with _without_gradients(parameters):
            self._made = self._flat_state()
        stepped = {
            self._parameter_of(key)
            for key in saved.state_dict_metadata
            if key.startswith(self._of_state)
        }
        self._never = frozenset(
            k
            for k in self._made
            if k.startswith(self._of_state) and self._parameter_of(k) not in stepped
        )
        return {
            key: value
            for key, value in self._made.items()
            if key not in self._never and not _is_of_this_run(key)
        }

    def faults(self, wanted: Mapping[str, Any], saved: Metadata) -> list[str]:
        """Return a line for each value that is missing in the checkpoint or has another shape or
        dtype, and for each group whose parameters have different settings in the checkpoint.

        Args:
            wanted: the result of `prepare_read`.
            saved: the metadata of the checkpoint.
        """
        return [*_find_misfits(wanted, saved, self), *self._find_divided_groups(saved)]

    def _find_divided_groups(self, saved: Metadata) -> Iterator[str]:
        """Yield a line for each setting of a group that differs between the group's parameters in
        the checkpoint. A group has only one value of a setting, so loading would change the other
        parameters' setting."""
        if not isinstance(saved.planner_data, SavedValues):  # of an earlier format
            return
        values = saved.planner_data
        names = {parameter: name for name, parameter in self.root.named_parameters()}
        for group in self.optimizer.param_groups:
            of_group = [names[parameter] for parameter in group["params"] if parameter in names]
            for setting in group.keys() - {"params"}:
                keys = {name: self._key_of_setting(name, setting) for name in of_group}
                known = [(name, values[key]) for name, key in keys.items() if key in values]
                different = next((each for each in known if each[1] != known[0][1]), None)
                if different is not None and not _is_of_this_run(keys[known[0][0]]):
                    (first, one), (other, two) = known[0], different
                    yield (
                        f"{first} has {setting}={one!r:.40} and {other} has {two!r:.40} in the"
                        " checkpoint, but both are in one group here"
                    )

    def undo(self) -> None:
        """Restore the state from before `prepare_read`."""
        if self._before is not None:
            self.optimizer.state.clear()
            self.optimizer.state.update(self._before)

    def take(self, read: Mapping[str, Any]) -> None:
        """Load the state, and remove the state of parameters without saved state."""
        given = {
            key.removeprefix(self.prefix): value
            for key, value in {**self._made, **read}.items()
            if key.startswith(self.prefix)
        }
        with _without_empty_groups(self.optimizer):
            set_optimizer_state_dict(self.root, self.optimizer, given, options=_FLAT)
        names = {self._parameter_of(key) for key in self._never}
        for name, parameter in self.root.named_parameters():
            if name in names:
                self.optimizer.state.pop(parameter, None)

    @property
    def _of_state(self) -> str:
        return f"{self.prefix}state."

    def _key_of_setting(self, name: str, setting: str) -> str:
        return f"{self.prefix}param_groups.{name}.{setting}"

    def _parameter_of(self, key: str) -> str:
        return key.removeprefix(self._of_state).rpartition(".")[0]

    def _flat_state(self) -> dict[str, Any]:
        """Return torch's flat state dict of the optimizer, by key. torch creates missing states."""
        with _without_empty_groups(self.optimizer):
            found = get_optimizer_state_dict(self.root, self.optimizer, options=_FLAT)
        return {self.prefix + key: value for key, value in found.items()}

    def _groups(self) -> dict[str, Any]:
        """Return the settings of the groups for each parameter, in the form of torch's flat state
        dict."""
        names = {parameter: name for name, parameter in self.root.named_parameters()}
        return {
            self._key_of_setting(names[parameter], setting): value
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            for setting, value in group.items()
            if setting != "params"
        }


def state_of(parts: Sequence[Saved]) -> dict[str, Any]:
    """Return the states of all parts, by key."""
    return {key: value for part in parts for key, value in part.state().items()}


def tensors_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's state dict without the entries that are constant in compiled modules."""
    constant = {
        f"{path}.{name}" if path else name
        for path, each in module.named_modules()
        if isinstance(each, Holder)
        for name in each.extra_state_names()
    }
    return {name: value for name, value in module.state_dict().items() if name not in constant}


def has_lists(optimizer: Optimizer) -> bool:
    """Return whether the optimizer's state has lists, as with LBFGS. They do not belong to single
    parameters, so torch cannot flatten such a state."""
    values = (value for state in optimizer.state.values() for value in state.values())
    return isinstance(optimizer, LBFGS) or any(isinstance(value, list | tuple) for value in values)


def read_states(place: Path, parts: Sequence[Saved]) -> tuple[str, ...]:
    """Read the states of all parts from a checkpoint. Every rank must call this.

    Args:
        place: the checkpoint's folder.
        parts: the objects whose states are read.

    Returns:
        ``("optimizer",)`` if the checkpoint has the state of an optimizer that was not read.

    Raises:
        RuntimeStateError: on all ranks, if the checkpoint belongs to another model or optimizer. In
            this case, no object is changed.
    """
    saved = read_metadata(place)
    try:
        wanted = [part.prepare_read(saved) for part in parts]
        _check_same(parts, wanted, saved, place)
        state = {key: value for each in wanted for key, value in each.items()}
        _log_conversions(state, saved)
        load_parts(state, place)
    except RuntimeStateError:
        for part in parts:
            part.undo()
        raise
    for part, keys in zip(parts, wanted, strict=True):
        part.take({key: state[key] for key in keys})
    reads_optimizer = any(
        isinstance(part, OptimizerState) and part.prefix == _OPTIMIZER for part in parts
    )
    return () if reads_optimizer or not _has_optimizer(saved) else ("optimizer",)


def check_tied(names: Iterable[Sequence[str]], tied: Mapping[str, str] | None, place: Path) -> None:
    """Check that all names of a tensor are names of one tensor in a checkpoint. Every rank must
    call this.

    Args:
        names: the names of each tensor of the model.
        tied: the first name of each tied tensor of the checkpoint, by its other names; None if the
            checkpoint, which an earlier version wrote, does not tell.
        place: the checkpoint's folder, for the message.

    Raises:
        RuntimeStateError: on all ranks, if the checkpoint has several tensors for one tensor of the
            model, of which only one could be loaded.
    """
    if tied is None:
        return
    wrong = [
        (first, other)
        for first, *others in names
        for other in others
        if tied.get(first, first) != tied.get(other, other)
    ]
    if found := next(filter(None, of_all(wrong)), None):
        first, other = found[0]
        what = (
            f"{first!r} and {other!r} are one tensor of the model, but two tensors in the"
            " checkpoint"
        )
        remedy = (
            "load it into a model that does not tie them; to tie them, start from exported weights:"
            " checkpoints.export(folder), then autopar.load_weights(pm, folder)"
        )
        raise RuntimeStateError(what, where=str(place), remedy=remedy)


def keys_of_model(place: Path, tied: Mapping[str, str]) -> dict[str, str]:
    """Return the keys of a checkpoint's parameters and buffers by name, without tied names.

    Args:
        place: the checkpoint's folder.
        tied: the first name of each tied tensor, by its other names.
    """
    known = read_metadata(place).state_dict_metadata
    keys = (
        key
        for key, of in known.items()
        if key.startswith(_MODEL) and isinstance(of, TensorStorageMetadata)
    )
    return {name: key for key in keys if (name := key.removeprefix(_MODEL)) not in tied}


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """Remove groups without parameters during a call to torch. torch 2.13 names a group by its
    first parameter, and fails if there is none. Settings of such groups are not saved."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups[:] = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)  # loading creates new groups in the same order
        optimizer.param_groups[:] = [next(filled) if group["params"] else group for group in groups]


@contextmanager
def _without_gradients(parameters: Sequence[Tensor]) -> Iterator[None]:
    """Remove the gradients during a call to torch, since torch creates no state for a parameter
    that has a gradient."""
    gradients = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    try:
        yield
    finally:
        for p, gradient in zip(parameters, gradients, strict=True):
            p.grad = gradient


def _is_of_this_run(key: str) -> bool:
    """Return whether the key refers to a group's parameter names, which differ between ranks."""
    return key.endswith(".param_names")


def _plain(value: Any) -> Any:
    """Convert the numpy values of a setting to Python numbers. Schedulers may compute learning
    rates with numpy."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.tolist() if type(value).__module__ == "numpy" else value


def _has_optimizer(saved: Metadata) -> bool:
    return any(key.startswith(_OPTIMIZER) for key in saved.state_dict_metadata)


def _find_misfits(
    wanted: Mapping[str, Any], saved: Metadata, part: ModuleState | OptimizerState
) -> list[str]:
    """Return a line for each key that the checkpoint lacks or has in another shape, or in a dtype
    whose values the tensor cannot hold."""
    wrong = []
    for key, value in wanted.items():
        name, there = key.removeprefix(part.prefix), saved.state_dict_metadata.get(key)
        if there is None:
            wrong.append(f"{name} of {part.label} is missing")
        elif not isinstance(there, TensorStorageMetadata) or not isinstance(value, Tensor):
            continue
        elif there.size != value.shape:
            wrong.append(
                f"{name} is {tuple(there.size)} in the checkpoint, {tuple(value.shape)} here"
            )
        elif not keeps_values(there.properties.dtype, value.dtype):
            wrong.append(
                f"{name} is {there.properties.dtype} in the checkpoint, {value.dtype} here"
            )
    return wrong


def _log_conversions(state: Mapping[str, Any], saved: Metadata) -> None:
    """Log the tensors that are converted to another dtype. Every rank must call this."""
    known = saved.state_dict_metadata
    here = {
        key: (str(there.properties.dtype), str(value.dtype))
        for key, value in state.items()
        if isinstance(there := known.get(key), TensorStorageMetadata)
        and isinstance(value, Tensor)
        and there.properties.dtype != value.dtype
    }
    converted = {key: dtypes for of_rank in of_all(here) for key, dtypes in of_rank.items()}
    if converted and rank() == 0:
        key, (before, after) = next(iter(converted.items()))
        log.warning(
            "%d tensors of the checkpoint are converted to another dtype: %s from %s to %s%s",
            len(converted),
            key,
            before,
            after,
            ", …" if len(converted) > 1 else "",
        )


def _check_same(
    parts: Sequence[Saved], wanted: Sequence[Mapping[str, Any]], saved: Metadata, place: Path
) -> None:
    """Check on all ranks that the checkpoint contains all values to read, in the same shapes, and
    no other parameters and buffers of the modules.

    Raises:
        RuntimeStateError: on all ranks, if there is a mismatch. The message lists up to three.
    """
    if any(key.startswith(_OPTIMIZER) for each in wanted for key in each) and not _has_optimizer(
        saved
    ):
        remedy = "load only the model: checkpoints.load(pm)"
        raise RuntimeStateError("the checkpoint has no optimizer", where=str(place), remedy=remedy)
    wrong = [
        line for part, keys in zip(parts, wanted, strict=True) for line in part.faults(keys, saved)
    ]
    found = [(number, lines) for number, lines in enumerate(of_all(wrong)) if lines]
    if found:
        number, lines = found[0]
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        what = (
            f"the checkpoint does not match the model or optimizer: {'; '.join(lines[:3])}{more}"
        ) + (f" (rank {number})" if number else "")
        raise RuntimeStateError(
            what,
            where=str(place),
            remedy="load it into the model and optimizer that were saved, or choose another folder",
        )
