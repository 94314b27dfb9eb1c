"""How a model is called: a step of somebody's own loop is run on a batch with a stand-in, up to where it calls the model.

Compiling wants the shapes of a batch before the first step, and only the loop knows what of a batch it passes, and how.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import nn


class _Call(Exception):
    """How the model was called."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        super().__init__("the model is called")
        self.args, self.kwargs = args, kwargs


class _Called(nn.Module):
    """Stands for the model, and raises how it is called."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_model", model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise _Call(args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_model"], name)


def first_call(model: nn.Module, step: Callable[[nn.Module], object]) -> Any:
    """The arguments with which a step calls the model first, as `autopar.compile` takes examples; None where it does not call it.

    Args:
        step: runs with what stands for the model, up to its call; what it raises before that is raised.
    """
    try:
        step(_Called(model))
    except _Call as call:
        return call.args if call.args else call.kwargs
    return None


@contextlib.contextmanager
def same_random_numbers(device: torch.device) -> Iterator[None]:
    """What is drawn inside is drawn again after it."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


def may_be_read_once(loader: Any) -> bool:
    """Whether reading a batch of it may take the batch away: of what its own samples come from one after another, in this process."""
    data = getattr(loader, "dataset", loader)
    if not isinstance(data, torch.utils.data.IterableDataset):
        return data is loader and iter(loader) is loader
    return not type(data).__module__.startswith("datasets.") and getattr(loader, "num_workers", 0) == 0
