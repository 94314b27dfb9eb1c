"""Save and load the weights of a compiled module in the file format of the model's library:
``save_pretrained`` of transformers, or of peft for adapters.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from autopar.checkpoint.weight_files import WeightFiles
from autopar.checkpoint.weights import load_weights
from autopar.errors import RuntimeStateError
from autopar.integrations.libraries import library
from autopar.runtime.full_state import whole_values
from autopar.runtime.parameter_module import holder_of
from autopar.runtime.rank_comm import by_first

_ADAPTER = "adapter_model.safetensors"


def save_pretrained(
    module: nn.Module, model: nn.Module, folder: str | Path, **options: Any
) -> None:
    """Write what ``model.save_pretrained(folder)`` would write, with the weights of the compiled
    module. Call it on every rank.

    For a peft model, only the adapters are written, which ``PeftModel.from_pretrained`` reads. The
    first rank holds the full weights in host memory.

    Args:
        module: what `autopar.compile` returned for `model`. model: the plain model, of transformers
            or peft; its own weights are not read.
        options: options of ``save_pretrained`` of the model.

    Raises:
        RuntimeStateError: on all ranks, if the model has no ``save_pretrained``, is not the
            compiled one, or cannot be written.
    """
    if not hasattr(model, "save_pretrained"):
        message = f"{type(model).__name__} has no save_pretrained"
        raise RuntimeStateError(
            message,
            remedy=(
                "pass a model of transformers or peft, or write only the weights with "
                "autopar.save_weights"
            ),
        )
    state = whole_values(holder_of(module), names_saved(model))

    def save() -> None:
        """Write the model with the gathered weights."""
        model.save_pretrained(str(folder), state_dict=state, **options)

    by_first(save, str(folder), "check the reason; pass a writable folder")


def load_adapter(module: nn.Module, model: nn.Module, folder: str | Path) -> None:
    """Load adapters that peft wrote into a compiled module. Call it on every rank; each rank reads
    its own shards.

    Args:
        module: what `autopar.compile` returned for `model`. model: the plain peft model; its active
            adapter is read.
        folder: folder that `save_pretrained` of autopar or peft wrote.

    Raises:
        RuntimeStateError: on all ranks, if the files do not match this adapter. Nothing is changed
            then.
    """
    if not is_peft(model):
        message = f"{type(model).__name__} is not a peft model"
        raise RuntimeStateError(
            message,
            remedy=(
                "pass the result of get_peft_model; for other models, use autopar.load_weights"
            ),
        )
    adapter = _active(model)
    named = Path(folder) / adapter / _ADAPTER
    path = named if named.is_file() else Path(folder) / _ADAPTER
    names = by_first(lambda: _match_keys(model, adapter, path), str(path))
    load_weights(module, path, rename=lambda name: names.get(name, name), names=set(names))


def is_peft(model: nn.Module) -> bool:
    """Return whether a model is one of peft, without importing peft."""
    return any(
        each.__module__.startswith("peft.") and each.__name__ == "PeftModel"
        for each in type(model).__mro__
    )


def names_saved(model: nn.Module) -> Collection[str] | None:
    """Return the names in a peft model's state dict that its ``save_pretrained`` writes; None for
    all names, for other models.

    Call it on every rank. Only the first rank asks peft, which may look up the base model on the
    hub.
    """
    if not is_peft(model):
        return None
    keys_saved: Collection[str] | None = by_first(lambda: _all_keys(model), "the model")
    return keys_saved


def _active(model: Any) -> str:
    """Return the name of the active adapter.

    Raises:
        RuntimeStateError: if there are several.
    """
    active = (
        list(model.active_adapters) if hasattr(model, "active_adapters") else [model.active_adapter]
    )
    if len(active) != 1:
        raise RuntimeStateError(
            f"adapters {', '.join(active)} are active at the same time",
            remedy="activate one with model.set_adapter(name)",
        )
    return str(active[0])


def _keys(model: Any, adapter: str) -> Mapping[str, str]:
    """Map the names of parameters and buffers to their keys in peft's file.

    Raises:
        RuntimeStateError: if peft writes values that it computes from the plain model (prompt
            learning).
    """
    peft = library("peft", "saving adapters")
    state = model.state_dict()
    places = {id(value): name for name, value in state.items()}
    peft_state = peft.get_peft_model_state_dict(model, state_dict=state, adapter_name=adapter)
    if any(id(x) not in places for x in peft_state.values()):
        message = (
            f"files of adapter {adapter!r} ({model.peft_config[adapter].peft_type.value}) do not "
            "contain its parameters"
        )
        remedy = (
            "save and load all weights with autopar.save_weights and load_weights, or with "
            "autopar.Checkpoints"
        )
        raise RuntimeStateError(message, remedy=remedy)
    return {places[id(x)]: key for key, x in peft_state.items()}


def _all_keys(model: Any) -> set[str]:
    return {name for adapter in model.peft_config for name in _keys(model, adapter)}


def _match_keys(model: Any, adapter: str, path: Path) -> Mapping[str, str]:
    """Return the names and their keys in the file.

    Raises:
        RuntimeStateError: if the file has other keys.
    """
    keys = _keys(model, adapter)
    if not os.path.isfile(path):
        raise RuntimeStateError(
            "there is no adapter", remedy=f"pass the folder that contains {_ADAPTER}"
        )
    there = WeightFiles.of(path).files
    if different := sorted(set(there) ^ set(keys.values())):
        here = (
            "in the files, but not in the model"
            if different[0] in there
            else "in the model, but not in the files"
        )
        remedy = "build the model with the configuration of that adapter (adapter_config.json)"
        raise RuntimeStateError(f"{different[0]} is {here}", remedy=remedy)
    return keys
