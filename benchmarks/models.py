"""The models of benchmarks as plain data, so that every row builds its model in a separate process.

`autopar.hf` has published sizes, and `benchmarks.zoo` many architectures. Here are four tiny models
of the zoo whose 8 heads and batch of 8 suit every mesh.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any

import torch
from torch import nn

from autopar import hf
from autopar.errors import AutoparError
from benchmarks import zoo
from benchmarks.zoo import libraries, unseen

Batch = dict[str, Any]
TINY: Mapping[str, str] = {
    "tiny-gpt2": zoo.spec_of("gpt2", n_head=8),
    "tiny-llama": zoo.spec_of("llama", num_attention_heads=8, num_key_value_heads=4),
    "tiny-bert": zoo.spec_of("bert", num_attention_heads=8),
    "tiny-vit": zoo.spec_of("vit", num_attention_heads=8, num_labels=16),
}
LISTS: Mapping[str, ModuleType] = {"zoo": zoo, "unseen": unseen, "libraries": libraries}
"""Name of the flag → module with `NAMES` and `build`."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How to build a model and a batch.

    Attributes:
        name: name in tables.
        text: a spec of `autopar.hf`.
        module: ``FILE.py:FUNCTION`` instead, which returns (model, batch).
        listed: the list of `LISTS` that has the name, instead.
    """

    name: str
    text: str = ""
    module: str = ""
    listed: str = ""

    @staticmethod
    def known(name: str) -> ModelSpec:
        """Return a tiny model or a published size.

        Raises:
            AutoparError: if there is none of that name.
        """
        text = TINY.get(name, name)
        hf.parse(text)
        return ModelSpec(name, text)

    @staticmethod
    def parse_hf(text: str) -> ModelSpec:
        """Read ``TYPE:JSON`` or ``TYPE/AutoClass:JSON``."""
        return ModelSpec(hf.parse(text)[0], text)

    @staticmethod
    def of(listed: str, name: str) -> ModelSpec:
        """Return a model of a list.

        Raises:
            AutoparError: if the list has none of that name.
        """
        if name not in LISTS[listed].NAMES:
            raise AutoparError(
                f"--{listed} has no {name!r}",
                remedy=f"use one of {', '.join(LISTS[listed].NAMES)}",
            )
        return ModelSpec(name, listed=listed)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def build(
        self,
        *,
        batch: int = 8,
        seq: int = 16,
        dtype: torch.dtype = torch.float32,
        meta: bool = False,
        seed: int = 0,
        device: str = "cpu",
    ) -> tuple[nn.Module, Batch]:
        """Build the model in training mode without dropout, and a batch of `batch` samples of
        length `seq`. On meta they have no values.

        A model of the zoo has its own length. The function of a module decides on everything except
        the dtype.
        """
        how: dict[str, Any] = {
            "dtype": dtype,
            "device": "meta" if meta else device,
            "batch": batch,
            "seed": seed,
        }
        if self.listed:
            built: tuple[nn.Module, Batch] = LISTS[self.listed].build(self.name, **how)
            return built
        if not self.module:
            return hf.build(self.text, seq=seq, **how)
        model, made = hf.load_function(self.module)
        return model.to(dtype), {
            name: zoo.cast(x, dtype) for name, x in by_name(model, made).items()
        }


def by_name(model: nn.Module, batch: Any) -> Batch:
    """Return a batch as keyword arguments. A mapping is returned unchanged, a tuple or list has the
    arguments in order, and a tensor is the only argument.

    Raises:
        AutoparError: if forward does not take the arguments, or not by name.
    """
    if isinstance(batch, Mapping):
        return dict(batch)
    signature = inspect.signature(model.forward)
    try:
        given = signature.bind(*(batch if isinstance(batch, (tuple, list)) else (batch,))).arguments
    except TypeError as error:
        raise AutoparError(
            f"forward{signature} does not take the module's batch: {error}",
            remedy=(
                "let the function return (model, batch), with a dict of forward's arguments as the"
                " batch"
            ),
        ) from error
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL)
    unnamed = [name for name in given if signature.parameters[name].kind in kinds]
    if unnamed:
        raise AutoparError(
            f"forward{signature} does not take {unnamed[0]!r} by name, as benchmarks pass it",
            remedy="wrap the model in a module whose forward names its arguments",
        )
    return given
