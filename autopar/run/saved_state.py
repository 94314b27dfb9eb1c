"""What stands in a checkpoint: the states of a model, of its optimizer and of what else was passed, and whether they fit.

A model's and an optimizer's state are flat, by parameters' names: stages, each with parameters of its own, write into one checkpoint.
An optimizer that has made no step has no state: torch would make one step with gradients of 0 to know what there is, which changes what
follows (`step` is 1 then). So none is made to save one, and what torch makes to load one is dropped where nothing was saved for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim import Optimizer

from autopar.errors import RuntimeStateError
from autopar.run.holder import Holder
from autopar.run.ranks import of_all
from autopar.run.saved_loading import load_parts, read_metadata
from autopar.run.saved_others import read_all_others

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_MODEL, _STATE = "model.", "optimizer.state."


def state_of(holder: Holder, optimizer: Optimizer | None, *, weights: bool = True) -> dict[str, Any]:
    """What is saved of both; tensors are those that they hold. Without `weights` of the optimizer alone."""
    groups = {} if optimizer is None else _groups(holder, optimizer)
    state = {} if optimizer is None or not optimizer.state else _optimizer_state(holder, optimizer)
    settled = {key: _plain(value) for key, value in {**groups, **state}.items()}
    return {**(_model_state(holder) if weights else {}), **settled}


def states_of(others: Mapping[str, Any]) -> dict[str, Any]:
    """The states of others, by name. Raises RuntimeStateError for one that has none."""
    return {name: _stateful(name, other).state_dict() for name, other in others.items()}


def read_others(place: Path, others: Mapping[str, Any]) -> Mapping[str, Any]:
    """What was saved of others, by name.

    Raises:
        RuntimeStateError: where one of them was not saved, or what was saved is damaged.
    """
    for name, other in others.items():
        _stateful(name, other)
    found = read_all_others(place)
    missing = [name for name in others if name not in found]
    if missing:
        what = f"the checkpoint has no {missing[0]!r}" + (f"; it has {', '.join(found)}" if found else "")
        raise RuntimeStateError(what, where=str(place), remedy="save and load with the same names")
    return found


def read_state(place: Path, holder: Holder, optimizer: Optimizer | None, *, weights: bool = True) -> tuple[str, ...]:
    """Read the model where it lies, and the optimizer's state; what was saved beside these and not asked for. `weights`: as of `state_of`.

    Raises:
        RuntimeStateError: where it is of another model or optimizer. Nothing is changed then.
    """
    saved = read_metadata(place)
    fresh = optimizer is not None and not optimizer.state
    state = {} if optimizer is None else _optimizer_state(holder, optimizer)
    never = _never_stepped(state, saved)
    wanted = {**(_model_state(holder) if weights else {}), **{key: value for key, value in state.items() if key not in never}}
    try:
        _check_same(wanted, saved, place)
        load_parts(wanted, place)
    except RuntimeStateError:
        if optimizer is not None and fresh:  # torch has made one, to know what there is to load
            optimizer.state.clear()
        raise
    if optimizer is None:
        return ("optimizer",) if any(key.startswith("optimizer.") for key in saved.state_dict_metadata) else ()
    given = {key.removeprefix("optimizer."): value for key, value in {**state, **wanted}.items() if key.startswith("optimizer.")}
    with _without_empty_groups(optimizer):
        set_optimizer_state_dict(holder, optimizer, given, options=_FLAT)
    names = {_parameter_of(key) for key in never}
    for name, parameter in holder.named_parameters():
        if name in names:
            optimizer.state.pop(parameter, None)
    return ()


def keys_of_model(place: Path, tied: Mapping[str, str]) -> dict[str, str]:
    """Names of a checkpoint's parameters and buffers, of each one, and their keys in it."""
    known = read_metadata(place).state_dict_metadata
    keys = (key for key, of in known.items() if key.startswith(_MODEL) and isinstance(of, TensorStorageMetadata))
    return {name: key for key in keys if (name := key.removeprefix(_MODEL)) not in tied}


def _model_state(holder: Holder) -> dict[str, Any]:
    return {_MODEL + name: value for name, value in holder.state_dict().items()}


def _optimizer_state(holder: Holder, optimizer: Optimizer) -> dict[str, Any]:
    with _without_empty_groups(optimizer):
        return {f"optimizer.{key}": value for key, value in get_optimizer_state_dict(holder, optimizer, options=_FLAT).items()}


@contextmanager
def _without_empty_groups(optimizer: Optimizer) -> Iterator[None]:
    """As of torch 2.13, torch names a group by its first parameter, and fails where there is none. Its settings are not saved."""
    groups = list(optimizer.param_groups)
    optimizer.param_groups[:] = [group for group in groups if group["params"]]
    try:
        yield
    finally:
        filled = iter(optimizer.param_groups)  # loading makes new ones, in the same order
        optimizer.param_groups[:] = [next(filled) if group["params"] else group for group in groups]


def _groups(holder: Holder, optimizer: Optimizer) -> dict[str, Any]:
    """Settings, as torch has them where they are flat."""
    names = {parameter: name for name, parameter in holder.named_parameters()}
    return {
        f"optimizer.param_groups.{names[parameter]}.{setting}": value
        for group in optimizer.param_groups
        for parameter in group["params"]
        for setting, value in group.items()
        if setting != "params"
    }


def _plain(value: Any) -> Any:
    """A setting without numpy, which is not read back: schedulers compute rates with it."""
    if type(value) in (list, tuple):
        return type(value)(map(_plain, value))
    return value.tolist() if type(value).__module__ == "numpy" else value


def _stateful(name: str, other: Any) -> Any:
    if not (hasattr(other, "state_dict") and hasattr(other, "load_state_dict")):
        what = f"{name}={type(other).__name__} has no state_dict and load_state_dict"
        raise RuntimeStateError(what, remedy="pass what has both, such as a scheduler or a StatefulDataLoader")
    return other


def _parameter_of(key: str) -> str:
    return key.removeprefix(_STATE).rpartition(".")[0]


def _never_stepped(state: Mapping[str, Any], saved: Metadata) -> frozenset[str]:
    """Keys of the state of parameters for which none was saved, since they had no gradient until then."""
    stepped = {_parameter_of(key) for key in saved.state_dict_metadata if key.startswith(_STATE)}
    return frozenset(key for key in state if key.startswith(_STATE) and _parameter_of(key) not in stepped)


def _check_same(wanted: Mapping[str, Any], saved: Metadata, place: Path) -> None:
    """That the checkpoint has all that is wanted, in the same shapes, on every rank, and no more of the model."""
    known, wrong = saved.state_dict_metadata, []
    if any(key.startswith("optimizer.") for key in wanted) and not any(key.startswith("optimizer.") for key in known):
        remedy = "load the model alone: checkpoints.load(pm)"
        raise RuntimeStateError("the checkpoint holds no optimizer", where=str(place), remedy=remedy)
    for key, value in wanted.items():
        kind, _, name = key.partition(".")
        there = known.get(key)
        if there is None:
            wrong.append(f"{name} of the {kind} is not in it")
        elif isinstance(there, TensorStorageMetadata) and isinstance(value, Tensor) and there.size != value.shape:
            wrong.append(f"{name} is {tuple(there.size)} in it, {tuple(value.shape)} here")
    here = set().union(*of_all({key for key in wanted if key.startswith(_MODEL)}))
    beyond = [key.removeprefix(_MODEL) for key in known if key.startswith(_MODEL) and key not in here]
    wrong += [f"{name} of its model is not in this one" for name in beyond]
    found = [(rank, lines) for rank, lines in enumerate(of_all(wrong)) if lines]
    if found:
        rank, lines = found[0]
        more = f" and {len(lines) - 3} more" if len(lines) > 3 else ""
        what = f"the checkpoint is of another model or optimizer: {'; '.join(lines[:3])}{more}" + (f" (rank {rank})" if rank else "")
        raise RuntimeStateError(what, where=str(place), remedy="load it into what it was saved of, or name another folder")
