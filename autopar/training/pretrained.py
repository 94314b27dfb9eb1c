"""Weights of a compiled module in the files of the model's own library: transformers' ``save_pretrained``, or peft's, of adapters alone."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import _StridedShard

from autopar.errors import RuntimeStateError
from autopar.run.holder import holder_of
from autopar.run.ranks import by_first, of_all, rank
from autopar.run.weight_files import WeightFiles
from autopar.run.weights import load_weights
from autopar.training.libraries import library

_ADAPTER = "adapter_model.safetensors"


def save_pretrained(module: nn.Module, model: nn.Module, folder: str | Path, **options: Any) -> None:
    """What ``model.save_pretrained(folder)`` would write, with the compiled module's weights; every rank calls it.

    Of a peft model these are its adapters, which ``PeftModel.from_pretrained`` reads. The first rank holds what is written, on its host.

    Args:
        module: what `autopar.compile` returned for `model`. model: the plain one, of transformers or peft; its own weights are not read.
        options: as ``save_pretrained`` of the model takes them.

    Raises:
        RuntimeStateError: on all ranks, where the model has no ``save_pretrained``, was not the compiled one, or cannot be written.
    """
    if not hasattr(model, "save_pretrained"):
        what = f"{type(model).__name__} has no save_pretrained"
        raise RuntimeStateError(what, remedy="pass a model of transformers or peft, or write the weights alone: autopar.save_weights")
    state = whole_values(module, names_saved(model))

    def save() -> None:
        model.save_pretrained(str(folder), state_dict=state, **options)  # type: ignore[operator]

    by_first(save, str(folder), "see the reason; name a folder that can be written to")


def load_adapter(module: nn.Module, model: nn.Module, folder: str | Path) -> None:
    """Read adapters that peft wrote into a compiled module; every rank calls it, and reads its own parts of them.

    Args:
        module: what `autopar.compile` returned for `model`. model: the plain peft model; its active adapter is read.
        folder: which `save_pretrained`, here or of peft, wrote.

    Raises:
        RuntimeStateError: on all ranks, where the files are not of this adapter. Nothing is changed then.
    """
    if not is_peft(model):
        what = f"{type(model).__name__} is no peft model"
        raise RuntimeStateError(what, remedy="pass what get_peft_model returned; of other models read weights by autopar.load_weights")
    adapter = _active(model)
    named = Path(folder) / adapter / _ADAPTER
    path = named if named.is_file() else Path(folder) / _ADAPTER
    names = by_first(lambda: _fitting(model, adapter, path), str(path), "see the reason")
    load_weights(module, path, rename=lambda name: names.get(name, name), names=set(names))


def is_peft(model: nn.Module) -> bool:
    """Whether it is a model of peft, which is not imported for that."""
    return any(each.__module__.startswith("peft.") and each.__name__ == "PeftModel" for each in type(model).__mro__)


def names_saved(model: nn.Module) -> Collection[str] | None:
    """Of a peft model the names in its state dict of what its ``save_pretrained`` writes; None for all, as of other models.

    Every rank calls it. The first alone asks peft, which may look the base model up on the hub.
    """
    if not is_peft(model):
        return None
    found: Collection[str] | None = by_first(lambda: _all_keys(model), "the model", "see the reason")
    return found


def whole_values(module: nn.Module, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Whole values of what a compiled module saves, on the first rank's host, under all their names; nothing on the others.

    Every rank calls it. Of tied ones there is one tensor.

    Args:
        names: of which; by default of all.

    Raises:
        RuntimeStateError: on all ranks, where values are missing, or torch cannot join one.
    """
    holder = holder_of(module)
    holder.check_values()
    held = {owner: own for owner, own in holder.same_names().items() if names is None or any(name in names for name in own)}
    everywhere = of_all(held)
    _check_joined({own[0]: holder.stored(own[0]) for own in held.values()})
    found = dict[str, Tensor]()
    for owner in dict.fromkeys(owner for each in everywhere for owner in each):
        holders = [number for number, each in enumerate(everywhere) if owner in each]
        value = _whole(holder.stored(held[owner][0])) if owner in held else None
        if holders[0] != 0:  # of another stage
            box = [value if rank() == holders[0] else None]
            dist.broadcast_object_list(box, src=holders[0])
            value = box[0]
        if rank() == 0 and value is not None:
            own = everywhere[holders[0]][owner]
            found |= {name: value for name in own if names is None or name in names}
    return found


def _check_joined(held: Mapping[str, Tensor]) -> None:
    """Raises RuntimeStateError on all ranks where torch 2.11 cannot join what is split inside a dim, as heads of a fused projection are."""
    if torch.__version__ >= (2, 12):
        return
    apart = [name for name, x in held.items() if isinstance(x, DTensor) and any(isinstance(p, _StridedShard) for p in x.placements)]
    if found := sorted({name for of_one in of_all(apart) for name in of_one}):
        what = f"torch {torch.__version__} cannot join {found[0]!r}, which is split inside a dim"
        raise RuntimeStateError(what, remedy="write weights by autopar.save_weights, states by autopar.Checkpoints, or use a newer torch")


def _whole(stored: Tensor) -> Tensor:
    value = stored.detach()
    return (value.full_tensor() if isinstance(value, DTensor) else value).cpu()


def _active(model: Any) -> str:
    """Raises RuntimeStateError where there are several."""
    active = list(model.active_adapters) if hasattr(model, "active_adapters") else [model.active_adapter]
    if len(active) != 1:
        raise RuntimeStateError(f"adapters {', '.join(active)} are active at once", remedy="activate one: model.set_adapter(name)")
    return str(active[0])


def _keys(model: Any, adapter: str) -> Mapping[str, str]:
    """Name of a parameter or buffer → its key in peft's file.

    Raises:
        RuntimeStateError: where peft writes something else, which it makes of the plain model (prompt learning).
    """
    peft = library("peft", "saving adapters")
    state = model.state_dict()
    places = {id(value): name for name, value in state.items()}
    wanted = peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    if any(id(x) not in places for x in wanted.values()):
        what = f"files of adapter {adapter!r} ({model.peft_config[adapter].peft_type.value}) hold something else than its parameters"
        remedy = "write and read all weights: autopar.save_weights and load_weights, or autopar.Checkpoints"
        raise RuntimeStateError(what, remedy=remedy)
    return {places[id(x)]: key for key, x in wanted.items()}


def _all_keys(model: Any) -> set[str]:
    return {name for adapter in model.peft_config for name in _keys(model, adapter)}


def _fitting(model: Any, adapter: str, path: Path) -> Mapping[str, str]:
    """Names, and their keys in the file.

    Raises:
        RuntimeStateError: where the file has others.
    """
    keys = _keys(model, adapter)
    if not os.path.isfile(path):
        raise RuntimeStateError("there is no adapter", remedy=f"name the folder that holds {_ADAPTER}")
    there = WeightFiles.of(path).files
    if different := sorted(set(there) ^ set(keys.values())):
        here = "in the files, and not in the model" if different[0] in there else "in the model, and not in the files"
        remedy = "build the model with the configuration of that adapter (adapter_config.json)"
        raise RuntimeStateError(f"{different[0]} is {here}", remedy=remedy)
    return keys
